"""Files that survive an interruption: atomic writes, records as JSON lines, versions of packages."""

import contextlib
import dataclasses
import errno
import json
import math
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from minimand.errors import DataError

from .experiment import Metrics
from .untrusted import appending, content

__all__ = [
    "Records",
    "as_json",
    "atomically",
    "encoded",
    "read_json",
    "slug",
    "sweep",
    "versions",
    "write_json",
    "writing",
]


_PARTIAL = ".partial"
# The most bytes and levels of a JSON file; the largest result of this package has 250 kB and 5 levels.
_LARGEST = 1 << 26
_DEPTH = 20
# The most values of a JSON file: an empty list is two bytes there, and a hundred in memory.
_VALUES = 1 << 22


def slug(name: str) -> str:
    """A part's name as the name of a directory, without a way out of it.

    >>> slug("D-D, Prox-SG τ=½"), slug("../x"), slug("..")
    ('D-D_Prox-SG_τ_½', 'x', '_')
    """
    words = "".join(letter if letter.isalnum() or letter in "-." else " " for letter in name).split()
    return "_".join(words).lstrip("._") or "_"


def encoded(text: str) -> bytes:
    """The text in UTF-8; half of a surrogate pair, which UTF-8 cannot hold, is written as in JSON."""
    return text.encode("utf-8", "backslashreplace")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the operating system while ``path`` is written into a sentence."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        # torch.save meets the error of a full disk with one of its own.
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise DataError(
            f"{path} cannot be written ({cause.strerror or cause}): make room or get permission there, or name another "
            f"place; --resume continues a run"
        ) from error


class atomically:
    """Open a file for writing; it gets its name only after it is complete and on disk.

    >>> path = Path(tempfile.mkdtemp()) / "a.txt"
    >>> with atomically(path) as file:
    ...     _ = file.write(b"whole")
    >>> path.read_bytes()
    b'whole'
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> IO[bytes]:
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(_PARTIAL, ".", self.path.parent)
        self._partial = Path(name)
        self._file = os.fdopen(handle, "wb")
        return self._file

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        with writing(self.path):
            try:
                with self._file:
                    if error is not None:
                        raise error
                    self._file.flush()
                    os.fsync(self._file.fileno())
                # mkstemp creates files that only their owner can read; results should be readable by others.
                umask = os.umask(0)
                os.umask(umask)
                self._partial.chmod(0o666 & ~umask)
                self._partial.replace(self.path)
            except BaseException:
                self._partial.unlink(missing_ok=True)
                raise


def sweep(directory: Path) -> None:
    """Remove unfinished files of killed processes from a directory in which no other process writes."""
    for path in directory.rglob(f".*{_PARTIAL}"):
        with contextlib.suppress(OSError):
            path.unlink()


def as_json(value: Any) -> str:
    """JSON in one line; NaN and infinities become the strings "nan", "inf" and "-inf".

    >>> as_json({"a": [1, math.inf]})
    '{"a": [1, "inf"]}'
    """
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically; NaN and infinities become the strings "nan", "inf" and "-inf"."""
    with atomically(path) as file:
        file.write(encoded(json.dumps(_plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"))


def read_json(path: Path, keys: Mapping[str, type] | None = None) -> dict[str, Any]:
    """Read the dictionary that :func:`write_json` wrote, and check that it has ``keys`` with values of these types."""
    remedy = "delete it and run the experiment again"
    try:
        value = _parsed(_json(path))
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): check that it is a file, and its permissions"
        ) from error
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); {remedy}") from error
    if missing := [key for key in keys or () if key not in value]:
        raise DataError(f"{path} lacks {', '.join(missing)}; {remedy}")
    for key, kind in (keys or {}).items():
        if not isinstance(value[key], int | float if kind is float else kind):
            found = type(value[key]).__name__
            raise DataError(f"{path} has a {found} instead of a {kind.__name__} as its {key}; {remedy}")
    return value


def _json(path: Path) -> bytes:
    """The bytes of a JSON file, or of lines of JSON, with a bounded number of values."""
    raw = content(path, _LARGEST)
    if sum(map(raw.count, (b",", b"[", b"{", b"\n"))) > _VALUES:
        raise ValueError(f"it holds more than {_VALUES:,} values")
    return raw


def _parsed(raw: bytes) -> dict[str, Any]:
    """A JSON dictionary without repeated keys; ValueError for everything else."""
    try:
        value = _numbers(json.loads(raw.decode(), object_pairs_hook=_unique), _DEPTH)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__} instead of a dictionary")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Path):
        return str(value)
    # Tensors and numpy scalars of one element.
    return _plain(value.item()) if hasattr(value, "item") else value


def _numbers(value: Any, depth: int) -> Any:
    if not depth:
        raise ValueError(f"it has more than {_DEPTH} levels")
    if isinstance(value, dict):
        return {key: _numbers(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item, depth - 1) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


@dataclasses.dataclass(frozen=True)
class Records:
    """Metrics as JSON lines. A line that an interruption cut off is ignored."""

    path: Path

    def append(self, record: Metrics) -> None:
        """Append one line and hand it to the operating system at once."""
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with appending(self.path) as file:
                line = _line(record)
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def truncate(self, count: int) -> None:
        """Keep the first ``count`` records."""
        kept = list(self)[:count]
        with atomically(self.path) as file:
            file.writelines(map(_line, kept))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.path.is_file():
            return
        try:
            yield from map(_parsed, _json(self.path).split(b"\n")[:-1])
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path} is damaged ({error}); delete its folder and run again") from error

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _line(record: Metrics) -> bytes:
    return encoded(as_json(record) + "\n")


def versions() -> dict[str, str]:
    """Versions of the packages and of Python, and the processor's instruction set."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found = {}
    for package in ("minimand", "torch", "numpy", "scipy", "scikit-learn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["python"] = platform.python_version()
    found["machine"] = f"{platform.system()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return found

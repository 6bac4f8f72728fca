"""Files that survive an interruption: atomic writes, records as JSON lines, versions of packages."""

import dataclasses
import json
import math
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from minimand.errors import DataError

from .experiment import Metrics

__all__ = ["Records", "atomically", "read_json", "slug", "sweep", "versions", "write_json"]


_PARTIAL = ".partial"


def slug(name: str) -> str:
    """A part's name as the name of a directory.

    >>> slug("D-D, Prox-SG τ=½")
    'D-D_Prox-SG_τ_½'
    """
    words = "".join(letter if letter.isalnum() or letter in "-." else " " for letter in name).split()
    return "_".join(words)


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
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(_PARTIAL, f".{self.path.name}.", self.path.parent)
        self._partial = Path(name)
        self._file = os.fdopen(handle, "wb")
        return self._file

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        if kind is None:
            # mkstemp creates files that only their owner can read; results should be readable by others.
            umask = os.umask(0)
            os.umask(umask)
            self._partial.chmod(0o666 & ~umask)
            self._partial.replace(self.path)
        else:
            self._partial.unlink(missing_ok=True)


def sweep(directory: Path) -> None:
    """Remove unfinished files of killed processes from a directory in which no other process writes."""
    for path in directory.rglob(f".*{_PARTIAL}"):
        path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically; NaN and infinities become the strings "nan", "inf" and "-inf"."""
    text = json.dumps(_plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    with atomically(path) as file:
        file.write(text.encode())


def read_json(path: Path, keys: Sequence[str] = ()) -> dict[str, Any]:
    """Read the dictionary that :func:`write_json` wrote, and check that it has ``keys``."""
    remedy = "delete it and run the experiment again"
    try:
        value = _numbers(json.loads(path.read_text(encoding="utf-8")))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a {type(value).__name__} instead of a dictionary; {remedy}")
    if missing := [key for key in keys if key not in value]:
        raise DataError(f"{path} lacks {', '.join(missing)}; {remedy}")
    return value


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


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


@dataclasses.dataclass(frozen=True)
class Records:
    """Metrics as JSON lines. A line that an interruption cut off is ignored."""

    path: Path

    def append(self, record: Metrics) -> None:
        """Append one line and hand it to the operating system at once."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_plain(record), ensure_ascii=False, allow_nan=False) + "\n")

    def truncate(self, count: int) -> None:
        """Keep the first ``count`` records."""
        kept = list(self)[:count]
        with atomically(self.path) as file:
            for record in kept:
                file.write((json.dumps(_plain(record), ensure_ascii=False, allow_nan=False) + "\n").encode())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.path.is_file():
            return
        for line in self.path.read_bytes().split(b"\n")[:-1]:
            try:
                yield _numbers(json.loads(line))
            except json.JSONDecodeError as error:
                raise DataError(f"{self.path} is damaged ({error}); delete its folder and run again") from error

    def __len__(self) -> int:
        return sum(1 for _ in self)


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

"""Files that others may have made: read up to a declared size, packed or unpacked, and never written through a link.

A file that holds too much, or not what it should, ends in a :class:`ValueError` or another exception of its parser; the
callers turn these into a sentence that names the file and a remedy.
"""

import errno
import gzip
import io
import os
import stat
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "LARGEST",
    "BoundedStream",
    "appending",
    "content",
    "gunzipped",
    "matlab_arrays",
    "npz_array",
    "opened_image",
]

LARGEST = 1 << 28
"""The most bytes of a file for which no other limit is declared, packed and unpacked."""

_PIXELS = 1 << 26
_MATLAB_HEADER = 128
_MATLAB_PACKED = 15


class BoundedStream:
    """A stream that ends in a :class:`ValueError` after ``limit`` bytes."""

    def __init__(self, stream: Any, limit: int) -> None:
        self._stream, self._left, self._limit = stream, limit, limit

    def read(self, count: int) -> bytes:
        """Up to ``count`` bytes."""
        piece: bytes = self._stream.read(min(count, self._left + 1))
        self._left -= len(piece)
        if self._left < 0:
            raise ValueError(f"it holds more than {self._limit:,} bytes")
        return piece

    def everything(self) -> bytes:
        """All bytes to the end."""
        return b"".join(iter(lambda: self.read(1 << 20), b""))


def content(path: Path, limit: int = LARGEST) -> bytes:
    """The bytes of a regular file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a"
    >>> _ = path.write_bytes(b"abc")
    >>> content(path, 3)
    b'abc'
    >>> content(path, 2)
    Traceback (most recent call last):
    ...
    ValueError: it holds more than 2 bytes
    """
    # Opening a pipe without a writer would wait for one, and a device may never end.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if found.st_size > limit:
            raise ValueError(f"it holds more than {limit:,} bytes")
        return file.read(found.st_size)


def appending(path: Path) -> IO[bytes]:
    """Open a file for appending, without a buffer; a link in its place is refused, since it could point anywhere."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags, 0o666), "ab", 0)


def gunzipped(raw: bytes, limit: int) -> bytes:
    """What a gzip file holds."""
    with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
        return BoundedStream(file, limit).everything()


def npz_array(path: Path, name: str, limit: int = LARGEST) -> np.ndarray:
    """An array of numbers in an ``.npz`` file; nothing is unpickled."""
    with zipfile.ZipFile(io.BytesIO(content(path, limit))) as archive, archive.open(f"{name}.npy") as member:
        raw = BoundedStream(member, limit).everything()
    file = io.BytesIO(raw)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read(file)
    _require_numbers(name, dtype)
    return np.frombuffer(raw, dtype, offset=file.tell()).reshape(shape, order="F" if by_columns else "C")


def matlab_arrays(path: Path, names: Sequence[str], limit: int = LARGEST) -> list[np.ndarray]:
    """Variables of a MATLAB 5 file that hold numbers."""
    from scipy.io import loadmat

    file: Any = _unpacked_matlab(memoryview(content(path, limit)), limit)
    found = loadmat(file, variable_names=list(names))
    if absent := [name for name in names if not isinstance(found.get(name), np.ndarray)]:
        raise ValueError(f"it lacks the variables {' and '.join(absent)}")
    for name in names:
        _require_numbers(name, found[name].dtype)
    return [found[name] for name in names]


def _require_numbers(name: str, dtype: np.dtype[Any]) -> None:
    if dtype.kind not in "biuf":
        raise ValueError(f"it holds {dtype} in {name}, where numbers belong")


def _unpacked_matlab(raw: memoryview, limit: int) -> io.BytesIO:
    """The file with its packed elements unpacked, since SciPy unpacks without a limit."""
    endings: dict[bytes, Any] = {b"\0\1IM": "little", b"\1\0MI": "big"}
    order = endings.get(bytes(raw[_MATLAB_HEADER - 4 : _MATLAB_HEADER]))
    if order is None:
        raise ValueError("its header is another")
    file, at = io.BytesIO(), _MATLAB_HEADER
    file.write(raw[:at])
    while at < len(raw):
        kind, size = (int.from_bytes(raw[at + k : at + k + 4], order) for k in (0, 4))
        begin, at = at, at + 8 + size
        if at > len(raw):
            raise ValueError("it is cut short")
        if kind == _MATLAB_PACKED:
            packed = zlib.decompressobj()
            file.write(packed.decompress(raw[begin + 8 : at], limit + 1 - file.tell()))
        else:
            file.write(raw[begin:at])
        if file.tell() > limit:
            raise ValueError(f"it holds more than {limit:,} bytes")
    file.seek(0)
    return file


def opened_image(raw: bytes, formats: Sequence[str], pixels: int = _PIXELS) -> "Image":
    """An image of one of these formats, whose pixels are not unpacked yet."""
    from PIL import Image

    # Without a list of formats Pillow would also hand PostScript to an interpreter.
    image = Image.open(io.BytesIO(raw), formats=list(formats))
    if image.width * image.height > pixels:
        raise ValueError(f"it has {image.width} × {image.height} pixels, more than {pixels:,}")
    return image

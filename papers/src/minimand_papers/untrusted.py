"""Files that others may have made: read up to a declared size, packed or unpacked, and never written through a link.

A file that holds too much, or not what it should, ends in a :class:`ValueError` or another exception of its parser; the
callers turn these into a sentence that names the file and a remedy.
"""

import errno
import gzip
import io
import itertools
import os
import pickletools
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    import torch
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
    "saved_tensors",
]

LARGEST = 1 << 28
"""The most bytes of a file for which no other limit is declared, packed and unpacked."""

_PIXELS = 1 << 26
_MATLAB_HEADER = 128
_MATLAB_PACKED, _MATLAB_MATRIX, _MATLAB_COMPLEX = 15, 14, 0x800
_MATLAB_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_MATLAB_CLASSES = range(6, 16)
# What torch names in a file of dictionaries and tensors, besides the types of storages.
_OF_TENSORS = ("torch._utils _rebuild_tensor_v2", "collections OrderedDict")


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
    """Open a regular file for appending, without a buffer; a link in its place could point anywhere and is refused."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    # Opening a pipe without a reader would wait for one.
    file = os.fdopen(os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666), "ab", 0)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file")
    return file


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
    """Variables of a MATLAB 5 file that hold real numbers, in the type in which they are stored.

    Not by SciPy: it reads beyond its tables at a type that MATLAB has not, which can end the process.
    """
    unpacked, order = _unpacked_matlab(memoryview(content(path, limit)), limit)
    found: dict[str, np.ndarray] = {}
    for kind, raw in _matlab_elements(unpacked[_MATLAB_HEADER:], order):
        if kind == _MATLAB_MATRIX:
            parts = _matlab_elements(raw, order)
            (_, flags), (_, sizes), (_, name) = itertools.islice(parts, 3)
            label = bytes(name).decode("latin1")
            if label in names:
                found[label] = _matlab_numbers(label, flags, sizes, next(parts, (0, memoryview(b""))), order)
    if absent := [name for name in names if name not in found]:
        raise ValueError(f"it lacks the variables {' and '.join(absent)}")
    return [found[name] for name in names]


def _matlab_elements(raw: memoryview, order: Literal["little", "big"]) -> Iterator[tuple[int, memoryview]]:
    """The types and the bytes of the elements one after another; up to four bytes may lie in an element's own head."""
    at = 0
    while at < len(raw):
        kind, size = (int.from_bytes(raw[at + k : at + k + 4], order) for k in (0, 4))
        begin = at + 8
        if small := kind >> 16:
            kind, size, begin = kind & 0xFFFF, small, at + 4
        at = at + 8 if small else begin + size + -size % 8
        if begin + size > min(at, len(raw)):
            raise ValueError("it is cut short")
        yield kind, raw[begin : begin + size]


def _matlab_numbers(
    name: str, flags: memoryview, sizes: memoryview, numbers: tuple[int, memoryview], order: Literal["little", "big"]
) -> np.ndarray:
    """An array of real numbers; its first number of flags has its class and whether it is complex."""
    first, (kind, raw) = int.from_bytes(flags[:4], order), numbers
    if first & 0xFF not in _MATLAB_CLASSES or first & _MATLAB_COMPLEX or kind not in _MATLAB_TYPES:
        raise ValueError(f"it holds something else in {name}, where numbers belong")
    ending = "<" if order == "little" else ">"
    shape = tuple(int(size) for size in np.frombuffer(sizes, f"{ending}i4"))
    if any(size < 0 for size in shape):
        raise ValueError(f"it holds {name} of the shape {shape!r:.60}")
    return np.frombuffer(raw, ending + _MATLAB_TYPES[kind]).reshape(shape, order="F")


def _require_numbers(name: str, dtype: np.dtype[Any]) -> None:
    if dtype.kind not in "biuf":
        raise ValueError(f"it holds {dtype} in {name}, where numbers belong")


def _unpacked_matlab(raw: memoryview, limit: int) -> tuple[memoryview, Literal["little", "big"]]:
    """The file with its packed elements unpacked, and the order of the bytes in a number."""
    endings: dict[bytes, Literal["little", "big"]] = {b"\0\1IM": "little", b"\1\0MI": "big"}
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
    return file.getbuffer(), order


def opened_image(raw: bytes, formats: Sequence[str], pixels: int = _PIXELS) -> "Image":
    """An image of one of these formats, whose pixels are not unpacked yet."""
    from PIL import Image

    # Without a list of formats Pillow would also hand PostScript to an interpreter.
    image = Image.open(io.BytesIO(raw), formats=list(formats))
    if image.width * image.height > pixels:
        raise ValueError(f"it has {image.width} × {image.height} pixels, more than {pixels:,}")
    return image


def saved_tensors(path: Path, device: "torch.device") -> dict[str, Any]:
    """What :func:`torch.save` wrote: dictionaries, plain values and whole tensors, never code, never more than a file.

    The file is refused if it is packed, if members overlap, or if a few of its bytes could become any amount of memory:
    as a call of another function than that which makes a tensor, or as a tensor that repeats its entries.
    """
    import torch

    # Readers differ about odd archives: with two tables of contents, or names in capitals. torch gets a plain copy of
    # what was checked.
    checked = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(checked, "w") as copy:
        members = archive.infolist()
        # torch packs nothing. Packed members, or several with the same bytes, could become any amount of memory.
        if any(member.compress_type for member in members) or sum(m.file_size for m in members) > path.stat().st_size:
            raise ValueError("it is packed")
        for member in members:
            raw = archive.read(member)
            if member.filename.lower().endswith("data.pkl"):
                _require_tensors(raw)
            copy.writestr(member.filename, raw)
    checked.seek(0)
    try:
        found = dict(torch.load(checked, map_location=device, weights_only=True))
    except Exception as error:  # torch's text recommends to load the file with code
        raise ValueError("it is cut short, or holds more than tensors and numbers") from error
    _require_whole(found)
    return found


def _require_tensors(program: bytes) -> None:
    """Refuse a pickle that calls anything but what makes tensors: weights_only allows a bytearray of any length."""
    names = {text for code, text, _ in pickletools.genops(program) if code.name in ("GLOBAL", "INST", "STACK_GLOBAL")}
    if odd := [name for name in names if name not in _OF_TENSORS and not re.fullmatch(r"torch \w+Storage", str(name))]:
        raise ValueError(f"it is made by {odd[0]!r:.60}, which no tensor needs")


def _require_whole(found: object) -> None:
    """Refuse tensors with more entries than there are in memory."""
    import torch

    waiting, seen = [found], set()
    while waiting:
        value = waiting.pop()
        # The same object can be there any number of times without being in the file as often.
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.numel() * value.element_size() > value.untyped_storage().nbytes():
                raise ValueError("a tensor repeats its entries")
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value

"""The publishers' file formats, read into tensors; nothing is ever unpickled.

Each reader takes the files of one split and returns its images (N × C × H × W, uint8) and labels (N, int64). A file
that is cut short, damaged, of another format, or of more than :data:`MOST` images, packed or not, is a
:class:`~minimand.errors.DataError` that names it.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minimand.errors import DataError

from ..untrusted import content, gunzipped, matlab_arrays

__all__ = ["MOST", "Arrays", "damaged", "read_cifar", "read_idx", "read_svhn", "reading", "require_labels"]

Arrays = tuple[Tensor, Tensor]

MOST = 250_000
"""The most images of a file. The publishers' largest file has 73,257."""

# What a file may hold beside its images and labels.
_SLACK = 1 << 16


def damaged(path: Path, why: str) -> DataError:
    """The error for a file that does not hold what its name says."""
    return DataError(
        f"{path} {' '.join(why.split())}: delete it and load the dataset again with download=True, "
        f"or put the publisher's own file in its place"
    )


@contextlib.contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Turn what a parser raises at damaged bytes, whatever that is, into a sentence that names the file."""
    try:
        yield
    except (DataError, MemoryError):
        raise
    except EOFError as error:
        raise damaged(path, f"is cut short after {path.stat().st_size:,} bytes") from error
    except OSError as error:
        if error.errno is None:
            raise damaged(path, f"is no {kind}, or damaged ({error})") from error
        raise DataError(
            f"{path} cannot be read ({error.strerror}): check that it is a file and its permissions"
        ) from error
    except Exception as error:
        raise damaged(path, f"is no {kind}, or damaged ({error})") from error


def require_labels(path: Path, labels: Tensor, low: int, high: int) -> None:
    """Refuse labels outside low … high."""
    wrong = labels[(labels < low) | (labels > high)]
    if len(wrong):
        raise damaged(path, f"is damaged: it holds the label {int(wrong[0])}, outside {low} … {high}")


def _bytes(path: Path, limit: int) -> bytes:
    """The file's bytes, unpacked if they are gzip's, whatever its name says: some browsers unpack on the way."""
    with reading(path, "idx file"):
        raw = content(path, limit)
        return gunzipped(raw, limit) if raw[:2] == b"\x1f\x8b" else raw


def _idx(path: Path, sizes: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """An idx file of bytes whose dimensions after the first are ``sizes``."""
    raw = _bytes(path, MOST * math.prod(sizes) + _SLACK)
    rank = 1 + len(sizes)
    magic = bytes([0, 0, 8, rank])
    if raw[:4] != magic:
        raise damaged(path, f"is no idx file of {rank}-dimensional bytes (it begins with {raw[:4].hex() or 'nothing'})")
    begin = 4 + 4 * rank
    if len(raw) < begin:
        raise damaged(path, f"is cut short inside its header of {begin} bytes")
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", rank, 4))
    if shape[1:] != sizes:
        raise damaged(path, f"holds images of {' × '.join(map(str, shape[1:]))}, not {' × '.join(map(str, sizes))}")
    expected = begin + math.prod(shape)
    if len(raw) != expected:
        raise damaged(path, f"is damaged: its header promises {expected:,} bytes, it holds {len(raw):,}")
    return np.frombuffer(raw, np.uint8, offset=begin).reshape(shape)


def read_idx(files: Sequence[Path], classes: int) -> Arrays:
    """MNIST's format: an image file and a label file, gzipped or not."""
    image_file, label_file = files
    images = torch.tensor(_idx(image_file, (28, 28))).unsqueeze(1)
    labels = torch.tensor(_idx(label_file, ()).astype(np.int64))
    if len(images) != len(labels):
        raise damaged(label_file, f"holds {len(labels):,} labels for the {len(images):,} images of {image_file.name}")
    require_labels(label_file, labels, 0, classes - 1)
    return images, labels


def read_cifar(files: Sequence[Path], classes: int) -> Arrays:
    """The binary version of CIFAR: records of one label byte (CIFAR-100: coarse, then fine) and 3 × 32 × 32 pixels."""
    before = 1 if classes == 10 else 2
    size = before + 3072
    images, labels = [], []
    for path in files:
        with reading(path, "file of CIFAR"):
            raw = np.frombuffer(bytearray(content(path, MOST * size)), np.uint8)
        if not len(raw) or len(raw) % size:
            raise damaged(path, f"is damaged: {len(raw):,} bytes are no whole number of records of {size:,} bytes")
        records = raw.reshape(-1, size)
        images.append(torch.from_numpy(records[:, before:]).view(-1, 3, 32, 32))
        labels.append(torch.from_numpy(records[:, before - 1].astype(np.int64)))
        require_labels(path, labels[-1], 0, classes - 1)
    return torch.cat(images).contiguous(), torch.cat(labels)


def read_svhn(files: Sequence[Path], classes: int) -> Arrays:
    """SVHN's cropped digits, a MATLAB 5 file: X is 32 × 32 × 3 × N, y is N × 1, where 10 stands for the digit 0."""
    (path,) = files
    with reading(path, "MATLAB 5 file"):
        pixels, digits = matlab_arrays(path, ("X", "y"), MOST * (3072 + 8) + _SLACK)
    count = digits.size
    if pixels.dtype != np.uint8 or pixels.shape != (32, 32, 3, count):
        raise damaged(path, f"holds X of {pixels.shape} and {count} labels, not 32 × 32 × 3 × N bytes and N labels")
    images = torch.from_numpy(np.ascontiguousarray(pixels.transpose(3, 2, 0, 1)))
    with np.errstate(invalid="ignore"):
        whole = digits.reshape(-1).astype(np.int64)
    if not np.array_equal(whole, digits.reshape(-1)):
        raise damaged(path, "holds labels that are no whole numbers")
    labels = torch.from_numpy(whole)
    require_labels(path, labels, 1, classes)
    return images, labels % 10

"""A bank of convolutions and its adjoint between images of few channels and many features, fast on a CPU.

The bank, a :class:`~minimand.operators.Conv2d` with zero padding, is a matrix product with shifted copies of the image,
strip by strip so that everything stays in the cache. On one core it takes a fifth to a half of the time of torch.
"""

from collections.abc import Iterator

from torch import Tensor

__all__ = ["inner", "patches", "scatter", "strips"]

# Numbers in the features of one strip: few enough for the cache, and enough to hide the overhead of the calls.
_STRIP = 1 << 18


def strips(height: int, width: int, features: int) -> Iterator[slice]:
    """Ranges of rows whose features fit into the cache."""
    rows = max(1, min(height, _STRIP // max(1, features * width)))
    for top in range(0, height, rows):
        yield slice(top, min(height, top + rows))


def patches(padded: Tensor, rows: slice, size: int) -> Tensor:
    """The shifted copies (C k², rows · W) of an image (C, H + k − 1, W + k − 1)."""
    channels, width, count = padded.shape[0], padded.shape[2] - size + 1, rows.stop - rows.start
    part = padded[:, rows.start : rows.stop + size - 1]
    return part.unfold(1, count, 1).unfold(2, width, 1).reshape(channels * size * size, count * width)


def scatter(columns: Tensor, into: Tensor, rows: slice, size: int) -> None:
    """The adjoint of :func:`patches`: add shifted copies (C k², rows · W) to an image (C, H + k − 1, W + k − 1)."""
    channels, wide, count = into.shape[0], into.shape[2], rows.stop - rows.start
    copies = columns.reshape(channels, size, size, count, wide - size + 1)
    across = columns.new_zeros(channels, size, count, wide)
    for j in range(size):
        across[..., j : j + wide - size + 1] += copies[:, :, j]
    for i in range(size):
        into[:, rows.start + i : rows.stop + i] += across[:, i]


def inner(padded: Tensor, size: int) -> Tensor:
    """Images without their padding of half a filter."""
    edge = size // 2
    return padded[..., edge : padded.shape[-2] - edge, edge : padded.shape[-1] - edge]

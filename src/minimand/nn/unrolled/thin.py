"""The convolution that writes an image of one channel, as one matrix product and shifted sums.

A convolution library pads the single output channel to the width of a vector and computes it all. Here the product has
exactly the terms of the convolution, one row for every tap of the kernel, and the taps are summed where they belong:
half the time, forwards and backwards, but for images of a few pixels.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ToImage"]


class ToImage(nn.Conv2d):
    r"""A convolution to one channel with an odd square kernel, zero padding and no bias; the image keeps its sides.

    With taps k, counted from the centre of the kernel,

    .. math:: y_p = \sum_k \Big(\sum_c w_{ck}\, x_c\Big)_{p + k} .

    The parameter is :class:`torch.nn.Conv2d`'s. Features are read with the channels last; others are copied.

    >>> _ = torch.manual_seed(0)
    >>> layer, x = ToImage(8), torch.randn(2, 8, 5, 6)
    >>> torch.allclose(layer(x), nn.functional.conv2d(x, layer.weight, padding=1), atol=1e-5)
    True
    """

    def __init__(self, inputs: int, size: int = 3) -> None:
        if size % 2 == 0:
            raise ValueError(f"an even kernel has no centre, got {size}")
        super().__init__(inputs, 1, size, padding=size // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The image."""
        batch, channels, height, width = x.shape
        pixels, size = x.permute(0, 2, 3, 1).reshape(-1, channels), self.kernel_size[0]
        taps = self.weight.reshape(channels, -1).mT @ pixels.mT
        image: Tensor = _Gather.apply(taps.reshape(size, size, batch, height, width))
        return image[:, None]


class _Gather(torch.autograd.Function):
    """Taps (k, k, batch, height, width), summed where the kernel puts them; the transpose of :class:`_Spread`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(taps: Tensor) -> Tensor:
        image = torch.zeros_like(taps[0, 0])
        for tap, to, of in _shifts(taps):
            image[to] += taps[tap][of]
        return image

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.size = inputs[0].shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Spread.apply(grad, ctx.size)


class _Spread(torch.autograd.Function):
    """Images (batch, height, width), one shifted copy for every tap; the transpose of :class:`_Gather`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(image: Tensor, size: int) -> Tensor:
        taps = image.new_zeros(size, size, *image.shape)
        for tap, of, to in _shifts(taps):
            taps[tap][to] = image[of]
        return taps

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None]:
        return _Gather.apply(grad), None


def _shifts(taps: Tensor) -> Iterator[tuple[tuple[int, int], tuple[Any, ...], tuple[Any, ...]]]:
    """Every tap with the pixels p that take it and the pixels p + k it has its values at, those inside the image."""
    size, (height, width) = taps.shape[0], taps.shape[-2:]
    for i in range(size):
        for j in range(size):
            rows, columns = _overlap(i - size // 2, height), _overlap(j - size // 2, width)
            yield (i, j), (..., rows[0], columns[0]), (..., rows[1], columns[1])


def _overlap(offset: int, length: int) -> tuple[slice, slice]:
    """The indices p with p + offset inside, and those p + offset."""
    low = max(0, -offset)
    high = max(low, min(length, length - offset))
    return slice(low, high), slice(low + offset, high + offset)

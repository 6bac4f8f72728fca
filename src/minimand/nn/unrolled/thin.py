"""Convolutions between an image of one channel and many features, as one matrix product and shifted sums.

A convolution library pads the single channel to a vector's width and computes it all. Here the product has exactly the
terms of the convolution, one row for every tap of the kernel, and the taps are summed where they belong.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ThinConv2d"]


class ThinConv2d(nn.Conv2d):
    r"""A convolution of odd square kernels with one channel on one side, zero padding and no bias; the sides stay.

    With taps k, counted from the centre of the kernel,

    .. math::

        y_p = \sum_k \Big(\sum_c w_{ck}\, x_c\Big)_{p + k} \quad\text{(to an image)}, \qquad
        y_{op} = \sum_k w_{ok}\, x_{p + k} \quad\text{(from an image)} .

    The parameter is :class:`torch.nn.Conv2d`'s. Features are read and written with the channels last.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <...>
    >>> layer, x = ThinConv2d(8, 1), torch.randn(2, 8, 5, 6)
    >>> torch.allclose(layer(x), nn.functional.conv2d(x, layer.weight, padding=1), atol=1e-5)
    True
    """

    def __init__(self, inputs: int, outputs: int, size: int = 3) -> None:
        if min(inputs, outputs) != 1 or size % 2 == 0:
            raise ValueError(f"one channel on one side and an odd kernel, got {inputs}, {outputs} and {size}")
        super().__init__(inputs, outputs, size, padding=size // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        batch, _, height, width = x.shape
        size = self.kernel_size[0]
        if self.out_channels == 1:
            pixels = x.permute(0, 2, 3, 1).reshape(-1, self.in_channels)
            taps = self.weight.reshape(self.in_channels, -1).mT @ pixels.mT
            return _Gather.apply(taps.reshape(size, size, batch, height, width))[:, None]
        taps = _Spread.apply(x.squeeze(1), size).reshape(size * size, -1)
        # Row by row, or the product of its gradient would run along the short side.
        features = taps.mT @ self.weight.flip(2, 3).reshape(self.out_channels, -1).mT.contiguous()
        return features.reshape(batch, height, width, self.out_channels).permute(0, 3, 1, 2)


class _Gather(torch.autograd.Function):
    """Taps (k, k, batch, height, width), summed where the kernel puts them; the transpose of :class:`_Spread`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(taps: Tensor) -> Tensor:
        image = torch.zeros_like(taps[0, 0])
        for tap, to, of in _shifts(*taps.shape[1:2], *taps.shape[-2:]):
            image[to] += taps[tap][of]
        return image

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.size = inputs[0].shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _Spread.apply(grad, ctx.size)


class _Spread(torch.autograd.Function):
    """Images (batch, height, width), one shifted copy for every tap; the transpose of :class:`_Gather`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(image: Tensor, size: int) -> Tensor:
        taps = image.new_zeros(size, size, *image.shape)
        for tap, of, to in _shifts(size, *image.shape[-2:]):
            taps[tap][to] = image[of]
        return taps

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Gather.apply(grad), None


def _shifts(size: int, height: int, width: int) -> Iterator[tuple[tuple[int, int], tuple[Any, ...], tuple[Any, ...]]]:
    """Every tap with the pixels p it writes to and the pixels p + k it reads, those inside the image."""
    for i in range(size):
        for j in range(size):
            rows, columns = _overlap(i - size // 2, height), _overlap(j - size // 2, width)
            yield (i, j), (..., rows[0], columns[0]), (..., rows[1], columns[1])


def _overlap(offset: int, length: int) -> tuple[slice, slice]:
    """The indices p with p + offset inside, and those p + offset."""
    low, high = max(0, -offset), max(0, min(length, length - offset))
    return slice(low, max(low, high)), slice(low + offset, max(low, high) + offset)

"""A convolution with one output channel, computed as one matrix product and shifted sums.

Convolution libraries pad a single output channel to the width of a vector register. Here the matrix product has one row
for every tap of the kernel, and the taps are summed with shifts. This takes about half the time on a CPU, except for
images of a few pixels.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import OptionError, ShapeError
from ...tracing import in_transform, is_traced

__all__ = ["SingleChannelConv2d"]


class SingleChannelConv2d(nn.Conv2d):
    r"""A convolution to one channel with an odd square kernel, zero padding and no bias. The image keeps its size.

    With taps k, counted from the centre of the kernel,

    .. math:: y_p = \sum_k \Big(\sum_c w_{ck}\, x_c\Big)_{p + k} .

    The parameter is that of :class:`torch.nn.Conv2d`. Features in channels-last layout are not copied.

    >>> _ = torch.manual_seed(0)
    >>> layer, x = SingleChannelConv2d(8), torch.randn(2, 8, 5, 6)
    >>> torch.allclose(layer(x), nn.functional.conv2d(x, layer.weight, padding=1), atol=1e-5)
    True
    """

    def __init__(self, inputs: int, size: int = 3) -> None:
        if size % 2 == 0:
            raise OptionError(f"the kernel size must be odd, got {size}")
        super().__init__(inputs, 1, size, padding=size // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The image."""
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise ShapeError(f"expected features N × {self.in_channels} × H × W, got {tuple(x.shape)}")
        if is_traced(x) or is_traced(self.weight) or in_transform():
            return super().forward(x)  # compilers and function transforms handle the plain convolution better
        batch, channels, height, width = x.shape
        pixels, size = x.permute(0, 2, 3, 1).reshape(-1, channels), self.kernel_size[0]
        taps = self.weight.reshape(channels, -1).mT @ pixels.mT
        image: Tensor = _GatherTaps.apply(taps.reshape(size, size, batch, height, width))
        return image[:, None]


class _GatherTaps(torch.autograd.Function):
    """The sum of the shifted taps (k, k, batch, height, width); the transpose of :class:`_ScatterTaps`."""

    @staticmethod
    def forward(taps: Tensor) -> Tensor:
        size, height, width = taps.shape[0], *taps.shape[-2:]
        # A margin receives the taps beyond the edge. Taps in half precision are summed in float32.
        wide = taps.new_zeros(
            *taps.shape[2:-2], height + size - 1, width + size - 1, dtype=torch.promote_types(taps.dtype, torch.float32)
        )
        for i, j in _places(size):
            wide[..., size - 1 - i : size - 1 - i + height, size - 1 - j : size - 1 - j + width] += taps[i, j]
        edge = size // 2
        return wide[..., edge : edge + height, edge : edge + width].to(taps.dtype).contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.size = inputs[0].shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _ScatterTaps.apply(grad, ctx.size)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Any:
        return _GatherTaps.apply(tangent)


class _ScatterTaps(torch.autograd.Function):
    """One shifted copy of the images (batch, height, width) per tap; the transpose of :class:`_GatherTaps`."""

    @staticmethod
    def forward(image: Tensor, size: int) -> Tensor:
        (height, width), edge = image.shape[-2:], size // 2
        wide = F.pad(image, (edge, edge, edge, edge))
        taps = image.new_empty(size, size, *image.shape)
        for i, j in _places(size):
            taps[i, j] = wide[..., size - 1 - i : size - 1 - i + height, size - 1 - j : size - 1 - j + width]
        return taps

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.size = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None]:
        return _GatherTaps.apply(grad), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Any:
        return _ScatterTaps.apply(tangent, ctx.size)


def _places(size: int) -> Iterator[tuple[int, int]]:
    return itertools.product(range(size), range(size))

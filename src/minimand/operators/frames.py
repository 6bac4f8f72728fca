r"""Tight frames: transforms that preserve the energy of an image and in which photographs are sparse.

A frame F maps an image to coefficients with :math:`F^\top F = I`. The transforms of S shifted images, divided by
:math:`\sqrt S`, form a redundant frame that favours no position. With it the cycle-spinning of Coifman & Donoho,
*Translation-Invariant De-Noising*, 1995, is one convex problem instead of an average of S solutions.
"""

import abc
import copy
import math
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import checked
from ..errors import OptionError, Sealed, ShapeError
from ..norms.spectral import round_up
from .base import LinearOperator

__all__ = ["BlockDCT", "Frame", "Wavelet", "dct_matrix", "shifts"]

Family = Literal["haar", "db2", "db4"]

# Daubechies' orthonormal low-pass filters with 1, 2 and 4 vanishing moments.
_FILTERS: dict[str, tuple[float, ...]] = {
    "haar": (0.7071067811865476, 0.7071067811865476),
    "db2": (0.48296291314453414, 0.8365163037378079, 0.2241438680420134, -0.12940952255126037),
    "db4": (
        0.23037781330885523,
        0.7148465705525415,
        0.6308807679295904,
        -0.02798376941698385,
        -0.18703481171888114,
        0.030841381835986965,
        0.032883011666982945,
        -0.010597401784997278,
    ),
}
_ROUNDING = 1e-5


def shifts(period: int, count: int) -> list[tuple[int, int]]:
    """``count`` shifts (a square number) on a regular grid of a square of side ``period``.

    >>> shifts(8, 4)
    [(0, 0), (0, 4), (4, 0), (4, 4)]
    """
    side = math.isqrt(count)
    if side < 1 or side * side != count or side > period:
        raise OptionError(f"the number of shifts must be a square from 1 to {period}² (1, 4, 9 …), got {count}")
    places = [k * period // side for k in range(side)]
    return [(down, across) for down in places for across in places]


class Frame(Sealed, LinearOperator):
    """A Parseval frame on images of one channel: one channel of coefficients per shift."""

    sampled = True

    def __init__(self, weight: Tensor, input_size: tuple[int, int], period: int, count: int) -> None:
        self.weight = weight
        self.size = input_size
        self.moves = shifts(period, count)
        #: The size that the transform works on: the next multiples of the period.
        self.padded = tuple(-(-side // period) * period for side in input_size)
        super().__init__((1, *input_size), (count, *self.padded))

    @abc.abstractmethod
    def analyzed(self, image: Tensor) -> Tensor:
        """The orthonormal transform ``(B, H, W)`` of images of the padded size, without shifts."""

    @abc.abstractmethod
    def _synthesize(self, coefficients: Tensor) -> Tensor:
        """Its inverse."""

    def apply(self, y: Tensor) -> Tensor:
        """The coefficients in all positions."""
        (height, width), (tall, wide) = self.size, self.padded
        images = F.pad(y.reshape(-1, height, width), (0, wide - width, 0, tall - height)) / len(self.moves) ** 0.5
        x = torch.stack([self.analyzed(images.roll(move, (-2, -1))) for move in self.moves], dim=1)
        return x.reshape(*y.shape[:-3], *self.output_shape)

    def adjoint(self, x: Tensor) -> Tensor:
        """The image of coefficients; the inverse of :meth:`apply` on its range."""
        parts = [
            self._synthesize(part).roll((-down, -across), (-2, -1))
            for part, (down, across) in zip(x.reshape(-1, *self.output_shape).unbind(1), self.moves, strict=True)
        ]
        height, width = self.size
        images = torch.stack(parts).sum(0)[:, :height, :width] / len(self.moves) ** 0.5
        return images.reshape(*x.shape[:-3], *self.input_shape)

    def with_weight(self, weight: Tensor) -> Self:
        """The same frame in another precision or on another device."""
        other = copy.copy(self)
        other.weight, other._bounds = weight, None
        return other

    def bound(self) -> Tensor:
        """One, with room for rounding."""
        one = torch.ones((), dtype=torch.float64, device=self.weight.device)
        return round_up(one * (1 + _ROUNDING), self.weight.dtype)


def dct_matrix(size: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """The orthonormal cosine transform DCT-II of vectors of this length, computed in float64.

    >>> D = dct_matrix(4, dtype=torch.float64)
    >>> torch.allclose(D @ D.mT, torch.eye(4, dtype=torch.float64))
    True
    """
    k = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(torch.pi * (k[None] + 0.5) * k[:, None] / size) * (2 / size) ** 0.5
    matrix[0] /= 2**0.5
    return matrix.to(dtype or torch.get_default_dtype())


@checked
class BlockDCT(Frame):
    """The two-dimensional cosine transform of every ``block`` × ``block`` square, in ``count`` shifted positions.

    The image is continued by zeros to a multiple of the block. The weight is the DCT matrix.

    >>> frame = BlockDCT((8, 8), block=4, count=4)
    >>> x = torch.rand(1, 8, 8)
    >>> torch.allclose(frame.adjoint(frame.apply(x)), x, atol=1e-6), frame.output_shape
    (True, (4, 8, 8))
    """

    def __init__(self, input_size: tuple[int, int], *, block: int = 8, count: int = 1) -> None:
        if block < 1:
            raise OptionError(f"block must be a whole number ≥ 1, got {block}")
        super().__init__(dct_matrix(block), input_size, block, count)
        self.block = block

    def _squares(self, image: Tensor) -> Tensor:
        down, across = (side // self.block for side in self.padded)
        return image.reshape(-1, down, self.block, across, self.block).transpose(2, 3)

    def analyzed(self, image: Tensor) -> Tensor:
        """The cosine transform of every block."""
        squares = self.weight @ self._squares(image) @ self.weight.mT
        return squares.transpose(2, 3).reshape(-1, *self.padded)

    def _synthesize(self, coefficients: Tensor) -> Tensor:
        squares = self.weight.mT @ self._squares(coefficients) @ self.weight
        return squares.transpose(2, 3).reshape(-1, *self.padded)


@checked
class Wavelet(Frame):
    """Daubechies' orthonormal wavelets on a periodic image, ``levels`` deep, in ``count`` shifted positions.

    The image is continued by zeros to a multiple of 2^levels. The weight holds the low-pass filter.

    >>> frame = Wavelet((6, 8), levels=2, family="db2")
    >>> x = torch.rand(1, 6, 8)
    >>> torch.allclose(frame.adjoint(frame.apply(x)), x, atol=1e-5), frame.output_shape
    (True, (1, 8, 8))
    """

    def __init__(
        self,
        input_size: tuple[int, int],
        *,
        levels: int = 3,
        family: Family = "db4",
        count: int = 1,
    ) -> None:
        if family not in _FILTERS:
            raise OptionError(f"family must be one of {', '.join(_FILTERS)}, got {family!r}")
        if levels < 1:
            raise OptionError(f"levels must be a whole number ≥ 1, got {levels}")
        super().__init__(torch.tensor(_FILTERS[family]), input_size, 2**levels, count)
        self.levels, self.family = levels, family
        if min(self.padded) >> (levels - 1) < self.weight.numel():
            raise ShapeError(
                f"an image of {input_size} has no room for {levels} levels of {family}, whose filter has "
                f"{self.weight.numel()} taps; use fewer levels"
            )

    def _filters(self) -> Tensor:
        """Low and high pass, as the kernel of a convolution of stride 2."""
        low = self.weight
        signs = torch.ones_like(low)
        signs[1::2] = -1
        return torch.stack([low, low.flip(0) * signs]).unsqueeze(1)

    def _split(self, rows: Tensor) -> Tensor:
        """One level along the last dimension: low half, then high half."""
        taps = self.weight.numel()
        flat = rows.reshape(-1, 1, rows.shape[-1])
        halves = F.conv1d(F.pad(flat, (0, taps - 2), mode="circular") if taps > 2 else flat, self._filters(), stride=2)
        return halves.reshape(*rows.shape[:-1], -1)

    def _join(self, rows: Tensor) -> Tensor:
        """The inverse of :meth:`_split`."""
        length, taps = rows.shape[-1], self.weight.numel()
        halves = rows.reshape(-1, 2, length // 2)
        long = F.conv_transpose1d(halves, self._filters(), stride=2)[:, 0]
        whole = long[:, :length]
        if taps > 2:
            whole = whole + F.pad(long[:, length:], (0, length - (taps - 2)))
        return whole.reshape(rows.shape)

    def analyzed(self, image: Tensor) -> Tensor:
        """The wavelet coefficients, the coarsest in the upper left corner."""
        height, width = self.padded
        result = image
        for k in range(self.levels):
            corner = result[:, : height >> k, : width >> k]
            result = _with_corner(result, self._split(self._split(corner).mT).mT)
        return result

    def _synthesize(self, coefficients: Tensor) -> Tensor:
        height, width = self.padded
        result = coefficients
        for k in reversed(range(self.levels)):
            corner = result[:, : height >> k, : width >> k]
            result = _with_corner(result, self._join(self._join(corner.mT).mT))
        return result


def _with_corner(image: Tensor, corner: Tensor) -> Tensor:
    """The image with its upper left part replaced."""
    tall, wide = corner.shape[-2:]
    if corner.shape == image.shape:
        return corner
    top = torch.cat([corner, image[:, :tall, wide:]], dim=2)
    return torch.cat([top, image[:, tall:]], dim=1)

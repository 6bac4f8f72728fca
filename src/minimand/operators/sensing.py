"""Measurements of images: block compressive sensing, missing pixels, blur."""

import math
from typing import Literal

import torch
from torch import Tensor

from ..arguments import checked
from ..errors import OptionError, Sealed, ShapeError, require_positive
from ..norms.kernel import Kernel
from ..norms.spectral import product_of_bounds, round_up, to_float64
from .base import LinearOperator
from .conv import Conv2d

__all__ = ["BlockSensing", "Inpainting", "gaussian_blur", "is_orthonormal", "orthonormal_gaussian"]


@checked
def orthonormal_gaussian(
    rows: int, columns: int, *, generator: torch.Generator | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    r"""A random :math:`\Phi` with orthonormal rows, :math:`\Phi\Phi^\top = I`, uniform among them.

    The rows of a Gaussian matrix are orthonormalised in float64. At the ratio r a block of n pixels has
    ``round(r * n)`` rows: 109 and 272 of 1089 at 10% and 25%.

    >>> phi = orthonormal_gaussian(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> torch.allclose(phi @ phi.mT, torch.eye(3, dtype=torch.float64))
    True
    """
    if not 1 <= rows <= columns:
        raise OptionError(f"orthonormal rows need 1 ≤ rows ≤ columns, got {rows} rows and {columns} columns")
    gaussian = torch.randn(columns, rows, generator=generator, dtype=torch.float64)
    basis, triangle = torch.linalg.qr(gaussian)
    # The sign of R's diagonal makes the distribution uniform.
    basis = basis * triangle.diagonal().sign()
    return basis.mT.contiguous().to(dtype or torch.get_default_dtype())


def is_orthonormal(matrix: Tensor, tolerance: float = 1e-3) -> bool:
    r"""Whether :math:`\Phi\Phi^\top = I` up to ``tolerance`` in every entry.

    >>> is_orthonormal(torch.eye(2, 3)), is_orthonormal(2 * torch.eye(2, 3))
    (True, False)
    """
    wide = to_float64(matrix)
    identity = torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
    return bool(((wide @ wide.mT - identity).abs() <= tolerance).all())


@checked
class BlockSensing(Sealed, LinearOperator):
    r"""Block compressive sensing: the same Φ measures every b × b block of an image,

    .. math:: y_{\cdot,i,j} = \Phi \operatorname{vec}(x_{\text{block } i,j}), \qquad \Phi \in \mathbb{R}^{m \times b^2}.

    Images have shape ``(B, 1, H, W)`` with H and W multiples of b, measurements ``(B, m, H/b, W/b)``. It is the
    convolution with kernel and stride b, computed as one matrix product.

    Source: the measurement model of Zhang & Ghanem, *ISTA-Net*, CVPR 2018, §4 (b = 33).

    >>> A = BlockSensing(torch.ones(1, 4), (2, 4))
    >>> A.apply(torch.arange(8.0).reshape(1, 2, 4))
    tensor([[[10., 18.]]])
    >>> bool(A.norm_sq() >= 4)
    True
    """

    sampled = True

    def __init__(self, weight: Tensor, input_size: tuple[int, int]) -> None:
        if weight.dim() != 2 or not weight.shape[1] or math.isqrt(weight.shape[1]) ** 2 != weight.shape[1]:
            raise ShapeError(
                f"Φ of shape {tuple(weight.shape)} fits no square block: its columns are the pixels of a block, "
                f"so their number is a square such as 33² = 1089"
            )
        self.weight = weight
        self.block = math.isqrt(weight.shape[1])
        height, width = input_size
        if min(height, width) < self.block:
            raise ShapeError(
                f"an image of {height} × {width} is smaller than a block of {self.block} × {self.block}; "
                f"pad it, or measure it with a Φ of smaller blocks"
            )
        if height % self.block or width % self.block:
            raise ShapeError(
                f"an image of {height} × {width} is not made of blocks of {self.block} × {self.block}; "
                f"pad it with minimand.operators.pad_to_blocks"
            )
        self.grid = (height // self.block, width // self.block)
        super().__init__((1, height, width), (weight.shape[0], *self.grid))

    def apply(self, y: Tensor) -> Tensor:
        """The measurements of all blocks."""
        (down, across), side = self.grid, self.block
        rows = y.reshape(-1, down, side, across, side).transpose(2, 3).reshape(-1, side * side)
        x = (rows @ self.weight.mT).reshape(-1, *self.grid, self.weight.shape[0]).permute(0, 3, 1, 2)
        return x.reshape(*y.shape[:-3], *self.output_shape)

    def adjoint(self, x: Tensor) -> Tensor:
        """``Φᵀ`` of each block's measurements, in the block's place."""
        (down, across), side = self.grid, self.block
        batch = x.reshape(-1, *self.output_shape)
        rows = batch.permute(0, 2, 3, 1).reshape(-1, self.weight.shape[0]) @ self.weight
        image = rows.reshape(-1, down, across, side, side).transpose(2, 3)
        return image.reshape(*x.shape[:-3], *self.input_shape)

    def with_weight(self, weight: Tensor) -> "BlockSensing":
        """The same blocks, measured by another Φ."""
        return BlockSensing(weight, (self.grid[0] * self.block, self.grid[1] * self.block))

    def bound(self) -> Tensor:
        r"""The certified :math:`\|\Phi\|^2`, because blocks do not overlap."""
        return Kernel(self.weight).norm_sq()


@checked
class Inpainting(Sealed, LinearOperator):
    """Missing pixels: the image times a mask of zeros and ones, ``(H, W)`` or ``(C, H, W)``.

    >>> Inpainting(torch.tensor([[1.0, 0.0]])).apply(torch.tensor([[[5.0, 7.0]]]))
    tensor([[[5., 0.]]])
    """

    sampled = True

    def __init__(self, mask: Tensor) -> None:
        if mask.dim() not in (2, 3) or mask.numel() == 0:
            raise ShapeError(f"a mask has shape (H, W) or (C, H, W), got {tuple(mask.shape)}")
        mask = mask if mask.is_floating_point() else mask.to(torch.get_default_dtype())
        self.weight = mask if mask.dim() == 3 else mask.unsqueeze(0)
        super().__init__(self.weight.shape, self.weight.shape)

    def apply(self, y: Tensor) -> Tensor:
        """The masked image."""
        return self.weight * y

    def adjoint(self, x: Tensor) -> Tensor:
        """The masked image."""
        return self.weight * x

    def with_weight(self, weight: Tensor) -> "Inpainting":
        """Another mask."""
        return Inpainting(weight)

    def bound(self) -> Tensor:
        """The largest square in the mask."""
        largest = to_float64(self.weight).abs().max()
        return round_up(product_of_bounds(largest, largest), self.weight.dtype)


@checked
def gaussian_blur(
    input_size: tuple[int, int],
    sigma: float,
    *,
    radius: int | None = None,
    padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
    channels: int = 1,
) -> Conv2d:
    """Blur by a Gaussian of ``sigma`` pixels, channel by channel, as a :class:`Conv2d`.

    The kernel ends at ``radius`` pixels, by default at 3σ, and sums to one. Around the image there are zeros, or what
    ``padding_mode`` says; ``"reflect"`` is the usual model of a photograph.

    >>> blur = gaussian_blur((9, 9), 1.0)
    >>> blur.weight.shape, round(float(blur.weight.sum()), 5)
    (torch.Size([1, 1, 7, 7]), 1.0)
    """
    require_positive("sigma", sigma)
    reach = math.ceil(3 * sigma) if radius is None else radius
    if not isinstance(reach, int) or reach < 0:
        raise OptionError(f"radius must be a whole number of pixels ≥ 0, got {radius!r}")
    line = torch.exp(-torch.arange(-reach, reach + 1).float().square() / (2 * sigma**2))
    kernel = torch.outer(line, line)
    weight = (kernel / kernel.sum()).expand(channels, 1, -1, -1).contiguous()
    return Conv2d(weight, input_size, padding=reach, groups=channels, padding_mode=padding_mode)

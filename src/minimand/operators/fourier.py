"""Subsampled Fourier measurements: magnetic resonance imaging of one slice with one coil."""

import torch
from torch import Tensor

from ..arguments import checked
from ..errors import OptionError, Sealed, ShapeError
from ..norms.spectral import product_of_bounds, round_up, to_float64
from .base import LinearOperator

__all__ = ["SubsampledFourier", "cartesian_mask", "radial_mask"]

# Several times the rounding error of a float32 transform of any usual size.
_ROUNDING = 1e-5


@checked
class SubsampledFourier(Sealed, LinearOperator):
    r"""The frequencies of a real image that a mask keeps,

    .. math:: \Phi x = M \odot \mathcal{F}x , \qquad \mathcal{F} \text{ unitary},

    as two channels, real and imaginary part, of the size of the image. Frequencies that the mask drops are zero. The
    adjoint is the zero-filled reconstruction :math:`\operatorname{Re}\mathcal{F}^{-1}(M \odot y)`. Frequency zero is at
    the mask's corner, as in the output of :func:`torch.fft.fft2`.

    Source: the measurement model of Yang, Sun, Li, Xu, *Deep ADMM-Net for Compressive Sensing MRI*, NIPS 2016.

    >>> A = SubsampledFourier(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    >>> A.apply(torch.ones(1, 2, 2))[0]
    tensor([[2., 0.],
            [0., 0.]])
    >>> A.adjoint(A.apply(torch.ones(1, 2, 2)))
    tensor([[[1., 1.],
             [1., 1.]]])
    """

    sampled = True

    def __init__(self, mask: Tensor) -> None:
        if mask.dim() != 2 or mask.numel() == 0:
            raise ShapeError(f"a Fourier mask has shape (H, W), got {tuple(mask.shape)}")
        super().__init__((1, *mask.shape), (2, *mask.shape))
        self.weight = mask if mask.is_floating_point() else mask.to(torch.get_default_dtype())

    def apply(self, y: Tensor) -> Tensor:
        """The masked frequencies of images."""
        # Many devices have no Fourier transform in half precision.
        wide = torch.promote_types(y.dtype, torch.float32)
        frequencies = torch.fft.fft2(y.select(-3, 0).to(wide), norm="ortho")
        kept = torch.stack([frequencies.real, frequencies.imag], dim=-3).to(y.dtype)
        return self.weight * kept

    def adjoint(self, x: Tensor) -> Tensor:
        """The zero-filled reconstruction."""
        real, imaginary = (self.weight * x).to(torch.promote_types(x.dtype, torch.float32)).unbind(-3)
        image = torch.fft.ifft2(torch.complex(real, imaginary), norm="ortho")
        return image.real.unsqueeze(-3).to(x.dtype)

    def with_weight(self, weight: Tensor) -> "SubsampledFourier":
        """Another mask."""
        return SubsampledFourier(weight)

    def bound(self) -> Tensor:
        """The largest square in the mask, with room for rounding."""
        largest = to_float64(self.weight).abs().max()
        return round_up(product_of_bounds(largest, largest) * (1 + _ROUNDING), self.weight.dtype)


@checked
def cartesian_mask(
    size: tuple[int, int], ratio: float, *, center: float = 0.08, generator: torch.Generator | None = None
) -> Tensor:
    """A share ``ratio`` of all lines of frequencies: the share ``center`` around zero, and random others.

    >>> mask = cartesian_mask((4, 50), 0.2, generator=torch.Generator().manual_seed(0))
    >>> round(float(mask.mean()), 2), float(mask[:, 0].min())
    (0.2, 1.0)
    """
    _check_ratio(ratio)
    height, width = size
    lines = max(1, round(ratio * width))
    inner = min(lines, max(1, round(center * width)))
    near = torch.fft.fftfreq(width).abs().argsort(stable=True)
    drawn = torch.randperm(width - inner, generator=generator)[: lines - inner]
    line = torch.zeros(width)
    line[near[:inner]] = 1.0
    line[near[inner:][drawn]] = 1.0
    return line.expand(height, width).clone()


@checked
def radial_mask(size: tuple[int, int], ratio: float) -> Tensor:
    """Lines through frequency zero at equal angles; the fewest lines that keep ``ratio`` of all frequencies.

    >>> mask = radial_mask((64, 64), 0.2)
    >>> 0.2 <= float(mask.mean()) < 0.25, float(mask[0, 0])
    (True, 1.0)
    """
    _check_ratio(ratio)
    height, width = size
    reach = torch.linspace(-0.5, 0.5, 4 * max(size))
    for spokes in range(1, 4 * max(size)):
        angles = torch.arange(spokes) * (torch.pi / spokes)
        down = (reach * torch.sin(angles)[:, None] * (height - 1)).round().long() % height
        across = (reach * torch.cos(angles)[:, None] * (width - 1)).round().long() % width
        mask = torch.zeros(height, width)
        mask[down, across] = 1.0
        if float(mask.mean()) >= ratio:
            return mask
    return torch.ones(height, width)


def _check_ratio(ratio: float) -> None:
    if not 0 < ratio <= 1:
        raise OptionError(f"a sampling ratio must lie in (0, 1], got {ratio}")

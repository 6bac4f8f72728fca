"""Measurements of images with several channels: parallel magnetic resonance imaging, binning, and tomography."""

import math
from collections.abc import Sequence

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from ..arguments import checked
from ..errors import OptionError, Sealed, ShapeError, require_finite, require_real
from ..norms.spectral import product_of_bounds, round_up, to_float64
from .base import LinearOperator
from .conv import Conv2d
from .physics import as_operator

__all__ = ["MultiCoilFourier", "downsampling", "parallel_beam"]

# Several times the rounding error of a float32 transform of any usual size.
_ROUNDING = 1e-5


@checked
class MultiCoilFourier(Sealed, LinearOperator):
    r"""Parallel magnetic resonance imaging: the masked frequencies of a complex image, seen by several coils,

    .. math:: \Phi x = \bigl(M \odot \mathcal{F}(s_c \odot x)\bigr)_c, \qquad \mathcal{F} \text{ unitary}.

    Images have two channels, real and imaginary part. Measurements have two channels for each coil, in the order of the
    coils. Frequency zero is at the mask's corner, as in the output of :func:`torch.fft.fft2`.

    Args:
        mask: The kept frequencies (H, W).
        sensitivities: The complex sensitivities (coils, H, W), or their real and imaginary parts (coils, 2, H, W).

    Source: Pruessmann, Weiger, Scheidegger & Boesiger, *SENSE*, 1999.

    >>> A = MultiCoilFourier(torch.ones(2, 2), torch.tensor([1.0, 1.0j]).reshape(2, 1, 1).expand(2, 2, 2))
    >>> A.apply(torch.ones(2, 2, 2))[:, 0, 0]  # the mean of 1 + i, and of i(1 + i), times two
    tensor([ 2.,  2., -2.,  2.])
    >>> bool(2 <= A.norm_sq() < 2.001)
    True
    """

    def __init__(self, mask: Tensor, sensitivities: Tensor) -> None:
        parts = torch.view_as_real(sensitivities).movedim(-1, 1) if sensitivities.is_complex() else sensitivities
        if mask.dim() != 2 or parts.dim() != 4 or parts.shape[1] != 2 or parts.shape[2:] != mask.shape:
            raise ShapeError(
                f"a mask (H, W) needs complex sensitivities (coils, H, W), got {tuple(mask.shape)} and "
                f"{tuple(sensitivities.shape)} of {sensitivities.dtype}"
            )
        require_real("sensitivities", parts)
        require_finite("sensitivities", parts)
        self.mask = mask.to(parts.dtype)
        super().__init__((2, *mask.shape), (2 * len(parts), *mask.shape))
        self.weight = parts.contiguous()

    def apply(self, y: Tensor) -> Tensor:
        """The masked frequencies of every coil."""
        coils = _complex(self.weight, y) * _complex(y, y).unsqueeze(-3)
        frequencies = self.mask.to(y.device) * torch.fft.fft2(coils, norm="ortho")
        return torch.view_as_real(frequencies).movedim(-1, -3).reshape(*y.shape[:-3], *self.output_shape).to(y.dtype)

    def adjoint(self, x: Tensor) -> Tensor:
        """The zero-filled images of the coils, combined with the conjugate sensitivities."""
        coils = x.reshape(*x.shape[:-3], -1, 2, *self.mask.shape)
        images = torch.fft.ifft2(self.mask.to(x.device) * _complex(coils, x), norm="ortho")
        combined = (_complex(self.weight, x).conj() * images).sum(-3)
        return torch.view_as_real(combined).movedim(-1, -3).to(x.dtype)

    def with_weight(self, weight: Tensor) -> "MultiCoilFourier":
        """Other sensitivities (coils, 2, H, W)."""
        return MultiCoilFourier(self.mask, weight)

    def bound(self) -> Tensor:
        """The largest sum of squared sensitivities of a pixel, times the largest square of the mask."""
        most = to_float64(self.weight).square().sum((0, 1)).max() * to_float64(self.mask).abs().max().square()
        return round_up(product_of_bounds(most, torch.ones_like(most)) * (1 + _ROUNDING), self.weight.dtype)


def _complex(parts: Tensor, like: Tensor) -> Tensor:
    wide = parts.to(like.device, torch.promote_types(like.dtype, torch.float32))
    return torch.complex(*wide.unbind(-3))


@checked
def downsampling(input_size: tuple[int, int], factor: int, *, channels: int = 1) -> Conv2d:
    """Super-resolution's measurement: the mean of every square of ``factor`` × ``factor`` pixels, per channel.

    Its rows are orthonormal up to the factor 1/``factor``. Both sides must be multiples of ``factor``.

    >>> downsampling((2, 4), 2).apply(torch.arange(8.0).reshape(1, 2, 4))
    tensor([[[2.5000, 4.5000]]])
    """
    if isinstance(factor, bool) or not isinstance(factor, int) or factor < 2:
        raise OptionError(f"factor must be a whole number ≥ 2, got {factor!r}")
    if input_size[0] % factor or input_size[1] % factor:
        raise ShapeError(f"an image of {input_size[0]} × {input_size[1]} does not divide into squares of {factor}")
    kernel = torch.full((channels, 1, factor, factor), 1 / factor**2)
    return Conv2d(kernel, input_size, stride=factor, groups=channels)


@checked
def parallel_beam(
    size: int, angles: Sequence[float], *, detectors: int | None = None, dtype: torch.dtype | None = None
) -> LinearOperator:
    r"""Tomography with parallel rays: line integrals of a square image, as a sparse matrix.

    Every pixel is projected onto the detector at every angle (in radians) and shared between the two nearest of its
    bins. The image fills the unit square. Measurements have shape ``(1, angles, detectors)``. ``dtype`` is the type in
    which bounds are computed.

    >>> A = parallel_beam(4, [0.0, torch.pi / 2], detectors=4)
    >>> A.apply(torch.ones(1, 4, 4))[0, 0]  # columns of length one
    tensor([1., 1., 1., 1.])
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 2:
        raise OptionError(f"size, the side of the image, must be a whole number ≥ 2, got {size!r}")
    turns = np.asarray(list(angles), dtype=float)
    if turns.ndim != 1 or not len(turns) or not np.isfinite(turns).all():
        raise OptionError("angles must be one or more finite numbers in radians")
    bins = math.ceil(size * math.sqrt(2)) if detectors is None else detectors
    if not isinstance(bins, int) or bins < 2:
        raise OptionError(f"detectors must be a whole number ≥ 2, got {detectors!r}")
    across, down = np.meshgrid(np.arange(size) - (size - 1) / 2, np.arange(size) - (size - 1) / 2)
    rows, columns, values = [], [], []
    for index, angle in enumerate(turns):
        place = (across * np.cos(angle) + down * np.sin(angle)).ravel() + (bins - 1) / 2
        low = np.floor(np.round(place, 9)).astype(int)
        for bin_, share in ((low, 1 - (place - low)), (low + 1, place - low)):
            kept = (bin_ >= 0) & (bin_ < bins) & (share > 1e-9)
            rows.append(index * bins + bin_[kept])
            columns.append(np.flatnonzero(kept))
            values.append(share[kept] / size)
    entries = np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))
    matrix = scipy.sparse.csr_array(entries, shape=(len(turns) * bins, size * size))
    return as_operator(matrix, (1, size, size), (1, len(turns), bins), dtype=dtype)

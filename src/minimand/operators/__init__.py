"""Linear maps of layers: apply, adjoint, restrict, and bounds on their norms, never below the truth."""

from .base import Bounds, LinearOperator
from .blocks import from_blocks, pad_to_blocks, to_blocks
from .conv import Conv1d, Conv2d
from .dense import Dense
from .fourier import SubsampledFourier, cartesian_mask, radial_mask
from .frames import BlockDCT, Frame, Wavelet
from .images import Composed, Transposed
from .lipschitz import lipschitz, majorant
from .sensing import BlockSensing, Inpainting, gaussian_blur, is_orthonormal, orthonormal_gaussian
from .spectral import certified_lambda_max, certified_norm_sq, lanczos
from .tracker import LipschitzTracker

__all__ = [
    "BlockDCT",
    "BlockSensing",
    "Bounds",
    "Composed",
    "Conv1d",
    "Conv2d",
    "Dense",
    "Frame",
    "Inpainting",
    "LinearOperator",
    "LipschitzTracker",
    "SubsampledFourier",
    "Transposed",
    "Wavelet",
    "cartesian_mask",
    "certified_lambda_max",
    "certified_norm_sq",
    "from_blocks",
    "gaussian_blur",
    "is_orthonormal",
    "lanczos",
    "lipschitz",
    "majorant",
    "orthonormal_gaussian",
    "pad_to_blocks",
    "radial_mask",
    "to_blocks",
]

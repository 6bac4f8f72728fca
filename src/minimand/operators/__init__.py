"""Linear operators: dense, convolutions, measurements of images, frames, and a user's own."""

from ..norms import LipschitzTracker, lipschitz
from .base import LinearOperator
from .blocks import from_blocks, pad_to_blocks, to_blocks
from .callables import operator
from .checking import check_operator
from .combined import Composed, Transposed
from .conv import Conv1d, Conv2d, Conv3d
from .conv_transpose import ConvTranspose1d, ConvTranspose2d
from .dense import Dense
from .fourier import SubsampledFourier, cartesian_mask, radial_mask
from .frames import BlockDCT, Frame, Wavelet
from .imaging import MultiCoilFourier, downsampling, parallel_beam
from .physics import as_operator
from .sensing import BlockSensing, Inpainting, gaussian_blur, orthonormal_gaussian

__all__ = [
    "BlockDCT",
    "BlockSensing",
    "Composed",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "Dense",
    "Frame",
    "Inpainting",
    "LinearOperator",
    "LipschitzTracker",
    "MultiCoilFourier",
    "SubsampledFourier",
    "Transposed",
    "Wavelet",
    "as_operator",
    "cartesian_mask",
    "check_operator",
    "downsampling",
    "from_blocks",
    "gaussian_blur",
    "lipschitz",
    "operator",
    "orthonormal_gaussian",
    "pad_to_blocks",
    "parallel_beam",
    "radial_mask",
    "to_blocks",
]

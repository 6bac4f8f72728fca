"""Upper bounds on the squared norm of a linear map: of layers, while training, of matrices, of callables."""

from .lipschitz import lipschitz, majorant
from .randomized import randomized_norm_sq
from .spectral import certified_norm_sq
from .tracker import LipschitzTracker

__all__ = [
    "LipschitzTracker",
    "certified_norm_sq",
    "lipschitz",
    "majorant",
    "randomized_norm_sq",
]

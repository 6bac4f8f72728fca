"""Linear maps of layers: apply, adjoint, restrict, and bounds on their norms, never below the truth."""

from .base import Bounds, LinearOperator
from .conv import Conv1d, Conv2d
from .dense import Dense
from .lipschitz import lipschitz, majorant
from .spectral import certified_lambda_max, certified_norm_sq, lanczos
from .tracker import LipschitzTracker

__all__ = [
    "Bounds",
    "Conv1d",
    "Conv2d",
    "Dense",
    "LinearOperator",
    "LipschitzTracker",
    "certified_lambda_max",
    "certified_norm_sq",
    "lanczos",
    "lipschitz",
    "majorant",
]

"""Linear maps of layers: apply, adjoint, restrict, and bounds on their norms, never below the truth."""

from minimand.operators.base import Bounds, LinearOperator
from minimand.operators.conv import Conv1d, Conv2d
from minimand.operators.dense import Dense
from minimand.operators.lipschitz import lipschitz, majorant
from minimand.operators.spectral import certified_lambda_max, certified_norm_sq, lanczos
from minimand.operators.tracker import LipschitzTracker

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

"""Networks whose layers are the iterations of an optimisation algorithm."""

from .coefficients import Coefficients, Learning
from .forms import as_algorithm, coefficient_parameters
from .history import AcceleratedUpdate, DenseUpdate
from .network import OptimizationNet, Transition, TwoStreamBlock
from .splitting import ADMMUpdate, MergeUpdate
from .updates import GradientUpdate, HeavyBallUpdate, NesterovUpdate, Update

__all__ = [
    "ADMMUpdate",
    "AcceleratedUpdate",
    "Coefficients",
    "DenseUpdate",
    "GradientUpdate",
    "HeavyBallUpdate",
    "Learning",
    "MergeUpdate",
    "NesterovUpdate",
    "OptimizationNet",
    "Transition",
    "TwoStreamBlock",
    "Update",
    "as_algorithm",
    "coefficient_parameters",
]

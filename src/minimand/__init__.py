"""That which is minimised: deep networks as optimisation, in PyTorch."""

from .nn import SolverConv2d, SolverLinear, convert, explain, revert
from .operators import lipschitz
from .solvers import solve

__all__ = ["SolverConv2d", "SolverLinear", "convert", "explain", "lipschitz", "revert", "solve"]
__version__ = "0.1.0"

"""That which is minimised: deep networks as optimisation, in PyTorch."""

from .operators import lipschitz
from .solvers import solve

__all__ = ["lipschitz", "solve"]
__version__ = "0.1.0"

"""That which is minimised: deep networks as optimisation, in PyTorch."""

from typing import TYPE_CHECKING, Any

from .nn import SolverConv2d, SolverLinear, convert, explain, revert
from .operators import lipschitz
from .solvers import solve

if TYPE_CHECKING:
    from .train import LPOM, ProxProp

__all__ = [
    "LPOM",
    "ProxProp",
    "SolverConv2d",
    "SolverLinear",
    "convert",
    "explain",
    "lipschitz",
    "revert",
    "solve",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Training methods load when they are used."""
    if name in ("LPOM", "ProxProp"):
        from . import train

        return getattr(train, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

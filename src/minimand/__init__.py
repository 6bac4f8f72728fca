"""That which is minimised: deep networks as optimisation, in PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .nn import SolverConv2d, SolverLinear, convert, explain, revert
    from .norms import lipschitz
    from .solvers import solve
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
__version__ = "0.2.0"

_PACKAGES = (
    "adjoints",
    "errors",
    "factor",
    "functions",
    "homogeneous",
    "network",
    "nn",
    "norms",
    "operators",
    "solvers",
    "train",
)
_HOMES = {
    "LPOM": "train",
    "ProxProp": "train",
    "SolverConv2d": "nn",
    "SolverLinear": "nn",
    "convert": "nn",
    "explain": "nn",
    "lipschitz": "norms",
    "revert": "nn",
    "solve": "solvers",
}


def __getattr__(name: str) -> Any:
    """Parts load when they are used: the import alone costs next to nothing beside torch's."""
    if name not in _HOMES and name not in _PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(f"{__name__}.{_HOMES.get(name, name)}")
    value = getattr(home, name) if name in _HOMES else home
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_PACKAGES})

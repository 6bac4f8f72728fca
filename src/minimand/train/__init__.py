"""Training: proximal backpropagation around any optimizer, and lifted methods that need no backpropagation."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lifted import LPOM, MAC, BlockPenalty, LiftedReLU, SplitADMM
    from .proxprop import AutocorrelationGram, CachedGram, ExactGram, ProxProp, SubsampledGram, paper_tau_theta

__all__ = [
    "LPOM",
    "MAC",
    "AutocorrelationGram",
    "BlockPenalty",
    "CachedGram",
    "ExactGram",
    "LiftedReLU",
    "ProxProp",
    "SplitADMM",
    "SubsampledGram",
    "paper_tau_theta",
]

_LIFTED = ("LPOM", "MAC", "BlockPenalty", "LiftedReLU", "SplitADMM")


def __getattr__(name: str) -> Any:
    """Load a method's package when its name is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = "lifted" if name in _LIFTED else "proxprop"
    return getattr(importlib.import_module(f".{package}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

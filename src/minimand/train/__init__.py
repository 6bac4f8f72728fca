"""Training methods: proximal backpropagation for any torch optimizer, and lifted methods without backpropagation."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lifted import LPOM, MAC, BlockPenalty, LiftedReLU, SplitADMM
    from .penalties import descent_angle, metric_range, penalty_energy, penalty_sweep
    from .proxprop import CachedGram, ExactGram, ProxProp, Relative, SubsampledGram, paper_tau_theta

__all__ = [
    "LPOM",
    "MAC",
    "BlockPenalty",
    "CachedGram",
    "ExactGram",
    "LiftedReLU",
    "ProxProp",
    "Relative",
    "SplitADMM",
    "SubsampledGram",
    "descent_angle",
    "metric_range",
    "paper_tau_theta",
    "penalty_energy",
    "penalty_sweep",
]

_LIFTED = ("LPOM", "MAC", "BlockPenalty", "LiftedReLU", "SplitADMM")
_THEORY = ("descent_angle", "metric_range", "penalty_energy", "penalty_sweep")


def __getattr__(name: str) -> Any:
    """Import a method's package on first access to its name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = "lifted" if name in _LIFTED else "penalties" if name in _THEORY else "proxprop"
    return getattr(importlib.import_module(f".{package}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

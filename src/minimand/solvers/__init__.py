"""Solvers: records of options with ``init`` and ``advance``, one loop, and :func:`solve`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..operators.tracker import LipschitzTracker
from .base import Solver
from .coordinate import RCD
from .gradient import FISTA, HeavyBall, ProxGD
from .iterate import iterate
from .linear import conjugate_gradient, gram_factor, ridge_factor
from .problem import Problem
from .sampling import Bernoulli, Importance, Nice, Sample, Sampling
from .splitting import ADMM
from .steps import Exponential, Harmonic, Schedule
from .stochastic import SVRG, ProxSG

if TYPE_CHECKING:
    from .solving import Solution, Trace, solve, trace

__all__ = [
    "ADMM",
    "FISTA",
    "RCD",
    "SVRG",
    "Bernoulli",
    "Exponential",
    "Harmonic",
    "HeavyBall",
    "Importance",
    "LipschitzTracker",
    "Nice",
    "Problem",
    "ProxGD",
    "ProxSG",
    "Sample",
    "Sampling",
    "Schedule",
    "Solution",
    "Solver",
    "Trace",
    "conjugate_gradient",
    "gram_factor",
    "iterate",
    "ridge_factor",
    "solve",
    "trace",
]


def __getattr__(name: str) -> Any:
    """What runs a solver needs the adjoints, which need this package: it loads when it is used."""
    if name not in ("Solution", "Trace", "solve", "trace"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.solving"), name)
    return value

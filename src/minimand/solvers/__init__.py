"""Solvers: records of options with ``init`` and ``advance``, one loop, and :func:`solve`."""

from ..norms import LipschitzTracker
from .base import Solver
from .coordinate import RCD
from .gradient import FISTA, HeavyBall, ProxGD
from .iterate import iterate
from .linear import conjugate_gradient
from .problem import Problem
from .sampling import Bernoulli, Importance, Nice, Sample, Sampling
from .solving import Solution, Trace, solve, trace
from .splitting import ADMM
from .steps import Exponential, Harmonic, Schedule
from .stochastic import SVRG, ProxSG

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
    "iterate",
    "solve",
    "trace",
]

"""Solvers: records of options with ``init`` and ``advance``, one loop, and :func:`solve`."""

from ..norms import LipschitzTracker
from .base import Solver
from .checking import check_datafit
from .choosing import Choice
from .coordinate import RCD
from .datafits import Datafit, Huber, Logistic, Poisson, Quadratic, SquaredHingeLoss
from .gradient import FISTA, HeavyBall, ProxGD
from .iterate import iterate
from .linear import conjugate_gradient
from .problem import Problem
from .sampling import Bernoulli, Importance, Nice, Sample, Sampling
from .solving import Solution, Trace, solve, trace
from .spectral import Spectral
from .splitting import ADMM
from .steps import Exponential, Harmonic, Schedule
from .stochastic import SVRG, ProxSG
from .watching import Progress
from .working import WorkingSet

__all__ = [
    "ADMM",
    "FISTA",
    "RCD",
    "SVRG",
    "Bernoulli",
    "Choice",
    "Datafit",
    "Exponential",
    "Harmonic",
    "HeavyBall",
    "Huber",
    "Importance",
    "LipschitzTracker",
    "Logistic",
    "Nice",
    "Poisson",
    "Problem",
    "Progress",
    "ProxGD",
    "ProxSG",
    "Quadratic",
    "Sample",
    "Sampling",
    "Schedule",
    "Solution",
    "Solver",
    "Spectral",
    "SquaredHingeLoss",
    "Trace",
    "WorkingSet",
    "check_datafit",
    "conjugate_gradient",
    "iterate",
    "solve",
    "trace",
]

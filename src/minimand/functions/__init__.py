"""Convex functions, each with its value and its prox.

Functions that occur only as conjugates of these are in :mod:`~minimand.functions.separable`,
:mod:`~minimand.functions.barriers` and :mod:`~minimand.functions.spectral`; ``conjugate()`` returns them.
"""

from .activations import from_activation
from .barriers import LogBarrier, LogBox, LogUnit
from .base import Function, Separable
from .charbonnier import Charbonnier
from .monotone import Monotone
from .objective import LayerObjective
from .separable import L1, Box, LeakyHinge, NonNegative, SquaredHinge, Zero
from .spectral import NuclearNorm, PositiveSemidefinite, SpectralBall
from .structured import Ball, GroupL2, Maximum, Simplex

__all__ = [
    "L1",
    "Ball",
    "Box",
    "Charbonnier",
    "Function",
    "GroupL2",
    "LayerObjective",
    "LeakyHinge",
    "LogBarrier",
    "LogBox",
    "LogUnit",
    "Maximum",
    "Monotone",
    "NonNegative",
    "NuclearNorm",
    "PositiveSemidefinite",
    "Separable",
    "Simplex",
    "SpectralBall",
    "SquaredHinge",
    "Zero",
    "from_activation",
]

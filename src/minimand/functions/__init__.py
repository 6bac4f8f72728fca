"""Convex functions, each with its value and its prox.

Functions that occur only as conjugates of these are in the modules of this package; ``conjugate()`` returns them.
"""

from .activations import from_activation
from .barriers import LogBarrier, LogBox, LogUnit
from .base import Function, Separable
from .charbonnier import Charbonnier
from .checking import check_function
from .entropy import SimplexEntropy
from .groups import Ball, GroupL2
from .intervals import L1, Box, ElasticNet
from .monotone import Monotone
from .objective import LayerObjective
from .separable import LeakyHinge, NonNegative, SquaredHinge, Zero
from .spectral import NuclearNorm, PositiveSemidefinite, SpectralBall
from .structured import Isotonic, L1Ball, Maximum, MaxNorm, Simplex
from .variation import TotalVariation, TotalVariation2d

__all__ = [
    "L1",
    "Ball",
    "Box",
    "Charbonnier",
    "ElasticNet",
    "Function",
    "GroupL2",
    "Isotonic",
    "L1Ball",
    "LayerObjective",
    "LeakyHinge",
    "LogBarrier",
    "LogBox",
    "LogUnit",
    "MaxNorm",
    "Maximum",
    "Monotone",
    "NonNegative",
    "NuclearNorm",
    "PositiveSemidefinite",
    "Separable",
    "Simplex",
    "SimplexEntropy",
    "SpectralBall",
    "SquaredHinge",
    "TotalVariation",
    "TotalVariation2d",
    "Zero",
    "check_function",
    "from_activation",
]

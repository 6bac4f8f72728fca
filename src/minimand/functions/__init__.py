"""Convex functions, each with its value and its prox."""

from .activations import from_activation
from .barriers import LogBarrier, LogBarrierConjugate, LogBox, LogBoxConjugate, LogUnit
from .base import Function, Separable
from .monotone import Monotone
from .objective import LayerObjective
from .separable import (
    L1,
    Box,
    LeakyHinge,
    NonNegative,
    NonPositive,
    NonPositiveRidge,
    Origin,
    SquaredHinge,
    Support,
    Zero,
)
from .spectral import NegativeSemidefinite, NuclearNorm, PositiveSemidefinite, SpectralBall
from .structured import Ball, GroupL2, Maximum, Simplex

__all__ = [
    "L1",
    "Ball",
    "Box",
    "Function",
    "GroupL2",
    "LayerObjective",
    "LeakyHinge",
    "LogBarrier",
    "LogBarrierConjugate",
    "LogBox",
    "LogBoxConjugate",
    "LogUnit",
    "Maximum",
    "Monotone",
    "NegativeSemidefinite",
    "NonNegative",
    "NonPositive",
    "NonPositiveRidge",
    "NuclearNorm",
    "Origin",
    "PositiveSemidefinite",
    "Separable",
    "Simplex",
    "SpectralBall",
    "SquaredHinge",
    "Support",
    "Zero",
    "from_activation",
]

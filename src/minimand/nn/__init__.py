"""Layers that are solvers, the dropouts they induce, and what they do to a network."""

from .convert import Rule, convert, revert
from .dropout import AdditiveDropout, ImportanceDropout
from .explain import Explanation, explain
from .layers import SolverConv1d, SolverConv2d, SolverLayer, SolverLinear, SolverOptions

__all__ = [
    "AdditiveDropout",
    "Explanation",
    "ImportanceDropout",
    "Rule",
    "SolverConv1d",
    "SolverConv2d",
    "SolverLayer",
    "SolverLinear",
    "SolverOptions",
    "convert",
    "explain",
    "revert",
]

"""Layers that are solvers."""

from .layers import SolverConv1d, SolverConv2d, SolverLayer, SolverLinear, SolverOptions

__all__ = ["SolverConv1d", "SolverConv2d", "SolverLayer", "SolverLinear", "SolverOptions"]

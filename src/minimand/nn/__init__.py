"""Solver layers and their dropouts, conversion of networks, networks as algorithms, unrolled reconstruction."""

from .blocks import (
    HeavyBallUpdate,
    Learning,
    NesterovUpdate,
    OptimizationNet,
    Transition,
    as_algorithm,
    coefficient_parameters,
)
from .convert import Rule, convert, plan, revert
from .convolutions import SolverConv1d, SolverConv2d, SolverConv3d, SolverConvTranspose1d, SolverConvTranspose2d
from .dropout import AdditiveDropout, ImportanceDropout
from .explain import explain
from .layers import SolverLayer, SolverLinear
from .options import SolverOptions
from .running import sample, set_strength, warm_start
from .suggest import suggest
from .unrolled import (
    ADMMNet,
    Architecture,
    FISTANet,
    ISTANet,
    RidgeNet,
    RidgeTrainer,
    UnrolledNet,
    diagnose,
    least_squares_start,
    smooth_tv_reconstruction,
    sparse_reconstruction,
)

__all__ = [
    "ADMMNet",
    "AdditiveDropout",
    "Architecture",
    "FISTANet",
    "HeavyBallUpdate",
    "ISTANet",
    "ImportanceDropout",
    "Learning",
    "NesterovUpdate",
    "OptimizationNet",
    "RidgeNet",
    "RidgeTrainer",
    "Rule",
    "SolverConv1d",
    "SolverConv2d",
    "SolverConv3d",
    "SolverConvTranspose1d",
    "SolverConvTranspose2d",
    "SolverLayer",
    "SolverLinear",
    "SolverOptions",
    "Transition",
    "UnrolledNet",
    "as_algorithm",
    "coefficient_parameters",
    "convert",
    "diagnose",
    "explain",
    "least_squares_start",
    "plan",
    "revert",
    "sample",
    "set_strength",
    "smooth_tv_reconstruction",
    "sparse_reconstruction",
    "suggest",
    "warm_start",
]

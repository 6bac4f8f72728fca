"""Dropout as a regulariser: what it minimises, its optimum in closed form, and the penalty that replaces sampling."""

from .equalize import equalize
from .factorization import DropoutFactorization
from .objective import dropout_objective, dropout_sample, dropout_weight, variable_rate
from .optimum import dropout_optimum, nuclear_squared

__all__ = [
    "DropoutFactorization",
    "dropout_objective",
    "dropout_optimum",
    "dropout_sample",
    "dropout_weight",
    "equalize",
    "nuclear_squared",
    "variable_rate",
]

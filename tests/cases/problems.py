"""Small problems of every kind, in float64, with weights that make them well conditioned but not trivial."""

import torch

from minimand.functions import (
    L1,
    Box,
    Function,
    GroupL2,
    NonNegative,
    Simplex,
    SquaredHinge,
    Zero,
    from_activation,
)
from minimand.operators import Conv2d, Dense
from minimand.solvers import Problem

SEPARABLE = {
    "zero": Zero(),
    "relu": NonNegative(),
    "leaky": SquaredHinge(4.0),
    "l1": L1(0.3),
    "box": Box(-0.4, 0.6),
    "tanh": from_activation("tanh"),
}
COUPLED = {"simplex": Simplex(), "group": GroupL2(0.5)}


def dense(
    function: Function, *, outputs: int = 6, inputs: int = 8, rows: int = 3, seed: int = 0, ridge: float = 0.1
) -> Problem:
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=g, dtype=torch.float64) / inputs**0.5
    y = torch.randn(rows, inputs, generator=g, dtype=torch.float64)
    bias = 0.3 * torch.randn(outputs, generator=g, dtype=torch.float64)
    return Problem(Dense(weight), function, y, bias, ridge)


def conv(function: Function, *, seed: int = 0, ridge: float = 0.1, stride: int = 2) -> Problem:
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 2, 3, 3, generator=g, dtype=torch.float64) / 18**0.5
    y = torch.randn(2, 2, 5, 6, generator=g, dtype=torch.float64)
    bias = 0.3 * torch.randn(4, generator=g, dtype=torch.float64)
    return Problem(Conv2d(weight, (5, 6), stride=stride, padding=1), function, y, bias, ridge)

r"""Exact column updates of a quadratic: the innermost loop of every factorisation of squares.

The vectors of X lower :math:`\tfrac12\|Y - XW\|^2 + \sum_i w_i g(x_i)` one after the other, for a fixed W. Of W only
its product with the data and its Gram matrix are needed, so a sweep costs :math:`O(r^2 n)`, whatever the width of Y.
The gauges of the library run on numpy arrays in place: a call of numpy costs a fifth of a call of torch, which is most
of the time of a fit of a few hundred rows. Other gauges, devices and sharded rows run the same steps on tensors.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..solvers.iterate import iterate
from .matrices import RowSharding
from .regularizers import Euclidean, Gauge

__all__ = ["Updated", "updated"]

INNER_SWEEPS = 10
STALL = 0.3


class Updated(NamedTuple):
    r"""Vectors after their updates.

    Attributes:
        X: The vectors, as rows.
        violation: :math:`\sum_i\|w_i\|^2\|x_i - x_i'\|_1` of the first sweep: the l1 norm of the projected gradient, up
            to the curvature of the gauge. scikit-learn's coordinate descent stops by the same quantity.
        scale: Its value at X = 0 without a penalty, the l1 norm of the product of W with the data.
    """

    X: Tensor
    violation: float
    scale: float


def updated(
    X: Tensor,
    goal: Tensor,
    product: Tensor,
    weights: Tensor,
    gauge: Gauge,
    rows: RowSharding,
    sweeps: int = INNER_SWEEPS,
) -> Updated:
    """X after sweeps of exact updates over its vectors (rows of X), until they move little.

    Args:
        X: Vectors as rows.
        goal: The product of the data with W, vectors as rows.
        product: The Gram matrix of W.
        weights: The weight of each vector's gauge.
        gauge: Of the vectors.
        rows: Where the entries of the vectors are.
        sweeps: The largest number of sweeps.
    """
    diagonal = product.diagonal()
    alive = diagonal > 0
    inverse = torch.where(alive, 1 / torch.where(alive, diagonal, 1.0), 0.0)
    # a = (Yv − Σ_{j≠i} u_j ⟨v_j, v⟩) / ‖v‖²: one product with a vector per update, the rest is computed beforehand.
    goals = goal * inverse.unsqueeze(1)
    others = (product * -inverse.unsqueeze(1)).fill_diagonal_(0.0)
    steps, lives = (weights * inverse).tolist(), alive.tolist()
    X = X.clone(memory_format=torch.contiguous_format)
    plain = type(gauge) is Euclidean and X.device.type == "cpu" and rows.group is None
    pass_ = _array_pass if plain else _tensor_pass
    sweep = pass_(X, goals, others, [(i, step) for i, step in enumerate(steps) if lives[i]], gauge, rows)
    X[~alive] = 0.0

    def moving(state: tuple[float, float], k: int) -> tuple[float, float]:
        """One sweep, in place; the first and the last movement."""
        before = X.clone()
        sweep()
        moved = float(rows.sum(torch.dot(before.sub_(X).abs_().sum(-1), diagonal)))
        return state[0] if k else moved, moved

    (first, _), _ = iterate(moving, (0.0, 0.0), sweeps, until=lambda s, k: s[1] <= STALL * s[0])
    return Updated(X, first, float(rows.sum(goal.abs().sum())))


Pass = Callable[[], None]


def _tensor_pass(
    X: Tensor, goals: Tensor, others: Tensor, steps: list[tuple[int, float]], gauge: Gauge, rows: RowSharding
) -> Pass:
    vectors, targets, couplings, transposed = X.unbind(), goals.unbind(), others.unbind(), X.mT

    def sweep() -> None:
        for i, step in steps:
            vectors[i].copy_(gauge.prox_(torch.addmv(targets[i], transposed, couplings[i]), step, rows))

    return sweep


def _array_pass(
    X: Tensor, goals: Tensor, others: Tensor, steps: list[tuple[int, float]], gauge: Gauge, rows: RowSharding
) -> Pass:
    """As :func:`_tensor_pass` for the gauge ‖u‖₂ + γ‖u‖₁, on the memory of X."""
    assert isinstance(gauge, Euclidean)
    array, targets = X.numpy(), list(goals.contiguous().numpy())
    vectors, couplings = list(array), list(others.contiguous().numpy())
    sparse, nonnegative = gauge.sparse, gauge.nonnegative
    point = np.empty(array.shape[1], dtype=array.dtype)

    def sweep() -> None:
        for i, step in steps:
            np.dot(couplings[i], array, out=point)
            np.add(point, targets[i], out=point)
            if sparse:
                np.subtract(point, np.clip(point, -step * sparse, step * sparse), out=point)
            if nonnegative:
                np.maximum(point, 0.0, out=point)
            norm = math.sqrt(point.dot(point))
            np.multiply(point, 1 - step / norm if norm > step else 0.0, out=vectors[i])

    return sweep

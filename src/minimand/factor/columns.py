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
            to the curvature of the gauge, with entries counted by their weights. scikit-learn's coordinate descent
            stops by the same quantity.
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
    roots: Tensor | None = None,
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
        roots: The roots of the weights of the entries, if the vectors are multiplied by them; l1 norms are weighted so
            that an entry of weight w counts as w equal ones.
    """
    counts = X.new_ones(X.shape[1]) if roots is None else roots.to(X)
    plain = type(gauge) is Euclidean and X.device.type == "cpu" and rows.group is None
    begin = _array_pass if plain else _tensor_pass
    X, sweep = begin(X, goal, product, weights, gauge, rows, counts)

    def moving(state: tuple[float, float], k: int) -> tuple[float, float]:
        """One sweep, in place; the first and the last movement."""
        moved = sweep()
        return state[0] if k else moved, moved

    (first, _), _ = iterate(moving, (0.0, 0.0), sweeps, until=lambda s, k: s[1] <= STALL * s[0])
    return Updated(X, first, float(rows.sum((goal.abs() @ counts).sum())))


# A sweep over the vectors, in place, which returns the movement. Each update is the prox of
# a = (Yv − Σ_{j≠i} u_j ⟨v_j, v⟩) / ‖v‖²: one product with a vector, the rest is computed beforehand.
Pass = Callable[[], float]


def _tensor_pass(
    X: Tensor, goal: Tensor, product: Tensor, weights: Tensor, gauge: Gauge, rows: RowSharding, counts: Tensor
) -> tuple[Tensor, Pass]:
    diagonal = product.diagonal()
    alive = diagonal > 0
    inverse = torch.where(alive, 1 / torch.where(alive, diagonal, 1.0), 0.0)
    goals = (goal * inverse.unsqueeze(1)).unbind()
    couplings = (product * -inverse.unsqueeze(1)).fill_diagonal_(0.0).unbind()
    steps = (weights * inverse).tolist()
    X = torch.where(alive.unsqueeze(1), X, 0.0)
    vectors, transposed, lives = X.unbind(), X.mT, torch.nonzero(alive).flatten().tolist()

    def sweep() -> float:
        before = X.clone()
        for i in lives:
            vectors[i].copy_(gauge.prox_(torch.addmv(goals[i], transposed, couplings[i]), steps[i], rows))
        return float(rows.sum(torch.dot(before.sub_(X).abs_() @ counts, diagonal)))

    return X, sweep


def _array_pass(
    X: Tensor, goal: Tensor, product: Tensor, weights: Tensor, gauge: Gauge, rows: RowSharding, counts: Tensor
) -> tuple[Tensor, Pass]:
    """As :func:`_tensor_pass` for the gauge ‖u‖₂ + γ‖u‖₁, on numpy arrays."""
    assert isinstance(gauge, Euclidean)
    array, gram = np.array(X.numpy(), order="C"), product.numpy()
    diagonal = gram.diagonal()
    alive = diagonal > 0
    inverse = np.divide(1, diagonal, out=np.zeros_like(diagonal), where=alive)[:, None]
    goals, others = goal.numpy() * inverse, gram * -inverse
    np.fill_diagonal(others, 0.0)
    steps = weights.numpy() * inverse[:, 0]
    array[~alive] = 0.0
    point, zero = np.empty(array.shape[1], dtype=array.dtype), np.zeros(array.shape[1], dtype=array.dtype)
    lives = [(steps[i].item(), others[i], goals[i], array[i]) for i in np.flatnonzero(alive)]
    sparse, nonnegative, measure = gauge.sparse, gauge.nonnegative, counts.numpy()
    # Looking up a name costs as much as a tenth of an update of a hundred entries.
    add, multiply, maximum, sqrt = np.add, np.multiply, np.maximum, math.sqrt

    def sweep() -> float:
        before = array.copy()
        for step, coupling, target, vector in lives:
            coupling.dot(array, point)
            add(point, target, point)
            if sparse:
                np.subtract(point, np.clip(point, -step * sparse, step * sparse), point)
            if nonnegative:
                maximum(point, zero, out=point)
            norm = sqrt(point.dot(point))
            multiply(point, 1 - step / norm if norm > step else 0.0, vector)
        np.abs(np.subtract(before, array, before), before)
        return float(before.dot(measure).dot(diagonal))

    return torch.from_numpy(array), sweep

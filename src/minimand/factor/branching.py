"""Branch and bound over the polar of non-negative factors, for matrices with a short side."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..norms.spectral import EPS
from ..solvers.iterate import iterate

__all__ = ["SHORTEST", "branched_bound"]

# The longest short side, and the largest number of cones at a time.
SHORTEST, CONES = 5, 200_000
DEPTH = 200


class _Cones(NamedTuple):
    generators: Tensor  # cones × m × m, unit vectors as rows
    values: Tensor  # cones × m, the value at each
    bounds: Tensor
    dropped: float  # the largest bound of a cone that was given up
    best: float  # the largest value seen
    work: float


def branched_bound(Z: Tensor, level: float, accuracy: float, budget: float) -> float:
    r"""An upper bound on :math:`\max\{u^\top Z v : u, v \ge 0, \|u\| = \|v\| = 1\}` by branch and bound over v.

    The maximum over u is :math:`g(v) = \|(Zv)_+\|`, convex and positively homogeneous. On the cone of unit vectors
    :math:`w_1, \dots, w_m \ge 0` a unit vector is :math:`v = \sum c_k w_k` with :math:`c \ge 0`, so that

    .. math:: g(v) \le \sum_k c_k g(w_k) \le \frac{\max_k g(w_k)}{(\gamma + (1 - \gamma)/m)^{1/2}},
        \qquad \gamma = \min_{k \ne l} w_k^\top w_l ,

    because :math:`1 = \|v\|^2 \ge (\gamma + (1 - \gamma)/m)(\sum c_k)^2`. The cones are halved along their longest
    edge, from the whole orthant on, and given up when their bound is at most :math:`(1 + \text{accuracy})` times
    ``level`` or the largest value seen.

    Args:
        Z: The matrix, in float64; v lies on its shorter side.
        level: The value that would certify.
        accuracy: The relative distance above it at which the bound is good enough.
        budget: Floating point operations.

    >>> Z = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).double()      # norm 2; the polar over u, v ≥ 0 is 1
    >>> 1.0 <= branched_bound(Z, 1.0, 1e-3, 1e7) <= 1.0011
    True
    """
    Z = Z.mT if Z.shape[0] < Z.shape[1] else Z
    n, m = Z.shape
    price = float(2 * n * m + 6 * m * m + 100)
    slack = 8 * (n + m + 8) * EPS * float(torch.linalg.matrix_norm(Z))

    def values(vectors: Tensor) -> Tensor:
        return torch.linalg.vector_norm((vectors @ Z.mT).relu(), dim=-1) + slack

    def split(state: _Cones, k: int) -> _Cones:
        generators, known, _, dropped, best, work = state
        index = torch.arange(len(generators), device=Z.device)
        first, second = _longest(generators)
        middle = generators[index, first] + generators[index, second]
        middle = middle / torch.linalg.vector_norm(middle, dim=-1, keepdim=True)
        new = values(middle)
        halves = []
        for place in (first, second):
            part, at = generators.clone(), known.clone()
            part[index, place], at[index, place] = middle, new
            halves.append((part, at))
        generators, known = (torch.cat(x) for x in zip(*halves, strict=True))
        best = max(best, float(new.max()))
        bounds = _bounds(generators, known)
        open_ = bounds > (1 + accuracy) * max(level, best)
        closed = bounds[~open_]
        dropped = max(dropped, float(closed.max()) if len(closed) else 0.0)
        return _Cones(generators[open_], known[open_], bounds[open_], dropped, best, work + price * len(index))

    def done(state: _Cones, k: int) -> bool:
        count = len(state.generators)
        return not count or count > CONES or state.work + price * count > budget

    orthant = torch.eye(m, dtype=Z.dtype, device=Z.device).unsqueeze(0)
    corners = values(orthant)
    start = _Cones(orthant, corners, _bounds(orthant, corners), 0.0, float(corners.max()), 0.0)
    state = start if m == 1 else iterate(split, start, DEPTH, until=done)[0]
    return max([state.dropped, *state.bounds.max().reshape(-1).tolist()] if len(state.bounds) else [state.dropped])


def _bounds(generators: Tensor, values: Tensor) -> Tensor:
    """The bound of each cone."""
    m = generators.shape[1]
    if m == 1:
        return values.amax(1)
    gamma = _cosines(generators).amin((1, 2)).clamp(0, 1)
    share = (gamma + (1 - gamma) / m) * (1 - 16 * m * EPS)
    return values.amax(1) / share.sqrt()


def _cosines(generators: Tensor) -> Tensor:
    return generators @ generators.mT


def _longest(generators: Tensor) -> tuple[Tensor, Tensor]:
    """The two generators of each cone that are farthest apart."""
    place = _cosines(generators).flatten(1).argmin(1)
    m = generators.shape[1]
    return torch.div(place, m, rounding_mode="floor"), place % m

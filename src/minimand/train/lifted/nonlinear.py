"""Block updates of the penalty methods, whose problems contain the activation: monotone Gauss–Newton steps."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ...functions import LeakyHinge, NonNegative
from ...solvers.linear import conjugate_gradient, ridge_factor
from .maps import AffineMap
from .units import Unit
from .weights import Direction, ridge_shift

__all__ = ["fit_activation", "fit_weight", "pre_activation", "ridge_activation"]

CG_ITERATIONS = 10
HALVINGS = 10


def fit_activation(affine: AffineMap, x: Tensor, anchor: Tensor, target: Tensor, s: float, *, newton: bool) -> Tensor:
    r"""A descent step on :math:`\tfrac{s}{2}\|x - a\|^2 + \tfrac12\|\varphi(Ax + b) - t\|^2`, for each sample.

    With ``newton`` the direction solves :math:`(sI + J^\top J)d = -\nabla` by conjugate gradients, where
    :math:`J = \operatorname{diag}(\varphi'(z))A`. Otherwise it is the negative gradient divided by the curvature bound
    :math:`s + \beta^2\|A\|^2`. It is halved until the objective falls. A sample whose objective does not fall stays
    unchanged.
    """
    unit, dims = affine.layer.unit, tuple(range(1, x.dim()))

    def objective(point: Tensor) -> Tensor:
        error = unit.phi(affine.apply(point)) - target
        squares = error.flatten(1).square().sum(1) + s * (point - anchor).flatten(1).square().sum(1)
        return 0.5 * squares.reshape(-1, *(1,) * len(dims))

    z = affine.apply(x)
    slope = unit.derivative(z)
    descent = affine.adjoint(slope * (target - unit.phi(z))) - s * (x - anchor)
    if newton:
        weight = slope.square()

        def normal(d: Tensor) -> Tensor:
            return s * d + affine.adjoint(weight * affine.linear(d))

        direction = conjugate_gradient(normal, descent, CG_ITERATIONS, sample_dims=len(dims))
    else:
        direction = descent / (s + unit.slope**2 * affine.norm_sq())
    return _descend(objective, x, direction)


def fit_weight(affine: AffineMap, x: Tensor, target: Tensor, damping: float) -> Direction:
    r"""A descent step on :math:`\tfrac12\|\varphi(RP^\top) - T\|^2` over a layer's parameters P, for each output.

    The direction is Gauss–Newton: :math:`(R^\top D_j^2 R + sI)d_j = R^\top D_j(t_j - \varphi(Rp_j))` with :math:`D_j =
    \operatorname{diag}\varphi'(Rp_j)`, solved by conjugate gradients. It is halved until the objective of its output
    falls. The shift s is :func:`~.weights.ridge_shift`.
    """
    layer = affine.layer
    unit, rows = layer.unit, affine.rows(x)
    shift = ridge_shift(rows, damping, layer.bias is not None)
    if layer.bias is not None:
        rows = torch.nn.functional.pad(rows, (0, 1), value=1.0)
    goal, now = affine.columns(target).mT, layer.parameters()
    scale = 1.0 if affine.scale is None else affine.scale.unsqueeze(1)
    offset = 0.0 if affine.shift is None else affine.shift.unsqueeze(1)

    def objective(parameters: Tensor) -> Tensor:
        return 0.5 * (unit.phi(scale * (parameters @ rows.mT) + offset) - goal).square().sum(1, keepdim=True)

    z = scale * (now @ rows.mT) + offset
    slope = unit.derivative(z) * scale
    weight = slope.square()
    descent = (slope * (goal - unit.phi(z))) @ rows
    direction = conjugate_gradient(lambda d: shift * d + (weight * (d @ rows.mT)) @ rows, descent, CG_ITERATIONS)
    moved = _descend(objective, now, direction) - now
    return Direction(None, moved, None) if layer.bias is None else Direction(None, moved[:, :-1], moved[:, -1])


def ridge_activation(affine: AffineMap, x: Tensor, anchor: Tensor, target: Tensor, s: float) -> Tensor:
    r"""The minimiser of :math:`\tfrac{s}{2}\|x - a\|^2 + \tfrac12\|Ax + b - t\|^2`.

    Dense layers use a Cholesky factor; convolutions use conjugate gradients from ``x``.
    """
    right = s * anchor + affine.adjoint(target - affine.apply(torch.zeros_like(x)))
    if affine.matrix is not None:
        return ridge_factor(affine.matrix.mT, s).solve(right)

    def normal(d: Tensor) -> Tensor:
        return s * d + affine.adjoint(affine.linear(d))

    return conjugate_gradient(normal, right, CG_ITERATIONS, x0=x, sample_dims=x.dim() - 1)


def pre_activation(unit: Unit, u: Tensor, center: Tensor, x: Tensor) -> Tensor:
    r"""A minimiser of :math:`\tfrac12(u - c)^2 + \tfrac12(x - \varphi(u))^2` in each entry, never worse than ``u``.

    For the identity, ReLU and leaky ReLU it is a closed form: the better of the two linear branches. Otherwise the
    minimiser lies between c and :math:`c + \beta(x - \varphi(c))`, and a grid search with :math:`32\beta^2` intervals,
    refined five times, finds it.
    """
    if unit.linear:
        return 0.5 * (center + x)
    if isinstance(unit.function, NonNegative | LeakyHinge) and unit.slope == 1:
        slope = unit.function.slope if isinstance(unit.function, LeakyHinge) else 0.0
        above, below = (0.5 * (center + x)).clamp(min=0), ((center + slope * x) / (1 + slope**2)).clamp(max=0)
        return _best(unit, above, [below], center, x)
    width = unit.slope * (x - unit.phi(center))
    safe = torch.where(width == 0, torch.ones_like(width), width)
    # A steep activation reaches x within a fraction 1/β² of the interval.
    count = 32 * math.ceil(unit.slope**2)
    best = _best(unit, u, (center + step / count * width for step in range(count + 1)), center, x)
    half = 1 / count
    for _ in range(5):
        middle = ((best - center) / safe).clamp(0, 1)
        shares = [(middle + half * step / 4).clamp(0, 1) for step in range(-4, 5)]
        best = _best(unit, best, (center + share * width for share in shares), center, x)
        half /= 4
    return best


def _best(unit: Unit, first: Tensor, others: Iterable[Tensor], center: Tensor, x: Tensor) -> Tensor:
    def value(u: Tensor) -> Tensor:
        return (u - center).square() + (x - unit.phi(u)).square()

    best, least = first, value(first)
    for candidate in others:
        trial = value(candidate)
        best = torch.where(trial < least, candidate, best)
        least = torch.minimum(trial, least)
    return best


def _descend(objective: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor) -> Tensor:
    """Backtrack: for each leading index, take the first of the steps 1, ½, ¼ … that lowers the objective."""
    now = objective(point)
    moved, waiting = point, torch.ones_like(now, dtype=torch.bool)
    length = 1.0
    for _ in range(HALVINGS):
        trial = point + length * direction
        accepted = waiting & (objective(trial) < now)
        moved = torch.where(accepted, trial, moved)
        waiting = waiting & ~accepted
        if not bool(waiting.any()):
            break
        length /= 2
    return moved

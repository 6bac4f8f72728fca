r"""Certified minimisation of a learned objective: accelerated proximal gradient with a proof of descent."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...solvers.iterate import iterate
from ...solvers.momentum import fista_weight
from .fidelity import Fidelity
from .regularizer import RidgeRegularizer

__all__ = ["Descended", "descend"]

# An accelerated step is accepted if it lowers the objective by this share of L times the squared distance. A plain
# step lowers it by L/2 times the squared distance.
SUFFICIENT = 0.01


class Descended(NamedTuple):
    """The result of :func:`descend`: the images, and one number per sample of everything else."""

    x: Tensor
    #: R plus the data term after the first iteration, and at the end, in float64.
    start: Tensor
    objective: Tensor
    #: The norm of the last gradient mapping step relative to that of the image; zero where rounding ended the descent.
    #: Above ``tol``: the iterations were used up, or rounding hides a decrease by longer steps.
    change: Tensor
    iterations: Tensor
    #: The objective summed over the batch after each iteration.
    history: list[float]


class _Point(NamedTuple):
    """Images, the gradient of R there, and the objective."""

    x: Tensor
    slope: Tensor
    objective: Tensor


class _State(NamedTuple):
    point: _Point
    previous: _Point
    weight: Tensor
    rows: Tensor
    result: Descended


@torch.no_grad()
def descend(
    regularizer: RidgeRegularizer,
    fidelity: Fidelity,
    x: Tensor,
    smoothness: float,
    iterations: int,
    tol: float,
    before: Tensor | None = None,
    weight: float = 1.0,
) -> Descended:
    r"""Minimise :math:`F(x) = R(x) + f(x)` from a point that satisfies the constraint of the data term f.

    With Nesterov's β, :math:`v = x + \beta(x - x_-)`, :math:`g = \nabla R(x) + \beta(\nabla R(x) - \nabla R(x_-))`
    and the step :math:`\eta = 1/L`, an iteration tries the accelerated step
    :math:`z = \operatorname{prox}_{\eta f}(v - \eta g)` and accepts it if
    :math:`F(z) \le F(x) - \delta\|z - x\|^2`. Otherwise it resets β and takes the plain step from x, which lowers F by
    at least :math:`\tfrac L2\|z - x\|^2`, as R is L-smooth and f is convex. So F never rises, and
    :math:`\sum_k\|x_{k+1} - x_k\|^2 \le (F(x_0) - \inf F)/\delta`. A sample ends when the step
    :math:`\|z - v\| \le \mathrm{tol}\,\|z\|`, or when rounding hides every decrease.

    ``before`` and the Nesterov ``weight`` continue the momentum of earlier iterations.

    R and its gradient are evaluated together, at the iterates only: g is :math:`\nabla R(v)` for a quadratic R, and the
    proof holds for every candidate z.

    Source: Li & Lin, *Accelerated proximal gradient methods for nonconvex programming*, NIPS 2015, with the gradient
    extrapolated.
    """

    def point(x: Tensor, part: Fidelity) -> _Point:
        values, slope = regularizer.evaluated(x)
        return _Point(x, slope, values + part.value(x))

    def step(state: _State, k: int) -> _State:
        now, before, weight, rows, result = state
        part = fidelity.rows(rows)
        following = fista_weight(weight)
        momentum = ((weight - 1) / following).to(now.x.dtype)[:, None, None, None]
        v = torch.lerp(before.x, now.x, 1 + momentum)
        new = point(part.forward_step(v, torch.lerp(before.slope, now.slope, 1 + momentum), smoothness), part)
        moved = _norms(new.x - v)
        distance = _norms(new.x - now.x).double().square()
        accepted = new.objective <= now.objective - SUFFICIENT * smoothness * distance
        stuck = torch.zeros_like(accepted)
        if not bool(accepted.all()):
            again = torch.nonzero(~accepted).flatten()
            start, few = _rows(now, again), part.rows(again)
            fallback = point(few.gradient_step(start.x, start.slope, smoothness)[0], few)
            worse = fallback.objective > start.objective
            stuck[again] = worse  # only rounding makes a plain step rise
            moved[again] = _norms(fallback.x - start.x)
            new = _put(new, again, _put(fallback, torch.nonzero(worse).flatten(), _rows(start, worse)))
            following = torch.where(accepted, following, torch.ones_like(following))
        result.objective[rows], result.iterations[rows] = new.objective, k + 1
        size = _norms(new.x).clamp_min(torch.finfo(new.x.dtype).tiny)
        share = moved / size
        # Rounding of the objective hides the effect of steps up to the root of a rounding unit, and not of longer ones.
        hidden = stuck & (share <= torch.finfo(share.dtype).eps ** 0.5)
        result.change[rows] = torch.where(hidden, torch.zeros_like(share), share).double()
        result.x[rows] = new.x
        if k == 0:
            result.start[rows] = now.objective
        result.history.append(float(result.objective.sum()))
        done = stuck | (result.change[rows] <= tol)
        if bool(done.any()):
            left = torch.nonzero(~done).flatten()
            return _State(_rows(new, left), _rows(now, left), following[left], rows[left], result)
        return _State(new, now, following, rows, result)

    first, double = point(x, fidelity), torch.zeros(len(x), dtype=torch.float64, device=x.device)
    result = Descended(
        x.clone(), first.objective.clone(), first.objective.clone(), double + torch.inf, double.long(), []
    )
    rows = torch.arange(len(x), device=x.device)
    previous = first if before is None else first._replace(x=before)
    state = _State(first, previous, torch.full((len(x),), weight, device=x.device), rows, result)
    return iterate(step, state, iterations if len(x) else 0, until=lambda s, _: not len(s.rows))[0].result


def _norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.flatten(1), dim=1)


def _rows(point: _Point, index: Tensor) -> _Point:
    return _Point(*(each[index] for each in point))


def _put(point: _Point, index: Tensor, part: _Point) -> _Point:
    """The points with some rows replaced."""
    if len(index) == len(point.x):
        return part
    return _Point(*(whole.index_copy(0, index, new) for whole, new in zip(point, part, strict=True)))

r"""Certificates: an upper bound on the distance of a factorisation's objective to the global minimum.

With the polar :math:`p = \max\{u^\top R v : \theta(u, v) \le 1\}` of the negative loss gradient :math:`R`, a scaled
:math:`R` is a feasible point of the dual problem. Weak duality then bounds the distance to the global minimum at *any*
point, however it was computed. Only an upper bound on the polar proves anything. A lower bound comes with a direction
and shows that the point can be improved.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..arguments import checked
from ..errors import OptionError, ShapeError, require_positive
from ..linalg import without_autocast
from .bounds import BUDGET, CALLS, Bound
from .entrywise import LossMaker, loss_from
from .inputs import given_matrix, leveled, unmasked
from .losses import Loss, Squared, rounding
from .matrices import DualMatrix, summation_error
from .observed import masked
from .problem import NOT_CERTIFIED, Certificate, FactorProblem, Status, judge
from .regularizers import BoundOptions, Directions, Regularizer, named_regularizer
from .sparse import SparseData, is_sparse, sparse_given

__all__ = ["SWEEPS", "Finding", "certify", "certify_factors", "conclude", "postponed"]

DIRECTIONS = 4
SWEEPS = (3, 30)  # of the two searches for directions; the second is made only if the first is inconclusive


class Finding(NamedTuple):
    """A certificate, the objective of the point, and the directions that were found, best first."""

    certificate: Certificate
    objective: float
    directions: Directions | None


@checked
def certify(
    Y: Any,
    U: Any,
    V: Any,
    *,
    lam: float,
    regularizer: Literal["l2", "nonnegative", "sparse"] | Regularizer = "l2",
    gamma: float | None = None,
    loss: LossMaker = Squared,
    mask: Any = None,
    tol: float = 1e-3,
    effort: float = 1.0,
) -> Certificate:
    r"""An upper bound on the distance of given factors to the global minimum of

    .. math:: f(U, V) = \tfrac12\|P_\Omega(Y - UV^\top)\|^2 + \lambda\sum_i \theta(U_i, V_i) .

    It holds for factors of any origin: scikit-learn, tensorly, an SVD, a guess. With the residual R, an upper bound
    :math:`\hat p` on its polar and :math:`c = \operatorname{clip}(\langle Y,R\rangle/\|R\|^2, 0, \lambda/\hat p)`,

    .. math:: f - F^* \le f - \bigl(c\langle Y, R\rangle - \tfrac12 c^2\|R\|^2\bigr) .

    For other losses R is the negative gradient, and the bracket is the value of the conjugate.

    Args:
        Y: The data, n_samples × n_features; array, frame, tensor or sparse matrix, whose zeros are data. Entries with a
            False ``mask`` are not read.
        U: n_samples × r.
        V: n_features × r.
        lam: :math:`\lambda > 0`.
        regularizer: ``"l2"`` (:math:`\|u\|\|v\|`, the nuclear norm), ``"nonnegative"`` (the same on
            :math:`u, v \ge 0`), ``"sparse"`` (:math:`\|v\|_2(\|u\|_2 + \gamma\|u\|_1)`), or a
            :class:`~minimand.factor.Regularizer`.
        gamma: :math:`\gamma` of ``"sparse"``.
        loss: A datafit, or a function from the data to a loss, as for :func:`factorize`.
        mask: True for observed entries of Y; None: all. The masked entries of a masked array are not observed either.
        tol: The largest relative gap of a certified point.
        effort: The budget for bounding the polar of non-negative factors; 1 is about five seconds.

    All computations are in float64. Bounds on the rounding errors are included.

    >>> import numpy as np
    >>> Y = np.diag([3.0, 1.0])
    >>> best = np.array([[np.sqrt(2.0)], [0.0]])              # singular values 3 − 1 and 1 − 1
    >>> certify(Y, best, best, lam=1.0).status
    <Status.CERTIFIED: 'CERTIFIED'>
    >>> certify(Y, 0 * best, 0 * best, lam=1.0).status
    <Status.IMPROVABLE: 'IMPROVABLE'>
    """
    theta = named_regularizer(regularizer, gamma)
    require_positive("lam", lam)
    require_positive("tol", tol)
    require_positive("effort", effort, zero=True)
    Y, mask = unmasked(Y, mask)
    left, right = given_matrix("U", U), given_matrix("V", V)
    data = (
        sparse_given(Y, plain=mask is None and loss is Squared)
        if is_sparse(Y)
        else given_matrix("Y", Y, finite=mask is None)
    )
    if not data.numel():
        raise ShapeError(f"Y has no entries, only the shape {tuple(data.shape)}: there is nothing to certify")
    if (data.shape[0], left.shape[1]) != (left.shape[0], right.shape[1]) or data.shape[1] != right.shape[0]:
        raise ShapeError(
            f"Y is {tuple(data.shape)}, U {tuple(left.shape)} and V {tuple(right.shape)}; "
            "U needs a row per row of Y, V a row per column of Y, and both the same number of columns"
        )
    if mask is not None and loss is not Squared:
        raise OptionError("mask needs the squared loss: leave loss out, or fill the missing entries")
    if isinstance(data, SparseData):
        made: Loss = Squared(data)
    else:
        made = loss_from(loss, data) if mask is None else masked(data, mask)
    left, right = leveled(left, right)
    problem, units = FactorProblem(made, theta, float(lam)).normalized(left, right)
    left, right = units.lowered(left), units.lowered(right)
    return certify_factors(problem, left, right, tol=tol, effort=effort).certificate.in_units(units)


def certify_factors(
    problem: FactorProblem,
    U: Tensor,
    V: Tensor,
    *,
    tol: float = 1e-3,
    effort: float = 1.0,
    generator: torch.Generator | None = None,
) -> Finding:
    """The certificate of factors (vectors as columns) for a problem; the rows may be sharded."""
    theta, lam = problem.regularizer, problem.lam
    precise = U.detach().contiguous(), V.detach().contiguous()
    U, V = (x.to(torch.float64).contiguous() for x in precise)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    penalty = problem.penalty(U, V)
    if not penalty < float("inf"):
        raise OptionError(
            f"the factors lie outside the domain of {type(theta).__name__}: they hold negative entries, or entries "
            "whose squares overflow; clip them at zero, scale them, or certify with another regularizer"
        )
    Z = problem.loss.dual(U, V)
    judged = partial(conclude, problem, U, V, dual=Z, penalty=penalty, tol=tol)
    found, conclusive = _searched(problem, precise, Z, judged, effort, generator)
    attained = 0.0 if found is None else found.best
    options = BoundOptions(min(1e-4, tol / 4), effort, (U.mT, V.mT), generator, relax=not conclusive)
    upper = theta.upper(Z, lam, options)
    return Finding(*judged(polar=(attained, upper)), found)


def postponed(
    problem: FactorProblem,
    U: Tensor,
    V: Tensor,
    objective: float,
    options: dict[str, float],
    generator: torch.Generator,
) -> Callable[[], Certificate]:
    """A function that computes the certificate of factors whose objective is known.

    The problem refers to the caller's data. If they have changed, so has the objective, and nothing is certified.
    """
    state = generator.get_state()

    @without_autocast()
    def later() -> Certificate:
        found = certify_factors(problem, U, V, generator=torch.Generator().set_state(state), **options)
        noise = 1e-11 * (objective + problem.loss.size() ** 2)
        if abs(found.objective - objective) <= noise:
            return found.certificate
        return replace(NOT_CERTIFIED, method="Y has changed since the fit: certify(Y) computes a certificate")

    return later


def _searched(
    problem: FactorProblem,
    factors: tuple[Tensor, Tensor],
    dual: DualMatrix,
    judged: Callable[..., tuple[Certificate, float]],
    effort: float,
    generator: torch.Generator,
) -> tuple[Directions | None, bool]:
    """The directions that a search finds, with their values in float64, and whether they exclude a certificate.

    If the point is not certified even with the best known direction's value for the upper bound, no upper bound
    certifies it: a cheap one is enough.
    """
    theta, slope = problem.regularizer, problem.loss.slope(*factors, dual)
    if slope is None:
        return None, False
    place = problem.loss.search(*factors, dual) if slope is dual else slope
    best: Directions | None = None
    # The first search costs about six sweeps; the second is longer if the budget suffices for it.
    longer = min(SWEEPS[1], int(effort * BUDGET / (8 * DIRECTIONS * dual.work() + CALLS)) - 2 * SWEEPS[0])
    for sweeps in (SWEEPS[0], longer) if longer > 2 * SWEEPS[0] else SWEEPS[:1]:
        rough = theta.directions(place, DIRECTIONS, generator, sweeps=sweeps)
        found = theta.attained(slope, rough)
        best = found if best is None or found.best > best.best else best
        certificate, _ = judged(polar=(best.best, Bound(best.best, "")))
        if certificate.status is Status.IMPROVABLE:
            return best, True
    return best, False


def conclude(
    problem: FactorProblem,
    U: Tensor,
    V: Tensor,
    *,
    dual: DualMatrix,
    penalty: float,
    polar: tuple[float, Bound],
    tol: float,
) -> tuple[Certificate, float]:
    r"""The certificate and the objective, from a dual point, the penalty Σ θ and the two bounds on the polar.

    All rounding errors count against the point: of the residual, in the polar and the loss, and of the sums. The
    polar that a direction attains is lowered by :math:`\sqrt{2\kappa h}/c`, where h bounds the rounding error of the
    objective; above that, the direction lowers the objective by more than h.
    """
    loss, lam, floor = problem.loss, problem.lam, problem.regularizer.floor
    value = loss.value_at(U, V, dual)
    objective = value + lam * penalty
    attained, upper = polar
    residual_error = rounding(U, V, loss.size(), loss.rows)
    smooth = math.isfinite(loss.curvature)
    gradient_error = loss.curvature * residual_error if smooth else 0.0
    top = upper.value + gradient_error / floor
    lower = loss.lower(dual, lam / top if top > 0 else math.inf)
    error = lower.margin + residual_error * (loss.steepness(value) + gradient_error)
    error = error + summation_error(loss.entries()) * objective
    margin = (math.sqrt(2 * loss.curvature * error) + gradient_error) / floor if smooth else 0.0
    certificate = judge(
        gap=objective - lower.value + error if objective > 0 else 0.0,
        objective=objective,
        polar_lower=min(max(attained - margin, 0.0), top),
        polar_upper=top,
        lam=lam,
        tol=tol,
        method=upper.method,
    )
    return certificate, objective

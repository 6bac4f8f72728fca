r"""Non-negative factors for the Kullback–Leibler divergence: loss, monotone updates, and codes.

The updates minimise a function above the objective that meets it at the current factors (Lee & Seung, 2001), here with
the penalty :math:`\tfrac\lambda2(\|U\|^2 + \|V\|^2)`, which is :math:`\lambda\sum_i\|U_i\|\|V_i\|` at balance. With
:math:`N = U \odot ((Y / UV^\top)V)` and the sums s of the columns of V,

.. math:: U_{ji} \leftarrow \frac{2N_{ji}}{s_i + \sqrt{s_i^2 + 4\lambda N_{ji}}} ,

which is the multiplicative update for :math:`\lambda = 0`. No update raises the objective.
"""

import math
import sys
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..norms.spectral import EPS
from ..solvers.iterate import iterate
from .bounds import BUDGET, CALLS
from .certificate import certify_factors
from .descent import Components, balanced
from .losses import DenseLoss, DualValue
from .matrices import DualMatrix, RowSharding, summation_error
from .problem import INTERRUPTED, NOT_CERTIFIED, FactorProblem, Factors, GrowthOptions, Report, Stop
from .residual import DenseDual

__all__ = ["KullbackLeiblerLoss", "divergence_codes", "fit_divergence"]

MULTIPLES = 8
STALLED = 1e-4  # of the tolerance: the relative decrease of a sweep at which a fit stops
LIFT = 0.01  # of the mean, added to a start: an update cannot leave zero
CODE_ITERATIONS = 5000
ROUNDS, SETTLED = 5, 1e-6  # of codes and balance at the end of a fit, and the change at which codes stop there


@dataclass(frozen=True)
class KullbackLeiblerLoss(DenseLoss):
    r"""The divergence :math:`\sum_{jk} Y_{jk}\log(Y_{jk}/X_{jk}) - Y_{jk} + X_{jk}` of data and :math:`X = UV^\top`,
    both non-negative; infinite where X is zero and Y is not.

    With the negative gradient :math:`Z = Y/X - 1`, and :math:`-1` where Y is zero,

    .. math:: F^* \ge \sum_{jk} Y_{jk}\log(1 + cZ_{jk}), \qquad 0 \le c \le \min(1, \lambda/\hat p) .

    >>> loss = KullbackLeiblerLoss(torch.tensor([[1.0, 0.0]]))
    >>> loss.value(torch.ones(1, 1), torch.tensor([[1.0], [2.0]]))
    2.0
    """

    Y: Tensor
    rows: RowSharding = RowSharding()  # noqa: RUF009 -- frozen
    #: s, a column, in :math:`D(Y \| sX)`: one without weights.
    slopes: Tensor = torch.ones(1, 1)  # noqa: RUF009 -- frozen
    curvature = math.inf
    degree = 1

    def weighted(self, roots: Tensor) -> "KullbackLeiblerLoss":
        """w D(y ‖ x) = D(wy ‖ √w·√w x)."""
        slopes = roots.to(device=self.Y.device, dtype=torch.float64).unsqueeze(1)
        return replace(self, Y=self.Y.to(torch.float64) * slopes.square(), slopes=slopes)

    def value(self, U: Tensor, V: Tensor) -> float:
        """The divergence in float64, by blocks of rows."""
        U, V = U.to(torch.float64) * self.slopes.to(torch.float64), V.to(torch.float64)
        whole = DenseDual(self.Y, rows=self.rows)
        parts = [
            (torch.xlogy(y, y / x.clamp_min(torch.finfo(x.dtype).tiny)) - y + x).sum()
            for y, x in ((block, U[part] @ V.mT) for part, block in whole.blocks(cached=True))
        ]
        return float(torch.stack(parts).sum())

    def dual(self, U: Tensor, V: Tensor) -> DenseDual:
        """Y/X − s, kept as a matrix."""
        Y, slopes = self.Y.to(torch.float64), self.slopes.to(torch.float64)
        X = (U.to(torch.float64) @ V.to(torch.float64).mT).clamp_min(sys.float_info.min)
        return DenseDual(torch.where(Y > 0, Y / X, 0.0) - slopes, rows=self.rows)

    def slope(self, U: Tensor, V: Tensor, dual: DualMatrix) -> None:
        """None: without a bound on the curvature no decrease along a direction is proved."""

    def steepness(self, value: float) -> float:
        """Bounds the error of the divergence that rounding of X, relative for each entry, makes."""
        return math.sqrt(self.entries())

    def lower(self, matrix: DualMatrix, largest: float) -> DualValue:
        """The best of Σ Y log(1 + cZ) over a few c; the margin includes the rounding errors of the divergence."""
        assert isinstance(matrix, DenseDual)
        top = min(1.0, largest)
        multiples = [top * k / MULTIPLES for k in range(MULTIPLES + 1)]
        values, sizes, own = [0.0] * len(multiples), [0.0] * len(multiples), 0.0
        slopes = self.slopes.to(torch.float64).clamp_min(sys.float_info.min).expand(self.Y.shape[0], 1)
        for part, Z in matrix.blocks():
            Y, Z = self.Y[part].to(torch.float64), Z / slopes[part]
            for k, c in enumerate(multiples):
                terms = torch.where(Y > 0, Y * torch.log1p(c * Z), 0.0)
                values[k] += float(terms.sum())
                sizes[k] += float(terms.abs().sum())
            ratio = torch.where(Y > 0, 1 + Z, 1.0)
            own += float((Y * (1 + ratio.log().abs() + 1 / ratio)).sum())
        best = max(range(len(multiples)), key=lambda k: values[k])
        error = summation_error(self.entries())
        return DualValue(values[best], error * sizes[best] + 16 * EPS * (own + sizes[best]))


def _improved(U: Tensor, V: Tensor, Y: Tensor, lam: float, sums: Tensor) -> Tensor:
    """The updated U (rows × r) for V (columns × r); ``sums`` are those of the columns of V, with the slopes."""
    X = U @ V.mT
    ratio = torch.where(X > 0, Y / X.clamp_min(torch.finfo(X.dtype).tiny), 0.0)
    pull = U * (ratio @ V)
    return 2 * pull / (sums + (sums.square() + 4 * lam * pull).sqrt()).clamp_min(torch.finfo(X.dtype).tiny)


class _FitState(NamedTuple):
    U: Tensor
    V: Tensor
    objective: float
    quiet: int


def fit_divergence(
    problem: FactorProblem,
    options: GrowthOptions,
    *,
    generator: torch.Generator,
    start: tuple[Tensor, Tensor] | None,
    report: Report,
) -> Factors:
    """Factors of a fixed size, and their certificate."""
    loss, lam = problem.loss, problem.lam
    assert isinstance(loss, KullbackLeiblerLoss)
    assert options.n_components is not None
    Y, rank, slopes = loss.Y, options.n_components, loss.slopes.to(loss.Y)
    history: list[float] = []

    def step(state: _FitState, k: int) -> _FitState:
        U = _improved(state.U, state.V, Y, lam, slopes * state.V.sum(0))
        V = _improved(state.V, U, Y.mT, lam, (slopes * U).sum(0))
        V, U = (x.mT for x in balanced(Components(V.mT, U.mT), problem.rows))
        history.append(problem.objective(U, V))
        report(k, rank, history[-1])
        quiet = state.objective - history[-1] <= STALLED * options.tol * abs(history[-1])
        latest[0] = _FitState(U, V, history[-1], state.quiet + 1 if quiet else 0)
        return latest[0]

    latest = [_FitState(*_start(loss, rank, start, generator), math.inf, 0)]
    certificate, stop = NOT_CERTIFIED, None
    try:
        state, made = iterate(step, latest[0], options.max_iter, until=lambda s, k: s.quiet >= 3)
        U, V = _polished(state.U, state.V, problem, made)
        if options.effort is not None:
            work = made * ((8.0 * rank + 60) * loss.entries() + CALLS)
            effort = float(options.effort) * work / BUDGET
            found = certify_factors(problem, U, V, tol=options.tol, effort=effort, generator=generator)
            certificate = found.certificate
    except KeyboardInterrupt:
        (U, V, _, _), made = latest[0], max(len(history), 1)
        certificate, stop = INTERRUPTED, Stop.INTERRUPTED
    history.append(problem.objective(U, V))
    stop = stop or options.stopped(certificate, lam, made, rank)
    return Factors(U, V, history[-1], certificate, tuple(history), made, stop)


def _polished(U: Tensor, V: Tensor, problem: FactorProblem, sweeps: int) -> tuple[Tensor, Tensor]:
    """U is the code of the rows, as from ``transform``, and balanced with V: codes and balance in turn, which do not
    raise the objective, for about as many updates as there were ``sweeps``. An update hardly moves a code next to
    zero, so they also start from lifted codes, and the better end is taken."""
    loss = problem.loss
    assert isinstance(loss, KullbackLeiblerLoss)
    allowed = max(sweeps // (2 * ROUNDS), 20)

    def step(state: Components, k: int) -> Components:
        V, U = balanced(Components(state.V, state.U), problem.rows)
        found = divergence_codes(loss, V.mT, problem.lam, start=U.mT, small=SETTLED, iterations=allowed)[0]
        return Components(found.mT, V)

    starts = (U, U + LIFT * U.mean())
    ends = [iterate(step, Components(start.mT, V.mT), ROUNDS)[0] for start in starts]
    U, V = min((tuple(x.mT.contiguous() for x in end) for end in ends), key=lambda end: problem.objective(*end))
    return U, V


def _start(
    loss: KullbackLeiblerLoss, rank: int, start: tuple[Tensor, Tensor] | None, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Positive factors: random components with the codes of equal ones, or factors given, lifted from zero."""
    Y = loss.Y
    if start is not None:
        level = math.sqrt(float(Y.mean()) / rank)
        U, V = (x.to(Y) + LIFT * max(float(x.mean()), level) for x in start)
        return U, V
    V = (0.5 + torch.rand(Y.shape[1], rank, generator=generator, dtype=torch.float64)).to(Y)
    V, U = balanced(Components(V.mT, _equal_codes(loss, V).mT), loss.rows)
    return U.mT, V.mT


def _equal_codes(loss: KullbackLeiblerLoss, V: Tensor) -> Tensor:
    """The best codes whose entries are all equal: no weight changes those of a row."""
    total = (loss.slopes.to(V) * V.sum()).clamp_min(torch.finfo(V.dtype).tiny)
    return (loss.Y.sum(1, keepdim=True) / total).expand(-1, V.shape[1])


def divergence_codes(
    loss: KullbackLeiblerLoss,
    V: Tensor,
    lam: float,
    *,
    start: Tensor | None = None,
    small: float | None = None,
    iterations: int = CODE_ITERATIONS,
) -> tuple[Tensor, float]:
    """Each row solves min D(y ‖ uVᵀ) + (λ/2)‖u‖², u ≥ 0, by the updates of U, until they change it by at most a share
    ``small``; returns U and the last change."""
    small = torch.finfo(V.dtype).eps ** 0.5 * 0.1 if small is None else small
    start = _equal_codes(loss, V) if start is None else start
    sums = loss.slopes.to(V) * V.sum(0)

    def step(state: tuple[Tensor, float], k: int) -> tuple[Tensor, float]:
        U = _improved(state[0], V, loss.Y, lam, sums)
        size = float(U.norm())
        return U, float((U - state[0]).norm()) / size if size > 0 else 0.0

    return iterate(step, (start, math.inf), iterations, until=lambda s, k: s[1] <= small)[0]

r"""Non-negative factors for the Kullback–Leibler divergence: loss, monotone updates, and codes.

The updates minimise a function above the objective that meets it at the current factors (Lee & Seung, 2001), here with
the penalty :math:`\tfrac\lambda2(\|U\|^2 + \|V\|^2)`, which is :math:`\lambda\sum_i\|U_i\|\|V_i\|` at balance. With
:math:`N = U \odot ((Y / UV^\top)V)` and the sums s of the columns of V,

.. math:: U_{ji} \leftarrow \frac{2N_{ji}}{s_i + \sqrt{s_i^2 + 4\lambda N_{ji}}} ,

which is the multiplicative update for :math:`\lambda = 0`. No update raises the objective.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..norms.spectral import EPS
from ..solvers.iterate import iterate
from .bounds import BUDGET
from .certificate import certify_factors
from .descent import Components, balanced
from .losses import DenseLoss, DualValue
from .matrices import DualMatrix, RowSharding, summation_error
from .problem import NOT_CERTIFIED, FactorProblem, Factors, GrowthOptions, Report
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
    curvature = math.inf
    degree = 1

    def value(self, U: Tensor, V: Tensor) -> float:
        """The divergence in float64, by blocks of rows."""
        U, V = U.to(torch.float64), V.to(torch.float64)
        whole = DenseDual(self.Y, rows=self.rows)
        parts = [
            (torch.xlogy(y, y / x.clamp_min(torch.finfo(x.dtype).tiny)) - y + x).sum()
            for y, x in ((block, U[part] @ V.mT) for part, block in whole.blocks(cached=True))
        ]
        return float(torch.stack(parts).sum())

    def dual(self, U: Tensor, V: Tensor) -> DenseDual:
        """Y/X − 1, kept as a matrix."""
        Y = self.Y.to(torch.float64)
        X = U.to(torch.float64) @ V.to(torch.float64).mT
        return DenseDual(torch.where(Y > 0, Y / X.clamp_min(torch.finfo(X.dtype).tiny) - 1, -1.0), rows=self.rows)

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
        for part, Z in matrix.blocks():
            Y = self.Y[part].to(torch.float64)
            for k, c in enumerate(multiples):
                terms = torch.where(Y > 0, Y * torch.log1p(c * Z), 0.0)
                values[k] += float(terms.sum())
                sizes[k] += float(terms.abs().sum())
            ratio = torch.where(Y > 0, 1 + Z, 1.0)
            own += float((Y * (1 + ratio.log().abs() + 1 / ratio)).sum())
        best = max(range(len(multiples)), key=lambda k: values[k])
        error = summation_error(self.entries())
        return DualValue(values[best], error * sizes[best] + 16 * EPS * (own + sizes[best]))


def _improved(U: Tensor, V: Tensor, Y: Tensor, lam: float) -> Tensor:
    """The updated U (rows × r) for V (columns × r)."""
    X = U @ V.mT
    ratio = torch.where(X > 0, Y / X.clamp_min(torch.finfo(X.dtype).tiny), 0.0)
    pull, sums = U * (ratio @ V), V.sum(0)
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
    Y, rank = loss.Y, options.n_components
    history: list[float] = []

    def step(state: _FitState, k: int) -> _FitState:
        U = _improved(state.U, state.V, Y, lam)
        V = _improved(state.V, U, Y.mT, lam)
        V, U = (x.mT for x in balanced(Components(V.mT, U.mT), problem.rows))
        history.append(problem.objective(U, V))
        report(k, rank, history[-1])
        quiet = state.objective - history[-1] <= STALLED * options.tol * abs(history[-1])
        return _FitState(U, V, history[-1], state.quiet + 1 if quiet else 0)

    first = _FitState(*_start(Y, rank, start, generator), math.inf, 0)
    state, made = iterate(step, first, options.max_iter, until=lambda s, k: s.quiet >= 3)
    U, V = _polished(state.U, state.V, problem, made)
    history.append(problem.objective(U, V))
    certificate = NOT_CERTIFIED
    if options.effort is not None:
        work = made * (8.0 * rank + 60) * loss.entries()
        effort = float(options.effort) * work / BUDGET
        certificate = certify_factors(problem, U, V, tol=options.tol, effort=effort, generator=generator).certificate
    stop = options.stopped(certificate, lam, made, rank)
    return Factors(U, V, history[-1], certificate, tuple(history), made, stop)


def _polished(U: Tensor, V: Tensor, problem: FactorProblem, sweeps: int) -> tuple[Tensor, Tensor]:
    """U is the code of the rows, as from ``transform``, and balanced with V: codes and balance in turn, which do not
    raise the objective, for at most as many updates as there were ``sweeps``, and some."""
    loss = problem.loss
    assert isinstance(loss, KullbackLeiblerLoss)
    allowed = max(sweeps // ROUNDS, 20)

    def step(state: Components, k: int) -> Components:
        V, U = balanced(Components(state.V, state.U), problem.rows)
        found = divergence_codes(loss.Y, V.mT, problem.lam, start=U.mT, small=SETTLED, iterations=allowed)[0]
        return Components(found.mT, V)

    polished, _ = iterate(step, Components(U.mT, V.mT), ROUNDS)
    return polished.U.mT.contiguous(), polished.V.mT.contiguous()


def _start(
    Y: Tensor, rank: int, start: tuple[Tensor, Tensor] | None, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Positive factors: random ones whose product has the mean of the data, or those given, lifted from zero."""
    level = math.sqrt(float(Y.mean()) / rank)
    if start is not None:
        U, V = (x.to(Y) + LIFT * max(float(x.mean()), level) for x in start)
        return U, V
    U, V = (level * (0.5 + torch.rand(n, rank, generator=generator, dtype=torch.float64)).to(Y) for n in Y.shape)
    return U, V


def divergence_codes(
    Y: Tensor,
    V: Tensor,
    lam: float,
    *,
    start: Tensor | None = None,
    small: float | None = None,
    iterations: int = CODE_ITERATIONS,
) -> tuple[Tensor, float]:
    """Each row solves min D(y ‖ uVᵀ) + (λ/2)‖u‖², u ≥ 0, by the updates of U, until they change it by at most a share
    ``small``; returns U and the last change."""
    small = torch.finfo(Y.dtype).eps ** 0.5 * 0.1 if small is None else small
    if start is None:
        total = V.sum().clamp_min(torch.finfo(V.dtype).tiny)
        start = (Y.sum(1, keepdim=True) / total).expand(-1, V.shape[1])

    def step(state: tuple[Tensor, float], k: int) -> tuple[Tensor, float]:
        U = _improved(state[0], V, Y, lam)
        size = float(U.norm())
        return U, float((U - state[0]).norm()) / size if size > 0 else 0.0

    return iterate(step, (start, math.inf), iterations, until=lambda s, k: s[1] <= small)[0]

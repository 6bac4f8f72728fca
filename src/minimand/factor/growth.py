r"""The meta-algorithm of [Vidal2018], Theorem 2: descend, measure the polar, stop with a certificate or grow.

At a local minimum the polar of the residual decides. If it is at most :math:`\lambda`, the minimum is global
(Theorem 1). Otherwise every direction (u, v) of gauge one that attains :math:`p > \lambda` lowers the objective:
appending :math:`\sqrt s\,(u, v)` with :math:`s = (p - \lambda)/(\kappa\|u\|^2\|v\|^2)` lowers it by at least
:math:`(p-\lambda)^2/(2\kappa\|u\|^2\|v\|^2)` for a loss of curvature :math:`\kappa` (1 for squares), and k directions
at once, each with the k-th part of its s, by at least the mean of these decreases.

:func:`grow` maps a :class:`~minimand.factor.problem.FactorProblem` and :class:`GrowthOptions` to
:class:`~minimand.factor.problem.Factors`. Its stages are the methods of one private class: ``settle`` (descend,
prune, merge, append directions), ``simplify`` (join similar pairs), ``certify``, and ``pursue`` (append the directions
that the certificate found). Growth is not a fixed-point iteration, so its stages loop plainly; every loop is bounded.
The descents inside are solves and use the library's loop.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import OptionError
from .bounds import BUDGET
from .certificate import SWEEPS, Finding, certify_factors, postponed
from .descent import (
    Components,
    LocalDescent,
    ProximalDescent,
    SquaredDescent,
    balanced,
    cosines,
    initial_pairs,
    merged,
    padded,
    pruned,
)
from .losses import Squared
from .matrices import RowSharding
from .observed import Observed, ObservedDescent
from .problem import (
    INTERRUPTED,
    NOT_CERTIFIED,
    Certificate,
    FactorProblem,
    Factors,
    GrowthOptions,
    Report,
    Status,
    Stop,
    no_report,
    noted_if_zero,
)
from .regularizers import L2, Directions

__all__ = ["GrowthOptions", "Report", "grow", "no_report"]

AT_ONCE = 8  # directions appended in one round
ROUND_SWEEPS = 60  # sweeps of one coarse descent
# Tolerances of the descent, relative to the tolerance of the gap.
COARSE, FINE, FIXED_SIZE, FINEST = 1e-2, 1e-3, 1e-4, 1e-6
ROUNDOFF = 1e-15
PROMISE = 1e-5  # the relative decrease, over the tolerance, for which a direction is appended
KNOWN = 0.995  # the cosine from which a direction counts as a component already present
SIMILAR = 0.7  # the cosine from which joining two components is tried
PURSUITS = 10


def grow(
    problem: FactorProblem,
    options: GrowthOptions,
    *,
    like: Tensor,
    generator: torch.Generator,
    start: tuple[Tensor, Tensor] | None = None,
    report: Report = no_report,
) -> Factors:
    """Solve a factorisation problem by descent and growth.

    Args:
        problem: Loss, regularizer and weight.
        options: Sizes, tolerance and budgets.
        like: A tensor with the dtype and device of the factors.
        generator: For starts and directions.
        start: Factors (U, V), vectors as columns; None: the leading singular pairs.
        report: Called after every descent.
    """
    descent = _local_descent(problem)
    pairs = _first_pairs(problem, options, like, generator) if start is None else _given(start, like, problem, options)
    growth = _FactorGrowth(problem, descent, options, generator, report, pairs)
    try:
        certificate, objective = _run(growth)
    except KeyboardInterrupt:
        certificate, objective = growth.interrupted()
    pairs = padded(growth.pairs, options.n_components or 0)
    iterations = max(growth.used, 1)
    return Factors(
        pairs.U.mT,
        pairs.V.mT,
        objective,
        noted_if_zero(certificate, int(pairs.V.ne(0).any(1).sum()), problem.lam),
        (*growth.history[:-1], objective),
        iterations,
        Stop.INTERRUPTED if growth.halted else options.stopped(certificate, problem.lam, iterations, pairs.rank),
        later=growth.later(objective) if growth.postpones else None,
    )


def _run(growth: "_FactorGrowth") -> tuple[Certificate, float]:
    """The rounds of the meta-algorithm, from coarse to fine descent; returns the last certificate and the objective.

    Coarse descent finds the size. The bound of a certificate is expensive, so it is computed only where the descent
    has converged.
    """
    options = growth.options
    if not options.fixed:
        growth.settle(options.tol * COARSE, ROUND_SWEEPS)
    certificate, objective, waiting = NOT_CERTIFIED, math.inf, growth.no_directions()
    for round_, tol in enumerate(_tolerances(options)):
        if not growth.exhausted:
            growth.append(waiting)
            waiting = growth.settle(tol, options.max_iter)
        if not options.fixed:
            growth.simplify(tol)
        finding, before = growth.certify(), certificate
        certificate, objective, _ = finding
        if certificate.status is Status.CERTIFIED or growth.exhausted:
            break
        if certificate.status is Status.IMPROVABLE and not options.fixed:
            return growth.pursue(finding, tol)
        if round_ and not len(waiting.values) and certificate.gap > 0.8 * before.gap:
            break  # finer descent no longer closes the gap
    return certificate, objective


def _tolerances(options: GrowthOptions) -> list[float]:
    """The tolerances of the descents before each certificate."""
    if options.fixed:
        return [options.tol * FIXED_SIZE]
    levels, finest = [options.tol * FINE], options.tol * FINEST
    for _ in range(4):  # three powers of ten, and one more if rounding leaves the third above the finest
        if levels[-1] > finest:
            levels.append(max(0.1 * levels[-1], finest))
    return levels


def _local_descent(problem: FactorProblem) -> LocalDescent:
    """The descent for a loss: exact updates for squares, ridge regressions, or proximal gradient steps."""
    loss, theta, lam = problem.loss, problem.regularizer, problem.lam
    if isinstance(loss, Squared):
        return SquaredDescent(loss, theta, lam)
    if isinstance(loss, Observed) and isinstance(theta, L2):
        return ObservedDescent(loss, theta, lam)
    if math.isfinite(loss.curvature):
        return ProximalDescent(loss, theta, lam)
    raise OptionError(
        f"{type(loss).__name__} has no gradient here, but factorize needs one: smooth it (HuberLoss with a gamma), "
        "or use RobustPCA"
    )


@dataclass
class _FactorGrowth:
    """The state of the meta-algorithm; its methods are the stages."""

    problem: FactorProblem
    descent: LocalDescent
    options: GrowthOptions
    generator: torch.Generator
    report: Report
    pairs: Components
    history: list[float] = field(default_factory=list)
    used: int = 0
    work: float = 0.0  # floating point operations
    latest: Components | None = None  # within a descent
    halted: bool = False

    @property
    def exhausted(self) -> bool:
        """Whether no sweeps are left."""
        return self.used >= self.options.max_iter

    @property
    def room(self) -> int:
        """How many pairs may be appended; at a fixed size, how many pairs became zero."""
        return min(AT_ONCE, self.options.largest - self.pairs.rank)

    @property
    def postpones(self) -> bool:
        """Whether nothing depends on the certificate: no growth, no warning, and no other process that waits for it."""
        options = self.options
        useful = options.lazy and options.fixed and options.effort is not None and not self.halted
        return useful and not self.exhausted and self.pairs.rank > 0 and self.problem.rows.ranks == 1

    def later(self, objective: float) -> Callable[[], Certificate]:
        """Computes the certificate."""
        return postponed(self.problem, self.pairs.U.mT, self.pairs.V.mT, objective, self.proof, self.generator)

    @property
    def proof(self) -> dict[str, float]:
        """The options of the certificate."""
        return {"tol": self.options.tol, "effort": float(self.options.effort or 0.0) * self.work / BUDGET}

    def count(self, sweeps: int) -> None:
        """Count sweeps that were made, and their work."""
        self.used += sweeps
        self.work += (sweeps + 1) * self.descent.work(self.pairs.rank)

    def keep(self, pairs: Components) -> None:
        """Remember the pairs of a sweep, for an interruption."""
        self.latest = pairs

    def interrupted(self) -> tuple[Certificate, float]:
        """The pairs of the last sweep, balanced, without a certificate."""
        self.halted = True
        self.pairs = balanced(self.latest or self.pairs, self.problem.rows)
        objective = self.problem.objective(self.pairs.U.mT, self.pairs.V.mT)
        self.history.append(objective)
        return INTERRUPTED, objective

    def descend(self, tol: float, sweeps: int) -> float:
        """Local descent, then prune and merge; returns the objective."""
        allowed = max(1, min(sweeps, self.options.max_iter - self.used))
        violation = self.options.tol if self.options.fixed else 0.0
        pairs, objective, made = self.descent.run(self.pairs, allowed, tol, violation, self.keep)
        self.latest = None
        self.count(made)
        self.pairs = merged(pruned(pairs, self.problem.rows), self.problem.rows)
        self.history.append(objective)
        self.report(self.used, self.pairs.rank, objective)
        return objective

    def settle(self, tol: float, sweeps: int) -> Directions:
        """Descend and append directions in turn, until no new direction promises a noticeable decrease.

        Returns the directions of the last round, which were not appended. Each round but the first makes a sweep.
        """
        found = self.no_directions()
        for _ in range(self.options.max_iter + 1):
            objective = self.descend(tol, sweeps)
            found = self.new_directions()
            if _promise(found, self.problem) <= PROMISE * self.options.tol * objective or self.exhausted:
                break
            self.append(found)
        return found

    def directions(self, count: int, margin: float) -> Directions:
        """The polar step: directions that attain more than λ + ``margin``.

        At a fixed size they only replace pairs that became zero, so a short search suffices.
        """
        matrix = self.problem.loss.search(self.pairs.U.mT, self.pairs.V.mT)
        sweeps = SWEEPS[0] if self.options.fixed else SWEEPS[1]
        found = self.problem.regularizer.directions(matrix, count, self.generator, sweeps)
        self.work += (sweeps + 10) * count * matrix.work()
        return found.above(self.problem.lam + margin)

    def unknown(self, found: Directions) -> Directions:
        """The directions that are not nearly parallel to a present pair. Those need descent, not growth."""
        if not len(found.values) or self.pairs.rank == 0:
            return found
        wide = torch.float64
        one, other = (Components(*(x.to(wide) for x in pairs)) for pairs in (found[1:], self.pairs))
        overlap = cosines(one, other, self.problem.rows)
        return found.take(overlap.amax(1) < KNOWN)

    def new_directions(self) -> Directions:
        """New directions above λ by more than the tolerance, as many as there is room for."""
        if self.room <= 0 or self.exhausted:
            return self.no_directions()
        margin = self.problem.lam * self.options.tol / 4
        return self.unknown(self.directions(self.room, margin)).first(self.room)

    def no_directions(self) -> Directions:
        """An empty list of directions."""
        return Directions(self.pairs.U.new_zeros(0), self.pairs.U[:0], self.pairs.V[:0])

    def append(self, found: Directions) -> None:
        """Append directions as new pairs, each with its share of the optimal size."""
        if not len(found.values):
            return
        loss, rows, dtype = self.problem.loss, self.problem.rows, self.pairs.U.dtype
        share = (found.values - self.problem.lam) / (loss.curvature * _squares(found, rows) * len(found.values))
        size = share.clamp_min(0).sqrt().unsqueeze(-1)
        new = Components((size * found.left).to(dtype), (size * found.right).to(dtype))
        self.pairs = self.pairs.joined(balanced(new, rows))

    def simplify(self, tol: float) -> None:
        """Join similar pairs while the objective stays nearly the same: growth may leave two where one suffices."""
        rows = self.problem.rows
        for _ in range(self.pairs.rank):
            if self.pairs.rank < 2 or self.exhausted:
                return
            overlap = cosines(self.pairs, self.pairs, rows).triu(1)
            i, j = divmod(int(overlap.argmax()), self.pairs.rank)
            if float(overlap[i, j]) < SIMILAR:
                return
            rest = [k for k in range(self.pairs.rank) if k not in (i, j)]
            both = Components(*((x[i] + x[j]).unsqueeze(0) / 2**0.5 for x in balanced(self.pairs, rows)))
            tried = self.pairs.take(torch.tensor(rest, dtype=torch.int64)).joined(both)
            allowed = min(ROUND_SWEEPS, self.options.max_iter - self.used)
            pairs, objective, made = self.descent.run(tried, allowed, tol)
            self.count(made)
            if objective > self.history[-1] * (1 + 0.02 * self.options.tol):
                return
            self.pairs, self.history[-1] = pruned(pairs, rows), objective

    def certify(self) -> Finding:
        """The certificate of the balanced factors, with the directions that it found.

        Its budget is a share of the work that the fit has done, counted and not timed: results do not depend on the
        machine's load.
        """
        self.pairs = balanced(self.pairs, self.problem.rows)
        U, V = self.pairs.U.mT, self.pairs.V.mT
        if self.options.effort is None or self.postpones:
            return Finding(NOT_CERTIFIED, self.problem.objective(U, V), None)
        return certify_factors(self.problem, U, V, generator=self.generator, **self.proof)

    def pursue(self, finding: Finding, tol: float) -> tuple[Certificate, float]:
        """Append the directions that the certificate found and certify again, while it finds more."""
        for _ in range(PURSUITS):
            certificate, _, found = finding
            if certificate.status is not Status.IMPROVABLE or found is None or self.exhausted or self.room <= 0:
                break
            margin = found.best - certificate.polar_lower
            self.use_up(found.above(self.problem.lam + margin), margin, tol)
            finding, tol = self.certify(), ROUNDOFF
        return finding.certificate, finding.objective

    def use_up(self, found: Directions, margin: float, tol: float) -> None:
        """Append directions and descend, until none exceeds λ + ``margin``.

        Directions nearly parallel to a present pair are appended only after the descent has converged. Each round
        makes a sweep.
        """
        for _ in range(self.options.max_iter):
            if not len(found.values) or self.exhausted or (self.room <= 0 and tol <= ROUNDOFF):
                return
            new = found if tol <= ROUNDOFF else self.unknown(found)
            self.append(new.first(self.room))
            tol = max(0.1 * tol, ROUNDOFF)
            self.descend(tol, self.options.max_iter)
            found = self.directions(AT_ONCE, margin)
            if not len(found.values):  # search again from other starts before concluding that there is none
                found = self.directions(AT_ONCE, margin)


def _squares(found: Directions, rows: RowSharding) -> Tensor:
    return rows.sum(found.left.square().sum(-1)) * found.right.square().sum(-1)


def _promise(found: Directions, problem: FactorProblem) -> float:
    """The decrease that the best single direction guarantees."""
    if not len(found.values):
        return 0.0
    squares = 2 * problem.loss.curvature * _squares(found, problem.rows)
    return float(((found.values - problem.lam).square() / squares).max())


def _given(start: tuple[Tensor, Tensor], like: Tensor, problem: FactorProblem, options: GrowthOptions) -> Components:
    """The user's start, balanced, vectors as rows."""
    pairs = Components(*(x.to(like.dtype).to(like.device).mT.contiguous() for x in start))
    if options.n_components is not None and pairs.rank != options.n_components:
        raise OptionError(f"start has {pairs.rank} components, but n_components={options.n_components}")
    return balanced(pairs, problem.rows)


def _first_pairs(
    problem: FactorProblem, options: GrowthOptions, like: Tensor, generator: torch.Generator
) -> Components:
    """The start from the data: a fixed number of pairs, or the leading ones above λ."""
    count = options.n_components if options.n_components is not None else min(AT_ONCE, options.largest)
    pairs, values = initial_pairs(problem.loss.start(), problem.regularizer, count, like.dtype, generator)
    pairs = Components(*(x / problem.loss.curvature**0.5 for x in pairs))
    # No polar exceeds the norm over the floors: directions of smaller singular values cannot lower the objective.
    level = problem.lam * problem.regularizer.floor
    return pairs if options.fixed else pairs.take(torch.nonzero(values > level).squeeze(1))

r"""The meta-algorithm (003, Theorem 2): descend, measure the polar, stop with a certificate or grow.

At a local minimum the polar of the residual decides. Where it is at most :math:`\lambda` the minimum is global
(Theorem 1); otherwise every direction (u, v) of gauge one that attains :math:`p > \lambda` lowers the objective:
appending :math:`\sqrt s\,(u, v)` with :math:`s = (p - \lambda)/(\kappa\|u\|^2\|v\|^2)` lowers it by at least
:math:`(p-\lambda)^2/(2\kappa\|u\|^2\|v\|^2)` for a loss of curvature :math:`\kappa` (1 for squares), and k directions
at once, each with the k-th part of its s, by at least the mean of that.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .certificate import UNSOUGHT, Certificate, Status
from .descent import LocalDescent, Pair, balanced
from .duals import DualMatrix
from .gap import Finding, certificate_of
from .losses import Loss
from .regularisers import Directions, Regulariser
from .rows import Rows
from .svd import leading_singular

__all__ = ["Growth", "Outcome", "merged", "padded", "pruned", "seeded"]

AT_ONCE = 8
ROUND_SWEEPS = 60
PARALLEL = 1 - 1e-6
FAMILIAR = 0.995
SIMILAR = 0.7
FINEST = 1e-4
PROMISE = 1e-5
ROUNDOFF = 1e-15
ROUNDS = 10


@dataclass(frozen=True)
class Growth:
    """Options of the meta-algorithm.

    Attributes:
        size: A fixed number of pairs, or None to grow until the polar allows no more.
        largest: No more pairs than this.
        sweeps: Sweeps of local descent in all.
        tol: The relative gap to certify.
        effort: How long to look for the final upper bound; None seeks no certificate.
    """

    size: int | None
    largest: int
    sweeps: int
    tol: float
    effort: float | None = 1.0


@dataclass
class Outcome:
    """Where the meta-algorithm ended."""

    pair: Pair
    objective: float
    certificate: Certificate
    history: list[float] = field(default_factory=list)
    sweeps: int = 0


Report = Callable[[int, int, float], None]


@dataclass
class _Search:
    """The meta-algorithm under way."""

    descent: LocalDescent
    loss: Loss
    options: Growth
    generator: torch.Generator
    report: Report
    pair: Pair
    history: list[float] = field(default_factory=list)
    used: int = 0

    def descend(self, tol: float, sweeps: int) -> float:
        """Local descent, then only what is left standing."""
        allowed = max(1, min(sweeps, self.options.sweeps - self.used))
        pair, objective, made = self.descent.with_tol(tol).run(self.pair, allowed)
        self.used += made
        self.pair = merged(pruned(pair, self.loss.rows), self.loss.rows)
        self.history.append(objective)
        self.report(self.used, self.pair.rank, objective)
        return objective

    @property
    def exhausted(self) -> bool:
        """Whether no sweeps are left."""
        return self.used >= self.options.sweeps

    @property
    def room(self) -> int:
        """How many pairs may be appended; at a fixed size, the places of pairs that died."""
        return min(AT_ONCE, self.options.largest - self.pair.rank)

    def directions(self, count: int, margin: float) -> Directions:
        """Directions that attain more than λ + ``margin``."""
        matrix = self.loss.dual(self.pair.U.mT, self.pair.V.mT)
        return self.descent.theta.directions(matrix, count, self.generator).above(self.descent.lam + margin)

    def unfamiliar(self, found: Directions) -> Directions:
        """Those that are not already in hand: these need descent, not growth."""
        if not len(found.values) or self.pair.rank == 0:
            return found
        wide = Pair(*(x.to(torch.float64) for x in self.pair))
        overlap = _overlap(Pair(found.left, found.right), wide, self.loss.rows)
        return found.take(overlap.amax(1) < FAMILIAR)

    def violations(self) -> Directions:
        """New directions above λ by what the tolerance notices, as many as there is room for."""
        if self.room <= 0 or self.exhausted:  # nothing could be made of them
            return Directions(self.pair.U.new_zeros(0), self.pair.U[:0], self.pair.V[:0])
        margin = self.descent.lam * self.options.tol / 4
        return self.unfamiliar(self.directions(self.room, margin)).first(self.room)

    def grow(self, found: Directions) -> None:
        """Append all of them."""
        new = _appended(found, self.descent.lam, self.loss.curvature, self.pair.U.dtype, self.loss.rows)
        self.pair = self.pair.joined(new)

    def polish(self, found: Directions, margin: float, tol: float) -> None:
        """Grow by directions in hand and descend, until none exceeds λ + ``margin``.

        A direction that is much like a pair in hand waits for the descent to end: only then is it another one.
        """
        while len(found.values) and not self.exhausted:
            new = found if tol <= ROUNDOFF else self.unfamiliar(found)
            if self.room <= 0 and tol <= ROUNDOFF:
                return
            self.grow(new.first(self.room))
            tol = max(0.1 * tol, ROUNDOFF)
            self.descend(tol, self.options.sweeps)
            found = self.directions(AT_ONCE, margin)
            if not len(found.values):  # from other starts, before it is believed
                found = self.directions(AT_ONCE, margin)

    def pursued(self, finding: Finding, tol: float) -> Certificate:
        """The certificate after what it found was used, as long as it finds more and there are sweeps and room left."""
        for _ in range(ROUNDS):
            certificate, _, found = finding
            if certificate.status is not Status.IMPROVABLE or found is None or self.exhausted or self.room <= 0:
                break
            margin = found.best - certificate.polar_lower
            self.polish(found.above(self.descent.lam + margin), margin, tol)
            finding, tol = self.examined(), ROUNDOFF
        return finding.certificate

    def simplify(self, tol: float) -> None:
        """Join similar pairs as long as that costs next to nothing: growth may leave two where one would do."""
        while self.pair.rank > 1 and not self.exhausted:
            overlap = _overlap(self.pair, self.pair, self.loss.rows).triu(1)
            i, j = divmod(int(overlap.argmax()), self.pair.rank)
            if float(overlap[i, j]) < SIMILAR:
                return
            rest = [k for k in range(self.pair.rank) if k not in (i, j)]
            both = Pair(*((x[i] + x[j]).unsqueeze(0) / 2**0.5 for x in balanced(self.pair, self.loss.rows)))
            tried = self.pair.take(torch.tensor(rest, dtype=torch.int64)).joined(both)
            allowed = min(ROUND_SWEEPS, self.options.sweeps - self.used)
            pair, objective, made = self.descent.with_tol(tol).run(tried, allowed)
            self.used += made
            if objective > self.history[-1] * (1 + 0.02 * self.options.tol):
                return
            self.pair, self.history[-1] = pruned(pair, self.loss.rows), objective

    def examined(self) -> Finding:
        """The certificate of the balanced factors, with the directions that it found."""
        self.pair = balanced(self.pair, self.loss.rows)
        if self.options.effort is None:
            return Finding(UNSOUGHT, self.history[-1], None)
        return certificate_of(
            self.loss,
            self.descent.theta,
            self.pair.U.mT,
            self.pair.V.mT,
            self.descent.lam,
            tol=self.options.tol,
            effort=self.options.effort,
            generator=self.generator,
        )


def run(
    descent: LocalDescent,
    loss: Loss,
    options: Growth,
    *,
    start: Pair | None,
    dtype: torch.dtype,
    generator: torch.Generator,
    report: Report,
) -> Outcome:
    """Descend and grow; see the module."""
    pair = start if start is not None else _first(loss, descent, options, dtype, generator)
    search = _Search(descent, loss, options, generator, report, pair)
    fixed = options.size is not None
    finest = FINEST if fixed else FINEST * 1e-2
    tol = options.tol * (FINEST if fixed else 1e-2)
    certificate: Certificate | None = None
    while True:
        objective = search.descend(tol, options.sweeps if fixed or tol < options.tol * 1e-2 else ROUND_SWEEPS)
        found = search.violations()
        promise = _promise(found, descent.lam, loss)
        if promise > PROMISE * options.tol * objective and not search.exhausted:
            search.grow(found)
            continue
        if tol > options.tol * 1e-3 and not search.exhausted:
            # Coarse descent has found the size; a bound is worth its time only at a point that is settled.
            tol = options.tol * 1e-3
            continue
        if not fixed:
            search.simplify(tol)
        finding, before = search.examined(), certificate
        certificate = finding.certificate
        if certificate.status is Status.CERTIFIED or search.exhausted:
            break
        if certificate.status is Status.IMPROVABLE and not fixed:
            certificate = search.pursued(finding, tol)
            break
        if tol <= options.tol * finest:
            break
        if before is not None and not len(found.values) and certificate.gap > 0.8 * before.gap:
            break
        tol = max(0.1 * tol, options.tol * finest)
        if len(found.values):
            search.grow(found)
    return _outcome(search, certificate)


def _outcome(search: _Search, certificate: Certificate) -> Outcome:
    descent, rows = search.descent, search.loss.rows
    pair = padded(search.pair, search.options.size or 0)
    charged = float(descent.theta.values(pair.U, pair.V, rows).to(torch.float64).sum())
    objective = search.loss.value(pair.U.mT, pair.V.mT) + descent.lam * charged
    search.history[-1] = objective
    return Outcome(pair, objective, certificate, search.history, search.used)


def _first(loss: Loss, descent: LocalDescent, options: Growth, dtype: torch.dtype, generator: torch.Generator) -> Pair:
    count = options.size if options.size is not None else min(AT_ONCE, options.largest)
    pair, values = seeded(loss.zero(), descent.theta, count, dtype, generator)
    # No polar exceeds the norm over the floors: below λ there is nothing to start from.
    level = descent.lam * descent.theta.floor
    pair = Pair(*(x / loss.curvature**0.5 for x in pair))
    return pair if options.size is not None else pair.take(torch.nonzero(values > level).squeeze(1))


def seeded(
    matrix: DualMatrix, theta: Regulariser, count: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Pair, Tensor]:
    """Start pairs from the leading singular pairs: of each and its mirror image, the one whose projection keeps more.

    The singular values are returned with them, from below.

    For non-negative factors this is the NNDSVD start (Boutsidis & Gallopoulos, 2008). More pairs than the matrix has
    singular vectors start from noise.
    """
    left, values, right = leading_singular(matrix, count, generator=generator, sweeps=3)
    rows = matrix.rows
    sides = []
    for sign in (1.0, -1.0):
        U, V = theta.left.project(sign * left), theta.right.project(sign * right)
        sides.append((U, V, rows.sum(U.square().sum(-1)).sqrt() * V.square().sum(-1).sqrt()))
    mirror = (sides[1][2] > sides[0][2]).unsqueeze(-1)
    U, V = (torch.where(mirror, sides[1][i], sides[0][i]) for i in range(2))
    size = torch.maximum(sides[0][2], sides[1][2])
    pair = balanced(Pair(U * (values * size / size.clamp_min(1e-300)).unsqueeze(-1), V), rows)
    missing = count - pair.rank
    if missing > 0:
        scale = (values.mean() / max(matrix.full_rows(), 1)).clamp_min(1e-12).sqrt() * 0.1
        noise = theta.right.project(matrix.noise(missing, generator).mT) * scale
        other = theta.left.project(matrix.times(noise.mT).mT)
        pair = pair.joined(Pair(other, noise))
        values = torch.cat([values, values.new_zeros(missing)])
    return Pair(pair.U.to(dtype).contiguous(), pair.V.to(dtype).contiguous()), values


def _squares(found: Directions, rows: Rows) -> Tensor:
    return rows.sum(found.left.square().sum(-1)) * found.right.square().sum(-1)


def _promise(found: Directions, lam: float, loss: Loss) -> float:
    """The decrease that the best direction alone brings."""
    if not len(found.values):
        return 0.0
    return float(((found.values - lam).square() / (2 * loss.curvature * _squares(found, loss.rows))).max())


def _appended(found: Directions, lam: float, curvature: float, dtype: torch.dtype, rows: Rows) -> Pair:
    part = (found.values - lam) / (curvature * _squares(found, rows) * max(len(found.values), 1))
    size = part.clamp_min(0).sqrt().unsqueeze(-1)
    return balanced(Pair((size * found.left).to(dtype), (size * found.right).to(dtype)), rows)


def padded(pair: Pair, size: int) -> Pair:
    """With zero pairs up to a size that was asked for."""
    return Pair(*(torch.cat([x, x.new_zeros(max(size - pair.rank, 0), x.shape[1])]) for x in pair))


def pruned(pair: Pair, rows: Rows) -> Pair:
    """Without the pairs that are zero, or that rounding alone keeps from it."""
    if pair.rank == 0:
        return pair
    size = (rows.sum(pair.U.square().sum(-1)) * pair.V.square().sum(-1)).sqrt()
    return pair.take(torch.nonzero(size > 16 * torch.finfo(pair.U.dtype).eps * size.max()).squeeze(1))


def _overlap(one: Pair, other: Pair, rows: Rows) -> Tensor:
    """The cosines of uvᵀ between all pairs."""
    cross = rows.sum(one.U @ other.U.mT) * (one.V @ other.V.mT)
    sizes = [(rows.sum(p.U.square().sum(-1)) * p.V.square().sum(-1)).sqrt() for p in (one, other)]
    return cross / (sizes[0].unsqueeze(1) * sizes[1]).clamp_min(torch.finfo(cross.dtype).tiny)


def merged(pair: Pair, rows: Rows) -> Pair:
    """Pairs that point the same way become one with their sum: θ is additive along a direction, so nothing is lost."""
    if pair.rank < 2:
        return pair
    pair = balanced(pair, rows)
    close = _overlap(pair, pair, rows) > PARALLEL
    U, V = pair
    U, V = U.clone(), V.clone()
    gone = torch.zeros(pair.rank, dtype=torch.bool, device=U.device)
    for i in range(pair.rank):
        twins = torch.nonzero(close[i] & ~gone).squeeze(1)
        twins = twins[twins > i]
        if gone[i] or not len(twins):
            continue
        weight = 1 + float((V[twins].square().sum(-1) / V[i].square().sum()).sum())
        U[i] *= weight**0.5
        V[i] *= weight**0.5
        gone[twins] = True
    return Pair(U, V).take(torch.nonzero(~gone).squeeze(1)) if bool(gone.any()) else pair

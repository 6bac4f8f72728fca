r"""Regularizers :math:`\theta(u, v) = g(u)\,h(v)`: products of two gauges, with directions and bounds of the polar.

A gauge is convex, positively homogeneous of degree one, and above a multiple of the Euclidean norm. Vectors are the
rows of a matrix. A vector may be sharded over processes; sums over its entries go through ``rows.sum``.

The polar of a matrix Z is :math:`p = \max\{u^\top Z v : \theta(u, v) \le 1\}`. A direction (u, v) that attains more
than :math:`\lambda` lowers the objective. An *upper* bound of at most :math:`\lambda` proves that no direction does.
"""

import abc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import OptionError, require_positive
from ..functions import L1, GroupL2
from ..solvers.iterate import iterate
from .bounds import DEFAULT, Bound, BoundOptions, affordable_bound, sparse_bound
from .matrices import DualMatrix, RowSharding, leading_singular
from .nonnegative import doubly_nonnegative_bound

__all__ = ["L2", "BoundOptions", "Directions", "Gauge", "NonNegativeL2", "Regularizer", "SparseL2"]

HERE = RowSharding()
BISECTIONS = 40
NEWTON = 12
CONVERGED = 1e-7
SAME_DIRECTION = 0.9
START_SWEEPS = 1


class Gauge(abc.ABC):
    r"""A gauge :math:`g` of vectors, the rows of a matrix.

    To use a norm of your own, derive from this class and write :meth:`values`, :meth:`prox` and :attr:`floor`.
    :meth:`polar` follows from the prox, because :math:`g^\circ(a) \le t` if and only if
    :math:`\operatorname{prox}_{tg}(a) = 0`.
    """

    #: A number c > 0 with g(u) ≥ c‖u‖₂ for every u. The general bound on the polar uses it.
    floor: float = 1.0

    @abc.abstractmethod
    def values(self, vectors: Tensor, rows: RowSharding = HERE) -> Tensor:
        """The gauge of each row; +inf outside the domain."""

    def lengths(self, vectors: Tensor, squares: Tensor, rows: RowSharding = HERE) -> Tensor:
        """As :meth:`values`, for vectors in the domain whose squared norms are known."""
        return self.values(vectors, rows)

    @abc.abstractmethod
    def prox(self, vectors: Tensor, step: Tensor, rows: RowSharding = HERE) -> Tensor:
        """The minimiser of ``step[i] * g(z) + ½‖z − vectors[i]‖²`` for each row i; ``step`` has one number per row."""

    def prox_(self, vector: Tensor, step: float, rows: RowSharding = HERE) -> Tensor:
        """The prox of one vector, in place. Column updates call it thousands of times."""
        return vector.copy_(self.prox(vector.unsqueeze(0), vector.new_full((1,), step), rows).squeeze(0))

    def project(self, vectors: Tensor) -> Tensor:
        """Points of the domain near ``vectors``, entry by entry. Starting points must be feasible."""
        return vectors

    def polar(self, vectors: Tensor, rows: RowSharding = HERE) -> tuple[Tensor, Tensor]:
        r"""For each row a, a u of gauge one and the :math:`a^\top u` that it attains, at most
        :math:`g^\circ(a) = \max\{a^\top u : g(u) \le 1\}`."""
        norms = rows.sum(vectors.square().sum(-1)).sqrt()
        low, high = torch.zeros_like(norms), norms / self.floor

        def halve(ends: tuple[Tensor, Tensor], k: int) -> tuple[Tensor, Tensor]:
            low, high = ends
            middle = 0.5 * (low + high)
            moved = self.prox(vectors, middle.clamp_min(_tiny(norms)), rows)
            alive = rows.sum(moved.abs().sum(-1)) > 0
            return torch.where(alive, middle, low), torch.where(alive, high, middle)

        (low, _), _ = iterate(halve, (low, high), BISECTIONS)
        return self._attained(vectors, self.prox(vectors, low.clamp_min(_tiny(norms)), rows), rows)

    def _attained(self, vectors: Tensor, directions: Tensor, rows: RowSharding) -> tuple[Tensor, Tensor]:
        size = self.values(directions, rows).unsqueeze(-1)
        unit = torch.where(size > 0, directions / torch.where(size > 0, size, 1.0), 0.0)
        return rows.sum((vectors * unit).sum(-1)), unit


@dataclass(frozen=True)
class Euclidean(Gauge):
    r"""The gauge :math:`g(u) = \|u\|_2 + \gamma\|u\|_1`; with ``nonnegative`` restricted to :math:`u \ge 0`.

    Its prox soft-thresholds (and clips) the entries, then shrinks the whole vector. Its polar is the root p of
    :math:`\|\operatorname{ST}_{p\gamma}(a)\|_2 = p`.

    >>> g = Euclidean(0.5)
    >>> a = torch.tensor([[3.0, -4.0]])
    >>> g.values(a), g.prox(a, torch.tensor([2.0]))
    (tensor([8.5000]), tensor([[ 0.8906, -1.3359]]))
    """

    sparse: float = 0.0
    nonnegative: bool = False

    def __post_init__(self) -> None:
        require_positive("gamma", self.sparse, zero=True)

    def values(self, vectors: Tensor, rows: RowSharding = HERE) -> Tensor:
        """The gauge of each row; +inf outside the domain."""
        values = self.lengths(vectors, rows.sum(vectors.square().sum(-1)), rows)
        if self.nonnegative:
            negative = rows.sum((vectors < 0).sum(-1))
            values = torch.where(negative > 0, torch.inf, values)
        return values

    def lengths(self, vectors: Tensor, squares: Tensor, rows: RowSharding = HERE) -> Tensor:
        """The square roots, plus γ times the l1 norms."""
        norms = squares.sqrt()
        return norms + self.sparse * rows.sum(vectors.abs().sum(-1)) if self.sparse else norms

    @staticmethod
    def _norms(vectors: Tensor, rows: RowSharding) -> Tensor:
        return rows.sum(vectors.square().sum(-1)).sqrt()

    def prox(self, vectors: Tensor, step: Tensor, rows: RowSharding = HERE) -> Tensor:
        """Soft thresholding and clipping of the entries, then soft thresholding of the length."""
        vectors = self._shrunk(vectors, step)
        norms = self._norms(vectors, rows).unsqueeze(-1)
        # The norm of a sharded vector is one number in every process; the prox acts on that number.
        kept = GroupL2(1.0).prox(norms, step.unsqueeze(-1))
        return vectors * torch.where(norms > 0, kept / torch.where(norms > 0, norms, 1.0), 0.0)

    def prox_(self, vector: Tensor, step: float, rows: RowSharding = HERE) -> Tensor:
        """As :meth:`prox`, with the fewest passes over the vector."""
        if self.sparse:
            torch.sub(vector, vector.clamp(-step * self.sparse, step * self.sparse), out=vector)
        if self.nonnegative:
            vector.clamp_min_(0.0)
        norm = math.sqrt(float(rows.sum(torch.dot(vector, vector))))
        return vector.mul_(1 - step / norm) if norm > step else vector.zero_()

    def _shrunk(self, vectors: Tensor, step: Tensor) -> Tensor:
        if self.sparse:
            vectors = L1(self.sparse).prox(vectors, step.unsqueeze(-1))
        return self.project(vectors)

    def project(self, vectors: Tensor) -> Tensor:
        """``vectors``, clipped at zero with ``nonnegative``."""
        return vectors.relu() if self.nonnegative else vectors

    def polar(self, vectors: Tensor, rows: RowSharding = HERE) -> tuple[Tensor, Tensor]:
        """The root of ‖ST_{pγ}(a)‖ = p; without γ the length itself.

        The difference of the two sides is convex and decreasing in p, so Newton's iteration from zero increases to
        the root.
        """
        if not self.sparse:  # the projection onto a cone attains its own length
            near = self.project(vectors)
            norms = rows.sum(near.square().sum(-1)).sqrt()
            return norms, near / torch.where(norms > 0, norms, 1.0).unsqueeze(-1)

        def newton(p: Tensor, k: int) -> Tensor:
            short = self._shrunk(vectors, p.clamp_min(_tiny(p)))
            sums = rows.sum(torch.stack([short.square().sum(-1), short.abs().sum(-1)]))
            norm = sums[0].sqrt()
            slope = self.sparse * sums[1] / norm.clamp_min(_tiny(norm)) + 1
            return torch.maximum(p, p + (norm - p) / slope)

        root, _ = iterate(newton, vectors.new_zeros(len(vectors)), NEWTON)
        return self._attained(vectors, self._shrunk(vectors, root.clamp_min(_tiny(root))), rows)


def _tiny(tensor: Tensor) -> float:
    return float(torch.finfo(tensor.dtype).tiny)


class Directions(NamedTuple):
    """Pairs of vectors of gauge one, best first, and the polar that each attains."""

    values: Tensor
    left: Tensor  # pairs × rows of this process
    right: Tensor  # pairs × columns

    def above(self, level: float) -> "Directions":
        """The directions that attain more than ``level``."""
        return self.take(self.values > level)

    def first(self, count: int) -> "Directions":
        """The best ``count`` directions."""
        return self.take(torch.arange(min(max(count, 0), len(self.values)), device=self.values.device))

    def take(self, index: Tensor) -> "Directions":
        """The directions at ``index``."""
        return Directions(self.values[index], self.left[index], self.right[index])

    @property
    def best(self) -> float:
        """The largest value attained; zero without directions."""
        return float(self.values.max()) if len(self.values) else 0.0


class Regularizer(abc.ABC):
    r"""A product of two gauges with a polar.

    For a :math:`\theta` of your own, derive from this class and set :attr:`left` and :attr:`right`. Alternating ascent
    then finds directions, and :math:`\sigma_{\max}(Z)/(c_g c_h)` with the gauges' floors bounds the polar. That bound
    is valid for every gauge and rarely tight. If you know a sharper one, override :meth:`upper`; it must never lie
    below the polar, because certificates rest on it.
    """

    left: Gauge
    right: Gauge

    @property
    def floor(self) -> float:
        """A number c with θ(u, v) ≥ c‖u‖‖v‖."""
        return self.left.floor * self.right.floor

    def values(self, U: Tensor, V: Tensor, rows: RowSharding) -> Tensor:
        """θ of each pair; U and V hold vectors as rows."""
        left, right = self.left.values(U, rows), self.right.values(V)
        # 0 · inf is NaN: the penalty is zero only if both sides are in the domain.
        return torch.where((left == 0) & (right == 0), 0.0, left * right)

    def directions(
        self, matrix: DualMatrix, count: int, generator: torch.Generator | None = None, sweeps: int = 30
    ) -> Directions:
        """Up to ``count`` distinct pairs found by alternating ascent from many starts, best first."""
        starts = torch.cat(list(self._starts(matrix, count, generator)))
        first = self._first_ascent(matrix, starts)
        # Of the starts and their negatives, the better half is followed.
        state = (first.take(torch.argsort(first.values, descending=True)[: len(starts)]), float("inf"))

        def step(state: tuple[Directions, float], k: int) -> tuple[Directions, float]:
            now, _ = state
            new = self._ascend(matrix, now)
            return new, float((new.values - now.values).abs().max() / new.values.abs().max().clamp_min(1e-300))

        (best, _), _ = iterate(step, state, sweeps, until=lambda s, done: s[1] <= CONVERGED)
        return _distinct(best, count, matrix)

    def _starts(self, matrix: DualMatrix, count: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        _, _, right = leading_singular(matrix, min(count, 8), generator=generator, sweeps=START_SWEEPS)
        yield right
        yield matrix.noise(count, generator).mT

    def _first_ascent(self, matrix: DualMatrix, starts: Tensor) -> Directions:
        # If the projection of a start is zero, that of its negative is not.
        right = self.right.polar(torch.cat([starts, -starts]))[1]
        starts = torch.cat([starts, -starts])
        return self._ascend(matrix, Directions(starts.new_zeros(len(starts)), starts, right))

    def _ascend(self, matrix: DualMatrix, now: Directions) -> Directions:
        left = self.left.polar(matrix.times(now.right.mT).mT, matrix.rows)[1]
        values, right = self.right.polar(matrix.adjoint(left.mT).mT)
        return Directions(values, left, right)

    def upper(self, matrix: DualMatrix, level: float, options: BoundOptions = DEFAULT) -> Bound:
        """A number that the polar does not exceed; ``level`` is the value that would certify."""
        bound = affordable_bound(matrix, level * self.floor, options)
        return Bound(bound.value / self.floor, f"{bound.method}, norm")

    def attained(self, matrix: DualMatrix, found: Directions) -> Directions:
        """The directions with the values that they attain, in the precision of ``matrix``."""
        left, right = found.left.to(matrix.dtype), found.right.to(matrix.dtype)
        size = self.values(left, right, matrix.rows)
        values = matrix.rows.sum((left * matrix.times(right.mT).mT).sum(-1))
        values = torch.where((size > 0) & (size < math.inf), values / torch.where(size > 0, size, 1.0), 0.0)
        return Directions(values, left, right)


@dataclass(frozen=True)
class L2(Regularizer):
    r""":math:`\theta(u, v) = \|u\|_2\|v\|_2`. The induced norm is the nuclear norm, the polar :math:`\sigma_{\max}`."""

    left = Euclidean()
    right = Euclidean()

    def directions(
        self, matrix: DualMatrix, count: int, generator: torch.Generator | None = None, sweeps: int = 30
    ) -> Directions:
        """The leading singular pairs."""
        left, values, right = leading_singular(matrix, count, generator=generator)
        return Directions(values, left, right)

    def upper(self, matrix: DualMatrix, level: float, options: BoundOptions = DEFAULT) -> Bound:
        """σmax, by Cholesky or Lanczos if the budget suffices."""
        return affordable_bound(matrix, level, options)


@dataclass(frozen=True)
class NonNegativeL2(Regularizer):
    r""":math:`\theta(u, v) = \|u\|_2\|v\|_2` on :math:`u, v \ge 0`: non-negative matrix factorisation."""

    left = Euclidean(nonnegative=True)
    right = Euclidean(nonnegative=True)

    def upper(self, matrix: DualMatrix, level: float, options: BoundOptions = DEFAULT) -> Bound:
        """The doubly non-negative relaxation if the effort allows it, else the norm of the positive part."""
        return doubly_nonnegative_bound(matrix, level, options)


@dataclass(frozen=True)
class SparseL2(Regularizer):
    r""":math:`\theta(u, v) = \|v\|_2(\|u\|_2 + \gamma\|u\|_1)`: dictionary learning with sparse codes u."""

    gamma: float

    def __post_init__(self) -> None:
        require_positive("gamma", self.gamma, zero=True)

    @property
    def left(self) -> Euclidean:  # type: ignore[override]
        """The codes' gauge."""
        return Euclidean(self.gamma)

    right = Euclidean()

    def upper(self, matrix: DualMatrix, level: float, options: BoundOptions = DEFAULT) -> Bound:
        """The thresholded Gram bound of sparse principal components."""
        return sparse_bound(matrix, level, self.gamma, options)


def named_regularizer(name: str | Regularizer, gamma: float | None) -> Regularizer:
    """The regularizer of a name; an instance is returned as it is."""
    if isinstance(name, Regularizer):
        return name
    if name == "sparse":
        if gamma is None:
            raise OptionError('regularizer="sparse" needs gamma, the weight of the l1 norm: pass gamma=…')
        return SparseL2(gamma)
    if gamma is not None and name in ("l2", "nonnegative"):
        raise OptionError(f'gamma belongs to regularizer="sparse", not to {name!r}; leave it out')
    if name == "l2":
        return L2()
    if name == "nonnegative":
        return NonNegativeL2()
    raise OptionError(f'regularizer must be "l2", "nonnegative", "sparse" or a Regularizer, got {name!r}')


def _distinct(found: Directions, count: int, matrix: DualMatrix) -> Directions:
    """The best direction of each cluster: starts that converge to the same pair count once."""
    order = torch.argsort(found.values, descending=True)
    left, right = found.left[order], found.right[order]
    units = _unit(left, matrix.rows), _unit(right, HERE)
    overlap = matrix.rows.sum(units[0] @ units[0].mT) * (units[1] @ units[1].mT)
    kept: list[int] = []
    for i in range(len(order)):
        if len(kept) < count and (not kept or float(overlap[i, kept].max()) < SAME_DIRECTION):
            kept.append(i)
    index = torch.tensor(kept)
    return Directions(found.values[order][index], left[index], right[index])


def _unit(vectors: Tensor, rows: RowSharding) -> Tensor:
    norms = rows.sum(vectors.square().sum(-1)).sqrt().unsqueeze(-1)
    return vectors / torch.where(norms > 0, norms, 1.0)

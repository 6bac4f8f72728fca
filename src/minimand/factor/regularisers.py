r"""Regularisers :math:`\theta(u, v) = g(u)\,h(v)`: two gauges, and the polar of their product.

The polar of a matrix, :math:`p = \max\{u^\top Z v : \theta(u, v) \le 1\}`, is what decides: a direction that attains
more than :math:`\lambda` lowers the objective, and an *upper* bound of at most :math:`\lambda` proves that nothing
does.
"""

import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import require_positive
from ..solvers.iterate import iterate
from .bounds import Bound, spectral_bound
from .duals import DualMatrix
from .gauges import Euclidean, Gauge
from .nonnegative import doubly_nonnegative_bound
from .rows import Rows
from .sparse import sparse_bound
from .svd import leading_singular

__all__ = ["L2", "Asked", "Directions", "NonNegativeL2", "Regulariser", "SparseL2"]


SETTLED = 1e-7


class Directions(NamedTuple):
    """Pairs of vectors with gauge one, best first, and the polar that each attains."""

    values: Tensor
    left: Tensor  # pairs × rows here
    right: Tensor  # pairs × columns

    def above(self, level: float) -> "Directions":
        """Those that attain more than ``level``."""
        return self.take(self.values > level)

    def first(self, count: int) -> "Directions":
        """The best ``count``."""
        return self.take(torch.arange(min(max(count, 0), len(self.values)), device=self.values.device))

    def take(self, index: Tensor) -> "Directions":
        """Some of them."""
        return Directions(self.values[index], self.left[index], self.right[index])

    @property
    def best(self) -> float:
        """What the best attains; zero where there is none."""
        return float(self.values.max()) if len(self.values) else 0.0


@dataclass(frozen=True)
class Asked:
    """What is asked of an upper bound.

    Attributes:
        accuracy: How far above the level, relatively, a bound may lie and still serve.
        effort: How long to look for one; zero takes only what costs a factorisation.
        pairs: The factors at hand, vectors as rows: a start for relaxations.
        generator: Of random starts.
    """

    accuracy: float = 1e-4
    effort: float = 1.0
    pairs: tuple[Tensor, Tensor] | None = None
    generator: torch.Generator | None = None


class Regulariser(abc.ABC):
    r"""A product of two gauges with a polar.

    For a :math:`\theta` of your own, derive from this class and set :attr:`left` and :attr:`right`. That is enough:
    ascent finds directions, and :math:`\sigma_{\max}(Z)/(c_g c_h)` bounds the polar with the gauges' floors, which is
    valid for every gauge and seldom tight. Override :meth:`upper` with a sharper bound if there is one; it must never
    lie below the polar, because certificates rest on it.
    """

    left: Gauge
    right: Gauge

    @property
    def floor(self) -> float:
        """A number c with θ(u, v) ≥ c‖u‖‖v‖."""
        return self.left.floor * self.right.floor

    def values(self, U: Tensor, V: Tensor, rows: Rows) -> Tensor:
        """θ of each pair; U and V hold vectors as rows."""
        left, right = self.left.values(U, rows), self.right.values(V)
        # Zero times infinity: a pair with a zero side is worth nothing only if the other side is allowed.
        return torch.where((left == 0) & (right == 0), 0.0, left * right)

    def directions(
        self, matrix: DualMatrix, count: int, generator: torch.Generator | None = None, sweeps: int = 30
    ) -> Directions:
        """Up to ``count`` distinct pairs found by alternating ascent from many starts, best first."""
        starts = torch.cat(list(self._starts(matrix, count, generator)))
        state = (self._from(matrix, starts), float("inf"))

        def step(state: tuple[Directions, float], k: int) -> tuple[Directions, float]:
            now, _ = state
            new = self._ascend(matrix, now)
            return new, float((new.values - now.values).abs().max() / new.values.abs().max().clamp_min(1e-300))

        (best, _), _ = iterate(step, state, sweeps, until=lambda s, done: s[1] <= SETTLED)
        return _distinct(best, count, matrix)

    def _starts(self, matrix: DualMatrix, count: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        _, _, right = leading_singular(matrix, min(count, 8), generator=generator)
        yield right
        yield matrix.noise(count, generator).mT

    def _from(self, matrix: DualMatrix, starts: Tensor) -> Directions:
        # Where a projection leaves nothing of a start, its mirror image keeps all.
        right = self.right.polar(torch.cat([starts, -starts]))[1]
        starts = torch.cat([starts, -starts])
        return self._ascend(matrix, Directions(starts.new_zeros(len(starts)), starts, right))

    def _ascend(self, matrix: DualMatrix, now: Directions) -> Directions:
        left = self.left.polar(matrix.times(now.right.mT).mT, matrix.rows)[1]
        values, right = self.right.polar(matrix.adjoint(left.mT).mT)
        return Directions(values, left, right)

    def upper(self, matrix: DualMatrix, level: float, asked: Asked = Asked()) -> Bound:  # noqa: B008 -- frozen
        """A number that the polar does not exceed; ``level`` is the value that would certify."""
        bound = spectral_bound(matrix, level * self.floor, asked.accuracy, asked.generator)
        return Bound(bound.value / self.floor, f"{bound.method}, norm")


@dataclass(frozen=True)
class L2(Regulariser):
    r""":math:`\theta(u, v) = \|u\|_2\|v\|_2`; the induced norm is the nuclear norm, its polar :math:`\sigma_{\max}`."""

    left = Euclidean()
    right = Euclidean()

    def directions(
        self, matrix: DualMatrix, count: int, generator: torch.Generator | None = None, sweeps: int = 30
    ) -> Directions:
        """The leading singular pairs."""
        left, values, right = leading_singular(matrix, count, generator=generator)
        return Directions(values, left, right)

    def upper(self, matrix: DualMatrix, level: float, asked: Asked = Asked()) -> Bound:  # noqa: B008 -- frozen
        """σmax, by Cholesky or Lanczos."""
        return spectral_bound(matrix, level, asked.accuracy, asked.generator)


@dataclass(frozen=True)
class NonNegativeL2(Regulariser):
    r""":math:`\theta(u, v) = \|u\|_2\|v\|_2` on :math:`u, v \ge 0`: non-negative matrix factorisation."""

    left = Euclidean(nonnegative=True)
    right = Euclidean(nonnegative=True)

    def upper(self, matrix: DualMatrix, level: float, asked: Asked = Asked()) -> Bound:  # noqa: B008 -- frozen
        """The doubly non-negative relaxation, where it is affordable; else the norm of the positive part."""
        return doubly_nonnegative_bound(
            matrix,
            level,
            accuracy=asked.accuracy,
            effort=asked.effort,
            pairs=asked.pairs,
            generator=asked.generator,
        )


@dataclass(frozen=True)
class SparseL2(Regulariser):
    r""":math:`\theta(u, v) = \|v\|_2(\|u\|_2 + \gamma\|u\|_1)`: dictionary learning with sparse codes u."""

    gamma: float

    def __post_init__(self) -> None:
        require_positive("gamma", self.gamma, zero=True)

    @property
    def left(self) -> Euclidean:  # type: ignore[override]
        """The codes' gauge."""
        return Euclidean(self.gamma)

    right = Euclidean()

    def upper(self, matrix: DualMatrix, level: float, asked: Asked = Asked()) -> Bound:  # noqa: B008 -- frozen
        """The thresholded Gram bound of sparse principal components."""
        return sparse_bound(matrix, level, self.gamma, accuracy=asked.accuracy, generator=asked.generator)


def _distinct(found: Directions, count: int, matrix: DualMatrix) -> Directions:
    """The best of each cluster of equal pairs: starts that climbed to the same place are one direction."""
    order = torch.argsort(found.values, descending=True)
    left, right = found.left[order], found.right[order]
    units = _unit(left, matrix.rows), _unit(right, Rows())
    overlap = matrix.rows.sum(units[0] @ units[0].mT) * (units[1] @ units[1].mT)
    kept: list[int] = []
    for i in range(len(order)):
        if len(kept) < count and (not kept or float(overlap[i, kept].max()) < 0.9):
            kept.append(i)
    index = torch.tensor(kept)
    return Directions(found.values[order][index], left[index], right[index])


def _unit(vectors: Tensor, rows: Rows) -> Tensor:
    norms = rows.sum(vectors.square().sum(-1)).sqrt().unsqueeze(-1)
    return vectors / torch.where(norms > 0, norms, 1.0)

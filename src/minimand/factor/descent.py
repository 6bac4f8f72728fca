r"""Pairs of vectors, and local descent at a fixed number of them, for squares and for any smooth loss.

**Squares.** With the other columns fixed, one column of U solves

.. math:: \min_u \tfrac12\|v\|^2\|u - a\|^2 + \lambda\,h(v)\,g(u), \qquad a = u + (Yv - UV^\top v)/\|v\|^2 ,

so :math:`u = \operatorname{prox}_{tg}(a)` with :math:`t = \lambda h(v)/\|v\|^2` (for two Euclidean norms the block soft
threshold at :math:`\lambda/\|v\|`): hierarchical alternating least squares (Cichocki & Phan, 2009). Each product YV
serves several sweeps over the columns (Gillis & Glineur, 2012). Both factors are extrapolated between sweeps (Ang &
Gillis, 2019); an extrapolation that raises the objective is undone.

**Smooth losses.** With the curvature :math:`\kappa` of the loss and :math:`Z = -\nabla\ell(X_0)`,

.. math:: \ell(X) \le \ell(X_0) - \langle Z, X - X_0\rangle + \tfrac\kappa2\|X - X_0\|^2 ,

with equality at :math:`X_0 = UV^\top`. Up to a constant the right side is :math:`\tfrac\kappa2\|Y' - X\|^2` for the
data :math:`Y' = X_0 + Z/\kappa`. So a column of U takes a gradient step of length :math:`1/(\kappa\|v\|^2)` and the
prox of its gauge: the update for squares with the data :math:`Y'` and the weight :math:`\lambda/\kappa`. A step that
lowers the right side lowers the objective by at least as much.

Vectors are rows in this module, so that a column update reads contiguous memory.
"""

import abc
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..solvers.iterate import iterate
from .columns import INNER_SWEEPS, Updated, updated
from .losses import Loss, Squared
from .matrices import DualMatrix, RowSharding, leading_singular
from .regularizers import Regularizer

__all__ = ["Components", "LocalDescent", "ProximalDescent", "SquaredDescent"]

PARALLEL = 1 - 1e-6
SETTLING = 6  # sweeps after which a small violation ends a descent: that of a new pair, still short, is small at first
CALL = 1e4  # floating point operations in the time of a call of numpy


class Components(NamedTuple):
    """Pairs (uᵢ, vᵢ) with vectors as rows: ``U`` is r × rows of this process, ``V`` is r × columns."""

    U: Tensor
    V: Tensor

    @property
    def rank(self) -> int:
        """The number r of pairs."""
        return self.U.shape[0]

    def take(self, index: Tensor) -> "Components":
        """The pairs at ``index``."""
        return Components(self.U[index], self.V[index])

    def joined(self, other: "Components") -> "Components":
        """The pairs of both."""
        return Components(torch.cat([self.U, other.U]), torch.cat([self.V, other.V]))


def balanced(pairs: Components, rows: RowSharding) -> Components:
    """The same products with ‖u‖ = ‖v‖; both sides of a pair with a zero side are zero."""
    left = rows.sum(pairs.U.square().sum(-1)).sqrt()
    right = pairs.V.square().sum(-1).sqrt()
    alive = (left > 0) & (right > 0)
    ratio = torch.where(alive, (right / torch.where(alive, left, 1.0)).sqrt(), 0.0).unsqueeze(-1)
    inverse = torch.where(ratio > 0, 1 / torch.where(ratio > 0, ratio, 1.0), 0.0)
    return Components(pairs.U * ratio, pairs.V * inverse)


def padded(pairs: Components, size: int) -> Components:
    """The pairs with zero pairs appended, up to ``size``."""
    return Components(*(torch.cat([x, x.new_zeros(max(size - pairs.rank, 0), x.shape[1])]) for x in pairs))


def pruned(pairs: Components, rows: RowSharding) -> Components:
    """The pairs without those that are zero up to rounding."""
    if pairs.rank == 0:
        return pairs
    size = _sizes(pairs, rows)
    return pairs.take(torch.nonzero(size > 16 * torch.finfo(pairs.U.dtype).eps * size.max()).squeeze(1))


def merged(pairs: Components, rows: RowSharding) -> Components:
    """Parallel pairs are replaced by one pair with their sum. θ is additive along a direction, so it is unchanged."""
    if pairs.rank < 2:
        return pairs
    pairs = balanced(pairs, rows)
    close = cosines(pairs, pairs, rows) > PARALLEL
    U, V = pairs
    U, V = U.clone(), V.clone()
    gone = torch.zeros(pairs.rank, dtype=torch.bool, device=U.device)
    for i in range(pairs.rank):
        twins = torch.nonzero(close[i] & ~gone).squeeze(1)
        twins = twins[twins > i]
        if gone[i] or not len(twins):
            continue
        weight = 1 + float((V[twins].square().sum(-1) / V[i].square().sum()).sum())
        U[i] *= weight**0.5
        V[i] *= weight**0.5
        gone[twins] = True
    return Components(U, V).take(torch.nonzero(~gone).squeeze(1)) if bool(gone.any()) else pairs


def cosines(one: Components, other: Components, rows: RowSharding) -> Tensor:
    """The cosines between the matrices uvᵀ of two lists of pairs."""
    cross = rows.sum(one.U @ other.U.mT) * (one.V @ other.V.mT)
    sizes = [_sizes(pairs, rows) for pairs in (one, other)]
    return cross / (sizes[0].unsqueeze(1) * sizes[1]).clamp_min(torch.finfo(cross.dtype).tiny)


def _sizes(pairs: Components, rows: RowSharding) -> Tensor:
    """‖u‖‖v‖ of each pair."""
    return (rows.sum(pairs.U.square().sum(-1)) * pairs.V.square().sum(-1)).sqrt()


def initial_pairs(
    matrix: DualMatrix, theta: Regularizer, count: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Components, Tensor]:
    """Start pairs from the leading singular pairs, and lower bounds on their singular values.

    Of each singular pair and its negative, the one with the larger projection is used. For non-negative factors this is
    the NNDSVD start (Boutsidis & Gallopoulos, 2008). Pairs beyond the rank of the matrix start from noise.
    """
    left, values, right = leading_singular(matrix, count, generator=generator, sweeps=2)
    rows = matrix.rows
    sides = []
    for sign in (1.0, -1.0):
        U, V = theta.left.project(sign * left), theta.right.project(sign * right)
        sides.append((U, V, rows.sum(U.square().sum(-1)).sqrt() * V.square().sum(-1).sqrt()))
    negated = (sides[1][2] > sides[0][2]).unsqueeze(-1)
    U, V = (torch.where(negated, sides[1][i], sides[0][i]) for i in range(2))
    size = torch.maximum(sides[0][2], sides[1][2])
    pairs = balanced(
        Components(U * (values * size / size.clamp_min(torch.finfo(size.dtype).tiny)).unsqueeze(-1), V), rows
    )
    missing = count - pairs.rank
    if missing > 0:
        mean = values.mean()
        noise = theta.right.project(matrix.noise(missing, generator).mT) * (mean / max(matrix.full_rows(), 1)).sqrt()
        other = theta.left.project(matrix.times(noise.mT).mT) / torch.where(mean > 0, mean, 1.0)
        pairs = pairs.joined(Components(0.1 * other, 0.1 * noise))
        values = torch.cat([values, values.new_zeros(missing)])
    return Components(pairs.U.to(dtype).contiguous(), pairs.V.to(dtype).contiguous()), values


@dataclass(frozen=True)
class LocalDescent(abc.ABC):
    """Alternating descent over factors of fixed size, with extrapolation.

    Concrete classes define the update of one side for the other. This class has the order, the momentum and the
    stopping rule.

    Attributes:
        loss: The loss, with its data.
        theta: The regularizer.
        lam: Its weight.
    """

    loss: Loss
    theta: Regularizer
    lam: float

    @property
    def rows(self) -> RowSharding:
        """Where the rows of the data are."""
        return self.loss.rows

    @cached_property
    def square(self) -> float:
        """Half the squared norm of the data, over all processes."""
        return 0.5 * self.loss.size() ** 2

    @abc.abstractmethod
    def left(self, pairs: Components) -> Updated:
        """A better U for the V of the pairs."""

    @abc.abstractmethod
    def right(self, pairs: Components) -> tuple[Updated, float]:
        """A better V for the U of the pairs, and the objective there."""

    @abc.abstractmethod
    def work(self, rank: int) -> float:
        """Floating point operations of a sweep over ``rank`` pairs; the budget of a certificate follows from it."""

    def normalized(self, pairs: Components) -> Components:
        """The result of a run in the form in which pairs are counted and appended."""
        return pairs

    def run(
        self,
        start: Components,
        sweeps: int,
        tol: float,
        violation: float = 0.0,
        keep: Callable[[Components], None] | None = None,
    ) -> tuple[Components, float, int]:
        """The factors after at most ``sweeps`` sweeps, their objective, and the number of sweeps made.

        The descent stops when three sweeps in a row lower the objective by less than a share ``tol``, or when the
        violation of a sweep, from the sixth on, is at most a share ``violation`` of its scale. ``keep`` is called with
        the pairs of each sweep.
        """
        if start.rank == 0:
            return start, self.right(start)[1], 0
        first = _DescentState(start, start, float("inf"), 0.5, 1.0, 0, math.inf)

        def done(state: _DescentState, k: int) -> bool:
            if keep is not None:
                keep(state.now)
            return state.quiet >= 3 or (k >= SETTLING and state.violation <= violation)

        state, made = iterate(lambda s, k: self._sweep(s, tol), first, sweeps, until=done)
        now, objective = self._plain(state)
        return self.normalized(now), objective, made

    def _plain(self, state: "_DescentState") -> tuple[Components, float]:
        """One sweep without extrapolation, which restores the exact zeros of the prox."""
        U = self.left(state.now).X
        (V, _, _), objective = self.right(Components(U, state.now.V))
        kept = objective <= state.objective + 1e-9 * abs(state.objective)
        return (Components(U, V), objective) if kept else (state.now, state.objective)

    def _sweep(self, state: "_DescentState", tol: float) -> "_DescentState":
        now, ahead, before, momentum, ceiling, quiet, _ = state
        U, violation, scale = self.left(ahead)
        forward = self.theta.left.project(U + momentum * (U - now.U))
        (V, other, measure), objective = self.right(Components(forward, ahead.V))
        if objective > before:
            if momentum == 0:
                return state._replace(quiet=3)
            # Restart from the last point without extrapolation, with a smaller momentum.
            return state._replace(ahead=now, momentum=0.0 if ahead is now else momentum / 1.5, ceiling=momentum)
        quiet = quiet + 1 if before - objective <= tol * abs(objective) else 0
        onward = self.theta.right.project(V + momentum * (V - now.V))
        momentum = min(ceiling, max(momentum, 0.1) * 1.05)
        # The objective is known at the extrapolated U with its best V: this point is kept.
        kept, next_start = Components(forward, V), Components(forward, onward)
        share = (violation + other) / max(scale + measure, sys.float_info.min)
        return _DescentState(kept, next_start, objective, momentum, min(1.0, ceiling * 1.01), quiet, share)


class _DescentState(NamedTuple):
    now: Components
    ahead: Components
    objective: float
    momentum: float
    ceiling: float
    quiet: int
    violation: float  # of the last sweep, relative to its scale


@dataclass(frozen=True)
class SquaredDescent(LocalDescent):
    """Exact column updates for ½‖Y − UVᵀ‖² + λ Σ θ; the rows of Y may be sharded."""

    loss: Squared

    @cached_property
    def inner(self) -> int:
        """Sweeps over the columns for one product with Y: more where the product costs more. Rows count by weight."""
        (rows, columns), roots = self.loss.Y.shape, self.loss.roots
        rows = rows if roots is None else float(roots.square().sum())
        return min(INNER_SWEEPS, 3 + int((rows * columns) ** 0.5 / 60))

    def work(self, rank: int) -> float:
        """Two products with Y, and the calls of the column updates."""
        products = 2 * rank * self.loss.start().work()
        return (0.5 if self.loss.Y.dtype == torch.float32 else 1.0) * products + CALL * 4 * self.inner * rank

    def left(self, pairs: Components) -> Updated:
        """Column updates of U."""
        goal, product = self.loss.times(pairs.V), pairs.V @ pairs.V.mT
        weights = self.lam * self.theta.right.lengths(pairs.V, product.diagonal())
        return updated(pairs.U, goal, product, weights, self.theta.left, self.rows, self.inner, self.loss.roots)

    def right(self, pairs: Components) -> tuple[Updated, float]:
        """Column updates of V, and the objective there: ½‖Y‖² − ⟨UᵀY, Vᵀ⟩ + ½⟨UᵀU, VᵀV⟩ + λ Σ θ."""
        goal, product = self.loss.adjoint(pairs.U), self.rows.sum(pairs.U @ pairs.U.mT)
        weights = self.lam * self.theta.left.lengths(pairs.U, product.diagonal(), self.rows)
        found = updated(pairs.V, goal, product, weights, self.theta.right, RowSharding(), self.inner)
        V, wide = found.X, torch.float64
        other = V @ V.mT
        cross = torch.dot(goal.to(wide).flatten(), V.to(wide).flatten())
        penalty = torch.dot(weights.to(wide), self.theta.right.lengths(V, other.diagonal()).to(wide))
        fit = 0.5 * torch.dot(product.to(wide).flatten(), other.to(wide).flatten()) - cross
        return found, self.square + float(fit + penalty)


@dataclass(frozen=True)
class ProximalDescent(LocalDescent):
    """Proximal gradient steps, column by column, for ℓ(UVᵀ) + λ Σ θ with a loss of finite curvature.

    For squares they are the exact updates.
    """

    def work(self, rank: int) -> float:
        """Four products with matrices of the data's size, three evaluations of the loss, and the column updates."""
        return (8.0 * rank + 120) * self.loss.entries() + CALL * 4 * INNER_SWEEPS * rank

    def left(self, pairs: Components) -> Updated:
        """Proximal gradient steps of the columns of U."""
        U, V = pairs
        product = V @ V.mT
        step = self.loss.dual(U.mT, V.mT).times(V.mT.to(torch.float64)).mT / self.loss.curvature
        weights = self.lam / self.loss.curvature * self.theta.right.values(V)
        return updated(U, product @ U + step.to(U.dtype), product, weights, self.theta.left, self.rows)

    def right(self, pairs: Components) -> tuple[Updated, float]:
        """Proximal gradient steps of the columns of V, and the objective there."""
        U, V = pairs
        product = self.rows.sum(U @ U.mT)
        step = self.loss.dual(U.mT, V.mT).adjoint(U.mT.to(torch.float64)).mT / self.loss.curvature
        weights = self.lam / self.loss.curvature * self.theta.left.values(U, self.rows)
        found = updated(V, product @ V + step.to(V.dtype), product, weights, self.theta.right, RowSharding())
        penalty = float(self.theta.values(U, found.X, self.rows).to(torch.float64).sum())
        return found, self.loss.value(U.mT, found.X.mT) + self.lam * penalty

r"""Local descent on a factorisation: exact column updates, a few of them for each product with the data.

With the others fixed, one column of U solves

.. math:: \min_u \tfrac12\|v\|^2\|u - a\|^2 + \lambda\,h(v)\,g(u), \qquad a = u + (Yv - UV^\top v)/\|v\|^2 ,

so :math:`u = \operatorname{prox}_{tg}(a)` with :math:`t = \lambda h(v)/\|v\|^2` (for two Euclidean norms the block soft
threshold at :math:`\lambda/\|v\|`): hierarchical alternating least squares (Cichocki & Phan, 2009). The product YV is
worth several sweeps over the columns (Gillis & Glineur, 2012), and extrapolating each factor between sweeps shortens
the way (Ang & Gillis, 2019); an extrapolation that raises the objective is undone. Vectors are rows here: a column
update touches memory that is contiguous.
"""

import abc
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..solvers.iterate import iterate
from .gauges import Gauge
from .regularisers import Regulariser
from .rows import Rows

__all__ = ["Descent", "LocalDescent", "Pair", "balanced", "updated"]

INNER = 10
STALL = 0.1


class Pair(NamedTuple):
    """Factors with vectors as rows: ``U`` is r × rows here, ``V`` r × columns."""

    U: Tensor
    V: Tensor

    @property
    def rank(self) -> int:
        """The number of pairs."""
        return self.U.shape[0]

    def take(self, index: Tensor) -> "Pair":
        """Some of the pairs."""
        return Pair(self.U[index], self.V[index])

    def joined(self, other: "Pair") -> "Pair":
        """The pairs of both."""
        return Pair(torch.cat([self.U, other.U]), torch.cat([self.V, other.V]))


def balanced(pair: Pair, rows: Rows) -> Pair:
    """The same products with equal Euclidean norms; a pair with a zero side is zero."""
    left = rows.sum(pair.U.square().sum(-1)).sqrt()
    right = pair.V.square().sum(-1).sqrt()
    alive = (left > 0) & (right > 0)
    ratio = torch.where(alive, (right / torch.where(alive, left, 1.0)).sqrt(), 0.0).unsqueeze(-1)
    back = torch.where(ratio > 0, 1 / torch.where(ratio > 0, ratio, 1.0), 0.0)
    return Pair(pair.U * ratio, pair.V * back)


class LocalDescent(abc.ABC):
    """A method that lowers an objective over factors of fixed size, both sides in turn, with extrapolation.

    Its concrete classes say how a side is updated for the other; the order, the momentum and the stopping are here.
    """

    theta: Regulariser
    lam: float
    rows: Rows
    tol: float

    @abc.abstractmethod
    def left(self, pair: Pair) -> Tensor:
        """A better U for the pair's V."""

    @abc.abstractmethod
    def right(self, pair: Pair) -> tuple[Tensor, float]:
        """A better V for the pair's U, and the objective there."""

    @abc.abstractmethod
    def with_tol(self, tol: float) -> "LocalDescent":
        """The same descent, stopping where a sweep lowers the objective by less than this part of it."""

    def settled(self, pair: Pair) -> Pair:
        """The pair in the form in which pairs are counted and grown."""
        return pair

    def run(self, start: Pair, sweeps: int) -> tuple[Pair, float, int]:
        """The factors after at most ``sweeps`` sweeps, their objective, and how many were made."""
        if start.rank == 0:
            return start, self.right(start)[1], 0
        first = _State(start, start, float("inf"), 0.5, 1.0, 0)
        state, made = iterate(lambda s, k: self._sweep(s), first, sweeps, until=lambda s, done: s.quiet >= 3)
        now, objective = self._plain(state)
        return self.settled(now), objective, made

    def _plain(self, state: "_State") -> tuple[Pair, float]:
        """One sweep without extrapolation: what a prox made zero is zero again."""
        U = self.left(state.now)
        V, objective = self.right(Pair(U, state.now.V))
        kept = objective <= state.objective + 1e-9 * abs(state.objective)
        return (Pair(U, V), objective) if kept else (state.now, state.objective)

    def _sweep(self, state: "_State") -> "_State":
        now, ahead, before, momentum, ceiling, quiet = state
        U = self.left(ahead)
        forward = self.theta.left.project(U + momentum * (U - now.U))
        V, objective = self.right(Pair(forward, ahead.V))
        if objective > before:
            if momentum == 0:
                return state._replace(quiet=3)
            # Undo: the last point without any extrapolation, and a smaller step from it.
            return state._replace(ahead=now, momentum=0.0 if ahead is now else momentum / 1.5, ceiling=momentum)
        quiet = quiet + 1 if before - objective <= self.tol * abs(objective) else 0
        onward = self.theta.right.project(V + momentum * (V - now.V))
        momentum = min(ceiling, max(momentum, 0.1) * 1.05)
        # The point that is kept is the one whose objective is known: the extrapolated U with its best V.
        return _State(Pair(forward, V), Pair(forward, onward), objective, momentum, min(1.0, ceiling * 1.01), quiet)


class _State(NamedTuple):
    now: Pair
    ahead: Pair
    objective: float
    momentum: float
    ceiling: float
    quiet: int


@dataclass(frozen=True)
class Descent(LocalDescent):
    """Column updates for ½‖Y − UVᵀ‖² + λ Σ θ, with rows that may be spread over ranks.

    Attributes:
        Y: The rows here.
        square: ½‖Y‖² over all ranks.
        theta: The regulariser.
        lam: Its weight.
        rows: Where the rows are.
        tol: Stop when a sweep lowers the objective by less than this part of it.
    """

    Y: Tensor
    square: float
    theta: Regulariser
    lam: float
    rows: Rows
    tol: float = 1e-6

    def left(self, pair: Pair) -> Tensor:
        """Column updates of U."""
        goal, product = pair.V @ self.Y.mT, pair.V @ pair.V.mT
        weights = self.lam * self.theta.right.values(pair.V)
        return updated(pair.U, goal, product, weights, self.theta.left, self.rows)

    def right(self, pair: Pair) -> tuple[Tensor, float]:
        """Column updates of V."""
        goal, product = self.rows.sum(pair.U @ self.Y), self.rows.sum(pair.U @ pair.U.mT)
        weights = self.lam * self.theta.left.values(pair.U, self.rows)
        V = updated(pair.V, goal, product, weights, self.theta.right, Rows())
        return V, self._objective(pair.U, V, goal)

    def with_tol(self, tol: float) -> "Descent":
        """The same descent, stopping elsewhere."""
        return replace(self, tol=tol)

    def _objective(self, U: Tensor, V: Tensor, product: Tensor) -> float:
        """The objective from products at hand: ½‖Y‖² − ⟨UᵀY, Vᵀ⟩ + ½⟨UᵀU, VᵀV⟩ + λ Σ θ."""
        wide = torch.float64
        cross = (product.to(wide) * V.to(wide)).sum()
        grams = self.rows.sum((U @ U.mT).to(wide)) * (V @ V.mT).to(wide)
        charged = self.theta.values(U, V, self.rows).to(wide).sum()
        return self.square - float(cross) + 0.5 * float(grams.sum()) + self.lam * float(charged)


def updated(X: Tensor, goal: Tensor, product: Tensor, weights: Tensor, gauge: Gauge, here: Rows) -> Tensor:
    r"""Sweeps of exact updates over the vectors of X, while they still move.

    They lower :math:`\tfrac12\|Y - XW\|^2 + \sum_i w_i g(x_i)` for a fixed W, of which only the products with the data,
    ``goal``, and with itself, ``product``, are needed.
    """
    diagonal = product.diagonal()
    alive = diagonal > 0
    inverse = torch.where(alive, 1 / torch.where(alive, diagonal, 1.0), 0.0)
    # a = (Yv − Σ_{j≠i} u_j ⟨v_j, v⟩) / ‖v‖², one product with a vector for each: everything else is done before.
    goals = (goal * inverse.unsqueeze(1)).unbind()
    others = (product * -inverse.unsqueeze(1)).fill_diagonal_(0.0).unbind()
    updates = list(zip(alive.tolist(), goals, others, (weights * inverse).tolist(), strict=True))
    X = X.clone()
    vectors, transposed = X.unbind(), X.mT
    first = 0.0
    for _ in range(INNER):
        before = X.clone()
        for vector, (lives, target, coupling, step) in zip(vectors, updates, strict=True):
            if lives:
                vector.copy_(gauge.prox_(torch.addmv(target, transposed, coupling), step, here))
            else:
                vector.zero_()
        moved = float(here.sum((before.sub_(X).square().sum(-1) * diagonal).sum()))
        first = max(first, moved)
        if moved <= STALL**2 * first:
            break
    return X

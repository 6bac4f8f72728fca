r"""Mini-batches of rows: sums over the rows seen, from which the components are updated.

A batch of rows gets the codes of its rows for the present components, which are a convex problem. The sums that the
objective needs grow by the batch, and the components take a step of exact minimisation for them: stochastic
majorisation (Mairal, Bach, Ponce & Sapiro, *Online learning for matrix factorization and sparse coding*, 2010). Codes
of earlier rows are not revised, so the objective of the sums is an upper bound on that of the rows seen.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .columns import updated
from .groups import RowGroups
from .matrices import RowSharding
from .observed import Observed
from .regularizers import Regularizer

__all__ = ["ObservedSums", "RowSums"]


@dataclass(frozen=True)
class RowSums:
    """UᵀU, YᵀU and ½‖Y‖² over the rows seen."""

    gram: Tensor
    cross: Tensor
    square: float

    def plus(self, product: Tensor, U: Tensor, square: float) -> "RowSums":
        """The sums with more rows: their codes U, Yᵀ U (``product``) and ½‖Y‖²."""
        return RowSums(self.gram + U.mT @ U, self.cross + product, self.square + square)

    def improved(self, V: Tensor, lam: float, theta: Regularizer) -> tuple["RowSums", Tensor, float]:
        """Better components, columns of V, the sums for codes that balance them, and the objective."""
        sizes = self.gram.diagonal().clamp_min(0).sqrt()
        V = updated(V.mT, self.cross.mT, self.gram, lam * sizes, theta.right, RowSharding()).X.mT
        norms = V.norm(dim=0)
        scale = _balance(sizes, norms)
        balanced = RowSums(self.gram / (scale.unsqueeze(1) * scale), self.cross / scale, self.square)
        V = V * scale
        fit = self.square - float((balanced.cross * V).sum()) + 0.5 * float((balanced.gram * (V.mT @ V)).sum())
        return balanced, V.contiguous(), fit + lam * float((sizes * norms).sum())


@dataclass(frozen=True)
class ObservedSums:
    """For each column the Gram matrix and the right-hand side of its ridge regression, over the entries seen."""

    grams: Tensor
    sides: Tensor
    codes: Tensor  # UᵀU
    square: float

    @classmethod
    def empty(cls, columns: int, rank: int, like: Tensor) -> "ObservedSums":
        """No entries."""
        return cls(like.new_zeros(columns, rank, rank), like.new_zeros(columns, rank), like.new_zeros(rank, rank), 0.0)

    def plus(self, loss: Observed, U: Tensor) -> "ObservedSums":
        """The sums with more rows and their codes."""
        groups = RowGroups.of(*loss.index[::-1], loss.shape[::-1])
        grams, sides = groups.normal(loss.values, U.contiguous())
        square = self.square + 0.5 * float(loss.values.to(torch.float64).square().sum())
        return ObservedSums(self.grams + grams, self.sides + sides, self.codes + U.mT @ U, square)

    def solved(self, lam: float) -> tuple["ObservedSums", Tensor, float]:
        """The components, columns of V, the sums for codes that balance them, and the objective."""
        identity = torch.eye(self.sides.shape[1], dtype=self.sides.dtype, device=self.sides.device)
        V = torch.linalg.solve(self.grams + lam * identity, self.sides)
        fit = self.square - 0.5 * float((V * self.sides).sum()) - 0.5 * lam * float(V.square().sum())
        sizes, norms = self.codes.diagonal().clamp_min(0).sqrt(), V.norm(dim=0)
        scale = _balance(sizes, norms)
        both = scale.unsqueeze(1) * scale
        sums = ObservedSums(self.grams / both, self.sides / scale, self.codes / both, self.square)
        return sums, V * scale, fit + lam * float((sizes * norms).sum())


def _balance(sizes: Tensor, norms: Tensor) -> Tensor:
    """Factors for V, and divisors for U, after which the columns of both are equally long."""
    alive = (norms > 0) & (sizes > 0)
    return torch.where(alive, (sizes / torch.where(alive, norms, 1.0)).sqrt(), 1.0)

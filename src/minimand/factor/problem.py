"""A factorisation problem: loss, regularizer and weight."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .inputs import Units
from .losses import Loss
from .matrices import RowSharding
from .regularizers import Regularizer

__all__ = ["FactorProblem"]


@dataclass(frozen=True)
class FactorProblem:
    r"""The problem :math:`\min_{r, U, V} \ell(UV^\top) + \lambda\sum_{i=1}^r\theta(U_i, V_i)`.

    Attributes:
        loss: :math:`\ell`, with its data.
        regularizer: :math:`\theta`.
        lam: :math:`\lambda`.
    """

    loss: Loss
    regularizer: Regularizer
    lam: float

    @property
    def rows(self) -> RowSharding:
        """Where the rows of the data are."""
        return self.loss.rows

    def normalized(self, *factors: Tensor) -> tuple["FactorProblem", Units]:
        """The same problem in the middle of the floating-point range, and its units, for given factors (vectors as
        columns). Every fit and every certificate starts with it."""
        largest = self.loss.largest()
        loss, units = self.loss.normalized(*factors, largest=largest)
        return FactorProblem(loss, self.regularizer, units.weight(self.lam, largest)), units

    def penalty(self, U: Tensor, V: Tensor) -> float:
        """Σ θ of factors with vectors as columns."""
        return float(self.regularizer.values(U.mT, V.mT, self.rows).to(torch.float64).sum())

    def objective(self, U: Tensor, V: Tensor) -> float:
        """The objective of factors with vectors as columns, in float64."""
        return self.loss.value(U, V) + self.lam * self.penalty(U, V)

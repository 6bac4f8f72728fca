r"""Local descent on any smooth loss: proximal gradient steps, column by column.

With the curvature :math:`\kappa` of the loss and the residual :math:`Z = -\nabla\ell(X_0)`,

.. math:: \ell(X) \le \ell(X_0) - \langle Z, X - X_0\rangle + \tfrac\kappa2\|X - X_0\|^2 ,

with equality at :math:`X_0 = UV^\top`. Up to a constant the right side is :math:`\tfrac\kappa2\|Y' - X\|^2` for the
data :math:`Y' = X_0 + Z/\kappa`, so that a column of U takes the gradient step of length :math:`1/(\kappa\|v\|^2)` and
then the prox of its gauge: the update for squares, with :math:`Y'` for the data and :math:`\lambda/\kappa` for the
weight. What lowers the right side lowers the objective by at least as much. For squares it is the exact update.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .descent import LocalDescent, Pair, updated
from .losses import Loss
from .regularisers import Regulariser
from .rows import Rows

__all__ = ["ProximalDescent"]


@dataclass(frozen=True)
class ProximalDescent(LocalDescent):
    """Column updates for ℓ(UVᵀ) + λ Σ θ with a loss of finite curvature."""

    loss: Loss
    theta: Regulariser
    lam: float
    rows: Rows
    tol: float = 1e-6

    def left(self, pair: Pair) -> Tensor:
        """Proximal gradient steps of the columns of U."""
        U, V = pair
        product = V @ V.mT
        step = self.loss.dual(U.mT, V.mT).times(V.mT.to(torch.float64)).mT / self.loss.curvature
        weights = self.lam / self.loss.curvature * self.theta.right.values(V)
        return updated(U, product @ U + step.to(U.dtype), product, weights, self.theta.left, self.rows)

    def right(self, pair: Pair) -> tuple[Tensor, float]:
        """Proximal gradient steps of the columns of V, and the objective there."""
        U, V = pair
        product = self.rows.sum(U @ U.mT)
        step = self.loss.dual(U.mT, V.mT).adjoint(U.mT.to(torch.float64)).mT / self.loss.curvature
        weights = self.lam / self.loss.curvature * self.theta.left.values(U, self.rows)
        V = updated(V, product @ V + step.to(V.dtype), product, weights, self.theta.right, Rows())
        charged = float(self.theta.values(U, V, self.rows).to(torch.float64).sum())
        return V, self.loss.value(U.mT, V.mT) + self.lam * charged

    def with_tol(self, tol: float) -> "ProximalDescent":
        """The same descent, stopping elsewhere."""
        return replace(self, tol=tol)

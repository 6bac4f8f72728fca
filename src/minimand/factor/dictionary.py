"""The estimator SparseDictionary: dictionary learning with sparse codes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..functions import L1
from ..functions.base import Separable, Step
from .grown import GrownFactorization
from .inputs import require_number
from .nmf import proximal_codes
from .regularizers import SparseL2

__all__ = ["SparseDictionary"]


@dataclass(eq=False, repr=False)
class SparseDictionary(GrownFactorization):
    r"""Dictionary learning with sparse codes,

    .. math::

        \min_{r, U, V} \tfrac12\|Y - UV^\top\|_F^2 + \lambda\sum_{i=1}^r \|V_i\|_2\bigl(\|U_i\|_2 +
        \gamma\|U_i\|_1\bigr) .

    The atoms are the rows of ``components_``. The polar is bounded by the thresholded Gram matrix of sparse principal
    components. This bound is often loose: expect ``UNDECIDED`` for a large :math:`\gamma`.

    Args:
        lam: :math:`\lambda > 0`.
        gamma: :math:`\gamma \ge 0`; zero is the nuclear norm.
        n_components: None to grow until the polar allows no more; an int fixes the size.
        r_max: The largest number of components; None: 100.
        tol: The relative gap to certify.
        max_iter: The total number of sweeps of local descent.
        effort: The certificate's budget as a share of the fit's work: "auto" is 1 for a fit that grows and 0.25 at a
            fixed size; 0 computes only cheap bounds; None computes no certificate (for a fixed size only).
        random_state: Seed of the starts.
        verbose: Show a progress bar.

    Source: [Vidal2018], the factorised formulation of sparse dictionary learning, with the codes in U.

    >>> import numpy as np
    >>> Y = np.diag([3.0, 2.0, 0.1])
    >>> model = SparseDictionary(lam=0.5, gamma=0.2).fit(Y)   # each code has one entry: threshold 0.5 · 1.2
    >>> model.n_components_, round(model.objective_, 3)
    (2, 2.645)
    """

    gamma: float = 0.1
    _takes_sparse = True

    def _check_options(self) -> None:
        super()._check_options()
        require_number("gamma", self.gamma, zero=True)

    def _regularizer(self) -> SparseL2:
        return SparseL2(float(self.gamma))

    def _code(self, problem: Any, V: Tensor) -> tuple[Tensor, bool]:
        """Each row solves min ½‖y − uVᵀ‖² + (λ/2)‖u‖² + λγ Σ ‖vᵢ‖|uᵢ|."""
        weights = problem.lam * float(self.gamma) * V.norm(dim=0)
        return proximal_codes(problem.loss.Y, V, WeightedL1(weights), problem.lam)

    def _rough_polar(self, loss: Any) -> float:
        return self._largest_polar(loss)

    def _largest_polar(self, loss: Any) -> float:
        return self._regularizer().directions(loss.zero(), 8, self._generator(), sweeps=200).best


@dataclass(frozen=True)
class WeightedL1(Separable):
    r"""The absolute values with a weight for each entry of the last dimension, :math:`\sum_i w_i|x_i|`.

    >>> WeightedL1(torch.tensor([1.0, 0.0])).prox(torch.tensor([3.0, 3.0]))
    tensor([2., 3.])
    """

    weights: Tensor

    def values(self, x: Tensor) -> Tensor:
        """The weighted absolute values."""
        return self.weights.to(x.dtype) * x.abs()

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """Soft thresholding, each entry at its own weight."""
        threshold = step * self.weights.to(x.dtype)
        # L1.prox needs a positive step; entries of weight zero are unchanged.
        tiny = torch.finfo(x.dtype).tiny
        return torch.where(threshold > 0, L1(1.0).prox(x, threshold.clamp_min(tiny)), x)

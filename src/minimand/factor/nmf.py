"""The estimator NMF: non-negative matrix factorisation."""

from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError
from ..functions import NonNegative
from ..operators import Dense
from ..solvers import FISTA, Problem, solve
from .base import Factorization
from .bounds import largest_singular
from .certificate import FactorProblem, Factors
from .growth import GrowthOptions, Report, grow
from .losses import Squared
from .matrices import DenseDual, RowSharding
from .regularizers import NonNegativeL2

__all__ = ["NMF", "code_tolerance"]


class NMF(Factorization):
    r"""Non-negative matrix factorisation

    .. math:: \min_{r,\,U \ge 0,\,V \ge 0} \tfrac12\|Y - UV^\top\|_F^2 + \lambda\sum_{i=1}^r \|U_i\|_2\|V_i\|_2 .

    The penalty limits the number of columns. With ``n_components=None`` components are added until the polar allows no
    more, and ``certificate_`` bounds the distance to the *global* minimum over all sizes. At balance the objective is
    that of scikit-learn's NMF with ``alpha_W = lam / n_features``, ``alpha_H = lam / n_samples``, ``l1_ratio = 0``.

    Args:
        lam: :math:`\lambda > 0`. The solution is zero for every value from :meth:`lambda_max` on. Small values need
            many components.
        n_components: None to grow to the certificate; an int fixes the size.
        r_max: The largest number of components; None: 100.
        tol: The relative gap to certify.
        max_iter: The total number of sweeps of local descent.
        effort: The budget of the final bound on the polar: 1 is about five seconds, 0 computes only cheap bounds, None
            computes no certificate (for a fixed size only, where it may take longer than the factors).
        random_state: Seed of the starts.
        verbose: Show a progress bar.

    Source: [Vidal2018], Theorems 1 and 2; the bound is the doubly non-negative dual.

    >>> import numpy as np
    >>> Y = np.kron(np.eye(2), np.ones((3, 2)))               # two blocks of ones, of norm √6
    >>> model = NMF(lam=0.1).fit(Y)
    >>> model.n_components_, model.certificate_.status
    (2, <Status.CERTIFIED: 'CERTIFIED'>)
    >>> round(model.objective_, 4) == round(2 * (0.1 * (6**0.5 - 0.1) + 0.005), 4)
    True
    """

    def __init__(
        self,
        lam: float,
        *,
        n_components: int | None = None,
        r_max: int | None = None,
        tol: float = 1e-3,
        max_iter: int = 500,
        effort: float | None = 1.0,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.lam = lam
        self.n_components = n_components
        self.r_max = r_max
        self.tol = tol
        self.max_iter = max_iter
        self.effort = effort
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _checked(self, Y: Any, *, reset: bool) -> tuple[Any, Any]:
        like, data = super()._checked(Y, reset=reset)
        if bool((data < 0).any()):
            raise OptionError("Negative values in data passed to NMF: clip or shift them")
        return like, data

    def _checked_start(self, start: Any, data: Any) -> tuple[Tensor, Tensor]:
        U, V = super()._checked_start(start, data)
        if bool((U < 0).any()) or bool((V < 0).any()):
            raise OptionError("Negative values in start: clip the factors at zero")
        return U, V

    def _solve(self, Y: Tensor, start: tuple[Tensor, Tensor] | None, rows: RowSharding, report: Report) -> Factors:
        problem = FactorProblem(Squared(Y, rows), NonNegativeL2(), float(self.lam))
        bound = rows.count(len(Y)) * Y.shape[1]
        options = GrowthOptions(self.n_components, self.r_max, int(self.max_iter), float(self.tol), self.effort, bound)
        return grow(problem, options, like=Y, generator=self._generator(), start=start, report=report)

    def _code(self, Y: Tensor, V: Tensor) -> Tensor:
        """Each row solves min ½‖y − uVᵀ‖² + (λ/2)‖u‖², u ≥ 0."""
        if V.shape[1] == 0:
            return Y.new_zeros(len(Y), 0)
        problem = Problem(Dense(V.mT.contiguous()), NonNegative(), Y, ridge=float(self.lam))
        return solve(problem, FISTA(iters=5000), tol=code_tolerance(Y, V)).x

    def lambda_max(self, Y: Any) -> float:
        """The norm of Y, whose leading singular vectors are non-negative (Perron): from it on the solution is zero."""
        return largest_singular(DenseDual(self._data(Y)), self._generator())


def code_tolerance(Y: Tensor, V: Tensor) -> float:
    """The norm of the gradient at which the solver of a row's code stops, relative to YV."""
    size = float((Y @ V).norm(dim=-1).max()) if V.shape[1] else 0.0
    return max(size, float(torch.finfo(Y.dtype).tiny)) * float(torch.finfo(Y.dtype).eps) ** 0.5 * 0.1

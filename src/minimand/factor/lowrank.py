"""The estimator LowRank: the nuclear norm without missing entries, which has a closed form."""

from typing import Any

from torch import Tensor

from ..solvers.linear import ridge_factor
from .base import Factorization
from .bounds import largest_singular
from .certificate import FactorProblem, Factors, noted_if_zero, stop_reason
from .growth import Report
from .losses import Squared
from .matrices import DenseDual, RowSharding
from .regularizers import L2
from .shrinkage import all_triples, shrunk, shrunk_certificate

__all__ = ["LowRank", "ridge_codes"]


class LowRank(Factorization):
    r"""Low-rank approximation,

    .. math:: \min_{r,U,V} \tfrac12\|Y - UV^\top\|_F^2 + \lambda\sum_i\|U_i\|_2\|V_i\|_2 \;=\;
        \min_X \tfrac12\|Y - X\|_F^2 + \lambda\|X\|_* ,

    whose minimiser has the singular values above :math:`\lambda`, lowered by :math:`\lambda`: the prox of the nuclear
    norm. A randomised SVD computes the triples; its width doubles until its smallest value lies below
    :math:`\lambda`.

    Args:
        lam: :math:`\lambda > 0`.
        tol: The relative gap to certify.
        max_iter: The number of products with Y and its transpose at each width.
        random_state: Seed of the randomised SVD.
        verbose: Show a progress bar.

    Source: [Vidal2018], matrix factorisation; Cai, Candès & Shen, 2010, Theorem 2.1.

    >>> import numpy as np
    >>> model = LowRank(lam=1.0).fit(np.diag([3.0, 2.0, 0.5]))
    >>> model.n_components_, round(model.objective_, 6), model.certificate_.status
    (2, 4.125, <Status.CERTIFIED: 'CERTIFIED'>)
    """

    def __init__(
        self, lam: float, *, tol: float = 1e-3, max_iter: int = 100, random_state: Any = None, verbose: bool = False
    ) -> None:
        self.lam = lam
        self.tol = tol
        self.max_iter = max_iter
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _solve(self, Y: Tensor, start: tuple[Tensor, Tensor] | None, rows: RowSharding, report: Report) -> Factors:
        lam, generator = float(self.lam), self._generator()
        problem = FactorProblem(Squared(Y, rows), L2(), lam)
        triples = shrunk(Y, lam, rows=rows, generator=generator, start=start, sweeps=int(self.max_iter))
        report(int(self.max_iter), len(triples.kept), 0.0)
        certificate, objective = shrunk_certificate(problem, triples, self.tol, generator)
        if certificate.polar_lower > lam * (1 + 1e-6):
            # The randomised SVD missed a singular value next to λ.
            triples = all_triples(Y, lam, rows)
            certificate, objective = shrunk_certificate(problem, triples, self.tol, generator)
        certificate = noted_if_zero(certificate, len(triples.kept), lam)
        stop = stop_reason(
            certificate, lam=lam, tol=self.tol, fixed=False, out_of_iterations=self.max_iter <= 1, full=False
        )
        return Factors(*triples.factors(), objective, certificate, (objective,), 1, stop)

    def _code(self, Y: Tensor, V: Tensor) -> Tensor:
        return ridge_codes(Y, V, float(self.lam))

    def lambda_max(self, Y: Any) -> float:
        """The largest singular value of Y: from it on the solution is zero."""
        return largest_singular(DenseDual(self._data(Y)), self._generator())


def ridge_codes(Y: Tensor, V: Tensor, lam: float) -> Tensor:
    """Each row solves min ½‖y − uVᵀ‖² + (λ/2)‖u‖²."""
    if V.shape[1] == 0:
        return Y.new_zeros(len(Y), 0)
    return ridge_factor(V.mT.contiguous(), lam).solve(Y @ V)

"""The estimator LowRank: the nuclear norm without missing entries, which has a closed form."""

from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from .base import Factorization
from .certificate import FactorProblem, Factors, noted_if_zero, stop_reason
from .growth import Report
from .matrices import RowSharding
from .shrinkage import all_triples, shrunk, shrunk_certificate

__all__ = ["LowRank"]


@dataclass(eq=False, repr=False)
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

    _: KW_ONLY
    max_iter: int = 100

    def _solve(self, Y: Tensor, start: tuple[Tensor, Tensor] | None, rows: RowSharding, report: Report) -> Factors:
        lam, generator = float(self.lam), self._generator()
        problem = FactorProblem(self._loss(Y, rows), self._regularizer(), lam)
        triples = shrunk(Y, lam, rows=rows, generator=generator, start=start, sweeps=int(self.max_iter))
        report(int(self.max_iter), len(triples.kept), 0.0)
        certificate, objective = shrunk_certificate(problem, triples, self.tol, generator)
        if certificate.polar_lower > lam * (1 + 1e-6):
            # The randomised SVD missed a singular value next to λ.
            triples = all_triples(Y, lam, rows)
            certificate, objective = shrunk_certificate(problem, triples, self.tol, generator)
        certificate = noted_if_zero(certificate, len(triples.kept), lam)
        stop = stop_reason(certificate, lam=lam, tol=self.tol, out_of_iterations=self.max_iter <= 1)
        return Factors(*triples.factors(), objective, certificate, (objective,), 1, stop)

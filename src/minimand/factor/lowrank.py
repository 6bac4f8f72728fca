"""The nuclear norm, fully observed: the one case with a closed form."""

from typing import Any

from torch import Tensor

from ..solvers.linear import ridge_factor
from .base import Factorization
from .bounds import largest_singular
from .duals import Dense
from .engine import said
from .losses import Squared
from .rows import Rows
from .shrinkage import all_triples, shrunk, shrunk_certificate

__all__ = ["LowRank", "ridge_codes"]


class LowRank(Factorization):
    r"""Low-rank approximation,

    .. math:: \min_{r,U,V} \tfrac12\|Y - UV^\top\|_F^2 + \lambda\sum_i\|U_i\|_2\|V_i\|_2 \;=\;
        \min_X \tfrac12\|Y - X\|_F^2 + \lambda\|X\|_* ,

    whose minimiser keeps the singular values above :math:`\lambda`, minus :math:`\lambda`: the prox of the nuclear
    norm. The triples come from a randomised SVD that widens until it has passed :math:`\lambda`, so only as many are
    computed as are kept.

    Args:
        lam: :math:`\lambda > 0`.
        tol: The relative gap to certify.
        max_iter: Products with Y and its transpose for each width tried.
        random_state: Seed of the randomised SVD.
        verbose: Show a progress bar.

    Source: 003, matrix factorisation; Cai, Candès & Shen, 2010, Theorem 2.1.

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

    def _solve(self, Y: Tensor, start: tuple[Tensor, Tensor] | None, rows: Rows) -> tuple[Tensor, Tensor]:
        generator = self._generator()
        with self._progress() as report:
            triples = shrunk(Y, float(self.lam), rows=rows, generator=generator, start=start, sweeps=int(self.max_iter))
            report(int(self.max_iter), len(triples.kept), 0.0)
        loss = Squared(Y, rows)
        found = shrunk_certificate(loss, triples, self.lam, self.tol, generator)
        if found[0].polar_lower > self.lam * (1 + 1e-6):
            # A singular value next to λ hid from the randomised SVD.
            triples = all_triples(Y, float(self.lam), rows)
            found = shrunk_certificate(loss, triples, self.lam, self.tol, generator)
        self.certificate_, self.objective_ = found
        self.certificate_ = said(self.certificate_, len(triples.kept), self.lam)
        self.history_ = [self.objective_]
        self.n_iter_ = 1
        return triples.factors()

    def _code(self, Y: Tensor, V: Tensor) -> Tensor:
        return ridge_codes(Y, V, float(self.lam))

    def lambda_max(self, Y: Any) -> float:
        """The largest singular value of Y: at and above it zero is the answer."""
        _, data = self._checked(Y, reset=not hasattr(self, "n_features_in_"))
        return largest_singular(Dense(data), self._generator())


def ridge_codes(Y: Tensor, V: Tensor, lam: float) -> Tensor:
    """Each row solves min ½‖y − uVᵀ‖² + (λ/2)‖u‖²."""
    if V.shape[1] == 0:
        return Y.new_zeros(len(Y), 0)
    return ridge_factor(V.mT.contiguous(), lam).solve(Y @ V)

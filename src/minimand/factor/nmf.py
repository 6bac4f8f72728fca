"""The estimator NMF: non-negative matrix factorisation."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from sklearn.utils.metaestimators import available_if
from torch import Tensor

from ..errors import NonFiniteError, OptionError
from ..functions import Function, NonNegative
from ..linalg import without_autocast
from ..operators import Dense
from ..solvers import FISTA, Problem, solve
from .checking import WeightedRows
from .divergence import KullbackLeiblerLoss, divergence_codes, fit_divergence
from .groups import RowGroups
from .grown import GrownFactorization
from .inputs import Units, as_tensor, holds
from .losses import Loss
from .matrices import RowSharding
from .observed import Observed, not_nan
from .problem import Factors, Report
from .regularizers import NonNegativeL2
from .sparse import SparseData, is_sparse
from .streaming import RowSums

__all__ = ["NMF", "proximal_codes"]

LOSSES = ("squared", DIVERGENCE := "kullback-leibler")
ROUGH = 1e-4  # the relative error of codes above which they count as not converged
GAPS = {torch.float32: 1e-10, torch.float64: 1e-14}  # relative gaps of codes at which they stop


@dataclass(eq=False, repr=False)
class NMF(WeightedRows, GrownFactorization):
    r"""Non-negative matrix factorisation

    .. math:: \min_{r,\,U \ge 0,\,V \ge 0} \tfrac12\|Y - UV^\top\|_F^2 + \lambda\sum_{i=1}^r \|U_i\|_2\|V_i\|_2 .

    The entries that are NaN, or masked in a masked array, are missing, and the sum is over the others. The penalty
    limits the number of columns. With ``n_components=None`` components are added until the polar allows no
    more, and ``certificate_`` bounds the distance to the *global* minimum over all sizes. At balance the objective is
    that of scikit-learn's NMF with ``alpha_W = lam / n_features``, ``alpha_H = lam / n_samples``, ``l1_ratio = 0``.

    With ``loss="kullback-leibler"`` the squares are replaced by the divergence
    :math:`\sum Y\log(Y/X) - Y + X` of :math:`X = UV^\top`, for counts and spectra. Its multiplicative updates never
    raise the objective. The size is fixed by ``n_components``, the data are dense and complete, and lam is a number,
    because no :math:`\lambda` makes the solution zero. The certificate, by the dual :math:`\sum Y\log(1 + Z)`, is
    ``CERTIFIED`` or ``UNDECIDED``. The updates converge slowly, so ``transform`` agrees with the fitted U less closely
    than for squares.

    Args:
        lam: :math:`\lambda > 0`. The solution is zero for every value from :meth:`lambda_max` on. Small values need
            many components.
        loss: "squared" or "kullback-leibler".
        n_components: None to grow to the certificate; an int fixes the size.
        r_max: The largest number of components; None: 100.
        tol: The relative gap to certify.
        max_iter: The total number of sweeps of local descent.
        effort: The certificate's budget as a share of the fit's work: "auto" is 1 for a fit that grows and 0.25 at a
            fixed size; 0 computes only cheap bounds; None computes no certificate (for a fixed size only).
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

    _: KW_ONLY
    loss: str = "squared"
    _takes_sparse = True

    def _check_options(self) -> None:
        super()._check_options()
        if self.loss not in LOSSES:
            raise OptionError(f"loss must be one of {', '.join(LOSSES)}, got {self.loss!r}")
        if self.loss == DIVERGENCE and self.n_components is None:
            raise OptionError("NMF with loss='kullback-leibler' does not grow: pass n_components, a whole number")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.input_tags.allow_nan = tags.input_tags.sparse = self.loss != DIVERGENCE
        return tags

    def _checked(self, Y: Any, *, reset: bool) -> tuple[Any, Any]:
        if np.ma.isMaskedArray(Y):
            Y = np.ma.filled(Y if Y.dtype.kind == "f" else Y.astype(np.float64), np.nan)
        like, data = self._complete(Y, reset=reset)
        if isinstance(data, Tensor) and holds(data, torch.isnan):
            data = not_nan(data, compact=False)
            if not len(data.values):
                raise OptionError("Y has no observed entry at all: every entry is NaN")
        if holds(data if isinstance(data, Tensor) else data.values, lambda block: block < 0):
            raise OptionError("Negative values in data passed to NMF: clip or shift them")
        if self.loss == DIVERGENCE and not isinstance(data, Tensor):
            kind = "no missing entries (NaN)" if isinstance(data, Observed) else "no sparse matrix"
            raise OptionError(f"NMF with loss='kullback-leibler' takes {kind}: pass all entries as a dense array")
        return like, data

    def _complete(self, Y: Any, *, reset: bool) -> tuple[Any, Any]:
        """As for every estimator, but NaN is allowed in dense data."""
        if is_sparse(Y):
            return super()._checked(Y, reset=reset)
        data = self._matrix(Y, reset=reset)
        like, data = (Y, data) if isinstance(Y, Tensor) else (data, as_tensor(data))
        if holds(data, torch.isinf):
            raise NonFiniteError("Input Y contains infinity; mark missing entries by NaN")
        return like, data

    def _loss(self, Y: Any, rows: RowSharding) -> Loss:
        if self.loss == DIVERGENCE:
            if rows.group is not None:
                raise OptionError("NMF with loss='kullback-leibler' runs in one process: leave process_group out")
            return KullbackLeiblerLoss(Y)
        return replace(Y, rows=rows) if isinstance(Y, Observed) else super()._loss(Y, rows)

    def _largest_polar(self, loss: Any) -> float:
        if self.loss == DIVERGENCE:
            raise OptionError("lambda_max of loss='kullback-leibler' is infinite: pass lam, or lams, as numbers")
        return super()._largest_polar(loss)

    def _rough_polar(self, loss: Any) -> float:
        return self._largest_polar(loss) if self.loss == DIVERGENCE else super()._rough_polar(loss)

    def _solve(self, problem: Any, start: Any, report: Report) -> Factors:
        if self.loss != DIVERGENCE:
            return super()._solve(problem, start, report)
        options = self._options(problem.loss.entries())
        return fit_divergence(problem, options, generator=self._generator(), start=start, report=report)

    def _checked_start(self, start: Any, data: Any, units: Units) -> tuple[Tensor, ...]:
        U, V = super()._checked_start(start, data, units)
        if bool((U < 0).any()) or bool((V < 0).any()):
            raise OptionError("Negative values in start: clip the factors at zero")
        return U, V

    @available_if(lambda self: self.loss != DIVERGENCE)
    @without_autocast()
    def partial_fit(self, Y: Any, y: Any = None) -> Self:
        """Update the components with a mini-batch of rows; each row should be given once. For squares only.

        The first batch is fitted as by :meth:`fit` and fixes λ and the number of components. ``certificate_`` is then
        ``UNDECIDED``: ``certify(Y)`` computes the certificate for any rows, also for all that were seen.
        """
        data = self._checked(Y, reset=not hasattr(self, "sums_"))[1]
        if isinstance(data, Observed):
            raise OptionError("partial_fit of NMF takes no missing entries: fill them, or use MatrixCompletion")
        loss, U, V, lam = self._begin_batch(Y, data)
        before: RowSums = getattr(self, "sums_", None) or RowSums(
            V.new_zeros(V.shape[1], V.shape[1]), torch.zeros_like(V), 0.0
        )
        sums = before.plus(loss.adjoint(U.mT.contiguous()).mT, U, 0.5 * loss.size() ** 2)
        self._end_batch(*sums.improved(V, lam, self._regularizer()), data.shape[0])
        return self

    def _regularizer(self) -> NonNegativeL2:
        return NonNegativeL2()

    def _code(self, problem: Any, V: Tensor) -> tuple[Tensor, bool]:
        """Each row solves min ½‖y − uVᵀ‖² + (λ/2)‖u‖², u ≥ 0, on its observed entries."""
        Y = problem.loss
        if self.loss == DIVERGENCE:
            codes, change = divergence_codes(Y, V, problem.lam)
            return codes, change <= ROUGH
        if isinstance(Y, Observed):
            groups = RowGroups.of(*Y.index, Y.shape, V.shape[1])
            return groups.nonnegative(Y.values, V.contiguous(), problem.lam)
        return proximal_codes(problem.loss.Y, V, NonNegative(), problem.lam)


def proximal_codes(Y: Any, V: Tensor, function: Function, lam: float) -> tuple[Tensor, bool]:
    """Each row solves min ½‖y − uVᵀ‖² + (λ/2)‖u‖² + g(u), until the gap is small relative to ½‖y‖².

    With V = QR the rows are those of YQ and R: as short as there are components, and Y is only multiplied.
    """
    if V.shape[0] > V.shape[1] or isinstance(Y, SparseData):
        basis, V = torch.linalg.qr(V)
        Y = Y @ basis
    size = max(float((Y @ V).norm(dim=-1).max()), float(torch.finfo(Y.dtype).tiny))
    found = solve(Problem(Dense(V.mT.contiguous()), function, Y, ridge=lam), FISTA(iters=5000), tol=GAPS[Y.dtype])
    return found.x, float(found.optimality) <= ROUGH * size

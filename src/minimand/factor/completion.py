"""The estimator MatrixCompletion: a low-rank matrix from some of its entries."""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
import torch
from sklearn.utils.validation import validate_data
from torch import Tensor

from ..errors import NonFiniteError, OptionError, ShapeError, require_finite
from .checking import WeightedRows
from .groups import RowGroups
from .grown import GrownFactorization
from .growth import grow
from .inputs import as_tensor, holds, same_kind, working
from .matrices import RowSharding
from .observed import Observed, not_nan
from .problem import Factors, Report, Stop
from .streaming import ObservedSums

__all__ = ["MatrixCompletion"]


@dataclass(eq=False, repr=False)
class MatrixCompletion(WeightedRows, GrownFactorization):
    r"""Low-rank matrix completion,

    .. math:: \min_{r,U,V} \tfrac12\sum_{(i,j) \in \Omega}\bigl(Y_{ij} - (UV^\top)_{ij}\bigr)^2
        + \lambda\sum_i\|U_i\|_2\|V_i\|_2 ,

    with the observed entries :math:`\Omega`; the penalty is the nuclear norm. Missing entries are NaN, or the masked
    entries of a masked array. The observed entries of a sparse matrix are its stored entries, zeros included;
    duplicates are summed. Memory and time per sweep are linear in the number of observed entries. Only
    ``inverse_transform`` forms the dense matrix.

    ``fit`` rejects rows and columns without an observed entry, except in sparse matrices. ``transform`` gives such a
    row the code zero.

    Args:
        lam: :math:`\lambda > 0`.
        n_components: None to grow until the polar allows no more; an int fixes the size.
        r_max: The largest number of components; None: the smaller side of Y, at most 100.
        tol: The relative gap to certify.
        max_iter: The total number of sweeps.
        effort: The certificate's budget as a share of the fit's work: "auto" is 1 for a fit that grows and 0.25 at a
            fixed size; 0 computes only cheap bounds; None computes no certificate (for a fixed size only).
        random_state: Seed of the starts.
        verbose: Show a progress bar.

    Attributes:
        codes_: U of the training data.

    Source: [Vidal2018], matrix completion; Hastie, Mazumder, Lee & Zadeh, 2015, for the alternating ridge regressions.

    >>> import numpy as np
    >>> Y = np.ones((6, 5))
    >>> Y[2, 3] = np.nan
    >>> model = MatrixCompletion(lam=0.01)
    >>> filled = model.inverse_transform(model.fit_transform(Y))
    >>> model.n_components_, round(float(filled[2, 3]), 2)
    (1, 1.0)
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.sparse = True
        return tags

    def _checked(self, Y: Any, *, reset: bool) -> tuple[Any, Any]:
        """An example of the kind of the results, and the observed entries."""
        if isinstance(Y, Tensor) and Y.layout != torch.strided:
            loss = _from_sparse_tensor(Y)
            validate_data(self, Y, reset=reset, skip_check_array=True)
            return torch.empty(0, dtype=loss.values.dtype, device=loss.values.device), loss
        if np.ma.isMaskedArray(Y):
            Y = np.ma.filled(Y if Y.dtype.kind == "f" else Y.astype(np.float64), np.nan)
        data = self._matrix(Y, reset=reset, accept_sparse=("csr", "csc", "coo"))
        if sp.issparse(data):
            loss = _from_sparse(data)
            return loss.values.numpy()[:0], loss
        like, data = (Y, data) if isinstance(Y, Tensor) else (data, as_tensor(data))
        if holds(data, torch.isinf):
            raise NonFiniteError("Input Y contains infinity; mark missing entries by NaN")
        return like, not_nan(data)

    def _fit(self, Y: Any, start: Any, group: Any, sample_weight: Any = None) -> tuple[Any, Stop]:
        if group is None:
            self._require_observed(Y)
        return super()._fit(Y, start, group, sample_weight)

    def _require_observed(self, Y: Any) -> None:
        """Raise for rows and columns without an observed entry, with their numbers.

        A sparse matrix may have them: new users and items, whose codes are zero.
        """
        self._check_options()
        _, loss = self._checked(Y, reset=True)
        if not len(loss.values):
            raise OptionError("Y has no observed entry at all (NaN, or a sparse matrix that stores nothing)")
        if sp.issparse(Y) or (isinstance(Y, Tensor) and Y.layout != torch.strided):
            return
        for axis, what in enumerate(("row", "column")):
            empty = torch.nonzero(torch.bincount(loss.index[axis], minlength=loss.shape[axis]) == 0).squeeze(1)
            if len(empty):
                shown = ", ".join(str(int(i)) for i in empty[:5])
                raise OptionError(
                    f"{len(empty)} {what}(s) of Y have no observed entry, the first of them {shown}; drop them"
                )

    def _loss(self, Y: Observed, rows: RowSharding) -> Observed:
        return replace(Y, rows=rows)

    def _solve(self, problem: Any, start: Any, report: Report) -> Factors:
        Y = problem.loss
        options = self._options(min(Y.rows.count(Y.shape[0]), Y.shape[1]))
        return grow(problem, options, like=Y.values, generator=self._generator(), start=start, report=report)

    def partial_fit(self, Y: Any, y: Any = None) -> Self:
        """Update the components with the observed entries of more rows; each row should be given once.

        The first batch is fitted as by :meth:`fit` and fixes λ and the number of components. ``certificate_`` is then
        ``UNDECIDED``: ``certify(Y)`` computes the certificate for any rows. ``codes_`` are those of the last batch.
        """
        data: Observed = self._checked(Y, reset=not hasattr(self, "sums_"))[1]
        loss, U, _, lam = self._begin_batch(Y, data)
        before: ObservedSums = getattr(self, "sums_", None) or ObservedSums.empty(loss.shape[1], U.shape[1], U)
        self._end_batch(*before.plus(loss, U).solved(lam), loss.shape[0])
        self.codes_ = same_kind(self._encoded(data, self._right(data))[0], self.components_)
        return self

    def score(self, Y: Any, y: Any = None, *, sample_weight: Any = None) -> float:
        r"""The share of the variance of the observed entries of Y that the fitted matrix explains,
        :math:`1 - \sum_\Omega(Y - UV^\top)^2 / \sum_\Omega(Y - \bar Y)^2`.

        The codes are those of the rows of Y; where Y has the shape of the training data they are the fitted ones, so
        that Y may hold entries that were held out.
        """
        return super().score(Y, sample_weight=sample_weight)

    def _fitted_codes(self, loss: Observed) -> Tensor | None:
        """The codes of the training rows, if the rows are as many."""
        codes = self.codes_ if isinstance(self.codes_, Tensor) else as_tensor(self.codes_)
        return codes.to(loss.values) if len(codes) == loss.shape[0] else None

    def _store(self, found: Factors, data: Any, like: Any) -> None:
        super()._store(found, data, like)
        self.codes_ = same_kind(found.U, like)

    def _code(self, problem: Any, V: Tensor) -> tuple[Tensor, bool]:
        """The ridge regression of each row on its observed entries."""
        Y: Observed = problem.loss
        return RowGroups.of(*Y.index, Y.shape, V.shape[1]).ridge(Y.values, V.contiguous(), problem.lam)[0], True


def _from_sparse(Y: Any) -> Observed:
    entries = Y.tocoo(copy=True)
    entries.sum_duplicates()  # in place: on the copy
    if not np.isfinite(entries.data).all():
        raise NonFiniteError("Y stores NaN or Inf; leave entries that were not observed out of the sparse matrix")
    order = np.lexsort((entries.col, entries.row))
    index = [as_tensor(np.ascontiguousarray(x[order], dtype=np.int64)) for x in (entries.row, entries.col)]
    return Observed(as_tensor(np.ascontiguousarray(entries.data[order])), (index[0], index[1]), Y.shape)


def _from_sparse_tensor(Y: Tensor) -> Observed:
    if Y.dim() != 2:
        raise ShapeError(f"Expected 2D tensor, got shape {tuple(Y.shape)}")
    entries = Y.detach().to_sparse_coo().coalesce()
    require_finite("Y", entries.values())
    row, column = entries.indices()
    return Observed(working(entries.values()), (row, column), (Y.shape[0], Y.shape[1]))

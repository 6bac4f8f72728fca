"""Helpers of the estimators: scikit-learn's checks of data, starts in range, scores, and paths over λ."""

from collections.abc import Sequence
from types import FunctionType
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import validate_data
from torch import Tensor

from ..errors import OptionError, ShapeError, require_values
from ..linalg import without_autocast
from .inputs import APART, Units, middle, working
from .losses import Squared
from .problem import Stop
from .sparse import SparseData

__all__ = [
    "HELD",
    "REMEDIES",
    "FullPrecision",
    "Path",
    "WeightedRows",
    "explained_variance",
    "in_range",
    "require_2d",
    "validated",
]

FLOATS = [np.float64, np.float32]
_COMPUTING = {
    "_encoded",
    "_fit",
    "_score",
    "_validated",
    "certify",
    "inverse_transform",
    "lambda_max",
    "partial_fit",
    "score",
}
#: What an interrupted fit raises again.
HELD = "{} holds the result of its last iteration; interrupted_ is True"
#: What to do if a fit stopped before its certificate.
REMEDIES = {
    Stop.MAX_ITER: "all max_iter={max_iter} iterations are made; raise max_iter, or use a larger lam or tol",
    Stop.R_MAX: "it has {rank} components, as many as r_max allows; raise r_max, or use a larger lam",
    Stop.SEARCH_ENDED: "its search ended too early; continue from its factors with start=…, or try another "
    "random_state",
}


class FullPrecision:
    """A class whose computations have the precision of their data also under autocast."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in _COMPUTING & vars(cls).keys():
            if isinstance(method := vars(cls)[name], FunctionType):
                setattr(cls, name, without_autocast()(method))


class WeightedRows(TransformerMixin):
    """Weights of rows in ``fit``: a row of weight w counts as w equal rows. Other options are those of the estimator.

    The factors are those of the rows times √w, in float64, and so are objective and certificate. At a fixed size the
    fit takes the steps of that to repeated rows; where it grows, both agree up to their gaps.
    """

    def fit(
        self: Any, Y: Any, y: Any = None, *, sample_weight: Any = None, start: Any = None, process_group: Any = None
    ) -> Any:
        """Fit to Y.

        Args:
            Y: n_samples × n_features, array or tensor; with a process group, the rows of this process.
            y: Ignored.
            sample_weight: A number ≥ 0 for each row, which counts as that many equal rows; None: one.
            start: Factors (U, V) of any origin to start from; None: the estimator's own start.
            process_group: A torch.distributed group over which the rows are sharded.
        """
        self._warn(self._fit(Y, start, process_group, sample_weight)[1], 3)
        return self

    def fit_transform(
        self: Any, Y: Any, y: Any = None, *, sample_weight: Any = None, start: Any = None, process_group: Any = None
    ) -> Any:
        """Fit to Y and return U, the codes of the rows; see :meth:`fit`."""
        codes, stop = self._fit(Y, start, process_group, sample_weight)
        self._warn(stop, 4)  # one level more: scikit-learn's set_output wraps this method
        return codes

    def score(self: Any, Y: Any, y: Any = None, *, sample_weight: Any = None) -> float:
        r"""The share of the variance of Y that ``inverse_transform(transform(Y))`` explains,
        :math:`1 - \|Y - UV^\top\|^2 / \|Y - \bar Y\|^2` with the columns' means :math:`\bar Y`, over weighted rows.

        The codes are fitted to the same rows, so the score falls with λ. To choose λ by entries that no fit has seen,
        use ``NMFCV``, ``LowRankCV`` or ``MatrixCompletionCV``.
        """
        return float(self._score(Y, sample_weight))


class Path(tuple[Any, ...]):
    """Fitted estimators along a grid of λ, with their λ, ranks, objectives and gaps as arrays."""

    @property
    def lams(self) -> np.ndarray:
        """λ of each estimator."""
        return np.array([model.lam_ for model in self])

    @property
    def ranks(self) -> np.ndarray:
        """The number of components at each λ."""
        return np.array([model.n_components_ for model in self])

    @property
    def objectives(self) -> np.ndarray:
        """The objective at each λ."""
        return np.array([model.objective_ for model in self])

    @property
    def gaps(self) -> np.ndarray:
        """The relative gap at each λ."""
        return np.array([model.certificate_.relative_gap for model in self])


def validated(estimator: BaseEstimator, *data: Any, **options: Any) -> Any:
    """scikit-learn's checks, for tensors of every precision and whole numbers of every size, but not for NaN."""
    for x in data:
        if isinstance(x, Tensor):
            require_values("the data", x)
    arrays = (working(x.detach().cpu()).numpy() if isinstance(x, Tensor) else x for x in data)
    try:
        return validate_data(estimator, *arrays, **{"dtype": FLOATS, "ensure_all_finite": False, **options})
    except OverflowError as error:
        raise OptionError("the data hold whole numbers above the range of float64: scale them") from error


def require_2d(Y: Tensor) -> None:
    """Raise :class:`ShapeError` unless Y has two dimensions."""
    if Y.dim() != 2:
        raise ShapeError(f"Expected 2D tensor, got shape {tuple(Y.shape)}; reshape one feature with Y.reshape(-1, 1)")


def explained_variance(data: Any, U: Tensor, V: Tensor, roots: Tensor | None = None) -> float:
    """1 − ‖Y − UVᵀ‖² / ‖Y − Ȳ‖² for dense or sparse data; constant data are explained if there is no error. ``roots``
    are those of the weights of rows."""
    loss = Squared(data if isinstance(data, SparseData) else data.flatten(1))
    ones = torch.ones(loss.Y.shape[0], 1, dtype=loss.Y.dtype, device=loss.Y.device)
    if roots is not None:
        loss, ones = loss.weighted(roots), roots.to(ones.device).unsqueeze(1)
        U, V = U * ones, V.to(ones)
    loss, units = loss.normalized(U, V)
    error = loss.value(units.lowered(U), units.lowered(V))
    means = (loss.Y.mT @ ones) / ones.square().sum()
    spread = loss.value(ones, means)
    return 1 - error / spread if spread > 0 else float(error == 0)


def in_range(factors: tuple[Tensor, ...], units: Units, shares: Sequence[int] = (2, 2)) -> tuple[Tensor, ...]:
    """A start in the middle of the range; a start far larger than the data is refused."""
    lowered = tuple(units.lowered(x, share) for x, share in zip(factors, shares, strict=True))
    if middle(0.0, *lowered, limit=APART) > 0:
        raise OptionError("start is larger than Y by a factor above 1e19: scale it to the size of Y")
    return lowered

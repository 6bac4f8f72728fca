r"""Estimators that choose λ by cross-validation: NMFCV, LowRankCV and MatrixCompletionCV.

Codes of a row are fitted to that row, so the error on rows that were held out falls with λ and chooses nothing. The
entries that are predicted must be unseen by both factors. For matrices without missing entries a fold holds out rows I
*and* columns J (Owen & Perry, *Bi-cross-validation of the SVD and the non-negative matrix factorization*, 2009):

1. Factors U, V of the other rows and columns are fitted along a path of λ.
2. The codes of the rows I come from their other columns and V, those of the columns J from their other rows and U.
3. The product of both predicts the block :math:`Y_{IJ}`.

For completion a fold holds out observed entries. λ is a share of λmax in every fold, because λmax grows with the size
of the data. The choice is the largest share whose mean error is within one standard error of the smallest. It is the λ
that predicts well, not the one with the true number of components: the penalty also shrinks the components that it
keeps, so the λ that predicts best is as a rule smaller and keeps more of them.
"""

import abc
import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from ..errors import MissingExtra, NonFiniteError, OptionError, ShapeError
from .base import Factorization
from .checking import FullPrecision
from .completion import MatrixCompletion
from .folds import Fold, block_fold, entry_fold, variance
from .inputs import Share, lam_grid, require_number, require_whole, seeded_generator
from .losses import Squared
from .lowrank import LowRank
from .nmf import NMF
from .observed import Observed

__all__ = ["NMFCV", "LowRankCV", "MatrixCompletionCV"]

LARGEST_SHARE, SMALLEST_SHARE = 0.8, 0.01
#: Attributes of the fit at the chosen λ.
FITTED = ("components_", "n_components_", "objective_", "certificate_", "history_", "n_iter_", "interrupted_")


@dataclass(eq=False, repr=False)
class _CrossValidated(FullPrecision, ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator, abc.ABC):
    """Base of the estimators that choose λ; their fitted attributes are those of the fit at ``lam_`` to all data."""

    lams: Sequence[float | Share | str] | None = None
    cv: int = 5
    _: KW_ONLY
    n_lams: int = 10
    tol: float = 1e-2
    max_iter: int = 200
    random_state: Any = None
    verbose: bool = False

    # -- defined by each estimator ---------------------------------------------------------------------------------

    @abc.abstractmethod
    def _model(self, lam: float) -> Factorization:
        """The estimator at one λ."""

    # -- scikit-learn's methods ------------------------------------------------------------------------------------

    def __sklearn_tags__(self) -> Any:
        return self._model(1.0).__sklearn_tags__()

    def fit(self, Y: Any, y: Any = None) -> Self:
        """Choose λ by cross-validation, and fit at it to all of Y."""
        self.fit_transform(Y)
        return self

    def fit_transform(self, Y: Any, y: Any = None) -> Any:
        """As :meth:`fit`; returns U."""
        if isinstance(self.cv, bool) or not isinstance(self.cv, int | np.integer) or self.cv < 2:
            raise OptionError(f"cv must be a whole number ≥ 2, the number of folds, got {self.cv!r}")
        require_whole("n_lams", self.n_lams)
        require_number("tol", self.tol)
        require_whole("max_iter", self.max_iter)
        probe = self._model(1.0)
        _, data = probe._checked(Y, reset=True)
        self._require_complete(data)
        self._copy_input(probe)
        top = probe.lambda_max(Y)
        if not top > 0:
            raise OptionError("every entry of Y is zero, so there is no lam to choose: lambda_max(Y) is 0")
        shares = self._shares(top)
        try:
            errors, ranks = self._validated(probe, data, shares)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{type(self).__name__} was interrupted before it chose lam: no fit") from None
        self._choose(shares, top, errors, ranks)
        self.model_ = self._model(self.lam_)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)  # the certificate has the gap
                return self.model_.fit_transform(Y)
        finally:  # also of an interrupted fit, which holds its last iteration
            self._copy_input(self.model_)
            for name in FITTED:
                if hasattr(self.model_, name):
                    setattr(self, name, getattr(self.model_, name))

    def transform(self, Y: Any) -> Any:
        """The codes of the rows of Y at the chosen λ."""
        check_is_fitted(self)
        self._require_complete(self.model_._checked(Y, reset=False)[1])
        return self.model_.transform(Y)

    def inverse_transform(self, U: Any) -> Any:
        """The matrix UVᵀ of codes U."""
        check_is_fitted(self)
        return self.model_.inverse_transform(U)

    def score(self, Y: Any, y: Any = None) -> float:
        """The share of the variance of Y that the fit at the chosen λ explains."""
        check_is_fitted(self)
        return self.model_.score(Y)

    def plot(self, ax: Any = None) -> Any:
        """Held-out error with its standard error, and the number of components, over λ; returns the axes."""
        check_is_fitted(self)
        try:
            import matplotlib.pyplot as plt
        except ModuleNotFoundError as error:
            raise MissingExtra("plot needs matplotlib: pip install matplotlib") from error
        ax = plt.subplots()[1] if ax is None else ax
        found = self.cv_results_
        ax.errorbar(found["lams"], found["mean_error"], found["standard_error"], marker="o", color="#0072B2")
        ax.axvline(self.lam_, color="black", linestyle="--", linewidth=1)
        ax.set(xscale="log", xlabel="λ", ylabel="held-out error, share of the variance")
        other = ax.twinx()
        other.plot(found["lams"], found["mean_rank"], marker="s", color="#D55E00")
        other.set_ylabel("components (orange)")
        return ax

    @property
    def _n_features_out(self) -> int:
        return self.n_components_

    # -- the choice ------------------------------------------------------------------------------------------------

    def _require_complete(self, data: Any) -> None:
        """Raise for missing entries; completion has them."""

    def _copy_input(self, model: Any) -> None:
        for name in ("n_features_in_", "feature_names_in_"):
            if hasattr(model, name):
                setattr(self, name, getattr(model, name))

    def _shares(self, top: float) -> np.ndarray:
        """The grid as shares of λmax, in falling order."""
        if self.lams is None:
            return np.geomspace(LARGEST_SHARE, SMALLEST_SHARE, self.n_lams)
        return np.sort(np.unique(lam_grid(self.lams, lambda: top)))[::-1] / top

    def _validated(self, model: Factorization, data: Any, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Errors and ranks, folds × shares."""
        # Shares of λmax, unlike λ, are the same for the data in the middle of the range, whose squares exist.
        loss = (data if isinstance(data, Observed) else Squared(data)).normalized()[0]
        data = loss if isinstance(loss, Observed) else loss.Y
        folds = self._folds(model, data, seeded_generator(self.random_state))
        found = []
        with self._progress(len(folds)) as done, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a fold may be zero or not certified
            for fold in folds:
                found.append(fold(shares))
                done()
        return np.array([e for e, _ in found]), np.array([r for _, r in found])

    def _choose(self, shares: np.ndarray, top: float, errors: np.ndarray, ranks: np.ndarray) -> None:
        """Set ``lam_`` by the one-standard-error rule, and ``cv_results_``."""
        mean, spread = errors.mean(0), errors.std(0, ddof=1) / np.sqrt(len(errors))
        best = int(mean.argmin())
        chosen = int(np.flatnonzero(mean <= mean[best] + spread[best])[0])
        self.lam_, self.lam_min_ = float(shares[chosen] * top), float(shares[best] * top)
        self.cv_results_ = {
            "lams": shares * top,
            "shares": shares,
            "mean_error": mean,
            "standard_error": spread,
            "mean_rank": ranks.mean(0),
            "errors": errors,
        }

    @contextlib.contextmanager
    def _progress(self, folds: int) -> Iterator[Callable[[], None]]:
        if not self.verbose:
            yield lambda: None
            return
        try:
            from rich.progress import Progress
        except ModuleNotFoundError as error:
            raise MissingExtra("a progress bar needs the package rich: pip install rich") from error
        with Progress() as bar:
            task = bar.add_task(f"{type(self).__name__}: folds", total=folds)
            yield lambda: bar.update(task, advance=1)

    def _folds(self, model: Factorization, data: Any, generator: torch.Generator) -> list[Fold]:
        """For each fold, a block of rows and columns, a function from falling shares to errors and ranks."""
        n, m = data.shape
        count = min(self.cv, n, m)
        if count < 2:
            raise ShapeError(
                f"cross-validation holds out rows and columns, so it needs at least two of each; got "
                f"n_samples={n} and n_features={m}"
            )
        parts = [np.array_split(torch.randperm(size, generator=generator).numpy(), count) for size in (n, m)]
        unit = variance(data)
        return [block_fold(model, data, rows, columns, unit) for rows, columns in zip(*parts, strict=True)]


@dataclass(eq=False, repr=False)
class NMFCV(_CrossValidated):
    r"""Non-negative matrix factorisation with λ chosen by cross-validation; see :class:`NMF`.

    Args:
        lams: The values of λ, or shares of λmax; None: ``n_lams`` shares from 0.8 to 0.01.
        cv: The number of folds. Each holds out a part of the rows and a part of the columns.
        n_lams: The length of the grid.
        r_max: The largest number of components.
        tol: The relative gap to certify.
        max_iter: The total number of iterations of each fit.
        random_state: Seed of the folds and starts.
        verbose: Show a progress bar.

    Attributes:
        lam_: The largest λ whose error is within one standard error of the smallest (``lam_min_``).
        cv_results_: ``lams``, ``shares``, ``mean_error``, ``standard_error``, ``mean_rank`` and the folds' ``errors``.
            Errors are mean squares, relative to the variance of what was held out, or of the data where that is far
            more.
        model_: The :class:`NMF` fitted to all data at ``lam_``; its attributes are also attributes of this object.

    Source: Owen & Perry, 2009, for the folds.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> Y = rng.random((40, 3)) @ rng.random((3, 30)) + 0.05 * rng.random((40, 30))
    >>> model = NMFCV(cv=3, n_lams=4, random_state=0).fit(Y)
    >>> bool(model.cv_results_["mean_error"].min() < 0.2), model.lam_ >= model.lam_min_
    (True, True)
    """

    _: KW_ONLY
    r_max: int | None = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = False
        return tags

    def _require_complete(self, data: Any) -> None:
        if isinstance(data, Observed):
            raise NonFiniteError(
                "Input Y contains NaN, and NMFCV holds out blocks of complete rows and columns: fill them, or choose "
                "lam by MatrixCompletionCV"
            )

    def _model(self, lam: float) -> NMF:
        return NMF(
            lam, tol=self.tol, max_iter=self.max_iter, r_max=self.r_max, random_state=self.random_state, effort=0.2
        )


@dataclass(eq=False, repr=False)
class LowRankCV(_CrossValidated):
    r"""Low-rank approximation with λ chosen by cross-validation; see :class:`LowRank`.

    Args:
        lams: The values of λ, or shares of λmax; None: ``n_lams`` shares from 0.8 to 0.01.
        cv: The number of folds. Each holds out a part of the rows and a part of the columns.
        n_lams: The length of the grid.
        tol: The relative gap to certify.
        max_iter: The total number of iterations of each fit.
        random_state: Seed of the folds and of the randomised SVD.
        verbose: Show a progress bar.

    Attributes:
        lam_: The largest λ whose error is within one standard error of the smallest (``lam_min_``).
        cv_results_: As for :class:`NMFCV`.
        model_: The :class:`LowRank` fitted to all data at ``lam_``.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> Y = rng.normal(size=(60, 2)) @ rng.normal(size=(2, 50)) + 0.1 * rng.normal(size=(60, 50))
    >>> LowRankCV(random_state=0).fit(Y).n_components_
    2
    """

    def _model(self, lam: float) -> LowRank:
        return LowRank(lam, tol=self.tol, max_iter=self.max_iter, random_state=self.random_state)


@dataclass(eq=False, repr=False)
class MatrixCompletionCV(_CrossValidated):
    r"""Matrix completion with λ chosen by cross-validation over the observed entries; see :class:`MatrixCompletion`.

    Args:
        lams: The values of λ, or shares of λmax; None: ``n_lams`` shares from 0.8 to 0.01.
        cv: The number of folds of the observed entries.
        n_lams: The length of the grid.
        r_max: The largest number of components.
        tol: The relative gap to certify.
        max_iter: The total number of iterations of each fit.
        random_state: Seed of the folds and starts.
        verbose: Show a progress bar.

    Attributes:
        lam_: The largest λ whose error is within one standard error of the smallest (``lam_min_``).
        cv_results_: As for :class:`NMFCV`.
        model_: The :class:`MatrixCompletion` fitted to all observed entries at ``lam_``.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> Y = rng.normal(size=(40, 2)) @ rng.normal(size=(2, 30))
    >>> Y[rng.random(Y.shape) < 0.4] = np.nan
    >>> model = MatrixCompletionCV(cv=3, n_lams=5, random_state=0).fit(Y)
    >>> model.n_components_, bool(model.cv_results_["mean_error"].min() < 0.1)
    (2, True)
    """

    _: KW_ONLY
    r_max: int | None = None

    def _model(self, lam: float) -> MatrixCompletion:
        return MatrixCompletion(
            lam, tol=self.tol, max_iter=self.max_iter, r_max=self.r_max, random_state=self.random_state
        )

    def _folds(self, model: Factorization, data: Any, generator: torch.Generator) -> list[Fold]:
        count = min(self.cv, len(data.values))
        if count < 2:
            raise ShapeError(f"cross-validation needs two observed entries at least, got {len(data.values)}")
        order = torch.randperm(len(data.values), generator=generator)
        unit = variance(data)
        return [entry_fold(model, data, part, unit) for part in torch.tensor_split(order, count)]

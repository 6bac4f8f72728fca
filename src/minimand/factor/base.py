"""The base classes of the estimators: scikit-learn's methods, input checks, paths over λ, warnings and progress."""

import abc
import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import scipy.sparse as sp
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin, clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from ..errors import MissingExtra, OptionError, ShapeError, require_finite, require_values
from ..solvers.linear import ridge_factor
from .bounds import largest_singular
from .certificate import certify_factors
from .checking import HELD, REMEDIES, FullPrecision, Path, explained_variance, in_range, require_2d, validated
from .inputs import (
    Share,
    Units,
    as_share,
    as_tensor,
    lam_grid,
    leveled,
    raised,
    real,
    refuse_masked,
    require_entries,
    require_lam,
    require_number,
    require_whole,
    same_kind,
    seeded_generator,
    warn_if_out_of_range,
    weight_roots,
    working,
)
from .losses import Loss, Squared
from .matrices import RowSharding, leading_singular
from .observed import Observed
from .problem import Certificate, FactorProblem, Factors, Report, Stop, no_report
from .regularizers import L2, Regularizer
from .sparse import SparseData, sparse_from_tensor, summed

__all__ = ["Factorization", "Path"]

EXACT = 1_000_000  # entries up to which a share is of the exact lambda_max
_MISSING = "fill them, or complete them with MatrixCompletion"


@dataclass(eq=False, repr=False)
class Factorization(FullPrecision, ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator, abc.ABC):
    r"""Base of the estimators.

    An estimator checks its input, builds a problem, solves it and stores the result in its fitted attributes. Its
    options are dataclass fields; the default problem is :math:`\tfrac12\|Y - UV^\top\|_F^2 + \lambda\|UV^\top\|_*`.
    Results have the input's kind (array or tensor), dtype and device. Results for half precision are float32, the
    precision in which the factors are certified.
    """

    lam: float | Share | str
    _: KW_ONLY
    tol: float = 1e-3
    max_iter: int = 500
    random_state: Any = None
    verbose: bool = False

    #: Whether the loss takes sparse matrices, whose zeros are data.
    _takes_sparse: ClassVar[bool] = False

    # -- defined by each estimator ---------------------------------------------------------------------------------

    @abc.abstractmethod
    def _solve(self, problem: FactorProblem, start: Any, report: Report) -> Factors:
        """The solution of a problem in the middle of the floating-point range."""

    def _code(self, problem: Any, V: Tensor) -> tuple[Tensor, bool]:
        """The codes of the data's rows for fixed V, not empty, and whether they converged: each row solves
        min ½‖y − uVᵀ‖² + (λ/2)‖u‖²."""
        Y = problem.loss.Y
        return ridge_factor(V.mT.contiguous(), problem.lam).solve(
            (Y if Y.shape[1:] == V.shape[:1] else Y.flatten(1)) @ V
        ), True

    def _loss(self, Y: Any, rows: RowSharding) -> Loss:
        """The loss of checked data."""
        return Squared(Y, rows)

    def _regularizer(self) -> Regularizer:
        """θ."""
        return L2()

    def _largest_polar(self, loss: Any) -> float:
        """The polar of the loss's negative gradient at zero."""
        return largest_singular(loss.zero(), self._generator())

    def _rough_polar(self, loss: Any) -> float:
        """As :meth:`_largest_polar`; of large data a lower bound, tight to several digits."""
        if loss.entries() <= EXACT:
            return self._largest_polar(loss)
        return float(leading_singular(loss.start(), 2, generator=self._generator(), sweeps=12)[1][0])

    def _weight(self, loss: Loss) -> float:
        """λ for the loss of checked data."""
        share = as_share(self.lam)
        if share is None:
            return float(self.lam)  # type: ignore[arg-type]
        loss, units = loss.normalized()
        top = raised(self._rough_polar(loss), units.polar)
        if not top > 0:
            raise OptionError("lam is a share of lambda_max, but lambda_max(Y) is zero: pass lam as a number")
        return share.value * top

    def lambda_max(self, Y: Any) -> float:
        """The polar of the loss's gradient at zero: from it on the solution is zero. SparseDictionary and CPTensor give
        a lower bound on it, by ascent from many starts: below it the solution is not zero."""
        loss, units = self._loss(self._data(Y), RowSharding()).normalized()
        return raised(self._largest_polar(loss), units.polar)

    # -- scikit-learn's methods ------------------------------------------------------------------------------------

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        tags.input_tags.sparse = self._takes_sparse
        return tags

    def fit(self, Y: Any, y: Any = None, *, start: Any = None, process_group: Any = None) -> Self:
        """Fit to Y.

        Args:
            Y: n_samples × n_features, array or tensor; with a process group, the rows of this process.
            y: Ignored.
            start: Factors (U, V) of any origin to start from; None: the estimator's own start.
            process_group: A torch.distributed group over which the rows are sharded.
        """
        self._warn(self._fit(Y, start, process_group)[1], 3)
        return self

    def fit_transform(self, Y: Any, y: Any = None, *, start: Any = None, process_group: Any = None) -> Any:
        """Fit to Y and return U; see :meth:`fit`."""
        codes, stop = self._fit(Y, start, process_group)
        self._warn(stop, 4)  # one level more: scikit-learn's set_output wraps this method
        return codes

    def _warn(self, stop: Stop, level: int) -> None:
        """Warn if the solution is zero or not certified; ``level`` is the caller's on the stack."""
        warn_if_out_of_range(type(self).__name__, self.objective_, level)
        zero = self.objective_ > 0 and not self.components_.any()
        if zero and self.certificate_.finds_nothing_above(self.lam_):
            warnings.warn(
                f"{type(self).__name__} has no component: at lam={self.lam_:g} the solution is zero, as for every lam "
                f"≥ lambda_max(Y), which is at most {self.certificate_.polar_upper:.6g}; use a smaller lam, such as "
                f"lam='10%' of it, or see path(Y)",
                stacklevel=level,
            )
        elif stop in REMEDIES:
            remedy = REMEDIES[stop].format(max_iter=self.max_iter, rank=self.n_components_)
            text = self.certificate_.shortfall(type(self).__name__, self.tol, remedy)
            warnings.warn(text, ConvergenceWarning, stacklevel=level)

    def _fit(self, Y: Any, start: Any, group: Any, sample_weight: Any = None) -> tuple[Any, Stop]:
        """Check, solve and store; returns U and the reason for the end of the fit."""
        self._check_options()
        like, data = self._checked(Y, reset=True)
        roots = weight_roots(sample_weight, data.shape[0])
        for name in ("sums_", "n_samples_seen_"):  # of mini-batches
            if hasattr(self, name):
                delattr(self, name)
        rows = RowSharding(group)
        loss = self._loss(data, rows)
        if roots is not None:
            loss, like = loss.weighted(roots), like[:0].double() if isinstance(like, Tensor) else like[:0].astype(float)
        self.lam_ = self._weight(loss)
        problem, units = FactorProblem(loss, self._regularizer(), self.lam_).normalized()
        begin = None if start is None else self._checked_start(start, data, units)
        if begin is not None and roots is not None:
            begin = (begin[0] * roots.to(begin[0]).unsqueeze(1), *begin[1:])
        with self._progress(units) as report:
            found = self._solve(problem, begin, report).in_units(units)
        if roots is not None:
            found = replace(found, U=self._unweighted(found, data, roots))
        self._store(found, data, like)
        self.interrupted_ = found.stop is Stop.INTERRUPTED
        if self.interrupted_:
            raise KeyboardInterrupt(HELD.format(type(self).__name__))
        return same_kind(found.U, like), found.stop

    def _unweighted(self, found: Factors, data: Any, roots: Tensor) -> Tensor:
        """The codes of the rows from those of the weighted rows; for a weight of zero those of ``transform``."""
        alive = roots.to(found.U).unsqueeze(1)
        if bool((alive > 0).all()):
            return found.U / alive
        codes = self._encoded(data, found.V.to((data.values if isinstance(data, Observed) else data).dtype))[0]
        return torch.where(alive > 0, found.U / alive.clamp_min(sys.float_info.min), codes.to(found.U))

    def _problem(self, data: Any, rows: RowSharding) -> FactorProblem:
        return FactorProblem(self._loss(data, rows), self._regularizer(), self.lam_)

    def _store(self, found: Factors, data: Any, like: Any) -> None:
        """Set the fitted attributes; arrays and tensors are of the kind of ``like``."""
        self.n_components_ = int(found.V.shape[1])
        self.components_: Any = same_kind(found.V.mT.contiguous(), like)
        self.objective_ = found.objective
        self.history_ = list(found.history)
        self.n_iter_ = found.iterations
        self.certificate_ = found.later or found.certificate

    @property
    def certificate_(self) -> Certificate:
        """A bound on the distance of the fitted factors to the global minimum.

        At a fixed size in one process it is computed when it is first read, or when the estimator is copied or pickled.
        Until then the estimator refers to the data; if they have changed since, the certificate is ``UNDECIDED``.
        """
        if "certificate_" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no certificate_ before it is fitted")
        found = vars(self)["certificate_"]
        if callable(found):
            self.__dict__["certificate_"] = found = found()
        return found

    @certificate_.setter
    def certificate_(self, found: Certificate | Callable[[], Certificate]) -> None:
        self.__dict__["certificate_"] = found

    def __getstate__(self) -> Any:
        getattr(self, "certificate_", None)
        return super().__getstate__()

    def transform(self, Y: Any) -> Any:
        """The codes of the rows of Y for the fitted components: a convex problem for each row."""
        check_is_fitted(self)
        like, data = self._checked(Y, reset=False)
        codes, converged = self._encoded(data, self._right(data))
        if not converged:
            text = f"{type(self).__name__}.transform used all its iterations before the codes converged: they are rough"
            warnings.warn(text, ConvergenceWarning, stacklevel=3)
        return same_kind(codes, like)

    def _encoded(self, data: Any, V: Tensor) -> tuple[Tensor, bool]:
        """The codes of checked data for V, and whether they converged."""
        if not V.shape[1]:
            return V.new_zeros(data.shape[0], 0), True
        problem, units = self._problem(data, RowSharding()).normalized(V, V)
        codes, converged = self._code(problem, units.lowered(V))
        return units.factor(codes), converged

    def certify(self, Y: Any) -> Certificate:
        """The certificate of the fitted components with the codes of the rows of Y, also after ``partial_fit``."""
        check_is_fitted(self)
        data = self._checked(Y, reset=False)[1]
        V = self._right(data)
        U = self._encoded(data, V)[0]
        problem, units = self._problem(data, RowSharding()).normalized(U, V)
        found = certify_factors(problem, units.lowered(U), units.lowered(V), tol=self.tol, generator=self._generator())
        return found.certificate.in_units(units)

    def score(self, Y: Any, y: Any = None) -> float:
        r"""The share of the variance of Y that ``inverse_transform(transform(Y))`` explains,
        :math:`1 - \|Y - UV^\top\|^2 / \|Y - \bar Y\|^2` with the columns' means :math:`\bar Y`.

        The codes are fitted to the same rows, so the score falls with λ. To choose λ by entries that no fit has seen,
        use ``NMFCV``, ``LowRankCV`` or ``MatrixCompletionCV``.
        """
        return self._score(Y, None)

    def _score(self, Y: Any, sample_weight: Any) -> float:
        """The explained variance of checked rows and their weights."""
        check_is_fitted(self)
        data = self._checked(Y, reset=False)[1]
        V, roots = self._right(data), weight_roots(sample_weight, data.shape[0])
        U = self._encoded(data, V)[0] if (fitted := self._fitted_codes(data)) is None else fitted
        return data.explained(U, V, roots) if isinstance(data, Observed) else explained_variance(data, U, V, roots)

    def _fitted_codes(self, data: Any) -> Tensor | None:
        """The codes that a score takes instead of those of the rows."""
        return None

    def inverse_transform(self, U: Any) -> Any:
        """The matrix UVᵀ of codes U."""
        check_is_fitted(self)
        codes = working(real("U", U))
        if codes.dim() != 2 or codes.shape[1] != self.n_components_:
            raise ShapeError(f"codes have shape {tuple(codes.shape)}, but there are {self.n_components_} components")
        return same_kind(codes @ self._right(codes).mT, U)

    def path(self, Y: Any, lams: Sequence[float | Share | str] | None = None, *, n_lams: int = 10) -> Path:
        """Fit along a grid of λ and return the fitted estimators, in the order of the grid.

        Elements of ``lams`` may be shares of λmax. Without ``lams`` the grid is geometric, ``n_lams`` values from λmax
        down to λmax/100. The fits run from large to small λ, each from the solution before it: solutions for large λ
        have few components and are good starts.
        """
        require_whole("n_lams", n_lams)
        shares = [Share(float(share)) for share in np.geomspace(1.0, 0.01, n_lams)]
        grid = lam_grid(shares if lams is None else lams, lambda: self.lambda_max(Y))
        for lam in grid:
            require_lam(lam)
        models: dict[int, Factorization] = {}
        before: tuple[Any, Any] | None = None
        for i in np.argsort(-grid, kind="stable"):
            model = clone(self).set_params(lam=float(grid[i]))
            U, _ = model._fit(Y, before, None)
            V = model.components_.T
            before = (U, V) if model.n_components_ else None
            models[int(i)] = model
        return Path(models[i] for i in range(len(grid)))

    @property
    def _n_features_out(self) -> int:
        return self.n_components_

    # -- input -----------------------------------------------------------------------------------------------------

    def _check_options(self) -> None:
        require_lam(self.lam)
        require_number("tol", self.tol)
        require_whole("max_iter", self.max_iter)

    def _checked(self, Y: Any, *, reset: bool) -> tuple[Any, Any]:
        """An example of the kind of the results, and the data as a tensor of float32 or float64."""
        name = type(self).__name__
        refuse_masked("Y", Y, f"{name} needs them all: {_MISSING}")
        if isinstance(Y, Tensor) and Y.layout != torch.strided and self._takes_sparse:
            require_2d(Y)
            Y = sparse_from_tensor(Y)
        data: Any = self._matrix(Y, reset=reset, accept_sparse=("csr", "csc") if self._takes_sparse else False)
        if sp.issparse(data):
            sparse = SparseData(summed(data))
            require_entries("Y", sparse.values, name, _MISSING)
            return sparse.values.numpy()[:0], sparse
        require_entries("Y", data, name, _MISSING)
        return (Y, data) if isinstance(Y, Tensor) else (data, as_tensor(data))

    def _matrix(self, Y: Any, *, reset: bool, accept_sparse: Any = False) -> Any:
        """The tensor or array Y as a matrix of float32 or float64; its entries are not checked."""
        if not isinstance(Y, Tensor):
            return validated(self, Y, reset=reset, accept_sparse=accept_sparse)
        require_values("Y", Y)
        shape = tuple(Y.shape)
        require_2d(Y)
        if Y.is_complex():
            raise OptionError("Complex data not supported: pass real and imaginary parts as columns")
        if 0 in shape:
            raise ShapeError(f"Y of shape {shape} is empty; a minimum of 1 row and column is required")
        validate_data(self, Y, reset=reset, skip_check_array=True)
        return working(Y.detach())

    def _data(self, Y: Any) -> Any:
        """Checked data; a fitted estimator requires the number of features that it was fitted to."""
        return self._checked(Y, reset="n_features_in_" not in vars(self))[1]

    def _checked_start(self, start: Any, data: Any, units: Units) -> tuple[Tensor, ...]:
        try:
            U, V = start
        except (TypeError, ValueError) as error:
            raise OptionError(f"start must be a pair of matrices (U, V), got {type(start).__name__}") from error
        U, V = (working(real("start", x)) for x in (U, V))
        n, m = data.shape
        if U.dim() != 2 or V.dim() != 2 or (len(U), len(V)) != (n, m) or U.shape[1] != V.shape[1]:
            raise ShapeError(
                f"start has U of {tuple(U.shape)} and V of {tuple(V.shape)}, but Y needs ({n}, r) and ({m}, r)"
            )
        require_finite("start", U)
        require_finite("start", V)
        return in_range(leveled(U, V), units)

    def _right(self, like: Any) -> Tensor:
        like = like.values if isinstance(like, Observed) else like
        components = self.components_ if isinstance(self.components_, Tensor) else as_tensor(self.components_)
        return components.to(dtype=like.dtype, device=like.device).mT

    def _generator(self) -> torch.Generator:
        return seeded_generator(self.random_state)

    @contextlib.contextmanager
    def _progress(self, units: Units) -> Iterator[Report]:
        """A function that reports sweeps, rank and objective: to a progress bar with ``verbose``."""
        if not self.verbose:
            yield no_report
            return
        try:
            from rich.progress import Progress
        except ModuleNotFoundError as error:
            raise MissingExtra("a progress bar needs the package rich: pip install rich") from error
        with Progress() as bar:
            task = bar.add_task(type(self).__name__, total=self.max_iter)

            def report(sweeps: int, rank: int, objective: float) -> None:
                text = f"{type(self).__name__}: {rank} components, objective {raised(objective, units.objective):.6g}"
                bar.update(task, completed=sweeps, description=text)

            yield report

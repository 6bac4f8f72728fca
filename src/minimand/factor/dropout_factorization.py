"""The estimator DropoutFactorization: matrix factorisation with dropout, by four methods for one objective."""

import warnings
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from ..errors import OptionError, require_positive
from ..norms.tracker import LipschitzTracker
from ..operators import Dense
from ..solvers.base import require_count
from ..solvers.iterate import iterate
from ..solvers.linear import ridge_factor
from ..solvers.steps import Schedule, check_step_size
from .checking import HELD, FullPrecision, explained_variance, require_2d, validated
from .dropout import (
    block_smoothness,
    closed_form,
    dropout_objective,
    dropout_weight,
    equalized_factors,
    require_rate,
    sample_smoothness,
    variable_rate,
)
from .inputs import Units, raised, require_entries, require_whole, seeded_generator, warn_if_out_of_range
from .losses import Squared
from .sparse import SparseData, is_sparse, sparse_from_tensor, summed

__all__ = ["DropoutFactorization"]

_METHODS = ("closed_form", "alternating", "gradient", "dropout")
_RATES = ("fixed", "variable")
# Samples may raise the objective, but not this many times above that of the start.
DIVERGED = 1e3


class _DropoutState(NamedTuple):
    U: Tensor
    V: Tensor
    history: list[float]
    norms: list[tuple[float, float, float]]

    def appended(self, Y: Any, U: Tensor, V: Tensor, p: float) -> "_DropoutState":
        """The state at other factors, with their objective and norms appended to the histories."""
        sizes = torch.linalg.vector_norm(U, dim=0) * torch.linalg.vector_norm(V, dim=0)
        self.history.append(_objective(Y, U, V, p))
        self.norms.append((float(sizes.min()), float(sizes.mean()), float(sizes.max())))
        return _DropoutState(U, V, self.history, self.norms)


@dataclass(eq=False, repr=False)
class DropoutFactorization(FullPrecision, ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    r"""Factorise a matrix with dropout on its terms, or with the regularizer that equals dropout in expectation.

    .. math::

        \min_{U, V}\; \mathbb{E}_z\bigl\|Y - \tfrac{1}{1-p} U\operatorname{diag}(z)V^\top\bigr\|^2
        = \min_{U, V}\; \|Y - UV^\top\|^2 + \tfrac{p}{1-p}\sum_{i=1}^r\|U_i\|^2\|V_i\|^2

    Source: [Vidal2018], Part II. The global minimum is known (:func:`~minimand.factor.dropout_optimum`), so ``gap_`` is
    the exact distance to it. An objective that grows a thousandfold is an error.

    CSR and CSC matrices and sparse tensors are data with zeros. They are only multiplied, and no dense matrix of their
    size is formed, unless they are small or the factors are of that size: memory is that of the entries and of a few
    matrices of the factors' size.

    Args:
        n_components: The number r of terms.
        p: The drop rate in [0, 1).
        method: ``"closed_form"``: the global minimum, equalised. ``"alternating"``: exact minimisation over U and V
            in turn. ``"gradient"``: descent on the deterministic objective, over U and over V in turn.
            ``"dropout"``: the same steps on sampled terms, which are those of backpropagation with dropout.
        rate: ``"fixed"``: p is the rate. ``"variable"``: p is the rate for one term, and the rate for r terms is
            raised so that :math:`\lambda_r = r\lambda_1`: the penalty is then :math:`\lambda_1\|UV^\top\|_*^2`.
        max_iter: Iterations of the iterative methods.
        step: ``"auto"`` is :math:`1/L` for each block, and at most :math:`1/L` of the drawn sample, whose curvature
            grows with :math:`(1-p)^{-2}`; else a fixed number.
        decay: The schedule of the step; None: constant, for ``"dropout"`` linear decay to zero over ``max_iter``.
        tol: The relative decrease of the objective in one iteration at which ``"alternating"`` and ``"gradient"``
            stop.
        random_state: Seeds the start and the masks.

    Attributes:
        components_: :math:`V^\top`.
        n_components_: r.
        p_: The rate used.
        objective_: The deterministic objective of the factors.
        optimum_: Its global minimum.
        gap_: Their difference.
        history_: The deterministic objective per iteration, the start first.
        norm_history_: Per iteration the least, mean and largest :math:`\|U_i\|\|V_i\|`, which equalisation makes equal.
        n_iter_: The number of iterations made.
        interrupted_: Whether a ``KeyboardInterrupt`` ended the fit; the factors are those of its last iteration.

    >>> Y = np.diag([4.0, 1.0])
    >>> model = DropoutFactorization(2, p=0.5)
    >>> U = model.fit_transform(Y)
    >>> np.round(U @ model.components_, 6) + 0.0  # the threshold is 4/3: only the larger value survives
    array([[2.666667, 0.      ],
           [0.      , 0.      ]])
    """

    n_components: int = 10
    p: float = 0.5
    _: KW_ONLY
    method: str = "closed_form"
    rate: Literal["fixed", "variable"] = "fixed"
    max_iter: int = 1000
    step: float | Literal["auto"] = "auto"
    decay: Schedule | None = None
    tol: float = 1e-10
    random_state: Any = None

    def fit(self, X: Any, y: Any = None) -> "DropoutFactorization":
        """Find the factors of X, n_samples × n_features."""
        self._fit(X, 4)
        return self

    def fit_transform(self, X: Any, y: Any = None) -> np.ndarray:
        """Find the factors of X and return U."""
        return self._fit(X, 5).numpy()  # one level more: scikit-learn's set_output wraps this method

    def transform(self, X: Any) -> np.ndarray:
        r"""The best U for given V, row by row: :math:`\min_u \|x - uV^\top\|^2 + \lambda\sum_i u_i^2\|V_i\|^2`."""
        return self._encoded(X)[1].numpy()

    def score(self, X: Any, y: Any = None) -> float:
        """The share of the variance of X that ``inverse_transform(transform(X))`` explains."""
        return explained_variance(*self._encoded(X))

    def _encoded(self, X: Any) -> tuple[Any, Tensor, Tensor]:
        """Checked data, their codes and V."""
        check_is_fitted(self, "components_")
        data = self._checked(X, reset=False)
        V = torch.from_numpy(self.components_.T.copy()).to(data.dtype)
        loss, units = Squared(data).normalized(V, V)
        return data, units.factor(best_rows(loss.Y, units.lowered(V), dropout_weight(self.p_))), V

    def inverse_transform(self, X: Any) -> np.ndarray:
        """The product of coefficients with the components."""
        check_is_fitted(self, "components_")
        return np.asarray(X) @ self.components_

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def _fit(self, X: Any, level: int) -> Tensor:
        """Solve and store, and return U; ``level`` is the caller's on the stack."""
        self._check()
        loss, units = Squared(self._checked(X)).normalized()
        Y = loss.Y
        self.p_ = float(self.p) if self.rate == "fixed" else variable_rate(self.p, self.n_components)
        weight = dropout_weight(self.p_)
        left, values, right, threshold = closed_form(Y, self.n_components, weight)
        best = equalized_factors(left, values, right, self.n_components)
        optimum = _DropoutState(*best, [], []).appended(Y, *best, self.p_)
        self.n_iter_, self.interrupted_ = 1, False
        factors = optimum if self.method == "closed_form" else self._descend(Y, units, level)
        self.components_ = units.factor(factors.V.mT.contiguous()).numpy()
        self.n_components_ = self.n_components
        gap = max(factors.history[-1] - optimum.history[0], 0.0)
        self.optimum_, self.gap_, *history = (
            raised(x, units.objective) for x in (*optimum.history, gap, *factors.history)
        )
        self.history_, self.objective_ = np.array(history), history[-1]
        self.threshold_ = raised(threshold, units.product)
        self.norm_history_ = np.array([[raised(x, units.product) for x in norms] for norms in factors.norms])
        if self.interrupted_:
            raise KeyboardInterrupt(HELD.format(type(self).__name__))
        warn_if_out_of_range(type(self).__name__, self.objective_, level)
        return units.factor(factors.U)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _checked(self, X: Any, *, reset: bool = True) -> Any:
        if isinstance(X, Tensor) and is_sparse(X):
            require_2d(X)
            X = sparse_from_tensor(X)
        data = validated(self, X, reset=reset, accept_sparse=("csr", "csc"))
        data = summed(data) if is_sparse(data) else data
        values = data.data if is_sparse(data) else data
        require_entries("X", values, type(self).__name__, "fill them, or complete them with MatrixCompletion")
        # A copy of an array, because torch warns about read-only ones.
        return SparseData(data) if is_sparse(data) else torch.from_numpy(np.array(data, order="C"))

    def _check(self) -> None:
        require_whole("n_components", self.n_components)
        require_rate(self.p)
        if self.method not in _METHODS:
            raise OptionError(f"method must be one of {', '.join(_METHODS)}, got {self.method!r}")
        if self.rate not in _RATES:
            raise OptionError(f"rate must be one of {', '.join(_RATES)}, got {self.rate!r}")
        require_count("max_iter", self.max_iter)
        require_positive("tol", self.tol, zero=True)
        check_step_size(self.step)
        if self.decay is not None and not isinstance(self.decay, Schedule):
            raise OptionError(f"decay must be None or a Schedule, such as Harmonic(100), got {self.decay!r}")

    def _descend(self, Y: Any, units: Units, level: int) -> _DropoutState:
        """The iterative methods, from a random start of the data's scale."""
        generator = seeded_generator(self.random_state)
        size = Y.values.norm() if isinstance(Y, SparseData) else Y.norm()
        scale = (size / (Y.numel() ** 0.5 * self.n_components**0.5)).sqrt()
        U, V = (
            scale * torch.randn(n, self.n_components, generator=generator, dtype=torch.float64).to(Y.dtype)
            for n in Y.shape
        )
        trackers = LipschitzTracker(Dense(U)), LipschitzTracker(Dense(V))
        # A given step is one in the units of the data.
        length = None if isinstance(self.step, str) else raised(float(self.step), units.product)
        start = _DropoutState(U, V, [], []).appended(Y, U, V, self.p_)

        def step(state: _DropoutState, k: int) -> _DropoutState:
            state = state.appended(Y, *self._stepped(Y, state, k, length, trackers, generator), self.p_)
            if not state.history[-1] <= DIVERGED * state.history[0]:
                raise OptionError(
                    f"DropoutFactorization(method={self.method!r}) diverged: iteration {k + 1} raised the objective "
                    f"{state.history[-1] / state.history[0]:.2g}-fold above the start's; use a smaller step than "
                    f'{self.step!r}, or step="auto" without a decay'
                )
            latest[0] = state, k + 1
            return state

        def stalled(state: _DropoutState, k: int) -> bool:
            before, after = state.history[-2:]
            return before - after <= self.tol * abs(after)

        sampled, latest = self.method == "dropout", [(start, 0)]
        try:
            factors, self.n_iter_ = iterate(step, start, self.max_iter, until=None if sampled else stalled)
        except KeyboardInterrupt:
            (U, V, history, norms), self.n_iter_ = latest[0]
            self.interrupted_ = True
            return _DropoutState(U, V, history[: self.n_iter_ + 1], norms[: self.n_iter_ + 1])
        if not sampled and self.tol > 0 and not stalled(factors, self.n_iter_):
            text = f"DropoutFactorization made all max_iter={self.max_iter} iterations, and each lowered the objective "
            text += f"by more than tol={self.tol:g}; raise max_iter or tol"
            warnings.warn(text, ConvergenceWarning, stacklevel=level + 1)
        return factors

    def _stepped(
        self,
        Y: Any,
        state: _DropoutState,
        k: int,
        length: float | None,
        trackers: tuple[LipschitzTracker, LipschitzTracker],
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        """The factors after one iteration: over U, then over V."""
        U, V = state.U, state.V
        if self.method == "alternating":
            U = best_rows(Y, V, dropout_weight(self.p_))
            return U, best_rows(Y.mT, U, dropout_weight(self.p_))
        masks: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
        if self.method == "dropout":
            kept = 1 - self.p_
            draw = torch.rand(2, self.n_components, generator=generator, dtype=torch.float64) < kept
            masks = (draw[0].to(Y.dtype) / kept, draw[1].to(Y.dtype) / kept)
        U = self._moved(Y, U, V, masks[0], self._length(V, k, length, trackers[1], masks[0]))
        return U, self._moved(Y.mT, V, U, masks[1], self._length(U, k, length, trackers[0], masks[1]))

    def _moved(self, Y: Any, U: Tensor, V: Tensor, mask: Tensor | None, length: Tensor | float) -> Tensor:
        """A gradient step over U for the objective, or for its sample of the terms in ``mask``."""
        if mask is not None:
            return U - length * 2 * _slope(Y, U * mask, V, V * mask)
        return U - length * (2 * (_slope(Y, U, V, V) + dropout_weight(self.p_) * U * V.square().sum(0)))

    def _length(
        self, V: Tensor, k: int, length: float | None, tracker: LipschitzTracker, mask: Tensor | None
    ) -> Tensor | float:
        """The step of this iteration for the factor that multiplies V; ``length`` replaces 1/L."""
        decay = 1 - k / self.max_iter if self.method == "dropout" else 1.0
        decay = decay if self.decay is None else self.decay.factor(k)
        if length is not None:
            return length * decay
        bound = block_smoothness(V, dropout_weight(self.p_), tracker)
        if mask is not None:  # the scheduled step, but none that may raise the sampled objective
            bound = torch.maximum(bound, decay * sample_smoothness(V, mask))
        return decay / bound if bound > 0 else 0.0


def _objective(Y: Any, U: Tensor, V: Tensor, p: float) -> float:
    """The deterministic objective; of sparse data from thin products."""
    if not isinstance(Y, SparseData):
        return float(dropout_objective(Y, U, V, p))
    penalty = (U.square().sum(0) * V.square().sum(0)).sum()
    return 2 * Squared(Y).value(U, V) + dropout_weight(p) * float(penalty)


def _slope(Y: Any, U: Tensor, V: Tensor, other: Tensor) -> Tensor:
    """(UVᵀ − Y) times ``other``; with sparse data UVᵀ is not formed."""
    if isinstance(Y, SparseData):
        return U @ (V.mT @ other) - Y @ other
    return (U @ V.mT - Y) @ other


def best_rows(Y: Any, V: Tensor, weight: float) -> Tensor:
    r"""The minimiser over U of the dropout objective.

    .. math:: U = YV(V^\top V + \lambda\operatorname{diag}\|V_i\|^2)^{-1}

    With columns of unit norm the diagonal is a ridge. Without a penalty U is the least-squares solution of least norm.

    >>> best_rows(torch.tensor([[4.0]]), torch.tensor([[2.0]]), 1.0)
    tensor([[1.]])
    """
    if weight == 0:
        return Y @ torch.linalg.pinv(V.mT)
    norms = torch.linalg.vector_norm(V, dim=0)
    safe = torch.where(norms > 0, norms, torch.ones_like(norms))
    unit = V / safe
    return ridge_factor(unit.mT, weight).solve(Y @ unit) / safe

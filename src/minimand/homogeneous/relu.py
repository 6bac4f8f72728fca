"""Regression and classification by one hidden ReLU layer, grown until it is certified optimal over all widths."""

import contextlib
import warnings
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import softmax
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import ClassifierTags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from ..errors import OptionError, require_positive
from ..factor.checking import HELD, validated
from ..factor.inputs import Units, raised, require_entries, seeded_generator, warn_if_out_of_range
from ..factor.problem import Certificate, Status
from ..solvers.base import require_count
from ..solvers.iterate import iterate
from .certificate import ReluData, judge_relu, objective, polar_of
from .losses import LOSSES
from .neurons import Neurons, descend, descend_in_cells, merge_neurons, prune_and_balance
from .polar import Polar

__all__ = ["ParallelReLU"]


class _Growth(NamedTuple):
    """The network of one round, its polar and certificate, and the records of all rounds so far."""

    neurons: Neurons
    polar: Polar
    certificate: Certificate
    rounds: list[tuple[float, int, float]]
    #: Whether a neuron that would lower the objective is known.
    improvable: bool

    @property
    def settled(self) -> bool:
        """Whether neither descent nor a neuron is known to lower the objective."""
        certified = self.certificate.status is Status.CERTIFIED
        return certified or not (self.improvable or len(self.neurons.W))


@dataclass(eq=False, repr=False)
class ParallelReLU(MultiOutputMixin, RegressorMixin, BaseEstimator):
    r"""Regression or classification by one hidden ReLU layer, grown to the global minimum over all widths.

    .. math::

        \min_{r,\, W,\, V}\; \ell(y, f(X)) + \lambda \sum_{i=1}^r \|w_i\|\,\|v_i\|, \qquad
        f(x) = \sum_{i=1}^r \max\bigl(w_i^\top [x; 1], 0\bigr)\, v_i .

    The loss is :math:`\tfrac12\|y - f(X)\|^2` or, for labels, the cross-entropy, both summed over the samples.

    Network and regulariser are positively homogeneous of the same degree. So a local minimum that no new neuron
    improves is global ([Vidal2018], Theorem 1). The meta-algorithm ([Vidal2018], Theorem 2) descends to a local minimum
    and solves the polar :math:`p = \max_{\|w\|\le1}\|R^\top\max(Xw, 0)\|` of the residual R. If
    :math:`p \le \lambda` it stops; otherwise it appends the neurons found by the polar, each scaled to its best size.

    The polar is exact with one input column, and with two columns up to 600 rows. Growth then ends ``CERTIFIED`` unless
    rounds or neurons run out, or the descent stops before the tolerance. With more columns an ascent from many starts
    bounds the polar from below, and norms bound it from above. The status is then ``UNDECIDED`` unless the upper bound
    suffices. Without an exact polar ``IMPROVABLE`` requires a margin: the neuron found must lower the objective f by
    more than ``tol`` · f, so its slope must exceed λ by :math:`\|\max(Xw, 0)\|(2\kappa\,\mathrm{tol}\,f)^{1/2}` with
    the curvature κ of the loss, 1 or ½.

    Args:
        lam: The weight of the regulariser; larger values give fewer neurons.
        tol: The relative gap at which growth stops and the status is ``CERTIFIED``.
        max_rounds: The largest number of rounds, in each of which neurons are added.
        max_neurons: The largest number of neurons; None: no limit.
        grow: The largest number of neurons that one round adds.
        descent: Iterations of each round's local descent.
        polar: ``"auto"``, ``"exact"`` or ``"ascent"``; see :func:`~minimand.homogeneous.certify_relu`.
        random_state: The seed of the ascent's starts.
        loss: ``"squared"``, or ``"cross_entropy"`` for a y of labels, or of rows of probabilities: the estimator is
            then a classifier with ``classes_``, ``decision_function`` and ``predict_proba``.

    Attributes:
        weights_: n_neurons × (n_features + 1), the bias last.
        outputs_: n_neurons × n_outputs; balanced, :math:`\|w_i\| = \|v_i\|`.
        n_neurons_: The number of neurons.
        certificate_: The certificate of the result.
        direction_: The steepest unit vector w, the bias last, found for a further neuron; its slope
            :math:`\|R^\top\max(Xw, 0)\|` is ``certificate_.polar_lower``.
        objective_: The objective of the result.
        interrupted_: Whether a ``KeyboardInterrupt`` ended the fit; the result is then that of the last round.
        history_: The objective of each round, the empty network first.
        width_history_, gap_history_: The width and the relative gap of each round.

    >>> X = np.array([[-1.0], [0.0], [1.0]])
    >>> model = ParallelReLU(lam=1e-3).fit(X, np.array([1.0, 0.0, 1.0]))
    >>> str(model.certificate_.status), np.round(model.predict(X), 2).tolist()
    ('CERTIFIED', [1.0, 0.0, 1.0])
    """

    lam: float = 0.1
    _: KW_ONLY
    tol: float = 1e-4
    max_rounds: int = 60
    max_neurons: int | None = None
    grow: int = 8
    descent: int = 500
    polar: str = "auto"
    random_state: Any = None
    loss: str = "squared"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        if self._classifies():
            tags.estimator_type, tags.regressor_tags, tags.classifier_tags = "classifier", None, ClassifierTags()
        return tags

    def _classifies(self) -> bool:
        return self.loss == "cross_entropy"

    def fit(self, X: Any, y: Any) -> "ParallelReLU":
        """Grow the network on X, n_samples × n_features, and y, with one or several outputs."""
        self._check()
        X, y = validated(self, X, y, dtype=np.float64, y_numeric=not self._classifies(), multi_output=True)
        self._require_entries(X)
        self._single = np.ndim(y) == 1
        target = torch.tensor(self._targets(np.asarray(y)))
        data, units = ReluData.of(torch.tensor(X), target, float(self.lam))
        generator = seeded_generator(self.random_state)
        empty = Neurons(data.X.new_zeros(0, data.X.shape[1]), data.Y.new_zeros(0, data.Y.shape[1]))
        latest, self.interrupted_ = [(self._assess(data, empty, [], generator), 0)], False

        def step(state: _Growth, k: int) -> _Growth:
            latest[0] = self._round(data, state, generator), k + 1
            return latest[0][0]

        with contextlib.suppress(KeyboardInterrupt):
            self.interrupted_ = True
            iterate(step, latest[0][0], self.max_rounds, until=lambda state, k: self._finished(state))
            self.interrupted_ = False
        end, self.n_iter_ = latest[0]
        self._store(end, units)
        if self.interrupted_:
            raise KeyboardInterrupt(HELD.format("ParallelReLU"))
        self._warn(self._finished(end))
        return self

    def _targets(self, y: np.ndarray) -> np.ndarray:
        """The targets as a matrix of float64; of labels, a column for each class."""
        if not self._classifies():
            return np.asarray(y, dtype=np.float64).reshape(len(y), -1)
        if y.ndim == 1:
            check_classification_targets(y)
            self.classes_, index = np.unique(y, return_inverse=True)
            return np.eye(len(self.classes_))[index]
        self.classes_ = np.arange(y.shape[1])
        found = torch.tensor(np.asarray(y, dtype=np.float64))
        return LOSSES[self.loss].targets(found, found).numpy()

    def _warn(self, finished: bool) -> None:
        """Warn if a known neuron would lower the objective, or rounds ran out."""
        warn_if_out_of_range("ParallelReLU", self.objective_, 3)
        status = self.certificate_.status
        if status is Status.CERTIFIED or (finished and status is Status.UNDECIDED):
            return
        remedy = f"all max_rounds={self.max_rounds} rounds are made; raise max_rounds or lam"
        if finished:
            full = self.n_neurons_ == self.max_neurons
            remedy = "raise max_neurons or lam" if full else "its last round gained nothing; raise descent, lam or tol"
        warnings.warn(self.certificate_.shortfall("ParallelReLU", self.tol, remedy), ConvergenceWarning, stacklevel=3)

    def predict(self, X: Any) -> np.ndarray:
        """The network's outputs, shaped like y; with the cross-entropy, the labels of the largest ones."""
        result = self._outputs(X)
        if self._classifies():
            return self.classes_[result.argmax(1)]
        return result[:, 0] if self._single else result

    @available_if(_classifies)
    def decision_function(self, X: Any) -> np.ndarray:
        """The network's outputs, whose softmax :meth:`predict_proba` returns."""
        return self._outputs(X)

    @available_if(_classifies)
    def predict_proba(self, X: Any) -> np.ndarray:
        """The probabilities of the classes."""
        return softmax(self._outputs(X), axis=1)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R²; with the cross-entropy, the share of correct labels."""
        of = accuracy_score if self._classifies() else r2_score
        return float(of(y, self.predict(X), sample_weight=sample_weight))

    def _outputs(self, X: Any) -> np.ndarray:
        check_is_fitted(self, "weights_")
        X = validated(self, X, reset=False, dtype=np.float64)
        self._require_entries(X)
        return np.maximum(np.c_[X, np.ones(len(X))] @ self.weights_.T, 0) @ self.outputs_

    def _require_entries(self, X: np.ndarray) -> None:
        require_entries("X", X, type(self).__name__, "fill them, or leave out their samples")

    def _check(self) -> None:
        require_positive("lam", self.lam)
        require_positive("tol", self.tol)
        if self.loss not in LOSSES:
            raise OptionError(f"loss must be one of {', '.join(LOSSES)}, got {self.loss!r}")
        for name in ("max_rounds", "grow", "descent"):
            require_count(name, getattr(self, name))
        if self.max_neurons is not None:
            require_count("max_neurons", self.max_neurons)

    def _store(self, end: _Growth, units: Units) -> None:
        self.weights_, self.outputs_ = (units.factor(x).numpy() for x in end.neurons)
        self.n_neurons_ = len(end.neurons.W)
        self.certificate_ = end.certificate.in_units(units)
        self.direction_ = end.polar.directions[0].numpy()
        values, widths, gaps = zip(*end.rounds, strict=True)
        self.history_ = np.array([raised(value, units.objective) for value in values])
        self.width_history_ = np.asarray(widths)
        self.gap_history_ = np.asarray(gaps)
        self.objective_ = float(self.history_[-1])

    def _assess(
        self,
        data: ReluData,
        neurons: Neurons,
        rounds: list[tuple[float, int, float]],
        generator: torch.Generator,
    ) -> _Growth:
        """Compute the polar and the certificate of a network, and append the record of its round."""
        (X, Y, lam), loss = data, LOSSES[self.loss]
        R = loss.residual(torch.relu(X @ neurons.W.mT) @ neurons.V, Y)
        random = torch.randn(96, X.shape[1], generator=generator, dtype=X.dtype)
        rows = X[torch.randperm(len(X), generator=generator)[:32]]
        polar = polar_of(X, R, self.polar, torch.cat([random, rows, -rows, neurons.W]))
        certificate = judge_relu(X, Y, *neurons, lam, polar, self.tol, loss)
        record = (objective(X, Y, *neurons, lam, loss), len(neurons.W), certificate.relative_gap)
        improvable = polar.lower > lam * (1 + 1e-9)
        return _Growth(neurons, polar, certificate, [*rounds, record], improvable)

    def _finished(self, state: _Growth) -> bool:
        if state.settled:
            return True
        full = self.max_neurons is not None and len(state.neurons.W) >= self.max_neurons
        before = state.rounds[-2][0] if len(state.rounds) > 1 else float("inf")
        # A round without gain would repeat forever. After an inexact polar, and where no neuron is to be added but the
        # descent has not converged, small gains do not justify further rounds.
        least = 1e-12 if state.polar.exact and state.improvable else 0.1 * self.tol
        return (full and state.improvable) or before - state.rounds[-1][0] <= least * abs(before)

    def _round(self, data: ReluData, state: _Growth, generator: torch.Generator) -> _Growth:
        """Append the polar's directions and descend; keep the network with the lowest objective."""
        if state.settled:
            return state
        (X, Y, lam), loss = data, LOSSES[self.loss]
        best = state.neurons
        trial = self._appended(data, state)
        for method in (descend_in_cells, descend):
            if X.shape[1] == 2 and method is descend:
                continue
            trial = merge_neurons(X, method(X, Y, trial, lam, self.descent, loss))
            if objective(X, Y, *trial, lam, loss) < objective(X, Y, *best, lam, loss):
                best = trial
            else:
                trial = best
        return self._assess(data, best, state.rounds, generator)

    def _appended(self, data: ReluData, state: _Growth) -> Neurons:
        r"""Append neurons :math:`\sqrt{s}(w, v)` with :math:`s = (p - \lambda)/(\kappa\|\max(Xw, 0)\|^2)` over their
        number."""
        (X, Y, lam), (W, V), loss = data, state.neurons, LOSSES[self.loss]
        room = self.grow if self.max_neurons is None else min(self.grow, self.max_neurons - len(W))
        chosen = _distinct(state.polar, lam, room)
        hidden = torch.relu(X @ chosen.mT)
        pull = hidden.mT @ loss.residual(torch.relu(X @ W.mT) @ V, Y)
        slope = pull.norm(dim=1)
        size = (slope - lam) / (loss.curvature * hidden.square().sum(0)) / max(len(chosen), 1)
        root = size.clamp_min(0.0).sqrt().unsqueeze(1)
        outgoing = root * pull / slope.unsqueeze(1)
        return prune_and_balance(Neurons(torch.cat([W, root * chosen]), torch.cat([V, outgoing])))


def _distinct(polar: Polar, lam: float, count: int) -> Tensor:
    """The steepest directions with slopes above λ, at most ``count``, without duplicates."""
    kept: list[Tensor] = []
    for direction, value in zip(polar.directions, polar.values, strict=True):
        if len(kept) == count or float(value) <= lam:
            break
        if all(float(direction @ other) < 1 - 1e-6 for other in kept):
            kept.append(direction)
    return torch.stack(kept) if kept else polar.directions[:0]

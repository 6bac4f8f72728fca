"""The rows of one layer, accumulated between the backward pass and the optimizer's step."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...errors import NonFiniteError
from .directions import (
    LayerRows,
    Metric,
    WeightBias,
    added,
    as_multiple,
    direction_of_changed_gradient,
    dual_direction,
    scaled,
    to_working_precision,
)
from .grams import row_gram
from .maps import WeightMap
from .options import CachedGram, ProxPropOptions

__all__ = ["AttachmentState", "Contribution", "GramCache", "RowAccumulator"]


@dataclass
class GramCache:
    """A running mean of Gram matrices per row, and the last metric computed from it.

    ``wide`` is set once float32 was too imprecise for this layer's Gram matrix; later products are then in float64.
    """

    mean: Tensor | None = None
    metric: Metric | None = None
    rows: int = 0
    wide: bool = False

    def mixed(self, gram: Tensor, rows: int, decay: float) -> Tensor:
        """The mean updated by one more Gram matrix. The cache itself changes only when the step is taken."""
        fresh = gram / max(rows, 1)
        return fresh if self.mean is None else decay * self.mean + (1 - decay) * fresh


@dataclass(frozen=True)
class Contribution:
    """One differentiated call of the layer: its prepared input, and the gradient at its output."""

    x: Tensor
    delta: Tensor


@dataclass
class AttachmentState:
    """State that all layers of one attached ProxProp share."""

    options: ProxPropOptions
    # The number of steps taken.
    steps: int = 0
    # Gram matrices can be summed over processes; rows with their gradients cannot.
    distributed: bool = False
    # The layers called in the current forward pass of the model; None outside a forward pass.
    called: set[str] | None = None

    @property
    def fuses(self) -> bool:
        """Whether directions are computed in the backward pass; with several processes they need summed gradients."""
        return self.options.fused and not self.distributed


@dataclass
class RowAccumulator:
    """The rows that contributed to ``.grad`` since the last step or ``zero_grad``.

    While there are fewer rows than columns, the rows and their output gradients are stored, for the dual form;
    otherwise their Gram matrix is summed. In fused mode the plain gradient is stored too, unless the rows give it.
    """

    map: WeightMap
    shared: AttachmentState
    cache: GramCache
    trains_weight: bool
    ones: bool
    rows: LayerRows | None = None
    gram: Tensor | None = None
    count: int = 0
    # In fused mode .grad holds the direction; ``plain`` is the gradient behind it if ``rows`` is None.
    fused: bool = False
    plain: Tensor | None = None
    # Whether something other than the rows contributed to .grad, such as a penalty on the weight.
    foreign: bool = False
    _metric: Metric | None = None
    _mean: Tensor | None = None
    # Sums of inputs that are not stored otherwise; a sum is not finite if an entry is not.
    _input_sums: list[Tensor] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether no row contributed."""
        return self.count == 0

    @property
    def width(self) -> int:
        """The number of columns of A, including the ones."""
        return self.map.columns * self.trains_weight + self.ones

    def add(self, part: Contribution, at_once: bool = False) -> None:
        """Add the rows of one call. ``at_once`` keeps the factor for a direction that is computed next."""
        self.count += self.map.count(part.x)
        few = self.trains_weight and self.map.groups == 1 and not self.shared.distributed and self.count < self.width
        if few and self.gram is None:
            fresh = LayerRows(
                to_working_precision(self.map.rows(part.x)),
                to_working_precision(self.map.deltas(part.delta)),
                self.ones,
            )
            self.rows = fresh if self.rows is None else self.rows.then(fresh)
            return
        earlier, self.rows = self.rows, None
        if not self.updates():
            self._input_sums.append(part.x.sum())
            return
        metric = self._sum(part, earlier)
        if not self._is_accurate(metric):
            self.cache.wide = True
            metric = self._sum(part, earlier)
        self.gram, self._metric = metric.gram, metric if at_once else None

    def _sum(self, part: Contribution, earlier: LayerRows | None) -> Metric:
        """The metric of all rows so far."""
        wide, before = self.cache.wide, self.gram
        grams = [self._gram(part.x, wide)]
        grams += [] if before is None else [before]
        grams += [] if earlier is None else [row_gram(earlier.a, self.ones, wide)[None]]
        total = sum(grams[1:], grams[0])
        keep = wide or (before is not None and before.dtype == torch.float64)
        dtype = torch.float64 if keep or part.x.dtype == torch.float64 else torch.float32
        return Metric(total.to(dtype), self.shared.options.shift)

    def _is_accurate(self, metric: Metric) -> bool:
        """Whether the Gram matrix is precise enough; conjugate gradients need less precision."""
        if metric.gram.dtype == torch.float64 or self.shared.options.method == "cg" or not self.trains_weight:
            return True
        try:
            return metric.accurate
        except NonFiniteError:
            return True

    def updates(self) -> bool:
        """Whether the rule needs a new Gram matrix at this step."""
        rule = self._caches()
        return rule is None or self.shared.steps % rule.every == 0 or self.cache.mean is None

    def _caches(self) -> CachedGram | None:
        rule = self.shared.options.gram
        return rule if isinstance(rule, CachedGram) and self.trains_weight and self.map.convolves else None

    def _gram(self, x: Tensor, wide: bool) -> Tensor:
        if self.trains_weight:
            return self.map.gram(to_working_precision(x), self.ones, self.shared.options.gram, self.shared.steps, wide)
        return to_working_precision(x).new_full((self.map.groups, 1, 1), float(self.map.count(x)))

    def _step_metric(self) -> Metric:
        """The metric of this step: of its rows, or from the cache."""
        rule, shift = self._caches(), self.shared.options.shift
        if rule is None:
            assert self.gram is not None
            known = self._metric is not None and self._metric.gram is self.gram and self._metric.shift == shift
            return self._metric if known and self._metric is not None else Metric(self.gram, shift)
        if self.gram is not None:
            self._mean = self.cache.mixed(self.gram, self.count, rule.decay)
        elif self.cache.metric is not None and self.cache.rows == self.count and self.cache.metric.shift == shift:
            self._mean, self._metric = self.cache.mean, self.cache.metric
            return self._metric
        else:
            self._mean = self.cache.mean
        assert self._mean is not None
        self._metric = Metric(self._mean * self.count, shift)
        return self._metric

    def commit(self) -> None:
        """Store the new average in the cache after the step was taken."""
        if self._mean is not None:
            self.cache.mean, self.cache.metric, self.cache.rows = self._mean, self._metric, self.count

    def direction(self, received: WeightBias, changed: bool) -> WeightBias:
        """The direction of the gradient that the optimizer receives; ``changed`` if it was edited after backward."""
        options = self.shared.options
        if self.rows is not None:
            if not changed:
                # The plain gradient is no longer needed, so the direction overwrites it.
                return dual_direction(self.rows, options, received.weight)
            return direction_of_changed_gradient(self.rows, received, options)
        return self.split(self._step_metric().direction(self.join(received), options))

    def fuse(self, gradient: WeightBias) -> WeightBias:
        """Compute the direction in the backward pass. ``gradient`` is ignored if the rows determine it."""
        self.fused = True
        if self.rows is not None:
            return dual_direction(self.rows, self.shared.options)
        self.plain = to_working_precision(self.join(gradient))
        made = self._step_metric().direction(self.plain, self.shared.options)
        if self._caches() is None:
            # The factor is no longer needed; the Gram matrix stays for a possible second backward pass.
            self._metric = None
        return self.split(made)

    def nan_direction(self) -> WeightBias:
        """A direction of NaN, for which the step will be skipped."""
        made = self.restore_gradient(None)
        return WeightBias(*(None if g is None else torch.full_like(g, torch.nan) for g in made))

    def restore_gradient(self, held: WeightBias | None) -> WeightBias:
        """The plain gradient behind the direction; ``held`` is the direction in ``.grad`` if it was changed since."""
        plain = self.rows.gradient() if self.rows is not None else self.split(self._plain())
        if held is None:
            return plain
        made = self._recompute_direction()
        scale, rest = as_multiple(held, made)
        if rest is None:
            return scaled(plain, scale)
        return added(plain, self._gradient_of(added(held, scaled(made, -torch.ones_like(scale)))))

    def _recompute_direction(self) -> WeightBias:
        """Compute the direction that was written to ``.grad`` again."""
        options = self.shared.options
        if self.rows is not None:
            return dual_direction(self.rows, options)
        return self.split(self._step_metric().direction(self._plain(), options))

    def _gradient_of(self, held: WeightBias) -> WeightBias:
        """The gradient whose exact direction is ``held``."""
        if self.rows is None:
            return self.split(self._step_metric().gradient(self.join(held)))
        return added(self.rows.adjoint(self.rows.apply(held)), scaled(held, torch.tensor(self.shared.options.shift)))

    def has_nonfinite_input(self) -> bool:
        """Whether an input holds NaN or Inf."""
        held = [t for t in (None if self.rows is None else self.rows.a, self.gram, *self._input_sums) if t is not None]
        return not all(bool(torch.isfinite(t).all()) for t in held)

    def _plain(self) -> Tensor:
        assert self.plain is not None
        return self.plain

    def join(self, pair: WeightBias) -> Tensor:
        """Weight and bias in one tensor, groups × outputs × columns."""
        parts = []
        if pair.weight is not None:
            parts.append(pair.weight.reshape(self.map.groups, -1, self.map.columns))
        if pair.bias is not None:
            parts.append(pair.bias.reshape(self.map.groups, -1, 1))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def split(self, matrix: Tensor) -> WeightBias:
        """The inverse of :meth:`join`."""
        columns = self.map.columns
        weight = matrix[..., :columns].reshape(-1, columns) if self.trains_weight else None
        return WeightBias(weight, matrix[..., -1].reshape(-1) if self.ones else None)

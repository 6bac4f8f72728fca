"""What one layer remembers between a backward pass and the optimizer's step."""

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
    """A running mean of Gram matrices per row, and the metric that was last made of it.

    ``wide``: float32 had too few digits for this layer's Gram matrix once; from then on its products are float64.
    """

    mean: Tensor | None = None
    metric: Metric | None = None
    rows: int = 0
    wide: bool = False

    def mixed(self, gram: Tensor, rows: int, decay: float) -> Tensor:
        """The mean after one more Gram matrix; the cache itself does not change before the step is taken."""
        fresh = gram / max(rows, 1)
        return fresh if self.mean is None else decay * self.mean + (1 - decay) * fresh


@dataclass(frozen=True)
class Contribution:
    """One differentiated call of the layer: its input, prepared, and the gradient at its output."""

    x: Tensor
    delta: Tensor


@dataclass
class AttachmentState:
    """What all layers of one attachment share."""

    options: ProxPropOptions
    # Steps taken.
    steps: int = 0
    # A Gram matrix can be summed over processes, rows with their gradients cannot.
    distributed: bool = False
    # The layers called in the model's current forward pass; None outside of one.
    called: set[str] | None = None

    @property
    def fuses(self) -> bool:
        """Whether directions are computed in the backward pass; over processes only the summed gradient has one."""
        return self.options.fused and not self.distributed


@dataclass
class RowAccumulator:
    """The rows that contributed to ``.grad`` since the last step or ``zero_grad``.

    Fewer rows than columns are kept with their output gradients, for the dual form; otherwise their Gram matrix is
    summed. It holds the smaller of the two, and in fused mode the plain gradient or what it is made of.
    """

    map: WeightMap
    shared: AttachmentState
    cache: GramCache
    trains_weight: bool
    ones: bool
    rows: LayerRows | None = None
    gram: Tensor | None = None
    count: int = 0
    # In fused mode .grad holds the direction; ``plain`` is the gradient it was made from, where ``rows`` is None.
    fused: bool = False
    plain: Tensor | None = None
    # Whether anything but the rows contributed to .grad: a penalty on the weight, a second derivative.
    foreign: bool = False
    _metric: Metric | None = None
    _mean: Tensor | None = None
    # Sums of inputs of which nothing else is kept: not finite if an entry is not.
    _input_sums: list[Tensor] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether nothing contributed."""
        return self.count == 0

    @property
    def width(self) -> int:
        """The columns of A, the ones included."""
        return self.map.columns * self.trains_weight + self.ones

    def add(self, part: Contribution, at_once: bool = False) -> None:
        """Take in the rows of one call; if a direction is wanted ``at_once`` the factor stays for it."""
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
        """All rows so far."""
        wide, before = self.cache.wide, self.gram
        grams = [self._gram(part.x, wide)]
        grams += [] if before is None else [before]
        grams += [] if earlier is None else [row_gram(earlier.a, self.ones, wide)[None]]
        total = sum(grams[1:], grams[0])
        keep = wide or (before is not None and before.dtype == torch.float64)
        dtype = torch.float64 if keep or part.x.dtype == torch.float64 else torch.float32
        return Metric(total.to(dtype), self.shared.options.shift)

    def _is_accurate(self, metric: Metric) -> bool:
        """Whether the Gram matrix has the digits for a solve; conjugate gradients stop before they need them."""
        if metric.gram.dtype == torch.float64 or self.shared.options.method == "cg" or not self.trains_weight:
            return True
        try:
            return metric.accurate
        except NonFiniteError:
            return True

    def updates(self) -> bool:
        """Whether the rule asks for a Gram matrix at this step."""
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
        """The metric of this step's rows."""
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
        """The step was taken: what was averaged becomes the cache."""
        if self._mean is not None:
            self.cache.mean, self.cache.metric, self.cache.rows = self._mean, self._metric, self.count

    def direction(self, received: WeightBias, changed: bool) -> WeightBias:
        """The direction of the gradient as the optimizer receives it, ``changed`` since the backward pass or not."""
        options = self.shared.options
        if self.rows is not None:
            if not changed:
                # The plain gradient is not needed any more: its memory takes the direction.
                return dual_direction(self.rows, options, received.weight)
            return direction_of_changed_gradient(self.rows, received, options)
        return self.split(self._step_metric().direction(self.join(received), options))

    def fuse(self, gradient: WeightBias) -> WeightBias:
        """The direction at once; ``gradient`` is ignored where the rows give it."""
        self.fused = True
        if self.rows is not None:
            return dual_direction(self.rows, self.shared.options)
        self.plain = to_working_precision(self.join(gradient))
        made = self._step_metric().direction(self.plain, self.shared.options)
        if self._caches() is None:
            # The factor has done its work; the Gram matrix stays, for a second backward pass.
            self._metric = None
        return self.split(made)

    def nan_direction(self) -> WeightBias:
        """A direction that no step should take."""
        made = self.restore_gradient(None)
        return WeightBias(*(None if g is None else torch.full_like(g, torch.nan) for g in made))

    def restore_gradient(self, held: WeightBias | None) -> WeightBias:
        """The plain gradient: as it was, or of a direction that is ``held`` and was changed since."""
        plain = self.rows.gradient() if self.rows is not None else self.split(self._plain())
        if held is None:
            return plain
        made = self._recompute_direction()
        scale, rest = as_multiple(held, made)
        if rest is None:
            return scaled(plain, scale)
        return added(plain, self._gradient_of(added(held, scaled(made, -torch.ones_like(scale)))))

    def _recompute_direction(self) -> WeightBias:
        """The direction that was put into ``.grad``, once more."""
        options = self.shared.options
        if self.rows is not None:
            return dual_direction(self.rows, options)
        return self.split(self._step_metric().direction(self._plain(), options))

    def _gradient_of(self, held: WeightBias) -> WeightBias:
        """What an exact solve makes ``held`` from."""
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
        """Weight and bias side by side, groups × outputs × columns."""
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

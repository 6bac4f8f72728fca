"""The layers under ProxProp: their forward and backward passes, and the rows they accumulate until the step.

A call of a layer runs through an autograd function. Its backward pass records the layer's input and the output's
gradient. They count only once ``.grad`` was accumulated. So a ``torch.autograd.grad`` with respect to other tensors, or
a forward pass that is never differentiated, adds no rows.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import CapabilityError, NonFiniteError, require_fitting
from .directions import LayerRows, Metric, fingerprint
from .grams import WeightMap, row_gram
from .options import CachedGram, ProxPropOptions

__all__ = ["Attachment", "Forward", "GramCache", "LayerHooks"]


@dataclass
class Attachment:
    """State that all layers of one ProxProp share."""

    options: ProxPropOptions
    steps: int = 0
    optimizer: Optimizer | None = None
    # Whether Gram matrices are summed over several processes.
    distributed: bool = False

    def options_of(self, parameter: Tensor) -> ProxPropOptions:
        """The options for a parameter; the ``tau_theta`` of its parameter group wins."""
        for group in () if self.optimizer is None else self.optimizer.param_groups:
            if "tau_theta" in group and any(p is parameter for p in group["params"]):
                return replace(self.options, tau_theta=group["tau_theta"])
        return self.options


@dataclass
class GramCache:
    """A running mean of Gram matrices per row, the last metric computed from it, and the rows of that metric.

    ``wide`` is set once float32 was too imprecise for this layer's Gram matrix; later products are then in float64.
    """

    mean: Tensor | None = None
    metric: Metric | None = None
    rows: int = 0
    wide: bool = False


def _working(tensor: Tensor) -> Tensor:
    """The tensor in float32 or float64."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


@dataclass
class RowAccumulator:
    """The rows that contributed to ``.grad`` since the last step or ``zero_grad``.

    While there are fewer rows than columns, the rows and their output gradients are stored, for the dual form;
    otherwise their Gram matrix is summed.
    """

    map: WeightMap
    shared: Attachment
    cache: GramCache
    trains_weight: bool
    ones: bool
    rows: LayerRows | None = None
    gram: Tensor | None = None
    count: int = 0
    # The sum of all inputs, which is not finite if one of them is not.
    inputs: Tensor | float = 0.0
    # In fused mode the metric of the only call; the mean and the metric for the cache.
    metric: Metric | None = None
    renewed: tuple[Tensor, Metric] | None = None

    def __post_init__(self) -> None:
        self.width = self.map.columns * self.trains_weight + self.ones
        rule = self.shared.options.rule
        self._rule = rule if isinstance(rule, CachedGram) and self.trains_weight and self.map.geometry else None

    def stores(self, count: int) -> bool:
        """Whether with ``count`` more rows there are fewer than columns, so that they are stored."""
        many = self.gram is not None or self.map.groups > 1 or self.shared.distributed
        return self.trains_weight and not many and 0 < self.count + count < self.width

    def updates(self) -> bool:
        """Whether the rule needs a new Gram matrix at this step."""
        return self._rule is None or self.shared.steps % self._rule.every == 0 or self.cache.mean is None

    def add(self, x: Tensor, delta: Tensor, mark: Tensor | None, options: ProxPropOptions) -> None:
        """Add the rows of one call; ``mark`` is the fingerprint of their gradient."""
        count = delta.numel() // self.map.outputs
        if count == 0:
            return
        stores, earlier, self.rows = self.stores(count), self.rows, None
        self.count, self.inputs = self.count + count, self.inputs + x.sum(dtype=torch.float64)
        if stores:
            a = _working(self.map.rows(x))
            a = torch.cat([a, a.new_ones(count, 1)], 1) if self.ones else a
            rows = LayerRows(a, _working(self.map.deltas(delta)), mark)
            self.rows = rows if earlier is None else earlier.then(rows)
        elif self.updates():
            self.metric = self._sum(x, count, earlier, options)
            if options.method != "cg" and self.trains_weight and not self.metric.accurate:
                self.cache.wide = True
                self.metric = self._sum(x, count, earlier, options)
            self.gram = self.metric.gram

    def _sum(self, x: Tensor, count: int, earlier: LayerRows | None, options: ProxPropOptions) -> Metric:
        """The metric of all rows so far."""
        x, wide = _working(x), self.cache.wide
        if self.trains_weight:
            total = self.map.gram(x, self.ones, options.rule, self.shared.steps, wide)
        else:
            total = x.new_full((self.map.groups, 1, 1), float(count))
        total = total if earlier is None else total + row_gram(earlier.a, False, wide)
        double = wide or torch.float64 in (x.dtype, None if self.gram is None else self.gram.dtype)
        total = total if self.gram is None else total + self.gram
        return Metric(total.to(torch.float64 if double else torch.float32), options.shift)

    def _step_metric(self, options: ProxPropOptions) -> Metric:
        """The metric of this step: of its rows, or from the cache."""
        rule, cache, metric = self._rule, self.cache, self.metric
        if rule is None:
            assert self.gram is not None
            return metric if metric is not None and metric.shift == options.shift else Metric(self.gram, options.shift)
        metric, mean = cache.metric, cache.mean
        if self.gram is not None:
            fresh = self.gram / max(self.count, 1)
            metric, mean = None, fresh if mean is None else rule.decay * mean + (1 - rule.decay) * fresh
        assert mean is not None
        if metric is None or cache.rows != self.count or metric.shift != options.shift:
            metric = Metric(mean * self.count, options.shift)
        self.renewed = mean, metric
        return metric

    def commit(self) -> None:
        """Store the new mean in the cache after the step was taken."""
        if self.renewed is not None:
            (self.cache.mean, self.cache.metric), self.cache.rows = self.renewed, self.count

    def direction(self, gradient: Tensor | None, options: ProxPropOptions) -> Tensor:
        """The direction of a gradient, outputs × width. Stored rows need no gradient if nobody edited it."""
        if self.rows is not None:
            return self.rows.direction(options) if gradient is None else self.rows.direction_of(gradient, options)
        assert gradient is not None
        grouped = gradient.unflatten(0, (self.map.groups, -1))
        return self._step_metric(options).direction(grouped, options).flatten(0, 1)

    def reduce(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Sum the number of rows and the Gram matrix over the processes. All processes call this in the same order."""
        count = torch.tensor(float(self.count), dtype=torch.float64, device=device)
        dist.all_reduce(count, group=group)
        if self.updates():
            # Processes may differ in whether they needed float64.
            zero = torch.zeros(self.map.groups, self.width, self.width, dtype=torch.float64, device=device)
            self.gram, self.metric = zero if self.gram is None else self.gram.double(), None
            dist.all_reduce(self.gram, group=group)
        self.count = int(count)


class Forward:
    """The layer's forward pass while attached. Copies and pickles of the model have the plain forward pass."""

    def __init__(self, hooks: "LayerHooks") -> None:
        self.hooks = hooks

    # A compiled graph cannot contain the accumulation, which is a side effect: the graph breaks at the layer.
    @torch.compiler.disable
    def __call__(self, input: Tensor) -> Tensor:
        """The layer's output."""
        try:
            return self.hooks.forward(input)
        except (RuntimeError, TypeError) as error:
            module = self.hooks.module
            require_fitting(self.hooks.path or type(module).__name__, input, module.weight, error)
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain_forward, (self.hooks.module,)


def _plain_forward(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(module).forward, module)


class _HookedLayer(torch.autograd.Function):
    """The layer as an autograd function, whose backward pass is :meth:`LayerHooks.backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, hooks: "LayerHooks") -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.hooks = hooks
        return hooks.map.apply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        with ctx.hooks.without_autocast():
            found = ctx.hooks.backward(x, weight, delta, tuple(ctx.needs_input_grad[:3]))
        like = (x.dtype, weight.dtype, weight.dtype)
        return (*(None if g is None else g.to(dtype) for g, dtype in zip(found, like, strict=True)), None)


@dataclass
class _Task:
    """The calls of one layer in one run of the autograd engine, until their gradient is accumulated."""

    calls: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list)
    # In fused mode: the rows of the only call.
    made: RowAccumulator | None = None


class LayerHooks:
    """The hooks of one layer and the rows that they accumulate; ``rows`` is None if none contributed to ``.grad``."""

    def __init__(self, path: str, module: nn.Module, map: WeightMap, shared: Attachment, cache: GramCache) -> None:
        self.path, self.map, self.shared, self.cache = path, map, shared, cache
        self.module: Any = module
        self.called = False
        self._handles: dict[str, tuple[Tensor, Any]] = {}
        self.forget()
        module.forward = Forward(self)

    def remove(self) -> None:
        """Restore the module's forward pass and remove all hooks."""
        del self.module.__dict__["forward"]
        for _, handle in self._handles.values():
            handle.remove()
        self.forget()

    def forget(self) -> None:
        """Discard the accumulated rows."""
        self.rows: RowAccumulator | None = None
        self._tasks: dict[int, _Task] = {}
        self._stamps: list[tuple[int, int]] = []

    def without_autocast(self) -> torch.autocast:
        """A context without autocast, in which products keep their precision."""
        return torch.autocast(self.module.weight.device.type, enabled=False)

    def new_rows(self) -> RowAccumulator:
        """An empty accumulator for the parameters that are trained now."""
        return RowAccumulator(self.map, self.shared, self.cache, "weight" in self.trained, "bias" in self.trained)

    @property
    def trained(self) -> dict[str, Tensor]:
        """The parameters that currently require a gradient."""
        both = {name: getattr(self.module, name) for name in ("weight", "bias")}
        return {name: p for name, p in both.items() if isinstance(p, Tensor) and p.requires_grad}

    @property
    def options(self) -> ProxPropOptions:
        """The options for this layer's parameters."""
        return self.shared.options_of(next(iter(self.trained.values())))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, through the autograd function if a gradient may follow."""
        trained = self.trained
        plain = not torch.is_grad_enabled() or not trained or any(not p.is_leaf for p in trained.values())
        if plain or torch._C._functorch.is_functorch_wrapped_tensor(x):
            out: Tensor = _plain_forward(self.module)(x)
            return out
        self.called = True
        for name, parameter in trained.items():
            # A frozen parameter may be unfrozen, or replaced, after attaching.
            known, handle = self._handles.get(name, (None, None))
            if known is not parameter:
                if handle is not None:
                    handle.remove()
                self._handles[name] = parameter, parameter.register_post_accumulate_grad_hook(self._accumulated)
        prepared = self.map.prepare(x)
        out = _HookedLayer.apply(prepared, self.module.weight, self.module.bias, self)
        return out.squeeze(0) if self.map.geometry is not None and prepared.dim() > x.dim() else out

    def backward(
        self, x: Tensor, weight: Tensor, delta: Tensor, needed: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, ...]:
        """Gradients for input, weight and bias; in fused mode, directions for weight and bias."""
        key = torch._C._current_graph_task_id()
        if key not in self._tasks:
            self.drop_stale()
            self._tasks[key] = _Task()
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(key))
        task, held = self._tasks[key], (x.detach(), delta.detach())
        if not self.shared.options.fused:
            found = self.map.gradients(x, weight, delta, needed)
            few = self.new_rows().stores(delta.numel() // self.map.outputs)
            mark = fingerprint(_working(self._joined(*found[1:]).detach().to(weight.dtype))) if few else None
            task.calls.append((*held, mark))
            return found
        if torch.is_grad_enabled() or task.calls:
            why = "a gradient that is differentiated again" if torch.is_grad_enabled() else "a second call of it"
            raise CapabilityError(f"layer '{self.path}': fused=True does not take {why}; use fused=False")
        task.calls.append((*held, None))
        task.made = self.new_rows()
        few = task.made.stores(delta.numel() // self.map.outputs)
        ahead, *own = self.map.gradients(x, weight, delta, (needed[0], needed[1] and not few, needed[2] and not few))
        task.made.add(*task.calls[0], self.options)
        if task.made.count == 0:
            return ahead, *own
        try:
            made = task.made.direction(None if few else self._joined(*own), self.options)
        except NonFiniteError:
            # The step will be skipped.
            made = weight.new_full((self.map.outputs, task.made.width), torch.nan)
        # Only the sum of the inputs, and the mean for a cached rule, are needed at the step.
        task.made.rows = task.made.gram = task.made.metric = None
        made_of = self._split(made)
        return ahead, made_of.get("weight"), made_of.get("bias")

    def _end(self, key: int) -> None:
        self._tasks.pop(key, None)

    def _joined(self, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The trained ones of weight and bias as outputs × width."""
        parts = [part.reshape(self.map.outputs, -1) for part in (weight, bias) if part is not None]
        return _working(torch.cat(parts, 1) if len(parts) > 1 else parts[0])

    def _split(self, matrix: Tensor) -> dict[str, Tensor]:
        """The inverse of :meth:`_joined`."""
        trained, columns = self.trained, self.map.columns
        parts = {"weight": matrix[:, :columns], "bias": matrix[:, -1]}
        return {name: parts[name].reshape(parameter.shape) for name, parameter in trained.items()}

    def _accumulated(self, parameter: Tensor) -> None:
        """Add the rows, now that their gradient is in ``.grad``."""
        task = self._tasks.get(torch._C._current_graph_task_id())
        if task is None:
            return
        calls, task.calls = task.calls, []
        if calls and task.made is not None:
            if self.rows is not None:
                raise CapabilityError(
                    f"layer '{self.path}': fused=True takes one backward pass per step, and .grad already holds the "
                    f"direction of another; call zero_grad() or step() in between, or use fused=False"
                )
            self.rows = task.made
        elif calls:
            self.rows = self.new_rows() if self.rows is None else self.rows
            with self.without_autocast():
                for call in calls:
                    self.rows.add(*call, self.options)
            # The factor is computed again at the step.
            self.rows.metric = None
        self._stamps = self._seen()

    def _seen(self) -> list[tuple[int, int]]:
        return [(p.grad.data_ptr(), p.grad._version) for p in self.trained.values() if p.grad is not None]

    def drop_stale(self) -> None:
        """Discard the rows if ``.grad`` was removed or zeroed since they contributed to it."""
        grads = [p.grad for p in self.trained.values() if p.grad is not None]
        # A gradient that is zero since its accumulation was not zeroed by anybody.
        if not grads or (self._seen() != self._stamps and not any(bool(grad.any()) for grad in grads)):
            self.rows = None

    def precondition(self) -> None:
        """Replace ``.grad`` by its direction. Raises NonFiniteError."""
        if self.rows is None or self.rows.count == 0 or self.shared.options.fused:
            return
        trained = self.trained
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
        with self.without_autocast():
            made = self._split(self.rows.direction(self._joined(grads.get("weight"), grads.get("bias")), self.options))
        for name, parameter in trained.items():
            if parameter.grad is not None:
                parameter.grad.copy_(made[name])

"""The layers of a model under ProxProp: which they are, and their forward and backward passes.

A call of a Linear or convolution runs through an autograd function whose backward pass records the input and the
output's gradient. Other layers (attention, recurrent, transposed convolutions, a user's own) run unchanged; the
products with their weights are found in the autograd graph. Rows count only once ``.grad`` was accumulated:
``torch.autograd.grad`` with respect to other tensors adds none.
"""

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._trace import is_tracing
from torch.utils._pytree import tree_leaves

from ...errors import CapabilityError, NonFiniteError, require_fitting, require_strided
from ...network.state import is_dtensor
from ...network.uses import Use, uses
from .directions import Attachment, GramCache, RowAccumulator, fingerprint, to_working_precision
from .maps import Candidate, DirectMap, ProductMap, TransposedConvMap
from .options import Tau, require_tau

__all__ = ["GraphHooks", "LayerHooks", "WeightUnit", "local"]


def _plain_forward(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(module).forward, module)


def _wrapped(tensors: list[Tensor]) -> bool:
    """Whether a transform of ``torch.func`` works on one of the tensors, or ``torch.jit`` traces the pass."""
    return is_tracing() or any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


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
        with ctx.hooks.unit.without_autocast():
            found = ctx.hooks.backward(x, weight, delta, tuple(ctx.needs_input_grad[:3]))
        return (*(None if g is None else g.to(t.dtype) for g, t in zip(found, (x, weight, weight), strict=True)), None)


class WeightUnit:
    """One linear system of a ProxProp, with the rows that are in the ``.grad`` of its parameters."""

    def __init__(self, layer: Candidate, shared: Attachment, cache: GramCache) -> None:
        self.path, self.module, names, self.spans, self.map = layer
        self.paths, self.shared, self.cache = [self.path], shared, cache
        self._names = {kind: name for kind, name in zip(("weight", "bias"), names, strict=True) if name is not None}
        parameters = {kind: getattr(self.module, name) for kind, name in self._names.items()}
        # FSDP replaces the parameters during a pass; the optimizer owns those that it found.
        self.sharded = {
            kind: p for kind, p in parameters.items() if p is not None and is_dtensor(p) and p.requires_grad
        }
        self.called, self._handles = False, dict[int, Any]()
        # By parameter: the stamp of a direction that its optimizer has not used yet, and of one that it has.
        self.unused: dict[int, tuple[int, int]] = {}
        self.used: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()  # the backward passes of several threads add to the same rows
        self.forget()

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles.values():
            handle.remove()
        self.forget()

    def forget(self) -> None:
        """Discard the accumulated rows."""
        self.rows: RowAccumulator | None = None
        self.spoiled = ""  # why .grad is no gradient
        # By run of the autograd engine: the calls whose gradient is not yet accumulated.
        self._pending: dict[int, list[Any]] = {}
        self._stamps: dict[int, tuple[int, int]] = {}

    def without_autocast(self) -> torch.autocast:
        """A context without autocast, in which products keep their precision."""
        return torch.autocast(self.module._parameters[self._names["weight"]].device.type, enabled=False)

    def new_rows(self) -> RowAccumulator:
        """An empty accumulator for the parameters that are trained now."""
        assert self.map is not None
        return RowAccumulator(self.map, self.shared, self.cache, self.trained)

    @property
    def trained(self) -> dict[str, Tensor]:
        """The parameters that currently require a gradient."""
        own, found = self.module._parameters, {}
        for kind, name in self._names.items():
            if name not in own and getattr(self.module, name, None) is not None:
                why = f"its {name} is not a parameter any more (pruned or parametrised); detach, then attach again"
                raise CapabilityError(f"layer '{self.path}': {why}")
            if own.get(name) is not None and own[name].requires_grad:
                found[kind] = own[name]
        return found

    @property
    def held(self) -> dict[str, Tensor]:
        """The trained parameters as the optimizer owns them."""
        return self.sharded or self.trained

    @property
    def is_last(self) -> bool:
        """Whether the layer keeps plain gradients because the first pass called it last."""
        return self.path == self.shared.last

    @property
    def tau(self) -> Tau:
        """The τθ of this layer; that of its parameter group wins."""
        mine = next(iter(self.held.values()))
        groups = [group for optimizer in self.shared.optimizers for group in optimizer.param_groups]
        own = [g["tau_theta"] for g in groups if "tau_theta" in g and any(p is mine for p in g["params"])]
        tau: Tau = own[0] if own else self.shared.tau.of(self.path)
        require_tau(f"layer '{self.path}': tau_theta as set by its scheduler", tau)
        return tau

    def watch(self) -> None:
        """Register hooks for the accumulation of gradients; a parameter may be unfrozen or replaced after attaching."""
        for parameter in (p for p in self.trained.values() if id(p) not in self._handles):
            self._handles[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._accumulated)

    def pending(self) -> list[Any]:
        """The calls of the present backward pass; rows of gradients that are gone are dropped at its begin."""
        if torch.is_inference_mode_enabled():
            why = "where torch does not record changes of .grad; leave torch.inference_mode()"
            raise CapabilityError(f"layer '{self.path}': the backward pass runs in inference mode, {why}")
        run = torch._C._current_graph_task_id()
        if run not in self._pending:
            with self._lock:
                self.drop_stale()
                self._note_direction()
            self._pending[run] = []
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._pending.pop(run, None))  # type: ignore[arg-type]
        return self._pending[run]

    def _note_direction(self) -> None:
        """Note if ``.grad`` holds a direction to which this pass adds; in fused mode, raise if it holds anything."""
        now = self.stamps()
        left, old = (any(now.get(key) == at for key, at in some.items()) for some in (self.unused, self.used))
        self.unused, self.used = {}, {}
        if (left or old) and self.filled():  # .grad.data.zero_() leaves no trace
            why = "another optimizer has used a part of its direction; step all of them, or call zero_grad()"
            why = why if left else ".grad holds the direction of the last step; call zero_grad() after it"
            self.spoiled = f"a backward pass adds a gradient to a direction: {why}"
        if self.shared.options.fused:
            self.require_gradient()
            if self.rows is None and self.filled():
                why = ".grad holds a gradient from before; call zero_grad(), or use fused=False"
                raise CapabilityError(f"layer '{self.path}': fused=True takes one backward pass per step: {why}")

    def require_gradient(self) -> None:
        """Raise if ``.grad`` is the sum of a direction and a gradient."""
        if self.spoiled:
            raise CapabilityError(f"layer '{self.path}': {self.spoiled}")

    def filled(self) -> bool:
        """Whether ``.grad`` is not zero."""
        return any(bool(local(p.grad).any()) for p in self.held.values() if p.grad is not None)

    def _accumulated(self, parameter: Tensor) -> None:
        """Add the rows, now that their gradient is in ``.grad``."""
        run = torch._C._current_graph_task_id()
        with self._lock:
            self._add(run, self._pending.get(run, []))

    def _add(self, run: int, calls: list[Any]) -> None:
        if calls and isinstance(calls[0], RowAccumulator):
            if self.rows is not None:
                why = ".grad already holds a direction; call zero_grad() or step() in between, or use fused=False"
                raise CapabilityError(f"layer '{self.path}': fused=True takes one backward pass per step: {why}")
            self.rows = calls[0]
        elif calls:
            self.rows = self.rows or self.new_rows()
            with self.without_autocast():
                for x, delta, mark in self._stacked(calls):
                    self.rows.add(x, delta, mark, self.tau)
        calls.clear()
        if run in self._pending:
            self._stamps = self.stamps()

    def _stacked(self, calls: list[Any]) -> list[Any]:
        """The calls; those of a recurrent layer, one per time step, as one."""
        several = len(calls) > 1 and isinstance(self.map, ProductMap)
        return [(torch.cat([x for x, _, _ in calls]), torch.cat([d for _, d, _ in calls]), None)] if several else calls

    def stamps(self) -> dict[int, tuple[int, int]]:
        """By parameter: memory and version of its gradient."""
        return {id(p): (local(p.grad).data_ptr(), p.grad._version) for p in self.held.values() if p.grad is not None}

    def drop_stale(self) -> None:
        """Discard the rows if ``.grad`` was removed or zeroed since they contributed to it."""
        # A gradient that was zero when it was accumulated has rows. A shard may be zero while others are not.
        now = self.stamps()
        if not now or (not self.sharded and now != self._stamps and not self.filled()):
            self.rows, self.spoiled = None, ""

    def matrices(self, *parts: Tensor | None) -> list[Tensor]:
        """The parts of weight and bias that are trained, as outputs × columns."""
        assert self.map is not None
        return [to_working_precision(self.map.matrix(part)) for part in parts if part is not None]

    def precondition(self) -> None:
        """Replace ``.grad`` by its direction, which in fused mode it must hold already. Raises NonFiniteError."""
        if self.shared.options.fused:
            if self.stamps() != self._stamps:
                why = "something changed .grad after the backward pass, such as clipping or unscaling; use fused=False"
                raise CapabilityError(f"layer '{self.path}': fused=True takes .grad as the direction: {why}")
            return
        held, rows = self.held, self.rows
        spans = {kind: slice(*(self.spans[kind == "bias"] or (None,))) for kind in held}
        grads = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in held.items()}
        parts = {kind: local(grad)[spans[kind]] for kind, grad in grads.items()}
        assert rows is not None
        if not next(iter(parts.values())).numel():  # an empty shard
            return
        with self.without_autocast():
            made = rows.direction(self.matrices(*parts.values()), self.tau)
        for (kind, part), matrix in zip(parts.items(), made, strict=True):
            if held[kind].grad is not None and matrix.data_ptr() != part.data_ptr():
                part.copy_(rows.map.shaped(matrix, part))
        self.unused = self.stamps()


def local(grad: Tensor) -> Tensor:
    """The part of a gradient on this process, which shares its memory."""
    part: Any = grad
    return part.to_local() if is_dtensor(grad) else grad


class _Forward:
    """The forward pass of an attached module. Copies of the model have the plain pass."""

    of_proxprop = True

    def __init__(self, path: str, module: nn.Module, shared: Attachment) -> None:
        self.path, self.shared = path, shared
        self.module: Any = module
        object.__setattr__(module, "forward", self)

    def remove(self) -> None:
        """Restore the module's forward pass."""
        del self.module.__dict__["forward"]

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain_forward, (self.module,)


class LayerHooks(_Forward):
    """The forward pass of an attached Linear or convolution."""

    def __init__(self, path: str, module: nn.Module, unit: WeightUnit) -> None:
        assert isinstance(unit.map, DirectMap)
        super().__init__(path, module, unit.shared)
        self.unit, self.map = unit, unit.map

    # A compiled graph cannot contain the accumulation, which is a side effect: the graph breaks at the layer.
    @torch.compiler.disable
    def __call__(self, input: Tensor) -> Tensor:
        """The layer's output, through the autograd function if a gradient may follow."""
        unit, module = self.unit, self.module
        trained = list(unit.trained.values())
        plain = not torch.is_grad_enabled() or not trained or not all(p.is_leaf for p in trained) or unit.is_last
        try:
            if plain or _wrapped([input, *trained]):
                out: Tensor = _plain_forward(module)(input)
                return out
            unit.called, self.shared.latest = True, self.path
            unit.watch()
            require_strided(f"the input of layer '{self.path}'", input)
            x = self.map.prepare(input)
            out = _HookedLayer.apply(x, module.weight, module.bias, self)
            return out.squeeze(0) if self.map.geometry is not None and x.dim() > input.dim() else out
        except (RuntimeError, TypeError) as error:
            if isinstance(input, Tensor) and input.is_inference() and not torch.is_inference_mode_enabled():
                why = "was made in inference mode, so that no gradient can pass it; clone it"
                raise CapabilityError(f"the input of layer '{self.path}' {why}") from error
            require_fitting(self.path or type(module).__name__, input, module.weight, error)
            raise

    def backward(
        self, x: Tensor, weight: Tensor, delta: Tensor, needed: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, ...]:
        """Gradients for input, weight and bias; in fused mode, directions for weight and bias."""
        unit, shared = self.unit, self.shared
        if shared.undecided:
            shared.undecided, shared.last = False, shared.latest
        if unit.is_last:
            return self.map.gradients(x, weight, delta, needed)
        pending, rows = unit.pending(), unit.new_rows()
        few, call = rows.stores(self.map.count(delta)), (x.detach(), delta.detach())
        if not shared.options.fused or not shared.optimizers:
            found = self.map.gradients(x, weight, delta, needed)
            given = [None if g is None else g.detach().to(weight.dtype) for g in found[1:]]
            pending.append((*call, fingerprint(unit.matrices(*given)) if few else None))
            return found
        if torch.is_grad_enabled() or pending:
            why = "a second call of it" if pending else "a gradient that is differentiated again"
            raise CapabilityError(f"layer '{self.path}': fused=True does not take {why}; use fused=False")
        pending.append(rows)
        ahead, *own = self.map.gradients(x, weight, delta, (needed[0], False, False) if few else needed)
        rows.add(x.detach(), delta.detach(), None, unit.tau)
        if rows.count == 0:
            return ahead, *own
        try:
            made = rows.direction(None if few else unit.matrices(*own), unit.tau)
        except NonFiniteError:
            made = [weight.new_full((self.map.outputs, size), torch.nan) for size in rows.sizes]
        rows.a = rows.delta = rows.gram = rows.metric = None
        parts = {n: self.map.shaped(m, p) for (n, p), m in zip(unit.trained.items(), made, strict=True)}
        return ahead, parts.get("weight"), parts.get("bias")


class GraphHooks(_Forward):
    """The forward pass of an attached module whose products are in the autograd graph; ``strict``: or an error."""

    def __init__(self, path: str, module: nn.Module, units: list[WeightUnit], strict: bool) -> None:
        super().__init__(path, module, units[0].shared)
        self.units, self._strict, self.opaque = units, strict, ""

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, unchanged; the products with its weights are watched if a gradient may follow."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        units = [unit for unit in self.units if unit.trained and not unit.is_last]
        wrapped = _wrapped([*inputs, *(p for unit in units for p in unit.trained.values())])
        if not torch.is_grad_enabled() or not units or wrapped or self.opaque:
            return _plain_forward(self.module)(*args, **kwargs)
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            why = "activation checkpoints without reentry and other saved-tensor hooks hide its products from ProxProp"
            raise CapabilityError(f"layer '{self.path}': {why}; pass use_reentrant=True, or exclude the layer")
        # An LSTM runs as single operations: oneDNN's fused one hides its products.
        fused = isinstance(self.module, nn.LSTM)
        with torch.backends.mkldnn.flags(False, None, None, None) if fused else contextlib.nullcontext():
            out = _plain_forward(self.module)(*args, **kwargs)
        found = list(uses([leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)], inputs))
        watched = [(unit, use) for unit in units for use in _of(unit, found)]
        hidden = [use for _, use in watched if use.kind not in ("product", "convolution")]
        if hidden:
            self.opaque = f"{hidden[0].kind.removesuffix('Backward0')} is no product of rows and a weight"
            if self._strict:
                raise CapabilityError(f"layer '{self.path}': {self.opaque}; leave its class out of maps")
            return out
        self.shared.latest = self.units[-1].path
        for unit, use in watched:
            unit.called = True
            if unit.map is None:
                weight = unit.trained["weight"]
                rows = weight.shape[0] if unit.spans[0] is None else unit.spans[0][1] - unit.spans[0][0]
                unit.map = ProductMap((rows, *weight.shape[1:]), use.transposed)
            unit.watch()
            use.node.register_prehook(_recording(unit, use, self.shared))
        return out


def _of(unit: WeightUnit, found: list[Use]) -> Iterator[Use]:
    """The uses of a unit's weight."""
    weight = unit.trained.get("weight")
    for use in (use for use in found if use.parameter is weight):
        low, high = unit.spans[0] or (0, len(use.parameter))
        if use.start < high and low < use.stop:
            yield use if use.start <= low and high <= use.stop else use._replace(kind="a part of the weight")


def _recording(unit: WeightUnit, use: Use, shared: Attachment) -> Callable[[Any], None]:
    """A hook that runs before the backward pass of a product and records its rows."""

    def record(deltas: Any) -> None:
        if shared.undecided:
            shared.undecided, shared.last = False, shared.latest
        delta, map = deltas[0], unit.map
        if delta is None or unit.is_last or not shared.optimizers:
            return
        x, delta = use.saved().detach(), use.by_rows(delta)
        if isinstance(map, TransposedConvMap):
            x = map.spread(x, tuple(delta.shape[2:]))
        elif unit.spans[0] is not None:
            delta = delta[:, unit.spans[0][0] - use.start : unit.spans[0][1] - use.start]
        unit.pending().append((x, delta.detach(), None))

    return record

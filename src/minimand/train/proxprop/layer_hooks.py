"""The hooks of one layer under ProxProp: its forward pass, its backward pass, and its accumulated rows.

A call of the layer runs through an autograd function. In the backward pass this function passes on the layer's input
and the output's gradient. They are added to the accumulated rows only after ``.grad`` was accumulated. So a
``torch.autograd.grad`` with respect to other tensors, or a forward pass that is never differentiated, adds no rows.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import CapabilityError, NonFiniteError, require_fitting
from .accumulator import AttachmentState, Contribution, GramCache, RowAccumulator
from .directions import WeightBias, to_working_precision
from .maps import WeightMap

__all__ = ["Forward", "LayerHooks"]

_NAMES = ("weight", "bias")


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

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return _plain_forward(memo.get(id(self.hooks.module), self.hooks.module))

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain_forward, (self.hooks.module,)


def _plain_forward(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(module).forward, module)


@dataclass
class _Task:
    """The state of one layer during one run of the autograd engine."""

    calls: int = 0
    parts: list[Contribution] = field(default_factory=list)
    # In fused mode: the rows of the single call.
    draft: RowAccumulator | None = None
    # The gradient returned to the engine for each parameter; None once it is known to be the only contribution.
    given: dict[str, Tensor | None] = field(default_factory=dict)
    accumulated: set[str] = field(default_factory=set)
    foreign: bool = False
    plain: dict[str, Tensor | None] | None = None


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
        needed = tuple(ctx.needs_input_grad[:3])
        with ctx.hooks.without_autocast():
            return (*ctx.hooks.backward(x, weight, delta, needed), None)


class LayerHooks:
    """The hooks of one layer and the rows that they accumulate."""

    def __init__(self, path: str, module: nn.Module, map: WeightMap, shared: AttachmentState, cache: GramCache) -> None:
        self.path, self.map, self.shared, self.cache = path, map, shared, cache
        self.module: Any = module
        self.accumulator = self._blank()
        self.called = False
        self._tasks: dict[int, _Task] = {}
        self._stamps: dict[str, tuple[int, int]] = {}
        self._norms: dict[str, Tensor] = {}
        self._handles: dict[str, tuple[Tensor, list[Any]]] = {}
        module.forward = Forward(self)

    def remove(self) -> None:
        """Restore the module's forward pass and the plain gradients, and remove all hooks."""
        if self.accumulator.fused and self.refresh():
            with self.without_autocast():
                self._restore_gradient()
        del self.module.__dict__["forward"]
        for _, handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self.forget()

    def forget(self) -> None:
        """Discard the accumulated rows."""
        self.accumulator = self._blank()
        self._tasks.clear()
        self._stamps.clear()

    def without_autocast(self) -> torch.autocast:
        """A context without autocast, in which products keep their precision."""
        return torch.autocast(self.module.weight.device.type, enabled=False)

    def _blank(self) -> RowAccumulator:
        trained = self.trained
        return RowAccumulator(self.map, self.shared, self.cache, "weight" in trained, "bias" in trained)

    @property
    def trained(self) -> dict[str, Tensor]:
        """The parameters that currently require a gradient."""
        both = {name: getattr(self.module, name) for name in _NAMES}
        return {name: p for name, p in both.items() if isinstance(p, Tensor) and p.requires_grad}

    def grads(self) -> WeightBias:
        """The present gradients, the weight's as a matrix; None for a missing gradient."""
        found = {name: p.grad for name, p in self.trained.items()}
        weight, bias = found.get("weight"), found.get("bias")
        return WeightBias(
            None if weight is None else to_working_precision(weight).reshape(self.map.outputs, -1),
            None if bias is None else to_working_precision(bias),
        )

    # --- forward ------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, through the autograd function if a gradient may follow."""
        trained = self.trained
        plain = not torch.is_grad_enabled() or not trained or any(not p.is_leaf for p in trained.values())
        if plain or torch._C._functorch.is_functorch_wrapped_tensor(x):
            out: Tensor = _plain_forward(self.module)(x)
            return out
        self.called = True
        self._once_a_pass()
        for name, parameter in trained.items():
            self._watch(name, parameter)
        if all(p.grad is None for p in trained.values()) and not self.accumulator.empty:
            self.accumulator = self._blank()
        prepared = self.map.prepare(x)
        out = _HookedLayer.apply(prepared, self.module.weight, self.module.bias, self)
        return out.squeeze(0) if self.map.convolves and prepared.dim() > x.dim() else out

    def _once_a_pass(self) -> None:
        if self.shared.called is None:
            return
        if self.path in self.shared.called:
            raise CapabilityError(
                f"layer '{self.path}' is called twice in one forward pass, but a proximal step is defined only for a "
                f"layer that is called once; pass ProxProp a submodule without it"
            )
        self.shared.called.add(self.path)

    def _watch(self, name: str, parameter: Tensor) -> None:
        """Register hooks on the parameter when it first requires a gradient; a frozen one may be unfrozen later."""
        known, handles = self._handles.get(name, (None, []))
        if known is parameter:
            return
        for handle in handles:
            handle.remove()
        before = parameter.register_hook(lambda grad: self._arriving(name, grad))
        after = parameter.register_post_accumulate_grad_hook(lambda _: self._accumulated(name))
        self._handles[name] = (parameter, [before, after])

    def _hooked(self) -> bool:
        """Whether the parameters have other hooks, which may change a gradient before it reaches ``.grad``."""
        mine = {handle.id for _, handles in self._handles.values() for handle in handles}
        found = [hooks for p in self.trained.values() for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)]
        return any(key not in mine for hooks in found for key in hooks or ())

    # --- backward -----------------------------------------------------------------------------------------------

    def backward(
        self, x: Tensor, weight: Tensor, delta: Tensor, needed: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, ...]:
        """Gradients for input, weight and bias; in fused mode, directions for weight and bias."""
        task = self._task()
        standing = self.refresh()
        if standing and self.accumulator.fused:
            self._restore_gradient()
        # A gradient that will be differentiated stays plain; its direction is computed at the step.
        higher = torch.is_grad_enabled()
        hooked = self._hooked()
        task.foreign |= hooked
        part, rows = Contribution(x.detach(), delta.detach()), self.map.count(x)
        alone = task.calls == 0 and not standing and not hooked
        fuse = self.shared.fuses and not higher and alone and rows > 0 and self._clean()
        task.parts += [part] if rows else []
        task.calls += 1
        if not fuse:
            found = self.map.gradients(x, weight, delta, needed)
            like = (x.dtype, weight.dtype, weight.dtype)
            grads = tuple(None if g is None else g.to(dtype) for g, dtype in zip(found, like, strict=True))
            if task.draft is None:
                task.given = dict(zip(_NAMES, grads[1:], strict=True))
            return grads
        draft = self._blank()
        draft.add(part, at_once=True)
        few = draft.rows is not None
        ahead, gw, gb = self.map.gradients(x, weight, delta, (needed[0], needed[1] and not few, needed[2] and not few))
        try:
            made = draft.fuse(WeightBias(_matrix(gw), gb))
        except NonFiniteError:
            made = draft.nan_direction()
        task.draft = draft
        task.given = {name: value for name, value in self._shaped(made, weight.dtype).items() if value is not None}
        return None if ahead is None else ahead.to(x.dtype), task.given.get("weight"), task.given.get("bias")

    def _task(self) -> _Task:
        """The state of the current run of the engine; discarded when the run ends."""
        key = torch._C._current_graph_task_id()
        if key not in self._tasks:
            self._tasks[key] = _Task()
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(key))
        return self._tasks[key]

    def _end(self, key: int) -> None:
        task = self._tasks.pop(key, None)
        if task is not None and task.accumulated:
            self.accumulator.foreign |= task.foreign

    def _clean(self) -> bool:
        """Whether ``.grad`` is None or zero, so that it can hold a direction."""
        return all(p.grad is None or not bool(p.grad.any()) for p in self.trained.values())

    def _arriving(self, name: str, grad: Tensor) -> Tensor | None:
        """Replace the direction by the plain gradient if anything else is about to be added to ``.grad`` with it."""
        task = self._tasks.get(torch._C._current_graph_task_id())
        if task is None:
            return None
        given = task.given.get(name)
        alone = task.calls == 1 and given is not None and grad.data_ptr() == given.data_ptr()
        if task.draft is None or given is None:
            task.foreign |= not alone
            # Drop the reference: the engine copies a tensor that is referenced elsewhere.
            task.given[name] = None
            return None
        if alone and task.draft.fused:
            task.given[name] = None
            return None
        task.foreign, task.draft.fused = True, False
        if task.plain is None:
            with self.without_autocast():
                task.plain = self._shaped(task.draft.restore_gradient(None), grad.dtype)
        plain = task.plain
        for other, parameter in self.trained.items():
            value = plain[other]
            passed = other in task.accumulated and task.given.get(other) is None
            if passed and parameter.grad is not None and value is not None:
                parameter.grad.copy_(value)
        mine = plain[name]
        assert mine is not None
        return mine + (grad - given)

    def _accumulated(self, name: str) -> None:
        """Add the rows, now that their gradient is in ``.grad``."""
        task = self._tasks.get(torch._C._current_graph_task_id())
        if task is None:
            return
        parts, task.parts = task.parts, []
        if parts and task.draft is not None:
            self.accumulator, parts = task.draft, parts[1:]
        elif parts and self.accumulator.empty:
            self.accumulator = self._blank()
        with self.without_autocast():
            for part in parts:
                self.accumulator.add(part)
        task.accumulated.add(name)
        self.accumulator.foreign |= task.foreign
        self._stamp(name)

    # --- between backward and step ------------------------------------------------------------------------------

    def _seen(self) -> dict[str, tuple[int, int]]:
        return {n: (p.grad.data_ptr(), p.grad._version) for n, p in self.trained.items() if p.grad is not None}

    def _stamp(self, *names: str) -> None:
        """Record version and norm of the accumulated gradients, to detect later changes."""
        for name, seen in self._seen().items():
            if name in names:
                self._stamps[name] = seen
                self._norms[name] = self._norm(name)

    def _norm(self, name: str) -> Tensor:
        """A gradient's norm if changes matter. Unscaling by GradScaler does not change the version, but the norm."""
        grad = self.trained[name].grad
        assert grad is not None
        matters = (self.accumulator.fused or self.accumulator.rows is not None) and not self.accumulator.foreign
        return torch.linalg.vector_norm(grad) if matters else grad.new_zeros(())

    def _changed(self) -> bool:
        """Whether any gradient differs from the one that its rows gave."""
        if self.accumulator.foreign or self._seen() != self._stamps:
            return True
        return not all(bool(self._norm(name) == self._norms[name]) for name in self._stamps)

    def refresh(self) -> bool:
        """Discard the rows if ``.grad`` was zeroed or removed since; return whether rows remain."""
        if self.accumulator.empty:
            return False
        grads = [p.grad for p in self.trained.values() if p.grad is not None]
        zeroed = self._seen() != self._stamps and not any(bool(grad.any()) for grad in grads)
        if not grads or zeroed:
            self.accumulator = self._blank()
        return not self.accumulator.empty

    def _restore_gradient(self) -> None:
        """Put the plain gradient back into ``.grad``; its direction is then computed at the step."""
        changed = self._changed()
        self._write(self.accumulator.restore_gradient(self.grads() if changed else None))
        self.accumulator.fused, self.accumulator.plain, self.accumulator.foreign = False, None, changed
        self._stamp(*_NAMES)

    def _shaped(self, pair: WeightBias, dtype: torch.dtype) -> dict[str, Tensor | None]:
        weight = None if pair.weight is None else pair.weight.reshape(self.module.weight.shape).to(dtype)
        return {"weight": weight, "bias": None if pair.bias is None else pair.bias.to(dtype)}

    def _write(self, pair: WeightBias) -> None:
        shaped = self._shaped(pair, self.module.weight.dtype)
        for name, parameter in self.trained.items():
            value = shaped[name]
            if parameter.grad is not None and value is not None and value.data_ptr() != parameter.grad.data_ptr():
                parameter.grad.copy_(value)

    # --- the step -----------------------------------------------------------------------------------------------

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Sum the number of rows and the Gram matrix over the processes. All processes call this in the same order."""
        like = to_working_precision(self.module.weight.detach())
        count = torch.tensor([float(self.accumulator.count)], dtype=torch.float64, device=like.device)
        dist.all_reduce(count, group=group)
        if self.accumulator.empty:
            self.accumulator = self._blank()
        if self.accumulator.updates():
            gram = self.accumulator.gram
            gram = (
                like.new_zeros(self.map.groups, self.accumulator.width, self.accumulator.width)
                if gram is None
                else gram
            )
            # Processes may differ in whether they needed float64.
            gram = gram.double()
            dist.all_reduce(gram, group=group)
            self.accumulator.gram = gram
        self.accumulator.count = int(count)

    def precondition(self) -> None:
        """Write the direction to ``.grad`` unless it is already there. Raises NonFiniteError."""
        if self.accumulator.fused:
            return
        with self.without_autocast():
            self._write(
                self.accumulator.direction(self.grads(), changed=self.accumulator.rows is not None and self._changed())
            )


def _matrix(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.reshape(len(grad), -1)

"""The layers of a model under ProxProp: which they are, and their forward and backward passes.

A call of a layer runs through an autograd function. Its backward pass records the input and the output's gradient. They
count only once ``.grad`` was accumulated: ``torch.autograd.grad`` with respect to other tensors adds no rows.
"""

import fnmatch
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ...errors import CapabilityError, NonFiniteError, OptionError, require_fitting, require_strided
from ...network import read, role
from ...nn.layers import SolverLayer
from .directions import Attachment, GramCache, RowAccumulator, fingerprint, to_working_precision
from .grams import WeightMap, weight_map
from .options import ProxPropOptions

__all__ = ["CallWatch", "Discovery", "LayerHooks", "discover", "is_trained"]


class Discovery(NamedTuple):
    """The layers to precondition, the last layer if it stays explicit, and the layers that the forward pass calls.

    ``called`` is None if no made-up input runs. Then the first pass that is differentiated shows which one of
    ``layers`` and ``others`` is last.
    """

    layers: dict[str, tuple[nn.Module, WeightMap]]
    last: str | None
    called: set[str] | None
    others: dict[str, nn.Module]


def discover(model: nn.Module, options: ProxPropOptions) -> Discovery:
    """The layers to precondition; an error lists all unusable layers.

    A layer whose weight is used by other code than its own forward, such as the output projection of
    ``nn.MultiheadAttention``, keeps plain gradients: its inputs are not seen there.
    """
    maps = {path: (m, known) for path, m in model.named_modules() if (known := weight_map(m)) is not None}
    order, elsewhere = _forward_pass(model, {path: module for path, (module, _) in maps.items()})
    # A parametrisation computes weight or bias from other parameters.
    own = [p for p, (m, _) in maps.items() if p not in elsewhere and {"weight", "bias"} <= m._parameters.keys()]
    given = (["*"] if options.include is None else options.include, options.exclude or [])
    include, exclude = ([some] if isinstance(some, str) else list(some) for some in given)
    unknown = [pattern for pattern in include + exclude if own and not fnmatch.filter(own, pattern)]
    if unknown:
        raise OptionError(f"no layer matches {', '.join(unknown)}; available: {', '.join(map(repr, own))}")
    kept, dropped = ({path for p in some for path in fnmatch.filter(own, p)} for some in (include, exclude))
    last = order[-1] if options.skip_last and order and order[-1] in kept - dropped else None
    found = {path: maps[path] for path in own if path in kept - dropped - {last}}
    problems = [f"layer '{path}' {problem}" for path, (m, _) in found.items() for problem in _problems(model, m)]
    if problems:
        raise CapabilityError("ProxProp cannot take this model: " + "; ".join(problems))
    others = {path: module for path, (module, _) in maps.items() if path not in found}
    if not found or (options.skip_last and not order and len(found) == 1 and not others):
        last = next(iter(found), last)
        why = "there is none" if last is None else f"'{last}' is the only one and skip_last keeps it explicit"
        solvers = [path for path, module in model.named_modules() if isinstance(module, SolverLayer)]
        also = f" (of solver layers, here {', '.join(solvers)}, it takes none)" if solvers else ""
        raise OptionError(f"ProxProp needs an nn.Linear or nn.Conv1d to nn.Conv3d layer in the model, but {why}{also}")
    return Discovery(found, last, set(order) if order else None, others)


def is_trained(module: nn.Module) -> bool:
    """Whether a parameter of the module itself requires a gradient."""
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


def _forward_pass(model: nn.Module, layers: dict[str, nn.Module]) -> tuple[list[str], set[str]]:
    """The layers in the order of their last calls, and those whose weight other modules use as well or instead.

    There is no order if the forward pass cannot be read.
    """
    # Running a layer that another ProxProp has replaced the forward of would count as a pass of that one.
    attached = any(isinstance(module.__dict__.get("forward"), LayerHooks) for module in layers.values())
    network = None if attached else read(model)
    if network is None or not network.complete:
        return [], set()
    calls = [call.path for call in network.live if call.path in layers and role(call) in ("linear", "conv")]
    tied = {name for shared in network.shared() if len(shared.names) > 1 for name in shared.names}
    weights = {f"{path}.weight" if path else "weight": path for path in layers}
    elsewhere = {
        weights[value.name]
        for value in network.values
        if value.source == "parameter" and value.name in weights.keys() - tied
        for call in network.readers(value)
        if network.is_live(call) and layers.get(call.path) is not layers[weights[value.name]]
    }
    return list(dict.fromkeys(reversed(calls)))[::-1], elsewhere


def _problems(model: nn.Module, module: nn.Module) -> list[str]:
    """What keeps a layer from proximal steps: shared or missing parameters, several devices, another forward."""
    problems = []
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    devices = {p.device.type for p in parameters.values()}
    for name, parameter in parameters.items():
        modules = model.named_modules()
        holders = [f"{path}.{n}" for path, m in modules for n, p in m._parameters.items() if p is parameter]
        if len(holders) > 1:
            problems.append(f"shares its {name} ({', '.join(holders)}); give each layer its own parameters")
    if "meta" in devices or any(isinstance(p, UninitializedParameter) for p in parameters.values()):
        problems.append("has no data: it is lazy or on the meta device (initialise it first)")
    elif len(devices) > 1:
        problems.append(f"is spread over the devices {', '.join(sorted(devices))} (move it to one)")
    elif any(p.is_inference() for p in parameters.values()):
        problems.append("was made in inference mode (build it outside of torch.inference_mode())")
    if "forward" in module.__dict__:
        other, own = "is attached to another ProxProp (detach that first)", "has a forward of its own (remove it)"
        problems.append(other if isinstance(module.__dict__["forward"], LayerHooks) else own)
    return problems


def _plain_forward(module: nn.Module) -> Callable[..., Tensor]:
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
        return (*(None if g is None else g.to(t.dtype) for g, t in zip(found, (x, weight, weight), strict=True)), None)


class CallWatch:
    """A forward pre-hook that notes which layer was called last. In copies of the model it does nothing."""

    def __init__(self, shared: Attachment | None = None, path: str = "") -> None:
        self.shared, self.path = shared, path

    def __call__(self, *_: Any) -> None:
        """Note the call, if a gradient may follow."""
        if self.shared is not None and torch.is_grad_enabled():
            self.shared.latest = self.path

    def __reduce__(self) -> tuple[Any, ...]:
        return CallWatch, ()


class LayerHooks:
    """The forward pass of an attached layer, and the rows in its ``.grad``. Copies of the model have the plain pass."""

    def __init__(self, path: str, module: nn.Module, map: WeightMap, shared: Attachment, cache: GramCache) -> None:
        self.path, self.map, self.shared, self.cache = path, map, shared, cache
        self.module: Any = module
        self.called, self._handles = False, dict[int, Any]()
        self._lock = threading.Lock()  # the backward passes of several threads add to the same rows
        self.forget()
        module.forward = self

    def remove(self) -> None:
        """Restore the module's forward pass and remove all hooks."""
        del self.module.__dict__["forward"]
        for handle in self._handles.values():
            handle.remove()
        self.forget()

    def forget(self) -> None:
        """Discard the accumulated rows."""
        self.rows: RowAccumulator | None = None
        # By run of the autograd engine: the calls whose gradient is not yet accumulated.
        self._pending: dict[int, list[Any]] = {}
        self._stamps: list[tuple[int, int]] = []

    def without_autocast(self) -> torch.autocast:
        """A context without autocast, in which products keep their precision."""
        return torch.autocast(self.module.weight.device.type, enabled=False)

    def new_rows(self) -> RowAccumulator:
        """An empty accumulator for the parameters that are trained now."""
        return RowAccumulator(self.map, self.shared, self.cache, self.trained)

    @property
    def trained(self) -> dict[str, Tensor]:
        """The parameters that currently require a gradient."""
        both = {name: getattr(self.module, name) for name in ("weight", "bias")}
        return {name: p for name, p in both.items() if isinstance(p, Tensor) and p.requires_grad}

    @property
    def is_last(self) -> bool:
        """Whether the layer keeps plain gradients because the first pass called it last."""
        return self.path == self.shared.last

    @property
    def options(self) -> ProxPropOptions:
        """The options for this layer; the ``tau_theta`` of its parameter group wins."""
        mine, groups = next(iter(self.trained.values())), self.shared.optimizer.param_groups
        own = [g["tau_theta"] for g in groups if "tau_theta" in g and any(p is mine for p in g["params"])]
        return replace(self.shared.options, tau_theta=own[0]) if own else self.shared.options

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain_forward, (self.module,)

    # A compiled graph cannot contain the accumulation, which is a side effect: the graph breaks at the layer.
    @torch.compiler.disable
    def __call__(self, input: Tensor) -> Tensor:
        """The layer's output, through the autograd function if a gradient may follow."""
        trained, module = self.trained.values(), self.module
        plain = not torch.is_grad_enabled() or not trained or any(not p.is_leaf for p in trained) or self.is_last
        try:
            if plain or torch._C._functorch.is_functorch_wrapped_tensor(input):
                return _plain_forward(module)(input)
            self.called, self.shared.latest = True, self.path
            for parameter in (p for p in trained if id(p) not in self._handles):
                # A parameter may be unfrozen or replaced after attaching.
                self._handles[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._accumulated)
            require_strided(f"the input of layer '{self.path}'", input)
            x = self.map.prepare(input)
            out: Tensor = _HookedLayer.apply(x, module.weight, module.bias, self)
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
        if torch.is_inference_mode_enabled():
            why = "where torch does not record changes of .grad; leave torch.inference_mode()"
            raise CapabilityError(f"layer '{self.path}': the backward pass runs in inference mode, {why}")
        if self.shared.undecided:
            self.shared.undecided, self.shared.last = False, self.shared.latest
        if self.is_last:
            return self.map.gradients(x, weight, delta, needed)
        run = torch._C._current_graph_task_id()
        if run not in self._pending:
            with self._lock:
                self.drop_stale()
            self._pending[run] = []
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._pending.pop(run, None))  # type: ignore[arg-type]
        pending, rows = self._pending[run], self.new_rows()
        few, call = rows.stores(delta.numel() // self.map.outputs), (x.detach(), delta.detach())
        if not self.shared.options.fused or self.shared.optimizer is None:
            found = self.map.gradients(x, weight, delta, needed)
            given = [None if g is None else g.detach().to(weight.dtype) for g in found[1:]]
            pending.append((*call, fingerprint(self._matrices(*given)) if few else None))
            return found
        if torch.is_grad_enabled() or pending:
            why = "a second call of it" if pending else "a gradient that is differentiated again"
            raise CapabilityError(f"layer '{self.path}': fused=True does not take {why}; use fused=False")
        pending.append(rows)
        ahead, *own = self.map.gradients(x, weight, delta, (needed[0], False, False) if few else needed)
        rows.add(x.detach(), delta.detach(), None, self.options)
        if rows.count == 0:
            return ahead, *own
        try:
            made = rows.direction(None if few else self._matrices(*own), self.options)
        except NonFiniteError:
            made = [weight.new_full((self.map.outputs, size), torch.nan) for size in rows.sizes]
        rows.a = rows.delta = rows.gram = rows.metric = None
        parts = {n: m.reshape(p.shape) for (n, p), m in zip(self.trained.items(), made, strict=True)}
        return ahead, parts.get("weight"), parts.get("bias")

    def _matrices(self, *parts: Tensor | None) -> list[Tensor]:
        """The parts of weight and bias that are trained, as outputs × columns."""
        return [to_working_precision(part.reshape(self.map.outputs, -1)) for part in parts if part is not None]

    def _accumulated(self, parameter: Tensor) -> None:
        """Add the rows, now that their gradient is in ``.grad``."""
        with self._lock:
            self._add(torch._C._current_graph_task_id())

    def _add(self, run: int) -> None:
        calls = self._pending.get(run, [])
        if calls and self.shared.options.fused:
            if self.rows is not None:
                why = ".grad already holds a direction; call zero_grad() or step() in between, or use fused=False"
                raise CapabilityError(f"layer '{self.path}': fused=True takes one backward pass per step: {why}")
            self.rows = calls[0]
        elif calls:
            self.rows = self.rows or self.new_rows()
            with self.without_autocast():
                for x, delta, mark in calls:
                    self.rows.add(x, delta, mark, self.options)
            # The factor is computed again at the step.
            self.rows.metric = None
        calls.clear()
        if run in self._pending:
            self._stamps = self._seen()

    def _seen(self) -> list[tuple[int, int]]:
        return [(p.grad.data_ptr(), p.grad._version) for p in self.trained.values() if p.grad is not None]

    def drop_stale(self) -> None:
        """Discard the rows if ``.grad`` was removed or zeroed since they contributed to it."""
        grads = [p.grad for p in self.trained.values() if p.grad is not None]
        # A gradient that was zero when it was accumulated has rows.
        if not grads or (self._seen() != self._stamps and not any(bool(grad.any()) for grad in grads)):
            self.rows = None

    def precondition(self) -> None:
        """Replace ``.grad`` by its direction. Raises NonFiniteError."""
        trained = self.trained.values()
        grads = self._matrices(*(torch.zeros_like(p) if p.grad is None else p.grad for p in trained))
        assert self.rows is not None
        with self.without_autocast():
            made = self.rows.direction(grads, self.options)
        for parameter, part in zip(trained, made, strict=True):
            if parameter.grad is not None and part.data_ptr() != parameter.grad.data_ptr():
                parameter.grad.copy_(part.reshape(parameter.shape))

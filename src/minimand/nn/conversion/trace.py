"""The calls of a network in order, and the module whose ``forward`` makes each call.

Networks are traced with :mod:`torch.fx`, in training and in evaluation. A module whose forward cannot be traced,
for example because it branches on data, becomes a single opaque call, and its children are traced separately.
"""

import contextlib
import dataclasses
import dis
import inspect
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from ..layers import SolverLayer
from .change import RewrittenForward
from .clone import clone

__all__ = ["CallFrame", "Region", "Survey", "Traced", "Tracer", "Untraceable", "survey"]

#: A call in a frame, keyed by callee and call index.
Key = tuple[str, Any, int]
_CALLS = ("call_function", "call_method", "call_module")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_FORWARDS = "_minimand_forwards"
SIMPLE = (bool, int, float, str, type(None))


def is_builtin(module: nn.Module) -> bool:
    """Whether the module is one of torch's, so that it is a single call."""
    return type(module).__module__.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(module, _CONTAINERS)


class Untraceable(Exception):
    """A module's forward cannot be traced."""

    def __init__(self, module: nn.Module, reason: str) -> None:
        super().__init__(reason)
        self.module = module
        self.reason = reason


@dataclasses.dataclass(eq=False)
class CallFrame:
    """One call of a module's forward: the calls that it makes itself, and the names of its non-tensor arguments."""

    owner: nn.Module
    plain: frozenset[str] = frozenset()
    calls: list[fx.Node] = dataclasses.field(default_factory=list)
    in_context: bool = False


@dataclasses.dataclass
class Traced:
    """A graph, with the frame of every call and the module that it calls."""

    graph: fx.Graph
    root: nn.Module
    frames: list[CallFrame]
    frame: dict[fx.Node, CallFrame]
    paths: dict[nn.Module, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        found = {node.target for node in self.frame if node.op == "call_module"}
        self._modules = {target: self.root.get_submodule(str(target)) for target in found}

    def module(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls."""
        return self._modules[node.target] if node.op == "call_module" else None

    def describe(self, node: fx.Node) -> str:
        """The name of the module or function that a node calls."""
        if (module := self.module(node)) is not None:
            return f"{self.paths.get(module, node.target)} ({type(module).__name__})"
        return getattr(node.target, "__name__", str(node.target))

    def keys(self, frame: CallFrame) -> dict[Key, fx.Node]:
        """The calls of a frame, keyed by callee and call index."""
        result: dict[Key, fx.Node] = {}
        count: dict[tuple[str, Any], int] = {}
        for node in frame.calls:
            what = self._what(node)
            count[what] = count.get(what, -1) + 1
            result[*what, count[what]] = node
        return result

    def _what(self, node: fx.Node) -> tuple[str, Any]:
        return node.op, node.target if (module := self.module(node)) is None else id(module)


class _TensorProxy(fx.Proxy):
    """A proxy for which ``isinstance(x, Tensor)`` holds, so that code takes the same branch as with a tensor."""

    # nn.Module reads these from tensors that are assigned to it.
    _is_param = False
    _is_buffer = False

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return torch.Tensor


class Tracer(fx.Tracer):
    """Follows calls into the user's modules; modules of torch and ``opaque`` ones are single calls."""

    proxy_buffer_attributes = True

    def __init__(self, opaque: dict[nn.Module, str], deep: bool, plain: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.plain = plain
        self.opaque = opaque
        self.deep = deep
        self.frames: list[CallFrame] = []
        self.frame: dict[fx.Node, CallFrame] = {}
        self.stack: list[CallFrame] = []
        self.failed: nn.Module | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one call."""
        return not self.deep or m in self.opaque or _is_layer(m) or is_builtin(m)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Open a frame for a module whose calls are followed."""
        if self.is_leaf_module(m, ""):
            return super().call_module(m, forward, args, kwargs)
        self._open(m, _no_tensors(m, args, kwargs))
        try:
            result = super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = m if self.failed is None else self.failed
            raise
        self.stack.pop()
        return result

    def create_node(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any | None = None,
    ) -> fx.Node:
        """Record the frame of a call."""
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        if kind in _CALLS:
            self.frame[node] = self.stack[-1]
            self.stack[-1].calls.append(node)
            self.stack[-1].in_context |= _context() != self.context
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """The proxy of a tensor."""
        if node.op == "placeholder" and node.target in self.plain:
            return fx.Proxy(node, self)
        return _TensorProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        """Replace a proxy by its node, even if it counts as a tensor."""
        return a.node if issubclass(type(a), fx.Proxy) else super().create_arg(a)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """A branch on data ends the trace, unless it belongs to an ``assert``."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_globals.get("__name__") in (__name__, "torch.fx.proxy"):
            frame = frame.f_back
        if frame is None or not _asserts(frame):
            return super().to_bool(obj)
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self.create_proxy("call_function", torch._assert, (obj, f"the assertion at {where} failed"), {})
        return True

    def run(self, root: nn.Module, concrete: dict[str, Any]) -> Traced:
        """Trace ``root``, or raise :class:`Untraceable` with the module whose forward failed."""
        self._open(root)
        with torch.enable_grad():
            self.context = _context()
            try:
                graph = self.trace(root, concrete_args=concrete or None)
            except Exception as error:
                raise Untraceable(self.failed or root, _first_line(error)) from error
        return Traced(graph, root, self.frames, self.frame)

    def _open(self, module: nn.Module, plain: frozenset[str] = frozenset()) -> None:
        frame = CallFrame(module, plain)
        self.frames.append(frame)
        self.stack.append(frame)


def _no_tensors(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str]:
    """The names of the arguments of a call that are not tensors, such as lists and flags."""
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    return frozenset(name for name, value in list(given.items())[1:] if not issubclass(type(value), fx.Proxy))


def _asserts(frame: types.FrameType) -> bool:
    """Whether the truth value that a frame needs next belongs to an ``assert``."""
    code = list(dis.get_instructions(frame.f_code))
    here = next(i for i, instruction in enumerate(code) if instruction.offset == frame.f_lasti)
    here += code[here].opname == "TO_BOOL"  # Python 3.13
    jump, after = code[here : here + 2]
    return "IF_TRUE" in jump.opname and after.opname == "LOAD_ASSERTION_ERROR"


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is a solver layer or a plain layer, whose forward is torch's."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d)
    return isinstance(module, SolverLayer) or any(
        isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds
    )


def _context() -> tuple[bool, ...]:
    """The modes that ``with`` statements may have changed; a graph does not record them."""
    devices = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *(torch.is_autocast_enabled(device) for device in devices),
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def defaults(module: nn.Module) -> dict[str, Any]:
    """The arguments of a forward that have a simple default, with their defaults."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return {p.name: p.default for p in parameters if type(p.default) in SIMPLE}


@contextlib.contextmanager
def undisturbed() -> Iterator[list[str]]:
    """Restore the random number generators; yields the list of the ones that were used."""
    used: list[str] = []
    ours, theirs = random.getstate(), torch.get_rng_state()
    try:
        yield used
    finally:
        if random.getstate() != ours:
            used.append("random")
            random.setstate(ours)
        if not torch.equal(torch.get_rng_state(), theirs):
            used.append("torch")
            torch.set_rng_state(theirs)


def set_mode(module: nn.Module, mode: bool, *, recurse: bool = True) -> None:
    """Set the training flags of a scratch copy, without calling ``train``, which may be overridden."""
    for part in module.modules() if recurse else [module]:
        part.training = mode
        if (forwards := vars(part).get(_FORWARDS)) is not None:
            type(part).forward = forwards[mode]


@dataclasses.dataclass
class Region:
    """A part of the network with a common trace, in evaluation and in training."""

    root: nn.Module
    modes: tuple[Traced, Traced]


@dataclasses.dataclass
class Survey:
    """The traced parts of a network, and the modules that could not be traced, with reasons."""

    model: nn.Module
    regions: list[Region]
    opaque: dict[nn.Module, str]
    paths: dict[nn.Module, str]


def scratch(model: nn.Module) -> nn.Module:
    """A copy to trace, without hooks, and with every forward defined by its class, as the tracer requires."""
    copied = clone(model)
    for module in copied.modules():
        for name, value in vars(module).items():
            if name.endswith("_hooks") and isinstance(value, dict):
                value.clear()
        forward = vars(module).pop("forward", None)
        if forward is not None:
            kind = type(module)
            space = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            module.__class__ = type(kind.__name__, (kind,), space)
            vars(module)[_FORWARDS] = _functions(forward)
    return copied


def _functions(forward: Any) -> tuple[Any, Any]:
    """The forward of an instance as functions of a class, for evaluation and training."""
    if isinstance(forward, RewrittenForward):
        return forward.evaluation, forward.training
    if isinstance(forward, types.MethodType) and isinstance(forward.__func__, types.FunctionType):
        return forward.__func__, forward.__func__

    def unknown(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("its forward was replaced on the instance")

    return unknown, unknown


def survey(model: nn.Module) -> Survey:
    """Trace a scratch copy as far as possible."""
    result = Survey(model, [], {}, {module: path for path, module in model.named_modules()})
    pending, seen = [model], set()
    with undisturbed():
        while pending:
            root = pending.pop(0)
            if root in seen or is_builtin(root) or _is_layer(root):
                continue
            seen.add(root)
            known = set(result.opaque)
            if not isinstance(root, nn.ModuleList | nn.ModuleDict):
                _trace_region(root, result)
            closed = [module for module in result.opaque if module not in known]
            if isinstance(root, nn.ModuleList | nn.ModuleDict) or root in result.opaque:
                closed.append(root)
            pending += [child for module in closed for child in module.children()]
    return result


def _trace_region(root: nn.Module, result: Survey) -> None:
    while root not in result.opaque:
        try:
            modes = []
            for mode in (False, True):
                set_mode(root, mode)
                traced = Tracer(result.opaque, deep=True).run(root, defaults(root))
                modes.append(dataclasses.replace(traced, paths=result.paths))
        except Untraceable as failure:
            result.opaque[failure.module] = failure.reason
        else:
            result.regions.append(Region(root, (modes[0], modes[1])))
            return

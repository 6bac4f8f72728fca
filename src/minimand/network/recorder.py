"""A function mode and hooks that record the calls of one run of a network."""

import collections
import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .nested import replace, tensors
from .record import Call, CallSite, Context, ModuleFrame, Source, Value
from .state import Saved, version

__all__ = ["Recorder"]

#: Functions that hand a tensor's data to Python.
DATA_READS = {
    "item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__", "__bool__", "__float__", "__int__",
    "__index__", "__complex__", "__contains__", "__dlpack__",
}  # fmt: skip
#: Functions the shape of whose result depends on data.
_DYNAMIC = {
    "nonzero", "nonzero_static", "argwhere", "masked_select", "unique", "unique_consecutive", "repeat_interleave",
    "bincount", "one_hot",
}  # fmt: skip
#: Functions by which Python learns the number of entries of a tensor.
_SHAPE_READS = {"size", "shape", "numel", "nelement", "__len__", "unbind", "split", "chunk", "tensor_split"}
#: A forward may loop until its data satisfy a condition, which a made-up input need not reach.
_MOST_CALLS = 100_000
_WRITERS = {"__setitem__", "data=", "batch_norm", "instance_norm"}
#: Functions that ask a tensor for no data; they are frequent and not recorded.
_QUERIES = {
    "size", "dim", "shape", "ndim", "numel", "dtype", "device", "layout", "stride", "requires_grad", "is_leaf",
    "is_cuda", "is_nested", "is_sparse", "grad_fn", "is_floating_point", "is_complex", "is_contiguous", "__len__",
    "get_device", "_version",
}  # fmt: skip

_TORCH = os.path.dirname(torch.__file__)
_HERE = os.path.dirname(__file__) + os.sep
#: Files whose functions stand between a call and the function mode, or between the call of a module and its hooks.
_BETWEEN = frozenset(
    os.path.join(_TORCH, *name.split("/"))
    for name in (
        "overrides.py", "functional.py", "nn/functional.py", "_tensor.py", "_VF.py", "_jit_internal.py", "_ops.py",
        "utils/_device.py", "utils/_contextlib.py", "nn/modules/module.py",
    )
)  # fmt: skip


@dataclasses.dataclass
class _Slot:
    """What is known about one tensor object: its present value, and its version when that was noted."""

    tensor: Tensor
    value: Value
    version: int | None


@dataclasses.dataclass
class _Started:
    """A call before its result is known: its tensors and their versions, which it may change."""

    call: Call
    given: list[Tensor]
    versions: list[int | None]


class Recorder(TorchFunctionMode):
    """Records every call of a function of torch in the block, with the module whose forward made it.

    Args:
        paths: Path and module of every module to attach to.
        known: For the identity of every registered tensor, its source and its name.
        saved: Tensors from outside are added to it before a call that may change them.
        device: The type of device whose autocast state is recorded beside the CPU's.
    """

    def __init__(
        self, paths: Mapping[nn.Module, str], known: Mapping[int, tuple[Source, str]], saved: Saved, device: str
    ) -> None:
        super().__init__()
        self.values: list[Value] = []
        self.frames: list[ModuleFrame] = []
        self.calls: list[Call] = []
        #: Tensors that the run did not compute, by the index of their first value.
        self.outside: dict[int, Tensor] = {}
        #: Tensors that were changed out of sight, by the index of the value after that.
        self.stray: dict[int, Tensor] = {}
        #: The paths of modules that ran inside a transform of torch.func, where calls are not recorded.
        self.transformed: dict[str, None] = {}
        self._paths, self._known, self._saved = paths, known, saved
        self._devices = tuple(dict.fromkeys(("cpu", device)))
        self._runs: collections.Counter[str] = collections.Counter()
        self._stack: list[ModuleFrame] = []
        self._scripted: dict[ModuleFrame, _Started] = {}
        # Holding every tensor keeps identities from being used twice.
        self._slots: dict[int, _Slot] = {}
        self._memory: dict[int, dict[int, None]] = {}
        self._foreign: set[int] = set()
        self._dynamic: set[Value] = set()
        self._thread = threading.get_ident()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recorder":
        # A forward may copy its own module, with the hooks on it.
        return self

    # -- frames ---------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put hooks on the modules; whoever saved the modules' attributes removes them."""
        key: Any = object()  # no other hook has it
        for module in self._paths:
            # Scripted modules refuse register_forward_hook, but call the hooks in these dictionaries.
            hooks: Any = module._forward_pre_hooks
            hooks[key] = self._enter
            hooks.move_to_end(key, last=False)
            module._forward_pre_hooks_with_kwargs[key] = True
            module._forward_hooks[key] = self._leave
            module._forward_hooks_with_kwargs[key] = True
            module._forward_hooks_always_called[key] = True

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread or module not in self._paths:
            return
        with torch._C.DisableTorchFunction():
            path = self._paths[module]
            if torch._C._functorch.peek_interpreter_stack() is not None:
                self.transformed[path] = None
            inputs = tuple(self._value(tensor) for tensor in tensors((args, kwargs)))
            kind, parent = type(module).__name__, self._stack[-1].index if self._stack else None
            frame = ModuleFrame(len(self.frames), path, kind, self._runs[path], parent, inputs, _place(), tuple(kwargs))
            self._runs[path] += 1
            self.frames.append(frame)
            self._stack.append(frame)
            if isinstance(module, torch.jit.ScriptModule):
                self._scripted[frame] = self._before(module, kind, args, kwargs)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if threading.get_ident() != self._thread or module not in self._paths:
            return
        with torch._C.DisableTorchFunction():
            path = self._paths[module]
            while self._stack and self._stack[-1].path != path:
                self._stack.pop()
            if not self._stack:
                return
            frame = self._stack[-1]
            started = self._scripted.pop(frame, None)
            if started is not None and output is not None:
                started.call.opaque = "it is compiled by torch.jit, which hides its calls"
                self._after(started, output)
            frame.outputs = tuple(self._value(tensor) for tensor in tensors(output))
            self._stack.pop()

    # -- calls ----------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Inside vmap and grad transforms tensors are wrappers, which do not outlive the transform.
        if torch._C._functorch.peek_interpreter_stack() is not None or not self._stack:
            return func(*args, **kwargs)
        name = _name(func)
        if name in _QUERIES and not self._dynamic:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            started = self._before(func, name, args, kwargs)
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return self._after(started, result)

    def _before(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Started:
        given = list(tensors((args, kwargs)))
        inputs = tuple(self._value(tensor) for tensor in given)
        if _may_write(name, args, kwargs):
            for tensor in given:
                self._save(tensor)
        if isinstance(kwargs.get("generator"), torch.Generator):
            self._saved.add_generator(kwargs["generator"])
        frame = self._stack[-1]
        args, kwargs = replace((args, kwargs), Tensor, self._value)
        call = Call(-1, frame.index, func, name, frame.path, args, kwargs, inputs, self._context(), _place())
        return _Started(call, given, [version(tensor) for tensor in given])

    def _after(self, started: _Started, result: Any) -> Any:
        call = started.call
        changed = self._changed(started, result)
        returned = list(tensors(result))
        dynamic = any(value in self._dynamic for value in call.inputs)
        if dynamic and call.name in _SHAPE_READS:
            call.opaque = "the number of entries depends on the data, and Python reads it"
        elif not returned and not changed and call.name not in DATA_READS:
            return result
        if len(self.calls) >= _MOST_CALLS:
            raise RuntimeError(f"the recorder stopped after {_MOST_CALLS} calls; a loop may not end")
        call.index = len(self.calls)
        self.calls.append(call)
        call.mutates = tuple(self._rewrite(tensor, call.index) for tensor in changed)
        if _returns_alias(started, returned, changed):
            result = replace(result, Tensor, lambda t: _alias(t) if any(t is g for g in started.given) else t)
            returned = list(tensors(result))
        rewritten = {id(tensor) for tensor in changed}
        call.outputs = tuple(
            self._slots[id(t)].value if id(t) in rewritten else self._bind(t, "call", "", call.index) for t in returned
        )
        if dynamic or _is_dynamic(call, started.given):
            self._dynamic |= {v for v, t in zip(call.outputs, returned, strict=True) if t.dim() > 0}
        return result

    def _changed(self, started: _Started, result: Any) -> list[Tensor]:
        """The tensors that a call changed in place, with all known views of their memory."""
        name, given, found = started.call.name, started.given, {}
        for tensor, count in zip(given, started.versions, strict=True):
            uncounted = count is None and _is_in_place(name) and tensor is given[0]
            if version(tensor) != count or uncounted:
                for other in self._memory.get(_memory(tensor), ()):
                    found[other] = self._slots[other].tensor
                found[id(tensor)] = tensor
        if given and (name == "data=" or (_is_in_place(name) and result is given[0])):
            found[id(given[0])] = given[0]
        return list(found.values())

    # -- values ---------------------------------------------------------------------------------------------------

    def add_input(self, tensor: Tensor, name: str) -> Value:
        """Register an input of the network."""
        with torch._C.DisableTorchFunction():
            return self._bind(tensor, "input", name)

    def value(self, tensor: Tensor) -> Value:
        """A tensor's present value."""
        with torch._C.DisableTorchFunction():
            return self._value(tensor)

    def _value(self, tensor: Tensor) -> Value:
        slot = self._slots.get(id(tensor))
        if slot is None:
            return self._meet(tensor)
        if slot.version != version(tensor):
            value = self._bind(tensor, "unseen", slot.value.name)
            self.stray[value.index] = tensor
            return value
        return slot.value

    def _meet(self, tensor: Tensor) -> Value:
        """The value of a tensor object that no recorded call returned."""
        key = _memory(tensor)
        if id(tensor) not in self._known:
            for other in self._memory.get(key, ()):
                slot = self._slots[other]
                if _same_entries(tensor, slot.tensor):  # such as the input that a custom Function returned
                    self._slots[id(tensor)] = dataclasses.replace(slot, tensor=tensor, version=version(tensor))
                    self._memory[key][id(tensor)] = None
                    return slot.value
        source, name = self._known.get(id(tensor), ("unseen", ""))
        value = self._bind(tensor, source, name)
        # Inside vmap and grad transforms modules get wrappers, which do not outlive the transform.
        if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            self.outside[value.index] = tensor
            self._foreign.add(id(tensor))
        return value

    def _bind(self, tensor: Tensor, source: Source, name: str, call: int | None = None) -> Value:
        value = Value(len(self.values), source, name, _shape(tensor), tensor.dtype, call)
        self.values.append(value)
        self._slots[id(tensor)] = _Slot(tensor, value, version(tensor))
        self._memory.setdefault(_memory(tensor), {})[id(tensor)] = None
        return value

    def _rewrite(self, tensor: Tensor, call: int) -> tuple[Value, Value]:
        before = self._slots[id(tensor)].value
        after = self._bind(tensor, "call", "", call)
        if before in self._dynamic:
            self._dynamic.add(after)
        return before, after

    def _save(self, tensor: Tensor) -> None:
        """Save all tensors from outside whose memory a call may change through this one."""
        for other in self._memory.get(_memory(tensor), ()):
            if other in self._foreign:
                self._saved.add(self._slots[other].tensor)

    def _context(self) -> Context:
        enabled = [device for device in self._devices if torch.is_autocast_enabled(device)]
        return Context(torch.is_grad_enabled(), tuple((device, torch.get_autocast_dtype(device)) for device in enabled))


def _name(func: Any) -> str:
    """A function's name; that of the attribute for properties of tensors, with "=" for setting one."""
    name = str(getattr(func, "__name__", type(func).__name__))
    if name in ("__get__", "__set__"):
        return str(func.__self__.__name__) + ("=" if name == "__set__" else "")
    return name.partition(".")[0] if isinstance(func, torch._ops.OpOverload) else name


def _is_in_place(name: str) -> bool:
    """Whether a name follows torch's convention for in-place functions."""
    return name.endswith("_") and not name.endswith("__")


def _may_write(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if name in ("embedding", "embedding_bag"):  # scaled in place where a row's norm exceeds max_norm
        return kwargs.get("max_norm") is not None or args[3:4] not in ((), (None,))
    return (
        _is_in_place(name)
        or name in _WRITERS
        or name.startswith("__i")
        or kwargs.get("out") is not None
        or bool(kwargs.get("inplace"))
    )


def _returns_alias(started: _Started, returned: list[Tensor], changed: list[Tensor]) -> bool:
    """Whether a call returned one of its arguments as it was, as dropout does in evaluation."""
    if changed or _is_in_place(started.call.name):
        return False
    return any(tensor is given for tensor in returned for given in started.given)


def _alias(tensor: Tensor) -> Tensor:
    """Another tensor object with the same memory, so that what returns its input is told from its input."""
    try:
        return torch.ops.aten.alias(tensor)
    except (RuntimeError, NotImplementedError):
        return tensor


def _is_dynamic(call: Call, given: list[Tensor]) -> bool:
    """Whether the shape of a call's result depends on data."""
    if call.name == "where":
        return len(call.args) + len(call.kwargs) == 1
    if call.name == "__getitem__":
        return any(index.dtype in (torch.bool, torch.uint8) and index.dim() > 0 for index in given[1:])
    return call.name in _DYNAMIC


def _memory(tensor: Tensor) -> int:
    """A number that tensors share if and only if they share memory."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors and wrappers have no storage
        return id(tensor)


def _same_entries(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of the same memory have the same entries."""
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    look = [(t.dtype, _shape(t), t.stride(), t.storage_offset(), t.is_conj(), t.is_neg()) for t in (one, other)]
    return look[0] == look[1] and one.numel() > 0


def _shape(tensor: Tensor) -> tuple[int, ...]:
    try:
        return tuple(tensor.shape)
    except RuntimeError:  # nested tensors
        return ()


def _place() -> CallSite:
    """The expression that runs in the innermost frame outside of this package and of torch's dispatching code."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if name not in _BETWEEN and not name.startswith(_HERE):
            break
        frame = frame.f_back
    code = frame.f_code
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return CallSite(code, frame.f_lasti // 2, owner if isinstance(owner, nn.Module) else None)

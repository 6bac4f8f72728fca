"""A function mode and hooks that record the calls of one run of a network."""

import collections
import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .nested import replace, tensors
from .record import Context, Source
from .sites import calling_site
from .state import Saved, version

__all__ = ["CallDraft", "FrameDraft", "Recorder", "Ref", "ValueDraft"]

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


@dataclasses.dataclass(frozen=True)
class Ref:
    """Stands for a tensor in recorded arguments."""

    value: int


@dataclasses.dataclass
class ValueDraft:
    """A value, before its source is settled."""

    source: Source
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    call: int | None


@dataclasses.dataclass
class FrameDraft:
    """A frame while it runs; values are given by index."""

    path: str
    kind: str
    run: int
    parent: int | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...] = ()
    pending: Any = None


@dataclasses.dataclass
class CallDraft:
    """A call; values are given by index, and by :class:`Ref` in the arguments."""

    frame: int
    target: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[int, ...]
    site: tuple[str, int]
    context: Context
    outputs: tuple[int, ...] = ()
    mutates: tuple[tuple[int, int], ...] = ()
    opaque: str | None = None


@dataclasses.dataclass
class _Slot:
    """What is known about one tensor object: its present value, and its version when that was noted."""

    tensor: Tensor
    value: int
    version: int | None


@dataclasses.dataclass
class _Before:
    """The arguments of a call, noted before it runs, since it may change them."""

    draft: CallDraft
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
        self.values: list[ValueDraft] = []
        self.frames: list[FrameDraft] = []
        self.calls: list[CallDraft] = []
        #: Tensors that the run did not compute, by the index of their first value.
        self.outside: dict[int, Tensor] = {}
        #: Tensors that were changed out of sight, by the index of the value after that.
        self.stray: dict[int, Tensor] = {}
        self._paths, self._known, self._saved = paths, known, saved
        self._devices = tuple(dict.fromkeys(("cpu", device)))
        self._runs: collections.Counter[str] = collections.Counter()
        self._stack: list[int] = []
        # Holding every tensor keeps identities from being used twice.
        self._slots: dict[int, _Slot] = {}
        self._memory: dict[int, dict[int, None]] = {}
        self._foreign: set[int] = set()
        self._dynamic: set[int] = set()
        self._thread = threading.get_ident()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recorder":
        # A forward may copy its own module, with the hooks on it.
        return self

    # -- frames ---------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put hooks on the modules; whoever saved the modules' attributes removes them."""
        key: Any = _HookKey()
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
            inputs = tuple(self._value(tensor) for tensor in tensors((args, kwargs)))
            parent = self._stack[-1] if self._stack else None
            frame = FrameDraft(path, type(module).__name__, self._runs[path], parent, inputs)
            self._runs[path] += 1
            self.frames.append(frame)
            self._stack.append(len(self.frames) - 1)
            if isinstance(module, torch.jit.ScriptModule):
                frame.pending = self._before(module, type(module).__name__, args, kwargs)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if threading.get_ident() != self._thread or module not in self._paths:
            return
        with torch._C.DisableTorchFunction():
            path = self._paths[module]
            while self._stack and self.frames[self._stack[-1]].path != path:
                self._stack.pop()
            if not self._stack:
                return
            frame = self.frames[self._stack[-1]]
            if frame.pending is not None and output is not None:
                frame.pending.draft.opaque = "it is compiled by torch.jit, which hides its calls"
                self._after(frame.pending, output)
            frame.pending = None
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
            before = self._before(func, name, args, kwargs)
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return self._after(before, result)

    def _before(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Before:
        given = list(tensors((args, kwargs)))
        inputs = tuple(self._value(tensor) for tensor in given)
        if _may_write(name, args, kwargs):
            for tensor in given:
                self._save(tensor)
        if isinstance(kwargs.get("generator"), torch.Generator):
            self._saved.add_generator(kwargs["generator"])
        refer = lambda tensor: Ref(self._value(tensor))  # noqa: E731
        draft = CallDraft(
            self._stack[-1], func, name, replace(args, Tensor, refer), replace(kwargs, Tensor, refer), inputs,
            ("", 0), self._context(),
        )  # fmt: skip
        return _Before(draft, given, [version(tensor) for tensor in given])

    def _after(self, before: _Before, result: Any) -> Any:
        draft = before.draft
        changed = self._changed(before, result)
        returned = list(tensors(result))
        dynamic = any(value in self._dynamic for value in draft.inputs)
        if dynamic and draft.name in _SHAPE_READS:
            draft.opaque = "the number of entries depends on the data, and Python reads it"
        elif not returned and not changed and draft.name not in DATA_READS:
            return result
        if len(self.calls) >= _MOST_CALLS:
            raise RuntimeError(f"the recorder stopped after {_MOST_CALLS} calls")
        draft.site = calling_site()
        self.calls.append(draft)
        index = len(self.calls) - 1
        draft.mutates = tuple(self._rewrite(tensor, index) for tensor in changed)
        if _returns_alias(before, returned, changed):
            result = replace(result, Tensor, lambda t: _alias(t) if any(t is g for g in before.given) else t)
            returned = list(tensors(result))
        rewritten = {id(tensor) for tensor in changed}
        draft.outputs = tuple(
            self._slots[id(t)].value if id(t) in rewritten else self._bind(t, "call", "", index) for t in returned
        )
        if dynamic or _is_dynamic(draft, before.given):
            self._dynamic |= {v for v, t in zip(draft.outputs, returned, strict=True) if t.dim() > 0}
        return result

    def _changed(self, before: _Before, result: Any) -> list[Tensor]:
        """The tensors that a call changed in place, with all known views of their memory."""
        name, found = before.draft.name, {}
        for tensor, count in zip(before.given, before.versions, strict=True):
            uncounted = count is None and _is_in_place(name) and tensor is before.given[0]
            if version(tensor) != count or uncounted:
                for other in self._memory.get(_memory(tensor), ()):
                    found[other] = self._slots[other].tensor
                found[id(tensor)] = tensor
        if before.given and (name == "data=" or (_is_in_place(name) and result is before.given[0])):
            found[id(before.given[0])] = before.given[0]
        return list(found.values())

    # -- values ---------------------------------------------------------------------------------------------------

    def add_input(self, tensor: Tensor, name: str) -> int:
        """Register an input of the network."""
        with torch._C.DisableTorchFunction():
            return self._bind(tensor, "input", name, None)

    def value(self, tensor: Tensor) -> int:
        """The index of a tensor's present value."""
        with torch._C.DisableTorchFunction():
            return self._value(tensor)

    def _value(self, tensor: Tensor) -> int:
        slot = self._slots.get(id(tensor))
        if slot is None:
            return self._meet(tensor)
        if slot.version != version(tensor):
            value = self._bind(tensor, "unseen", self.values[slot.value].name, None)
            self.stray[value] = tensor
            return value
        return slot.value

    def _meet(self, tensor: Tensor) -> int:
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
        value = self._bind(tensor, source, name, None)
        self.outside[value] = tensor
        self._foreign.add(id(tensor))
        return value

    def _bind(self, tensor: Tensor, source: Source, name: str, call: int | None) -> int:
        self.values.append(ValueDraft(source, name, _shape(tensor), tensor.dtype, call))
        self._slots[id(tensor)] = _Slot(tensor, len(self.values) - 1, version(tensor))
        self._memory.setdefault(_memory(tensor), {})[id(tensor)] = None
        return len(self.values) - 1

    def _rewrite(self, tensor: Tensor, call: int) -> tuple[int, int]:
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


class _HookKey:
    """A key in torch's dictionaries of hooks that no other hook has."""


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


def _returns_alias(before: _Before, returned: list[Tensor], changed: list[Tensor]) -> bool:
    """Whether a call returned one of its arguments as it was, as dropout does in evaluation."""
    if changed or _is_in_place(before.draft.name):
        return False
    return any(tensor is given for tensor in returned for given in before.given)


def _alias(tensor: Tensor) -> Tensor:
    """Another tensor object with the same memory, so that what returns its input is told from its input."""
    try:
        return torch.ops.aten.alias(tensor)
    except (RuntimeError, NotImplementedError):
        return tensor


def _is_dynamic(draft: CallDraft, given: list[Tensor]) -> bool:
    """Whether the shape of a call's result depends on data."""
    if draft.name == "where":
        return len(draft.args) + len(draft.kwargs) == 1
    if draft.name == "__getitem__":
        return any(index.dtype in (torch.bool, torch.uint8) and index.dim() > 0 for index in given[1:])
    return draft.name in _DYNAMIC


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

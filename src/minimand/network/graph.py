"""Questions about the structure of a recorded network."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .record import Call, ModuleFrame, Value
from .roles import role

if TYPE_CHECKING:
    from .network import Network

__all__ = [
    "Line",
    "Neighbors",
    "ResidualBlock",
    "SharedParameter",
    "Step",
    "chain",
    "neighbors",
    "residuals",
    "shared",
]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclasses.dataclass(frozen=True)
class Neighbors:
    """The calls directly before and after a layer; None where there is none.

    ``skip`` is the addition of the layer's output, normalised or not, to another tensor. ``rivals`` are an activation
    and the calls that read the same value as it, which therefore is not the layer's activation.
    """

    dropout: Call | None = None
    norm: Call | None = None
    skip: Call | None = None
    activation: Call | None = None
    rivals: tuple[Call, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A run of a module without submodules or of a layer of torch, or one call outside of such modules.

    Attributes:
        path: The path of the module; for a single call, that of the module whose forward makes it.
        frame: The module's run; None for a single call.
        calls: Its calls from which the network's outputs were computed.
        inputs: The values that it reads and that depend on the network's inputs.
        outputs: The values that it hands on.
    """

    path: str
    frame: ModuleFrame | None
    calls: tuple[Call, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    def __str__(self) -> str:
        if self.frame is not None:
            return f"{self.path} ({self.frame.kind})" if self.path else f"the network ({self.frame.kind})"
        return f"the call of {self.calls[0].name}" + (f" in {self.path}" if self.path else "")


@dataclasses.dataclass(frozen=True)
class Line:
    """The steps of a chain. ``broken`` says, in one sentence, where a network stops being one; None where it is one."""

    steps: tuple[Step, ...]
    broken: str | None = None


@dataclasses.dataclass(frozen=True)
class ResidualBlock:
    """An addition ``branch(start) + shortcut(start)``; an identity has the empty shortcut."""

    start: Value
    branch: tuple[Call, ...]
    shortcut: tuple[Call, ...]
    add: Call


@dataclasses.dataclass(frozen=True)
class SharedParameter:
    """A parameter with all its names, and the calls that read it."""

    names: tuple[str, ...]
    calls: tuple[Call, ...]


def ancestors(network: "Network", values: Iterable[Value]) -> frozenset[Value]:
    """The values, and all values from which they were computed."""
    found, pending = set(values), list(values)
    while pending:
        call = network.producer(pending.pop())
        for value in () if call is None else call.reads:
            if value not in found:
                found.add(value)
                pending.append(value)
    return frozenset(found)


def live_readers(network: "Network", value: Value) -> list[Call]:
    """The calls that read a value and from which the outputs were computed."""
    return [call for call in network.readers(value) if network.is_live(call)]


def operand(network: "Network", call: Call) -> Value | None:
    """The first argument of a call that depends on the network's inputs; a layer's, before its own padding."""
    value = next((value for value in call.inputs if network.depends(value)), None)
    made = None if value is None else network.producer(value)
    own = made is not None and made.frame == call.frame and made.name == "pad" and role(call) == "conv"
    if own and made is not None and isinstance(network.module(call.path), nn.modules.conv._ConvNd):
        return operand(network, made)
    return value


def neighbors(network: "Network", call: Call) -> Neighbors:
    """See :meth:`Network.neighbors`."""
    found: dict[str, Any] = {}
    dropout = next((made for made, _, _ in before(network, call) if role(made) == "dropout"), None)
    value, reshaped = call.outputs[0] if call.outputs else None, False
    while value is not None:
        readers = live_readers(network, value)
        acting = [reader for reader in readers if role(reader) == "activation" and operand(network, reader) is value]
        if len(readers) != 1 or value in network.outputs:
            rivals = tuple(reader for reader in readers if reader not in acting[:1])
            return Neighbors(dropout, **found, rivals=(acting[0], *rivals) if acting else ())
        kind = role(readers[0])
        if kind == "norm" and operand(network, readers[0]) is value and not found and not reshaped:
            found["norm"] = readers[0]
        elif kind == "add" and "skip" not in found and not reshaped:
            found["skip"] = readers[0]
        elif kind == "activation":
            return Neighbors(dropout, **found, activation=readers[0])
        elif kind not in ("identity", "reshape"):
            break
        reshaped = reshaped or kind == "reshape"
        value = readers[0].outputs[0] if readers[0].outputs else None
    return Neighbors(dropout, **found)


def before(network: "Network", call: Call) -> Iterator[tuple[Call, Value, bool]]:
    """The calls before a call with nothing but reshapings between, their results, and whether one reshapes."""
    value, reshaped = operand(network, call), False
    while value is not None and (made := network.producer(value)) is not None:
        yield made, value, reshaped
        if role(made) not in ("reshape", "identity") or len(live_readers(network, value)) != 1:
            return
        reshaped = reshaped or role(made) == "reshape"
        value = operand(network, made)


def steps(network: "Network") -> tuple[Step, ...]:
    """The way from the inputs to the outputs in coarse steps.

    A step is a run of a module without submodules, or of one of torch's own layers; other calls are steps of their
    own. Calls on which the outputs do not depend, and those that depend on no input, are left out.
    """
    groups: dict[tuple[str, int], list[Call]] = {}
    for call in network.live:
        if any(network.depends(value) for value in call.produces):
            leaf = _leaf(network, call)
            groups.setdefault(("call", call.index) if leaf is None else ("frame", leaf), []).append(call)
    return tuple(_step(network, kind, index, calls) for (kind, index), calls in groups.items())


def _leaf(network: "Network", call: Call) -> int | None:
    """The outermost frame around a call that is one step."""
    found = None
    index: int | None = call.frame
    while index is not None:
        frame = network.frames[index]
        if is_layer(network.module(frame.path)):
            found = index
        index = frame.parent
    return found


def is_layer(module: nn.Module) -> bool:
    """Whether a module is scripted, has no submodules, or has a forward of torch's own that is not a container's."""
    if isinstance(module, torch.jit.ScriptModule) or next(module.children(), None) is None:
        return True
    # A generated forward, such as that of a graph of torch.fx, belongs to no module of Python.
    origin = getattr(type(module).forward, "__module__", None) or ""
    return origin.startswith("torch.nn.modules.") and not isinstance(module, _CONTAINERS)


def _step(network: "Network", kind: str, index: int, calls: list[Call]) -> Step:
    frame = network.frames[index] if kind == "frame" else None
    made = {value for call in calls for value in call.produces}
    read = [v for call in calls for v in call.inputs if v not in made and network.depends(v)]
    handed = [
        value
        for call in calls
        for value in call.produces
        if value in network.outputs or any(c not in calls for c in network.readers(value) if network.is_live(c))
    ]
    path = calls[0].path if frame is None else frame.path
    return Step(path, frame, tuple(calls), tuple(dict.fromkeys(read)), tuple(dict.fromkeys(handed)))


def chain(network: "Network") -> Line:
    """See :meth:`Network.chain`."""
    kind = type(network.model).__name__
    if not network.complete:
        return Line((), f"{kind} cannot be read: {network.reasons[0]}")
    if len(network.inputs) != 1:
        names = ", ".join(value.name for value in network.inputs[1:]) or "none"
        return Line((), f"{kind} does not take exactly one tensor as input (also {names})")
    if len(network.outputs) != 1:
        return Line((), f"{kind} returns {'more than' if network.outputs else 'less than'} one tensor")
    for part in network.opaque():
        if part.call is None or network.is_live(part.call) or any(map(network.depends, part.call.inputs)):
            return Line((), str(part))
    done: list[Step] = []
    value, last = network.inputs[0], "the input"
    for step in steps(network):
        if step.inputs != (value,):
            return Line(tuple(done), f"{step} does not take exactly the output of {last}")
        if len(step.outputs) != 1:
            return Line(tuple(done), f"{step} hands on {len(step.outputs)} tensors instead of one")
        done.append(step)
        value, last = step.outputs[0], str(step)
    if network.outputs != (value,):
        return Line(tuple(done), f"{kind} does not return the output of {last}")
    return Line(tuple(done))


def residuals(network: "Network") -> tuple[ResidualBlock, ...]:
    """See :meth:`Network.residuals`."""
    found = []
    for add in network.live:
        operands = [value for value in add.inputs if network.depends(value)]
        if role(add) == "add" and len(operands) == 2 and (block := _residual(network, add, operands)) is not None:
            found.append(block)
    return tuple(found)


def _residual(network: "Network", add: Call, operands: list[Value]) -> ResidualBlock | None:
    lines = [ancestors(network, (value,)) for value in operands]
    common = [value for value in lines[0] & lines[1] if network.depends(value)]
    if not common:
        return None
    start = max(common, key=lambda value: value.index)
    paths = [_between(network, start, line) for line in lines]
    branch, shortcut = sorted(paths, key=len, reverse=True)
    around = {role(call) for call in shortcut}
    learned = any("parameter" in v.origins and not network.depends(v) for call in branch for v in call.inputs)
    if not learned or "activation" in around or len(branch) == len(shortcut):
        return None
    return ResidualBlock(start, branch, shortcut, add)


def _between(network: "Network", start: Value, line: frozenset[Value]) -> tuple[Call, ...]:
    """The calls that compute, from a value, the values of a line that depend on it."""
    reached, calls = {start}, []
    for call in network.calls:
        if any(value in reached for value in call.reads) and any(value in line for value in call.produces):
            reached |= set(call.produces)
            calls.append(call)
    return tuple(calls)


def shared(network: "Network") -> tuple[SharedParameter, ...]:
    """See :meth:`Network.shared`."""
    names: dict[int, list[str]] = {}
    for name, parameter in network.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    calls: dict[str, list[Call]] = {}
    for value in network.values:
        if value.source == "parameter":
            calls.setdefault(value.name, []).extend(network.readers(value))
    found = [SharedParameter(tuple(held), tuple(calls.get(held[0], ()))) for held in names.values()]
    return tuple(shared for shared in found if len(shared.names) > 1 or len(shared.calls) > 1)

"""A network as an acyclic graph of linear calls and monotone activations, read from a recorded run."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ...errors import ChainError, MinimandError, ShapeError
from ...functions.activations import is_activation
from ...network import Network, read, role
from ...network.nested import replace, tensors
from ...network.record import Call, Value
from ...network.sequence import activation_of
from . import pooling
from .rules import Rule, rearranged
from .units import LINEAR, Unit, unit_of

__all__ = ["Head", "LinearCall", "Program", "UnitCall", "compile_network"]

RULES = pooling.RULES
#: Calls that are linear in each of these arguments, but not in two at once.
_PRODUCTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d"), ("input", "weight")),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), ("input", "weight")),
    **dict.fromkeys(("matmul", "mm", "bmm", "mul", "multiply", "rmul"), ("input", "other")),
    "addmm": ("mat1", "mat2"),
}
_DIVISIONS = ("div", "divide", "true_divide")
_NORMS = ("batch_norm", "layer_norm", "group_norm", "instance_norm")
_RESHAPES = ("flatten", "view", "reshape", "unflatten", "squeeze", "unsqueeze", "ravel", "contiguous", "alias", "to")
#: Calls that copy entries of their input.
_REARRANGEMENTS = {
    "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT", "getitem",
    "narrow", "select", "chunk", "split", "tensor_split", "unbind", "expand", "expand_as", "repeat", "tile",
    "repeat_interleave", "flip", "roll", "pad", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
    "index_select", "reshape_as", "view_as", "diagonal", "unfold",
}  # fmt: skip
_REMEDY = (
    "lifted training takes linear layers, normalisations, poolings, additions, concatenations and monotone "
    "activations; an own function that acts entry by entry, does not fall and has a finite slope belongs in a module "
    "of its own"
)
_OPAQUE_REMEDY = (
    "it follows calls of torch whose order does not depend on the values in a batch; give every loop a fixed number of "
    "passes, or train the other parts as a network of their own"
)


@dataclasses.dataclass(frozen=True, eq=False)
class LinearCall:
    """A call that is linear in the data, or one that does not depend on them (``rule`` is None).

    Attributes:
        call: The recorded call.
        rule: Its value and adjoint.
        bound: The arguments of the rule, with values in place of tensors.
        wanted: The names of the arguments that need a cotangent.
        held: The names of the arguments that the adjoint reads; of others it reads shapes.
        outputs: The values that it computes.
    """

    call: Call
    rule: Rule | None
    bound: inspect.BoundArguments | None
    wanted: tuple[str, ...]
    held: tuple[str, ...]
    outputs: tuple[Value, ...]

    def __str__(self) -> str:
        return self.call.path or f"the call of {self.call.name}"


@dataclasses.dataclass(frozen=True, eq=False)
class UnitCall:
    """An activation: its input z, its output, and how many activations lie above it on the longest way to an output."""

    path: str
    unit: Unit
    input: Value
    outputs: tuple[Value, ...]
    active: bool
    level: int = 0

    def __str__(self) -> str:
        return self.path


@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """An output of the network: the value before its activation, and the activation; the identity where it has none."""

    path: str
    unit: Unit
    input: Value
    output: Value


Operation = LinearCall | UnitCall


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The operations of a network on batches of one shape.

    Attributes:
        network: The record.
        operations: The operations in order, without the activations of the heads.
        heads: The outputs.
        last: For each operation the values that no later operation reads.
        kept: The values that a backward sweep reads.
    """

    network: Network
    operations: tuple[Operation, ...]
    heads: tuple[Head, ...]
    last: tuple[tuple[Value, ...], ...]
    kept: frozenset[int]

    @property
    def units(self) -> tuple[UnitCall, ...]:
        """The activations below the heads, in order."""
        return tuple(operation for operation in self.operations if isinstance(operation, UnitCall))

    @functools.cached_property
    def made_by(self) -> dict[int, Operation]:
        """The operation that computes a value, by the value's index."""
        return {value.index: operation for operation in self.operations for value in operation.outputs}


def compile_network(model: nn.Module, example: Any = None) -> Program:
    """Read a network and find the rule of every call.

    Raises:
        ChainError: If a call is neither linear nor a monotone activation; the message names it.
        ShapeError: If the example does not run through the network.
        NotProximal: If an activation is not monotone.
    """
    network = read(model, example)
    if not network.complete and example is not None:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors(example))
        raise ShapeError(f"{type(model).__name__} does not take x of shape {shapes}: {network.reasons[0]}")
    if not network.complete:
        raise ChainError(f"{type(model).__name__} cannot be read: {network.reasons[0]}")
    for part in network.opaque():
        if part.call is None or network.is_live(part.call) or any(map(network.depends, part.call.inputs)):
            raise ChainError(f"{part}, so lifted training cannot follow it; {_OPAQUE_REMEDY}")
    if not network.outputs or not all(value.dtype.is_floating_point for value in network.outputs):
        raise ChainError(f"{type(model).__name__} returns no floating-point tensor, so there is nothing to fit")
    # The record need not hold the batch.
    return _Compiler(dataclasses.replace(network, example=((), {}))).program()


class _Compiler:
    """One pass over the live calls of a record."""

    def __init__(self, network: Network) -> None:
        self.network = network
        named = dict(network.model.named_parameters(remove_duplicate=False))
        trained = {v for v in network.values if v.source == "parameter" and named[v.name].requires_grad}
        self.active: set[Value] = trained
        self.lost: dict[Value, Call] = {}
        self.operations: list[Operation] = []
        self.done: set[int] = set()

    def program(self) -> Program:
        for call in self.network.live:
            if call.index not in self.done:
                self._add(call)
        heads = self._heads()
        operations = _leveled(self.operations, heads)
        return Program(self.network, operations, heads, _last_reads(operations, heads), _kept(operations, heads))

    def _add(self, call: Call) -> None:
        for value in call.inputs:
            if value in self.lost:
                raise ChainError(
                    f"{_where(call)} reads a tensor of which {_where(self.lost[value])} changed a part in place; "
                    f"write it without changes in place"
                )
        outputs = self._outputs(call)
        if not any(v in self.active or self.network.depends(v) for v in call.inputs):
            self.operations.append(LinearCall(call, None, None, (), (), outputs))
            return
        if role(call) == "activation":
            self._unit(call, self._activation(call), call.inputs[0], outputs)
            return
        name = call.name.strip("_")
        if name in RULES or name in _REARRANGEMENTS:
            self._linear(call, name, outputs)
        elif not self._own_module(call):
            raise self._refusal(call)

    def _outputs(self, call: Call) -> tuple[Value, ...]:
        """The values that equal the result of the call; those of other tensors that it changed are lost."""
        changed = [after for before, after in call.mutates if call.inputs and before is call.inputs[0]]
        self.lost.update({after: call for _, after in call.mutates if after not in changed + list(call.outputs)})
        return tuple(dict.fromkeys((*call.outputs, *changed)))

    def _linear(self, call: Call, name: str, outputs: tuple[Value, ...]) -> None:
        rule = RULES.get(name) or _rearrangement
        bound = _bind(rule, call, name)
        holding = {key: list(tensors_of(argument)) for key, argument in bound.arguments.items()}
        data = [key for key, values in holding.items() if any(map(self.network.depends, values))]
        wanted = tuple(key for key, values in holding.items() if any(v in self.active for v in values))
        factors = [key for key in _PRODUCTS.get(name, ()) if key in data]
        if len(factors) > 1:
            raise ChainError(f"{_where(call)} multiplies two tensors that both depend on the input; {_REMEDY}")
        if name in _DIVISIONS and "other" in {*data, *wanted}:
            raise ChainError(f"{_where(call)} divides by a tensor that is not constant; {_REMEDY}")
        held = tuple(key for key in _PRODUCTS.get(name, ()) if set(wanted) & set(_PRODUCTS[name]) - {key})
        if name in _NORMS:
            held = ("input", "weight")
        if wanted:
            self.active.update(outputs)
        self.operations.append(LinearCall(call, rule, bound, wanted, held, outputs))

    def _unit(self, call: Call, unit: Unit, value: Value, outputs: tuple[Value, ...]) -> None:
        if not self.network.depends(value):
            raise ChainError(f"{_where(call)} is applied to a parameter; {_REMEDY}")
        active = value in self.active
        if active:
            self.active.update(outputs)
        self.operations.append(UnitCall(_where(call), unit, value, outputs, active))

    def _activation(self, call: Call) -> Unit:
        path, module = _where(call), self.network.module(call.path)
        if not is_activation(module):
            try:
                module = nn.SELU() if call.name.strip("_") == "selu" else activation_of(call)
            except MinimandError as error:
                raise type(error)(f"{path} cannot be lifted: {error}") from None
        return unit_of(path, module)

    def _own_module(self, call: Call) -> bool:
        """Take the whole run of a user's module without parameters and submodules as one activation."""
        frame = self.network.frames[call.frame]
        module = self.network.module(frame.path)
        calls = [other for other in self.network.live if other.frame == call.frame]
        known = type(module).__module__.startswith("torch.") or next(module.parameters(), None) is not None
        if known or next(module.children(), None) is not None or len(frame.inputs) != 1 or len(frame.outputs) != 1:
            return False
        numbers = {other.index for other in calls}
        self.operations = [op for op in self.operations if not (isinstance(op, LinearCall) and op.call in calls)]
        self.done |= numbers
        self._unit(call, unit_of(frame.path, module), frame.inputs[0], frame.outputs)
        return True

    def _refusal(self, call: Call) -> ChainError:
        name = call.name.strip("_")
        if not any(map(self.network.depends, call.inputs)):
            return ChainError(
                f"{_where(call)} ({name}) computes a weight from parameters, which lifted training cannot follow; "
                f"apply torch.nn.utils.parametrize.remove_parametrizations, or what undoes it, first"
            )
        if name in ("softmax", "log_softmax") and call.outputs[0] in self.network.outputs:
            return ChainError(
                f"{_where(call)} ({name}) does not act entry by entry; return the scores before it and use "
                f"loss='cross_entropy', which applies it"
            )
        return ChainError(f"{_where(call)} ({name}) is neither linear nor a monotone activation; {_REMEDY}")

    def _heads(self) -> tuple[Head, ...]:
        heads, kind = [], type(self.network.model).__name__
        for number, output in enumerate(self.network.outputs):
            if output not in self.active:
                raise ChainError(f"output {number} of {kind} depends on no parameter that is trained")
            made = next((op for op in self.operations if output in op.outputs), None)
            alone = self.network.outputs.count(output) == 1 and not any(
                value in _reads(op) for op in self.operations for value in (made.outputs if made else ())
            )
            where = f"output {number}" if len(self.network.outputs) > 1 else "the output"
            if isinstance(made, UnitCall) and alone:
                self.operations.remove(made)
                heads.append(Head(made.path, made.unit, made.input, output))
            else:
                heads.append(Head(where, LINEAR, output, output))
        return tuple(heads)


def _where(call: Call) -> str:
    return call.path or f"the call of {call.name}"


def tensors_of(argument: Any) -> Iterator[Value]:
    """The values in an argument, also inside of lists."""
    found: list[Value] = []

    def note(value: Value) -> Value:
        found.append(value)
        return value

    replace(argument, Value, note)
    return iter(found)


def _rearrangement(*, input: Tensor, call: Callable[[Tensor], Any]) -> Any:
    return rearranged(call, input)


def _bind(rule: Rule, call: Call, name: str) -> inspect.BoundArguments:
    """The arguments of a call under the names of its rule."""
    args, kwargs = call.args, dict(call.kwargs)
    signature = inspect.signature(rule)
    if rule is _rearrangement:
        place = next(index for index, argument in enumerate(args) if isinstance(argument, Value))
        if sum(1 for _ in tensors_of((args, kwargs))) > 1:
            raise ChainError(f"{_where(call)} ({name}) takes a tensor as an option; {_REMEDY}")

        def moved(x: Tensor) -> Any:
            return call.target(*args[:place], x, *args[place + 1 :], **kwargs)

        return signature.bind(input=args[place], call=moved)
    if "call" in signature.parameters:
        kwargs["call"] = call.target
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ChainError(f"{_where(call)} ({name}) has arguments that lifted training does not take: {error}") from None


def _reads(operation: Operation) -> tuple[Value, ...]:
    if isinstance(operation, UnitCall):
        return (operation.input,)
    return operation.call.inputs


def _leveled(operations: Sequence[Operation], heads: Sequence[Head]) -> tuple[Operation, ...]:
    """The operations with the levels of the activations."""
    above: dict[Value, int] = {head.input: 1 for head in heads}
    found = []
    for operation in reversed(operations):
        level = max((above.get(value, 0) for value in operation.outputs), default=0)
        if isinstance(operation, UnitCall):
            operation = dataclasses.replace(operation, level=level)
            level += 1
        for value in _reads(operation):
            above[value] = max(above.get(value, 0), level)
        found.append(operation)
    return tuple(reversed(found))


def _last_reads(operations: Sequence[Operation], heads: Sequence[Head]) -> tuple[tuple[Value, ...], ...]:
    seen, found = {head.input for head in heads}, []
    for operation in reversed(operations):
        new = [value for value in (*_reads(operation), *operation.outputs) if value not in seen]
        seen.update(new)
        found.append(tuple(new))
    return tuple(reversed(found))


def _kept(operations: Sequence[Operation], heads: Sequence[Head]) -> frozenset[int]:
    """The inputs of active activations, and what adjoints read of the rest, where it is not computed again."""
    made = {value.index: operation for operation in operations for value in operation.outputs}
    kept = {head.input.index for head in heads}

    def keep(value: Value) -> None:
        source = made.get(value.index)
        if isinstance(source, UnitCall):
            kept.add(source.input.index)
        elif source is not None and source.rule is not None and source.call.name.strip("_") in _RESHAPES:
            keep(source.call.inputs[0])
        else:
            kept.add(value.index)

    for operation in operations:
        if isinstance(operation, UnitCall):
            if operation.active:
                kept.add(operation.input.index)
        elif operation.bound is not None and operation.wanted:
            for name in operation.held:
                for value in tensors_of(operation.bound.arguments.get(name)):
                    keep(value)
    return frozenset(kept)

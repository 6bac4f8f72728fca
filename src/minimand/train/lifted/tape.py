"""Running a program on a batch: the forward pass, and sweeps of cotangents back through the linear calls."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import MinimandError, NonFiniteError, ShapeError, located
from ...network.nested import replace, tensors
from ...network.record import Value
from .program import LinearCall, Operation, Program, UnitCall
from .rules import Applied

__all__ = ["Cotangents", "Tape", "forward", "name_first_nonfinite"]


class Tape:
    """The values of a batch that a program computes.

    Values that a later sweep does not read are dropped while the forward pass runs. An activation's output is computed
    again from its input.
    """

    def __init__(self, program: Program, sources: Mapping[int, Tensor]) -> None:
        self.program = program
        self.sources = sources
        self.values: dict[int, Tensor] = {}
        self.applied: dict[LinearCall, Applied] = {}
        self.constants: dict[LinearCall, Any] = {}

    def value(self, value: Value) -> Tensor:
        """A value, computed again where it was dropped."""
        found = self.sources.get(value.index, self.values.get(value.index))
        if found is not None:
            return found
        made = self.program.made_by[value.index]
        if isinstance(made, UnitCall):
            return made.unit.phi(self.value(made.input))
        # A reshaping of such a value.
        return self.apply(made).out

    def arguments(self, operation: LinearCall) -> dict[str, Any]:
        """The arguments of a call's rule by name; of those that its adjoint does not read, only the shapes."""
        assert operation.bound is not None
        like = next(iter(self.sources.values()))

        def stub(value: Value) -> Tensor:
            return like.new_empty(()).expand(value.shape)

        return {
            name: replace(argument, Value, self.value if name in operation.held else stub)
            for name, argument in operation.bound.arguments.items()
        }

    def apply(self, operation: LinearCall) -> Applied:
        """A call's rule on the present values."""
        if operation.bound is None or operation.rule is None:
            return Applied(None, lambda g, wanted, given: {})
        args, kwargs = replace((operation.bound.args, operation.bound.kwargs), Value, self.value)
        return operation.rule(*args, **kwargs)

    def pull(self, operation: LinearCall, cotangents: "Cotangents") -> None:
        """Send the cotangents of a call's results to its arguments."""
        found = [cotangents.take(value) for value in operation.outputs]
        if not operation.wanted or operation.bound is None or all(g is None for g in found):
            return
        applied = self.applied[operation]
        several = isinstance(applied.out, tuple | list)
        g = found if several else functools.reduce(torch.add, [part for part in found if part is not None])
        pulled = applied.pull(g, operation.wanted, self.arguments(operation))
        for name, change in pulled.items():
            values = operation.bound.arguments[name]
            pairs = zip(values, change, strict=True) if isinstance(values, list | tuple) else ((values, change),)
            for value, part in pairs:
                if isinstance(value, Value):
                    cotangents.add(value, part)


class Cotangents:
    """Sums of cotangents by value."""

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}

    def add(self, value: Value, change: Tensor) -> None:
        """Add a cotangent of a value."""
        known = self.sums.get(value.index)
        self.sums[value.index] = change if known is None else known + change

    def take(self, value: Value) -> Tensor | None:
        """The sum for a value, which is removed."""
        return self.sums.pop(value.index, None)


def forward(
    program: Program, inputs: Any, sources: Mapping[int, Tensor], watch: Callable[[Operation, Any], None] | None = None
) -> Tape:
    """Run a program on a batch. ``watch`` is shown every result.

    Raises:
        ShapeError: If the batch does not fit.
    """
    tape = Tape(program, {**sources, **{v.index: t for v, t in zip(program.network.inputs, inputs, strict=True)}})
    for operation, last in zip(program.operations, program.last, strict=True):
        if isinstance(operation, UnitCall):
            out: Any = operation.unit.phi(tape.value(operation.input))
        elif operation.rule is None:
            args, kwargs = replace((operation.call.args, dict(operation.call.kwargs)), Value, tape.value)
            out = tape.constants[operation] = operation.call.target(*args, **kwargs)
        else:
            applied = tape.applied[operation] = _applied(tape, operation)
            out = applied.out
        if watch is not None:
            watch(operation, out)
        results = list(tensors(out))
        if len(operation.outputs) > len(results):
            results = results * len(operation.outputs)
        tape.values.update({value.index: part for value, part in zip(operation.outputs, results, strict=False)})
        for value in last:
            if value.index not in program.kept:
                tape.values.pop(value.index, None)
    return tape


def _applied(tape: Tape, operation: LinearCall) -> Applied:
    try:
        return tape.apply(operation)
    except MinimandError as error:
        raise located(error, str(operation)) from None
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ShapeError(f"{operation} does not take its input: {reason}") from None


def name_first_nonfinite(program: Program, inputs: Any, sources: Mapping[int, Tensor]) -> None:
    """Raise an error that names the first operation whose result is NaN or Inf."""

    def watch(operation: Operation, out: Any) -> None:
        if not all(bool(torch.isfinite(part).all()) for part in tensors(out) if part.is_floating_point()):
            raise NonFiniteError(f"the forward pass of {operation} is NaN or Inf; scale the inputs or lower the rate")

    forward(program, inputs, sources, watch)

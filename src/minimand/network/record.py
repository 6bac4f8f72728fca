"""The parts of a recorded run: values, frames and calls. The recorder fills them in while the network runs."""

import dataclasses
import itertools
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

__all__ = ["Call", "CallSite", "Context", "ModuleFrame", "Opaque", "Source", "Value"]

Source = Literal["input", "parameter", "buffer", "constant", "call", "unseen"]


@dataclasses.dataclass(eq=False)
class Value:
    """A tensor at one moment of the run. An in-place operation makes a new value of the same tensor.

    Attributes:
        index: Its position in ``Network.values``.
        source: Where it comes from. ``"constant"``: a tensor that is neither registered nor computed in the forward.
            ``"unseen"``: a tensor computed during the run by code that the recorder does not see.
        name: The path of a parameter, buffer or attribute, or the name of an input; otherwise empty.
        shape: Its shape.
        dtype: Its type.
        call: The index of the call that computed it; None for other sources.
        origins: The sources from which it was computed, and ``"random"`` where random numbers were drawn for it.
    """

    index: int
    source: Source
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    call: int | None = None
    origins: frozenset[str] = frozenset()


class CallSite(NamedTuple):
    """The expression that made a call: the compiled function that holds it, the index of the instruction in it, and the
    module whose method the function is; None for other functions."""

    code: types.CodeType
    instruction: int
    owner: nn.Module | None

    @property
    def span(self) -> tuple[int | None, int | None, int | None, int | None]:
        """First line, last line, first column and last column of the expression."""
        return next(itertools.islice(self.code.co_positions(), self.instruction, None))


@dataclasses.dataclass(eq=False)
class ModuleFrame:
    """One run of one module's forward.

    Attributes:
        index: Its position in ``Network.frames``.
        path: The module's path in the network; empty for the network itself.
        kind: The module's class name.
        run: How many times this module ran before.
        parent: The index of the frame that called it; None for the first.
        inputs: The tensors it was called with.
        place: The expression that called it.
        keywords: The names of its keyword arguments.
        outputs: The tensors it returned.
    """

    index: int
    path: str
    kind: str
    run: int
    parent: int | None
    inputs: tuple[Value, ...]
    place: CallSite
    keywords: tuple[str, ...] = ()
    outputs: tuple[Value, ...] = ()


@dataclasses.dataclass(frozen=True)
class Context:
    """The state of torch in which a call was made: whether gradients are on, and autocast's type per device."""

    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...] = ()


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a function of torch.

    Attributes:
        index: Its position in ``Network.calls``.
        frame: The index of the frame that made it.
        target: The function, such as ``torch.nn.functional.linear``. For a scripted module it is the module.
        name: The function's name.
        path: The path of the module whose forward made the call.
        args: The positional arguments, with a :class:`Value` in place of every tensor.
        kwargs: The keyword arguments, likewise.
        inputs: The values among the arguments.
        context: Gradient mode and autocast during the call.
        place: The expression that made the call.
        outputs: The values that it returned.
        mutates: Pairs of a value and the value that replaces it, for every tensor that the call changed in place,
            including known views of the same memory.
        opaque: Why the record does not tell all about this call; None where it does.
    """

    index: int
    frame: int
    target: Callable[..., Any]
    name: str
    path: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[Value, ...]
    context: Context
    place: CallSite
    outputs: tuple[Value, ...] = ()
    mutates: tuple[tuple[Value, Value], ...] = ()
    opaque: str | None = None

    @property
    def site(self) -> tuple[str, int]:
        """File and line of the code that made the call."""
        return self.place.code.co_filename, self.place.span[0] or 0

    @property
    def produces(self) -> tuple[Value, ...]:
        """The values that the call returned or wrote, each once."""
        return tuple(dict.fromkeys((*self.outputs, *(after for _, after in self.mutates))))

    @property
    def reads(self) -> tuple[Value, ...]:
        """The values that the call was given or changed, each once."""
        return tuple(dict.fromkeys((*self.inputs, *(before for before, _ in self.mutates))))

    def __repr__(self) -> str:
        return f"<{self.index}: {self.name} at {self.path or 'the network'}>"


@dataclasses.dataclass(frozen=True)
class Opaque:
    """A part of the network that the record does not explain.

    Attributes:
        where: The path of the module, or "the network".
        reason: Why, in one sentence without a full stop.
        call: The call that it concerns; None where it concerns the whole run.
    """

    where: str
    reason: str
    call: Call | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"

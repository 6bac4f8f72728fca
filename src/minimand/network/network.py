"""A network as it ran: the record, and the questions that it answers."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from . import graph, replay
from .graph import Line, Neighbors, ResidualBlock, SharedParameter
from .record import Call, ModuleFrame, Opaque, Value
from .running import Inputs

__all__ = ["Network"]


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """The record of one run of a network, made by :func:`minimand.network.read`.

    Attributes:
        model: The network itself.
        calls: The calls of functions of torch, in order.
        frames: The runs of its modules, in the order in which they began.
        values: The tensors.
        inputs: The tensors that the forward was called with.
        outputs: The tensors that it returned.
        training: Whether the network was in training mode.
        guessed: Whether the input was made up.
        complete: Whether the forward ran to its end.
        reasons: Why the record as a whole does not tell all; empty where it does.
        modes: The training flag of every module, by path.
        grad: Whether gradients were on when the forward was called.
        example: The positional and keyword arguments that it ran on.
        held: The tensors that are neither inputs nor registered nor computed, by the index of their value.
    """

    model: nn.Module
    calls: tuple[Call, ...]
    frames: tuple[ModuleFrame, ...]
    values: tuple[Value, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    training: bool
    guessed: bool
    complete: bool
    reasons: tuple[str, ...] = ()
    modes: Mapping[str, bool] = dataclasses.field(default_factory=dict, repr=False)
    grad: bool = True
    example: Inputs = dataclasses.field(default=((), {}), repr=False)
    held: Mapping[int, Tensor] = dataclasses.field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        state = "" if self.complete else ", incomplete"
        return f"Network({type(self.model).__name__}, {len(self.calls)} calls, {len(self.opaque())} opaque{state})"

    # -- values and calls -----------------------------------------------------------------------------------------

    def of(self, path: str) -> tuple[Call, ...]:
        """The calls made by the module at a path and by the modules below it.

        >>> from minimand.network import read
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
        >>> [call.name for call in read(net).of("1")]
        ['relu', 'linear']
        """
        return tuple(c for c in self.calls if not path or c.path == path or c.path.startswith(f"{path}."))

    def module(self, path: str) -> nn.Module:
        """The module at a path."""
        return self._modules[path]

    def producer(self, value: Value) -> Call | None:
        """The call that computed a value; None for inputs, parameters, buffers and constants."""
        return None if value.call is None else self.calls[value.call]

    def readers(self, source: Call | Value) -> tuple[Call, ...]:
        """The calls that take a value, or any value that a call produced, as an argument.

        Asking a tensor for its shape, type or device is no call.
        """
        values = source.produces if isinstance(source, Call) else (source,)
        found = {call.index: call for value in values for call in self._readers.get(value.index, ())}
        return tuple(found[index] for index in sorted(found))

    def ancestors(self, value: Value) -> frozenset[Value]:
        """All values from which a value was computed, without itself."""
        return graph.ancestors(self, (value,)) - {value}

    def depends(self, value: Value) -> bool:
        """Whether a value is an input of the network, was computed from one, or is of unknown origin."""
        return not value.origins.isdisjoint(("input", "unseen"))

    @functools.cached_property
    def live(self) -> tuple[Call, ...]:
        """The calls from which the outputs were computed, in order."""
        needed = graph.ancestors(self, self.outputs)
        return tuple(call for call in self.calls if any(value in needed for value in call.produces))

    def is_live(self, call: Call) -> bool:
        """Whether the outputs were computed from what a call produced."""
        return call in self._live

    # -- structure ------------------------------------------------------------------------------------------------

    def neighbors(self, call: Call) -> Neighbors:
        """The dropout directly before a layer's call, and the normalisation, addition and activation directly after it.

        Reshapings may stand between the dropout and the layer, and before the activation. A call after the layer counts
        only if it alone reads the value before it. What does not exist is None.

        >>> from minimand.network import read, role
        >>> net = read(nn.Sequential(nn.Dropout(), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()))
        >>> found = net.neighbors(net.of("1")[0])
        >>> found.dropout.path, found.norm.path, found.skip, found.activation.path
        ('0', '2', None, '3')
        """
        return graph.neighbors(self, call)

    neighbours = neighbors

    def chain(self) -> Line:
        """The steps from the input to the output, if each takes exactly the output of the one before.

        A network with an opaque part between input and output is not a chain.

        >>> from minimand.network import read
        >>> line = read(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU())).chain()
        >>> [step.path for step in line.steps], line.broken
        (['0', '1', '2'], None)
        """
        return graph.chain(self)

    def residuals(self) -> tuple[ResidualBlock, ...]:
        """The additions of a branch with parameters and a shorter way around it, which may hold a downsampling."""
        return graph.residuals(self)

    def shared(self) -> tuple[SharedParameter, ...]:
        """The parameters that have several names, or that several calls read.

        >>> from minimand.network import read
        >>> layer = nn.Linear(3, 3)
        >>> [(found.names, len(found.calls)) for found in read(nn.Sequential(layer, layer)).shared()]
        [(('0.weight', '1.weight'), 2), (('0.bias', '1.bias'), 2)]
        """
        return graph.shared(self)

    # -- trust ----------------------------------------------------------------------------------------------------

    def opaque(self) -> tuple[Opaque, ...]:
        """All that the record does not explain, with the reasons."""
        whole = [Opaque("the network", reason) for reason in self.reasons]
        marked = [(call, call.opaque) for call in self.calls if call.opaque is not None]
        return (*whole, *(Opaque(call.path or "the network", reason, call) for call, reason in marked))

    def recompute(self, example: Any) -> tuple[Tensor, ...]:
        """The outputs for another input of the same shapes, from the record alone.

        The calls run again in their order, with the present parameters and buffers. The network's own code does not
        run. The state of the network and the random state are left as they were.
        """
        return replay.recompute(self, example)

    def verify(self, example: Any) -> bool:
        """Whether the record computes what the network computes, to the bit, on another input of the same shapes.

        Both run in the mode of the record and from the same random state. torch's fused kernels for transformer
        layers in evaluation are switched off for this comparison, since they cannot be recorded.

        >>> import torch
        >>> from minimand.network import read
        >>> read(nn.Sequential(nn.Linear(3, 4), nn.Dropout())).verify(torch.randn(2, 3))
        True
        """
        return replay.verify(self, example)

    # -- indices --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _modules(self) -> dict[str, nn.Module]:
        return dict(self.model.named_modules())  # scripted modules have no get_submodule

    @functools.cached_property
    def _readers(self) -> dict[int, list[Call]]:
        found: dict[int, list[Call]] = {}
        for call in self.calls:
            for value in dict.fromkeys(call.inputs):
                found.setdefault(value.index, []).append(call)
        return found

    @functools.cached_property
    def _live(self) -> frozenset[Call]:
        return frozenset(self.live)

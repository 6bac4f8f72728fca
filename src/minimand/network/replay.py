"""Recomputing a network from its record."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import ShapeError
from .nested import replace, tensors
from .record import Context, Value
from .running import Inputs, bound, copied, eager, set_mode, unwrapped
from .state import Saved, preserved

if TYPE_CHECKING:
    from .network import Network

__all__ = ["recompute", "returned", "same_bits", "verify"]


class _Inert(TorchFunctionMode):
    """Changes nothing, but keeps torch from taking fused paths that no function mode sees, as recording does."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def recompute(network: "Network", example: Any) -> tuple[Tensor, ...]:
    """See :meth:`Network.recompute`."""
    with preserved(network.model) as saved, torch.inference_mode(False), eager():
        args, kwargs = copied(bound(example))
        given = list(tensors((args, kwargs)))
        if len(given) != len(network.inputs):
            raise ShapeError(f"the record has {len(network.inputs)} input tensors, got {len(given)}")
        _save_generators(network, saved)
        known = _sources(network, copies=True)
        known.update({value.index: tensor for value, tensor in zip(network.inputs, given, strict=True)})
        for call in network.calls:
            arguments = replace((call.args, dict(call.kwargs)), Value, lambda value: known[value.index])
            with _within(call.context):
                result = call.target(*arguments[0], **arguments[1])
            known.update({after.index: known[before.index] for before, after in call.mutates})
            # A tensor that the call changed in place is what it returned, too.
            known.update({v.index: t for v, t in zip(call.outputs, tensors(result), strict=True)})
        return tuple(known[value.index].detach().clone() for value in network.outputs)


def verify(network: "Network", example: Any) -> bool:
    """See :meth:`Network.verify`."""
    if not network.complete:
        return False
    own = returned(network, network.model, bound(example), network.modes)
    try:
        again = recompute(network, example)
    except (RuntimeError, ValueError, TypeError, IndexError):  # a record that does not fit the input
        return False
    return len(own) == len(again) and all(map(same_bits, own, again))


def returned(network: "Network", model: nn.Module, inputs: Inputs, modes: bool | Mapping[str, bool]) -> list[Tensor]:
    """The tensors that the network of a record, or a changed copy, returns in given modes, without leaving a trace."""
    with preserved(model) as saved, torch.inference_mode(False), eager():
        for index, tensor in _sources(network, copies=False).items():
            if index in _changed(network):
                saved.add(tensor)
        _save_generators(network, saved)
        set_mode(model, modes)
        args, kwargs = copied(inputs)
        with _Inert(), torch.set_grad_enabled(network.grad):
            output = unwrapped(model)(*args, **kwargs)
        return [tensor.detach().clone() for tensor in tensors(output)]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, type and entries; NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if torch.equal(one, other):
        return True
    return bool(((one == other) | (one.isnan() & other.isnan())).all()) if one.dtype.is_floating_point else False


def _changed(network: "Network") -> set[int]:
    """The values that calls change in place."""
    return {before.index for call in network.calls for before, _ in call.mutates}


def _save_generators(network: "Network", saved: Saved) -> None:
    for call in network.calls:
        if isinstance(call.kwargs.get("generator"), torch.Generator):
            saved.add_generator(call.kwargs["generator"])


def _sources(network: "Network", copies: bool) -> dict[int, Tensor]:
    """The present parameters and buffers, and the held constants; copies, if asked, of those that calls change."""
    changed = _changed(network) if copies else ()
    named: dict[str, Tensor] = dict(network.model.named_parameters(remove_duplicate=False))
    named.update(network.model.named_buffers(remove_duplicate=False))
    found = {}
    for value in network.values:
        if value.source in ("parameter", "buffer") or value.index in network.held:
            tensor = named[value.name] if value.source in ("parameter", "buffer") else network.held[value.index]
            found[value.index] = tensor.detach().clone() if value.index in changed else tensor
    return found


@contextlib.contextmanager
def _within(context: Context) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(context.grad))
        for device, dtype in context.autocast:
            stack.enter_context(torch.autocast(device, dtype))
        yield

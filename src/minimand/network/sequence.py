"""The layers that a network calls in turn, as modules."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import nn

from ..arguments import checked
from ..errors import MinimandError, OptionError
from ..functions.activations import activation_module, from_activation
from .graph import is_layer
from .reading import read
from .record import Call, Value
from .roles import role

__all__ = ["SequencePart", "activation_of", "sequence"]

_FLATTENS = {"flatten", "reshape", "view", "squeeze", "reshape_as", "view_as"}
_POOLS: dict[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    "max_pool2d": (nn.MaxPool2d, ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")),
    "avg_pool2d": (
        nn.AvgPool2d,
        ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
    ),
}
_CLAMPS = {"clamp": ("min", "max"), "clip": ("min", "max"), "clamp_min": ("min",), "clamp_max": ("max",)}


@dataclasses.dataclass(frozen=True, eq=False)
class SequencePart:
    """One layer of a sequence.

    Attributes:
        path: Its path in the network, or, for a call outside of a layer, words such as "the call of relu".
        module: The module that computes it: the network's own, or a new one that computes the same as the call.
        broken: Why this module is not a sequence of layers itself; None where it is a single layer or call.
        call: The call for which torch has no module, where that is why.
    """

    path: str
    module: nn.Module
    broken: str | None = None
    call: Call | None = None


@checked
def sequence(model: nn.Module, example: Any = None) -> tuple[SequencePart, ...]:
    """The layers that a network calls in turn, each on the output of the one before.

    The parts of a plain ``nn.Sequential`` are called in turn by definition. Any other module with submodules is read in
    training mode. If it turns out to be a chain, the steps of the chain take its place; otherwise it is one part, whose
    ``broken`` says why. Modules without submodules and layers of torch are one part.

    Args:
        model: The network.
        example: An input, as for :func:`read`, for a network that is not an ``nn.Sequential``. Parts of an
            ``nn.Sequential`` are read with made-up inputs.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.fc = nn.Linear(4, 3)
    ...
    ...     def forward(self, x):
    ...         return F.relu(self.fc(x.view(x.size(0), -1)))
    >>> [(part.path, type(part.module).__name__) for part in sequence(nn.Sequential(Block(), nn.Linear(3, 2)))]
    [('the call of view in 0', 'Flatten'), ('0.fc', 'Linear'), ('the call of relu in 0', 'ReLU'), ('1', 'Linear')]
    """
    return tuple(_parts(model, "", example))


def _parts(module: nn.Module, path: str, example: Any = None) -> Iterator[SequencePart]:
    if _is_plain_sequential(module):
        for name, child in module._modules.items():  # a module that comes twice is called twice
            if child is not None:
                yield from _parts(child, f"{path}.{name}" if path else name)
    elif is_layer(module):
        yield SequencePart(path, module)
    else:
        yield from _opened(module, path, example)


def _is_plain_sequential(module: nn.Module) -> bool:
    """Whether a module calls its parts in turn and does nothing else."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return False
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _opened(module: nn.Module, path: str, example: Any) -> list[SequencePart]:
    """The parts of a module whose forward has to be read; itself, where it is no sequence."""
    network = read(module, example, training=True)
    line = network.chain()
    if line.broken is not None:
        return [SequencePart(path, module, line.broken)]
    found = []
    for step in line.steps:
        if step.frame is not None:
            found.append(SequencePart(f"{path}.{step.path}" if path else step.path, network.module(step.path)))
            continue
        call = step.calls[0]
        inside = ".".join(filter(None, (path, step.path)))
        where = f"the call of {call.name}" + (f" in {inside}" if inside else "")
        if (made := _module(call)) is None:
            return [SequencePart(path, module, f"{where} is not a layer", call)]
        found.append(SequencePart(where, made))
    return found


def _module(call: Call) -> nn.Module | None:
    """A module that computes the same as a call; None where torch has none, or where its options are tensors."""
    args, kwargs = _options(call)
    if any(isinstance(option, Value) for option in (*args, *kwargs.values())):
        return None
    kind = role(call)
    if kind == "identity":
        return nn.Identity()
    if kind == "dropout" and call.target is F.dropout:
        given = {"p": 0.5, "training": True} | dict(zip(("p", "training"), args, strict=False)) | kwargs
        return nn.Dropout(given["p"]) if given["training"] else nn.Identity()
    if kind == "pool" and call.name in _POOLS:
        make, names = _POOLS[call.name]
        return make(**(dict(zip(names, args, strict=False)) | kwargs))
    if kind == "reshape":
        before, after = call.inputs[0].shape, call.outputs[0].shape
        flat = len(before) > 1 and after == (before[0], math.prod(before[1:]))
        return nn.Flatten() if flat and call.name in _FLATTENS else None
    try:
        return activation_of(call) if kind == "activation" else None
    except MinimandError:
        return None


def _options(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call other than its input."""
    kwargs = {name: option for name, option in call.kwargs.items() if name != "input"}
    return (call.args if "input" in call.kwargs else call.args[1:]), kwargs


def activation_of(call: Call) -> nn.Module:
    """The module that computes the same as the call of an activation.

    Raises:
        MinimandError: If the activation is not a prox, or has options that are tensors.
    """
    name, (args, kwargs) = call.name.rstrip("_"), _options(call)
    if name not in _CLAMPS:
        from_activation(call.target)
    if any(isinstance(option, Value) for option in (*args, *kwargs.values())):
        raise OptionError(f"the options of {call.name} are tensors; use numbers")
    if name not in _CLAMPS:
        return activation_module(call.target, *args, **kwargs)
    given = dict(zip(_CLAMPS[name], args, strict=False)) | kwargs
    low, high = given.get("min"), given.get("max")
    if low == 0 and high is None:
        return nn.ReLU()
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    if not low < high:
        raise OptionError(f"{call.name} between {low} and {high} is constant")
    return nn.Hardtanh(low, high)

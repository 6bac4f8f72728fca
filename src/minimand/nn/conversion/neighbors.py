"""The neighbours of a layer in a record: dropout before it; normalisation, addition and activation after it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import MinimandError
from ...functions import Function, Zero, from_activation
from ...functions.activations import is_activation
from ...network import Network
from ...network.graph import Neighbors, before, operand
from ...network.record import Call, ModuleFrame, Value
from ...network.recorder import DATA_READS
from ...network.sequence import activation_of
from ..dropout import AdditiveDropout, ImportanceDropout
from .block import BLOCKS

__all__ = ["After", "Dropout", "Join", "Obstacle", "after", "dropout_before"]

_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_LEAVE = "or use Rule(..., activation=None) to convert the layer without its activation"


class Obstacle(Exception):
    """The reason why a layer cannot be converted, and the remedy."""


class Join(NamedTuple):
    """The addition of a skip: the run of the layer, the addition, and the index of the layer's operand."""

    frame: ModuleFrame
    add: Call
    operand: int


class After(NamedTuple):
    """What follows a call of a layer: the function of its activation and the activation's name, and the normalisation
    and the addition before that; or the name of a normalisation that is no affine map and stays outside."""

    function: Function = Zero()
    name: str = ""
    norm: nn.Module | None = None
    join: Join | None = None
    stays: str = ""


class Dropout(NamedTuple):
    """The dropout before a call of a layer: its probability, the units that it drops, its call, and the run of the
    module that made the call; None for a function."""

    p: float
    unit: str
    call: Call
    frame: ModuleFrame | None = None


#: Dropouts with the units that they drop.
_DROPOUTS: Mapping[Any, str] = {
    **dict.fromkeys((F.dropout, torch.dropout, torch.dropout_), "entries"),
    **dict.fromkeys((F.alpha_dropout, torch.alpha_dropout, F.feature_alpha_dropout), "alpha"),
    **dict.fromkeys((F.dropout2d, torch.feature_dropout), "channels of a map"),
    F.dropout1d: "channels of a sequence",
    F.dropout3d: "channels of a volume",
}
#: The layers whose inputs have these units.
_MAPS: Mapping[str, tuple[type[nn.Module], ...]] = {
    "channels of a sequence": (nn.Conv1d, nn.ConvTranspose1d),
    "channels of a map": (nn.Conv2d, nn.ConvTranspose2d),
    "channels of a volume": (nn.Conv3d,),
}
_SAMPLED: Mapping[type[nn.Module], str] = {ImportanceDropout: "importance", AdditiveDropout: "additive"}


def module_of(network: Network, call: Call) -> nn.Module | None:
    """The module of torch whose own forward made a call."""
    module = network.module(call.path)
    own = type(module).__module__.startswith("torch.nn.modules.")
    return module if own and call.place.owner is module else None


def describe(network: Network, call: Call) -> str:
    """The name of the module or function that a call belongs to."""
    module = module_of(network, call)
    alone = module is not None and next(module.children(), None) is None
    return f"{call.path} ({type(module).__name__})" if alone else call.name


def _activation(network: Network, call: Call) -> tuple[Function, str]:
    module = module_of(network, call)
    try:
        act = module if module is not None and is_activation(module) else activation_of(call)
        return from_activation(act), describe(network, call)
    except MinimandError as error:
        raise Obstacle(f"{error} ({_LEAVE})") from None


def after(network: Network, layer: Call, is_target: Callable[[Call], bool]) -> After:
    """The batch normalisation, addition and activation that follow a layer, if nothing else reads its output.

    Softmax acts on vectors and does not count. ``is_target`` tells whether a call is that of another layer to convert.
    If two such layers are added, the first one takes in the addition.
    """
    found = network.neighbors(layer)
    norm = None if found.norm is None else module_of(network, found.norm)
    if found.rivals:
        act, *others = (describe(network, call) for call in found.rivals)
        raise Obstacle(
            f"its output goes to {act}, but also to {', '.join(others) or 'the output'}, which needs the "
            f"pre-activation; use Rule(..., activation=None) to leave the activation in place"
        )
    if found.norm is not None and not isinstance(norm, _BATCH_NORM):
        return After(stays=describe(network, found.norm))
    if norm is not None:
        _check_norm(norm, layer)
    if found.skip is not None:
        return _added(network, layer, norm, found, is_target)
    if found.activation is None:
        return After(norm=norm)
    return After(*_activation(network, found.activation), norm)


def _check_norm(norm: Any, layer: Call) -> None:
    plain: Any = layer.place.owner
    fits = any(isinstance(plain, kind) and type(norm) is match for kind, (_, _, match) in BLOCKS.items())
    if not fits or (plain.out_features if isinstance(plain, nn.Linear) else plain.out_channels) != norm.num_features:
        raise Obstacle(
            f"the {type(norm).__name__} between it and its activation is not a plain batch normalisation of its "
            f"outputs, so it cannot be folded into the layer; use Rule(..., activation=None) to leave it in place"
        )


def _added(
    network: Network, layer: Call, norm: nn.Module | None, found: Neighbors, is_target: Callable[[Call], bool]
) -> After:
    """Take in a skip, if the forward that calls the layer adds it and only an activation reads the sum."""
    outside, frame, add = After(norm=norm), network.frames[layer.frame], found.skip
    if found.activation is None or add is None or add.args[0] is add.args[1]:
        return outside
    # The forward of another module, or a hook, may stand between; or the layer's input changes before the addition.
    changed = {before for call in network.calls[layer.index : add.index] for before, _ in call.mutates}
    inputs = frame.inputs[:1]
    if add.place[::2] != frame.place[::2] or add.frame != frame.parent or inputs != (operand(network, layer),):
        return outside
    first: Value = add.args[0]
    index = 0 if layer.outputs[0] in {first, *network.ancestors(first)} else 1
    if inputs[0] in changed or (index == 1 and _leads_back(network, first, is_target)):
        return outside
    try:
        return After(*_activation(network, found.activation), norm, Join(frame, add, index))
    except Obstacle:  # not a prox, but not directly after the layer either
        return outside


def _leads_back(network: Network, value: Value, is_target: Callable[[Call], bool]) -> bool:
    """Whether a value is the output of a layer to convert, possibly normalised."""
    while (call := network.producer(value)) is not None:
        if not isinstance(module_of(network, call), _BATCH_NORM):
            return is_target(call)
        value = call.inputs[0]
    return False


def dropout_before(network: Network, call: Call, layer: nn.Module) -> Dropout | None:
    """The dropout before a layer, if a solver of this layer can sample in its place.

    A reshape may follow elementwise dropout, because the two commute. Channel dropout must have the dimension of the
    convolution.
    """
    for made, value, reshaped in before(network, call):
        if (found := _dropout_at(network, made, value)) is not None:
            return found if _fits(found, layer, reshaped) else None
    return None


def _dropout_at(network: Network, call: Call, value: Value) -> Dropout | None:
    frame: ModuleFrame | None = network.frames[call.frame]
    while frame is not None:
        module: Any = network.module(frame.path)
        if type(module) in _SAMPLED and value in frame.outputs:
            return Dropout(module.p, _SAMPLED[type(module)], call, frame)
        frame = None if frame.parent is None else network.frames[frame.parent]
    if call.target not in _DROPOUTS:
        return None
    given = dict(zip(("input", "p", "training"), call.args, strict=False)) | dict(call.kwargs)
    p, training = given.get("p", 0.5), given.get("train", given.get("training", _DROPOUTS[call.target] != "alpha"))
    if isinstance(p, Value) or isinstance(training, Value):
        return None
    own = isinstance(module_of(network, call), nn.modules.dropout._DropoutNd)
    frame = network.frames[call.frame] if own else None
    return Dropout(float(p) if training else 0.0, _DROPOUTS[call.target], call, frame)


def _fits(dropout: Dropout, layer: nn.Module, reshaped: bool) -> bool:
    return dropout.unit not in _MAPS or (isinstance(layer, _MAPS[dropout.unit]) and not reshaped)


def is_alone(network: Network, dropout: Dropout, takes: Callable[[Call], bool]) -> bool:
    """Whether only one call, or only layers that sample in its place, read what a dropout returns."""
    readers = [call for call in network.readers(dropout.call) if network.is_live(call)]
    if any(value in network.outputs for value in dropout.call.produces):
        return False
    return len(readers) == 1 or all(map(takes, readers))


def may_branch(network: Network, first: Call, second: Call) -> bool:
    """Whether a forward that makes one of two calls decides by data or by random numbers what it calls."""
    lines = [_line(network, call) for call in (first, second)]
    shared = [index for index in lines[0] if index in lines[1]]
    frames = {*lines[0], *lines[1]} - set(shared[1:])  # the forward that makes both calls, and those inside it
    own = {i for i in frames if not type(network.module(network.frames[i].path)).__module__.startswith("torch.nn.")}
    random = any("draws from" in reason for reason in network.reasons)
    return bool(own) and (random or any(c.opaque and c.name in DATA_READS and c.frame in own for c in network.calls))


def _line(network: Network, call: Call) -> list[int]:
    """The frames around a call, the innermost first."""
    found: list[int] = []
    index: int | None = call.frame
    while index is not None:
        found.append(index)
        index = network.frames[index].parent
    return found

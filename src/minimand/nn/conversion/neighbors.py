"""The neighbours of a layer in a graph: dropout before it, normalisation, addition and activation after it."""

import dataclasses
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ...errors import MinimandError
from ...functions import Function, from_activation
from ...functions.activations import activation_module, is_activation
from .trace import Traced

__all__ = ["Activation", "After", "Dropout", "Obstacle", "Skip", "after", "dropout_before"]


class Obstacle(Exception):
    """The reason why a layer cannot be converted, and the remedy."""


@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation; equal activations have equal names."""

    function: Function
    name: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Skip:
    """A tensor that is added before the activation: the calls from the layer to the addition, the addition, and the
    index of the layer's operand."""

    chain: tuple[fx.Node, ...]
    add: fx.Node
    operand: int


@dataclasses.dataclass(frozen=True)
class After:
    """The calls after a layer that it absorbs: activation, normalisation and skip."""

    activation: Activation
    node: fx.Node | None = None
    norm: fx.Node | None = None
    skip: Skip | None = None


@dataclasses.dataclass(frozen=True)
class Dropout:
    """The dropout before one call of a layer: its probability, and the units that it drops."""

    p: float
    unit: str
    inplace: bool = False
    node: fx.Node | None = None


#: Dropout modules with their functions, and the units that they drop.
_DROPOUTS: Mapping[tuple[type[nn.Module], Any], str] = {
    (nn.Dropout, F.dropout): "entries",
    (nn.Dropout1d, F.dropout1d): "channels of a sequence",
    (nn.Dropout2d, F.dropout2d): "channels of a map",
    (nn.Dropout3d, F.dropout3d): "channels of a volume",
    (nn.AlphaDropout, F.alpha_dropout): "alpha",
    (nn.FeatureAlphaDropout, F.feature_alpha_dropout): "alpha",
}
_DROPOUT_FUNCTIONS: Mapping[Any, str] = {function: unit for (_, function), unit in _DROPOUTS.items()}
_ALIASES: Mapping[Any, Any] = {
    torch.dropout: F.dropout,
    torch.dropout_: F.dropout,
    torch.alpha_dropout: F.alpha_dropout,
    torch.feature_dropout: F.dropout2d,
}
_RESHAPES = (torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze)
_RESHAPE_METHODS = ("flatten", "reshape", "view", "squeeze", "unsqueeze", "contiguous")
_SIZE_METHODS = ("size", "dim", "numel", "ndimension", "nelement", "is_contiguous", "stride")
_SIZE_ATTRIBUTES = ("shape", "ndim", "dtype", "device")

_LEAVE = "or use Rule(..., activation=None) to convert the layer without its activation"
IDENTITY = Activation(from_activation("identity"), (nn.Identity,))


def readers_of(node: fx.Node) -> list[fx.Node]:
    """The users of a node's values; reading its size does not count."""
    return [user for user in node.users if not _asks_size(user)]


def _asks_size(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _SIZE_METHODS
    return node.op == "call_function" and node.target is getattr and node.args[1] in _SIZE_ATTRIBUTES


def _source(node: fx.Node) -> fx.Node | None:
    """The tensor that an elementwise call acts on."""
    source = node.args[0] if node.args else node.kwargs.get("input")
    return source if isinstance(source, fx.Node) else None


def activation_of(module: nn.Module) -> Activation:
    """A module's function."""
    options = {k: v for k, v in vars(module).items() if not k.startswith("_") and k not in ("training", "inplace")}
    try:
        return Activation(from_activation(module), (type(module), *sorted(options.items())))
    except MinimandError as error:
        raise Obstacle(f"{error} ({_LEAVE})") from None


def _activation_module(node: fx.Node, traced: Traced) -> nn.Module | None:
    """The activation that a node applies, as a module; None if it applies none.

    Softmax does not count: it acts on vectors, and belongs to the loss or to an attention.
    """
    if (module := traced.module(node)) is not None:
        return module if is_activation(module) else None
    target: Any = node.target
    if node.op == "call_method":
        target = getattr(torch.Tensor, str(target), None)
    if node.op not in ("call_function", "call_method"):
        return None
    if target in _CLAMPS:
        return _clamp(node, _CLAMPS[target])
    if not is_activation(target):
        return None
    from_activation(target)  # raises if the activation is not a prox for any options
    args, options = node.args[1:], {key: value for key, value in node.kwargs.items() if key != "input"}
    if any(isinstance(value, fx.Node) for value in (*args, *options.values())):
        raise Obstacle(f"the options of {target.__name__} after it depend on the input; use constants")
    return activation_module(target, *args, **options)


_CLAMPS: Mapping[Any, tuple[str, ...]] = {
    torch.clamp: ("min", "max"),
    torch.clamp_: ("min", "max"),
    torch.Tensor.clamp: ("min", "max"),
    torch.Tensor.clamp_: ("min", "max"),
    torch.clamp_min: ("min",),
    torch.Tensor.clamp_min: ("min",),
    torch.Tensor.clamp_min_: ("min",),
}


def _clamp(node: fx.Node, names: tuple[str, ...]) -> nn.Module | None:
    """ReLU or Hardtanh for clamps with constant bounds; None for others."""
    given = dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
    low, high = given.get("min"), given.get("max")
    if low == 0 and high is None:
        return nn.ReLU()
    if isinstance(low, int | float) and isinstance(high, int | float) and low <= high:
        return nn.Hardtanh(low, high)
    return None


def after(layer: fx.Node, traced: Traced, is_target: Callable[[fx.Node], bool]) -> After:
    """The batch normalisation, addition and activation that follow a layer, if nothing else reads its output.

    ``is_target`` tells whether a node calls another layer to convert. If two such layers are added, the first one
    absorbs the addition.
    """
    found = After(IDENTITY)
    chain = [layer]
    while True:
        node = chain[-1]
        readers = readers_of(node)
        activations = [reader for reader in readers if _is_activation(reader, node, traced)]
        if activations and (len(readers) == 1 or _overwrites(activations[0], readers, traced)):
            activation = _activation_module(activations[0], traced)
            assert activation is not None
            return dataclasses.replace(found, activation=activation_of(activation), node=activations[0])
        if activations:
            others = ", ".join(traced.describe(reader) for reader in readers if reader is not activations[0])
            raise Obstacle(
                f"its output goes to {traced.describe(activations[0])}, but also to {others}, which needs the "
                f"pre-activation; use Rule(..., activation=None) to leave the activation in place"
            )
        if len(readers) != 1:
            return found
        reader = readers[0]
        module = traced.module(reader)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and found.norm is None and _source(reader) is node:
            _check_norm(module, layer, traced, reader)
            found = dataclasses.replace(found, norm=reader)
        elif type(module) is not nn.Identity:
            return _added(found, chain, reader, traced, is_target)
        chain.append(reader)


def _check_norm(norm: Any, layer: fx.Node, traced: Traced, reader: fx.Node) -> None:
    expected = {nn.Linear: nn.BatchNorm1d, nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d}
    plain: Any = traced.module(layer)
    fits = any(isinstance(plain, kind) and type(norm) is match for kind, match in expected.items())
    if not fits or plain.weight.shape[0] != norm.num_features:
        raise Obstacle(
            f"{traced.describe(reader)} between it and its activation is not a plain batch normalisation of its "
            f"outputs, so it cannot be folded into the layer; use Rule(..., activation=None) to leave it in place"
        )


def _added(
    found: After, chain: list[fx.Node], add: fx.Node, traced: Traced, is_target: Callable[[fx.Node], bool]
) -> After:
    """Absorb a skip, if the layer's own forward adds it and only an activation reads the sum."""
    operands = operands_of(add)
    readers = readers_of(add)
    try:
        if operands is None or len(readers) != 1 or not _is_activation(readers[0], add, traced):
            return found
    except Obstacle:  # not a prox, but not directly after the layer either
        return found
    if any(traced.frame[node] is not traced.frame[add] for node in chain):
        return found
    source = _source(chain[0])
    if source is None or any(_is_inplace(user, traced) for user in source.users):
        return found  # the layer is called after the skip is computed, and its input might have changed by then
    operand = operands.index(chain[-1])
    if operand == 1 and _leads_back(operands[0], traced, is_target):
        return found
    activation = _activation_module(readers[0], traced)
    assert activation is not None
    skip = Skip(tuple(chain), add, operand)
    return dataclasses.replace(found, activation=activation_of(activation), node=readers[0], skip=skip)


def operands_of(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two tensors that a node adds."""
    adds = node.op == "call_function" and node.target in (operator.add, operator.iadd, torch.add)
    adds = adds or (node.op == "call_method" and node.target in ("add", "add_", "__add__", "__iadd__"))
    match node.args:
        case (fx.Node() as left, fx.Node() as right) if adds and not node.kwargs and left is not right:
            return left, right
    return None


def _leads_back(node: fx.Node, traced: Traced, is_target: Callable[[fx.Node], bool]) -> bool:
    """Whether a value is the output of a layer to convert, possibly normalised."""
    while isinstance(traced.module(node), nn.modules.batchnorm._BatchNorm | nn.Identity):
        source = _source(node)
        if source is None:
            return False
        node = source
    return is_target(node)


def _overwrites(activation: fx.Node, readers: list[fx.Node], traced: Traced) -> bool:
    """Whether an in-place activation precedes all other readers, which therefore read its result."""
    return _is_inplace(activation, traced) and not activation.users and readers[0] is activation


def _is_inplace(node: fx.Node, traced: Traced) -> bool:
    name = str(getattr(node.target, "__name__", node.target))
    named = node.op != "call_module" and name.endswith("_") and not name.endswith("__")
    return named or bool(node.kwargs.get("inplace")) or bool(getattr(traced.module(node), "inplace", False))


def _is_activation(reader: fx.Node, node: fx.Node, traced: Traced) -> bool:
    try:
        return _source(reader) is node and _activation_module(reader, traced) is not None
    except MinimandError as error:
        raise Obstacle(f"{error} ({_LEAVE})") from None


def dropout_of(module: Any) -> Dropout | None:
    """The dropout that a module applies; None if it is not a dropout."""
    for (kind, _), unit in _DROPOUTS.items():
        if isinstance(module, kind) and type(module).forward is kind.forward:
            given = vars(module)
            return Dropout(given["p"], unit, given["inplace"])
    return None


def _dropout_at(node: fx.Node, traced: Traced) -> Dropout | None:
    if (module := traced.module(node)) is not None:
        found = dropout_of(module)
        return None if found is None else dataclasses.replace(found, node=node)
    target: Any = _ALIASES.get(node.target, node.target) if node.op == "call_function" else None
    if target not in _DROPOUT_FUNCTIONS:
        return None
    names = list(inspect.signature(target).parameters)
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    given = {"p": 0.5, "training": target is F.dropout, "inplace": False, **given}
    p, training = given["p"], given.get("train", given["training"])
    if isinstance(p, fx.Node) or isinstance(training, fx.Node):
        return None
    return Dropout(float(p) if training else 0.0, _DROPOUT_FUNCTIONS[target], bool(given["inplace"]), node)


def dropout_before(node: fx.Node, traced: Traced, layer: nn.Module) -> Dropout | None:
    """The dropout before a layer, if a solver of this layer can sample in its place.

    A reshape may follow elementwise dropout, because the two commute. Channel dropout must have the dimension of the
    convolution.
    """
    reshaped = False
    source = _source(node)
    while source is not None:
        found = _dropout_at(source, traced)
        if found is not None:
            return found if _fits(found, layer, reshaped) else None
        if len(readers_of(source)) != 1:
            return None
        if type(traced.module(source)) is not nn.Identity:
            if not _reshapes(source, traced):
                return None
            reshaped = True
        source = _source(source)
    return None


def _reshapes(node: fx.Node, traced: Traced) -> bool:
    if (module := traced.module(node)) is not None:
        return isinstance(module, nn.Flatten | nn.Unflatten)
    return node.target in (_RESHAPE_METHODS if node.op == "call_method" else _RESHAPES)


def _fits(dropout: Dropout, layer: nn.Module, reshaped: bool) -> bool:
    if dropout.unit in ("entries", "alpha"):
        return True
    if dropout.unit == "channels of a sequence":
        return isinstance(layer, nn.Conv1d) and not reshaped
    return dropout.unit == "channels of a map" and isinstance(layer, nn.Conv2d) and not reshaped


def shares_input(dropout: Dropout) -> bool:
    """Whether an in-place dropout changes a tensor that has other readers."""
    assert dropout.node is not None
    source = _source(dropout.node)
    return dropout.inplace and source is not None and len(readers_of(source)) > 1

"""Changing a model as planned, checking that it calls the changed layers, and undoing the changes.

Parameters, hooks, attributes and ``state_dict`` keys stay.
"""

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import ConversionError
from ...functions.learned import LearnedHinge
from ...network import Network, role
from ...network.replay import returned, same_bits
from ...network.running import raised
from ...network.state import preserved, snapshot
from ..layers import COMPUTED, SolverLayer
from .block import BlockLayer
from .clone import INTERNAL, ORIGINAL, clone
from .edit import EditedMethod, Edits
from .plan import Plan, solver_layer

__all__ = ["adopt", "apply", "changed", "install_edits", "is_converted", "undo"]

_ADDED = "_minimand_added"
_REPLACED = "_minimand_replaced"
#: In evaluation torch's transformers read the weights of their layers unless these attributes forbid it.
_FUSED: Mapping[type[nn.Module], tuple[str, Any]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}


class Original(NamedTuple):
    """The plain layer that a solver layer replaces, and the names of the solver layer's own attributes."""

    module: nn.Module
    own: frozenset[str]


def is_converted(module: nn.Module) -> bool:
    """Whether the module was changed by a conversion."""
    own = vars(module)
    edited = any(isinstance(value, EditedMethod) for value in own.values())
    return edited or ORIGINAL in own or _ADDED in own or own.get("forward") is passed


def install(plain: nn.Module, layer: SolverLayer) -> None:
    """Give a solver layer the hooks, tensors and attributes of the plain layer that it replaces."""
    theirs = vars(plain)
    own, learned = frozenset(vars(layer)) - INTERNAL - set(COMPUTED), layer._parameters.get("strength")
    vars(layer).update({name: value for name, value in theirs.items() if name != "_modules" and name not in own})
    if learned is not None:
        vars(layer)["_parameters"] = {**plain._parameters, "strength": learned}
    layer._modules.update(plain._modules)
    vars(layer)[ORIGINAL] = Original(plain, own | {ORIGINAL})


def exchange(model: nn.Module, pairs: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules by others wherever modules, and the containers that are their attributes, refer to them."""
    for module in list(model.modules()):
        for name, value in vars(module).items():
            if name not in INTERNAL or name == "_modules":
                vars(module)[name] = _exchanged(value, pairs)


def _exchanged(value: Any, pairs: Mapping[nn.Module, nn.Module], depth: int = 8) -> Any:
    if isinstance(value, nn.Module):
        return pairs.get(value, value)
    if depth and (type(value) is list or isinstance(value, dict)):
        for key, item in enumerate(value) if isinstance(value, list) else list(value.items()):
            if (new := _exchanged(item, pairs, depth - 1)) is not item:
                value[key] = new
    elif depth and type(value) is tuple:
        items = tuple(_exchanged(item, pairs, depth - 1) for item in value)
        return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    return value


def adopt(module: nn.Module, name: str) -> None:
    """Note a child or an attribute that was added to a module; :func:`undo` removes it."""
    vars(module)[_ADDED] = (*vars(module).get(_ADDED, ()), name)


def pass_through(module: nn.Module, by: str) -> None:
    """Make a dropout or a normalisation the identity, in place; its class, parameters and statistics stay."""
    vars(module).update(forward=passed, extra_repr=partial(_taken, by))


def passed(input: Tensor) -> Tensor:
    """The forward of a module whose work a solver layer does."""
    return input


def _taken(by: str) -> str:
    return f"taken in by {by}"


def unfuse(model: nn.Module) -> None:
    """Make transformers call their converted layers in evaluation, too."""
    for module in model.modules():
        for name, off in (setting for kind, setting in _FUSED.items() if isinstance(module, kind)):
            if name in vars(module) and any(isinstance(part, SolverLayer) for part in module.modules()):
                vars(module).setdefault(_REPLACED, {}).setdefault(name, vars(module)[name])
                vars(module)[name] = off


def undo(model: nn.Module) -> nn.Module:
    """Restore the original modules of a network, with its present tensors; returns the network."""
    pairs: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        own = vars(module)
        if (origin := own.get(ORIGINAL)) is not None:
            module._parameters.pop("strength", None)
            vars(origin.module).update({k: v for k, v in own.items() if k != "_modules" and k not in origin.own})
            pairs[module] = origin.module
        for name in own.pop(_ADDED, ()):
            own.pop(name, None)
            module._modules.pop(name, None)
        own.update(own.pop(_REPLACED, {}))
        if own.get("forward") is passed:
            del own["forward"], own["extra_repr"]
        for name in [name for name, value in own.items() if isinstance(value, EditedMethod)]:
            del own[name]
    exchange(model, pairs)
    return pairs.get(model, model)


#: The module of the result for each module of the model.
Places = dict[nn.Module, nn.Module]


def apply(plan: Plan, inplace: bool) -> nn.Module:
    """The model as planned."""
    return changed(plan.model, plan.records, inplace, partial(_change, plan), bool(plan.edits))


def changed(
    model: nn.Module,
    records: Sequence[Network],
    inplace: bool,
    change: Callable[[nn.Module, Places], None],
    compare: bool = True,
) -> nn.Module:
    """A changed model, or a changed copy that shares the tensors.

    ``change`` gets the result and, for each module of the model, that of the result. A result that does not call its
    own modules is refused, and so is, with ``compare``, one that computes another function with single plain steps in
    its solver layers. A model that is refused is unchanged.
    """
    plain = [outputs(network.model, network)[0] if compare else None for network in records]
    rollback = snapshot(model)
    result = model if inplace else clone(model)
    paths = {module: path for path, module in model.named_modules()}
    place = {module: result.get_submodule(path) for module, path in paths.items()}
    try:
        change(result, place)
        for network, expected in zip(records, plain, strict=True):
            found, counts = outputs(place[network.model], network)
            _check(network, paths, place, counts)
            fixed = expected is not None and not any("random" in value.origins for value in network.outputs)
            if fixed and not all(map(same_bits, found, expected or ())):
                raise ConversionError(
                    "the edited forward does not compute what the forward computed, so the model is unchanged; write "
                    "additions out of place (x = x + y), and dropout as a module"
                )
    except BaseException:
        for restore in rollback:
            restore()
        raise
    return result


def _change(plan: Plan, result: nn.Module, place: Places) -> None:
    pairs = {}
    for path, layer in plan.converted.items():
        plain = place[layer.module]
        if isinstance(layer.function, LearnedHinge) and isinstance(layer.function.source, nn.Module):
            layer = dataclasses.replace(layer, function=LearnedHinge(place[layer.function.source]))  # type: ignore[arg-type]
        pairs[plain] = solver = solver_layer(layer, plain, None if layer.norm is None else place[layer.norm])
        solver.path = path
        install(plain, solver)
        place[layer.module] = solver
    for module, by in plan.passed.items():
        pass_through(place[module], by)
    install_edits(plan.edits, place)
    exchange(result, pairs)
    unfuse(result)


def install_edits(edits: Mapping[tuple[nn.Module, str], Edits], place: Places) -> None:
    """Give the modules of the result edited methods."""
    for (module, name), made in edits.items():
        before = vars(place[module]).get(name)
        vars(place[module])[name] = EditedMethod(place[module], name, made if before is None else before.edits | made)


class _Calls(Counter[nn.Module]):
    """How often each module was called; calls of copies that a forward makes of its modules are not counted."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Calls":
        return _Calls()

    def note(self, module: nn.Module, args: Any) -> None:
        """Count a call."""
        self[module] += 1


class _StandIn(NamedTuple):
    """The forward of a solver layer as a single plain step, which takes no bounds and no iterations, and is counted."""

    layer: SolverLayer
    calls: _Calls

    def __call__(self, y: Tensor, skip: Tensor | None = None, affine: Tensor | None = None) -> Tensor:
        self.calls.note(self.layer, y)
        others = (skip, affine) if isinstance(self.layer, BlockLayer) else (skip,)
        return self.layer.plain(y, *others)


def outputs(model: nn.Module, network: Network) -> tuple[list[Tensor], _Calls]:
    """What a model returns on the arguments of a record, with stand-ins for solver layers, and what it calls."""
    calls = _Calls()
    with preserved(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in model.modules():
            if isinstance(module, SolverLayer):
                vars(module)["forward"] = _StandIn(module, calls)
            elif not isinstance(module, torch.jit.ScriptModule):
                module.register_forward_pre_hook(calls.note)
        try:
            return returned(network, model, network.example, network.training), calls
        except Exception as error:
            raise ConversionError(
                f"the changed model does not run, so the model is unchanged: {raised(error, model)}; leave out the "
                f"layers that this forward uses in other ways than calling them"
            ) from error


def _check(network: Network, paths: Mapping[nn.Module, str], place: Places, calls: _Calls) -> None:
    """Raise if a network does not call its own modules; those without parameters, which may go, do not count."""
    runs = Counter(network.module(frame.path) for frame in network.frames)
    layers = Counter(call.place.owner for call in network.calls if role(call) in ("linear", "conv"))
    for module, new in place.items():
        converted = isinstance(new, SolverLayer) and not isinstance(module, SolverLayer)
        # Inside a transform of torch.func the runs of modules are seen, their calls are not.
        expected = (layers[module] or runs[module]) if converted else min(runs[module], calls[new] or 1)
        stateless = next(module.parameters(), None) is None or isinstance(module, torch.jit.ScriptModule)
        if calls[new] != expected and not stateless:
            way = "use inplace=True" if place[network.model] is not network.model else "hold it as an attribute"
            raise ConversionError(
                f"{paths[module]}: the converted model calls it {calls[new]} times instead of {expected}, because code "
                f"holds the original in an object that is not a module; {way}. The model is unchanged"
            )

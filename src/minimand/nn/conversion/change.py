"""Changing a model as planned, checking that it calls the changed layers, and undoing the changes.

Parameters, hooks, attributes and ``state_dict`` keys stay.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...errors import ConversionError
from ...network import Network, role
from ...network.replay import returned, same_bits
from ...network.state import preserved, snapshot
from ..layers import SolverLayer
from .block import BlockLayer
from .clone import INTERNAL, ORIGINAL, clone
from .edit import EditedMethod, Edits
from .plan import Plan, solver_layer

__all__ = ["adopt", "apply", "changed", "install_edits", "is_converted", "undo"]

_ADDED = "_minimand_added"


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
    own = frozenset(vars(layer)) - INTERNAL
    vars(layer).update({name: value for name, value in theirs.items() if name != "_modules" and name not in own})
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


def undo(model: nn.Module) -> nn.Module:
    """Restore the original modules of a network, with its present tensors; returns the network."""
    pairs: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        own = vars(module)
        if (origin := own.get(ORIGINAL)) is not None:
            vars(origin.module).update({k: v for k, v in own.items() if k != "_modules" and k not in origin.own})
            pairs[module] = origin.module
        for name in own.pop(_ADDED, ()):
            own.pop(name, None)
            module._modules.pop(name, None)
        if own.get("forward") is passed:
            del own["forward"], own["extra_repr"]
        for name in [name for name, value in own.items() if isinstance(value, EditedMethod)]:
            del own[name]
    exchange(model, pairs)
    return pairs.get(model, model)


#: The module of the result for each module of the model.
Places = Mapping[nn.Module, nn.Module]


def apply(plan: Plan, inplace: bool) -> nn.Module:
    """The model as planned."""
    check = partial(_check, plan)
    return changed(plan.model, plan.records, inplace, partial(_change, plan), check, bool(plan.edits))


def changed(
    model: nn.Module,
    records: Sequence[Network],
    inplace: bool,
    change: Callable[[nn.Module, Places], None],
    check: Callable[[nn.Module, Network, Counter[str]], None] | None = None,
    compare: bool = True,
) -> nn.Module:
    """A changed model, or a changed copy that shares the tensors.

    ``change`` gets the result and, for each module of the model, that of the result. ``check`` gets each changed part,
    its record and how often it calls its solver layers, and raises if something is wrong. With ``compare``, a model
    that computes another function with single plain steps is refused, too. A model that is refused is unchanged.
    """
    plain = [outputs(network.model, network)[0] if compare else None for network in records]
    rollback = snapshot(model)
    result = model if inplace else clone(model)
    place = {module: result.get_submodule(path) for path, module in model.named_modules()}
    try:
        change(result, place)
        for network, expected in zip(records, plain, strict=True):
            found, counts = outputs(place[network.model], network)
            if check is not None:
                check(place[network.model], network, counts)
            if expected is not None:
                _compare(network, found, expected)
    except BaseException:
        for restore in rollback:
            restore()
        raise
    return result


def _change(plan: Plan, result: nn.Module, place: Places) -> None:
    pairs = {}
    for path, layer in plan.converted.items():
        plain = place[layer.module]
        pairs[plain] = solver = solver_layer(layer, plain, None if layer.norm is None else place[layer.norm])
        solver.path = path
        install(plain, solver)
    for module, by in plan.passed.items():
        pass_through(place[module], by)
    install_edits(plan.edits, place)
    exchange(result, pairs)


def install_edits(edits: Mapping[tuple[nn.Module, str], Edits], place: Places) -> None:
    """Give the modules of the result edited methods."""
    for (module, name), made in edits.items():
        before = vars(place[module]).get(name)
        vars(place[module])[name] = EditedMethod(place[module], name, made if before is None else before.edits | made)


def outputs(model: nn.Module, network: Network) -> tuple[list[Tensor], Counter[str]]:
    """What a model returns on the arguments of a record, and how often it calls each solver layer.

    The solver layers make one plain step, which takes no bounds and no iterations.
    """
    counts: Counter[str] = Counter()
    with preserved(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in model.modules():
            if isinstance(module, SolverLayer):
                vars(module)["forward"] = _StandIn(module, counts)
        try:
            return returned(network, model, network.example, network.training), counts
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise ConversionError(
                f"the changed model does not run ({type(error).__name__}: {first}), so the model is unchanged; change "
                f"fewer layers to find the one"
            ) from error


class _StandIn:
    """The forward of a solver layer as a single plain step, which is counted."""

    def __init__(self, layer: SolverLayer, counts: Counter[str]) -> None:
        self.layer, self.counts = layer, counts

    def __call__(self, y: Tensor, skip: Tensor | None = None, affine: Tensor | None = None) -> Tensor:
        self.counts[self.layer.path] += 1
        out = self.layer.operator(y).affine(y, self.layer.bias) if affine is None else affine
        out = self.layer.normalized(out) if isinstance(self.layer, BlockLayer) else out
        return out if skip is None else out + skip

    def __deepcopy__(self, memo: dict[int, Any]) -> "_StandIn":
        return _StandIn(self.layer, Counter())  # a forward may call copies of its modules


def _check(plan: Plan, model: nn.Module, network: Network, counts: Counter[str]) -> None:
    """Raise if the model does not call its solver layers."""
    for path, layer in plan.converted.items():
        called = sum(c.place.owner is layer.module and role(c) in ("linear", "conv") for c in network.calls)
        if counts[path] != called:
            way = "use inplace=True" if model is not network.model else "refer to it by the attributes of modules"
            raise ConversionError(
                f"{path}: the converted model calls it {counts[path]} times instead of {called}, because code holds "
                f"the original in a closure or in an object that is not a module; {way}. The model is unchanged"
            )


def _compare(network: Network, found: list[Tensor], expected: list[Tensor]) -> None:
    fixed = not any("random" in value.origins for value in network.outputs)
    if fixed and not (len(found) == len(expected) and all(map(same_bits, found, expected))):
        raise ConversionError(
            "the edited forward does not compute what the forward computed, so the model is unchanged; write additions "
            "out of place (x = x + y), and dropout as a module"
        )

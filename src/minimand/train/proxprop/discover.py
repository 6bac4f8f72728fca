"""The layers of a model that ProxProp preconditions, and the reasons against others."""

import fnmatch
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ...errors import CapabilityError, OptionError
from ...network import read, role
from ...nn.layers import SolverLayer
from .grams import WeightMap, weight_map
from .layers import Forward
from .options import ProxPropOptions

__all__ = ["Layers", "discover"]


@dataclass(frozen=True)
class Layers:
    """The layers with proximal steps by path, and the types of the trained modules with plain gradients."""

    preconditioned: dict[str, tuple[nn.Module, WeightMap]]
    plain: dict[str, str]


def discover(model: nn.Module, options: ProxPropOptions) -> Layers:
    """Find the layers. A model with unusable ones raises an error that lists all problems.

    The last layer is the last one that the forward pass calls, on made-up inputs (:func:`minimand.network.read`). Where
    no made-up input runs through the model, it is the last in ``model.named_modules()``. A layer whose weight is used
    by other code than its own forward, such as the output projection of ``nn.MultiheadAttention``, keeps plain
    gradients: its inputs are not seen there.
    """
    maps = {path: known for path, module in model.named_modules() if (known := weight_map(module)) is not None}
    order, elsewhere = _forward_pass(model, list(maps))
    chosen = _selected([path for path in maps if path not in elsewhere], options)
    chosen = [path for path in chosen if _own(model.get_submodule(path))]
    last = order[-1] if options.skip_last and order and order[-1] in chosen else None
    found = {path: (model.get_submodule(path), maps[path]) for path in chosen if path != last}
    problems = [
        f"layer '{path}' {problem}" for path, (module, _) in found.items() for problem in _problems(model, module)
    ]
    if problems:
        raise CapabilityError("ProxProp cannot take this model: " + "; ".join(problems))
    if not found:
        why = (
            "there is none" if last is None else f"'{last}' is the only one and skip_last keeps the last layer explicit"
        )
        solvers = [path for path, module in model.named_modules() if isinstance(module, SolverLayer)]
        also = f" (of solver layers, here {', '.join(solvers)}, it takes none)" if solvers else ""
        raise OptionError(f"ProxProp needs an nn.Linear or nn.Conv1d to nn.Conv3d layer in the model, but {why}{also}")
    rest = {path: type(m).__name__ for path, m in model.named_modules() if path not in found and is_trained(m)}
    return Layers(found, rest | ({} if last is None else {last: "the last layer"}))


def is_trained(module: nn.Module) -> bool:
    """Whether a parameter of the module itself requires a gradient."""
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


def _forward_pass(model: nn.Module, layers: list[str]) -> tuple[list[str], set[str]]:
    """The layers in the order of their last calls, and those whose weight other modules use as well or instead."""
    # Running a layer that another ProxProp has replaced the forward of would count as a pass of that one.
    if any(isinstance(model.get_submodule(path).__dict__.get("forward"), Forward) for path in layers):
        return layers, set()
    network = read(model)
    if not network.complete:
        return layers, set()
    calls = [call.path for call in network.live if call.path in layers and role(call) in ("linear", "conv")]
    called = list(dict.fromkeys(reversed(calls)))[::-1]
    tied = {name for shared in network.shared() if len(shared.names) > 1 for name in shared.names}
    weights = {f"{path}.weight" if path else "weight": path for path in layers}
    elsewhere = {
        weights[value.name]
        for value in network.values
        if value.source == "parameter" and value.name in weights.keys() - tied
        for call in network.readers(value)
        if network.is_live(call) and call.path != weights[value.name]
    }
    return called or layers, elsewhere


def _selected(paths: list[str], options: ProxPropOptions) -> list[str]:
    """The paths that match a pattern of ``include``, if there are any, and none of ``exclude``."""
    given = {"include": options.include, "exclude": options.exclude}
    patterns = {name: [some] if isinstance(some, str) else list(some or ()) for name, some in given.items()}
    unknown = [pattern for some in patterns.values() for pattern in some if not fnmatch.filter(paths, pattern)]
    if unknown:
        raise OptionError(f"no layer matches {', '.join(unknown)}; available: {', '.join(map(repr, paths))}")
    matched = {name: {path for p in some for path in fnmatch.filter(paths, p)} for name, some in patterns.items()}
    return [p for p in paths if (not patterns["include"] or p in matched["include"]) and p not in matched["exclude"]]


def _own(module: nn.Module) -> bool:
    """Whether weight and bias are parameters of the module itself (a parametrisation computes them from others)."""
    names = [name for name in ("weight", "bias") if isinstance(getattr(module, name, None), Tensor)]
    return "weight" in names and all(name in module._parameters for name in names)


def _problems(model: nn.Module, module: nn.Module) -> list[str]:
    """What keeps a layer from proximal steps: shared or missing parameters, several devices, another forward."""
    problems = []
    for name, parameter in module._parameters.items():
        holders = [
            f"{path}.{n}" for path, m in model.named_modules() for n, p in m._parameters.items() if p is parameter
        ]
        if len(holders) > 1 and parameter is not None:
            problems.append(
                f"shares its {name} ({', '.join(holders)}): a proximal step is defined for one layer with its own inputs; "
                f"give each its own parameters"
            )
    parameters = [p for p in module._parameters.values() if p is not None]
    devices = sorted({p.device.type for p in parameters})
    if any(isinstance(p, UninitializedParameter) for p in parameters):
        problems.append("is lazy and has no weight yet (run one forward pass first)")
    elif "meta" in devices:
        problems.append("is on the meta device and has no data (load or initialise it first)")
    elif len(devices) > 1:
        problems.append(f"is spread over the devices {', '.join(devices)} (move it to one)")
    if isinstance(module.__dict__.get("forward"), Forward):
        problems.append("is attached to another ProxProp (detach that first)")
    elif "forward" in module.__dict__:
        problems.append("has a forward of its own (remove it, or pass a submodule without it)")
    return problems

"""Which layers of a model are preconditioned, which are not, and which cannot be."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ...errors import CapabilityError, OptionError
from ...network import read, role
from ...nn.layers import SolverLayer
from .layer_hooks import Forward
from .maps import WeightMap, weight_map

__all__ = ["Layers", "discover", "require_owned"]


@dataclass(frozen=True)
class Layers:
    """The layers by path: those with proximal steps, the last one, which stays explicit, and modules left plain."""

    preconditioned: dict[str, tuple[nn.Module, WeightMap]]
    last: str | None
    plain: dict[str, str]

    @property
    def trained(self) -> tuple[str, ...]:
        """Those with proximal steps that are not frozen."""
        return tuple(path for path, (module, _) in self.preconditioned.items() if _trained(module))


def discover(model: nn.Module, skip_last: bool) -> Layers:
    """Find the layers, and refuse a model in which one of them shares its parameters; every problem is listed.

    The last layer is the last one that the forward pass calls, on made-up inputs (:func:`minimand.network.read`). Where
    no made-up input runs through the model, it is the last in ``model.named_modules()``. A layer whose weight is used
    by other code than its own forward, such as the output projection of ``nn.MultiheadAttention``, keeps plain
    gradients: its inputs are not seen there.
    """
    found = {path: module for path, module in model.named_modules() if weight_map(module) is not None}
    order, elsewhere = _forward_pass(model, found)
    last = order[-1] if order and skip_last else None
    found = {path: module for path, module in found.items() if _own(module) and path not in elsewhere}
    last = last if last in found else None
    maps = {path: weight_map(module) for path, module in found.items() if path != last}
    preconditioned = {path: (found[path], known) for path, known in maps.items() if known is not None}
    problems = [*_shared(model, preconditioned), *_unusable(preconditioned)]
    if problems:
        raise CapabilityError("ProxProp cannot take this model: " + "; ".join(problems))
    if not preconditioned:
        why = (
            f"'{last}' is the only one and skip_last keeps the last layer explicit"
            if last is not None
            else "there is none"
        )
        solvers = [path for path, module in model.named_modules() if isinstance(module, SolverLayer)]
        also = f" (of solver layers, here {', '.join(solvers)}, it takes none)" if solvers else ""
        raise OptionError(f"ProxProp needs an nn.Linear or nn.Conv1d to nn.Conv3d layer in the model, but {why}{also}")
    rest = {
        path: type(module).__name__
        for path, module in model.named_modules()
        if path not in preconditioned and path != last and _trained(module)
    }
    return Layers(preconditioned, last, rest)


def _forward_pass(model: nn.Module, layers: dict[str, nn.Module]) -> tuple[list[str], set[str]]:
    """The layers in the order of their last calls, and those whose weight other modules use as well or instead."""
    # Running a layer that another ProxProp has replaced the forward of would count as a pass of that one.
    if any(isinstance(module.__dict__.get("forward"), Forward) for module in layers.values()):
        return list(layers), set()
    network = read(model)
    if not network.complete:
        return list(layers), set()
    calls = [call for call in network.live if call.path in layers and role(call) in ("linear", "conv")]
    called = list(dict.fromkeys(call.path for call in reversed(calls)))[::-1]
    tied = {name for shared in network.shared() if len(shared.names) > 1 for name in shared.names}
    weights = {f"{path}.weight" if path else "weight": path for path in layers}
    elsewhere = {
        weights[value.name]
        for value in network.values
        if value.source == "parameter" and value.name in weights.keys() - tied
        for call in network.readers(value)
        if network.is_live(call) and call.path != weights[value.name]
    }
    return called or list(layers), elsewhere


def _trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


def _own(module: nn.Module) -> bool:
    """Whether weight and bias are parameters of the module itself (a parametrisation computes them from others)."""
    names = [name for name in ("weight", "bias") if isinstance(getattr(module, name, None), Tensor)]
    return "weight" in names and all(name in module._parameters for name in names)


def _shared(model: nn.Module, preconditioned: dict[str, tuple[nn.Module, WeightMap]]) -> list[str]:
    """Layers at two places, and parameters in two modules."""
    places: dict[int, list[str]] = {}
    holders: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(path)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
    problems = []
    for path, (module, _) in preconditioned.items():
        where = places[id(module)]
        if len(where) > 1:
            problems.append(f"layer '{path}' stands at {len(where)} places ({', '.join(where)})")
            continue
        for name, parameter in module._parameters.items():
            names = holders.get(id(parameter), [])
            if len(names) > 1:
                problems.append(f"the {name} of layer '{path}' is shared ({', '.join(names)})")
    reason = " (a proximal step is defined for one layer with its own inputs: give each its own parameters)"
    return [problem + reason for problem in problems]


def _unusable(preconditioned: dict[str, tuple[nn.Module, WeightMap]]) -> list[str]:
    """Parameters without data, and layers spread over devices."""
    problems = []
    for path, (module, _) in preconditioned.items():
        parameters = {name: p for name, p in module._parameters.items() if p is not None}
        devices = {name: p.device for name, p in parameters.items()}
        if any(isinstance(p, UninitializedParameter) for p in parameters.values()):
            problems.append(f"layer '{path}' is lazy and has no weight yet (run one forward pass first)")
        elif any(device.type == "meta" for device in devices.values()):
            problems.append(f"layer '{path}' is on the meta device and has no data (load or initialise it first)")
        elif len(set(devices.values())) > 1:
            where = ", ".join(f"{name} on {device}" for name, device in devices.items())
            problems.append(f"layer '{path}' is spread over devices: {where} (move it to one)")
        if isinstance(module.__dict__.get("forward"), Forward):
            problems.append(f"layer '{path}' is attached to another ProxProp (detach that first)")
        elif "forward" in module.__dict__:
            problems.append(f"layer '{path}' has a forward of its own (remove it, or pass a submodule without it)")
    return problems


def require_owned(preconditioned: dict[str, tuple[nn.Module, WeightMap]], optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that does not hold the trained parameters of every preconditioned layer."""
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [
        f"{path}.{name}" if path else name
        for path, (module, _) in preconditioned.items()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad and id(parameter) not in owned
    ]
    if missing:
        raise OptionError(
            f"the optimizer does not own {', '.join(missing)}, so their directions would never be used; build it from "
            f"the model's parameters, or pass ProxProp the submodule that it trains"
        )

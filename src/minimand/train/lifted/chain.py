"""A network as a chain: which linear layers, with which activations in between."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...errors import CapabilityError, ChainError, MinimandError, OptionError
from ...functions.activations import activation_module, is_activation
from ...network import sequence
from ...network.sequence import SequencePart
from ...nn.layers import SolverLayer
from .maps import AffineMap, LiftedLayer
from .units import LINEAR, unit_of

__all__ = ["LayerChain", "check_modules", "parse"]

#: Modules that are read for what they compute.
_KNOWN = (nn.Linear, nn.Conv2d, nn.Flatten, nn.AvgPool2d, nn.MaxPool2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.Dropout)
_REMEDY = "lifted training takes chains of Linear or Conv2d and activations that end in a linear layer"


class LayerChain:
    """The layers of a network in order; the parameters stay the network's own."""

    def __init__(self, layers: Sequence[LiftedLayer]) -> None:
        self.layers = tuple(layers)

    def __len__(self) -> int:
        return len(self.layers)

    def require_trained(self) -> None:
        """Refuse a network of which nothing may move, or a part of a layer only, or which was made to be read only."""
        for layer in self.layers:
            _check_linear(layer.path, layer.module)
            if layer.weight.is_inference():
                raise CapabilityError(
                    f"the weight of {layer.path} was made in inference mode and cannot be trained; build the network "
                    f"outside of torch.inference_mode()"
                )
        if all(layer.frozen for layer in self.layers):
            raise OptionError(
                f"every layer is frozen ({', '.join(layer.path for layer in self.layers)}), so there is nothing to "
                f"train; set requires_grad_(True) on those that should move"
            )

    def forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor], list[AffineMap]]:
        """The forward pass: all activations from the input on, all z, and the maps of this batch."""
        xs, zs, maps = [x], [], []
        for layer in self.layers:
            affine = layer.affine_map(x)
            z = affine.apply(x)
            x = layer.unit.phi(z)
            xs.append(x)
            zs.append(z)
            maps.append(affine)
        return xs, zs, maps


def parse(model: nn.Module) -> LayerChain:
    """Read a network as a chain.

    It may be any network of which :func:`minimand.network.sequence` finds that it calls its layers in turn. Networks
    other than ``nn.Sequential`` are run for this on made-up inputs; the run leaves them as they were.

    Raises:
        ChainError: If it is none; the message names the module that breaks it.
        NotProximal: If an activation is not monotone.

    >>> chain = parse(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    >>> [layer.path for layer in chain.layers]
    ['0', '2']
    """
    layers: list[LiftedLayer] = []
    before: list[nn.Module] = []
    pending: dict[str, Any] | None = None

    def close() -> None:
        nonlocal pending
        if pending is not None:
            layers.append(LiftedLayer(**pending))
            pending = None

    check_modules(model)
    for part in sequence(model):
        if part.broken is not None:
            raise _not_a_chain(part)
        path, module = part.path or type(model).__name__, part.module
        if isinstance(module, _KNOWN):
            _check_forward(path, module)
        if isinstance(module, nn.Linear | nn.Conv2d):
            close()
            _check_linear(path, module)
            pending = {"path": path, "module": module, "before": tuple(before), "norm": None, "unit": LINEAR}
            before = []
        elif isinstance(module, nn.Flatten | nn.AvgPool2d | nn.MaxPool2d):
            close()
            _check_stage(path, module)
            before.append(module)
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            if pending is None or pending["norm"] is not None:
                raise ChainError(f"{path} (BatchNorm) does not follow a linear layer directly; {_REMEDY}")
            pending["norm"] = module
        elif isinstance(module, nn.Dropout) and module.p == 0:
            continue
        else:
            unit = unit_of(path, _activation(path, module))
            if unit.linear:
                continue
            if pending is None:
                pooled = bool(before) and not isinstance(before[-1], nn.Flatten)
                remedy = "put the activation before the pooling" if pooled else _REMEDY
                raise ChainError(f"{path} ({type(module).__name__}) does not follow a linear layer directly; {remedy}")
            pending["unit"] = unit
            close()
    last = pending is not None and pending["norm"] is None and not before
    close()
    if not layers or not last or not isinstance(layers[-1].module, nn.Linear):
        tail = "nothing" if not layers else layers[-1].path
        raise ChainError(f"the network ends after {tail} in something other than a Linear layer; {_REMEDY}")
    _check_shared(layers)
    return LayerChain(layers)


def _activation(path: str, module: nn.Module) -> nn.Module:
    if type(module).__module__.startswith("torch.") and not (is_activation(module) or type(module) is nn.Identity):
        hint = "take it out or set p=0" if isinstance(module, nn.modules.dropout._DropoutNd) else _REMEDY
        raise ChainError(f"{path} ({type(module).__name__}) is neither a linear layer nor an activation; {hint}")
    return module


def check_modules(model: nn.Module) -> None:
    """The forward pass is computed from the parameters: they must be there, and what a hook does would not happen."""
    if not isinstance(model, nn.Module):
        raise CapabilityError(f"lifted training takes an nn.Module, got a {type(model).__name__}")
    for path, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise CapabilityError(
                f"{path or 'the network'} is a DistributedDataParallel, which averages the gradients of "
                f"loss.backward() only; pass its .module, and average .grad over the processes before optimizer.step()"
            )
        if isinstance(module, SolverLayer):
            raise ChainError(
                f"{path or 'the network'} ({type(module).__name__}) is a solver layer, which lifted training does not "
                f"know; use the plain network, which minimand.revert(model) gives back"
            )
        if any(isinstance(parameter, nn.UninitializedParameter) for parameter in module.parameters(recurse=False)):
            raise ChainError(
                f"{path} ({type(module).__name__}) has no weight yet; send a batch through the network first"
            )
        if module._forward_hooks or module._forward_pre_hooks:
            raise ChainError(
                f"{path or 'the network'} ({type(module).__name__}) has a forward hook, which lifted training would "
                f"not call; remove it (with remove_weight_norm or remove_spectral_norm where that is what it does)"
            )


def _check_forward(path: str, module: nn.Module) -> None:
    """What a known module computes is known only if it is torch's own."""
    kind = type(module)
    if parametrize.is_parametrized(module):
        raise ChainError(
            f"{path} has a parametrised weight, which lifted training cannot assign; apply "
            f"torch.nn.utils.parametrize.remove_parametrizations first"
        )
    calls = [kind.forward, getattr(kind, "_conv_forward", kind.forward)]
    if not all(call.__module__.startswith("torch.nn.modules.") for call in calls):
        raise ChainError(
            f"{path} ({kind.__name__}) has a forward of its own, which lifted training cannot know; {_REMEDY}"
        )


def _check_linear(path: str, module: nn.Linear | nn.Conv2d) -> None:
    if module.bias is not None and module.bias.requires_grad != module.weight.requires_grad:
        raise ChainError(f"{path} has its weight or its bias frozen, but not both; freeze both or neither")
    if isinstance(module, nn.Conv2d) and (
        module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str)
    ):
        raise ChainError(
            f"{path} (Conv2d) has groups={module.groups}, padding={module.padding!r}, "
            f"padding_mode={module.padding_mode!r}; lifted training takes groups=1 and zero padding in numbers"
        )


def _check_stage(path: str, module: nn.Module) -> None:
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) != (1, -1):
        raise ChainError(f"{path} (Flatten) keeps dimensions; use nn.Flatten() without arguments")
    if isinstance(module, nn.AvgPool2d) and module.divisor_override is not None:
        raise ChainError(f"{path} (AvgPool2d) has divisor_override, which is not supported; leave it out")


def _check_shared(layers: Sequence[LiftedLayer]) -> None:
    seen: dict[int, str] = {}
    for layer in layers:
        key = id(layer.module.weight)
        if key in seen:
            raise ChainError(
                f"{seen[key]} and {layer.path} share one weight, so it would be two blocks at once; copy it"
                if seen[key] != layer.path
                else f"{layer.path} is used at two places, which share its weight; use a copy at the second"
            )
        seen[key] = layer.path


def _not_a_chain(part: SequencePart) -> MinimandError:
    try:
        if part.call is not None:
            activation_module(part.call.target)
    except MinimandError as error:
        return type(error)(f"{part.broken} that can be lifted: {error}; {_REMEDY}")
    return ChainError(f"{part.path + ': ' if part.path else ''}{part.broken}; {_REMEDY}")

"""Positive homogeneity of a network in its parameters, checked numerically by scaling them."""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import checked
from ..errors import CapabilityError
from .regularizers import factor_norms, layers_of

__all__ = ["homogeneity_degree", "probe_input", "require_homogeneous", "require_mode_independent"]

_SCALES = (0.5, 2.0, 3.0)
_ROUNDING = 1e-8
# Draws of random parameters. All ReLUs of a narrow network may be inactive at once, which shows nothing.
_DRAWS = 20
#: Modules that keep the number of columns.
_WIDTH_PRESERVING = (nn.Identity, nn.Flatten, nn.ReLU, nn.LeakyReLU)
#: Modules that compute different functions in training and in evaluation mode.
_MODE_DEPENDENT: dict[type[nn.Module], str] = {
    nn.modules.dropout._DropoutNd: "draws a mask in training",
    nn.modules.batchnorm._NormBase: "divides by the deviation of its batch in training",
    nn.RReLU: "draws its slopes in training",
}


def probe_input(module: nn.Module) -> Tensor | None:
    """Random inputs for a network that begins with a linear layer; None if their shape is unknown."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(6, layer.in_features, generator=generator, dtype=torch.float64)
            try:
                _scaled_output(_probe(module, x), x, 1.0)
            except RuntimeError:  # later layers may need more dimensions
                return None
            return x
        if not isinstance(layer, _WIDTH_PRESERVING) and (
            not list(layer.children()) or list(layer.parameters(recurse=False))
        ):
            return None
    return None


def require_mode_independent(module: nn.Module) -> None:
    """Raise CapabilityError if a submodule, such as batch norm or dropout, differs between training and evaluation."""
    found = [
        f"{name or 'the module'} ({type(layer).__name__}) {reason}"
        for name, layer in module.named_modules()
        for kind, reason in _MODE_DEPENDENT.items()
        if isinstance(layer, kind)
    ]
    if found:
        raise CapabilityError(
            f"{type(module).__name__} is not positively homogeneous in its parameters while it trains: "
            f"{'; '.join(found)}. Remove it"
        )


@checked
def homogeneity_degree(module: nn.Module, x: Tensor) -> float | None:
    r"""The degree K with :math:`\phi(\alpha W) = \alpha^K \phi(W)` for every :math:`\alpha > 0`; None if none exists.

    It is checked on the given inputs, at random parameters, in float64.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False))
    >>> homogeneity_degree(net, torch.ones(1, 2))
    2.0
    >>> homogeneity_degree(nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1)), torch.ones(1, 2)) is None
    True
    """
    x = x.detach().double()
    found = _live_probe(module, x)
    if found is None:
        return None
    probe, base = found
    size = float(base.norm())
    ratio = float(_scaled_output(probe, x, 2.0).norm()) / size
    if not ratio > 0:
        return None
    degree = float(round(torch.log2(torch.tensor(ratio)).item()))
    for scale in _SCALES:
        error = (_scaled_output(probe, x, scale) - scale**degree * base).norm()
        if not float(error) <= _ROUNDING * scale**degree * size:
            return None
    return degree


def require_homogeneous(module: nn.Module, x: Tensor) -> int:
    """The degree of a network, one per layer with parameters; otherwise a CapabilityError names the layers at fault."""
    require_mode_independent(module)
    x = x.detach().double()
    factors = len(factor_norms(module))
    degree = homogeneity_degree(module, x)
    if degree == factors:
        _require_each(module, x)
        return factors
    if degree is not None:
        raise CapabilityError(
            f"{type(module).__name__} is positively homogeneous of degree {degree:g} in {factors} layers with "
            f"parameters; the product of their norms has degree {factors}, but the theory needs equal degrees"
        )
    culprits = _inhomogeneous_layers(module, x)
    named = "; ".join(culprits) if culprits else "its output does not scale as a power of the parameters"
    raise CapabilityError(
        f"{type(module).__name__} is not positively homogeneous in its parameters: {named}. Use ReLU, leaky ReLU, "
        f"max pooling or linear layers, with a bias in the first layer only"
    )


def _require_each(module: nn.Module, x: Tensor) -> None:
    """Raise CapabilityError unless doubling any one layer's parameters doubles the output."""
    found = _live_probe(module, x)
    assert found is not None
    probe, base = found
    for name, layer in layers_of(probe).items():
        error = float((_scaled_output(probe, x, 2.0, name) - 2 * base).norm())
        if not error <= _ROUNDING * float(base.norm()):
            raise CapabilityError(
                f"the output of {type(module).__name__} does not double when {name or 'the module'} "
                f"({type(layer).__name__}) does, but the product of norms does; each layer with parameters must enter "
                f"the output once"
            )


@torch.no_grad()
def scales_with_inputs(module: nn.Module, x: Tensor) -> bool:
    """Whether the output doubles, to the last digit, when the inputs do, at random parameters: not with a bias."""
    x = x.detach().double()
    found = _live_probe(module, x)
    return found is not None and torch.equal(found[0](2 * x), 2 * found[1])


def _live_probe(module: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor] | None:
    """A copy with random parameters and a non-zero output, and that output; None if all draws give zero."""
    for seed in range(_DRAWS):
        probe = _probe(module, x, seed)
        base = _scaled_output(probe, x, 1.0)
        if float(base.norm()) > 0:
            return probe, base
    return None


def _probe(module: nn.Module, x: Tensor, seed: int = 0) -> nn.Module:
    """A copy in the precision of x with random parameters, none of which is zero."""
    probe = copy.deepcopy(module).to(x).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return probe


@torch.no_grad()
def _scaled_output(probe: nn.Module, x: Tensor, scale: float, layer: str | None = None) -> Tensor:
    """The output with all parameters scaled, or only those of one layer."""
    other = copy.deepcopy(probe)
    part = other if layer is None else other.get_submodule(layer)
    for parameter in part.parameters(recurse=layer is None):
        parameter.mul_(scale)
    return other(x)


@torch.no_grad()
def _inhomogeneous_layers(module: nn.Module, x: Tensor) -> list[str]:
    """Descriptions of the layers that break homogeneity: nonlinear scaling, or a bias after the first layer."""
    probe = _probe(module, x)
    found: list[str] = []
    after_first = False

    def check(name: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal after_first
        if not inputs or not isinstance(inputs[0], Tensor):
            return
        where = f"{name or 'the module'} ({type(layer).__name__})"
        if list(layer.parameters()):
            if after_first and getattr(layer, "bias", None) is not None:
                found.append(f"{where} has a bias after the first layer, which scales with another power")
            after_first = True
        elif not torch.allclose(layer.forward(2 * inputs[0]), 2 * layer.forward(inputs[0]), rtol=1e-9, atol=1e-12):
            found.append(f"{where} does not double when its input does")

    for name, layer in probe.named_modules():
        if not any(layer.children()):
            layer.register_forward_pre_hook(partial(check, name))
    probe(x)
    return found

"""Whether a network is positively homogeneous in its parameters, checked by scaling them."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CapabilityError
from .regularisers import factor_norms

__all__ = ["homogeneity_degree", "probe_input", "require_homogeneous"]

_SCALES = (0.5, 2.0, 3.0)
_ROUNDING = 1e-8
# All ReLUs of a narrow network may be off at once: that shows nothing, so other parameters are drawn.
_DRAWS = 20


def probe_input(module: nn.Module) -> Tensor | None:
    """Random inputs for a network that begins with a linear layer; None where their shape cannot be told."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            generator = torch.Generator().manual_seed(0)
            return torch.randn(6, layer.in_features, generator=generator, dtype=torch.float64)
        if not isinstance(layer, nn.Sequential | nn.Identity | nn.ReLU) and any(layer.parameters(recurse=False)):
            return None
    return None


def homogeneity_degree(module: nn.Module, x: Tensor) -> float | None:
    r"""The degree K with :math:`\phi(\alpha W) = \alpha^K \phi(W)` for every :math:`\alpha > 0`; None if there is none.

    Checked on the inputs given, at random parameters, in float64.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False))
    >>> homogeneity_degree(net, torch.ones(1, 2))
    2.0
    >>> homogeneity_degree(nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1)), torch.ones(1, 2)) is None
    True
    """
    x = x.detach().double()
    for seed in range(_DRAWS):
        probe = _probe(module, seed)
        base = _scaled_output(probe, x, 1.0)
        size = float(base.norm())
        if size > 0:
            break
    else:
        return None
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
    """The degree of a network, or a refusal that names the layers at fault."""
    factors = len(factor_norms(module))
    degree = homogeneity_degree(module, x)
    if degree == factors:
        return factors
    if degree is not None:
        raise CapabilityError(
            f"{type(module).__name__} is positively homogeneous of degree {degree:g} in {factors} layers with "
            f"parameters; the product of their norms has degree {factors}, and only equal degrees make minima global"
        )
    culprits = _culprits(module, x)
    named = "; ".join(culprits) if culprits else "its output does not scale with a power of its parameters"
    raise CapabilityError(
        f"{type(module).__name__} is not positively homogeneous in its parameters: {named}. Use ReLU, leaky ReLU, "
        f"max pooling or linear layers, with a bias in the first layer only"
    )


def _probe(module: nn.Module, seed: int = 0) -> nn.Module:
    """A copy in float64 without dropout, its parameters redrawn so that none is zero."""
    probe = copy.deepcopy(module).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return probe


@torch.no_grad()
def _scaled_output(probe: nn.Module, x: Tensor, scale: float) -> Tensor:
    other = copy.deepcopy(probe)
    for parameter in other.parameters():
        parameter.mul_(scale)
    return other(x)


@torch.no_grad()
def _culprits(module: nn.Module, x: Tensor) -> list[str]:
    """Layers without parameters that do not scale, and biases behind the first layer."""
    probe = _probe(module)
    found: list[str] = []
    seen: list[tuple[str, nn.Module, Tensor]] = []

    def note(name: str) -> Any:
        def hook(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs and isinstance(inputs[0], Tensor):
                seen.append((name, layer, inputs[0]))

        return hook

    leaves = [(name, layer) for name, layer in probe.named_modules() if not any(layer.children())]
    handles = [layer.register_forward_pre_hook(note(name)) for name, layer in leaves]
    probe(x.detach().double())
    for handle in handles:
        handle.remove()
    first = True
    for name, layer, value in seen:
        where = f"{name or 'the module'} ({type(layer).__name__})"
        if not any(True for _ in layer.parameters()):
            once, twice = layer(value), layer(2 * value)
            if not torch.allclose(twice, 2 * once, rtol=1e-9, atol=1e-12):
                found.append(f"{where} does not double when its input does")
            continue
        if not first and getattr(layer, "bias", None) is not None:
            found.append(f"{where} has a bias behind the first layer, which scales with another power")
        first = False
    return found

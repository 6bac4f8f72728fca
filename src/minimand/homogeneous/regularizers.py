r"""Regularisers of a network by the norms of its factors ([Vidal2018], "Key Ingredient: Proper Regularization").

A *factor* :math:`W^k` holds all parameters of one layer, including its bias. A network that is positively homogeneous
of degree K in K factors needs a regulariser of the same degree: the product of norms, or a surrogate with the same
infimum over rescalings. Weight decay has degree 2, which fits two factors only.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..arguments import checked
from ..errors import CapabilityError

__all__ = ["balance", "factor_norms", "layers_of", "path_norm", "product_of_norms", "smooth_surrogate", "weight_decay"]


def layers_of(module: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold parameters directly, by path."""
    return {name: layer for name, layer in module.named_modules() if list(layer.parameters(recurse=False))}


@checked
def factor_norms(module: nn.Module) -> Tensor:
    r"""The norms :math:`\|W^k\|` of the modules that hold parameters directly, in order.

    >>> layer = nn.Linear(2, 1)
    >>> with torch.no_grad():
    ...     _ = layer.weight.copy_(torch.tensor([[2.0, 1.0]])), layer.bias.fill_(2.0)
    >>> factor_norms(layer).tolist()
    [3.0]
    """
    groups = [list(layer.parameters(recurse=False)) for layer in layers_of(module).values()]
    norms = [torch.linalg.vector_norm(torch.cat([p.flatten() for p in group])) for group in groups]
    if not norms:
        raise CapabilityError(f"{type(module).__name__} has no parameters to regularise")
    return torch.stack(norms)


@torch.no_grad()
def balance(net: nn.Module) -> None:
    """Scale all layers to the same norm; output and product of norms do not change."""
    norms = factor_norms(net)
    mean = norms.log().mean().exp()
    for layer, norm in zip(layers_of(net).values(), norms, strict=True):
        for parameter in layer.parameters(recurse=False):
            parameter.mul_(mean / norm)


@checked
def product_of_norms(module: nn.Module) -> Tensor:
    r""":math:`\theta(W) = \prod_k \|W^k\|`, of degree K; invariant to rescaling between layers."""
    return factor_norms(module).prod()


@checked
def smooth_surrogate(module: nn.Module) -> Tensor:
    r""":math:`\tfrac1K\sum_k\|W^k\|^K`, of degree K; at least the product of norms, with equality for balanced layers.

    >>> net = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False))
    >>> bool(smooth_surrogate(net) >= product_of_norms(net))
    True
    """
    norms = factor_norms(module)
    return norms.pow(len(norms)).mean()


@checked
def weight_decay(module: nn.Module) -> Tensor:
    r""":math:`\tfrac12\sum_k\|W^k\|^2`, of degree 2 at any depth; zero is therefore a local minimum for K > 2."""
    return 0.5 * factor_norms(module).square().sum()


@checked
def path_norm(module: nn.Module, example: Tensor, order: float = 2.0) -> Tensor:
    r"""The norm over all paths from inputs to outputs, :math:`\bigl(\sum_{\text{paths}}\prod|w|^q\bigr)^{1/q}`.

    It is computed by one forward pass with weights :math:`|w|^q` and inputs of ones, on which ReLUs are the identity
    (Neyshabur, Salakhutdinov and Srebro 2015). It holds for networks of linear or convolutional layers, sums and ReLUs.

    Args:
        module: The network.
        example: An input that gives shape, dtype and device; its first dimension is the batch.
        order: The exponent q.

    >>> net = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    >>> with torch.no_grad():
    ...     _ = net[0].weight.copy_(torch.tensor([[3.0, -4.0]])), net[2].weight.fill_(2.0)
    >>> path_norm(net, torch.zeros(1, 2)).item()
    10.0
    """
    weights = {name: parameter.abs().pow(order) for name, parameter in module.named_parameters()}
    total = functional_call(module, weights, (torch.ones_like(example[:1]),)).sum()
    # The root is not differentiable at zero; the gradient there is set to zero, as for torch's norms.
    alive = total > 0
    return torch.where(alive, torch.where(alive, total, 1.0).pow(1 / order), 0.0)

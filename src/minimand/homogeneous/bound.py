"""Upper bounds on the polar of a subnetwork, for chains of linear layers and ReLUs."""

import math

import torch
from torch import Tensor, nn

from ..network import sequence
from ..norms.spectral import certified_norm_sq

__all__ = ["NO_BOUND", "chain_bound", "chain_layers", "polar_bound"]

NO_BOUND = math.inf, "ascent from below, no bound from above"


def polar_bound(pattern: nn.Module, x: Tensor, residual: Tensor) -> tuple[float, str]:
    r"""An upper bound on :math:`\langle R, \phi(X; W)\rangle` over layers of norm one, and the method behind it.

    For one linear layer the maximum is :math:`\|R^\top X\|_F`. For several it is the spectral norm
    :math:`\|R^\top X\|`, because the nuclear norm of a product of two matrices is at most the product of their
    Frobenius norms. With ReLUs between or after the layers :math:`\|R\|_F\|X\|` is a bound, because a ReLU increases
    no vector's norm. A bias of the first layer counts as a column of ones. Layers act on the last dimension; all other
    dimensions are samples. For any other module the bound is infinity.

    >>> x = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    >>> round(polar_bound(nn.Linear(2, 2, bias=False), x, torch.eye(2))[0], 6)
    5.0
    >>> chain = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 2, bias=False))
    >>> round(polar_bound(chain, x, torch.eye(2))[0], 6)
    4.0
    """
    return chain_bound(chain_layers(pattern, x), x, residual)


def chain_layers(pattern: nn.Module, x: Tensor) -> tuple[nn.Module, ...] | None:
    """The layers of a subnetwork for which a bound is known, in order; None for any other subnetwork.

    Networks other than ``nn.Sequential`` are read by :func:`minimand.network.sequence`, on the first samples of ``x``.
    """
    if any(part._forward_hooks or part._forward_pre_hooks for part in pattern.modules()):
        return None
    weight = next(pattern.parameters(), x)
    parts = sequence(pattern, x[:2].detach().to(weight))
    layers = tuple(part.module for part in parts if type(part.module) is not nn.Identity)
    flat, rest = layers[:1], layers[1:]
    if not (flat and type(flat[0]) is nn.Flatten and (flat[0].start_dim, flat[0].end_dim) == (1, -1)):
        rest = layers
    known = rest and type(rest[0]) is nn.Linear and all(map(_is_known, rest))
    late_bias = any(layer.bias is not None for layer in rest[1:] if isinstance(layer, nn.Linear))
    return layers if known and not late_bias else None


def chain_bound(layers: tuple[nn.Module, ...] | None, x: Tensor, residual: Tensor) -> tuple[float, str]:
    """The bound of :func:`polar_bound` for layers found by :func:`chain_layers`."""
    if layers is None:
        return NO_BOUND
    if type(layers[0]) is nn.Flatten:
        x, layers = x.flatten(1), layers[1:]
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    X = x.detach().double().reshape(-1, linear[0].in_features)
    R = residual.detach().double().reshape(-1, linear[-1].out_features)
    if linear[0].bias is not None:
        X = torch.cat([X, torch.ones_like(X[:, :1])], 1)
    # A bound on the rounding error of a sum over all rows.
    room = 8 * (len(X) + X.shape[1] + 8) * torch.finfo(torch.float64).eps
    room *= float((R.norm(dim=1) * X.norm(dim=1)).sum())
    if len(linear) < len(layers):
        return float(R.norm()) * math.sqrt(float(certified_norm_sq(X))) + room, "ascent from below, norms from above"
    if len(linear) == 1:
        return float((R.mT @ X).norm()) + room, "Frobenius norm of the linear polar"
    return math.sqrt(float(certified_norm_sq(R.mT @ X, rtol=0.0))) + room, "spectral norm of the linear polar"


def _is_known(layer: nn.Module) -> bool:
    """Whether the layer is linear with a plain weight, or an activation that lengthens no vector."""
    # Exact types: a subclass may compute anything, and a reparametrised weight is no parameter.
    if type(layer) is nn.Linear:
        return {name for name, _ in layer.named_parameters()} <= {"weight", "bias"}
    return type(layer) is nn.ReLU or (type(layer) is nn.LeakyReLU and abs(layer.negative_slope) <= 1)

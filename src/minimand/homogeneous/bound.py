"""Upper bounds on the polar of a subnetwork, for chains of linear layers, convolutions, ReLUs, pooling and maxout."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.utils import _ntuple

from ..network import sequence
from ..norms.spectral import certified_lambda_max, certified_norm_sq

__all__ = ["NO_BOUND", "chain_bound", "chain_gain", "chain_layers", "polar_bound"]

NO_BOUND = math.inf, "ascent from below, no bound from above"
EPS = torch.finfo(torch.float64).eps
# Entries of a block of patches.
BLOCK = 16_000_000
_CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
_MAX_POOLS = {nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3}
_MEAN_POOLS = {nn.AvgPool1d: 1, nn.AvgPool2d: 2, nn.AvgPool3d: 3}
_GLOBAL_POOLS = (
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
_SHAPES = (nn.Identity, nn.Flatten, nn.Unflatten)


def polar_bound(pattern: nn.Module, x: Tensor, residual: Tensor) -> tuple[float, str]:
    r"""An upper bound on :math:`\langle R, \phi(X; W)\rangle` over layers of norm one, and the method behind it.

    For one linear layer the maximum is :math:`\|R^\top X\|_F`. For several it is the spectral norm
    :math:`\|R^\top X\|`, because the nuclear norm of a product of two matrices is at most the product of their
    Frobenius norms. For other chains it is the product of

    - the norm :math:`\|X\|` of the rows that the first layer multiplies: samples, or the patches of a convolution;
    - the *gains* of the layers after it, numbers g with :math:`\|h(z)\| \le g\|z\|`. A ReLU has g = 1. If an entry lies
      in at most m patches of a convolution with kernel w, :math:`g = m^{1/2}\|w\|_F`; in at most m windows of a max
      pooling, :math:`g = m^{1/2}`; of an average pooling of q entries, :math:`g = (m/q)^{1/2}`. Maxout is a max pooling
      over features, ``nn.MaxPool1d`` after a linear layer;
    - :math:`\|R\|` if the last layer is linear, because :math:`\langle R, HV^\top\rangle \le \|R\|\|H\|_F\|V\|_F`, and
      :math:`\|R\|_F` otherwise.

    A bias of the first layer counts as a column of ones. Linear layers act on the last dimension; all other dimensions
    are samples. For any other module the bound is infinity.

    >>> x = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    >>> round(polar_bound(nn.Linear(2, 2, bias=False), x, torch.eye(2))[0], 6)
    5.0
    >>> chain = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 2, bias=False))
    >>> round(polar_bound(chain, x, torch.eye(2))[0], 6)
    4.0
    >>> conv = nn.Sequential(nn.Conv1d(1, 1, 2, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(1, 1, bias=False))
    >>> round(polar_bound(conv, torch.tensor([[[3.0, 4.0]]]), torch.tensor([[2.0]]))[0], 6)
    10.0
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
    weighted = [layer for layer in layers if _is_weighted(layer)]
    unknown = not weighted or any(_gain(layer) is None for layer in layers)
    late_bias = any(layer.bias is not None for layer in weighted[1:])
    tied = len({id(layer.weight) for layer in weighted}) < len(weighted)
    return None if unknown or late_bias or tied else layers


def chain_gain(layers: tuple[nn.Module, ...] | None) -> float:
    """The product of the gains of all layers; one without a known chain."""
    return math.prod(_gain(layer) or 1.0 for layer in layers or ())


def chain_bound(layers: tuple[nn.Module, ...] | None, x: Tensor, residual: Tensor) -> tuple[float, str]:
    """The bound of :func:`polar_bound` for layers found by :func:`chain_layers`."""
    if layers is None:
        return NO_BOUND
    place = next(i for i, layer in enumerate(layers) if _is_weighted(layer))
    x = x.detach().double()
    for layer in layers[:place]:
        x = layer(x)
    first, rest = layers[place], layers[place + 1 :]
    if type(first) is nn.Linear and all(type(layer) is nn.Linear for layer in rest):
        return _linear_bound(first, layers[-1], x, residual)
    last = layers[-1]
    R = residual.detach().double()
    split = type(last) is nn.Linear and last is not first
    weight = math.sqrt(float(certified_norm_sq(R.reshape(-1, R.shape[-1])))) if split else float(R.norm())
    bound = weight * chain_gain(rest) * math.sqrt(_first_square(first, x))
    return bound * (1 + 64 * EPS * (R.numel() + 8) ** 0.5), "ascent from below, norms from above"


def _linear_bound(first: nn.Module, last: nn.Module, x: Tensor, residual: Tensor) -> tuple[float, str]:
    """The exact polar of linear layers, with a bound on the rounding error of a sum over all rows."""
    X, R = _rows(first, x), residual.detach().double()
    R = R.reshape(-1, R.shape[-1])
    room = 8 * (len(X) + X.shape[1] + 8) * EPS
    room *= float((R.norm(dim=1) * X.norm(dim=1)).sum())
    if first is last:
        return float((R.mT @ X).norm()) + room, "Frobenius norm of the linear polar"
    return math.sqrt(float(certified_norm_sq(R.mT @ X, rtol=0.0))) + room, "spectral norm of the linear polar"


def _rows(first: nn.Module, x: Tensor) -> Tensor:
    """The rows that a linear layer multiplies, with a column of ones for its bias."""
    X = x.reshape(-1, x.shape[-1])
    return X if first.bias is None else torch.cat([X, torch.ones_like(X[:, :1])], 1)


def _first_square(first: nn.Module, x: Tensor) -> float:
    """A bound on the squared norm of the rows that the first layer multiplies."""
    if type(first) is nn.Linear:
        return float(certified_norm_sq(_rows(first, x)))
    assert isinstance(first, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if isinstance(first, nn.Conv3d) or first.groups > 1:
        # All patches together hold an entry of x at most m times, and each one 1 for the bias.
        ones = 0 if first.bias is None else first(x.to(first.weight))[:, 0].numel() * first.groups
        gain = _gain(first)
        assert gain is not None
        return (gain**2 * float(x.square().sum()) + ones) * (1 + 64 * EPS * x.numel())
    return _patch_square(first, x)


def _patch_square(first: nn.Conv1d | nn.Conv2d, x: Tensor) -> float:
    """A bound on the squared norm of the matrix of patches, from its Gram matrix."""
    mode = "constant" if first.padding_mode == "zeros" else first.padding_mode
    flat = isinstance(first, nn.Conv1d)
    options = [(1, *v) if flat else v for v in (first.kernel_size, first.dilation, first.stride)]
    kernel, dilation, stride = options
    total: Tensor | None = None
    count = 0
    for part in x.split(max(1, BLOCK // max(1, x[0].numel() * math.prod(kernel)))):
        wide = F.pad(part, first._reversed_padding_repeated_twice, mode=mode)
        wide = wide.unsqueeze(2) if flat else wide
        patches = F.unfold(wide, kernel, dilation=dilation, stride=stride)
        P = patches.movedim(1, -1).flatten(0, 1)
        P = P if first.bias is None else torch.cat([P, torch.ones_like(P[:, :1])], 1)
        count += len(P)
        total = P.mT @ P if total is None else total + P.mT @ P
    assert total is not None
    return float(certified_lambda_max(total)) + 8 * (count + 64) * EPS * float(total.diagonal().sum())


def _is_weighted(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear or type(layer) in _CONVOLUTIONS


def _gain(layer: nn.Module) -> float | None:
    """A number g with ‖layer(z)‖ ≤ g‖z‖ for every z, where weights have norm one and no bias; None if none is known."""
    # Exact types: a subclass may compute anything, and a reparametrised weight is no parameter.
    kind = type(layer)
    if kind is nn.Linear or kind in _CONVOLUTIONS:
        plain = {name for name, _ in layer.named_parameters()} <= {"weight", "bias"}
        if not plain or (kind is not nn.Linear and layer.padding_mode not in ("zeros", "circular")):
            return None
        return 1.0 if kind is nn.Linear else _overlap(layer, _CONVOLUTIONS[kind]) ** 0.5  # type: ignore[index]
    if kind in (nn.ReLU, *_SHAPES):
        return 1.0
    if isinstance(layer, nn.LeakyReLU) and kind is nn.LeakyReLU:
        return max(1.0, abs(layer.negative_slope))
    if kind in _MAX_POOLS:
        return None if layer.return_indices else _overlap(layer, _MAX_POOLS[kind]) ** 0.5
    if kind in _MEAN_POOLS:
        return _mean_gain(layer, _MEAN_POOLS[kind])
    if isinstance(layer, _GLOBAL_POOLS) and kind in _GLOBAL_POOLS:
        size = layer.output_size
        return 1.0 if set(size if isinstance(size, tuple) else (size,)) == {1} else None
    return None


def _overlap(layer: nn.Module, dims: int) -> int:
    """The largest number of patches or windows that hold one entry.

    Position p and offset j meet in entry ps + jd. In each dimension the offsets that meet in one entry are equal modulo
    s / gcd(s, d), so of k offsets at most ⌈k gcd(s, d)/s⌉ do.
    """
    sizes = (_ntuple(dims)(getattr(layer, name, 1)) for name in ("kernel_size", "stride", "dilation"))
    return math.prod(-(-k * math.gcd(s, d) // s) for k, s, d in zip(*sizes, strict=True))


def _mean_gain(layer: nn.Module, dims: int) -> float | None:
    """The square of a mean of q entries is at most the mean of their squares; at an edge q may be smaller, but ≥ 1."""
    if getattr(layer, "divisor_override", None) is not None:
        return None
    whole = not layer.ceil_mode and (layer.count_include_pad or set(_ntuple(dims)(layer.padding)) == {0})
    entries = math.prod(_ntuple(dims)(layer.kernel_size)) if whole else 1
    return (_overlap(layer, dims) / entries) ** 0.5

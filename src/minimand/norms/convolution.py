r"""Bounds on the norm of a convolution, and of its channels, that are never below the truth.

A zero-padded convolution is a part of a circular convolution whose grid has room for the padding. (The zeros of the two
sides can share their places on the circle.) It is also a part of the convolution on the infinite grid. This gives two
bounds on :math:`\|A\|^2`, and each dimension can use either of them:

- *exact*: the maximum of :math:`\lambda_{\max}(G(\omega))` over the frequencies of that circular grid
  ([Bibi2019], Lemma 2; Sedghi, Gupta, Long, *The Singular Values of Convolutional Layers*, ICLR
  2019). It holds for one map size.
- *grid*: the maximum over a grid that depends on the kernel only, times
  :func:`~minimand.norms.symbol.grid_factor`. It holds for every size and padding.

Padding with copies of the inputs (circular, reflect, replicate) is a map whose squared norm is the largest number of
copies of an input; its product with the bound of the unpadded convolution on the padded map is a bound. A circularly
padded convolution also consists of windows on the circle of its map, some of them more than once. Where it has each of
them once, Lemma 2 is exact.
"""

import math

import torch
from torch import Tensor

from ..geometry import ConvGeometry
from .spectral import certified_norm_sq, powers_of_two, product_of_bounds, quick_norm_sq, strips_norm_sq, to_float64
from .symbol import Symbol, grid_factor, polyphase

__all__ = ["channel_norms_sq", "convolution_norm_sq", "is_expensive", "unfolded_norm_sq"]

POINTS_PER_DEGREE = 6
CHEAP = 2e7  # operations up to which the circular grid is used in every dimension
QUICK = 2e6  # operations from which a first bound may be looser
TINY = 5e7  # operations up to which the matrix itself is formed


def convolution_norm_sq(weight: Tensor, geometry: ConvGeometry, method: str = "auto") -> Tensor:
    """A bound on the squared norm, float64. ``method`` is "auto", "exact" or "grid", as the module's text defines them.

    "auto" uses the circular grid in every dimension where it has fewer points, and in all dimensions where that is
    cheap. Where at most two windows share an input it also tries the norm of the unfolded weight. On tiny maps "auto"
    and "exact" form the matrix, because no other bound is tight there.
    """
    if weight.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=weight.device)
    if method != "grid" and geometry.size is not None and not geometry.is_circulant:
        sides = [
            c * math.prod(n)
            for c, n in zip(_channels(weight, geometry), (geometry.size, geometry.output()), strict=True)
        ]
        if min(sides) ** 2 * max(sides) <= TINY:
            return certified_norm_sq(_matrix(weight, geometry), rtol=0.0 if method == "exact" else 1e-3) * (1 + 1e-9)
    grouped = weight.detach().unflatten(0, (geometry.groups, -1))
    found = []
    for wider, factor in _containing(geometry):
        symbol = Symbol(torch.stack([polyphase(w, wider.stride, wider.dilation) for w in grouped]))
        points, gap = _grid(symbol, wider, method)
        tight = method == "exact" or (method == "auto" and wider.is_circulant)
        found.append(factor * gap * (symbol.peak(points) if tight else symbol.maximum(points)))
    # The symbol of a single tap is the weight itself.
    if method != "grid" and not geometry.is_circulant and math.prod(geometry.kernel) > 1:
        shared, summed = geometry.overlaps()
        if shared <= 2:
            found.append(shared * certified_norm_sq(grouped.flatten(2)))
        if summed <= 2:
            found.append(summed * certified_norm_sq(grouped.transpose(1, 2).flatten(2)))
    return torch.stack(found).amin(0)


def is_expensive(weight: Tensor, geometry: ConvGeometry) -> bool:
    """Whether :func:`convolution_norm_sq` on a grid takes more than some milliseconds."""
    line = zip(geometry.kernel, geometry.stride, geometry.dilation, strict=True)
    phases = [min(s // math.gcd(s, d), k) for k, s, d in line]
    points = [max(1, POINTS_PER_DEGREE * (-(-k // p) - 1)) for k, p in zip(geometry.kernel, phases, strict=True)]
    side = min(weight.shape[0] // geometry.groups, weight.shape[1] * math.prod(phases))
    return math.prod(points) * geometry.groups * side**3 > QUICK


def unfolded_norm_sq(weight: Tensor, geometry: ConvGeometry) -> Tensor:
    r"""A bound on the squared norm, float64: about four times the truth for random weights, seven for those of at least
    512 channels, whose Gram matrix is computed in two halves.

    With the weight unfolded to W, outputs × (inputs · taps), :math:`\|A\|^2 \le r\,\|W\|_2^2`, where r windows share an
    input; with the roles of inputs and outputs exchanged, r is the number of taps.
    """
    grouped = weight.detach().unflatten(0, (geometry.groups, -1))
    shared, summed = geometry.overlaps()
    groups, rows, columns, *taps = grouped.shape
    count = math.prod(taps)
    # The norm of a random matrix is the sum of the roots of its sides. Of equal bounds the smaller matrix is taken.
    as_rows, as_columns = (
        (round(factor * (side**0.5 + (other * count) ** 0.5) ** 2), side)
        for factor, side, other in ((shared, rows, columns), (summed, columns, rows))
    )
    factor, sided = (shared, grouped) if as_rows <= as_columns else (summed, grouped.transpose(1, 2))
    matrices = sided.reshape(groups, sided.shape[1], -1)
    found = strips_norm_sq(matrices[0], 2) if groups == 1 else quick_norm_sq(matrices)
    return product_of_bounds(found, float(factor))


def channel_norms_sq(weight: Tensor, geometry: ConvGeometry, *, of: str) -> Tensor:
    """Bounds on the squared norm of the part of each input channel, or output channel, in float64.

    One batched symbol treats all channels: a kernel ``(n2, 1)`` per input, ``(1, n1)`` per output.
    """
    parts = weight.detach().unflatten(0, (geometry.groups, -1))
    inputs = of == "inputs"
    parts = parts.transpose(1, 2).flatten(0, 1).unsqueeze(2) if inputs else parts.flatten(0, 1).unsqueeze(1)
    batch, rows = parts.shape[:2]
    if parts.numel() == 0:
        return torch.zeros(batch, dtype=torch.float64, device=weight.device)
    # Squares of a channel far below the largest one would be lost.
    scales = powers_of_two(to_float64(parts).flatten(1), 1)
    parts = to_float64(parts) / scales.reshape(-1, *(1,) * (parts.dim() - 1))
    found = []
    for wider, factor in _containing(geometry):
        # Batch and rows are one dimension here: the polyphase split does not touch it.
        split = polyphase(parts.flatten(0, 1), wider.stride, wider.dilation)
        symbol = Symbol(split.unflatten(0, (batch, rows)))
        points, gap = _grid(symbol, wider, "auto")
        found.append(symbol.maxima(points) * (factor * gap))
    return product_of_bounds(torch.stack(found).amin(0), scales[:, 0], scales[:, 0])


def _containing(geometry: ConvGeometry) -> list[tuple[ConvGeometry, float]]:
    r"""Convolutions B that have a symbol, each with a factor m: :math:`\|A\|^2 \le m\|B\|^2` for the given A."""
    if geometry.mode == "zeros":
        return [(geometry, 1.0)]
    padded, (circulant, repeats) = (geometry.without_padding(), float(geometry.copies())), geometry.circulant()
    if geometry.is_circulant:
        return [(geometry, 1.0)]
    return [padded, (circulant, float(repeats))] if geometry.mode == "circular" else [padded]


def _channels(weight: Tensor, geometry: ConvGeometry) -> tuple[int, int]:
    return weight.shape[1] * geometry.groups, weight.shape[0]


def _matrix(weight: Tensor, geometry: ConvGeometry) -> Tensor:
    """The transposed matrix of the convolution, by its action on unit inputs."""
    shape = (_channels(weight, geometry)[0], *geometry.known_size())
    double = to_float64(weight)
    units = torch.eye(math.prod(shape), dtype=torch.float64, device=double.device).reshape(-1, *shape)
    return geometry.without_padding().convolve(geometry.pad(units), double).flatten(1)


def _grid(symbol: Symbol, geometry: ConvGeometry, method: str) -> tuple[tuple[int, ...], float]:
    """The frequencies per dimension, and the factor from their maximum to a bound."""
    degrees = [k - 1 for k in symbol.taps]
    small = tuple(max(1, POINTS_PER_DEGREE * d) for d in degrees)
    factors = [grid_factor(d, n) for d, n in zip(degrees, small, strict=True)]
    if method == "grid" or (method == "auto" and geometry.size is None):
        return small, math.prod(factors)
    circle = geometry.circle()
    cost = math.prod(circle) * symbol.batch * symbol.size**3
    if method == "exact" or cost <= CHEAP:
        circle = tuple(1 if d == 0 else n for n, d in zip(circle, degrees, strict=True))
        return circle, 1.0
    chosen = [min(a, b) for a, b in zip(small, circle, strict=True)]
    kept = [f if n < m else 1.0 for f, n, m in zip(factors, small, circle, strict=True)]
    return tuple(chosen), math.prod(kept)

r"""Bounds on the norm of a convolution, and of its channels, that are never below the truth.

With zero padding a convolution is a part of a circular one on a grid that is large enough for the padding
(the zeros of the two sides may share their place on the circle), and of the one on the infinite grid. Hence
two bounds on :math:`\|A\|^2`, which may be mixed dimension by dimension:

- *exact*: the maximum of :math:`\lambda_{\max}(G(\omega))` over the frequencies of that circular grid
  (Lemma 2 of Bibi et al. 2019; Sedghi, Gupta, Long, *The Singular Values of Convolutional Layers*, ICLR
  2019), valid for one map size;
- *grid*: the maximum over a grid that depends on the kernel only, times
  :func:`~minimand.operators.symbol.grid_factor`, valid for every size and padding.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import OptionError
from .spectral import certified_norm_sq, to_float64
from .symbol import Symbol, grid_factor, polyphase

__all__ = ["Geometry", "channel_norms_sq", "convolution_norm_sq"]

POINTS_PER_DEGREE = 6
CHEAP = 2e7  # operations of a factorisation that nobody waits for
TINY = 5e7  # the same, where it buys the truth itself


@dataclass(frozen=True)
class Geometry:
    """How a kernel meets its map: everything about a convolution but its weight. One entry per dimension.

    ``padding`` holds pairs (before, after). ``size`` is None for a bound that holds for every size.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    size: tuple[int, ...] | None

    @property
    def reach(self) -> tuple[int, ...]:
        """The distance between the first and the last tap."""
        return tuple(d * (k - 1) for k, d in zip(self.kernel, self.dilation, strict=True))

    def output(self) -> tuple[int, ...]:
        """The size of the output map."""
        parts = zip(self.known_size(), self.padding, self.reach, self.stride, strict=True)
        return tuple((n + sum(p) - r - 1) // s + 1 for n, p, r, s in parts)

    def leftover(self) -> tuple[int, ...]:
        """The rows of the padded input that no window reaches, because the stride does not divide the map."""
        parts = zip(self.known_size(), self.padding, self.reach, self.stride, strict=True)
        return tuple((n + sum(p) - r - 1) % s for n, p, r, s in parts)

    def known_size(self) -> tuple[int, ...]:
        """``size``, or an error that says that it is needed."""
        if self.size is None:
            raise OptionError("this convolution has no input_size; pass input_size=(H, W) when building it")
        return self.size

    def circle(self) -> tuple[int, ...]:
        """The frequencies per dimension of a circular convolution that contains this one (polyphase)."""
        points = []
        parts = zip(
            self.known_size(),
            self.padding,
            self.reach,
            self.leftover(),
            self.stride,
            self.dilation,
            strict=True,
        )
        for n, (before, after), reach, leftover, s, d in parts:
            # The zeros before the map and those after it may be the same places of the circle.
            zeros = min(max(before, after - leftover, 0), reach)
            points.append(-(-(n + zeros) // math.lcm(s, d)))
        return tuple(points)

    def overlaps(self) -> tuple[int, int]:
        """How many windows share one input at most, and how many inputs one window sums at most."""
        shared = [
            -(-k // (s // math.gcd(s, d))) for k, s, d in zip(self.kernel, self.stride, self.dilation, strict=True)
        ]
        summed = list(self.kernel)
        if self.size is not None:
            shared = [min(r, o) for r, o in zip(shared, self.output(), strict=True)]
            summed = [min(k, -(-n // d)) for k, n, d in zip(self.kernel, self.size, self.dilation, strict=True)]
        return math.prod(shared), math.prod(summed)


def convolution_norm_sq(weight: Tensor, geometry: Geometry, method: str = "auto") -> Tensor:
    """A bound on the squared norm, float64; ``method`` is "auto", "exact" or "grid" as in the module's text.

    "auto" takes the circular grid in every dimension where it is the smaller one, everywhere if it costs next to
    nothing, a bound by the unfolded weight where windows hardly overlap, and the matrix itself on tiny maps, where
    nothing else is tight.
    """
    if weight.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=weight.device)
    if method == "auto" and geometry.size is not None:
        sides = [
            c * math.prod(n)
            for c, n in zip(_channels(weight, geometry), (geometry.size, geometry.output()), strict=True)
        ]
        if min(sides) ** 2 * max(sides) <= TINY:
            return certified_norm_sq(_matrix(weight, geometry)) * (1 + 1e-9)
    grouped = weight.detach().unflatten(0, (geometry.groups, -1))
    kernel = torch.stack([polyphase(w, geometry.stride, geometry.dilation) for w in grouped])
    symbol = Symbol(kernel)
    points, factor = _grid(symbol, geometry, method)
    bound = symbol.maximum(points) * factor
    if method == "auto":
        shared, summed = geometry.overlaps()
        if shared <= 2:
            bound = torch.minimum(bound, shared * certified_norm_sq(grouped.flatten(2)))
        if summed <= 2:
            bound = torch.minimum(bound, summed * certified_norm_sq(grouped.transpose(1, 2).flatten(2)))
    return bound


def channel_norms_sq(weight: Tensor, geometry: Geometry, *, of: str) -> Tensor:
    """Bounds on the norm of each input channel's, or output channel's, part of the operator, float64.

    All channels go through one batched symbol: a kernel ``(n2, 1)`` per input, ``(1, n1)`` per output.
    """
    parts = weight.detach().unflatten(0, (geometry.groups, -1))
    inputs = of == "inputs"
    parts = parts.transpose(1, 2).flatten(0, 1).unsqueeze(2) if inputs else parts.flatten(0, 1).unsqueeze(1)
    batch, rows = parts.shape[:2]
    # The batch rides along as rows, which the polyphase split leaves alone.
    split = polyphase(parts.flatten(0, 1), geometry.stride, geometry.dilation)
    symbol = Symbol(split.unflatten(0, (batch, rows)))
    points, factor = _grid(symbol, geometry, "auto")
    return symbol.maxima(points) * factor


def _channels(weight: Tensor, geometry: Geometry) -> tuple[int, int]:
    return weight.shape[1] * geometry.groups, weight.shape[0]


def _matrix(weight: Tensor, geometry: Geometry) -> Tensor:
    """The convolution as a matrix (transposed), by its action on unit inputs."""
    shape = (_channels(weight, geometry)[0], *geometry.known_size())
    double = to_float64(weight)
    units = torch.eye(math.prod(shape), dtype=torch.float64, device=double.device).reshape(-1, *shape)
    # torch counts the sides of a padding from the last dimension backwards
    padded = F.pad(units, [side for pair in reversed(geometry.padding) for side in pair])
    conv = F.conv1d if len(geometry.kernel) == 1 else F.conv2d
    return conv(padded, double, None, geometry.stride, 0, geometry.dilation, geometry.groups).flatten(1)


def _grid(symbol: Symbol, geometry: Geometry, method: str) -> tuple[tuple[int, ...], float]:
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

"""Total variation of vectors, by a direct method, and of images, by the dual and an exact last step."""

import functools
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import ShapeError, require_positive
from .base import Function, Step, scaled, widened
from .structured import require_common_step, require_vectors

__all__ = ["TotalVariation", "TotalVariation2d"]

#: Iterations of the dual between two certificates, and their largest number for each row and column.
CHECKED = 20
PER_SIDE = 400


@dataclass(frozen=True)
class TotalVariation(Function):
    r"""The total variation :math:`g(x) = w\sum_i |x_{i+1} - x_i|` of the last dimension.

    The prox is constant on segments. It is computed in one pass over the entries (Condat, *A direct algorithm for 1-D
    total variation denoising*, 2013). A segment with the jumps :math:`\sigma \in \{-1, 0, 1\}` at its two ends has the
    value

    .. math:: \operatorname{mean}(a_{\text{segment}}) + \frac{\eta w}{\text{length}}(\sigma_{\text{right}}
        - \sigma_{\text{left}}) ,

    through which it is differentiated.

    Example:
        >>> TotalVariation(1.0).prox(torch.tensor([0.0, 0.0, 5.0, 5.0]))
        tensor([0.5000, 0.5000, 4.5000, 4.5000])
    """

    weight: float

    def __post_init__(self) -> None:
        require_positive("weight", self.weight, zero=True)

    def value(self, x: Tensor) -> Tensor:
        """The sum of the jumps, over the batch."""
        return self.weight * require_vectors(x).diff(dim=-1).abs().sum()

    def sums(self, x: Tensor, dims: int) -> Tensor:
        """The sum of the jumps of each sample."""
        jumps = widened(x).diff(dim=-1).abs()
        return self.weight * jumps.flatten(jumps.dim() - dims).sum(-1)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """Segments of equal entries."""
        require_common_step(step, 1, "TotalVariation")
        wide = require_vectors(x)
        threshold = scaled(step, self.weight, wide)
        if self.weight == 0 or x.shape[-1] < 2:
            return x
        each = threshold if isinstance(threshold, Tensor) else wide.new_full((), threshold)
        label, shift = _segments(wide.detach(), each.detach().expand(*wide.shape[:-1], 1))
        return (_means(wide, label) + threshold * shift).to(x.dtype)


def _means(x: Tensor, label: Tensor) -> Tensor:
    """The mean of the entries with the same label in the last dimension."""
    empty = torch.zeros_like(x)
    total = empty.scatter_add(-1, label, x)
    count = empty.scatter_add(-1, label, torch.ones_like(x)).clamp_min(1)
    return (total / count).gather(-1, label)


@dataclass(frozen=True)
class TotalVariation2d(Function):
    r"""The anisotropic total variation of images, the last two dimensions,
    :math:`g(x) = w\sum_{i,j} |x_{i+1,j} - x_{i,j}| + |x_{i,j+1} - x_{i,j}|`.

    With the differences D of neighbours the dual of the prox is

    .. math:: \min_p\; \tfrac12\|a - D^\top p\|^2 \quad\text{with}\quad |p| \le \eta w , \qquad z = a - D^\top p ,

    solved by accelerated projected gradients with restarts and the step 1/8. The entries of p at their bounds cut the
    image into regions of one value each,

    .. math:: \operatorname{mean}(a_{\text{region}}) - \frac{\eta w}{\text{size}}\sum_{\text{region}}
        D^\top\operatorname{sign}(p_{\text{cut}}) ,

    which is exact once the regions are, and through which the prox is differentiated. The iteration stops when the
    duality gap of this point, :math:`\tfrac12\|z - a + D^\top p\|^2 + \sum \eta w|Dz| - p\,Dz \ge
    \tfrac12\|z - \operatorname{prox}(a)\|^2`, certifies it to :math:`\epsilon^{3/4}` of the range of a in its
    precision :math:`\epsilon`.

    Example:
        >>> TotalVariation2d(0.5).prox(torch.tensor([[0.0, 0.0, 4.0], [0.0, 0.0, 4.0]]))
        tensor([[0.2500, 0.2500, 3.5000],
                [0.2500, 0.2500, 3.5000]])
    """

    coupled: ClassVar[int] = 2

    weight: float

    def __post_init__(self) -> None:
        require_positive("weight", self.weight, zero=True)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise unless points are images."""
        if len(shape) < 2:
            raise ShapeError(f"TotalVariation2d needs images, two dimensions or more, got shape {tuple(shape)}")

    def value(self, x: Tensor) -> Tensor:
        """The sum of the jumps between neighbours, over the batch."""
        wide = widened(x)
        self.check_shape(x.shape)
        return self.weight * (wide.diff(dim=-1).abs().sum() + wide.diff(dim=-2).abs().sum())

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """Regions of equal entries."""
        require_common_step(step, 2, "TotalVariation2d")
        wide = widened(x)
        self.check_shape(x.shape)
        threshold = scaled(step, self.weight, wide)
        if self.weight == 0 or x.numel() == 0:
            return x
        each = threshold if isinstance(threshold, Tensor) else wide.new_full((), threshold)
        label, shift = _regions(wide.detach(), each.detach().expand(*wide.shape[:-2], 1, 1))
        return (_means(wide.flatten(-2), label).reshape(x.shape) + threshold * shift).to(x.dtype)


@torch.library.custom_op("minimand::variation_regions", mutates_args=())
def _regions(x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """The region of each pixel, by the index of its first one, and its value less its mean over the threshold."""
    images = x.reshape(-1, *x.shape[-2:]).double()
    images = images - images.mean((-2, -1), keepdim=True)
    limit = threshold.reshape(-1, 1, 1).double()
    # The second term is the rounding of sums of pixels.
    room = torch.finfo(x.dtype).eps ** 0.75 * (images.amax((-2, -1)) - images.amin((-2, -1)))
    room = room + 64 * torch.finfo(images.dtype).eps * x.reshape(len(images), -1).double().norm(dim=-1)
    p = q = (torch.zeros_like(images.diff(dim=-2)), torch.zeros_like(images.diff(dim=-1)))
    momentum = torch.ones_like(limit)
    for _ in range(PER_SIDE * sum(x.shape[-2:]) // CHECKED):
        for _ in range(CHECKED):
            p, q, momentum = _dual_step(images, limit, p, q, momentum)
        label, shift, bound = _cut(images, limit, p)
        if not bool((bound > room).any()):
            break
    else:
        warnings.warn(
            f"the prox of TotalVariation2d is certified to a distance of {float(bound.max()):.1e} only, after "
            f"{PER_SIDE} iterations for each row and column of the image",
            stacklevel=2,
        )
    return label.reshape(*x.shape[:-2], -1), shift.reshape(x.shape).to(x.dtype)


@_regions.register_fake
def _(x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:-2], x.shape[-2] * x.shape[-1]), dtype=torch.int64), torch.empty_like(x)


Edges = tuple[Tensor, Tensor]


def _divergence(p: Edges) -> Tensor:
    """The transpose of the differences."""
    down, right = p
    pad = torch.nn.functional.pad
    return pad(down, (0, 0, 1, 0)) - pad(down, (0, 0, 0, 1)) + pad(right, (1, 0)) - pad(right, (0, 1))


def _dual_step(a: Tensor, limit: Tensor, p: Edges, q: Edges, momentum: Tensor) -> tuple[Edges, Edges, Tensor]:
    """One accelerated projected gradient step of each image; the momentum restarts where it points uphill."""
    z = a - _divergence(q)
    moved = [each + z.diff(dim=dim) / 8 for each, dim in zip(q, (-2, -1), strict=True)]
    new = [torch.clamp(each, -limit, limit) for each in moved]
    change = [n - o for n, o in zip(new, p, strict=True)]
    uphill = sum(((e - n) * c).sum((-2, -1), keepdim=True) for e, n, c in zip(q, new, change, strict=True))
    larger = 0.5 + (0.25 + momentum.square()).sqrt()
    factor = torch.where(torch.as_tensor(uphill) > 0, 0.0, (momentum - 1) / larger)
    extended = [n + factor * c for n, c in zip(new, change, strict=True)]
    return (new[0], new[1]), (extended[0], extended[1]), torch.where(torch.as_tensor(uphill) > 0, 1.0, larger)


def _cut(a: Tensor, limit: Tensor, p: Edges) -> tuple[Tensor, Tensor, Tensor]:
    """The regions that the entries of p at their bounds cut, with a bound on the distance of their values to the
    prox."""
    size = a.shape[-2] * a.shape[-1]
    signs = [torch.where(each.abs() >= limit, each.sign(), 0.0) for each in p]
    label = _components(a.shape, [each == 0 for each in signs], a.device)
    shift = -_means(_divergence((signs[0], signs[1])).flatten(-2), label).reshape(a.shape)
    z = _means(a.flatten(-2), label).reshape(a.shape) + limit * shift
    jumps = [(limit * d.abs() - e * d).sum((-2, -1)) for e, d in zip(p, (z.diff(dim=-2), z.diff(dim=-1)), strict=True)]
    gap = 0.5 * (z - a + _divergence(p)).square().sum((-2, -1)) + jumps[0] + jumps[1]
    return label.reshape(-1, size), shift, (2 * gap).sqrt()


def _components(shape: torch.Size, joined: list[Tensor], device: torch.device) -> Tensor:
    """The connected components of grids, each pixel labelled by the least index of its component in its image."""
    count, rows, columns = shape
    index = torch.arange(count * rows * columns, device=device).reshape(shape)
    first = torch.cat([index[:, :-1][joined[0]], index[..., :-1][joined[1]]])
    second = torch.cat([index[:, 1:][joined[0]], index[..., 1:][joined[1]]])
    label = index.flatten()
    while True:
        least = torch.minimum(label[first], label[second])
        # The roots of both ends move, not only the ends, and chains are shortened.
        new = label.clone()
        for end in (first, second):
            new = new.scatter_reduce(0, label[end], least, "amin").scatter_reduce(0, end, least, "amin")
        new = new[new]
        if torch.equal(new, label):
            return (label.reshape(count, -1) - index.reshape(count, -1)[:, :1]).contiguous()
        label = new


@torch.library.custom_op("minimand::variation_segments", mutates_args=())
def _segments(x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """The segment of each entry, and the jump at its right end less that at its left end over its length."""
    rows = x.reshape(-1, x.shape[-1]).double().cpu().tolist()
    limits = threshold.reshape(-1).double().cpu().tolist()
    labels, shifts = [], []
    for row, limit in zip(rows, limits, strict=True):
        ends = _taut_string(row, limit)
        label: list[int] = []
        shift: list[float] = []
        start, left = 0, 0
        for k, (end, right) in enumerate(ends):
            length = end - start
            label += [k] * length
            shift += [(right - left) / length] * length
            start, left = end, right
        labels.append(label)
        shifts.append(shift)
    label_of = torch.tensor(labels, dtype=torch.int64, device=x.device).reshape(x.shape)
    return label_of, torch.tensor(shifts, dtype=x.dtype, device=x.device).reshape(x.shape)


@_segments.register_fake
def _(x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=torch.int64), torch.empty_like(x)


def _batched(kind: Any, info: Any, dims: tuple[int | None, int | None], *given: Tensor) -> tuple[Any, tuple[int, int]]:
    """What ``vmap`` computes: the batch is one more leading dimension."""
    pairs = zip(given, dims, strict=True)
    return kind(*(t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0) for t, d in pairs)), (0, 0)


for _kind in (_regions, _segments):
    _kind.register_vmap(functools.partial(_batched, _kind))


def _taut_string(y: list[float], limit: float) -> list[tuple[int, int]]:
    """The ends of the segments, each with the sign of the jump there; the last has none."""
    n, ends = len(y), list[tuple[int, int]]()
    k = begin = low_end = high_end = 0
    low, high, under, over = y[0] - limit, y[0] + limit, limit, -limit
    while True:
        if k == n - 1:
            if under < 0:
                ends.append((low_end + 1, -1))
                k = begin = low_end = low_end + 1
                low, under = y[k], limit
                over = low + under - high
            elif over > 0:
                ends.append((high_end + 1, 1))
                k = begin = high_end = high_end + 1
                high, over = y[k], -limit
                under = high + over - low
            else:
                return [*ends, (n, 0)]
            continue
        if under + y[k + 1] - low < -limit:
            ends.append((low_end + 1, -1))
            k = begin = low_end = high_end = low_end + 1
            low, high, under, over = y[k], y[k] + 2 * limit, limit, -limit
        elif over + y[k + 1] - high > limit:
            ends.append((high_end + 1, 1))
            k = begin = low_end = high_end = high_end + 1
            low, high, under, over = y[k] - 2 * limit, y[k], limit, -limit
        else:
            k += 1
            under, over = under + y[k] - low, over + y[k] - high
            if under >= limit:
                low_end = k
                low, under = low + (under - limit) / (k - begin + 1), limit
            if over <= -limit:
                high_end = k
                high, over = high + (over + limit) / (k - begin + 1), -limit

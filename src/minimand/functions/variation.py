"""Total variation of vectors, with an exact prox by a direct method."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import require_positive
from .base import Function, Step, scaled, widened
from .structured import require_common_step, require_vectors

__all__ = ["TotalVariation"]


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
        empty = torch.zeros_like(wide)
        total = empty.scatter_add(-1, label, wide)
        count = empty.scatter_add(-1, label, torch.ones_like(wide)).clamp_min(1)
        return ((total / count).gather(-1, label) + threshold * shift).to(x.dtype)


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

"""Functions of vectors, which act on the last dimension: the simplex, norms, order, and their conjugates."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ShapeError, require_positive
from ..tracing import constant
from .base import Function, Step, check_step, indicator_of_all, scaled, widened

__all__ = ["Isotonic", "L1Ball", "MaxNorm", "Maximum", "Simplex"]


def require_common_step(step: Step, dims: int, kind: str) -> None:
    """Check that a step is constant within each vector or matrix."""
    if isinstance(step, Tensor) and any(size != 1 for size in step.shape[-dims:]):
        raise ShapeError(
            f"{kind} needs one step per {'vector' if dims == 1 else 'matrix'}: a tensor step of shape "
            f"{tuple(step.shape)} must have size 1 in its last {dims} dimension(s)"
        )


def require_vectors(x: Tensor) -> Tensor:
    wide = widened(x)
    if x.dim() == 0:
        raise ShapeError("a function of vectors needs one dimension or more, got a single number of shape ()")
    return wide


@dataclass(frozen=True)
class Simplex(Function):
    r"""The indicator of the simplex :math:`\{x \ge 0, \sum_i x_i = r\}`. Its prox is sparsemax for the radius r = 1.

    .. math:: \operatorname{prox}(a) = \max(a - \tau, 0), \qquad \textstyle\sum_i \max(a_i - \tau, 0) = r ,

    with :math:`\tau` found by sorting (Held, Wolfe and Crowder 1974; Martins and Astudillo 2016).

    Example:
        >>> Simplex().prox(torch.tensor([0.5, 0.4, -1.0]))
        tensor([0.5500, 0.4500, 0.0000])
    """

    radius: float = 1.0

    def __post_init__(self) -> None:
        require_positive("radius", self.radius)

    def value(self, x: Tensor) -> Tensor:
        """Zero where every last dimension is a distribution times the radius, +inf otherwise."""
        wide = require_vectors(x)
        room = 4 * torch.finfo(x.dtype).eps * (x.shape[-1] + 4) * max(1.0, self.radius)
        return indicator_of_all((wide >= -room).all(-1) & ((wide.sum(-1) - self.radius).abs() <= room), wide)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The Euclidean projection."""
        check_step(step, x)
        wide = require_vectors(x)
        # The projection is invariant to a common shift. Subtracting the maximum avoids cancellation.
        centered = wide - wide.detach().amax(-1, keepdim=True)
        return torch.relu(centered - _level(centered, self.radius)).to(x.dtype)

    def conjugate(self) -> "Maximum":
        """The largest entry times the radius."""
        return Maximum(self.radius)


@dataclass(frozen=True)
class Maximum(Function):
    r"""The largest entry :math:`g(x) = w\max_i x_i`, conjugate of the :class:`Simplex`.

    .. math::

        \operatorname{prox}_{\eta g}(a) = \min(a, \tau), \qquad \textstyle\sum_i \max(a_i - \tau, 0) = \eta w

    Example:
        >>> Maximum().prox(torch.tensor([3.0, 1.0]), 1.0)
        tensor([2., 1.])
    """

    weight: float = 1.0

    def __post_init__(self) -> None:
        require_positive("weight", self.weight)

    def value(self, x: Tensor) -> Tensor:
        """The largest entries, summed over the batch."""
        return self.weight * require_vectors(x).amax(-1).sum()

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The entries above a level cut down to it."""
        require_common_step(step, 1, "Maximum")
        wide = require_vectors(x)
        level = _level(wide, scaled(step, self.weight, wide))
        # Not by torch.minimum, whose derivative at the level is one half.
        return torch.where(wide > level, level, wide).to(x.dtype)

    def conjugate(self) -> Simplex:
        """The indicator of the simplex."""
        return Simplex(self.weight)


def _level(x: Tensor, mass: Step) -> Tensor:
    """The level τ with Σ max(x − τ, 0) = mass over the last dimension."""
    ordered = x.sort(dim=-1, descending=True).values
    count = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
    levels = (ordered.cumsum(-1) - mass) / count
    support = (ordered > levels).sum(-1, keepdim=True).clamp_min(1)
    return levels.gather(-1, support - 1)


@dataclass(frozen=True)
class L1Ball(Function):
    r"""The indicator of :math:`\|x\|_1 \le r` in the last dimension.

    .. math:: \operatorname{prox}(a) = \operatorname{sign}(a)\max(|a| - \tau, 0), \qquad
        \tau = 0 \text{ or } \textstyle\sum_i \max(|a_i| - \tau, 0) = r

    Example:
        >>> L1Ball(1.0).prox(torch.tensor([[3.0, -2.5], [0.1, 0.2]]))
        tensor([[ 0.7500, -0.2500],
                [ 0.1000,  0.2000]])
    """

    radius: float

    def __post_init__(self) -> None:
        require_positive("radius", self.radius)

    def value(self, x: Tensor) -> Tensor:
        """Zero where every last dimension lies in the ball, +inf otherwise."""
        wide = require_vectors(x)
        room = self.radius * (1 + 4 * (x.shape[-1] + 4) * torch.finfo(x.dtype).eps)
        return indicator_of_all(wide.abs().sum(-1) <= room, wide)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The Euclidean projection."""
        check_step(step, x)
        wide = require_vectors(x)
        return _within(wide, self.radius).to(x.dtype)

    def conjugate(self) -> "MaxNorm":
        """The largest absolute value times the radius."""
        return MaxNorm(self.radius)


@dataclass(frozen=True)
class MaxNorm(Function):
    r"""The norm :math:`g(x) = w\|x\|_\infty` of the last dimension, conjugate of :class:`L1Ball`.

    .. math:: \operatorname{prox}_{\eta g}(a) = a - P(a), \qquad P \text{ the projection onto } \|x\|_1 \le \eta w

    Example:
        >>> MaxNorm(1.0).prox(torch.tensor([3.0, -2.5]))
        tensor([ 2.2500, -2.2500])
    """

    weight: float

    def __post_init__(self) -> None:
        require_positive("weight", self.weight)

    def value(self, x: Tensor) -> Tensor:
        """The largest absolute values, summed over the batch."""
        return self.weight * require_vectors(x).abs().amax(-1).sum()

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The entries cut down to a level."""
        require_common_step(step, 1, "MaxNorm")
        wide = require_vectors(x)
        return (wide - _within(wide, scaled(step, self.weight, wide))).to(x.dtype)

    def conjugate(self) -> L1Ball:
        """The indicator of the ball."""
        return L1Ball(self.weight)


def _within(x: Tensor, radius: Step) -> Tensor:
    """The projection of the last dimension onto the l1 ball."""
    size = x.abs()
    inside = size.sum(-1, keepdim=True) <= radius
    # As in the simplex, a common shift avoids cancellation.
    centered = size - size.detach().amax(-1, keepdim=True)
    return torch.where(inside, x, x.sign() * torch.relu(centered - _level(centered, radius)))


@dataclass(frozen=True)
class Isotonic(Function):
    r"""The indicator of :math:`x_1 \le x_2 \le \dots \le x_n` in the last dimension. Its prox is isotonic regression,

    .. math:: \operatorname{prox}(a)_i = \max_{j \le i}\min_{k \ge i} \frac{a_j + \dots + a_k}{k - j + 1} ,

    which is computed by this formula, in memory proportional to n².

    Example:
        >>> Isotonic().prox(torch.tensor([1.0, 3.0, 2.0, 4.0]))
        tensor([1.0000, 2.5000, 2.5000, 4.0000])
    """

    def value(self, x: Tensor) -> Tensor:
        """Zero where every last dimension increases, +inf otherwise."""
        wide = require_vectors(x)
        room = 8 * x.shape[-1] * torch.finfo(x.dtype).eps * wide.abs().amax(-1, keepdim=True).clamp_min(1.0)
        return indicator_of_all((wide.diff(dim=-1) >= -room).all(-1), wide)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The Euclidean projection, as means over the runs of equal entries. Its derivative takes the same means."""
        check_step(step, x)
        wide = require_vectors(x)
        with constant():
            levels = _isotonic(wide.detach())
        same = (levels[..., None] == levels[..., None, :]).to(wide.dtype)
        means = same / same.sum(-1, keepdim=True)
        return (means @ wide[..., None])[..., 0].to(x.dtype)


def _isotonic(x: Tensor) -> Tensor:
    """The increasing vectors nearest to the given ones, with equal entries where they are means of one run."""
    n = x.shape[-1]
    sums = torch.nn.functional.pad(x.cumsum(-1), (1, 0))
    place = torch.arange(n, device=x.device)
    count = (place - place[:, None] + 1).clamp_min(1)
    means = (sums[..., None, 1:] - sums[..., :-1, None]) / count
    later = place >= place[:, None]
    low = torch.where(later, means, torch.inf).flip(-1).cummin(-1).values.flip(-1)
    high = torch.where(later, low, -torch.inf).cummax(-2).values
    return high.diagonal(dim1=-2, dim2=-1)

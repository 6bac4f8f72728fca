"""Functions of vectors, which act on the last dimension: the simplex, groups, and their conjugates."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ShapeError, require_positive
from .base import Function, Step, check_step, indicator_of_all, scaled, widened

__all__ = ["Ball", "GroupL2", "Maximum", "Simplex"]


def require_common_step(step: Step, dims: int, kind: str) -> None:
    """Check that a step is constant within each vector or matrix."""
    if isinstance(step, Tensor) and any(size != 1 for size in step.shape[-dims:]):
        raise ShapeError(
            f"{kind} needs one step per {'vector' if dims == 1 else 'matrix'}: a tensor step of shape "
            f"{tuple(step.shape)} must have size 1 in its last {dims} dimension(s)"
        )


def _vectors(x: Tensor) -> Tensor:
    wide = widened(x)
    if x.dim() == 0:
        raise ShapeError("a function of vectors needs one dimension or more, got a single number of shape ()")
    return wide


@dataclass(frozen=True)
class Simplex(Function):
    r"""The indicator of the simplex :math:`\{x \ge 0, \sum_i x_i = 1\}`. Its prox is sparsemax.

    .. math:: \operatorname{prox}(a) = \max(a - \tau, 0), \qquad \textstyle\sum_i \max(a_i - \tau, 0) = 1 ,

    with :math:`\tau` found by sorting (Held, Wolfe and Crowder 1974; Martins and Astudillo 2016).

    Example:
        >>> Simplex().prox(torch.tensor([0.5, 0.4, -1.0]))
        tensor([0.5500, 0.4500, 0.0000])
    """

    def value(self, x: Tensor) -> Tensor:
        """Zero where every last dimension is a distribution, +inf otherwise."""
        wide = _vectors(x)
        tolerance = 4 * torch.finfo(x.dtype).eps * (x.shape[-1] + 4)
        return indicator_of_all((wide >= -tolerance).all(-1) & ((wide.sum(-1) - 1).abs() <= tolerance), wide)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The Euclidean projection."""
        check_step(step, x)
        wide = _vectors(x)
        # The projection is invariant to a common shift. Subtracting the maximum avoids cancellation.
        centered = wide - wide.detach().amax(-1, keepdim=True)
        return torch.relu(centered - _level(centered, 1.0)).to(x.dtype)

    def conjugate(self) -> "Maximum":
        """The largest entry."""
        return Maximum()


@dataclass(frozen=True)
class Maximum(Function):
    r"""The largest entry :math:`g(x) = \max_i x_i`, conjugate of the :class:`Simplex`.

    .. math::

        \operatorname{prox}_{\eta g}(a) = \min(a, \tau), \qquad \textstyle\sum_i \max(a_i - \tau, 0) = \eta

    Example:
        >>> Maximum().prox(torch.tensor([3.0, 1.0]), 1.0)
        tensor([2., 1.])
    """

    def value(self, x: Tensor) -> Tensor:
        """The largest entries, summed over the batch."""
        return _vectors(x).amax(-1).sum()

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The entries above a level cut down to it."""
        require_common_step(step, 1, "Maximum")
        wide = _vectors(x)
        return torch.minimum(wide, _level(wide, scaled(step, 1.0, wide))).to(x.dtype)

    def conjugate(self) -> Simplex:
        """The indicator of the simplex."""
        return Simplex()


def _level(x: Tensor, mass: Step) -> Tensor:
    """The level τ with Σ max(x − τ, 0) = mass over the last dimension."""
    ordered = x.sort(dim=-1, descending=True).values
    count = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
    levels = (ordered.cumsum(-1) - mass) / count
    support = (ordered > levels).sum(-1, keepdim=True).clamp_min(1)
    return levels.gather(-1, support - 1)


@dataclass(frozen=True)
class GroupL2(Function):
    r"""The weighted Euclidean norm :math:`g(x) = w\|x\|_2` of the last dimension.

    .. math:: \operatorname{prox}_{\eta g}(a) = \max\Bigl(1 - \frac{\eta w}{\|a\|}, 0\Bigr)\, a

    Example:
        >>> GroupL2(1.0).prox(torch.tensor([[3.0, 4.0], [0.1, 0.2]]))
        tensor([[2.4000, 3.2000],
                [0.0000, 0.0000]])
    """

    weight: float

    def __post_init__(self) -> None:
        require_positive("weight", self.weight, zero=True)

    def value(self, x: Tensor) -> Tensor:
        """The weighted norms, summed over the batch."""
        return self.weight * torch.linalg.vector_norm(_vectors(x), dim=-1).sum()

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """Block soft thresholding."""
        require_common_step(step, 1, "GroupL2")
        wide = _vectors(x)
        threshold = scaled(step, self.weight, wide)
        if self.weight == 0:
            return x
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        # Clamping before dividing keeps the gradient finite at zero. Unlike 1 − threshold / norm, the result is exact.
        norm = torch.maximum(norm, threshold) if isinstance(threshold, Tensor) else norm.clamp_min(threshold)
        return (wide * ((norm - threshold) / norm)).to(x.dtype)

    def conjugate(self) -> "Ball":
        """The indicator of the dual ball."""
        return Ball(self.weight)


@dataclass(frozen=True)
class Ball(Function):
    r"""The indicator of :math:`\|x\|_2 \le r` in the last dimension, conjugate of :class:`GroupL2`.

    .. math:: \operatorname{prox}(a) = \min\Bigl(1, \frac{r}{\|a\|}\Bigr)\, a

    Example:
        >>> Ball(1.0).prox(torch.tensor([[3.0, 4.0], [0.1, 0.2]]))
        tensor([[0.6000, 0.8000],
                [0.1000, 0.2000]])
    """

    radius: float

    def __post_init__(self) -> None:
        require_positive("radius", self.radius, zero=True)

    def value(self, x: Tensor) -> Tensor:
        """Zero where every last dimension lies in the ball, +inf otherwise."""
        wide = _vectors(x)
        room = self.radius * (1 + 8 * torch.finfo(x.dtype).eps)
        return indicator_of_all(torch.linalg.vector_norm(wide, dim=-1) <= room, wide)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The Euclidean projection."""
        check_step(step, x)
        if self.radius == 0:
            return x * 0.0
        wide = _vectors(x)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp_min(self.radius)
        return (wide * (self.radius / norm)).to(x.dtype)

    def conjugate(self) -> GroupL2:
        """The weighted norm."""
        return GroupL2(self.radius)

"""Norms of vectors and of groups of their entries, and the balls that are their conjugates."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import OptionError, ShapeError
from .base import Function, Step, broadcasts_to, check_step, indicator_of_all, require_weight, scaled
from .structured import require_common_step, require_vectors

__all__ = ["Ball", "GroupL2"]


@dataclass(frozen=True)
class GroupL2(Function):
    r"""The weighted Euclidean norm :math:`g(x) = w\|x\|_2` of the last dimension, or the sum of those of its groups,
    :math:`\sum_k w_k\|x_{G_k}\|_2`.

    .. math:: \operatorname{prox}_{\eta g}(a) = \max\Bigl(1 - \frac{\eta w}{\|a\|}, 0\Bigr)\, a

    Args:
        weight: :math:`w \ge 0`, a number, or a tensor: one number per group, one per row as ``(rows, 1)``, or both as
            ``(rows, groups)``. Gradients reach the tensor.
        groups: The number of the group of each entry, counted from zero; None: one group.

    Example:
        >>> GroupL2(1.0).prox(torch.tensor([[3.0, 4.0], [0.1, 0.2]]))
        tensor([[2.4000, 3.2000],
                [0.0000, 0.0000]])
        >>> GroupL2(torch.tensor([2.0, 0.0]), [0, 0, 1]).prox(torch.tensor([3.0, 4.0, 0.5]))
        tensor([1.8000, 2.4000, 0.5000])
    """

    weight: float | Tensor
    groups: Tensor | Sequence[int] | None = None

    def __post_init__(self) -> None:
        require_weight("weight", self.weight)
        _check_groups(self.groups)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise unless there is a group for each entry and the weight has a number for each group or row."""
        _require_groups(self.groups, shape)
        _require_per_group("weight", self.weight, self.groups, shape)

    def value(self, x: Tensor) -> Tensor:
        """The weighted norms, summed over the batch."""
        wide = require_vectors(x)
        return (_per_group("weight", self.weight, self.groups, wide) * _norms(wide, self.groups)).sum()

    def sums(self, x: Tensor, dims: int) -> Tensor:
        """g of each sample; the weight may differ between samples."""
        wide = require_vectors(x)
        values = _per_group("weight", self.weight, self.groups, wide) * _norms(wide, self.groups)
        lead = x.dim() - dims
        return values.flatten(lead).sum(-1) if values.dim() > lead else values

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """Block soft thresholding."""
        require_common_step(step, 1, "GroupL2")
        wide = require_vectors(x)
        threshold = scaled(step, _spread("weight", self.weight, self.groups, wide), wide)
        if not isinstance(self.weight, Tensor) and self.weight == 0:
            return x
        norm = _spread_norms(wide, self.groups)
        # Clamping before dividing keeps the gradient finite at zero. Unlike 1 − threshold / norm, the result is exact.
        norm = torch.maximum(norm, threshold) if isinstance(threshold, Tensor) else norm.clamp_min(threshold)
        if isinstance(self.weight, Tensor):
            norm = norm.clamp_min(torch.finfo(wide.dtype).tiny)
        return (wide * ((norm - threshold) / norm)).to(x.dtype)

    def conjugate(self) -> "Ball":
        """The indicator of the dual ball."""
        return Ball(self.weight, self.groups)


@dataclass(frozen=True)
class Ball(Function):
    r"""The indicator of :math:`\|x\|_2 \le r` in the last dimension, or in each of its groups, conjugate of
    :class:`GroupL2`. The radius may differ between groups and rows, as the weight of :class:`GroupL2`.

    .. math:: \operatorname{prox}(a) = \min\Bigl(1, \frac{r}{\|a\|}\Bigr)\, a

    Example:
        >>> Ball(1.0).prox(torch.tensor([[3.0, 4.0], [0.1, 0.2]]))
        tensor([[0.6000, 0.8000],
                [0.1000, 0.2000]])
    """

    radius: float | Tensor
    groups: Tensor | Sequence[int] | None = None

    def __post_init__(self) -> None:
        require_weight("radius", self.radius)
        _check_groups(self.groups)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise unless there is a group for each entry and the radius has a number for each group or row."""
        _require_groups(self.groups, shape)
        _require_per_group("radius", self.radius, self.groups, shape)

    def value(self, x: Tensor) -> Tensor:
        """Zero where every last dimension lies in the ball, +inf otherwise."""
        wide = require_vectors(x)
        room = _per_group("radius", self.radius, self.groups, wide) * (1 + 8 * torch.finfo(x.dtype).eps)
        return indicator_of_all(_norms(wide, self.groups) <= room, wide)

    def sums(self, x: Tensor, dims: int) -> Tensor:
        """g of each sample; the radius may differ between samples."""
        wide = require_vectors(x)
        room = _per_group("radius", self.radius, self.groups, wide) * (1 + 8 * torch.finfo(x.dtype).eps)
        outside = torch.where(_norms(wide, self.groups) <= room, wide.new_zeros(()), torch.inf)
        lead = x.dim() - dims
        return outside.flatten(lead).sum(-1) if outside.dim() > lead else outside

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The Euclidean projection."""
        check_step(step, x)
        if not isinstance(self.radius, Tensor) and self.radius == 0:
            return x * 0.0
        wide = require_vectors(x)
        radius = _spread("radius", self.radius, self.groups, wide)
        norm = _spread_norms(wide, self.groups)
        if isinstance(radius, Tensor):
            norm = torch.maximum(norm, radius).clamp_min(torch.finfo(wide.dtype).tiny)
        else:
            norm = norm.clamp_min(radius)
        return (wide * (radius / norm)).to(x.dtype)

    def conjugate(self) -> GroupL2:
        """The weighted norm."""
        return GroupL2(self.radius, self.groups)


def _check_groups(groups: Tensor | Sequence[int] | None) -> None:
    if groups is None:
        return
    index = torch.as_tensor(groups)
    if index.dim() != 1 or index.is_floating_point() or index.is_complex() or not len(index) or int(index.min()) < 0:
        raise OptionError(f"groups holds one whole number ≥ 0 per entry, the number of its group; got {groups!r:.60}")


def _require_groups(groups: Tensor | Sequence[int] | None, shape: tuple[int, ...]) -> None:
    if groups is not None and len(groups) != shape[-1]:
        raise ShapeError(f"groups has {len(groups)} entries, but x of shape {tuple(shape)} has {shape[-1]} in a row")


def _require_per_group(
    name: str, weight: float | Tensor, groups: Tensor | Sequence[int] | None, shape: tuple[int, ...]
) -> None:
    """Raise unless a weight is one number, or has one for each group, each row or both."""
    count = 1 if groups is None else int(torch.as_tensor(groups).max()) + 1
    if isinstance(weight, Tensor) and weight.numel() != 1 and not broadcasts_to(weight.shape, (*shape[:-1], count)):
        raise ShapeError(
            f"{name} of shape {tuple(weight.shape)} does not fit x of shape {tuple(shape)} with {count} group(s) in a "
            f"row; give one number, {count} for the groups, or one per row as (rows, 1)"
        )


def _per_group(name: str, weight: float | Tensor, groups: Tensor | Sequence[int] | None, x: Tensor) -> float | Tensor:
    """A weight that broadcasts to the norms of the groups."""
    if not isinstance(weight, Tensor) or weight.numel() == 1:
        return weight.reshape(()) if isinstance(weight, Tensor) else weight
    _require_per_group(name, weight, groups, x.shape)
    return weight.to(x.dtype) if groups is not None else weight.to(x.dtype).squeeze(-1)


def _spread(name: str, weight: float | Tensor, groups: Tensor | Sequence[int] | None, x: Tensor) -> float | Tensor:
    """The weight of the group of each entry."""
    each = _per_group(name, weight, groups, x)
    if not isinstance(each, Tensor) or each.dim() == 0:
        return each
    if groups is None:
        return each.unsqueeze(-1)
    return each[..., torch.as_tensor(groups, device=x.device)] if each.shape[-1] != 1 else each


def _norms(x: Tensor, groups: Tensor | Sequence[int] | None) -> Tensor:
    """The norm of each group, or of the last dimension."""
    if groups is None:
        return torch.linalg.vector_norm(x, dim=-1)
    _require_groups(groups, x.shape)
    index = torch.as_tensor(groups, device=x.device)
    member = torch.nn.functional.one_hot(index).to(x.dtype)
    size = x.detach().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    squares = (x / size).square() @ member
    some = squares > 0
    return torch.where(some, torch.where(some, squares, 1.0).sqrt(), 0.0) * size


def _spread_norms(x: Tensor, groups: Tensor | Sequence[int] | None) -> Tensor:
    """The norm of the group of each entry."""
    norms = _norms(x, groups)
    return norms.unsqueeze(-1) if groups is None else norms[..., torch.as_tensor(groups, device=x.device)]

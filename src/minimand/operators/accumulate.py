"""The weighted sum of which the updates of solvers and networks are made."""

from typing import Any

import torch
from torch import Tensor

from ..errors import is_traced

__all__ = ["Weight", "accumulate", "is_zero"]

#: The coefficient of a term: a number, or a tensor that broadcasts against it.
Weight = float | Tensor


def accumulate(total: Tensor | None, weight: Weight, x: Tensor) -> Tensor:
    r"""``total + weight · x``, or the product alone; a weight that is the number 0 or 1 costs no product.

    >>> accumulate(torch.tensor([1.0]), 0.5, torch.tensor([4.0]))
    tensor([3.])
    """
    if isinstance(weight, Tensor):
        mixed = weight.dtype != x.dtype or (total is not None and total.dtype != x.dtype)
        traced = is_traced(x) or is_traced(weight) or (total is not None and is_traced(total))
        if weight.requires_grad and not mixed and not traced:
            return _Accumulate.apply(total, weight, x)
        if total is None or mixed:
            return weight * x if total is None else total + weight * x
        return torch.addcmul(total, weight, x)
    if total is None:
        return x if weight == 1 else weight * x
    if is_zero(weight):
        return total
    return total + x if weight == 1 else torch.add(total, x, alpha=weight)


class _Accumulate(torch.autograd.Function):
    """``total + weight · x`` where the weight is learned: its gradient is an inner product, which reads g and x once
    and stores nothing."""

    @staticmethod
    def forward(ctx: Any, total: Tensor | None, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(weight, x)
        ctx.save_for_forward(weight, x)
        return weight * x if total is None else torch.addcmul(total, weight, x)

    @staticmethod
    def jvp(ctx: Any, total: Tensor | None, weight: Tensor | None, x: Tensor | None) -> Tensor:
        at_weight, at_x = ctx.saved_tensors
        change = torch.zeros_like(at_x) if total is None else total
        change = change if weight is None else change + weight * at_x
        return change if x is None else change + at_weight * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, x = ctx.saved_tensors
        added, learned, moved = ctx.needs_input_grad
        return grad if added else None, _inner(grad, x, weight) if learned else None, grad * weight if moved else None


def _inner(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The sum of ``grad · x`` over what a weight was broadcast along."""
    dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
    exact = grad.dtype in (torch.float32, torch.float64)  # shorter types would be summed in their own precision
    alike = grad.shape == x.shape and grad.stride() == x.stride()
    if weight.numel() > 1 or not (dense and exact and alike):
        return (grad * x).sum_to_size(weight.shape)
    flat = [each.as_strided((grad.numel(),), (1,)) for each in (grad, x)]
    return torch.dot(*flat).view(weight.shape)


def is_zero(weight: Weight) -> bool:
    """Whether a coefficient is the number 0, so that its term is not there."""
    return not isinstance(weight, Tensor) and weight == 0

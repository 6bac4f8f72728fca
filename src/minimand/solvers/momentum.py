r"""The update rules of heavy ball and Nesterov, one for solvers and networks alike.

A solver gives them gradient steps and the momentum of a theorem, a network
(:class:`~minimand.nn.OptimizationNet`) its blocks and coefficients that it may learn.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from ..errors import is_traced

__all__ = ["Weight", "accumulate", "extrapolate", "fista_weight", "heavy_ball", "nesterov_schedule"]

#: The coefficient of a term: a number, or a tensor that broadcasts against it.
Weight = float | Tensor


def accumulate(total: Tensor | None, weight: Weight, x: Tensor) -> Tensor:
    r"""``total + weight · x``, or the product alone; a weight that is the number 0 or 1 costs no product.

    >>> accumulate(torch.tensor([1.0]), 0.5, torch.tensor([4.0]))
    tensor([3.])
    """
    if isinstance(weight, Tensor):
        mixed = weight.dtype != x.dtype or (total is not None and total.dtype != x.dtype)
        if weight.requires_grad and not mixed and not is_traced(x):
            return _Accumulate.apply(total, weight, x)
        if total is None or mixed:
            return weight * x if total is None else total + weight * x
        return torch.addcmul(total, weight, x)
    if total is None:
        return x if weight == 1 else weight * x
    if _is_zero(weight):
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
    dense = grad.is_contiguous() or grad.is_contiguous(memory_format=torch.channels_last)
    exact = grad.dtype in (torch.float32, torch.float64)  # shorter types would be summed in their own precision
    if weight.numel() > 1 or not (dense and exact) or grad.stride() != x.stride():
        return (grad * x).sum_to_size(weight.shape)
    flat = [each.as_strided((grad.numel(),), (1,)) for each in (grad, x)]
    return torch.dot(*flat).view(weight.shape)


def heavy_ball(target: Tensor, x: Tensor, previous: Tensor, momentum: Weight, keep: Weight = 0.0) -> Tensor:
    r"""Polyak's update, given :math:`T(x)`,

    .. math:: x^+ = T(x) + \kappa\,x + \mu\,(x - x_-) = T(x) + \beta_1 x + \beta_2 x_-,
        \qquad \beta_1 = \kappa + \mu,\quad \beta_2 = -\mu .

    With :math:`T(x) = x - \eta\nabla f(x)` and :math:`\kappa = 0` it is the heavy-ball method, whose fixed points are
    those of T, to the bit; :math:`\kappa = 1,\ \mu = 0` is a residual connection.

    Source: 002, eq. (16).

    >>> one = torch.ones(1)
    >>> heavy_ball(3 * one, 2 * one, one, 0.5)
    tensor([3.5000])
    """
    if previous is x:
        # At rest.
        return accumulate(target, keep, x)
    if isinstance(keep, Tensor):
        # Learned: x and x₋ are at hand in the backward pass, their difference would have to be stored.
        return accumulate(accumulate(target, keep + momentum, x), -momentum, previous)
    kept = accumulate(target, keep, x)
    return kept if _is_zero(momentum) else accumulate(kept, momentum, x - previous)


def extrapolate(x: Tensor, previous: Tensor, momentum: Weight, keep: Weight = 1.0) -> Tensor:
    r"""The point :math:`\kappa\,x + \mu\,(x - x_-)` at which Nesterov's method takes its gradient step;
    :math:`\kappa = 1` in the algorithm, and :math:`\beta_1 = \kappa + \mu,\ \beta_2 = -\mu` where both are learned.

    Source: 002, the relaxation of Nesterov's update.

    >>> one = torch.ones(1)
    >>> extrapolate(2 * one, one, 0.5)
    tensor([2.5000])
    """
    if previous is x:
        return accumulate(None, keep, x)
    if isinstance(keep, Tensor):
        return accumulate(accumulate(None, keep + momentum, x), -momentum, previous)
    kept = accumulate(None, keep, x)
    return kept if _is_zero(momentum) else accumulate(kept, momentum, x - previous)


def _is_zero(weight: Weight) -> bool:
    return not isinstance(weight, Tensor) and weight == 0


def fista_weight(t: Tensor) -> Tensor:
    r"""The next of Nesterov's weights, :math:`t_{k+1} = \tfrac12(1 + \sqrt{1 + 4t_k^2})`."""
    return (1 + torch.sqrt(1 + 4 * t * t)) / 2


@functools.cache
def nesterov_schedule(steps: int) -> tuple[float, ...]:
    r"""The momentum :math:`(t_k - 1)/t_{k+1}`, :math:`t_1 = 1`, before steps 0, 1, …; the first two have none.

    >>> [round(beta, 4) for beta in nesterov_schedule(4)]
    [0.0, 0.0, 0.2818, 0.434]
    """
    weight, momenta = torch.ones((), dtype=torch.float64), [0.0]
    while len(momenta) < steps:
        following = fista_weight(weight)
        momenta.append(float((weight - 1) / following))
        weight = following
    return tuple(momenta[:steps])

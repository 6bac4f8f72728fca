"""Repeated gathers of a weight's columns whose gradients are added in one buffer."""

from typing import Any

import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor

from ..tracing import in_transform, is_traced

__all__ = ["Columns"]


class Columns:
    """The columns of a weight (its input channels), in a layout from which they are gathered fast.

    A solver that draws a new sample in every iteration gathers other columns each time. Automatic differentiation
    would make a weight-sized gradient for each gather, mostly zeros, and add them. Here the backward pass of each
    gather adds its columns to one buffer, which becomes the weight's gradient after the last of them.

    >>> weight = torch.arange(6.0).reshape(2, 3).requires_grad_()
    >>> columns = Columns(weight)
    >>> part = columns.take(torch.tensor([2, 0]))
    >>> part.tolist()
    [[2.0, 0.0], [5.0, 3.0]]
    >>> (part.sum() + columns.take(torch.tensor([2])).sum()).backward()
    >>> weight.grad.tolist()
    [[1.0, 0.0, 2.0], [1.0, 0.0, 2.0]]
    """

    def __init__(self, weight: Tensor) -> None:
        rows = weight.transpose(0, 1).contiguous()
        # A tracer or forward mode would lose the side effect on the buffer; there the plain gather is differentiated.
        plain = is_traced(weight) or in_transform() or not torch.is_grad_enabled() or forward_mode._current_level >= 0
        self._sink = None if plain else _Sink()
        self._rows = rows if self._sink is None else _CollectGradient.apply(rows, self._sink)

    def take(self, index: Tensor) -> Tensor:
        """The columns ``index``, as a weight with that many inputs."""
        plain = self._sink is None
        part = self._rows.index_select(0, index) if plain else _Take.apply(self._rows, index, self._sink)
        return part.transpose(0, 1)


class _Sink:
    """The buffer to which all gathers add their gradients."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def add(self, shape: torch.Size, index: Tensor, part: Tensor) -> None:
        if self.total is None:
            self.total = part.new_zeros(shape)
        self.total.index_add_(0, index, part)

    def empty(self) -> Tensor | None:
        total, self.total = self.total, None
        return total


class _CollectGradient(torch.autograd.Function):
    """The identity, whose backward pass runs after those of all gathers and returns their buffer."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sink: _Sink) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sink = sink
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        total = ctx.sink.empty()
        return (total if grad is None else grad if total is None else grad + total), None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, sink: _Sink) -> Tensor:
        ctx.save_for_backward(index)
        ctx.sink, ctx.shape = sink, rows.shape
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        (index,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            # The buffer has no second derivative.
            return grad.new_zeros(ctx.shape).index_add(0, index, grad), None, None
        ctx.sink.add(ctx.shape, index, grad)
        return None, None, None

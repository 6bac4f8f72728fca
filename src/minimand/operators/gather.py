"""Gathering some of a weight's inputs again and again, and collecting the gradients in one place."""

from typing import Any

import torch
from torch import Tensor

from ..errors import is_traced

__all__ = ["Columns"]


class Columns:
    """The columns of a weight (its input channels), laid out so that any of them are gathered fast.

    A solver that draws a new sample in every iteration gathers other columns each time. Automatic differentiation of
    that makes a weight-sized gradient per gather, nearly all zeros, and adds them up. Here each gather adds its own
    columns to one buffer, which becomes the weight's gradient once, when all of them have been passed.

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
        # Under a tracer the side effect of the buffer would be lost; the plain gather is differentiated instead.
        self._sink = None if is_traced(weight) or not torch.is_grad_enabled() else _Sink()
        self._rows = rows if self._sink is None else _Spread.apply(rows, self._sink)

    def take(self, index: Tensor) -> Tensor:
        """The columns ``index``, as a weight with that many inputs."""
        plain = self._sink is None
        part = self._rows.index_select(0, index) if plain else _Take.apply(self._rows, index, self._sink)
        return part.transpose(0, 1)


class _Sink:
    """Where the gradients of all gathers meet."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def add(self, shape: torch.Size, index: Tensor, part: Tensor) -> None:
        if self.total is None:
            self.total = part.new_zeros(shape)
        self.total.index_add_(0, index, part)

    def empty(self) -> Tensor | None:
        total, self.total = self.total, None
        return total


class _Spread(torch.autograd.Function):
    """The identity; its gradient is what the gathers have collected. It runs after the last of them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sink: _Sink) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sink = sink
        return rows.view_as(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return ctx.sink.empty(), None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, sink: _Sink) -> Tensor:
        ctx.save_for_backward(index)
        ctx.sink, ctx.shape = sink, rows.shape
        return rows.index_select(0, index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.sink.add(ctx.shape, ctx.saved_tensors[0], grad)
        return None, None, None

"""Gram matrices and weighted sums of tensors, with cheap derivatives."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .tracing import forward_rule, in_transform, is_compiled, is_traced

__all__ = ["Weight", "accumulate", "gram", "is_zero", "without_autocast"]

#: The coefficient of a term: a number, or a tensor that broadcasts against it.
Weight = float | Tensor

# Below this many rows the copies cost what the products save.
_WORTH_BLOCKS = 256


def gram(matrix: Tensor, *, half: bool = False) -> Tensor:
    r""":math:`MM^\top` of a matrix, or of each matrix in a batch.

    About half of the products are computed and mirrored. The derivative takes one product,
    :math:`(G + G^\top)M`; automatic differentiation of ``M @ M.mT`` takes two. With ``half`` only the lower triangle
    is valid, which is all that a Cholesky factorisation reads.

    >>> gram(torch.tensor([[1.0, 2.0]]))
    tensor([[5.]])
    """
    if matrix.requires_grad or is_traced(matrix):
        rule = _CompiledGram if is_compiled(matrix) else _Gram
        return rule.apply(matrix, half)
    return _product(matrix, half)


def _product(matrix: Tensor, half: bool = False) -> Tensor:
    plain = matrix.dim() != 2 or len(matrix) < _WORTH_BLOCKS or is_traced(matrix)
    return matrix @ matrix.mT if plain else _by_blocks(matrix, half)


def _by_blocks(matrix: Tensor, half: bool) -> Tensor:
    """Multiply block rows up to the diagonal, 36 of 64 blocks. Mirror them above it, or fill in zeros."""
    out = matrix.new_empty(len(matrix), len(matrix))
    start = 0
    for rows in matrix.chunk(8):
        end = start + len(rows)
        torch.mm(rows, matrix[:end].mT, out=out[start:end, :end])
        if half:
            out[start:end, end:] = 0  # fresh memory may hold NaN
        else:
            out[:start, start:end] = out[start:end, :start].mT
        start = end
    return out


class _CompiledGram(torch.autograd.Function):
    @staticmethod
    def forward(matrix: Tensor, half: bool) -> Tensor:
        return _product(matrix, half)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, bool], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (matrix,) = ctx.saved_tensors
        # Copying a transpose goes in blocks; as a term of a sum it is read in strides, which takes four times as long.
        return (grad.mT.contiguous() + grad).to(matrix.dtype) @ matrix, None


class _Gram(_CompiledGram):
    """The same with forward-mode derivatives and vmap, which torch.compile refuses to trace."""

    generate_vmap_rule = True

    @forward_rule
    def jvp(ctx: Any, saved: list[Tensor], tangent: Tensor, _: None) -> Tensor:
        half = tangent @ saved[0].mT
        return half + half.mT


def accumulate(total: Tensor | None, weight: Weight, x: Tensor) -> Tensor:
    r"""``total + weight · x``, or the product alone where ``total`` is None. The number 0 or 1 costs no product.

    >>> accumulate(torch.tensor([1.0]), 0.5, torch.tensor([4.0]))
    tensor([3.])
    """
    if isinstance(weight, Tensor):
        mixed = weight.dtype != x.dtype or (total is not None and total.dtype != x.dtype)
        traced = is_traced(x) or is_traced(weight) or (total is not None and is_traced(total))
        if weight.requires_grad and not mixed and not traced and not in_transform():
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
    """``total + weight · x`` for a learned weight. The weight's gradient is an inner product that reads g and x once
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
    """The sum of ``grad · x`` over the dimensions along which the weight was broadcast."""
    dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
    exact = grad.dtype in (torch.float32, torch.float64)  # shorter types would be summed in their own precision
    alike = grad.shape == x.shape and grad.stride() == x.stride()
    if weight.numel() > 1 or not (dense and exact and alike):
        return (grad * x).sum_to_size(weight.shape)
    flat = [each.as_strided((grad.numel(),), (1,)) for each in (grad, x)]
    return torch.dot(*flat).view(weight.shape)


def is_zero(weight: Weight) -> bool:
    """Whether a coefficient is the number 0, so that its term can be left out."""
    return not isinstance(weight, Tensor) and weight == 0


def mixed_precision(y: Tensor) -> tuple[AbstractContextManager[Any], torch.dtype]:
    """The context of a layer's iterations, which turns float16 autocast off, and the type of a plain layer's output."""
    kind = y.device.type
    if y.is_meta or not torch.is_autocast_enabled(kind) or y.dtype == torch.float64:
        return nullcontext(), y.dtype
    dtype = torch.get_autocast_dtype(kind)
    return (torch.autocast(kind, enabled=False) if dtype == torch.float16 else nullcontext()), dtype


@contextmanager
def without_autocast() -> Iterator[None]:
    """A block, or as a decorator a function, whose products have the types of their factors on every device."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda", "mps", "xpu"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield

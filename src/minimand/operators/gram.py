"""The one Gram matrix of the library."""

from typing import Any

import torch
from torch import Tensor

from ..errors import is_traced

__all__ = ["gram"]

# Below this many rows the copies cost what the products save.
_WORTH_BLOCKS = 256


def gram(matrix: Tensor, *, half: bool = False) -> Tensor:
    r""":math:`MM^\top` of a matrix, or of each in a batch.

    Half of a symmetric product mirrors the other half, and its derivative needs one product,
    :math:`(G + G^\top)M`, where automatic differentiation of ``M @ M.mT`` makes two. With ``half`` only the lower
    triangle is promised, which is all that a Cholesky factorisation reads.

    >>> gram(torch.tensor([[1.0, 2.0]]))
    tensor([[5.]])
    """
    if matrix.requires_grad or is_traced(matrix):
        return _Gram.apply(matrix)
    return _product(matrix, half)


def _product(matrix: Tensor, half: bool = False) -> Tensor:
    plain = matrix.dim() != 2 or len(matrix) < _WORTH_BLOCKS or is_traced(matrix)
    return matrix @ matrix.mT if plain else _by_blocks(matrix, half)


def _by_blocks(matrix: Tensor, half: bool) -> Tensor:
    """Block rows up to the diagonal: 10 of 16 blocks are multiplied. Above it their mirror images, or zeros."""
    out = matrix.new_empty(len(matrix), len(matrix))
    start = 0
    for rows in matrix.chunk(4):
        end = start + len(rows)
        torch.mm(rows, matrix[:end].mT, out=out[start:end, :end])
        if half:
            out[start:end, end:] = 0  # not what the memory held, which may be no number
        else:
            out[:start, start:end] = out[start:end, :start].mT
        start = end
    return out


class _Gram(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor) -> Tensor:
        return _product(matrix)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (matrix,) = ctx.saved_tensors
        # A transpose is copied in blocks, but read in strides where it is a term of a sum: four times the time.
        return (grad.mT.contiguous() + grad).to(matrix.dtype) @ matrix

"""The one Gram matrix of the library."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["gram"]


def gram(matrix: Tensor) -> Tensor:
    r""":math:`MM^\top` of a matrix, or of each in a batch.

    The derivative of a symmetric product needs one product, :math:`(G + G^\top)M`, where automatic
    differentiation of ``M @ M.mT`` makes two.

    >>> gram(torch.tensor([[1.0, 2.0]]))
    tensor([[5.]])
    """
    return _Gram.apply(matrix)


class _Gram(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor) -> Tensor:
        return matrix @ matrix.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (matrix,) = ctx.saved_tensors
        return ((grad + grad.mT).to(matrix.dtype)) @ matrix

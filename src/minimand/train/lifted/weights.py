"""The weight step that every lifted method shares: a ridge regression, taken at once or with momentum."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import MinimandError, NonFiniteError
from ...operators.gram import gram
from ...solvers.linear import gram_factor, ridge_factor
from .maps import AffineMap, Layer

__all__ = ["Direction", "Momentum", "regress", "ridge_shift", "toward"]


class Direction(NamedTuple):
    """A change of a layer's weight (outputs × inputs), ``left @ right`` or ``right`` alone, and of its bias."""

    left: Tensor | None
    right: Tensor
    bias: Tensor | None

    def dense(self) -> Tensor:
        """The change as one matrix, the bias as its last column."""
        weight = self.right if self.left is None else self.left @ self.right
        return weight if self.bias is None else torch.cat([weight, self.bias.unsqueeze(1)], 1)

    def finite(self) -> bool:
        """Whether it holds no NaN or Inf, judged by its smaller factor, of which a bias is a sum."""
        if self.left is not None:
            return math.isfinite(float(self.left.sum()))
        total = self.right.sum() if self.bias is None else self.right.sum() + self.bias.sum()
        return math.isfinite(float(total))


def regress(rows: Tensor, residual: Tensor, shift: float, *, bias: bool, block: int | None = None) -> Direction:
    r"""The ridge regression :math:`E^\top R (R^\top R + sI)^{-1}` of a residual on rows, by the smaller side of R.

    With a bias, R has a last column of ones. :math:`E^\top R(R^\top R + sI)^{-1} = [(RR^\top + sI)^{-1}E]^\top
    R`; the second form stays a product of two factors, since whoever adds it to a weight multiplies and adds at
    once.

    ``block`` is for noisy mini-batches: the mean of the regressions of blocks of that many rows, with the ridge in
    proportion. A block's system costs less to form and to solve, its inverse is multiplied with, and along both
    well-determined and undetermined directions the mean agrees with the whole regression.

    >>> rows, residual = torch.tensor([[1.0], [1.0]]), torch.tensor([[2.0], [4.0]])
    >>> round(float(regress(rows, residual, 1.0, bias=False).dense()), 5)  # Σ e / (2 + 1)
    2.0
    """
    samples, features = rows.shape
    if min(samples, block or samples) >= features + bias:
        wide = F.pad(rows, (0, 1), value=1.0) if bias else rows
        solved = ridge_factor(wide.mT, shift).solve(residual.mT @ wide)
        return Direction(None, solved[:, :features], solved[:, features]) if bias else Direction(None, solved, None)
    if block is None:
        product = gram(rows, half=True)
        if bias:
            product = product + 1.0
        left = gram_factor(product, shift).solve(residual.mT)
    else:
        left = _by_blocks(rows, residual, shift, bias, block)
    return Direction(left, rows, left.sum(1) if bias else None)


def _by_blocks(rows: Tensor, residual: Tensor, shift: float, bias: bool, block: int) -> Tensor:
    parts = max(1, len(rows) // block)
    if len(rows) % parts:
        parts = 1
    stacked = rows.unflatten(0, (parts, -1))
    product = gram(stacked).add_(float(bias))
    factor, targets = gram_factor(product, shift / parts), residual.unflatten(0, (parts, -1))
    # Two triangular solves cost as much as the inverse with a quarter as many columns as rows.
    many = 4 * residual.shape[1] > stacked.shape[1]
    solved = factor.inverse() @ targets if many else factor.solve(targets.mT).mT
    return solved.flatten(0, 1).mT.div_(parts)


def ridge_shift(rows: Tensor, damping: float, block: int | None) -> float:
    """The ridge of a weight step: ``damping`` times the rows' number where they are regressed in blocks, else times
    the mean eigenvalue of their Gram matrix, and never zero."""
    if block is not None:
        return damping * rows.shape[0]
    mean = (float(rows.square().sum()) + rows.shape[0]) / (rows.shape[1] + 1)
    return max(damping * mean, torch.finfo(rows.dtype).tiny * 1e3)


def toward(affine: AffineMap, x: Tensor, residual: Tensor, damping: float, *, block: int | None = None) -> Direction:
    """The damped change of a layer's parameters that moves its z at ``x`` by ``residual``; :func:`ridge_shift` damps.

    Raises:
        NonFiniteError: If the regression has no finite solution.
    """
    rows, columns = affine.rows(x), affine.columns(residual)
    if affine.scale is not None:
        # The regression is of what comes before the normalisation.
        columns = columns * affine.scale / (affine.scale.square() + 1e-6)
    try:
        shift = ridge_shift(rows, damping, block)
        return regress(rows, columns, shift, bias=affine.bias is not None, block=block)
    except MinimandError as error:
        raise NonFiniteError(f"the weight update of {affine.layer.path}: {error}") from None


class Momentum:
    r"""Heavy-ball updates :math:`V \leftarrow mV + \eta D,\; W \leftarrow W + V` that can be taken back.

    The memory grows with what there is to remember: at update t it is :math:`\min(m, t/(t + 10))`.
    """

    def __init__(self, layers: Sequence[Layer], momentum: float) -> None:
        self.layers = layers
        self.momentum = momentum
        pairs = [(layer.weight, layer.bias) for layer in layers if not layer.frozen]
        self._parameters = [tensor for pair in pairs for tensor in pair if tensor is not None]
        self._velocity = [torch.zeros_like(tensor) for tensor in self._parameters]
        self._kept = [tensor.clone() for tensor in self._parameters]
        self._count = 0

    def apply(self, directions: Sequence[Direction | None], rates: Sequence[float]) -> None:
        """Move every layer that has a direction; those that are frozen have none.

        Raises:
            NonFiniteError: If a direction is not finite; nothing has moved then.
        """
        for layer, direction in zip(self.layers, directions, strict=True):
            if direction is not None and not direction.finite():
                raise NonFiniteError(f"the weight update of {layer.path} is NaN or Inf")
        momentum = min(self.momentum, self._count / (self._count + 10))
        self._count += 1
        velocity = iter(self._velocity)
        for direction, rate in zip(directions, rates, strict=True):
            if direction is None:
                continue
            weight = next(velocity).flatten(1)
            if direction.left is None:
                weight.mul_(momentum).add_(direction.right, alpha=rate)
            else:
                weight.addmm_(direction.left, direction.right, beta=momentum, alpha=rate)
            if direction.bias is not None:
                next(velocity).mul_(momentum).add_(direction.bias, alpha=rate)
        torch._foreach_copy_(self._kept, self._parameters)
        torch._foreach_add_(self._parameters, self._velocity)

    def undo(self) -> None:
        """Take the last update back, to the bit."""
        torch._foreach_copy_(self._parameters, self._kept)

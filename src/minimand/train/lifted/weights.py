"""The weight step of all lifted methods: a ridge regression, applied in full or with momentum."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import MinimandError, NonFiniteError
from ...linalg import gram
from ...solvers.linear import gram_factor, ridge_factor
from .maps import AffineMap, LiftedLayer

__all__ = ["Direction", "MomentumUpdate", "regress", "ridge_shift", "weight_direction", "weight_directions"]

# Tasks with more blocks than this are not stacked with other layers' tasks.
_FEW_BLOCKS = 16


class Direction(NamedTuple):
    """A change of a layer's weight (outputs × inputs) and bias.

    The change of the weight is ``left @ right``, or ``right`` if ``left`` is None. ``norm`` are the changes of scale
    and shift of the layer's batch normalisation.
    """

    left: Tensor | None
    right: Tensor
    bias: Tensor | None
    norm: tuple[Tensor, Tensor] | None = None

    def dense(self) -> Tensor:
        """The change as one matrix, the bias as its last column."""
        weight = self.right if self.left is None else self.left @ self.right
        return weight if self.bias is None else torch.cat([weight, self.bias.unsqueeze(1)], 1)

    def finite(self) -> bool:
        """Whether all entries are finite. Only the smaller factor is inspected, or the bias, which is its sum."""
        if self.left is not None:
            return math.isfinite(float((self.left if self.bias is None else self.bias).sum()))
        total = self.right.sum() if self.bias is None else self.right.sum() + self.bias.sum()
        return math.isfinite(float(total))


class Regression(NamedTuple):
    """The ridge regression of a residual E on rows R; with ``bias``, R has an additional last column of ones."""

    rows: Tensor
    residual: Tensor
    shift: float
    bias: bool

    def parts(self, block: int | None) -> int | None:
        """The number of row blocks that are regressed separately; None if the columns of R are regressed together."""
        samples, features = self.rows.shape
        # With many more rows than columns (patches of images) the Gram matrix of the columns is cheap.
        if min(samples, block or samples) >= features + self.bias or samples >= 4 * (features + self.bias):
            return None
        parts = max(1, samples // block) if block else 1
        return 1 if samples % parts else parts


def regress(rows: Tensor, residual: Tensor, shift: float, *, bias: bool, block: int | None = None) -> Direction:
    r"""The ridge regression :math:`E^\top R (R^\top R + sI)^{-1}` of a residual on rows, by the smaller side of R.

    With a bias, R has a last column of ones. The identity :math:`E^\top R(R^\top R + sI)^{-1} = [(RR^\top +
    sI)^{-1}E]^\top R` allows a solve on the smaller side. The second form is returned as two factors, so that adding it
    to a weight is one fused multiply-add.

    ``block``, for noisy mini-batches, returns the mean of the regressions on blocks of that many rows, each with the
    ridge in proportion. A block's system is cheaper to form and to solve, and the mean agrees with the full regression
    along both well-determined and undetermined directions. If there are at least four times as many rows as columns, as
    with patches of images, all rows are regressed together.

    >>> rows, residual = torch.tensor([[1.0], [1.0]]), torch.tensor([[2.0], [4.0]])
    >>> round(float(regress(rows, residual, 1.0, bias=False).dense()), 5)  # Σ e / (2 + 1)
    2.0
    """
    return _regress([Regression(rows, residual, shift, bias)], block)[0]


def _regress(tasks: Sequence[Regression], block: int | None) -> list[Direction]:
    """Solve all regressions; systems of equal size are factored in one call, which dominates the cost of small ones."""
    found: dict[int, Direction] = {}
    alike: dict[tuple[int, int, bool, int], list[int]] = {}
    for k, task in enumerate(tasks):
        parts = task.parts(block)
        if parts is None:
            found[k] = _by_columns(task)
        elif block is None:
            found[k] = _by_rows(task)
        else:
            # Many blocks fill a call by themselves, and stacking them with other layers would cost memory.
            alone = k if parts > _FEW_BLOCKS else -1
            alike.setdefault((parts, len(task.rows), task.bias, alone), []).append(k)
    for (parts, *_), numbers in alike.items():
        found.update(zip(numbers, _by_blocks([tasks[k] for k in numbers], parts), strict=True))
    return [found[k] for k in range(len(tasks))]


def _by_columns(task: Regression) -> Direction:
    rows, residual, shift, bias = task
    wide = F.pad(rows, (0, 1), value=1.0) if bias else rows
    solved = ridge_factor(wide.mT, shift).solve(residual.mT @ wide)
    features = rows.shape[1]
    return Direction(None, solved[:, :features], solved[:, features]) if bias else Direction(None, solved, None)


def _by_rows(task: Regression) -> Direction:
    rows, residual, shift, bias = task
    product = gram(rows, half=True)
    left = gram_factor(product + 1.0 if bias else product, shift).solve(residual.mT)
    return Direction(left, rows, left.sum(1) if bias else None)


def _by_blocks(tasks: Sequence[Regression], parts: int) -> list[Direction]:
    """Regressions by blocks, for tasks with equal numbers of rows and equal ``bias``.

    Every Gram matrix is divided by its shift, so that all have the ridge 1.
    """
    bias, size = tasks[0].bias, len(tasks[0].rows) // parts
    stacked = [task.rows.reshape(parts, size, -1) for task in tasks]
    targets = [task.residual.reshape(parts, size, -1) for task in tasks]
    shifts = [task.shift / parts for task in tasks]
    products = torch.stack([gram(rows).add_(bias).div_(shift) for rows, shift in zip(stacked, shifts, strict=True)])
    factor = gram_factor(products, 1.0)
    if factor.damping and len(tasks) > 1:
        # Additional damping that one layer needs must not reach the others.
        return [direction for task in tasks for direction in _by_blocks([task], parts)]
    # Two triangular solves cost as much as the inverse if there are a quarter as many columns as rows.
    if 4 * max(target.shape[2] for target in targets) > size:
        inverses = factor.inverse()
        solved = [torch.bmm(inverse, target) for inverse, target in zip(inverses, targets, strict=True)]
    else:
        factors = [dataclasses.replace(factor, factor=each) for each in factor.factor]
        solved = [each.solve(target.mT).mT for each, target in zip(factors, targets, strict=True)]
    lefts = [each.flatten(0, 1).mT.div_(task.shift) for each, task in zip(solved, tasks, strict=True)]
    return [Direction(left, task.rows, left.sum(1) if bias else None) for left, task in zip(lefts, tasks, strict=True)]


def ridge_shift(rows: Tensor, damping: float, bias: bool) -> float:
    """The ridge of a weight step, always positive: ``damping`` times the mean diagonal entry of the Gram matrix.

    So the damping does not depend on the number of rows, and without a bias not on their scale.
    """
    flat = rows.reshape(-1)
    mean = (float(flat @ flat) + bias * rows.shape[0]) / (rows.shape[1] + bias)
    return max(damping * mean, torch.finfo(rows.dtype).tiny * 1e3)


def weight_direction(
    affine: AffineMap, x: Tensor, residual: Tensor, damping: float, *, block: int | None = None
) -> Direction:
    """The change of a layer's parameters that moves its z at ``x`` by ``residual``, damped by :func:`ridge_shift`.

    Raises:
        NonFiniteError: If the regression has no finite solution.
    """
    try:
        return _regress([_task(affine, x, residual, damping)], block)[0]
    except MinimandError as error:
        raise NonFiniteError(f"the weight update of {affine.layer.path}: {error}") from None


def weight_directions(
    layers: Sequence[tuple[AffineMap, Tensor, Tensor]], damping: Sequence[float], *, block: int | None = None
) -> list[Direction]:
    """:func:`weight_direction` for several layers at once, with a damping for each."""
    pairs = list(zip(layers, damping, strict=True))
    try:
        return _regress([_task(*layer, ridge) for layer, ridge in pairs], block)
    except MinimandError:
        # Solved one by one, so that the error names the layer.
        return [weight_direction(*layer, ridge, block=block) for layer, ridge in pairs]


def _task(affine: AffineMap, x: Tensor, residual: Tensor, damping: float) -> Regression:
    rows, columns, bias = affine.rows(x), affine.columns(residual), affine.bias is not None
    if affine.scale is not None:
        # The regression target is the output before the normalisation.
        columns = columns * affine.scale / (affine.scale.square() + 1e-6)
    return Regression(rows, columns, ridge_shift(rows, damping, bias), bias)


class MomentumUpdate:
    r"""Heavy-ball updates :math:`V \leftarrow mV + \eta D,\; W \leftarrow W + V`, with an undo of the last one.

    The momentum warms up: at update t it is :math:`\min(m, t/(t + 10))`.
    """

    def __init__(self, layers: Sequence[LiftedLayer], momentum: float) -> None:
        self.layers = layers
        self.momentum = momentum
        pairs = [(layer.weight, layer.bias, *layer.norm_parameters()) for layer in layers if not layer.frozen]
        self._parameters = [tensor for pair in pairs for tensor in pair if tensor is not None]
        self._velocity = [torch.zeros_like(tensor) for tensor in self._parameters]
        self._kept = [tensor.clone() for tensor in self._parameters]
        self._count = 0

    def apply(self, directions: Sequence[Direction | None], rates: Sequence[float]) -> None:
        """Update every layer that has a direction. Frozen layers have None.

        Raises:
            NonFiniteError: If a direction is not finite. No weight has changed in that case.
        """
        for layer, direction in zip(self.layers, directions, strict=True):
            if direction is not None and not direction.finite():
                raise NonFiniteError(f"the weight update of {layer.path} is NaN or Inf")
        momentum = min(self.momentum, self._count / (self._count + 10))
        self._count += 1
        velocity = iter(self._velocity)
        for layer, direction, rate in zip(self.layers, directions, rates, strict=True):
            if direction is None:
                continue
            weight = next(velocity).flatten(1)
            if direction.left is None:
                weight.mul_(momentum).add_(direction.right, alpha=rate)
            else:
                weight.addmm_(direction.left, direction.right, beta=momentum, alpha=rate)
            if direction.bias is not None:
                next(velocity).mul_(momentum).add_(direction.bias, alpha=rate)
            for number, _ in enumerate(layer.norm_parameters()):
                moving = next(velocity).mul_(momentum)
                if direction.norm is not None:
                    moving.add_(direction.norm[number], alpha=rate)
        torch._foreach_copy_(self._kept, self._parameters)
        torch._foreach_add_(self._parameters, self._velocity)

    def undo(self) -> None:
        """Undo the last update exactly."""
        torch._foreach_copy_(self._parameters, self._kept)

"""Solver layers that absorb the batch normalisation and the residual addition before their activation.

A batch normalisation is affine in the forward pass: it scales the rows of the operator and shifts the bias. Its
statistics are those of the batch in training and the running ones in evaluation. The skip of a residual block is added
to the bias ([Bibi2019], appendix J).
"""

import dataclasses
from typing import NamedTuple

from torch import Tensor, nn

from ...errors import ShapeError
from ...operators.batchnorm import fold_batch_norm
from ...solvers import Problem
from ..layers import SolverConv1d, SolverConv2d, SolverLayer, SolverLinear

__all__ = ["BlockConv1d", "BlockConv2d", "BlockLinear"]


@dataclasses.dataclass(frozen=True)
class BlockProblem(Problem):
    """A problem with a given ``A y + b``, computed by the plain layers, so that it equals theirs to the bit."""

    affine: Tensor | None = None

    def linear(self) -> Tensor:
        """``A y + b``."""
        return super().linear() if self.affine is None else self.affine.to(self.y.dtype)


class Reference(NamedTuple):
    """A module that is registered elsewhere, or None."""

    module: nn.Module | None


class BlockLayer(SolverLayer):
    """A solver layer whose operator and bias contain the batch normalisation and the skip after it."""

    norm: Reference

    def problem(self, y: Tensor, skip: Tensor | None = None) -> Problem:
        """The problem of the whole block; in training this updates the running statistics."""
        operator = self.operator(y)
        operator.check_input(y)
        weight = operator.weight
        affine = operator.affine(y.to(weight.dtype), self.bias)
        bias: Tensor | None = self.bias
        if (norm := self.norm.module) is not None:
            if y.dim() != 1 - operator.feature_dim:
                raise ShapeError(
                    f"a layer with batch normalisation takes an input of {1 - operator.feature_dim} dimensions, "
                    f"got {tuple(y.shape)}"
                )
            assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
            scale, shift, _ = fold_batch_norm(norm, affine)
            weight = weight * scale.reshape(-1, *(1,) * (weight.dim() - 1)).to(weight.dtype)
            bias = shift if bias is None else shift + scale * bias
            # The forward of the class: the one of the instance is now the identity.
            affine = type(norm).forward(norm, affine)
        operator = self._bounded(operator, weight)
        if skip is not None:
            affine = affine + skip
            bias = skip if bias is None else skip + operator.per_feature(bias)
        return BlockProblem(operator, self.function, y, bias, self.options.ridge, affine).working()


class BlockLinear(BlockLayer, SolverLinear):
    """``Linear → BatchNorm1d → + skip → activation`` as a solver."""


class BlockConv1d(BlockLayer, SolverConv1d):
    """``Conv1d → BatchNorm1d → + skip → activation`` as a solver."""


class BlockConv2d(BlockLayer, SolverConv2d):
    """``Conv2d → BatchNorm2d → + skip → activation`` as a solver."""

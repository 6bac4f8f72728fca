"""Solver layers that take a batch normalisation in.

A normalisation is affine in the forward pass: it scales the rows of the operator and moves the bias (000,
appendix J). Its scale is that of its running statistics, or of the batch at hand, as the mode says.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...errors import ShapeError
from ...solvers import Problem
from ..layers import SolverConv1d, SolverConv2d, SolverLayer, SolverLinear

__all__ = ["NormalisedConv1d", "NormalisedConv2d", "NormalisedLinear"]


@dataclasses.dataclass(frozen=True)
class NormalisedProblem(Problem):
    """A problem whose ``A y + b`` is at hand, computed as the plain layers do: to the bit."""

    affine: Tensor | None = None

    def linear(self) -> Tensor:
        """``A y + b``."""
        return super().linear() if self.affine is None else self.affine


class Reference(NamedTuple):
    """A module that is registered elsewhere."""

    module: nn.Module


class NormalisedLayer(SolverLayer):
    """A solver layer with the batch normalisation after it folded into its operator and bias."""

    norm: Reference

    def problem(self, y: Tensor, skip: Tensor | None = None) -> Problem:
        """The problem of the folded layer; in training this is where the running statistics move."""
        norm: nn.Module = self.norm.module
        plain = self.operator(y)
        plain.check_input(y)
        if y.dim() != 1 - plain.feature_dim:
            raise ShapeError(
                f"a layer with batch normalisation takes a batch with {1 - plain.feature_dim} dimensions, "
                f"got {tuple(y.shape)}"
            )
        output = plain.apply(y, self.bias)
        scale, shift = _affine(norm, output)
        if self.bias is not None:
            shift = shift + scale * self.bias
        # The class's own forward: the instance's is the identity now.
        affine = type(norm).forward(norm, output)
        weight = self.weight * scale.reshape(-1, *(1,) * (self.weight.dim() - 1)).to(self.weight.dtype)
        operator = plain.with_weight(weight).with_bounds(self.tracker.bounds(weight))
        if skip is not None:
            affine = affine + skip
            shift = skip + operator.per_feature(shift)
        return NormalisedProblem(operator, self.function, y, shift, self.options.ridge, affine)


def _affine(norm: nn.Module, output: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the shift that a batch normalisation is, for this output of its layer."""
    assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
    if norm.training or norm.running_mean is None or norm.running_var is None:
        dims = [dim for dim in range(output.dim()) if dim != 1]
        variance, mean = torch.var_mean(output, dims, correction=0)
    else:
        variance, mean = norm.running_var, norm.running_mean
    scale = torch.rsqrt(variance + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -mean * scale
    return scale, shift if norm.bias is None else shift + norm.bias


class NormalisedLinear(NormalisedLayer, SolverLinear):
    """``Linear → BatchNorm1d → activation`` as a solver."""


class NormalisedConv1d(NormalisedLayer, SolverConv1d):
    """``Conv1d → BatchNorm1d → activation`` as a solver."""


class NormalisedConv2d(NormalisedLayer, SolverConv2d):
    """``Conv2d → BatchNorm2d → activation`` as a solver."""

"""Certified bounds inside compiled graphs: one opaque operation, so that the certificate is free to branch."""

import torch
from torch import Tensor

from .base import LinearOperator
from .conv import Conv1d, Conv2d, Convolution
from .dense import Dense

__all__ = ["decode", "encode", "traced_bound"]

Code = tuple[list[int], list[int], list[int], int, list[int]]


def encode(operator: LinearOperator) -> Code:
    """The operator without its weight, in types that a compiled graph can hold."""
    if not isinstance(operator, Convolution):
        return [], [], [], 1, []
    g = operator.geometry
    flat = [side for pair in g.padding for side in pair]
    return list(g.stride), flat, list(g.dilation), g.groups, list(g.size or ())


def decode(
    weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int, size: list[int]
) -> LinearOperator:
    """The operator of a weight and a code."""
    if not stride:
        return Dense(weight)
    kind = {1: Conv1d, 2: Conv2d}[len(stride)]
    even, same = tuple(padding[::2]), padding[::2] != padding[1::2]
    given = "same" if same else even
    return kind(weight, tuple(size) or None, tuple(stride), given, tuple(dilation), groups)


def traced_bound(operator: LinearOperator, part: str) -> Tensor:
    """The bound on the whole operator, its inputs or its outputs, as one node of the graph being traced."""
    return _certified(operator.weight.detach(), part, *encode(operator))


@torch.library.custom_op("minimand::certified_bound", mutates_args=())
def _certified(
    weight: Tensor,
    part: str,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    size: list[int],
) -> Tensor:
    return decode(weight, stride, padding, dilation, groups, size).certified(part)


@_certified.register_fake
def _(
    weight: Tensor,
    part: str,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    size: list[int],
) -> Tensor:
    shapes = {"total": [], "inputs": [weight.shape[1] * groups], "outputs": [weight.shape[0]]}
    return weight.new_empty(shapes[part])

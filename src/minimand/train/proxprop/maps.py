"""Linear and Conv1d to Conv3d as linear maps of their weight and bias, with a common interface."""

import abc
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...geometry import ConvGeometry
from ...operators.patches import patches, positions_as_rows
from .grams import autocorrelation_gram, patch_gram, row_gram
from .options import AutocorrelationGram, CachedGram, GramRule, SubsampledGram

__all__ = ["WeightMap", "weight_map"]

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class WeightMap(abc.ABC):
    """The linear map from a weight and a bias to the layer's output, its input held fixed."""

    columns: int
    outputs: int
    groups: int
    convolves: bool

    def prepare(self, x: Tensor) -> Tensor:
        """Add a batch dimension, and the padding that torch applies before the convolution; differentiable."""
        return x

    @abc.abstractmethod
    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output, bit-identical to torch's."""

    @abc.abstractmethod
    def gradients(self, x: Tensor, weight: Tensor, delta: Tensor, needed: tuple[bool, bool, bool]) -> Gradients:
        """Gradients with respect to input, weight and bias, in the dtype of ``delta``."""

    @abc.abstractmethod
    def count(self, x: Tensor) -> int:
        """The number of rows of an input."""

    @abc.abstractmethod
    def rows(self, x: Tensor) -> Tensor:
        """The rows that multiply the weight, rows × columns. Requires ``groups == 1``."""

    @abc.abstractmethod
    def deltas(self, delta: Tensor) -> Tensor:
        """Output gradients as rows × outputs."""

    @abc.abstractmethod
    def gram(self, x: Tensor, ones: bool, rule: GramRule, steps: int, wide: bool) -> Tensor:
        """The Gram matrix of the rows, groups × n × n.

        ``steps`` is the number of steps taken, by which subsampling rotates. ``wide`` computes products in float64.
        """


class _Linear(WeightMap):
    groups = 1
    convolves = False

    def __init__(self, module: nn.Linear) -> None:
        self.columns, self.outputs = module.in_features, module.out_features

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def gradients(self, x: Tensor, weight: Tensor, delta: Tensor, needed: tuple[bool, bool, bool]) -> Gradients:
        rows = self.deltas(delta)
        return (
            delta @ weight.to(delta.dtype) if needed[0] else None,
            rows.mT @ self.rows(x).to(delta.dtype) if needed[1] else None,
            rows.sum(0) if needed[2] else None,
        )

    def count(self, x: Tensor) -> int:
        return math.prod(x.shape[:-1])

    def rows(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.columns)

    def deltas(self, delta: Tensor) -> Tensor:
        return delta.reshape(-1, self.outputs)

    def gram(self, x: Tensor, ones: bool, rule: GramRule, steps: int, wide: bool) -> Tensor:
        return row_gram(self.rows(x), ones, wide)[None]


class _Convolution(WeightMap):
    convolves = True

    def __init__(self, module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> None:
        self.groups, self.outputs = module.groups, module.out_channels
        self.columns = module.in_channels // module.groups * math.prod(module.kernel_size)
        self.geometry = ConvGeometry.of(module)
        self._outer: list[int] = []
        self._mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        # Torch applies other modes, and uneven padding, in a separate step before the convolution.
        if module.padding_mode != "zeros" or any(before != after for before, after in self.geometry.padding):
            self._outer, self.geometry = self.geometry.pads, self.geometry.without_padding()

    def prepare(self, x: Tensor) -> Tensor:
        x = x if x.dim() == len(self.geometry.kernel) + 2 else x.unsqueeze(0)
        return F.pad(x, self._outer, mode=self._mode) if any(self._outer) else x

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.geometry.convolve(x, weight, bias)

    def gradients(self, x: Tensor, weight: Tensor, delta: Tensor, needed: tuple[bool, bool, bool]) -> Gradients:
        g = self.geometry
        padding = [before for before, _ in g.padding]
        found: Any = torch.ops.aten.convolution_backward(
            delta, x.to(delta.dtype), weight.to(delta.dtype), [self.outputs], g.stride, padding, g.dilation,
            False, [0] * len(g.kernel), g.groups, needed,
        )  # fmt: skip
        return tuple(found)

    def count(self, x: Tensor) -> int:
        return len(x) * math.prod(self.geometry.with_size(tuple(x.shape[2:])).output())

    def rows(self, x: Tensor) -> Tensor:
        return patches(x, self.geometry).squeeze(0)

    def deltas(self, delta: Tensor) -> Tensor:
        return positions_as_rows(delta)

    def gram(self, x: Tensor, ones: bool, rule: GramRule, steps: int, wide: bool) -> Tensor:
        rule = rule.of if isinstance(rule, CachedGram) else rule
        if isinstance(rule, SubsampledGram) and len(x) > 1:
            some = x[steps % min(rule.every, len(x)) :: rule.every]
            return patch_gram(some, self.geometry, ones, wide) * (len(x) / len(some))
        if isinstance(rule, AutocorrelationGram) and set(self.geometry.stride) == {1} and len(x):
            return autocorrelation_gram(x, self.geometry, ones, wide)
        return patch_gram(x, self.geometry, ones, wide)


def weight_map(module: nn.Module) -> WeightMap | None:
    """The map of a Linear or convolution whose class does not override torch's forward; None for other modules."""
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return _Linear(module)
    for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        own = (
            getattr(type(module), "_conv_forward", None) is kind._conv_forward and type(module).forward is kind.forward
        )
        if isinstance(module, kind) and own:
            return _Convolution(module)
    return None

"""Every operator, listed once: a new one joins the laws by a line here."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minimand.operators import (
    BlockDCT,
    BlockSensing,
    Composed,
    Conv1d,
    Conv2d,
    Dense,
    Inpainting,
    LinearOperator,
    SubsampledFourier,
    Transposed,
    Wavelet,
    gaussian_blur,
)

__all__ = ["MEASUREMENTS", "OPERATORS", "MeasurementCase", "OperatorCase", "dense_matrix", "norm_sq"]


@dataclass(frozen=True)
class OperatorCase:
    """A torch layer and the operator that should be its linear map."""

    name: str
    module: Callable[[], nn.Module]
    build: Callable[[Tensor], LinearOperator]

    def operator(self, dtype: torch.dtype = torch.float64) -> LinearOperator:
        torch.manual_seed(0)
        return self.build(self.module().to(dtype).weight)


def _conv2d(
    name: str, n1: int, n2: int, k: int | tuple[int, int], size: tuple[int, int], **options: object
) -> OperatorCase:
    return OperatorCase(
        name,
        lambda: nn.Conv2d(n1, n2, k, bias=False, **options),
        lambda w: Conv2d(w, size, **options),
    )


def _conv1d(name: str, n1: int, n2: int, k: int, size: int, **options: object) -> OperatorCase:
    return OperatorCase(
        name,
        lambda: nn.Conv1d(n1, n2, k, bias=False, **options),
        lambda w: Conv1d(w, size, **options),
    )


OPERATORS = [
    OperatorCase("dense", lambda: nn.Linear(7, 5, bias=False), Dense),
    OperatorCase("dense wide", lambda: nn.Linear(3, 40, bias=False), Dense),
    _conv2d("conv", 3, 4, 3, (6, 5), padding=1),
    _conv2d("conv valid", 2, 3, 3, (5, 6), padding="valid"),
    _conv2d("conv same even", 2, 3, (2, 4), (5, 6), padding="same"),
    _conv2d("conv strided with leftover", 2, 3, 3, (6, 8), stride=(2, 3), padding=(0, 1)),
    _conv2d("conv stride beyond kernel", 2, 2, 2, (9, 9), stride=4),
    _conv2d("conv dilated", 2, 3, 3, (7, 8), dilation=(2, 3), padding=(2, 1)),
    _conv2d("conv strided and dilated", 2, 3, 3, (9, 9), stride=2, dilation=2, padding=3),
    _conv2d("conv grouped", 4, 6, 3, (5, 5), groups=2, padding=1),
    _conv2d("conv depthwise", 4, 8, 3, (6, 6), groups=4, stride=2, padding=1),
    _conv2d("conv kernel beyond map", 2, 2, 7, (4, 4), padding=3),
    _conv1d("conv1d", 3, 4, 5, 11, stride=2, padding=2),
]


@dataclass(frozen=True)
class MeasurementCase:
    """An operator that is no layer: a measurement of images, a frame, a transpose or a product."""

    name: str
    build: Callable[[], LinearOperator]

    def operator(self, dtype: torch.dtype = torch.float64) -> LinearOperator:
        torch.manual_seed(0)
        operator = self.build()
        return operator.with_weight(operator.weight.to(dtype))


def _blocks(size: tuple[int, int]) -> BlockSensing:
    return BlockSensing(torch.randn(5, 9), size)


MEASUREMENTS = [
    MeasurementCase("one block", lambda: _blocks((3, 3))),
    MeasurementCase("blocks", lambda: _blocks((6, 9))),
    MeasurementCase("fourier", lambda: SubsampledFourier((torch.rand(6, 5) < 0.4).float())),
    MeasurementCase("inpainting", lambda: Inpainting((torch.rand(2, 4, 5) < 0.5).float())),
    MeasurementCase("blur", lambda: gaussian_blur((6, 7), 0.8)),
    MeasurementCase("dct", lambda: BlockDCT((7, 8), block=4, count=4)),
    MeasurementCase("wavelet", lambda: Wavelet((7, 9), levels=2, family="db2", count=4)),
    MeasurementCase("haar", lambda: Wavelet((4, 6), levels=1, family="haar")),
    MeasurementCase("transposed dense", lambda: Transposed(Dense(torch.randn(3, 6)))),
    MeasurementCase("transposed blocks", lambda: Transposed(_blocks((3, 6)))),
    MeasurementCase("sparse synthesis", lambda: Composed(BlockDCT((3, 6), block=3), Transposed(_blocks((3, 6))))),
]


def dense_matrix(operator: LinearOperator) -> Tensor:
    """The matrix of an operator in float64, column by column."""
    double = operator.with_weight(operator.weight.detach().double())
    n = math.prod(operator.input_shape)
    basis = torch.eye(n, dtype=torch.float64).reshape(n, *operator.input_shape)
    return double.apply(basis).reshape(n, -1).T


def norm_sq(matrix: Tensor) -> Tensor:
    """The true squared norm, by singular values in float64."""
    return torch.linalg.svdvals(matrix).max() ** 2

"""All operators, each listed once. A new one joins the laws by a line here."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
import torch
from torch import Tensor, nn

from minimand.operators import (
    BlockDCT,
    BlockSensing,
    Composed,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    Dense,
    Inpainting,
    LinearOperator,
    MultiCoilFourier,
    SubsampledFourier,
    Transposed,
    Wavelet,
    as_operator,
    downsampling,
    gaussian_blur,
    operator,
    parallel_beam,
)

__all__ = ["ALL", "MEASUREMENTS", "OPERATORS", "USERS", "AnyCase", "MeasurementCase", "OperatorCase", "UserCase"]
__all__ += ["dense_matrix", "norm_sq"]


@dataclass(frozen=True)
class OperatorCase:
    """A torch layer and its linear map as an operator."""

    name: str
    module: Callable[[], nn.Module]
    build: Callable[[Tensor], LinearOperator]

    def operator(self, dtype: torch.dtype = torch.float64) -> LinearOperator:
        torch.manual_seed(0)
        return self.build(self.module().to(dtype).weight)


#: torch's layer and the operator for each kind of convolution.
_KINDS = {
    "conv1d": (nn.Conv1d, Conv1d),
    "conv2d": (nn.Conv2d, Conv2d),
    "conv3d": (nn.Conv3d, Conv3d),
    "transposed1d": (nn.ConvTranspose1d, ConvTranspose1d),
    "transposed2d": (nn.ConvTranspose2d, ConvTranspose2d),
}


def _conv(
    name: str, n1: int, n2: int, k: int | tuple[int, ...], size: int | tuple[int, ...], kind: str, **options: object
) -> OperatorCase:
    module, build = _KINDS[kind]
    return OperatorCase(name, lambda: module(n1, n2, k, bias=False, **options), lambda w: build(w, size, **options))


_conv2d = functools.partial(_conv, kind="conv2d")

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
    _conv("conv1d", 3, 4, 5, 11, "conv1d", stride=2, padding=2),
    _conv2d("conv circular", 3, 4, 3, (6, 5), padding=1, padding_mode="circular"),
    _conv2d("conv circular strided", 2, 3, 3, (6, 4), padding=1, stride=2, padding_mode="circular"),
    _conv2d("conv circular wide", 2, 3, 3, (5, 4), padding=(2, 3), stride=(1, 2), padding_mode="circular"),
    _conv2d("conv reflect", 2, 3, 3, (4, 5), padding=(1, 2), stride=(2, 1), padding_mode="reflect"),
    _conv2d("conv reflect grouped", 4, 6, 3, (4, 5), padding="same", groups=2, padding_mode="reflect"),
    _conv2d("conv replicate", 2, 3, 3, (2, 4), padding=(3, 1), dilation=(2, 1), padding_mode="replicate"),
    _conv("conv1d circular dilated", 3, 2, 3, 6, "conv1d", padding=2, dilation=2, padding_mode="circular"),
    _conv("conv3d", 2, 3, (2, 3, 2), (3, 4, 3), "conv3d", stride=(1, 2, 1), padding=(0, 1, 1)),
    _conv("conv3d circular", 2, 2, 3, (3, 2, 4), "conv3d", padding=1, padding_mode="circular"),
    _conv("transposed1d", 3, 4, 5, 4, "transposed1d", stride=3, padding=2, output_padding=1),
    _conv("transposed2d", 3, 4, 3, (4, 3), "transposed2d", stride=2, padding=1, output_padding=(1, 0)),
    _conv("transposed2d grouped", 4, 6, 3, (3, 4), "transposed2d", groups=2, dilation=2, padding=1),
]


@dataclass(frozen=True)
class MeasurementCase:
    """An operator that is not a layer: a measurement of images, a frame, a transpose or a product."""

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
    MeasurementCase("blur reflect", lambda: gaussian_blur((6, 7), 0.8, padding_mode="reflect", channels=2)),
    MeasurementCase("binning", lambda: downsampling((4, 6), 2, channels=2)),
    MeasurementCase("coils", lambda: MultiCoilFourier(torch.rand(4, 5).round(), torch.randn(3, 2, 4, 5))),
    MeasurementCase("blur", lambda: gaussian_blur((6, 7), 0.8)),
    MeasurementCase("dct", lambda: BlockDCT((7, 8), block=4, count=4)),
    MeasurementCase("wavelet", lambda: Wavelet((7, 9), levels=2, family="db2", count=4)),
    MeasurementCase("haar", lambda: Wavelet((4, 6), levels=1, family="haar")),
    MeasurementCase("transposed dense", lambda: Transposed(Dense(torch.randn(3, 6)))),
    MeasurementCase("matrix on images", lambda: as_operator(torch.randn(6, 12), (2, 3, 2), (3, 2))),
    MeasurementCase("transposed blocks", lambda: Transposed(_blocks((3, 6)))),
    MeasurementCase("sparse synthesis", lambda: Composed(BlockDCT((3, 6), block=3), Transposed(_blocks((3, 6))))),
]


@dataclass(frozen=True)
class UserCase:
    """An operator without a weight, as a user writes it: two callables, or a subclass."""

    name: str
    build: Callable[[torch.dtype], LinearOperator]

    def operator(self, dtype: torch.dtype = torch.float64) -> LinearOperator:
        return self.build(dtype)


class CyclicShift(LinearOperator):
    """A subclass with the least that the contract asks for, and a bound."""

    def __init__(self, n: int, dtype: torch.dtype) -> None:
        super().__init__((n,), (n,), dtype=dtype)

    def apply(self, y: Tensor) -> Tensor:
        return y.roll(1, -1)

    def adjoint(self, x: Tensor) -> Tensor:
        return x.roll(-1, -1)

    def bound(self) -> float:
        return 1.0


class Downsampling(LinearOperator):
    """Every second pixel, between maps of two sizes, without a bound of its own; its channels may be sampled."""

    sampled = True

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__((2, 6, 4), (2, 3, 2), dtype=dtype)

    def apply(self, y: Tensor) -> Tensor:
        return y[..., ::2, ::2]

    def adjoint(self, x: Tensor) -> Tensor:
        wide = torch.stack([x, torch.zeros_like(x)], -1).flatten(-2)
        return torch.stack([wide, torch.zeros_like(wide)], -2).flatten(-3, -2)


def _differences(dtype: torch.dtype) -> LinearOperator:
    norms = torch.tensor([1.0, 2.0, 2.0, 2.0, 2.0, 1.0]) * 1.001  # room for the rounding of the oracle

    def adjoint(x: Tensor) -> Tensor:
        return nn.functional.pad(x, (1, 0)) - nn.functional.pad(x, (0, 1))

    return operator(
        lambda y: y.diff(dim=-1), adjoint, (6,), (5,), 4.0, input_norms_sq=norms, output_norms_sq=2.01, dtype=dtype
    )


def _projections(dtype: torch.dtype) -> LinearOperator:
    """From images to vectors: the two shapes have different numbers of dimensions."""
    matrix = torch.randn(5, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return operator(
        lambda y: y.flatten(1) @ matrix.to(y).mT,
        lambda x: (x @ matrix.to(x)).reshape(-1, 2, 3, 4),
        (2, 3, 4),
        (5,),
        dtype=dtype,
    )


_SPARSE = scipy.sparse.random(6, 12, 0.4, random_state=0)
_ROWS = np.random.default_rng(0).normal(size=(4, 6))


class _Physics:
    """What deepinv calls a physics: A and A_adjoint on batches of any size."""

    def A(self, x: Tensor) -> Tensor:
        return x[..., ::2, :] - x[..., 1::2, :]

    def A_adjoint(self, y: Tensor) -> Tensor:
        return torch.stack([y, -y], -2).flatten(-3, -2)


USERS = [
    UserCase("cyclic shift", lambda dtype: CyclicShift(6, dtype)),
    UserCase("downsampling", Downsampling),
    UserCase("differences", _differences),
    UserCase("projections", _projections),
    UserCase("tomography", lambda dtype: parallel_beam(5, [0.0, 0.4, 1.5], dtype=dtype)),
    UserCase("sparse", lambda dtype: as_operator(_SPARSE, (1, 3, 4), (2, 3), dtype=dtype)),
    UserCase("scipy", lambda dtype: as_operator(scipy.sparse.linalg.aslinearoperator(_ROWS), (1, 2, 3), dtype=dtype)),
    UserCase("vectors as images", lambda dtype: as_operator(_differences(dtype), (3, 2), (5, 1))),
    UserCase("physics", lambda dtype: as_operator(_Physics(), (2, 4, 4), dtype=dtype)),
]

AnyCase = OperatorCase | MeasurementCase | UserCase
ALL: list[AnyCase] = [*OPERATORS, *MEASUREMENTS, *USERS]


def dense_matrix(operator: LinearOperator) -> Tensor:
    """The matrix of an operator in float64, column by column."""
    double = operator.with_weight(operator.weight.detach().double()) if operator.has_weight else operator
    n = math.prod(operator.input_shape)
    basis = torch.eye(n, dtype=torch.float64).reshape(n, *operator.input_shape)
    return double.apply(basis).reshape(n, -1).T


def norm_sq(matrix: Tensor) -> Tensor:
    """The true squared norm, by singular values in float64."""
    return torch.linalg.svdvals(matrix).max() ** 2

"""Convolutional solver layers."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..arguments import checked
from ..functions import Function
from ..operators import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d
from ..operators.conv import Convolution
from ..operators.conv_transpose import ConvTranspose
from ..solvers import ProxGD, Solver
from ..solvers.adjoints import Adjoint, Unroll
from .layers import SolverLayer
from .options import EvalMode, SolverOptions

__all__ = ["SolverConv1d", "SolverConv2d", "SolverConv3d", "SolverConvTranspose1d", "SolverConvTranspose2d"]


class _Convolutional(SolverLayer):
    """The base class of solver layers on maps: the operator has the layer's sizes from the fourth on as options."""

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str = "zeros"

    _plain: ClassVar[Callable[..., nn.Module]]
    _operator: ClassVar[type[Convolution] | type[ConvTranspose]]

    def operator(self, y: Tensor | None = None) -> Convolution | ConvTranspose:
        """The weight as an operator on images of the size of ``y``, or of any size."""
        weight = self.weight
        size = None if y is None else tuple(y.shape[2 - weight.dim() :])
        options = (getattr(self, name) for name in self._sizes[3:])
        return self._operator(weight, size, *options)

    def extra_repr(self) -> str:
        """The description that ``print`` shows."""
        return super().extra_repr().replace(", padding_mode=zeros", "")


@checked
class _SolverConv(_Convolutional):
    """The base class of solver layers whose operator is a convolution."""

    _sizes = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] | str = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        activation: str | nn.Module | Function = "relu",
        solver: Solver = ProxGD(),  # noqa: B008 -- frozen
        adjoint: Adjoint = Unroll(),  # noqa: B008 -- frozen
        ridge: float = 1e-3,
        eval_mode: EvalMode = "stochastic",
        shared_sample: bool = False,
        mean_passes: int = 16,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(activation, SolverOptions(solver, adjoint, ridge, eval_mode, shared_sample, mean_passes))
        sizes = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        self._take(type(self)._plain(*sizes, device=device, dtype=dtype))


class SolverConv2d(_SolverConv):
    """The convolutional :class:`SolverLinear`. It replaces ``Dropout2d → Conv2d → activation``.

    Sizes are those of :class:`torch.nn.Conv2d`, options those of :class:`SolverLinear`. Stochastic solvers sample whole
    channels. The step is valid for every image size.

    >>> layer = SolverConv2d(3, 4, 3, padding=1, solver=ProxGD(iters=1, step=1.0))
    >>> y = torch.randn(2, 3, 8, 8)
    >>> plain = torch.nn.functional.conv2d(y, layer.weight, layer.bias, padding=1)
    >>> torch.equal(layer(y), torch.relu(plain))
    True
    """

    _plain = nn.Conv2d
    _operator = Conv2d


class SolverConv1d(_SolverConv):
    """The one-dimensional :class:`SolverConv2d`.

    >>> SolverConv1d(3, 4, 5, stride=2)(torch.randn(2, 3, 11)).shape
    torch.Size([2, 4, 4])
    """

    _plain = nn.Conv1d
    _operator = Conv1d


class SolverConv3d(_SolverConv):
    """The three-dimensional :class:`SolverConv2d`.

    >>> SolverConv3d(1, 2, 3, padding=1, padding_mode="circular")(torch.randn(2, 1, 4, 4, 4)).shape
    torch.Size([2, 2, 4, 4, 4])
    """

    _plain = nn.Conv3d
    _operator = Conv3d


@checked
class _SolverConvTranspose(_Convolutional):
    """The base class of solver layers whose operator is a transposed convolution."""

    _sizes = (
        "in_channels", "out_channels", "kernel_size", "stride", "padding", "output_padding", "groups", "dilation"
    )  # fmt: skip

    output_padding: tuple[int, ...]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        output_padding: int | tuple[int, ...] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, ...] = 1,
        *,
        activation: str | nn.Module | Function = "relu",
        solver: Solver = ProxGD(),  # noqa: B008 -- frozen
        adjoint: Adjoint = Unroll(),  # noqa: B008 -- frozen
        ridge: float = 1e-3,
        eval_mode: EvalMode = "stochastic",
        shared_sample: bool = False,
        mean_passes: int = 16,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(activation, SolverOptions(solver, adjoint, ridge, eval_mode, shared_sample, mean_passes))
        sizes = (in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation)
        self._take(type(self)._plain(*sizes, device=device, dtype=dtype))


class SolverConvTranspose2d(_SolverConvTranspose):
    """The :class:`SolverConv2d` of a transposed convolution. It replaces ``ConvTranspose2d → activation``.

    Sizes are those of :class:`torch.nn.ConvTranspose2d`, options those of :class:`SolverLinear`.

    >>> layer = SolverConvTranspose2d(3, 4, 2, stride=2, solver=ProxGD(iters=1, step=1.0))
    >>> y = torch.randn(2, 3, 8, 8)
    >>> plain = torch.nn.functional.conv_transpose2d(y, layer.weight, layer.bias, stride=2)
    >>> torch.equal(layer(y), torch.relu(plain))
    True
    """

    _plain = nn.ConvTranspose2d
    _operator = ConvTranspose2d


class SolverConvTranspose1d(_SolverConvTranspose):
    """The one-dimensional :class:`SolverConvTranspose2d`.

    >>> SolverConvTranspose1d(3, 4, 5, stride=2)(torch.randn(2, 3, 4)).shape
    torch.Size([2, 4, 11])
    """

    _plain = nn.ConvTranspose1d
    _operator = ConvTranspose1d

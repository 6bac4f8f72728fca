"""Convolutional solver layers."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..arguments import checked
from ..errors import CapabilityError
from ..functions import Function
from ..operators import Conv1d, Conv2d
from ..solvers import ProxGD, Solver
from ..solvers.adjoints import Adjoint, Unroll
from .layers import SolverLayer
from .options import EvalMode, SolverOptions

__all__ = ["SolverConv1d", "SolverConv2d"]


@checked
class _SolverConv(SolverLayer):
    """The base class of convolutional solver layers."""

    _sizes = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int

    _plain: ClassVar[type[nn.Conv1d] | type[nn.Conv2d]]
    _operator: ClassVar[type[Conv1d] | type[Conv2d]]

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
        options = SolverOptions(solver, adjoint, ridge, eval_mode, shared_sample, mean_passes)
        super().__init__(activation, options)
        make: Callable[..., Any] = self._plain
        sizes = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
        self._take(make(*sizes, device=device, dtype=dtype))

    def _take(self, plain: nn.Module) -> None:
        if plain.padding_mode != "zeros":
            raise CapabilityError(
                f"padding_mode={plain.padding_mode!r} is not supported by solver layers; use padding_mode='zeros'"
            )
        super()._take(plain)

    def operator(self, y: Tensor | None = None) -> Conv1d | Conv2d:
        """The weight as an operator on images of the size of ``y``, or of any size."""
        size = None if y is None else tuple(y.shape[2 - self.weight.dim() :])
        return self._operator(self.weight, size, self.stride, self.padding, self.dilation, self.groups)


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

"""Operators on images that are no layers: what their restrictions and bounds share, transposes and products."""

import abc
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from ..errors import OptionError, ShapeError
from .base import LinearOperator, as_index
from .spectral import round_up

__all__ = ["Composed", "ImageOperator", "Selected", "Transposed"]


class ImageOperator(LinearOperator):
    """A linear map between maps of shape ``(channels, H, W)``, with one bound for the whole and for its parts."""

    feature_dim = -3

    @property
    def inputs(self) -> int:
        """The number of input channels."""
        return self.input_shape[0]

    @property
    def outputs(self) -> int:
        """The number of output channels."""
        return self.output_shape[0]

    @abc.abstractmethod
    def _apply(self, y: Tensor) -> Tensor:
        """``A y`` of a batch."""

    @abc.abstractmethod
    def _adjoint(self, x: Tensor) -> Tensor:
        """``Aᵀ x`` of a batch."""

    def apply(self, y: Tensor, bias: Tensor | None = None) -> Tensor:
        """``A y + bias``; a bias of one dimension holds one number per channel."""
        x = self._apply(y.reshape(-1, *self.input_shape)).reshape(*y.shape[:-3], *self.output_shape)
        if bias is None:
            return x
        return x + (self.per_feature(bias) if bias.dim() == 1 else bias)

    def adjoint(self, x: Tensor) -> Tensor:
        """``Aᵀ x``."""
        return self._adjoint(x.reshape(-1, *self.output_shape)).reshape(*x.shape[:-3], *self.input_shape)

    def restrict(self, index: Tensor | Sequence[int]) -> "LinearOperator":
        """``A`` on some input channels."""
        return Selected(self, inputs=as_index(index, self.weight))

    def restrict_outputs(self, index: Tensor | Sequence[int]) -> "LinearOperator":
        """Some output channels of ``A``."""
        return Selected(self, outputs=as_index(index, self.weight))

    def _input_norms_sq(self) -> Tensor:
        return self._norm_sq().expand(self.inputs)

    def _output_norms_sq(self) -> Tensor:
        return self._norm_sq().expand(self.outputs)


class Selected(ImageOperator):
    """The part of an operator on some of its input and output channels; one that is drawn twice counts twice.

    >>> from minimand.operators import Conv2d
    >>> whole = Conv2d(torch.ones(1, 2, 1, 1), input_size=(1, 1))
    >>> Selected(whole, inputs=torch.tensor([1])).apply(torch.full((1, 1, 1), 5.0)).item()
    5.0
    """

    def __init__(self, operator: LinearOperator, inputs: Tensor | None = None, outputs: Tensor | None = None) -> None:
        self.operator = operator
        self.weight = operator.weight
        self._inputs, self._outputs = inputs, outputs

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input sample."""
        shape = self.operator.input_shape
        return shape if self._inputs is None else (self._inputs.numel(), *shape[1:])

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of one output sample."""
        shape = self.operator.output_shape
        return shape if self._outputs is None else (self._outputs.numel(), *shape[1:])

    def _apply(self, y: Tensor) -> Tensor:
        x = self.operator.apply(_spread(y, self._inputs, self.operator.inputs))
        return x if self._outputs is None else x.index_select(-3, self._outputs)

    def _adjoint(self, x: Tensor) -> Tensor:
        y = self.operator.adjoint(_spread(x, self._outputs, self.operator.outputs))
        return y if self._inputs is None else y.index_select(-3, self._inputs)

    def with_weight(self, weight: Tensor) -> "Selected":
        """The same part of an operator with another weight."""
        return Selected(self.operator.with_weight(weight), self._inputs, self._outputs)

    def _norm_sq(self) -> Tensor:
        return self.operator.norm_sq() * _most(self._inputs) * _most(self._outputs)


def _spread(part: Tensor, index: Tensor | None, channels: int) -> Tensor:
    """The channels of ``part`` at their places among all, the others zero."""
    if index is None:
        return part
    whole = part.new_zeros(*part.shape[:-3], channels, *part.shape[-2:])
    return whole.index_add(-3, index, part)


def _most(index: Tensor | None) -> int:
    """How often one channel occurs at most."""
    return 1 if index is None or index.numel() == 0 else int(torch.bincount(index).max())


class Transposed(LinearOperator):
    r"""The adjoint :math:`A^\top` as an operator of its own.

    The problem :math:`\min_x \tfrac12\|\Phi x - y\|^2 + g(x)` of a measurement :math:`y = \Phi x` is
    :class:`~minimand.solvers.Problem` with the operator :math:`A = \Phi^\top`.

    >>> from minimand.operators import Dense
    >>> Transposed(Dense(torch.tensor([[1.0, 2.0]]))).apply(torch.tensor([3.0]))
    tensor([3., 6.])
    """

    def __init__(self, operator: LinearOperator) -> None:
        self.operator = operator
        self.weight = operator.weight
        self.feature_dim = operator.feature_dim

    @property
    def inputs(self) -> int:
        """The outputs of the original."""
        return self.operator.outputs

    @property
    def outputs(self) -> int:
        """The inputs of the original."""
        return self.operator.inputs

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The output shape of the original."""
        return self.operator.output_shape

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The input shape of the original."""
        return self.operator.input_shape

    @property
    def matrix(self) -> Tensor | None:
        """The transposed matrix, where there is one."""
        matrix = self.operator.matrix
        return None if matrix is None else matrix.mT

    def apply(self, y: Tensor, bias: Tensor | None = None) -> Tensor:
        """``Aᵀ y + bias``."""
        x = self.operator.adjoint(y)
        if bias is None:
            return x
        return x + (self.per_feature(bias) if bias.dim() == 1 else bias)

    def adjoint(self, x: Tensor) -> Tensor:
        """``A x``."""
        return self.operator.apply(x)

    def restrict(self, index: Tensor | Sequence[int]) -> "Transposed":
        """The transpose of some outputs."""
        return Transposed(self.operator.restrict_outputs(index))

    def restrict_outputs(self, index: Tensor | Sequence[int]) -> "Transposed":
        """The transpose on some inputs."""
        return Transposed(self.operator.restrict(index))

    def with_weight(self, weight: Tensor) -> "Transposed":
        """The transpose of the operator with another weight."""
        return Transposed(self.operator.with_weight(weight))

    def _norm_sq(self) -> Tensor:
        return self.operator.norm_sq()

    def _input_norms_sq(self) -> Tensor:
        return self.operator.output_norms_sq()

    def _output_norms_sq(self) -> Tensor:
        return self.operator.input_norms_sq()


class Composed(ImageOperator):
    r"""The product :math:`AB` of two operators on maps, :math:`\|AB\|^2 \le \|A\|^2\|B\|^2`.

    >>> from minimand.operators import Conv2d
    >>> double = Conv2d(torch.full((1, 1, 1, 1), 2.0), input_size=(1, 1))
    >>> Composed(double, double).apply(torch.ones(1, 1, 1)).item()
    4.0
    """

    def __init__(self, outer: LinearOperator, inner: LinearOperator) -> None:
        if outer.feature_dim != -3 or inner.feature_dim != -3:
            raise OptionError(
                f"a product takes operators on maps (channels, H, W), got {type(outer).__name__} and "
                f"{type(inner).__name__}; multiply matrices instead"
            )
        if outer.input_shape != inner.output_shape:
            raise ShapeError(
                f"the outer operator takes inputs of {outer.input_shape}, but the inner one gives {inner.output_shape}"
            )
        self.outer, self.inner = outer, inner
        self.weight = inner.weight

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The inner operator's input shape."""
        return self.inner.input_shape

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The outer operator's output shape."""
        return self.outer.output_shape

    def _apply(self, y: Tensor) -> Tensor:
        return self.outer.apply(self.inner.apply(y))

    def _adjoint(self, x: Tensor) -> Tensor:
        return self.inner.adjoint(self.outer.adjoint(x))

    def with_weight(self, weight: Tensor) -> Self:
        """The product with another weight of the inner operator; the outer one follows its precision and device."""
        outer = self.outer.with_weight(self.outer.weight.to(weight))
        return type(self)(outer, self.inner.with_weight(weight))

    def _norm_sq(self) -> Tensor:
        product = self.outer.norm_sq().double() * self.inner.norm_sq().double()
        return round_up(product, self.weight.dtype)

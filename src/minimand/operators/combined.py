"""Operators made of other operators: transposes, products, and other shapes of samples."""

from collections.abc import Sequence
from typing import Self

from torch import Tensor

from ..arguments import checked
from ..errors import OptionError, ShapeError
from ..norms.spectral import product_of_bounds, round_up
from .base import LinearOperator

__all__ = ["Composed", "Reshaped", "Transposed"]


@checked
class Transposed(LinearOperator):
    r"""The adjoint :math:`A^\top` of an operator.

    The problem :math:`\min_x \tfrac12\|\Phi x - y\|^2 + g(x)` of a measurement :math:`y = \Phi x` is
    :class:`~minimand.solvers.Problem` with the operator :math:`A = \Phi^\top`.

    >>> import torch
    >>> from minimand.operators import Dense
    >>> Transposed(Dense(torch.tensor([[1.0, 2.0]]))).apply(torch.tensor([3.0]))
    tensor([3., 6.])
    """

    _derived = True

    def __init__(self, operator: LinearOperator) -> None:
        self.operator = operator
        self._weight, self._type = operator._weight, operator._type

    def _given_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.operator.output_shape, self.operator.input_shape

    @property
    def sampled(self) -> bool:
        """As the original."""
        return self.operator.sampled

    @property
    def matrix(self) -> Tensor | None:
        """The transposed matrix, where the original has one."""
        matrix = self.operator.matrix
        return None if matrix is None else matrix.mT

    def apply(self, y: Tensor) -> Tensor:
        """``Aᵀ y``."""
        return self.operator.adjoint(y)

    def adjoint(self, x: Tensor) -> Tensor:
        """``A x``."""
        return self.operator.apply(x)

    def restrict(self, index: Tensor | Sequence[int]) -> "Transposed":
        """The transpose of the original's outputs ``index``."""
        return Transposed(self.operator.restrict_outputs(index))

    def restrict_outputs(self, index: Tensor | Sequence[int]) -> "Transposed":
        """The transpose of the original on the inputs ``index``."""
        return Transposed(self.operator.restrict(index))

    def with_weight(self, weight: Tensor) -> "Transposed":
        """The transpose of the operator with another weight."""
        return Transposed(self.operator.with_weight(weight))

    def bound(self) -> Tensor:
        """That of the original."""
        return self.operator.norm_sq()

    def input_bounds(self) -> Tensor:
        """Those of the original's outputs."""
        return self.operator.output_norms_sq()

    def output_bounds(self) -> Tensor:
        """Those of the original's inputs."""
        return self.operator.input_norms_sq()


@checked
class Composed(LinearOperator):
    r"""The product :math:`AB` of two operators on maps, with the bound :math:`\|AB\|^2 \le \|A\|^2\|B\|^2`.

    >>> import torch
    >>> from minimand.operators import Conv2d
    >>> double = Conv2d(torch.full((1, 1, 1, 1), 2.0), input_size=(1, 1))
    >>> Composed(double, double).apply(torch.ones(1, 1, 1)).item()
    4.0
    """

    sampled = _derived = True

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
        super().__init__(inner.input_shape, outer.output_shape)
        self.outer, self.inner = outer, inner
        self._weight, self._type = inner._weight, inner._type

    def apply(self, y: Tensor) -> Tensor:
        """``A B y``."""
        return self.outer.apply(self.inner.apply(y))

    def adjoint(self, x: Tensor) -> Tensor:
        """``Bᵀ Aᵀ x``."""
        return self.inner.adjoint(self.outer.adjoint(x))

    def with_weight(self, weight: Tensor) -> Self:
        """The product with another weight of the inner operator; the outer one follows its precision and device."""
        outer = self.outer.with_weight(self.outer.weight.to(weight)) if self.outer.has_weight else self.outer
        return type(self)(outer, self.inner.with_weight(weight))

    def bound(self) -> Tensor:
        """The product of both bounds."""
        return round_up(product_of_bounds(self.outer.norm_sq().double(), self.inner.norm_sq().double()), self.dtype)


@checked
class Reshaped(LinearOperator):
    """An operator whose samples have other shapes with as many entries, such as a matrix on images.

    >>> import torch
    >>> from minimand.operators import Dense
    >>> total = Reshaped(Dense(torch.ones(1, 4)), (1, 2, 2), (1,))
    >>> total.apply(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])), total.adjoint(torch.tensor([5.0])).shape
    (tensor([10.]), torch.Size([1, 2, 2]))
    """

    _derived = True

    def __init__(self, operator: LinearOperator, input_shape: Sequence[int], output_shape: Sequence[int]) -> None:
        super().__init__(input_shape, output_shape)
        self.operator = operator
        self._weight, self._type = operator._weight, operator._type

    def apply(self, y: Tensor) -> Tensor:
        """``A y``."""
        self.check_input(y)
        batch, inner = y.shape[: y.dim() - len(self.input_shape)], self.operator
        return inner.apply(y.reshape(*batch, *inner.input_shape)).reshape(*batch, *self.output_shape)

    def adjoint(self, x: Tensor) -> Tensor:
        """``Aᵀ x``."""
        self.check_output(x)
        batch, inner = x.shape[: x.dim() - len(self.output_shape)], self.operator
        return inner.adjoint(x.reshape(*batch, *inner.output_shape)).reshape(*batch, *self.input_shape)

    def with_weight(self, weight: Tensor) -> "Reshaped":
        """The same shapes of the operator with another weight."""
        return Reshaped(self.operator.with_weight(weight), self.input_shape, self.output_shape)

    def of_samples(self, keep: Tensor) -> "Reshaped":
        """The same shapes of the operator of some samples."""
        return Reshaped(self.operator.of_samples(keep), self.input_shape, self.output_shape)

    def bound(self) -> Tensor:
        """That of the original."""
        return self.operator.norm_sq()

"""The contract of a linear operator, with defaults for everything that is optional."""

import abc
import copy
from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..arguments import check_methods
from ..errors import CapabilityError, ReadOnlyError, ShapeError, require_finite
from ..linalg import Weight, accumulate
from ..norms import randomized_norm_sq
from ..norms.kernel import Bounds, Kernel
from ..norms.lipschitz import majorant
from .index import as_index

__all__ = ["LinearOperator", "Selected"]


class LinearOperator(abc.ABC):
    r"""A linear map :math:`A` from inputs ``y`` to outputs ``x``.

    A subclass gives the two shapes to ``super().__init__`` and writes :meth:`apply` and :meth:`adjoint`, for tensors
    with any leading batch dimensions. Everything else has a default:

    - a bound: :meth:`bound`, by default the certified one of the :attr:`kernel`. Without a kernel it is
      :func:`~minimand.norms.randomized_norm_sq`, which costs about 80 products with A and with its adjoint, and holds
      with probability :math:`1 - 10^{-10}`. Write it where a bound is known.
    - sampling, for the stochastic solvers: set ``sampled = True`` in the class, and write :meth:`input_bounds` and
      :meth:`output_bounds` where bounds per input or output are known; by default each is the bound of the whole
      operator. :meth:`restrict` and :meth:`restrict_outputs` compute with zeros in place of the other features; write
      them where a part costs less.
    - fast products: :meth:`gram_if_cheaper`, :meth:`gathered`, :meth:`repeated`, :meth:`onto`.
    - a weight that can be replaced: assign ``self.weight`` and write :meth:`with_weight`.

    The first dimension of a sample holds its features: the unit of sampling, features of a dense layer or channels of a
    convolution.

    >>> class Reversal(LinearOperator):
    ...     def __init__(self, n):
    ...         super().__init__((n,), (n,))
    ...
    ...     def apply(self, y):
    ...         return y.flip(-1)
    ...
    ...     def adjoint(self, x):
    ...         return x.flip(-1)
    >>> A = Reversal(3)
    >>> A.apply(torch.tensor([1.0, 2.0, 3.0])), bool(1 <= A.norm_sq() < 1.01)
    (tensor([3., 2., 1.]), True)
    """

    _derived: ClassVar[bool] = False
    _weight: Tensor | None = None
    _bounds: Bounds | None = None
    _type: tuple[torch.dtype | None, torch.device | None] = (None, None)
    _shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def __init__(
        self,
        input_shape: Sequence[int],
        output_shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._shapes = _shape("input_shape", input_shape), _shape("output_shape", output_shape)
        self._type = dtype, None if device is None else torch.device(device)

    def __init_subclass__(cls) -> None:
        check_methods(cls, "apply", "adjoint")

    # The contract

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input sample."""
        return self._given_shapes()[0]

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of one output sample."""
        return self._given_shapes()[1]

    @abc.abstractmethod
    def apply(self, y: Tensor) -> Tensor:
        """``A y``."""

    @abc.abstractmethod
    def adjoint(self, x: Tensor) -> Tensor:
        """``Aᵀ x``."""

    def bound(self) -> Tensor | float:
        r"""An upper bound on :math:`\|A\|^2`, computed afresh. Users call :meth:`norm_sq`."""
        if self.kernel is not None:
            return self.kernel.norm_sq()
        return randomized_norm_sq(
            self.apply, self.adjoint, self.input_shape, self.output_shape, dtype=self.dtype, device=self.device
        )

    def _given_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self._shapes is None:
            raise ShapeError(f"{type(self).__name__}.__init__ must call super().__init__(input_shape, output_shape)")
        return self._shapes

    # Features, types and checks

    @property
    def inputs(self) -> int:
        """The number of input features or channels (n1)."""
        return self.input_shape[0]

    @property
    def outputs(self) -> int:
        """The number of output features or channels (n2)."""
        return self.output_shape[0]

    @property
    def feature_dim(self) -> int:
        """The dimension of an input that holds its features, counted from the end."""
        return -len(self.input_shape)

    @property
    def output_dim(self) -> int:
        """The dimension of an output that holds its features, counted from the end."""
        return -len(self.output_shape)

    @property
    def dtype(self) -> torch.dtype:
        """The weight's type; without a weight the one given, else torch's default."""
        return (self._type[0] or torch.get_default_dtype()) if self._weight is None else self._weight.dtype

    @property
    def device(self) -> torch.device:
        """The weight's device; without a weight the one given, else torch's default."""
        return torch.empty(0, device=self._type[1]).device if self._weight is None else self._weight.device

    def check_input(self, y: Tensor) -> None:
        """Raise :class:`~minimand.errors.ShapeError` unless ``y`` is an input sample or a batch of them."""
        _check("input", y, self.input_shape)

    def check_output(self, x: Tensor) -> None:
        """Raise :class:`~minimand.errors.ShapeError` unless ``x`` is an output sample or a batch of them."""
        _check("output", x, self.output_shape)

    def per_feature(self, values: Tensor) -> Tensor:
        """Reshape one value per output feature (last dimension of ``values``) to broadcast against outputs."""
        return values.reshape(*values.shape, *(1,) * (-self.output_dim - 1))

    def per_input(self, values: Tensor) -> Tensor:
        """Reshape one value per input feature (last dimension of ``values``) to broadcast against inputs."""
        return values.reshape(*values.shape, *(1,) * (-self.feature_dim - 1))

    def select(self, y: Tensor, index: Tensor) -> Tensor:
        """The features ``index`` of an input or a batch of them."""
        return torch.index_select(y, self.feature_dim, index)

    def select_outputs(self, x: Tensor, index: Tensor) -> Tensor:
        """The features ``index`` of an output or a batch of them."""
        return torch.index_select(x, self.output_dim, index)

    # Products

    def affine(self, y: Tensor, bias: Tensor | None = None) -> Tensor:
        """``A y + bias``; a bias with one dimension has one number per output feature."""
        x = self.apply(y)
        if bias is None:
            return x
        return x + (self.per_feature(bias) if bias.dim() == 1 else bias)

    def normal(self, x: Tensor) -> Tensor:
        """``A Aᵀ x``."""
        return self.apply(self.adjoint(x))

    def onto(self, total: Tensor | None, keep: Weight, x: Tensor, scale: Weight) -> Tensor:
        """``total + keep · x + scale · A Aᵀ x``: a gradient step."""
        return accumulate(accumulate(total, keep, x), scale, self.normal(x))

    @property
    def matrix(self) -> Tensor | None:
        """The n2 × n1 matrix of an operator that has one; None otherwise."""
        return None

    def gram_if_cheaper(self, rows: int, applications: int) -> Tensor | None:
        """``A Aᵀ``, where forming it is the cheapest way to ``applications`` products with ``rows`` samples."""
        return None

    def gathered(self) -> "LinearOperator":
        """An equal operator that is prepared for many calls of :meth:`restrict`."""
        return self

    def repeated(self, rows: int) -> "LinearOperator":
        """An equal operator that is prepared for many calls of :meth:`normal` or :meth:`onto` with ``rows`` samples."""
        return self

    def of_samples(self, keep: Tensor) -> "LinearOperator":
        """The operator of the samples of a mask, where each has its own."""
        return self

    # Sampling

    @property
    def sampled(self) -> bool:
        """Whether the stochastic solvers may sample the operator's features."""
        return False

    def restrict(self, index: Tensor | Sequence[int]) -> "LinearOperator":
        """``A`` on the input features ``index``."""
        return Selected(self, inputs=as_index(index, self.device, self.inputs))

    def restrict_outputs(self, index: Tensor | Sequence[int]) -> "LinearOperator":
        """The output features ``index`` of ``A``."""
        return Selected(self, outputs=as_index(index, self.device, self.outputs))

    def input_bounds(self) -> Tensor:
        """One bound per input feature, computed afresh. Users call :meth:`input_norms_sq`."""
        if self.kernel is not None:
            return self.kernel.input_norms_sq()
        return self._constant(self.bound()).expand(self.inputs)

    def output_bounds(self) -> Tensor:
        """One bound per output feature, computed afresh. Users call :meth:`output_norms_sq`."""
        if self.kernel is not None:
            return self.kernel.output_norms_sq()
        return self._constant(self.bound()).expand(self.outputs)

    # The weight

    @property
    def has_weight(self) -> bool:
        """Whether the operator has a weight that :meth:`with_weight` replaces."""
        return self._weight is not None

    @property
    def weight(self) -> Tensor:
        """The tensor that determines the operator."""
        if self._weight is None:
            raise CapabilityError(
                f"{type(self).__name__} has no weight; use an operator with one, such as Dense or Conv2d"
            )
        return self._weight

    @weight.setter
    def weight(self, weight: Tensor) -> None:
        if self._derived:
            raise ReadOnlyError(f"{type(self).__name__} has the weight of the operator inside; use with_weight")
        self._weight = weight

    def with_weight(self, weight: Tensor) -> "LinearOperator":
        """The same operator with another weight; bounds are not carried over."""
        raise CapabilityError(
            f"{type(self).__name__} has no weight to replace; build the operator again, or write with_weight"
        )

    def scaled_outputs(self, scale: Tensor) -> Tensor:
        """The weight of the operator whose outputs are multiplied by one factor each."""
        return self.weight * scale.reshape(-1, *(1,) * (self.weight.dim() - 1)).to(self.weight.dtype)

    @property
    def kernel(self) -> Kernel | None:
        """The weight with its geometry, where the operator is a matrix or a convolution; None otherwise."""
        return None

    # Bounds

    def norm_sq(self) -> Tensor:
        r"""A bound on :math:`\|A\|^2` that is never below the truth; a constant for autograd."""
        return self._certified("total")

    def input_norms_sq(self) -> Tensor:
        r"""Bounds on :math:`\|a_i\|^2`, one per input (column, or block of an input channel)."""
        return self._certified("inputs")

    def output_norms_sq(self) -> Tensor:
        """Bounds on the squared norm of each row, or of the block of each output channel."""
        return self._certified("outputs")

    def with_bounds(self, bounds: Bounds | None) -> Self:
        """The same operator with bounds that the caller is responsible for, such as a tracker's."""
        other = copy.copy(self)
        other._bounds = bounds
        return other

    def _certified(self, part: str) -> Tensor:
        given: Tensor | None = None if self._bounds is None else getattr(self._bounds, part)
        if given is not None:
            return given
        if self._weight is not None:
            require_finite("the operator's weight", self._weight)
        compute = {"total": self.bound, "inputs": self.input_bounds, "outputs": self.output_bounds}
        return self._constant(compute[part]())

    def _constant(self, bound: Tensor | float) -> Tensor:
        if isinstance(bound, Tensor):
            return bound.detach()
        return torch.tensor(bound, dtype=torch.float64, device="cpu" if self.device.type == "mps" else self.device)


@majorant.register
def _(target: LinearOperator, input_size: int | tuple[int, ...] | None) -> tuple[LinearOperator, float]:
    return target, 1.0


class Selected(LinearOperator):
    """The part of an operator on some of its input and output features; a feature that is drawn twice counts twice.

    Products are computed in ``dtype``, by default the argument's type, and returned in the argument's type.

    >>> from minimand.operators import Conv2d
    >>> whole = Conv2d(torch.ones(1, 2, 1, 1), input_size=(1, 1))
    >>> Selected(whole, inputs=torch.tensor([1])).apply(torch.full((1, 1, 1), 5.0)).item()
    5.0
    """

    _derived = True

    def __init__(
        self,
        operator: LinearOperator,
        inputs: Tensor | None = None,
        outputs: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shapes = zip((inputs, outputs), (operator.input_shape, operator.output_shape), strict=True)
        super().__init__(*(shape if index is None else (index.numel(), *shape[1:]) for index, shape in shapes))
        self.operator = operator
        self._weight, self._type = operator._weight, operator._type
        self._inputs, self._outputs, self._inner = inputs, outputs, dtype

    @property
    def sampled(self) -> bool:
        """As the whole operator."""
        return self.operator.sampled

    def apply(self, y: Tensor) -> Tensor:
        """``A y``."""
        whole = _embed(y, self._inputs, self.operator.inputs, self.feature_dim)
        x = self.operator.apply(whole.to(self._inner or y.dtype)).to(y.dtype)
        return x if self._outputs is None else self.select_outputs(x, self._outputs)

    def adjoint(self, x: Tensor) -> Tensor:
        """``Aᵀ x``."""
        whole = _embed(x, self._outputs, self.operator.outputs, self.output_dim)
        y = self.operator.adjoint(whole.to(self._inner or x.dtype)).to(x.dtype)
        return y if self._inputs is None else self.select(y, self._inputs)

    def with_weight(self, weight: Tensor) -> "Selected":
        """The same part of an operator with another weight."""
        return Selected(self.operator.with_weight(weight), self._inputs, self._outputs)

    def bound(self) -> Tensor:
        """That of the whole operator, times the multiplicities of features that were drawn more than once, or the sum
        of the bounds of its inputs, if that is less."""
        most = _most(self._inputs, self.operator.inputs) * _most(self._outputs, self.operator.outputs)
        whole = self.operator.norm_sq() * most
        # The factor covers the rounding of the sum.
        return torch.minimum(whole, 1.001 * self.input_bounds().sum().to(whole))

    def input_bounds(self) -> Tensor:
        """Those of the whole operator, times the multiplicities of outputs."""
        norms = self.operator.input_norms_sq() * _most(self._outputs, self.operator.outputs)
        return norms if self._inputs is None else norms[self._inputs]

    def output_bounds(self) -> Tensor:
        """Those of the whole operator, times the multiplicities of inputs."""
        norms = self.operator.output_norms_sq() * _most(self._inputs, self.operator.inputs)
        return norms if self._outputs is None else norms[self._outputs]


def _embed(part: Tensor, index: Tensor | None, features: int, dim: int) -> Tensor:
    """The features of ``part`` at their places among all, the others zero."""
    if index is None:
        return part
    shape = list(part.shape)
    shape[dim] = features
    return part.new_zeros(shape).index_add(dim, index, part)


def _most(index: Tensor | None, features: int) -> Tensor | int:
    """The largest number of times that one feature occurs, by an operation whose size does not depend on the index."""
    if index is None or index.numel() == 0:
        return 1
    return index.new_zeros(features).index_add(0, index, torch.ones_like(index)).max()


def _shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not sizes or not all(isinstance(n, int | torch.SymInt) and n >= 0 for n in sizes):
        raise ShapeError(f"{name} must be a tuple of one or more whole numbers, got {shape!r}")
    return sizes


def _check(role: str, tensor: Tensor, sample: tuple[int, ...]) -> None:
    if tuple(tensor.shape[-len(sample) :]) != sample:
        raise ShapeError(
            f"the operator takes an {role} of shape (..., {', '.join(map(str, sample))}), "
            f"got {tuple(tensor.shape)}; reshape it or build the operator for that size"
        )

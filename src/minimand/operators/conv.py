"""Convolutional operators in one, two and three dimensions."""

import abc
import copy
import dataclasses
import operator
from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..arguments import checked
from ..errors import ShapeError, require_real
from ..geometry import ConvGeometry, Size
from ..linalg import Weight
from ..norms.kernel import Kernel
from ..norms.lipschitz import majorant
from ..tracing import is_compiled, is_traced
from .base import LinearOperator, Selected
from .gather import Columns
from .grouped import GroupedPart
from .index import as_index, check_bias, check_range, pick
from .winograd import Winograd, winograd

__all__ = ["Conv1d", "Conv2d", "Conv3d", "Convolution"]


class Convolution(LinearOperator, abc.ABC):
    """The common base of :class:`Conv1d`, :class:`Conv2d` and :class:`Conv3d`."""

    dimensions: ClassVar[int]
    sampled = True
    # What the geometry fixed can be read and not set.
    input_size, stride, padding, dilation, groups, padding_mode = (
        property(operator.attrgetter(f"geometry.{name}"))
        for name in ("size", "stride", "padding", "dilation", "groups", "mode")
    )

    def __init__(
        self,
        weight: Tensor,
        input_size: Size | None,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
        padding_mode: str = "zeros",
    ) -> None:
        require_real("a convolution's weight", weight)
        kernel = tuple(weight.shape[2:])
        if weight.dim() != self.dimensions + 2:
            self._refuse(weight, groups)
        options = stride, padding, dilation, groups, padding_mode
        self.geometry = ConvGeometry.build(kernel, input_size, *options).fitting()
        if weight.shape[0] % groups:
            self._refuse(weight, groups)
        self.weight = weight
        self._columns: Columns | None = None
        self._kernels: Winograd | None = None

    def _refuse(self, weight: Tensor, groups: int) -> None:
        raise ShapeError(
            f"a {type(self).__name__} weight has {self.dimensions + 2} dimensions (n2, n1/groups, k...), "
            f"n2 a multiple of groups; got {tuple(weight.shape)} with groups={groups}"
        )

    @property
    def feature_dim(self) -> int:
        """The dimension of the channels."""
        return -1 - self.dimensions

    @property
    def output_dim(self) -> int:
        """The dimension of the channels."""
        return -1 - self.dimensions

    @property
    def inputs(self) -> int:
        """The number of input channels (n1)."""
        return self.weight.shape[1] * self.geometry.groups

    @property
    def outputs(self) -> int:
        """The number of output channels (n2)."""
        return self.weight.shape[0]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input sample, channels first."""
        return (self.inputs, *self.geometry.known_size())

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of one output sample, channels first."""
        return (self.outputs, *self.geometry.output())

    def apply(self, y: Tensor, bias: Tensor | None = None) -> Tensor:
        """``A y + bias``, to the bit what torch's convolution computes."""
        self._check_map(y)
        if self._kernels is not None and y.dim() == self.dimensions + 2 and not is_traced(y):
            y = y.contiguous(memory_format=torch.channels_last)
        inside = None
        if bias is not None and bias.shape in ((self.outputs,), (self.outputs, *(1,) * self.dimensions)):
            inside, bias = bias.reshape(self.outputs), None
        x = self.geometry.convolve(y, self.weight, inside)
        if bias is None:
            return x
        check_bias(bias, x)
        return x + bias

    affine = apply

    def adjoint(self, x: Tensor) -> Tensor:
        """``Aᵀ x``, the transposed convolution, with exactly the input's size.

        Inputs that no window covers, because the stride does not divide the map, are zero in the result. Where the
        padding holds copies of inputs, the entries of the padding are added to them.
        """
        self.check_output(x)
        return self.geometry.transpose(x, self.weight)

    def restrict(self, index: Tensor | Sequence[int]) -> LinearOperator:
        """``A`` on the input channels ``index``."""
        index = as_index(index, self.device, self.inputs)
        if self.geometry.groups > 1:
            check_range(index, self.inputs)
            # The sizes of a packed part depend on the index, which those of a graph must not.
            return (Selected if is_compiled(index) else GroupedPart)(self, index, None)
        part = pick(self.weight, 1, index) if self._columns is None else self._columns.take(index)
        return self.with_weight(part, 1)

    def restrict_outputs(self, index: Tensor | Sequence[int]) -> LinearOperator:
        """The output channels ``index`` of ``A``."""
        index = as_index(index, self.device, self.outputs)
        if self.geometry.groups > 1:
            check_range(index, self.outputs)
            return (Selected if is_compiled(index) else GroupedPart)(self, None, index)
        return self.with_weight(pick(self.weight, 0, index), 1)

    def gathered(self) -> Self:
        """The same operator, with its channels in the layout that :meth:`restrict` reads fastest."""
        if self.geometry.groups > 1:
            return self
        other = copy.copy(self)
        other._columns = Columns(self.weight)
        return other

    def normal(self, x: Tensor) -> Tensor:
        """``A Aᵀ x``."""
        return super().normal(x) if self._kernels is None else self._transformed(self._kernels, None, 0.0, x, 1.0)

    def onto(self, total: Tensor | None, keep: Weight, x: Tensor, scale: Weight) -> Tensor:
        """``total + keep · x + scale · A Aᵀ x``: a gradient step."""
        if self._kernels is None or isinstance(keep, Tensor) or isinstance(scale, Tensor):
            return super().onto(total, keep, x, scale)
        return self._transformed(self._kernels, total, keep, x, scale)

    def _transformed(self, kernels: Winograd, total: Tensor | None, keep: float, x: Tensor, scale: float) -> Tensor:
        """:meth:`onto` by transformed kernels. While tracing, and for inputs that are not a batch of the weight's type,
        by the definition."""
        plain = copy.copy(self)
        plain._kernels = None
        others = [x] if total is None else [x, total]
        usual = all(each.shape == x.shape and each.dtype == kernels.forward.dtype for each in others)
        if not usual or x.dim() != self.dimensions + 2 or any(map(is_traced, others)):
            return plain.onto(total, keep, x, scale)
        self.check_output(x)
        return kernels.onto(total, keep, x, scale, self.weight, lambda x, weight: plain.with_weight(weight).normal(x))

    def repeated(self, rows: int) -> Self:
        """The same operator, with transformed kernels where repeated products are then cheaper (:mod:`.winograd`)."""
        other = copy.copy(self)
        other._kernels = winograd(self.weight, self.geometry, rows)
        return other

    def with_weight(self, weight: Tensor, groups: int | None = None) -> Self:
        """The same convolution with another weight; no bounds are carried over."""
        g = self.geometry
        return self._like(weight, dataclasses.replace(g, kernel=tuple(weight.shape[2:]), groups=groups or g.groups))

    def with_size(self, input_size: Size) -> Self:
        """The same convolution of maps of another size."""
        return self._like(self.weight, self.geometry.with_size(input_size))

    def _like(self, weight: Tensor, geometry: ConvGeometry) -> Self:
        require_real("a convolution's weight", weight)
        if weight.dim() != self.dimensions + 2 or weight.shape[0] % geometry.groups:
            self._refuse(weight, geometry.groups)
        other = type(self).__new__(type(self))
        other.weight, other.geometry = weight, geometry.fitting()
        other._columns = other._kernels = None
        return other

    def check_input(self, y: Tensor) -> None:
        """Raise :class:`~minimand.errors.ShapeError` unless ``y`` is an input sample or a batch of them."""
        self._check_dimensions("input", y)
        super().check_input(y)

    def check_output(self, x: Tensor) -> None:
        """Raise :class:`~minimand.errors.ShapeError` unless ``x`` is an output sample or a batch of them."""
        self._check_dimensions("output", x)
        super().check_output(x)

    @property
    def kernel(self) -> Kernel:
        """The weight with the geometry."""
        return Kernel(self.weight, self.geometry)

    def _check_map(self, y: Tensor) -> None:
        """As :meth:`check_input`; without a size, maps of every size pass."""
        if self.geometry.size is not None:
            self.check_input(y)
            return
        self._check_dimensions("input", y)
        if y.shape[self.feature_dim] != self.inputs:
            raise ShapeError(
                f"the {type(self).__name__} takes {self.inputs} input channels, got {y.shape[self.feature_dim]} in "
                f"shape {tuple(y.shape)}"
            )
        self.geometry.with_size(tuple(y.shape[self.feature_dim + 1 :])).fitting()

    def _check_dimensions(self, role: str, tensor: Tensor) -> None:
        sample = self.dimensions + 1
        if tensor.dim() not in (sample, sample + 1):
            raise ShapeError(
                f"a {type(self).__name__} takes one {role} sample ({sample} dimensions) or a batch of them "
                f"({sample + 1}), got shape {tuple(tensor.shape)}"
            )


@majorant.register
def _(target: Convolution, input_size: Size | None) -> tuple[Convolution, float]:
    return (target if input_size is None else target.with_size(input_size)), 1.0


@checked
class Conv2d(Convolution):
    r"""The map of a two-dimensional convolution, as torch computes it.

    .. math:: (Ay)_{o,p} = \sum_{i,t} W_{o,i,t} \, y_{i,\, s p + d t - \mathrm{pad}}, \qquad
              W \in \mathbb{R}^{n_2 \times n_1/\mathrm{groups} \times k_h \times k_w}.

    Inputs have shape ``(B, n1, H, W)`` or ``(n1, H, W)``; ``input_size`` is ``(H, W)``, or None when only
    ``apply`` and bounds that hold for every size are needed. ``padding`` may be "same" or "valid"; ``padding_mode`` is
    "zeros", "circular" (the operator of [Bibi2019]), "reflect" or "replicate". By [Bibi2019], Lemma 1, it is a linear
    layer.

    >>> A = Conv2d(torch.ones(1, 1, 2, 2), input_size=(3, 3))
    >>> A.apply(torch.ones(1, 3, 3)).squeeze()
    tensor([[4., 4.],
            [4., 4.]])
    >>> A.adjoint(torch.ones(1, 2, 2)).squeeze()
    tensor([[1., 2., 1.],
            [2., 4., 2.],
            [1., 2., 1.]])
    >>> bool(A.norm_sq() >= 9)  # σ² = 9: [[1,1,0],[0,1,1]] has norm √3
    True
    >>> mean = Conv2d(torch.full((1, 1, 3, 3), 1 / 9), input_size=(4, 5), padding=1, padding_mode="circular")
    >>> round(float(mean.norm_sq()), 5)  # [Bibi2019], Lemma 2, is exact: the symbol at frequency zero
    1.0
    """

    dimensions = 2


@checked
class Conv1d(Convolution):
    """The map of a one-dimensional convolution; everything else as in :class:`Conv2d`.

    >>> A = Conv1d(torch.ones(1, 1, 3), input_size=5, stride=2)
    >>> A.apply(torch.arange(5.0).reshape(1, 5))
    tensor([[3., 9.]])
    """

    dimensions = 1


@checked
class Conv3d(Convolution):
    """The map of a three-dimensional convolution; everything else as in :class:`Conv2d`.

    >>> Conv3d(torch.ones(1, 1, 2, 2, 2), input_size=(3, 3, 3)).apply(torch.ones(1, 3, 3, 3)).unique()
    tensor([8.])
    """

    dimensions = 3

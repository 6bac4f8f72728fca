"""Convolutional operators in one and two dimensions."""

import abc
import copy
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import OptionError, ShapeError, is_traced, require_real
from .accumulate import Weight
from .base import LinearOperator, as_index, check_bias, out_of_range, pick
from .bounds import Geometry, channel_norms_sq, convolution_norm_sq
from .gather import Columns
from .grouped import GroupedPart
from .spectral import round_up
from .winograd import Winograd, winograd

__all__ = ["Conv1d", "Conv2d", "Convolution"]

Size = int | tuple[int, ...]


class Convolution(LinearOperator, abc.ABC):
    """What convolutions of every dimension share. Use :class:`Conv1d` or :class:`Conv2d`."""

    dimensions: ClassVar[int]
    _forward: ClassVar[Callable[..., Tensor]]
    _transposed: ClassVar[Callable[..., Tensor]]

    def __init__(
        self,
        weight: Tensor,
        input_size: Size | None,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
    ) -> None:
        require_real("a convolution's weight", weight)
        if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
            raise OptionError(f"groups must be a whole number ≥ 1, got {groups!r}")
        if weight.dim() != self.dimensions + 2 or weight.shape[0] % groups:
            raise ShapeError(
                f"a {type(self).__name__} weight has {self.dimensions + 2} dimensions (n2, n1/groups, k...), "
                f"n2 a multiple of groups; got {tuple(weight.shape)} with groups={groups}"
            )
        self.weight = weight
        self._columns: Columns | None = None
        self._kernels: Winograd | None = None
        self.feature_dim = -1 - self.dimensions
        kernel = tuple(weight.shape[2:])
        strides, dilations = self._tuple("stride", stride, 1), self._tuple("dilation", dilation, 1)
        self.geometry = Geometry(
            kernel=kernel,
            stride=strides,
            padding=self._pairs(padding, kernel, strides, dilations),
            dilation=dilations,
            groups=groups,
            size=None if input_size is None else self._tuple("input_size", input_size, 1),
        )
        # Handed to torch as it was given: "same" with an even kernel has no symmetric equivalent.
        self._padding = padding if isinstance(padding, str) else self._tuple("padding", padding, 0)
        if input_size is not None and min(self.geometry.output()) < 1:
            raise ShapeError(
                f"a kernel of reach {tuple(r + 1 for r in self.geometry.reach)} does not fit into a map of "
                f"{self.geometry.size} with padding {padding}; enlarge the map or the padding"
            )

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
        g = self.geometry
        self._check_map(y)
        if self._kernels is not None and y.dim() == self.dimensions + 2 and not is_traced(y):
            y = y.contiguous(memory_format=torch.channels_last)
        inside = None
        if bias is not None and bias.shape in ((self.outputs,), (self.outputs, *(1,) * self.dimensions)):
            inside, bias = bias.reshape(self.outputs), None
        before = tuple(pair[0] for pair in g.padding)
        if any(pair[0] != pair[1] for pair in g.padding):
            # As torch does for an even kernel, but without its warning; it counts the sides from the last dimension.
            y = F.pad(y, [side for pair in reversed(g.padding) for side in (0, pair[1] - pair[0])])
        x = type(self)._forward(y, self.weight, inside, g.stride, before, g.dilation, g.groups)
        if bias is None:
            return x
        check_bias(bias, x)
        return x + bias

    def adjoint(self, x: Tensor) -> Tensor:
        """``Aᵀ x``, the transposed convolution, with exactly the input's size.

        Inputs that no window reaches, because the stride does not divide the map, come out as zeros.
        """
        g = self.geometry
        self.check_output(x)
        size, before = g.known_size(), tuple(p[0] for p in g.padding)
        parts = zip(g.output(), g.stride, before, g.reach, strict=True)
        natural = [(o - 1) * s - 2 * p + r + 1 for o, s, p, r in parts]
        missing = tuple(max(n - m, 0) for n, m in zip(size, natural, strict=True))
        y = type(self)._transposed(x, self.weight, None, g.stride, before, missing, g.groups, g.dilation)
        for axis, (n, m) in enumerate(zip(size, natural, strict=True)):
            if m > n:  # more padding after the map than before it
                y = y.narrow(axis - self.dimensions, 0, n)
        return y

    def restrict(self, index: Tensor | Sequence[int]) -> LinearOperator:
        """``A`` on the input channels ``index`` (with groups: :class:`~.grouped.GroupedPart`)."""
        index = as_index(index, self.weight, self.inputs)
        if self.geometry.groups > 1:
            _check_range(index, self.inputs)
            return GroupedPart(self, index, torch.arange(self.outputs, device=index.device))
        part = pick(self.weight, 1, index) if self._columns is None else self._columns.take(index)
        return self.with_weight(part, 1)

    def restrict_outputs(self, index: Tensor | Sequence[int]) -> LinearOperator:
        """The output channels ``index`` of ``A``."""
        index = as_index(index, self.weight, self.outputs)
        if self.geometry.groups > 1:
            _check_range(index, self.outputs)
            return GroupedPart(self, torch.arange(self.inputs, device=index.device), index)
        return self.with_weight(pick(self.weight, 0, index), 1)

    def gathered(self) -> Self:
        """The same operator, with its channels laid out for :meth:`restrict`."""
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
        """:meth:`onto` by transformed kernels; by the definition where a graph is made, and for what is no batch of the
        weight's type."""
        plain = copy.copy(self)
        plain._kernels = None
        others = [x] if total is None else [x, total]
        usual = all(each.shape == x.shape and each.dtype == kernels.forward.dtype for each in others)
        if not usual or x.dim() != self.dimensions + 2 or any(map(is_traced, others)):
            return plain.onto(total, keep, x, scale)
        self.check_output(x)
        return kernels.onto(total, keep, x, scale, self.weight, lambda x, weight: plain.with_weight(weight).normal(x))

    def repeated(self, rows: int) -> Self:
        """The same operator, its kernels transformed for repeated products where that pays (:mod:`.winograd`)."""
        other = copy.copy(self)
        other._kernels = winograd(self.weight, self.geometry, rows)
        return other

    def with_weight(self, weight: Tensor, groups: int | None = None) -> Self:
        """The same convolution with another weight; no bounds are carried over."""
        g = self.geometry
        return type(self)(weight, g.size, g.stride, self._padding, g.dilation, groups or g.groups)

    def with_size(self, input_size: Size) -> Self:
        """The same convolution of maps of another size."""
        g = self.geometry
        return type(self)(self.weight, input_size, g.stride, self._padding, g.dilation, g.groups)

    def check_input(self, y: Tensor) -> None:
        """Raise :class:`~minimand.errors.ShapeError` unless ``y`` is an input sample or a batch of them."""
        self._check_dimensions("input", y)
        super().check_input(y)

    def check_output(self, x: Tensor) -> None:
        """Raise :class:`~minimand.errors.ShapeError` unless ``x`` is an output sample or a batch of them."""
        self._check_dimensions("output", x)
        super().check_output(x)

    def _norm_sq(self) -> Tensor:
        return round_up(convolution_norm_sq(self.weight, self.geometry), self.weight.dtype)

    def _input_norms_sq(self) -> Tensor:
        return round_up(channel_norms_sq(self.weight, self.geometry, of="inputs"), self.weight.dtype)

    def _output_norms_sq(self) -> Tensor:
        return round_up(channel_norms_sq(self.weight, self.geometry, of="outputs"), self.weight.dtype)

    def _check_map(self, y: Tensor) -> None:
        """As :meth:`check_input`, where without a size any map will do."""
        if self.geometry.size is not None:
            self.check_input(y)
            return
        self._check_dimensions("input", y)
        if y.shape[self.feature_dim] != self.inputs:
            raise ShapeError(
                f"the {type(self).__name__} takes {self.inputs} input channels, got {y.shape[self.feature_dim]} in "
                f"shape {tuple(y.shape)}"
            )
        g, size = self.geometry, y.shape[self.feature_dim + 1 :]
        if any(n + sum(p) <= r for n, p, r in zip(size, g.padding, g.reach, strict=True)):
            raise ShapeError(f"a kernel of {g.kernel} does not fit into a map of {tuple(size)}; enlarge it or pad it")

    def _check_dimensions(self, role: str, tensor: Tensor) -> None:
        sample = self.dimensions + 1
        if tensor.dim() not in (sample, sample + 1):
            raise ShapeError(
                f"a {type(self).__name__} takes one {role} sample ({sample} dimensions) or a batch of them "
                f"({sample + 1}), got shape {tuple(tensor.shape)}"
            )

    def _tuple(self, name: str, value: Size, least: int) -> tuple[int, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            value = (value,) * self.dimensions
        values = tuple(value)
        whole = all(isinstance(v, int | torch.SymInt) and not isinstance(v, bool) for v in values)
        if len(values) != self.dimensions or not whole or min(values) < least:
            raise OptionError(f"{name} must be {self.dimensions} integers ≥ {least} (or one for all), got {value}")
        return values

    def _pairs(
        self, padding: Size | str, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
    ) -> tuple[tuple[int, int], ...]:
        if padding == "valid":
            return ((0, 0),) * self.dimensions
        if padding == "same":
            if max(stride) > 1:
                raise OptionError(f'padding="same" needs stride 1, got {stride}; give the padding in numbers')
            totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
            return tuple((t // 2, t - t // 2) for t in totals)
        if isinstance(padding, str):
            raise OptionError(f'padding must be integers, "same" or "valid", got "{padding}"')
        return tuple((p, p) for p in self._tuple("padding", padding, 0))


def _check_range(index: Tensor, size: int) -> None:
    if not torch.compiler.is_compiling() and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
        raise out_of_range(index, size)


class Conv2d(Convolution):
    r"""The map of a two-dimensional convolution with zero padding, as torch computes it.

    .. math:: (Ay)_{o,p} = \sum_{i,t} W_{o,i,t} \, y_{i,\, s p + d t - \mathrm{pad}}, \qquad
              W \in \mathbb{R}^{n_2 \times n_1/\mathrm{groups} \times k_h \times k_w}.

    Inputs have shape ``(B, n1, H, W)`` or ``(n1, H, W)``; ``input_size`` is ``(H, W)``, or None when only
    ``apply`` and bounds that hold for every size are needed. ``padding`` may be "same" or "valid". Lemma 1
    of Bibi, Ghanem, Koltun, Ranftl, *Deep Layers as Stochastic Solvers*, ICLR 2019, makes it a linear layer
    like any other.

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
    """

    dimensions = 2
    _forward = F.conv2d
    _transposed = F.conv_transpose2d


class Conv1d(Convolution):
    """The map of a one-dimensional convolution; everything else as in :class:`Conv2d`.

    >>> A = Conv1d(torch.ones(1, 1, 3), input_size=5, stride=2)
    >>> A.apply(torch.arange(5.0).reshape(1, 5))
    tensor([[3., 9.]])
    """

    dimensions = 1
    _forward = F.conv1d
    _transposed = F.conv_transpose1d

"""Transposed convolutions: the adjoints of convolutions, as torch's layers compute them."""

import dataclasses
from operator import attrgetter
from typing import ClassVar

from torch import Tensor, nn

from ..arguments import checked
from ..errors import OptionError, ShapeError
from ..geometry import ConvGeometry, Size
from ..norms.kernel import Kernel
from ..norms.lipschitz import majorant
from .combined import Transposed
from .conv import Conv1d, Conv2d, Convolution
from .index import check_bias

__all__ = ["ConvTranspose", "ConvTranspose1d", "ConvTranspose2d"]


class ConvTranspose(Transposed):
    """The common base of :class:`ConvTranspose1d` and :class:`ConvTranspose2d`."""

    _convolution: ClassVar[type[Convolution]]
    operator: Convolution
    # What the geometry fixed can be read and not set.
    stride, padding, dilation, groups, output_padding = (
        property(attrgetter(name))
        for name in (*(f"operator.{name}" for name in ("stride", "padding", "dilation", "groups")), "_extra")
    )

    def __init__(
        self,
        weight: Tensor,
        input_size: Size | None,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        dilation: Size = 1,
    ) -> None:
        convolution = self._convolution(weight, None, stride, padding, dilation, groups)
        extra = ConvGeometry.build((1,) * convolution.dimensions, padding=output_padding).padding
        self._extra = tuple(pair[0] for pair in extra)
        if any(extra >= s for extra, s in zip(self._extra, convolution.geometry.stride, strict=True)):
            raise OptionError(
                f"output_padding must be smaller than the stride, got {self._extra} with stride "
                f"{convolution.geometry.stride}"
            )
        super().__init__(
            convolution if input_size is None else convolution.with_size(self._mapped(convolution, input_size))
        )

    def _mapped(self, convolution: Convolution, size: Size) -> tuple[int, ...]:
        """The size of the output for an input of ``size``."""
        g = convolution.geometry
        given = g.with_size(size).known_size()
        parts = zip(given, g.stride, g.padding, g.reach, self._extra, strict=True)
        mapped = tuple((n - 1) * s - sum(p) + r + 1 + e for n, s, p, r, e in parts)
        if min(mapped) < 1:
            raise ShapeError(f"a map of {given} has no output with padding {g.padding}; enlarge the map or pad less")
        return mapped

    @property
    def input_size(self) -> tuple[int, ...] | None:
        """The size of the input map; None where it is not fixed."""
        return None if self.operator.geometry.size is None else self.operator.geometry.output()

    @property
    def feature_dim(self) -> int:
        """The dimension of the channels."""
        return self.operator.feature_dim

    @property
    def output_dim(self) -> int:
        """The dimension of the channels."""
        return self.operator.feature_dim

    @property
    def inputs(self) -> int:
        """The number of input channels (n1)."""
        return self.operator.outputs

    @property
    def outputs(self) -> int:
        """The number of output channels (n2)."""
        return self.operator.inputs

    @property
    def kernel(self) -> Kernel:
        """The weight with the geometry."""
        return Kernel(self.weight, dataclasses.replace(self.operator.geometry, transposed=True))

    def apply(self, y: Tensor, bias: Tensor | None = None) -> Tensor:
        """``A y + bias``, to the bit what torch's transposed convolution computes."""
        convolution = self.operator
        if convolution.geometry.size is None:
            convolution = convolution.with_size(self._mapped(convolution, tuple(y.shape[self.feature_dim + 1 :])))
        convolution.check_output(y)
        inside = None
        if bias is not None and bias.shape in ((self.outputs,), (self.outputs, *(1,) * convolution.dimensions)):
            inside, bias = bias.reshape(self.outputs), None
        x = convolution.geometry.transpose(y, convolution.weight, inside)
        if bias is None:
            return x
        check_bias(bias, x)
        return x + bias

    affine = apply

    def scaled_outputs(self, scale: Tensor) -> Tensor:
        """The weight of the map whose output channels are multiplied by one factor each."""
        groups = self.operator.geometry.groups
        factors = scale.reshape(groups, 1, -1, *(1,) * self.operator.dimensions).to(self.weight.dtype)
        return (self.weight.unflatten(0, (groups, -1)) * factors).flatten(0, 1)

    def with_weight(self, weight: Tensor) -> "ConvTranspose":
        """The same map with another weight; no bounds are carried over."""
        return self._around(self.operator.with_weight(weight))

    def with_size(self, input_size: Size) -> "ConvTranspose":
        """The same map of inputs of another size."""
        return self._around(self.operator.with_size(self._mapped(self.operator, input_size)))

    def _around(self, convolution: Convolution) -> "ConvTranspose":
        other = type(self).__new__(type(self))
        other._extra = self._extra
        Transposed.__init__(other, convolution)
        return other


@majorant.register
def _(target: ConvTranspose, input_size: Size | None) -> tuple[ConvTranspose, float]:
    return (target if input_size is None else target.with_size(input_size)), 1.0


@checked
class ConvTranspose2d(ConvTranspose):
    r"""The map of :class:`torch.nn.ConvTranspose2d`, the adjoint of a convolution with the same weight.

    The weight has the shape :math:`n_1 \times n_2/\mathrm{groups} \times k_h \times k_w`. The options have the order
    and the meaning of torch's layer; ``input_size`` is ``(H, W)``, or None when only ``apply`` and bounds that hold for
    every size are needed.

    >>> import torch
    >>> A = ConvTranspose2d(torch.ones(1, 1, 2, 2), input_size=(2, 2), stride=2)
    >>> A.apply(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])).squeeze()
    tensor([[1., 1., 2., 2.],
            [1., 1., 2., 2.],
            [3., 3., 4., 4.],
            [3., 3., 4., 4.]])
    >>> bool(4 <= A.norm_sq() < 4.01)
    True
    """

    _convolution = Conv2d


@checked
class ConvTranspose1d(ConvTranspose):
    """The one-dimensional :class:`ConvTranspose2d`.

    >>> import torch
    >>> ConvTranspose1d(torch.ones(1, 1, 3), input_size=2, stride=2).apply(torch.tensor([[1.0, 2.0]]))
    tensor([[1., 1., 3., 2., 2.]])
    """

    _convolution = Conv1d


@majorant.register(nn.ConvTranspose1d)
@majorant.register(nn.ConvTranspose2d)
def _(target: nn.ConvTranspose1d, input_size: Size | None) -> tuple[ConvTranspose, float]:
    kind = ConvTranspose1d if isinstance(target, nn.ConvTranspose1d) else ConvTranspose2d
    names = ("stride", "padding", "output_padding", "groups", "dilation")
    return kind(target.weight, input_size, *(getattr(target, name) for name in names)), 1.0

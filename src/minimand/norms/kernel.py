"""Bounds on the norm of a weight, as a matrix or as the kernel of a convolution.

In a compiled graph, and under torch.func, a bound is one custom operator, which hides its data-dependent control flow.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import require_finite
from ..geometry import PADDING_MODES, ConvGeometry
from ..tracing import is_traced
from .convolution import channel_norms_sq, convolution_norm_sq, is_expensive, unfolded_norm_sq
from .spectral import certified_norm_sq, round_up, strips_norm_sq, sum_of_squares

__all__ = ["Bounds", "Kernel"]

_OTHER = {"inputs": "outputs", "outputs": "inputs"}
QUICK = 1e9  # operations for the Gram matrix of a dense weight from which a bound may be looser


class Bounds(NamedTuple):
    r"""Upper bounds on :math:`\|A\|^2` and on the norms of its parts, never below the truth.

    ``inputs[i]`` bounds :math:`\|a_i\|^2`, the squared norm of ``A`` restricted to its i-th input (a column, or the
    block of a channel). ``outputs[j]`` bounds that of its j-th row, or output channel. A bound that is None is computed
    when it is needed.
    """

    total: Tensor
    inputs: Tensor | None = None
    outputs: Tensor | None = None


@dataclass(frozen=True)
class Kernel:
    """A weight and the linear map that it defines: a matrix, or a convolution with a geometry.

    >>> bool(9 <= Kernel(torch.diag(torch.tensor([1.0, 3.0]))).norm_sq() < 9.01)
    True
    """

    weight: Tensor
    geometry: ConvGeometry | None = None
    has_weight: ClassVar[bool] = True

    @property
    def kernel(self) -> "Kernel":
        """Itself: what an operator with a weight returns here, too."""
        return self

    @property
    def dtype(self) -> torch.dtype:
        """The weight's type."""
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        """The weight's device."""
        return self.weight.device

    @property
    def transposed(self) -> bool:
        """Whether this is the adjoint of the convolution with the geometry."""
        return self.geometry is not None and self.geometry.transposed

    @property
    def inputs(self) -> int:
        """The number of input features or channels."""
        return self.weight.shape[0] if self.transposed else self.weight.shape[1] * self.groups

    @property
    def outputs(self) -> int:
        """The number of output features or channels."""
        return self.weight.shape[1] * self.groups if self.transposed else self.weight.shape[0]

    @property
    def groups(self) -> int:
        """The number of groups of a convolution; 1 for a matrix."""
        return 1 if self.geometry is None else self.geometry.groups

    @property
    def overlap(self) -> int:
        r"""A number r with :math:`\|A\|^2 \le r\,\|W\|_F^2`: windows that share an input, or inputs of a window."""
        return 1 if self.geometry is None else min(self.geometry.overlaps())

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of one output sample."""
        g = self.geometry
        return (self.outputs, *(() if g is None else g.known_size() if g.transposed else g.output()))

    def with_weight(self, weight: Tensor) -> "Kernel":
        """The same map with another weight."""
        return Kernel(weight, self.geometry)

    def normal(self, x: Tensor) -> Tensor:
        """``A Aᵀ x`` of a batch."""
        if self.geometry is None:
            return F.linear(torch.matmul(x, self.weight), self.weight)
        if self.transposed:
            return self.geometry.transpose(self.geometry.convolve(x, self.weight), self.weight)
        return self.geometry.convolve(self.geometry.transpose(x, self.weight), self.weight)

    def quick(self) -> Tensor | None:
        r"""A looser bound on :math:`\|A\|^2` in float64, where a tight one is expensive; else None."""
        if self.geometry is not None:
            return unfolded_norm_sq(self.weight, self.geometry) if is_expensive(self.weight, self.geometry) else None
        return strips_norm_sq(self.weight) if min(self.weight.shape) * self.weight.numel() > QUICK else None

    def norm_sq(self) -> Tensor:
        r"""A bound on :math:`\|A\|^2` in the weight's type; a constant for autograd."""
        return self._bound("total")

    def input_norms_sq(self) -> Tensor:
        """One bound per column, or per block of an input channel."""
        return self._bound("inputs")

    def output_norms_sq(self) -> Tensor:
        """One bound per row, or per block of an output channel."""
        return self._bound("outputs")

    def certified(self, part: str = "total", method: str = "auto") -> Tensor:
        """The bound on a part ("total", "inputs" or "outputs") in float64; ``method`` is that of ``lipschitz``."""
        if self.geometry is not None:
            if part == "total":
                return convolution_norm_sq(self.weight, self.geometry, method)
            return channel_norms_sq(self.weight, self.geometry, of=_OTHER[part] if self.transposed else part)
        if part == "total":
            return certified_norm_sq(self.weight, rtol=0.0 if method == "exact" else 1e-3)
        return sum_of_squares(self.weight, 0 if part == "inputs" else 1)

    def _bound(self, part: str) -> Tensor:
        if is_traced(self.weight):
            return _certified(self.weight.detach(), part, encode(self.geometry))
        return round_up(self.certified(part), self.weight.dtype)


def encode(geometry: ConvGeometry | None) -> list[int]:
    """The geometry as whole numbers, which a compiled graph can hold; empty for a matrix."""
    if geometry is None:
        return []
    padding = [side for pair in geometry.padding for side in pair]
    kind = 2 * PADDING_MODES.index(geometry.mode) + geometry.transposed
    return [geometry.groups, kind, *geometry.stride, *geometry.dilation, *padding, *(geometry.size or ())]


def decode(weight: Tensor, code: list[int]) -> Kernel:
    """The kernel of a weight and an encoded geometry."""
    if not code:
        return Kernel(weight)
    groups, kind, *rest = code
    d = weight.dim() - 2
    pairs = tuple(zip(rest[2 * d : 4 * d : 2], rest[2 * d + 1 : 4 * d : 2], strict=True))
    size = tuple(rest[4 * d :]) or None
    sizes = tuple(weight.shape[2:]), tuple(rest[:d]), pairs, tuple(rest[d : 2 * d])
    return Kernel(weight, ConvGeometry(*sizes, groups, size, PADDING_MODES[kind // 2], bool(kind % 2)))


@torch.library.custom_op("minimand::certified_bound", mutates_args=())
def _certified(weight: Tensor, part: str, code: list[int]) -> Tensor:
    require_finite("the operator's weight", weight)
    return round_up(decode(weight, code).certified(part), weight.dtype)


@_certified.register_fake
def _(weight: Tensor, part: str, code: list[int]) -> Tensor:
    kernel = decode(weight, code)
    return weight.new_empty({"total": [], "inputs": [kernel.inputs], "outputs": [kernel.outputs]}[part])


@_certified.register_vmap
def _(info: Any, in_dims: tuple[int, None, None], weight: Tensor, part: str, code: list[int]) -> tuple[Tensor, int]:
    return torch.stack([_certified(each, part, code) for each in weight.unbind(in_dims[0])]), 0

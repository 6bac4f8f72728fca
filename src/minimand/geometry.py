"""The geometry of a convolution: kernel, stride, padding, dilation, groups and map size, apart from the weight."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm, prod
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import CapabilityError, OptionError, ShapeError, is_compiled

__all__ = ["ConvGeometry", "Size"]

Size = int | tuple[int, ...]

_FORWARD: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., Tensor]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class ConvGeometry:
    """Everything about a zero-padded convolution except its weight, with one entry per spatial dimension.

    Output position p reads the padded input at ``stride * p + dilation * t`` for the taps t of the kernel.

    Attributes:
        kernel: Taps.
        stride: Distance between neighbouring windows.
        padding: Pairs of zeros (before, after) the map.
        dilation: Distance between neighbouring taps.
        groups: Groups of channels that are convolved separately.
        size: The size of the input map; None where it is not fixed.

    >>> ConvGeometry.of(torch.nn.Conv2d(3, 8, 3, stride=2, padding=1), (9, 8)).output()
    (5, 4)
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    size: tuple[int, ...] | None = None

    @classmethod
    def of(cls, module: nn.Module, size: Size | None = None) -> Self:
        """The geometry of a :class:`torch.nn.Conv1d`, ``Conv2d`` or ``Conv3d``, whatever its ``padding_mode``."""
        if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            raise CapabilityError(
                f"a ConvGeometry is built from a Conv1d, Conv2d or Conv3d, got {type(module).__name__}"
            )
        return cls.build(module.kernel_size, size, module.stride, module.padding, module.dilation, module.groups)

    @classmethod
    def build(
        cls,
        kernel: tuple[int, ...],
        size: Size | None = None,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
    ) -> Self:
        """The geometry of options as torch's convolutions take them; raises :class:`~minimand.errors.OptionError`."""
        if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
            raise OptionError(f"groups must be a whole number ≥ 1, got {groups!r}")
        d = len(kernel)
        strides, dilations = _per_dimension("stride", stride, d, 1), _per_dimension("dilation", dilation, d, 1)
        pairs = _pairs(padding, kernel, strides, dilations)
        sizes = None if size is None else _per_dimension("input_size", size, d, 1)
        return cls(tuple(kernel), strides, pairs, dilations, groups, sizes)

    def fitting(self) -> Self:
        """Itself, or a :class:`~minimand.errors.ShapeError` where the kernel does not fit into the map."""
        if self.size is not None and min(self.output()) < 1:
            raise ShapeError(
                f"a kernel of reach {tuple(r + 1 for r in self.reach)} does not fit into a map of {self.size} with "
                f"padding {self.padding}; enlarge the map or the padding"
            )
        return self

    def with_size(self, size: Size | None) -> Self:
        """The same geometry on maps of another size."""
        return replace(self, size=None if size is None else _per_dimension("input_size", size, len(self.kernel), 1))

    def without_padding(self) -> Self:
        """The same windows on a map that has been padded already."""
        size = None if self.size is None else tuple(n + sum(p) for n, p in zip(self.size, self.padding, strict=True))
        return replace(self, padding=((0, 0),) * len(self.kernel), size=size)

    @property
    def reach(self) -> tuple[int, ...]:
        """The distance between the first and the last tap."""
        return tuple(d * (k - 1) for k, d in zip(self.kernel, self.dilation, strict=True))

    @property
    def pads(self) -> list[int]:
        """The padding in the order of :func:`torch.nn.functional.pad`, which starts with the last dimension."""
        return [side for pair in reversed(self.padding) for side in pair]

    def known_size(self) -> tuple[int, ...]:
        """``size``, or an :class:`~minimand.errors.OptionError` where it is None."""
        if self.size is None:
            raise OptionError("this convolution has no input_size; pass input_size=(H, W) when building it")
        return self.size

    def output(self) -> tuple[int, ...]:
        """The size of the output map."""
        parts = zip(self.known_size(), self.padding, self.reach, self.stride, strict=True)
        return tuple((n + sum(p) - r - 1) // s + 1 for n, p, r, s in parts)

    def leftover(self) -> tuple[int, ...]:
        """The number of rows at the end of the padded input that no window covers."""
        parts = zip(self.known_size(), self.padding, self.reach, self.stride, strict=True)
        return tuple((n + sum(p) - r - 1) % s for n, p, r, s in parts)

    def circle(self) -> tuple[int, ...]:
        """The frequencies per dimension of a circular convolution that contains this one (polyphase)."""
        points = []
        parts = zip(
            self.known_size(), self.padding, self.reach, self.leftover(), self.stride, self.dilation, strict=True
        )
        for n, (before, after), reach, leftover, s, d in parts:
            # On the circle the zeros before the map and the zeros after it can share their places.
            zeros = min(max(before, after - leftover, 0), reach)
            points.append(-(-(n + zeros) // lcm(s, d)))
        return tuple(points)

    def overlaps(self) -> tuple[int, int]:
        """The largest number of windows that share one input, and the largest number of inputs in one window."""
        shared = [-(-k // (s // gcd(s, d))) for k, s, d in zip(self.kernel, self.stride, self.dilation, strict=True)]
        summed = list(self.kernel)
        if self.size is not None:
            shared = [min(r, o) for r, o in zip(shared, self.output(), strict=True)]
            summed = [min(k, -(-n // d)) for k, n, d in zip(self.kernel, self.size, self.dilation, strict=True)]
        return prod(shared), prod(summed)

    def convolve(self, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The convolution of maps ``y``, to the bit as torch computes it; ``bias`` has one entry per output channel."""
        before = tuple(pair[0] for pair in self.padding)
        if any(pair[0] != pair[1] for pair in self.padding):
            # torch's padding="same" does this for even kernels too, with a warning.
            y = F.pad(y, [side for pair in reversed(self.padding) for side in (0, pair[1] - pair[0])])
        conv = _FORWARD[len(self.kernel)]
        return conv(y, weight, bias, self.stride, before, self.dilation, self.groups)

    def transpose(self, x: Tensor, weight: Tensor) -> Tensor:
        """The adjoint of :meth:`convolve`; inputs that no window covers are zero."""
        size, before = self.known_size(), tuple(p[0] for p in self.padding)
        parts = zip(self.output(), self.stride, before, self.reach, strict=True)
        natural = [(o - 1) * s - 2 * p + r + 1 for o, s, p, r in parts]
        conv = _TRANSPOSED[len(self.kernel)]
        if is_compiled(x):
            # The remainder that the stride leaves must not become a condition of the graph: the longest map is cut.
            longest = tuple(s - 1 for s in self.stride)
            y = conv(x, weight, None, self.stride, before, longest, self.groups, self.dilation)
            if max(longest) == 0 and all(pair[0] == pair[1] for pair in self.padding):
                return y
            cuts = [n - m - more for n, m, more in zip(size, natural, longest, strict=True)]
            return F.pad(y, [side for cut in reversed(cuts) for side in (0, cut)])
        missing = tuple(max(n - m, 0) for n, m in zip(size, natural, strict=True))
        y = conv(x, weight, None, self.stride, before, missing, self.groups, self.dilation)
        for axis, (n, m) in enumerate(zip(size, natural, strict=True)):
            if m > n:  # more padding after the map than before it
                y = y.narrow(axis - len(self.kernel), 0, n)
        return y


def _per_dimension(name: str, value: Size, dimensions: int, least: int) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        value = (value,) * dimensions
    values = tuple(value)
    whole = all(isinstance(v, int | torch.SymInt) and not isinstance(v, bool) for v in values)
    if len(values) != dimensions or not whole or min(values) < least:
        raise OptionError(f"{name} must be {dimensions} integers ≥ {least} (or one for all), got {value}")
    return values


def _pairs(
    padding: Size | str, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        if max(stride) > 1:
            raise OptionError(f'padding="same" needs stride 1, got {stride}; give the padding in numbers')
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((t // 2, t - t // 2) for t in totals)
    if isinstance(padding, str):
        raise OptionError(f'padding must be integers, "same" or "valid", got "{padding}"')
    return tuple((p, p) for p in _per_dimension("padding", padding, len(kernel), 0))

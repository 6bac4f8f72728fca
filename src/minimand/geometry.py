"""The geometry of a convolution: kernel, stride, padding, dilation, groups and map size, apart from the weight."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm, prod
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import CapabilityError, OptionError, ShapeError
from .tracing import in_transform, is_compiled, is_traced, tangent_of

__all__ = ["PADDING_MODES", "ConvGeometry", "Size"]

Size = int | tuple[int, ...]
PADDING_MODES = ("zeros", "circular", "reflect", "replicate")

_FORWARD: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., Tensor]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class ConvGeometry:
    """Everything about a convolution except its weight, with one entry per spatial dimension.

    Output position p reads the padded input at ``stride * p + dilation * t`` for the taps t of the kernel.

    Attributes:
        kernel: Taps.
        stride: Distance between neighbouring windows.
        padding: Pairs of entries (before, after) the map.
        dilation: Distance between neighbouring taps.
        groups: Groups of channels that are convolved separately.
        size: The size of the input map; None where it is not fixed.
        mode: What the padding holds, one of torch's padding modes.
        transposed: Whether the map in question is the adjoint of this convolution.

    >>> ConvGeometry.of(torch.nn.Conv2d(3, 8, 3, stride=2, padding=1), (9, 8)).output()
    (5, 4)
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    size: tuple[int, ...] | None = None
    mode: str = "zeros"
    transposed: bool = False

    @classmethod
    def of(cls, module: nn.Module, size: Size | None = None) -> Self:
        """The geometry of a :class:`torch.nn.Conv1d`, ``Conv2d`` or ``Conv3d``."""
        if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            raise CapabilityError(
                f"a ConvGeometry is built from a Conv1d, Conv2d or Conv3d, got {type(module).__name__}"
            )
        given = module.stride, module.padding, module.dilation, module.groups, module.padding_mode
        return cls.build(module.kernel_size, size, *given)

    @classmethod
    def build(
        cls,
        kernel: tuple[int, ...],
        size: Size | None = None,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
        mode: str = "zeros",
    ) -> Self:
        """The geometry of options as torch's convolutions take them; raises :class:`~minimand.errors.OptionError`."""
        if mode not in PADDING_MODES:
            raise OptionError(f"padding_mode must be one of {', '.join(PADDING_MODES)}, got {mode!r}")
        if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
            raise OptionError(f"groups must be a whole number ≥ 1, got {groups!r}")
        d = len(kernel)
        strides, dilations = _per_dimension("stride", stride, d, 1), _per_dimension("dilation", dilation, d, 1)
        pairs = _pairs(padding, kernel, strides, dilations)
        sizes = None if size is None else _per_dimension("input_size", size, d, 1)
        return cls(tuple(kernel), strides, pairs, dilations, groups, sizes, mode)

    def fitting(self) -> Self:
        """Itself, or a :class:`~minimand.errors.ShapeError` where kernel and padding do not fit the map."""
        if self.size is None:
            return self
        for pair, n in zip(self.padding, self.size, strict=True):
            if n < (least := self._least(pair)):
                raise ShapeError(
                    f"padding_mode={self.mode!r} with a padding of {max(pair)} needs a map of {least} or more, got "
                    f"{n}; enlarge the map or pad less"
                )
        if min(self.output()) < 1:
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
        return replace(self, padding=((0, 0),) * len(self.kernel), size=size, mode="zeros")

    def _least(self, pair: tuple[int, int]) -> int:
        """The smallest map that this padding can be taken from."""
        return {"zeros": 1, "replicate": 1, "reflect": max(pair) + 1, "circular": max(*pair, 1)}[self.mode]

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
        """The frequencies per dimension of a circular convolution that contains this one (polyphase).

        Circular padding needs strides that divide the map, as :meth:`circulant` makes them.
        """
        points = []
        parts = zip(
            self.known_size(), self.padding, self.reach, self.leftover(), self.stride, self.dilation, strict=True
        )
        for n, (before, after), reach, leftover, s, d in parts:
            # On the circle the zeros before the map and the zeros after it can share their places.
            zeros = min(max(before, after - leftover, 0), reach)
            circular = n // s // gcd(n // s, d // gcd(s, d))
            points.append(circular if self.mode == "circular" else -(-(n + zeros) // lcm(s, d)))
        return tuple(points)

    def copies(self) -> int:
        """The largest number of copies of one input in its padded map: the squared norm of the padding."""
        sizes = self.size or (None,) * len(self.kernel)
        return prod(_copies(self.mode, pair, n) for pair, n in zip(self.padding, sizes, strict=True))

    def circulant(self) -> tuple[Self, int]:
        r"""A circular convolution on the circle of the map, and a number r of repetitions.

        The windows of a circularly padded convolution A are windows of this one, C, each at most r times, so that
        :math:`\|A\|^2 \le r\|C\|^2`. Its strides divide the map; without a size they are one.
        """
        sizes = self.size or (None,) * len(self.kernel)
        strides = tuple(1 if n is None else gcd(n, s) for n, s in zip(sizes, self.stride, strict=True))
        repeats = 1
        for n, s, pair, reach in zip(sizes, strides, self.padding, self.reach, strict=True):
            least = max(*pair, 1) if n is None else n
            repeats *= max(1, -(-((least + sum(pair) - reach - 1) // s + 1) // (least // s)))
        return replace(self, stride=strides), repeats

    @property
    def is_circulant(self) -> bool:
        """Whether the windows are all windows on the circle of the map, once each: [Bibi2019], Lemma 2, is exact."""
        whole = self.size is not None and all(n % s == 0 for n, s in zip(self.size, self.stride, strict=True))
        parts = zip(self.output(), self.size or (), self.stride, strict=True) if whole else ()
        return self.mode == "circular" and whole and all(o == n // s for o, n, s in parts)

    def overlaps(self) -> tuple[int, int]:
        """The largest number of windows that share one input, and the largest number of inputs in one window.

        Both are multiplied with the number of copies of an input, where the padding copies inputs.
        """
        if self.mode != "zeros":
            copies = self.copies()
            shares, sums = self.without_padding().overlaps()
            return copies * shares, copies * sums
        shared = [-(-k // (s // gcd(s, d))) for k, s, d in zip(self.kernel, self.stride, self.dilation, strict=True)]
        summed = list(self.kernel)
        if self.size is not None:
            shared = [min(r, o) for r, o in zip(shared, self.output(), strict=True)]
            summed = [min(k, -(-n // d)) for k, n, d in zip(self.kernel, self.size, self.dilation, strict=True)]
        return prod(shared), prod(summed)

    def convolve(self, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The convolution of maps ``y``, to the bit as torch computes it; ``bias`` has one entry per output channel."""
        if self.mode != "zeros":
            return self.without_padding().convolve(self.pad(y), weight, bias)
        before = tuple(pair[0] for pair in self.padding)
        if any(pair[0] != pair[1] for pair in self.padding):
            # torch's padding="same" does this for even kernels too, with a warning.
            y = F.pad(y, [side for pair in reversed(self.padding) for side in (0, pair[1] - pair[0])])
        if y.requires_grad and torch.is_grad_enabled() and bias is None and self._is_blur(y, weight):
            return _Blur.apply(y, weight, before, self.dilation)
        conv = _FORWARD[len(self.kernel)]
        return conv(y, weight, bias, self.stride, before, self.dilation, self.groups)

    def _is_blur(self, x: Tensor, weight: Tensor) -> bool:
        """Whether the map is a convolution of one channel in strides of one, which :class:`_Blur` differentiates."""
        usual = tuple(weight.shape[:2]) == (1, 1) and len(self.kernel) == 2 and max(self.stride) == 1
        usual = usual and all(before <= r for (before, _), r in zip(self.padding, self.reach, strict=True))
        if not usual or x.device.type != "cpu" or is_traced(x) or in_transform() or is_traced(weight):
            return False
        learned = weight.requires_grad and torch.is_grad_enabled()
        return not learned and tangent_of(x) is None and tangent_of(weight) is None

    def pad(self, y: Tensor) -> Tensor:
        """The padded maps."""
        return F.pad(y, self.pads, mode="constant" if self.mode == "zeros" else self.mode)

    def transpose(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The adjoint of :meth:`convolve`; inputs that no window covers are zero. A bias needs zero padding."""
        if self.mode != "zeros":
            y = self.without_padding().transpose(x, weight)
            for axis, pair in enumerate(self.padding):
                y = _folded(y, axis - len(self.padding), pair, self.mode)
            return y
        size, before = self.known_size(), tuple(p[0] for p in self.padding)
        parts = zip(self.output(), self.stride, before, self.reach, strict=True)
        natural = [(o - 1) * s - 2 * p + r + 1 for o, s, p, r in parts]
        conv = _TRANSPOSED[len(self.kernel)]
        if bias is None and all(p[0] == p[1] for p in self.padding) and self._is_blur(x, weight):
            return _Blur.apply(
                x, weight.flip(-2, -1), tuple(r - p for r, p in zip(self.reach, before, strict=True)), self.dilation
            )
        if is_compiled(x):
            # The remainder that the stride leaves must not become a condition of the graph: the longest map is cut.
            longest = tuple(s - 1 for s in self.stride)
            y = conv(x, weight, bias, self.stride, before, longest, self.groups, self.dilation)
            if max(longest) == 0 and all(pair[0] == pair[1] for pair in self.padding):
                return y
            cuts = [n - m - more for n, m, more in zip(size, natural, longest, strict=True)]
            return F.pad(y, [side for cut in reversed(cuts) for side in (0, cut)])
        missing = tuple(max(n - m, 0) for n, m in zip(size, natural, strict=True))
        y = conv(x, weight, bias, self.stride, before, missing, self.groups, self.dilation)
        for axis, (n, m) in enumerate(zip(size, natural, strict=True)):
            if m > n:  # more padding after the map than before it
                y = y.narrow(axis - len(self.kernel), 0, n)
        return y


class _Blur(torch.autograd.Function):
    """A convolution of one channel. Its adjoint is one with the flipped kernel; torch's takes ten times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, padding: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.options = padding, dilation
        return F.conv2d(x, weight, None, 1, padding, dilation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (weight,), (padding, dilation) = ctx.saved_tensors, ctx.options
        parts = zip(weight.shape[2:], padding, dilation, strict=True)
        back = tuple(d * (k - 1) - p for k, p, d in parts)
        return F.conv2d(grads[0], weight.flip(-2, -1), None, 1, back, dilation), None, None, None


def _copies(mode: str, padding: tuple[int, int], size: int | None) -> int:
    """The largest number of copies of one input in its padded line."""
    if mode == "zeros" or max(padding) == 0:
        return 1
    if size is None:
        # A pad is at most as long as its map, so each side copies an input at most once.
        return 1 + sum(padding) if mode == "replicate" else 1 + sum(p > 0 for p in padding)
    line = torch.arange(float(size)).reshape(1, 1, size)
    return int(torch.bincount(F.pad(line, padding, mode=mode).flatten().long()).max())


def _folded(y: Tensor, axis: int, padding: tuple[int, int], mode: str) -> Tensor:
    """The adjoint of padding along one dimension: the pads are added to the entries that they are copies of."""
    before, after = padding
    n = y.shape[axis] - before - after
    core = y.narrow(axis, before, n)
    starts = {"circular": (n - before, 0), "reflect": (1, n - 1 - after), "replicate": (0, n - 1)}[mode]
    for pad, first, start in ((before, 0, starts[0]), (after, before + n, starts[1])):
        if pad == 0:
            continue
        part = y.narrow(axis, first, pad)
        part = part.flip(axis) if mode == "reflect" else part.sum(axis, keepdim=True) if mode == "replicate" else part
        core = core + F.pad(part, [0, 0] * (-1 - axis) + [start, n - start - part.shape[axis]])
    return core


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

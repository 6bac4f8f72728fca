"""The absolute value, intervals, and their relatives: sums over the entries whose options may be tensors."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import checked
from ..errors import OptionError, require_positive
from ..tracing import in_transform, is_traced
from .base import Separable, Step, check_step, indicator, require_broadcast, require_weight, scaled, slack

__all__ = ["L1", "Box", "DeadZone", "ElasticNet", "Support"]


@dataclass(frozen=True)
class L1(Separable):
    r"""The weighted absolute value :math:`g(x) = w|x|`.

    .. math:: \operatorname{prox}_{\eta g}(a) = \operatorname{sign}(a) \max(|a| - \eta w, 0)

    The weight is a number, or a tensor that broadcasts to x: one number per feature, or one per row as ``(rows, 1)``,
    which makes a batch a path over the weight.

    Example:
        >>> L1(1.0).prox(torch.tensor([-3.0, 0.5, 2.0]))
        tensor([-2.,  0.,  1.])
    """

    weight: float | Tensor

    def __post_init__(self) -> None:
        require_weight("weight", self.weight)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise unless the weight broadcasts to ``shape``."""
        require_broadcast("weight", self.weight, shape)

    def values(self, x: Tensor) -> Tensor:
        """The weighted absolute values."""
        return self.weight * x.abs()

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """Soft thresholding."""
        threshold = scaled(step, self.weight, x)
        if not isinstance(self.weight, Tensor) and self.weight == 0:
            return x  # softshrink has no gradient at zero, even with a zero threshold
        if not isinstance(threshold, Tensor):
            return F.softshrink(x, threshold)
        # A single number on the CPU takes a third of the time of the general form, forwards and backwards.
        if _is_number(threshold, x):
            return _SoftThreshold.apply(x, threshold)
        return x - torch.clamp(x, -threshold, threshold)

    def preactivation(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The prox with the threshold of step 1 added back."""
        eta = scaled(step, 1.0, x)
        return torch.where(self.prox(x, step) == 0, x / eta, x + (1 - eta) * self.weight * x.sign())

    def conjugate(self) -> "Box":
        """The indicator of the dual ball."""
        return Box(-self.weight, self.weight)


def _is_number(threshold: Tensor, x: Tensor) -> bool:
    if threshold.numel() != 1 or threshold.dim() > x.dim() or is_traced(x) or is_traced(threshold):
        return False
    if in_transform():
        return False
    return threshold.device.type == x.device.type == "cpu"


class _SoftThreshold(torch.autograd.Function):
    """Soft thresholding by one number, differentiable in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, threshold: Tensor) -> Tensor:
        shrunk = F.softshrink(x, float(threshold.detach()))
        ctx.save_for_backward(shrunk)
        ctx.save_for_forward(shrunk)
        ctx.threshold_shape = threshold.shape
        return shrunk

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, threshold: Tensor | None) -> Tensor:
        sign = ctx.saved_tensors[0].sign()
        change = torch.zeros_like(sign) if x is None else x * sign.abs()
        return change if threshold is None else change - threshold * sign

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (shrunk,) = ctx.saved_tensors
        shrunk = shrunk.detach()
        to_threshold = -(grad * shrunk.sign()).sum().reshape(ctx.threshold_shape) if ctx.needs_input_grad[1] else None
        # The gradient is zero where the result is zero.
        to_x = torch.ops.aten.softshrink_backward(grad, shrunk, 0.0) if ctx.needs_input_grad[0] else None
        return to_x, to_threshold


@checked
@dataclass(frozen=True)
class ElasticNet(Separable):
    r"""The elastic net :math:`g(x) = w|x| + \tfrac{c}{2}x^2`; the weights are as in :class:`L1`.

    .. math:: \operatorname{prox}_{\eta g}(a) = \frac{\operatorname{sign}(a) \max(|a| - \eta w, 0)}{1 + \eta c}

    Example:
        >>> ElasticNet(1.0, 1.0).prox(torch.tensor([-3.0, 0.5, 2.0]))
        tensor([-1.0000,  0.0000,  0.5000])
    """

    weight: float | Tensor
    curvature: float

    def __post_init__(self) -> None:
        require_weight("weight", self.weight)
        require_positive("curvature", self.curvature)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise unless the weight broadcasts to ``shape``."""
        require_broadcast("weight", self.weight, shape)

    def values(self, x: Tensor) -> Tensor:
        """The absolute value and the square."""
        return self.weight * x.abs() + 0.5 * self.curvature * x * x

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """Soft thresholding, shrunk."""
        return L1(self.weight).prox(x, step) / (1 + scaled(step, self.curvature, x))

    def conjugate(self) -> "DeadZone":
        r"""The function :math:`\max(|s| - w, 0)^2/(2c)`."""
        return DeadZone(self.weight, 1 / self.curvature)


@dataclass(frozen=True)
class DeadZone(Separable):
    r"""The function :math:`g(s) = \tfrac{c}{2}\max(|s| - w, 0)^2`, conjugate of :class:`ElasticNet`.

    .. math::

        \operatorname{prox}_{\eta g}(a) = \operatorname{clip}(a, -w, w)
        + \frac{\operatorname{sign}(a)\max(|a| - w, 0)}{1 + \eta c}

    Example:
        >>> DeadZone(1.0, 1.0).prox(torch.tensor([0.5, 3.0]))
        tensor([0.5000, 2.0000])
    """

    weight: float | Tensor
    curvature: float

    def values(self, x: Tensor) -> Tensor:
        """Zero up to the weight, a square beyond."""
        return 0.5 * self.curvature * torch.relu(x.abs() - self.weight).square()

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The excess over the weight is shrunk."""
        # Unlike x less a share of the excess, the sum has no cancellation at long steps.
        excess, weight = L1(self.weight).prox(x), self.weight
        if isinstance(weight, Tensor):
            weight = weight.to(x.dtype)
            inside = torch.clamp(x, -weight, weight)
        else:
            inside = torch.clamp(x, -weight, weight)
        return inside + excess / (1 + scaled(step, self.curvature, x))

    def conjugate(self) -> ElasticNet:
        """The elastic net."""
        return ElasticNet(self.weight, 1 / self.curvature)


@checked
@dataclass(frozen=True)
class Box(Separable):
    r"""The indicator of :math:`[l, u]`. Its prox clips, like hardtanh and ReLU6. Either end may be infinite.
    Ends may be tensors that broadcast to x.

    Example:
        >>> Box(0.0, 6.0).prox(torch.tensor([-1.0, 2.0, 9.0]))
        tensor([0., 2., 6.])
    """

    low: float | Tensor
    high: float | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.low, Tensor) or isinstance(self.high, Tensor):
            low, high = torch.as_tensor(self.low).detach(), torch.as_tensor(self.high).detach()
            if not is_traced(low) and not bool((low <= high).all()):
                raise OptionError("a box needs low ≤ high in every entry of its tensors")
            return
        if isinstance(self.low, str | None) or isinstance(self.high, str | None):
            raise OptionError(f"a box needs two numbers low ≤ high, got {self.low!r} and {self.high!r}")
        if not self.low <= self.high or self.low == math.inf or self.high == -math.inf:
            raise OptionError(f"a box needs low ≤ high, low < inf and high > -inf, got [{self.low}, {self.high}]")

    def values(self, x: Tensor) -> Tensor:
        """Zero in the box, +inf elsewhere."""
        low, high = self.low, self.high
        return indicator((x >= low - _room(x, low)) & (x <= high + _room(x, high)), x)

    def reach(self, x: Tensor, dims: int) -> Tensor:
        """The smallest quotient of an end and an entry on its side."""
        low, high = (torch.as_tensor(end, dtype=x.dtype, device=x.device) for end in (self.low, self.high))
        end = torch.where(x > 0, high, low)
        quotient = torch.where(x == 0, torch.inf, end / torch.where(x == 0, 1.0, x))
        return quotient.flatten(x.dim() - dims).amin(-1)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise unless both ends broadcast to ``shape``."""
        require_broadcast("low", self.low, shape)
        require_broadcast("high", self.high, shape)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """``x`` clipped to the box."""
        check_step(step, x)
        if isinstance(self.low, Tensor) or isinstance(self.high, Tensor):
            ends = (torch.as_tensor(end, dtype=x.dtype, device=x.device) for end in (self.low, self.high))
            low, high = (end.reshape(()) if end.numel() == 1 else end for end in ends)
            return torch.minimum(torch.maximum(x, low), high)
        return F.hardtanh(x, self.low, self.high)

    def conjugate(self) -> "Support":
        """The support function of the box."""
        return Support(self.low, self.high)


def _room(x: Tensor, end: float | Tensor) -> float | Tensor:
    """The tolerance of an end of a box."""
    return slack(x) * end.abs().clamp_min(1.0) if isinstance(end, Tensor) else slack(x, end)


@dataclass(frozen=True)
class Support(Separable):
    r"""The support function :math:`\sigma(s) = \max(ls, us)` of an interval, conjugate of :class:`Box`.

    .. math:: \operatorname{prox}_{\eta\sigma}(a) = \max(a - \eta u, 0) - \max(\eta l - a, 0)

    Example:
        >>> Support(-1.0, 2.0).prox(torch.tensor([-3.0, 1.0, 3.0]))
        tensor([-2.,  0.,  1.])
    """

    low: float | Tensor
    high: float | Tensor

    def __post_init__(self) -> None:
        Box(self.low, self.high)

    def values(self, x: Tensor) -> Tensor:
        """The support function at each entry; +inf in the direction of an infinite end."""
        parts = torch.zeros_like(x)
        for end, side in ((self.high, torch.relu(x)), (self.low, -torch.relu(-x))):
            parts = parts + (end * side if _bounded(end) else indicator(side.abs() <= slack(x), x))
        return parts

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """Soft thresholding with one threshold per side."""
        # The prox is zero on the side of an infinite end. Multiplying infinity by a step would make the gradient NaN.
        above = torch.relu(x - scaled(step, self.high, x)) if _bounded(self.high) else 0.0 * x
        below = torch.relu(scaled(step, self.low, x) - x) if _bounded(self.low) else 0.0 * x
        return above - below

    def conjugate(self) -> Box:
        """The indicator of the interval."""
        return Box(self.low, self.high)


def _bounded(end: float | Tensor) -> bool:
    """Whether an end of an interval is finite; ends in a tensor are."""
    return isinstance(end, Tensor) or math.isfinite(end)

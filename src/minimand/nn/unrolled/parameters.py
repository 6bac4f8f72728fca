"""Parametrisations that keep learned steps, thresholds and schedules in the range of a convergent solver."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...functions.curves import softplus_inverse

__all__ = ["THRESHOLD", "Interval", "MonotoneSlope", "Positive", "Softplus", "assign", "constrain"]

# The initial value and scale of learned thresholds, for images in [0, 1].
THRESHOLD = 0.01

# The scale of the slopes of schedules.
_SLOPE = 0.1

# Softplus and sigmoid may round to zero. Positive values are at least this large.
_FLOOR = 1e-6


class Interval(nn.Module):
    r"""A parametrisation by :math:`l + (u - l)\,\sigma(4v/\max(u - l, 1))`: every value lies in (l, u).

    In the middle of an interval of length one or more its slope is one, so that an optimizer moves the value as fast as
    an unconstrained one. Shorter intervals have a smaller slope.

    >>> layer = nn.Module()
    >>> layer.step = nn.Parameter(torch.tensor([0.5]))
    >>> constrain(layer, "step", Interval(0.0, 2.0))
    >>> layer.step
    tensor([0.5000], grad_fn=<AddBackward0>)
    """

    low: Tensor
    high: Tensor

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        # A sigmoid may round to zero or one. The margin keeps the ends outside.
        margin = _FLOOR * (high - low)
        self.register_buffer("low", torch.tensor(low + margin))
        self.register_buffer("high", torch.tensor(high - margin))

    def forward(self, free: Tensor) -> Tensor:
        """Map any number into the interval."""
        width = (self.high - self.low).to(free)
        return self.low.to(free) + width * torch.sigmoid(free / (width.clamp_min(1) / 4))

    def right_inverse(self, value: Tensor) -> Tensor:
        """The number that maps to ``value``; values outside are moved just inside."""
        width = (self.high - self.low).to(value)
        share = (value - self.low.to(value)) / width
        return width.clamp_min(1) / 4 * torch.logit(share.clamp(1e-4, 1 - 1e-4))


class Positive(nn.Module):
    r"""A parametrisation by the softplus :math:`s\log(1 + e^{v/s})`: every value is at least 1e-6.

    ``scale`` is the typical size s of the values. The slope is 0.63 there and near one above, so that an optimizer
    moves the value almost as fast as an unconstrained one.
    """

    scale: Tensor

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(float(scale)))

    def forward(self, free: Tensor) -> Tensor:
        """Map any number to a positive one."""
        scale = self.scale.to(free)
        return scale * F.softplus(free / scale) + _FLOOR

    def right_inverse(self, value: Tensor) -> Tensor:
        """The number that maps to ``value``; values that are not positive become just positive."""
        scale = self.scale.to(value)
        safe = (value - _FLOOR).clamp_min(_FLOOR) / scale
        return scale * softplus_inverse(safe)


class MonotoneSlope(nn.Module):
    """:class:`Positive` times a sign, for the slopes of schedules that rise (+1) or fall (−1)."""

    def __init__(self, sign: float, scale: float = 1.0) -> None:
        super().__init__()
        self.sign = sign
        self.positive = Positive(scale)

    def forward(self, free: Tensor) -> Tensor:
        """Map any number to one of this sign."""
        return self.sign * self.positive(free)

    def right_inverse(self, value: Tensor) -> Tensor:
        """The number that maps to ``value``."""
        return self.positive.right_inverse(self.sign * value)


class Softplus(nn.Module):
    r"""FISTA-Net's schedule over the phases, :math:`v_k = \log(1 + e^{wk + c})`, k = 0, 1, …

    With ``monotone`` (+1 or −1) the slope w keeps that sign, so the schedule always rises or falls.

    Source: Xiang, Dong, Yang, *FISTA-Net*, IEEE TMI 2021.

    >>> schedule = Softplus(-0.5, 0.0, monotone=-1)
    >>> values = schedule(4)
    >>> bool((values > 0).all() and (values.diff() < 0).all())
    True
    """

    slope: Tensor
    offset: Tensor

    def __init__(self, slope: float, offset: float, *, monotone: float | None = None) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(float(slope)))
        self.offset = nn.Parameter(torch.tensor(float(offset)))
        self.floor = 0.0 if monotone is None else _FLOOR
        if monotone is not None:
            constrain(self, "slope", MonotoneSlope(monotone, _SLOPE))

    def forward(self, phases: int) -> Tensor:
        """The values of all phases."""
        k = torch.arange(phases, dtype=self.offset.dtype, device=self.offset.device)
        return F.softplus(self.slope * k + self.offset) + self.floor


def constrain(module: nn.Module, name: str, parametrization: nn.Module) -> None:
    """Register a parametrisation; the value of the parameter stays if it lies in the range."""
    parametrize.register_parametrization(module, name, parametrization)


def assign(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter, constrained or not, by ``value``, which may have another size."""
    if parametrize.is_parametrized(module, name):
        held: Any = module.get_submodule(f"parametrizations.{name}")
        held.original = nn.Parameter(held[0].right_inverse(value.detach()))
    else:
        setattr(module, name, nn.Parameter(value.detach().clone()))

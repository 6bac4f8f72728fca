"""The function of an activation that learns its slope."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import NotProximal
from ..tracing import is_traced
from .base import Separable, Step, scaled, slack

__all__ = ["LearnedHinge"]


@dataclass(frozen=True, eq=False)
class LearnedHinge(Separable):
    r"""The :class:`LeakyHinge` with the slopes of a :class:`torch.nn.PReLU`, one or one per channel.

    Its prox has the closed form of the leaky hinge at all slopes in [0, 1], and is differentiable in them. ``source``
    is the module, whose present slopes are read and checked at every use, or a tensor of slopes that broadcasts.

    >>> act = nn.PReLU(init=0.5)
    >>> LearnedHinge(act).prox(torch.tensor([-1.0, 2.0])).tolist()
    [-0.5, 2.0]
    """

    source: nn.PReLU | Tensor

    @property
    def separable(self) -> bool:  # type: ignore[override]
        """Whether all entries have the same slope."""
        return (self.source if isinstance(self.source, Tensor) else self.source.weight).numel() == 1

    def current(self, dimensions: int) -> "LearnedHinge":
        """The function with the slopes as a tensor, for points with this number of dimensions."""
        if isinstance(self.source, Tensor):
            return self
        slope: Tensor = self.source.weight
        if not is_traced(slope) and not slope.is_meta:
            low, high = (float(end) for end in torch.aminmax(slope.detach()))
            if not 0 <= low <= high <= 1:
                worst, why = (high, "is steeper than 1 below zero") if low >= 0 else (low, "decreases below zero")
                raise NotProximal(
                    f"PReLU with slope {worst:.6g} {why}, so it is not the prox of a convex function; keep its slopes "
                    f"in [0, 1], for example by act.weight.data.clamp_(0, 1) after each step"
                )
        return LearnedHinge(slope.reshape(-1, *(1,) * max(0, dimensions - 2)))

    def _slope(self, x: Tensor) -> Tensor:
        slope = self.current(x.dim()).source
        assert isinstance(slope, Tensor)
        return slope.to(x.dtype)

    def values(self, x: Tensor) -> Tensor:
        """The squared hinge at each entry; an indicator where the slope is zero."""
        slope, below = self._slope(x), torch.relu(-x)
        outside = torch.where(below > slack(x), torch.inf, 0.0).to(x.dtype)
        weight = (1 - slope) / torch.where(slope > 0, slope, 1.0)
        return torch.where(slope > 0, 0.5 * weight * below.square(), outside)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """A PReLU."""
        slope, eta = self._slope(x), scaled(step, 1.0, x)
        if not isinstance(eta, Tensor) and eta == 1:
            return torch.where(x > 0, x, x * slope)
        return torch.where(x > 0, x, x * (slope / (slope + eta * (1 - slope))))

    def preactivation(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The prox with its negative part divided by the slope."""
        slope = self._slope(x)
        return torch.where(x > 0, x, x / (slope + scaled(step, 1.0, x) * (1 - slope)))

"""Functions that are sums over the entries, with proxes in closed form."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import checked
from ..errors import OptionError, require_positive
from .base import Separable, Step, check_step, indicator, scaled, slack, widened

__all__ = [
    "LeakyHinge",
    "NonNegative",
    "NonPositive",
    "NonPositiveRidge",
    "Origin",
    "SquaredHinge",
    "Zero",
]


@dataclass(frozen=True)
class Zero(Separable):
    r"""The zero function :math:`g(x) = 0`. Its prox is the identity.

    Example:
        >>> Zero().prox(torch.tensor([-1.0, 2.0]))
        tensor([-1.,  2.])
    """

    def values(self, x: Tensor) -> Tensor:
        """Zero everywhere."""
        return torch.zeros_like(x)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """``x`` itself."""
        check_step(step, x)
        return x

    preactivation = prox

    def conjugate(self) -> "Origin":
        """The indicator of the origin."""
        return Origin()


@dataclass(frozen=True)
class Origin(Separable):
    r"""The indicator of the origin, conjugate of :class:`Zero`.

    Example:
        >>> Origin().prox(torch.tensor([1.0, 2.0]))
        tensor([0., 0.])
    """

    def values(self, x: Tensor) -> Tensor:
        """Zero at zero, +inf elsewhere."""
        return indicator(x.abs() <= slack(x), x)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """Zero."""
        check_step(step, x)
        return x * 0.0

    def conjugate(self) -> Zero:
        """The zero function."""
        return Zero()


@dataclass(frozen=True)
class NonNegative(Separable):
    r"""The indicator of :math:`x \ge 0`. Its prox is ReLU at every step ([Bibi2019], Table 1).

    Example:
        >>> NonNegative().prox(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
        >>> NonNegative().value(torch.tensor([-1.0, 2.0]))
        tensor(inf)
    """

    def values(self, x: Tensor) -> Tensor:
        """Zero where x ≥ 0, +inf elsewhere."""
        return indicator(x >= -slack(x), x)

    def sums(self, x: Tensor, dims: int) -> Tensor:
        """Zero where the smallest entry of a sample is not negative, +inf elsewhere."""
        wide = widened(x)
        least = wide.flatten(wide.dim() - dims).amin(-1) if dims else wide
        return indicator(least >= -slack(wide), least)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """``torch.relu(x)``."""
        check_step(step, x)
        return torch.relu(x)

    def conjugate(self) -> "NonPositive":
        """The indicator of the polar cone."""
        return NonPositive()


@dataclass(frozen=True)
class NonPositive(Separable):
    r"""The indicator of :math:`x \le 0`, conjugate of :class:`NonNegative`.

    Example:
        >>> NonPositive().prox(torch.tensor([-1.0, 2.0]))
        tensor([-1.,  0.])
    """

    def values(self, x: Tensor) -> Tensor:
        """Zero where x ≤ 0, +inf elsewhere."""
        return indicator(x <= slack(x), x)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """``min(x, 0)``."""
        check_step(step, x)
        return x.clamp(max=0.0)

    def conjugate(self) -> NonNegative:
        """The indicator of the polar cone."""
        return NonNegative()


@checked
@dataclass(frozen=True)
class SquaredHinge(Separable):
    r"""The squared hinge :math:`g(x) = \frac{\gamma}{2} \max(-x - \lambda, 0)^2` with shift :math:`\lambda`.

    .. math::

        \operatorname{prox}_{\eta g}(a) = \begin{cases}
            a & a \ge -\lambda \\ (a - \eta\gamma\lambda)/(1 + \eta\gamma) & a < -\lambda \end{cases}

    Without a shift this is the leaky ReLU of slope :math:`1/(1+\eta\gamma)` ([Bibi2019], Table 1 and
    Proposition 3, where the sign of :math:`\gamma\lambda` is wrong). :class:`LeakyHinge` is the same
    function, parametrised by that slope.

    Example:
        >>> SquaredHinge(gamma=1.0).prox(torch.tensor([-1.0, 2.0]))
        tensor([-0.5000,  2.0000])
    """

    gamma: float
    shift: float = 0.0

    def __post_init__(self) -> None:
        require_positive("gamma", self.gamma)
        if not math.isfinite(self.shift):
            raise OptionError(f"shift must be a finite number, got {self.shift}")

    def values(self, x: Tensor) -> Tensor:
        """The squared hinge at each entry."""
        return 0.5 * self.gamma * torch.relu(-x - self.shift).square()

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """A leaky ReLU about ``-shift``."""
        weight = scaled(step, self.gamma, x)
        if isinstance(weight, float) and self.shift == 0:
            return F.leaky_relu(x, 1.0 / (1.0 + weight))
        return torch.where(x > -self.shift, x, (x - weight * self.shift) / (1.0 + weight))

    def conjugate(self) -> "NonPositiveRidge":
        r"""The function :math:`s^2/(2\gamma) - \lambda s` on :math:`s \le 0`."""
        return NonPositiveRidge(1.0 / self.gamma, -self.shift)


@checked
@dataclass(frozen=True)
class LeakyHinge(Separable):
    r"""The squared hinge :math:`g(x) = \frac{1-\alpha}{2\alpha} \max(-x, 0)^2`, parametrised by its leaky slope.

    .. math::

        \operatorname{prox}_{\eta g}(a) = \max(a, 0) + \frac{\alpha}{\alpha + \eta(1-\alpha)} \min(a, 0)

    ([Bibi2019], Proposition 3; [Lin2019], Table 1). It equals :class:`SquaredHinge` with
    :math:`\gamma = (1-\alpha)/\alpha`, but stores the slope exactly: at step 1 the prox is
    ``F.leaky_relu(x, slope)`` to the bit.

    Example:
        >>> LeakyHinge(0.1).prox(torch.tensor([-1.0, 2.0]))
        tensor([-0.1000,  2.0000])
    """

    slope: float

    def __post_init__(self) -> None:
        if not 0 < self.slope < 1:
            raise OptionError(
                f"slope must lie strictly between 0 and 1, got {self.slope}; "
                "NonNegative() has slope 0 and Zero() slope 1"
            )

    @property
    def gamma(self) -> float:
        """The weight of the equal :class:`SquaredHinge`."""
        return (1.0 - self.slope) / self.slope

    def values(self, x: Tensor) -> Tensor:
        """The squared hinge at each entry."""
        return 0.5 * self.gamma * torch.relu(-x).square()

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """A leaky ReLU."""
        rest = scaled(step, 1.0 - self.slope, x)
        if isinstance(rest, Tensor):
            return torch.where(x > 0, x, x * (self.slope / (self.slope + rest)))
        # slope + (1 − slope) rounds to 1 for every slope, so step 1 gives the slope exactly.
        return F.leaky_relu(x, self.slope / (self.slope + rest))

    def preactivation(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The prox with its negative part divided by the slope."""
        rest = self.slope + scaled(step, 1.0 - self.slope, x)
        return torch.where(x > 0, x, x / rest)

    def conjugate(self) -> "NonPositiveRidge":
        r"""The function :math:`s^2/(2\gamma)` on :math:`s \le 0`."""
        return NonPositiveRidge(self.slope / (1.0 - self.slope), 0.0)


@dataclass(frozen=True)
class NonPositiveRidge(Separable):
    r"""The quadratic :math:`\frac{c}{2} s^2 + \ell s` on :math:`s \le 0`, conjugate of :class:`SquaredHinge`.

    .. math:: \operatorname{prox}_{\eta g}(a) = \min\Bigl(0, \frac{a - \eta\ell}{1 + \eta c}\Bigr)

    Example:
        >>> NonPositiveRidge(1.0, 0.0).prox(torch.tensor([-1.0, 2.0]))
        tensor([-0.5000,  0.0000])
    """

    curvature: float
    linear: float = 0.0

    def __post_init__(self) -> None:
        require_positive("curvature", self.curvature)
        if not math.isfinite(self.linear):
            raise OptionError(f"linear must be a finite number, got {self.linear}")

    def values(self, x: Tensor) -> Tensor:
        """The quadratic where x ≤ 0, +inf elsewhere."""
        return (0.5 * self.curvature * x + self.linear) * x + indicator(x <= slack(x), x)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The shrunk and shifted point, clipped at zero."""
        tilt, ridge = scaled(step, self.linear, x), scaled(step, self.curvature, x)
        return ((x - tilt) / (1.0 + ridge)).clamp(max=0.0)

    def conjugate(self) -> SquaredHinge:
        """The squared hinge."""
        return SquaredHinge(1.0 / self.curvature, -self.linear)

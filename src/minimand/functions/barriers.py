"""Logarithmic barriers, which [Bibi2019] uses to approximate softplus, tanh and sigmoid."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import require_positive
from .base import Separable, Step, scaled, widened
from .scalar import Increasing, precise, root

__all__ = ["LogBarrier", "LogBarrierConjugate", "LogBox", "LogBoxConjugate", "LogUnit"]


@dataclass(frozen=True)
class _Barrier(Separable):
    """A function with one positive weight."""

    gamma: float

    def __post_init__(self) -> None:
        require_positive("gamma", self.gamma)


@dataclass(frozen=True)
class LogBarrier(_Barrier):
    r"""The logarithmic barrier :math:`g(x) = -\gamma \log x` of :math:`x > 0`.

    .. math::

        \operatorname{prox}_{\eta g}(a) = \tfrac{a}{2} + \sqrt{\tfrac{a^2}{4} + \eta\gamma}

    ([Bibi2019], Proposition 4, eq. 10). It approximates softplus. The best weight is :math:`\gamma = 0.381`,
    with an error of at most 0.076. The exact softplus is ``from_activation("softplus")``.

    Example:
        >>> LogBarrier(2.0).prox(torch.tensor([-1.0, 1.0]))
        tensor([1., 2.])
    """

    def values(self, x: Tensor) -> Tensor:
        """The barrier at each entry, +inf where x ≤ 0."""
        inside = x > 0
        return torch.where(inside, -self.gamma * torch.log(torch.where(inside, x, 1.0)), math.inf)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The positive root of a quadratic."""
        wide = widened(x)
        # Rounding to the precision of x must not reach the boundary.
        return _positive_root(wide, scaled(step, self.gamma, wide)).to(x.dtype).clamp_min(torch.finfo(x.dtype).tiny)

    def conjugate(self) -> "LogBarrierConjugate":
        """The reflected barrier."""
        return LogBarrierConjugate(self.gamma)


@dataclass(frozen=True)
class LogBarrierConjugate(_Barrier):
    r"""The reflected barrier :math:`-\gamma\log(-s) + \gamma\log\gamma - \gamma`, conjugate of the barrier.

    .. math:: \operatorname{prox}_{\eta g}(a) = \tfrac{a}{2} - \sqrt{\tfrac{a^2}{4} + \eta\gamma}

    Example:
        >>> LogBarrierConjugate(2.0).prox(torch.tensor([-1.0, 1.0]))
        tensor([-2., -1.])
    """

    def values(self, x: Tensor) -> Tensor:
        """The reflected barrier at each entry, +inf where x ≥ 0."""
        return LogBarrier(self.gamma).values(-x) + self.gamma * (math.log(self.gamma) - 1.0)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The negative root of a quadratic."""
        wide = widened(x)
        return -_positive_root(-wide, scaled(step, self.gamma, wide)).to(x.dtype).clamp_min(torch.finfo(x.dtype).tiny)

    def conjugate(self) -> LogBarrier:
        """The barrier."""
        return LogBarrier(self.gamma)


def _positive_root(a: Tensor, c: Step) -> Tensor:
    """The positive root of x² − ax − c, without cancellation or overflow for either sign of ``a``."""
    sign = torch.where(a < 0, -1.0, 1.0).to(a.dtype)
    root = torch.sqrt(c) if isinstance(c, Tensor) else a.new_full((), math.sqrt(c))
    larger = torch.hypot(0.5 * a, root) + 0.5 * sign * a
    return torch.where(a < 0, c / larger, larger).clamp_min(torch.finfo(a.dtype).tiny)


@dataclass(frozen=True)
class LogBox(_Barrier):
    r"""The barrier :math:`g(x) = -\gamma \log(1 - x^2)` of :math:`(-1, 1)`.

    The prox is the root in :math:`(-1, 1)` of the cubic

    .. math:: x^3 - a x^2 - (1 + 2\eta\gamma) x + a = 0

    ([Bibi2019], Proposition 5, eq. 12 for :math:`\gamma = 1`). It approximates tanh. The best weight is
    :math:`\gamma = 0.054`, with an error of at most 0.024. The exact tanh is ``from_activation("tanh")``.

    The trigonometric formula for the root loses all digits for large inputs. With :math:`x = t/(1+|t|)` the condition
    :math:`x + 2\eta\gamma x/(1-x^2) = a` becomes

    .. math:: \frac{t}{1+|t|} + 2\eta\gamma\, \frac{t(1+|t|)}{1+2|t|} = a ,

    whose slope lies between :math:`\eta\gamma` and :math:`1 + 2\eta\gamma`. Newton's method solves it in a few
    steps for every ``a``.

    Example:
        >>> x = LogBox(0.75).prox(torch.tensor([-1e6, 0.0, 1.5]))  # 1.5 = x + 2γx/(1 − x²) at x = ½
        >>> torch.allclose(x, torch.tensor([-1.0, 0.0, 0.5]))
        True
        >>> bool((x.abs() < 1).all())
        True
    """

    def values(self, x: Tensor) -> Tensor:
        """The barrier at each entry, +inf outside the open interval (−1, 1)."""
        inside = x.abs() < 1
        safe = torch.where(inside, x, 0.0)
        return torch.where(inside, -self.gamma * (torch.log1p(safe) + torch.log1p(-safe)), math.inf)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The root of the cubic that lies in the interval."""
        wide = widened(x)
        t = root(_BoxEquation(), wide, scaled(step, self.gamma, wide))
        # The largest number below 1: the exact root is strictly inside, but the rounded one may not be.
        limit = 1 - torch.finfo(x.dtype).eps / 2
        return (t / (1 + t.abs())).clamp(-limit, limit).to(x.dtype)

    def conjugate(self) -> "LogBoxConjugate":
        """A smooth absolute value."""
        return LogBoxConjugate(self.gamma)


@dataclass(frozen=True)
class _BoxEquation(Increasing):
    """The condition of :class:`LogBox` in ``t``; the step is ``ηγ``."""

    # The bracket is tight: five iterations suffice in all tests.
    iterations: ClassVar[int] = 10

    def left(self, z: Tensor, step: Step) -> Tensor:
        size = z.abs()
        return z / (1 + size) + 2 * step * z * ((1 + size) / (1 + 2 * size))

    def slope(self, z: Tensor, step: Step) -> Tensor:
        size = z.abs()
        return (1 + size).square().reciprocal() + step * (1 + (1 + 2 * size).square().reciprocal())

    def sensitivity(self, z: Tensor, step: Step) -> Tensor:
        size = z.abs()
        return 2 * z * ((1 + size) / (1 + 2 * size))

    def slopes(self, step: Step) -> tuple[Step, Step]:
        return step, 1 + 2 * step

    def bracket(self, target: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        # (1+|t|)/(1+2|t|) lies in [½, 1], and with either constant in its place the equation is quadratic.
        size = target.abs()
        near, far = self._quadratic(size, 2 * step), self._quadratic(size, step)
        sign = torch.where(target < 0, -1.0, 1.0).to(target.dtype)
        ends = sign * near * (1 - 1e-5), sign * far * (1 + 1e-5)
        return torch.minimum(*ends), ends[0], torch.maximum(*ends)

    @staticmethod
    def _quadratic(size: Tensor, weight: Step) -> Tensor:
        """The t ≥ 0 with t/(1+t) + weight·t = size."""
        half = 0.5 * (1 + weight - size)
        weight = weight if isinstance(weight, Tensor) else size.new_full((), weight)
        larger = torch.hypot(half, torch.sqrt(weight * size)) + half.abs()
        return torch.where(half > 0, size / larger, larger / weight)


@dataclass(frozen=True)
class LogBoxConjugate(_Barrier):
    r"""The smooth absolute value :math:`r - \gamma + \gamma\log\frac{2\gamma}{\gamma + r}`,
    :math:`r = \sqrt{\gamma^2 + s^2}`, conjugate of :class:`LogBox`.

    Its prox solves :math:`s + \eta s/(\gamma + r) = a` by the same safeguarded Newton.

    Example:
        >>> LogBoxConjugate(1.0).value(torch.tensor(0.0))
        tensor(0.)
    """

    def values(self, x: Tensor) -> Tensor:
        """The smooth absolute value at each entry."""
        excess = self._excess(x)
        return excess - self.gamma * torch.log1p(excess / (2 * self.gamma))

    def _excess(self, x: Tensor) -> Tensor:
        return x * (x / (torch.hypot(x, x.new_full((), self.gamma)) + self.gamma))

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The root of the optimality condition."""
        wide = precise(x, step)
        return root(_ConjugateEquation(self.gamma), wide, scaled(step, 1.0, wide)).to(x.dtype)

    def conjugate(self) -> LogBox:
        """The barrier."""
        return LogBox(self.gamma)


@dataclass(frozen=True)
class _ConjugateEquation(Increasing):
    gamma: float

    def left(self, z: Tensor, step: Step) -> Tensor:
        return z + step * self.sensitivity(z, step)

    def slope(self, z: Tensor, step: Step) -> Tensor:
        radius = torch.hypot(z, z.new_full((), self.gamma))
        return 1 + step * self.gamma / (radius * (radius + self.gamma))

    def sensitivity(self, z: Tensor, step: Step) -> Tensor:
        return z / (torch.hypot(z, z.new_full((), self.gamma)) + self.gamma)

    def slopes(self, step: Step) -> tuple[Step, Step]:
        return 1.0, 1 + step / (2 * self.gamma)

    def bracket(self, target: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        # The function is concave on the positive side, so Newton converges from the end nearer to the origin.
        near = target / (1 + step / (2 * self.gamma))
        return torch.minimum(near, target), near, torch.maximum(near, target)


@dataclass(frozen=True)
class LogUnit(_Barrier):
    r"""The barrier :math:`g(x) = -\gamma \log x - \gamma \log(1 - x)` of :math:`(0, 1)`.

    .. math::

        \operatorname{prox}_{\eta g}(a) = \tfrac12\bigl(1 + \operatorname{prox}_{4\eta h}(2a - 1)\bigr),
        \qquad h = -\gamma\log(1 - x^2)

    ([Bibi2019], appendix C). It approximates the sigmoid of :math:`a - \tfrac12`. With
    :math:`\gamma = 3/8` it has the sigmoid's slope ¼ at the centre and an error of at most 0.077. The best weight is
    :math:`\gamma = 0.236`, with an error of at most 0.044. The exact sigmoid is ``from_activation("sigmoid")``.

    Example:
        >>> LogUnit(0.375).prox(torch.tensor([0.5]))
        tensor([0.5000])
    """

    def values(self, x: Tensor) -> Tensor:
        """The barrier at each entry, +inf outside (0, 1)."""
        inside = (x > 0) & (x < 1)
        safe = torch.where(inside, x, 0.5)
        return torch.where(inside, -self.gamma * (torch.log(safe) + torch.log1p(-safe)), math.inf)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The prox of :class:`LogBox`, with (0, 1) mapped to (−1, 1)."""
        wide = precise(x, step)
        t = root(_BoxEquation(), 2 * wide - 1, scaled(step, 4 * self.gamma, wide))
        # ½(1 + t/(1+|t|)) without the cancellation near zero.
        size = t.abs()
        upper, lower = (0.5 + size) / (1 + size), 0.5 / (1 + size)
        info = torch.finfo(x.dtype)
        return torch.where(t < 0, lower, upper).clamp(info.tiny, 1 - info.eps / 2).to(x.dtype)

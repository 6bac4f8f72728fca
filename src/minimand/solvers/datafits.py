r"""Datafits: the smooth loss :math:`\sum_i f((A^\top x)_i; y_i)` of a problem.

A datafit is convex and differentiable in the first argument, with a derivative that is :math:`\kappa`-Lipschitz.
"""

import abc
import dataclasses
import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import check_methods
from ..errors import CapabilityError, OptionError, require_positive
from ..functions.base import Step
from ..functions.scalar import Increasing, newton
from ..tracing import constant, is_traced

__all__ = ["Datafit", "Huber", "Logistic", "Poisson", "Quadratic", "SquaredHingeLoss"]


@dataclasses.dataclass(frozen=True)
class Datafit(abc.ABC):
    r"""A loss :math:`f(t; y)` per entry, convex and differentiable in the prediction :math:`t = A^\top x`.

    A datafit of your own is a frozen dataclass that derives from this class and writes :meth:`values`,
    :meth:`gradient` and :meth:`curvature`. :meth:`conjugate` gives duality gaps; :meth:`second` and :meth:`prox` have
    defaults. Tensors in its fields are differentiated. :func:`~minimand.solvers.check_datafit` tests it.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Scaled(Datafit):
    ...     def values(self, t, y):
    ...         return (t - y) ** 2
    ...     def gradient(self, t, y):
    ...         return 2 * (t - y)
    ...     def curvature(self, y):
    ...         return 2.0
    >>> t, y = torch.tensor([3.0]), torch.tensor([1.0])
    >>> Scaled().second(t, y), Scaled().prox(t, 0.5, y)
    (tensor([2.]), tensor([2.]))
    """

    def __init_subclass__(cls) -> None:
        check_methods(cls, "__init__", "values", "gradient", "curvature", "conjugate", "prox")

    @abc.abstractmethod
    def values(self, t: Tensor, y: Tensor) -> Tensor:
        """f of each entry."""

    @abc.abstractmethod
    def gradient(self, t: Tensor, y: Tensor) -> Tensor:
        """f′ of each entry, the derivative in t."""

    @abc.abstractmethod
    def curvature(self, y: Tensor) -> float | Tensor:
        r"""One number :math:`\kappa`, never below the largest second derivative; infinite where there is no bound."""

    def second(self, t: Tensor, y: Tensor) -> Tensor:
        """f″ of each entry; differentiable."""
        t = t.contiguous()
        return cast(Tensor, torch.func.jvp(lambda t: self.gradient(t, y), (t,), (torch.ones_like(t),))[1])

    def conjugate(self, u: Tensor, y: Tensor) -> Tensor:
        r""":math:`f^*(u; y) = \sup_t ut - f(t; y)` of each entry; +inf outside its domain."""
        raise CapabilityError(f"{self!r} has no conjugate; write conjugate(u, y) for duality gaps")

    def prox(self, v: Tensor, step: Step, y: Tensor) -> Tensor:
        r"""The minimiser of :math:`\eta f(t; y) + \tfrac12(t - v)^2` for each entry, by Newton's method; differentiable
        in everything."""
        with constant():
            t = newton(_Stationarity(self, y), v.detach(), step)
        # Two Newton steps at the solution leave it as it is, and have its derivatives up to the third.
        for _ in range(2):
            t = t - (t + step * self.gradient(t, y) - v) / (1 + step * self.second(t, y))
        return t

    def residual(self, t: Tensor | None, y: Tensor) -> Tensor:
        """−f′(t; y), which is ``y − t`` for squares; None is the origin."""
        return -self.gradient(torch.zeros_like(y) if t is None else t, y)

    def _constant_curvature(self, y: Tensor) -> float | Tensor:
        """:meth:`curvature` for a step or penalty, which is a constant of every derivative."""
        with constant():
            return self.curvature(y)

    def _has_bound(self, y: Tensor) -> bool:
        """Whether :meth:`curvature` is finite, as far as Python can know."""
        kappa = self.curvature(y)
        return isinstance(kappa, Tensor) or kappa < math.inf

    def check(self, y: Tensor) -> None:  # noqa: B027 -- most datafits take every y
        """Raise for data that the loss is not defined for."""


@dataclasses.dataclass(frozen=True)
class _Stationarity(Increasing):
    r"""The equation :math:`t + \eta f'(t; y) = v`."""

    datafit: Datafit
    y: Tensor

    def left(self, z: Tensor, step: Step) -> Tensor:
        return z + step * self.datafit.gradient(z, self.y)

    def slope(self, z: Tensor, step: Step) -> Tensor:
        return 1 + step * self.datafit.second(z, self.y)

    def sensitivity(self, z: Tensor, step: Step) -> Tensor:
        return self.datafit.gradient(z, self.y)

    def slopes(self, step: Step) -> tuple[Step, Step]:
        return 1.0, 1 + step * self.datafit.curvature(self.y)

    def bracket(self, target: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        # f′ increases, so the root lies between v and v − ηf′(v).
        far = target - step * self.datafit.gradient(target, self.y)
        return torch.minimum(far, target), target, torch.maximum(far, target)


@dataclasses.dataclass(frozen=True)
class Quadratic(Datafit):
    r"""The square :math:`f(t; y) = \tfrac12(t - y)^2`, the datafit of a layer ([Bibi2019], eq. 5).

    >>> Quadratic().values(torch.tensor(3.0), torch.tensor(1.0))
    tensor(2.)
    """

    def values(self, t: Tensor, y: Tensor) -> Tensor:
        """Half the squared difference."""
        return 0.5 * (t - y).square()

    def gradient(self, t: Tensor, y: Tensor) -> Tensor:
        """``t − y``."""
        return t - y

    def curvature(self, y: Tensor) -> float:
        """One."""
        return 1.0

    def second(self, t: Tensor, y: Tensor) -> Tensor:
        """One."""
        return torch.ones_like(t)

    def conjugate(self, u: Tensor, y: Tensor) -> Tensor:
        """½u² + uy."""
        return u * (0.5 * u + y)

    def prox(self, v: Tensor, step: Step, y: Tensor) -> Tensor:
        """The weighted mean of v and y."""
        return (v + step * y) / (1 + step)

    def residual(self, t: Tensor | None, y: Tensor) -> Tensor:
        """``y − t``."""
        return y if t is None else y - t


@dataclasses.dataclass(frozen=True)
class Logistic(Datafit):
    r"""The logistic loss :math:`f(t; y) = \log(1 + e^{-yt})` of labels :math:`y = \pm 1`; :math:`\kappa = \tfrac14`.

    With :math:`p = -uy` the conjugate is :math:`p\log p + (1-p)\log(1-p)` on :math:`0 \le p \le 1`.

    >>> Logistic().residual(None, torch.tensor([1.0, -1.0]))
    tensor([ 0.5000, -0.5000])
    """

    def values(self, t: Tensor, y: Tensor) -> Tensor:
        """log(1 + exp(−yt))."""
        return F.softplus(-y * t)

    def gradient(self, t: Tensor, y: Tensor) -> Tensor:
        """−y σ(−yt)."""
        return -y * torch.sigmoid(-y * t)

    def curvature(self, y: Tensor) -> float:
        """A quarter."""
        return 0.25

    def second(self, t: Tensor, y: Tensor) -> Tensor:
        """σ(t) σ(−t)."""
        return y * y * torch.sigmoid(t) * torch.sigmoid(-t)

    def conjugate(self, u: Tensor, y: Tensor) -> Tensor:
        """The negative entropy of p = −uy."""
        p = -u * y
        inside = (p - 0.5).abs() <= 0.5 + 4 * torch.finfo(p.dtype).eps
        p = p.clamp(0, 1)
        return torch.where(inside, torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p), math.inf)

    def check(self, y: Tensor) -> None:
        """Raise unless every label is 1 or −1."""
        _require(y, y.abs() == 1, "Logistic takes labels 1 and -1 as y", "code the classes 0 and 1 as 2 * y - 1")


@dataclasses.dataclass(frozen=True)
class Huber(Datafit):
    r"""The Huber loss: :math:`\tfrac12 r^2` of residuals :math:`r = t - y` up to :math:`\delta`, and
    :math:`\delta|r| - \tfrac12\delta^2` of larger ones; :math:`\kappa = 1`.

    Args:
        delta: :math:`\delta > 0`; a tensor of one number is differentiated.

    >>> Huber(1.0).values(torch.tensor([0.5, 3.0]), torch.zeros(2))
    tensor([0.1250, 2.5000])
    """

    delta: float | Tensor = 1.0

    def __post_init__(self) -> None:
        require_positive("delta", self.delta)  # type: ignore[arg-type]

    def values(self, t: Tensor, y: Tensor) -> Tensor:
        """A square near zero, a line beyond."""
        r = t - y
        inner = self._clipped(r)
        return inner * (r - 0.5 * inner)

    def gradient(self, t: Tensor, y: Tensor) -> Tensor:
        """The residual, clipped."""
        return self._clipped(t - y)

    def curvature(self, y: Tensor) -> float:
        """One."""
        return 1.0

    def second(self, t: Tensor, y: Tensor) -> Tensor:
        """One near zero, none beyond."""
        return ((t - y).abs() <= self.delta).to(t.dtype)

    def conjugate(self, u: Tensor, y: Tensor) -> Tensor:
        """½u² + uy on |u| ≤ δ."""
        inside = u.abs() <= self.delta * (1 + 4 * torch.finfo(u.dtype).eps)
        return torch.where(inside, u * (0.5 * u + y), math.inf)

    def prox(self, v: Tensor, step: Step, y: Tensor) -> Tensor:
        """A weighted mean near y, a step of length ηδ beyond."""
        return v - step * self._clipped((v - y) / (1 + step))

    def _clipped(self, r: Tensor) -> Tensor:
        if isinstance(self.delta, Tensor):
            return torch.minimum(torch.maximum(r, -self.delta.to(r.dtype)), self.delta.to(r.dtype))
        return r.clamp(-self.delta, self.delta)


@dataclasses.dataclass(frozen=True)
class Poisson(Datafit):
    r"""The Poisson loss :math:`f(t; y) = t + \beta - y\log(t + \beta)` of counts :math:`y \ge 0` on :math:`t \ge 0`,
    with a background :math:`\beta > 0`.

    Below zero it continues as its Taylor polynomial of degree two at zero, so that it is convex and smooth everywhere;
    :math:`\kappa = \max y/\beta^2`. Where :math:`A^\top x \ge 0`, as for non-negative A and x, this is never used.

    Without a background :math:`f(t; y) = t - y\log t`, with :math:`0\log 0 = 0`, is infinite for t < 0, and at t = 0
    unless y = 0. Its curvature :math:`y/t^2` has no bound: ``Spectral`` and ``ADMM`` solve such problems, methods with
    steps from the bound do not. A run starts at a multiple of :math:`A\mathbf 1`, unless x0 is given.

    Args:
        background: :math:`\beta`; a tensor of one number > 0 is differentiated.

    >>> Poisson(1.0).residual(None, torch.tensor([3.0, 0.0]))
    tensor([ 2., -1.])
    >>> Poisson(0.0).values(torch.tensor([1.0, 0.0, 0.0, -1.0]), torch.tensor([2.0, 0.0, 1.0, 0.0]))
    tensor([1., 0., inf, inf])
    """

    background: float | Tensor = 1.0

    def __post_init__(self) -> None:
        require_positive("background", self.background, zero=not isinstance(self.background, Tensor))  # type: ignore[arg-type]

    @property
    def _bare(self) -> bool:
        return not isinstance(self.background, Tensor) and self.background == 0

    def _shifted(self, t: Tensor, y: Tensor) -> Tensor:
        """t + β where t ≥ 0, β below; one in the place of a zero that belongs to no count."""
        return torch.where((t > 0) | (y > 0), t.clamp_min(0), 1.0) if self._bare else t.clamp_min(0) + self.background

    def values(self, t: Tensor, y: Tensor) -> Tensor:
        """The negative log-likelihood up to a constant; its Taylor polynomial below zero."""
        if self._bare:
            return torch.where(_below(t), math.inf, t - torch.xlogy(y, self._shifted(t, y)))
        s, below, b = self._shifted(t, y), t.clamp_max(0), self.background
        return s - torch.xlogy(y, s) + below * ((1 - y / b) + 0.5 * below * y / (b * b))

    def gradient(self, t: Tensor, y: Tensor) -> Tensor:
        """1 − y/(t + β)."""
        if self._bare:
            return torch.where(_below(t), -math.inf, 1 - y / self._shifted(t, y))
        return 1 - y / self._shifted(t, y) + t.clamp_max(0) * y / (self.background * self.background)

    def curvature(self, y: Tensor) -> float | Tensor:
        """The largest count over β²."""
        if self._bare:
            return math.inf
        largest = y.detach().amax() if y.numel() else y.new_zeros(())
        return largest / (self.background * self.background)

    def second(self, t: Tensor, y: Tensor) -> Tensor:
        """y/(t + β)²."""
        return y / self._shifted(t, y).square()

    def conjugate(self, u: Tensor, y: Tensor) -> Tensor:
        """y log(y/(1 − u)) − y + β(1 − u) − β where t ≥ 0, that is u ≥ 1 − y/β; of the polynomial below."""
        b = self.background
        rest = 1 - u
        above = torch.xlogy(y, y / rest.clamp_min(torch.finfo(u.dtype).tiny)) - y - b * u
        outside = (rest < 0) | ((rest <= 0) & (y > 0))
        above = torch.where(outside, math.inf, above)
        if self._bare:
            return above
        move = u - (1 - y / b)
        none = y == 0
        taylor = move.square() * b * b / (2 * torch.where(none, 1.0, y)) - (
            b - torch.xlogy(y, torch.as_tensor(b).to(y))
        )
        below = torch.where(none, math.inf, taylor)
        return torch.where(move >= -4 * torch.finfo(u.dtype).eps, above, below)

    def prox(self, v: Tensor, step: Step, y: Tensor) -> Tensor:
        """The positive root of a quadratic equation; of a linear one below zero."""
        b = self.background
        c = v + b - step
        if self._bare:
            # The same root where c > 0; the other form loses no digits where c < 0.
            square = c * c + 4 * step * y
            root = torch.where(square > 0, square, 1.0).sqrt()
            return torch.where(c > 0, 0.5 * (c + root), 2 * step * y / (root - c.clamp_max(0)))
        s = 0.5 * (c + (c * c + 4 * step * y).sqrt())
        line = (v - step * (1 - y / b)) / (1 + step * y / (b * b))
        return torch.where(line < 0, line, s - b)

    def check(self, y: Tensor) -> None:
        """Raise for negative counts, for which the problem is unbounded or not convex."""
        _require(
            y, y >= 0, "Poisson takes counts y ≥ 0", "the problem has no minimum otherwise; use Quadratic() or Huber()"
        )


def _below(t: Tensor) -> Tensor:
    """Where predictions are negative by more than the rounding error of the largest."""
    return t < -32 * torch.finfo(t.dtype).eps * t.abs().amax() if t.numel() else t < 0


@dataclasses.dataclass(frozen=True)
class SquaredHingeLoss(Datafit):
    r"""The squared hinge :math:`f(t; y) = \tfrac12\max(0, 1 - yt)^2` of labels :math:`y = \pm 1`; :math:`\kappa = 1`.

    With :math:`p = -uy` the conjugate is :math:`\tfrac12p^2 - p` on :math:`p \ge 0`. It is the loss of a linear support
    vector machine.

    >>> SquaredHingeLoss().values(torch.tensor([0.0, 2.0]), torch.ones(2))
    tensor([0.5000, 0.0000])
    """

    def values(self, t: Tensor, y: Tensor) -> Tensor:
        """Half the squared margin violation."""
        return 0.5 * torch.relu(1 - y * t).square()

    def gradient(self, t: Tensor, y: Tensor) -> Tensor:
        """−y max(0, 1 − yt)."""
        return -y * torch.relu(1 - y * t)

    def curvature(self, y: Tensor) -> float:
        """One."""
        return 1.0

    def second(self, t: Tensor, y: Tensor) -> Tensor:
        """One where the margin is violated."""
        return y * y * (y * t < 1).to(t.dtype)

    def conjugate(self, u: Tensor, y: Tensor) -> Tensor:
        """½p² − p for p = −uy ≥ 0."""
        p = -u * y
        return torch.where(p >= -4 * torch.finfo(p.dtype).eps, p * (0.5 * p - 1), math.inf)

    def prox(self, v: Tensor, step: Step, y: Tensor) -> Tensor:
        """A step towards the margin."""
        return v + step / (1 + step) * y * torch.relu(1 - y * v)

    def check(self, y: Tensor) -> None:
        """Raise unless every label is 1 or −1."""
        _require(y, y.abs() == 1, "SquaredHingeLoss takes labels 1 and -1 as y", "code classes 0 and 1 as 2 * y - 1")


def _require(y: Tensor, condition: Tensor, what: str, remedy: str) -> None:
    if is_traced(y) or bool(condition.all()):
        return
    bad = y.detach()[~condition]
    raise OptionError(f"{what}, got {float(bad.flatten()[0]):g} and {bad.numel() - 1} more; {remedy}")

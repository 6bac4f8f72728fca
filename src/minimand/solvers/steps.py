"""Step sizes, schedules and momentum coefficients of the solvers."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Literal

from torch import Tensor

from ..errors import OptionError, require_positive
from .problem import Problem, as_number, reciprocal

__all__ = [
    "Exponential",
    "Harmonic",
    "Scaled",
    "Schedule",
    "StepSize",
    "check_step_size",
    "gradient_step",
    "inertial_limit",
    "nesterov_momentum",
    "polyak_momentum",
    "resolve_decay",
    "resolve_step",
]


@dataclasses.dataclass(frozen=True, eq=False)
class Scaled:
    """A share of another step size, which is at most ``longest`` where it is automatic. A tensor is learned."""

    step: "StepSize"
    share: float | Tensor
    longest: float = math.inf


#: ``"auto"``; ``"1/L"``, the rule of [Bibi2019]; or a number that the caller is responsible for.
StepSize = float | Literal["auto", "1/L"] | Scaled


def check_step_size(step: StepSize) -> None:
    """Raise :class:`~minimand.errors.OptionError` unless ``step`` is ``"auto"``, ``"1/L"`` or a positive number."""
    if isinstance(step, int | float):
        require_positive("step", step)
    elif not isinstance(step, Scaled) and step not in ("auto", "1/L"):
        raise OptionError(f'step is "auto", "1/L" or a number > 0, got {step!r}')


def resolve_step(step: StepSize, problem: Problem, automatic: Callable[[], Tensor]) -> float | Tensor:
    r"""The given number, :math:`1/(L + \lambda)` for ``"1/L"``, or one over the smoothness that a solver computes."""
    if isinstance(step, Scaled):
        full = resolve_step(step.step, problem, automatic)
        if step.longest < math.inf and not isinstance(step.step, int | float):
            full = full.clamp_max(step.longest) if isinstance(full, Tensor) else min(full, step.longest)
        return step.share * full
    if not isinstance(step, str):
        return step
    return as_number(reciprocal(automatic() if step == "auto" else problem.smoothness()))


def gradient_step(step: StepSize, problem: Problem) -> float | Tensor:
    r""":math:`1/(L + \lambda)` for ``"auto"``, with which the objective never increases; otherwise the given number."""
    return resolve_step(step, problem, problem.smoothness)


@dataclasses.dataclass(frozen=True)
class Schedule(abc.ABC):
    """A factor for the step of each iteration; that of the first is 1."""

    @abc.abstractmethod
    def factor(self, k: int) -> float:
        """The factor of iteration k = 0, 1, …"""


@dataclasses.dataclass(frozen=True)
class Exponential(Schedule):
    """``rate ** k``; rate 1 keeps the step constant ([Bibi2019], §4).

    >>> Exponential(0.5).factor(0), Exponential(0.5).factor(2)
    (1.0, 0.25)
    """

    rate: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.rate, float | int) or not 0 < self.rate <= 1:
            raise OptionError(f"a decay rate must lie in (0, 1], got {self.rate!r}")

    def factor(self, k: int) -> float:
        """The k-th power of the rate."""
        return float(self.rate**k)


@dataclasses.dataclass(frozen=True)
class Harmonic(Schedule):
    """``1 / (1 + k / horizon)``: the sum diverges, the sum of squares converges, and so do the iterates (Bottou, 2012).

    >>> Harmonic(10).factor(0), Harmonic(10).factor(10)
    (1.0, 0.5)
    """

    horizon: float = 10.0

    def __post_init__(self) -> None:
        require_positive("horizon", self.horizon)

    def factor(self, k: int) -> float:
        """1 / (1 + k / horizon)."""
        return 1 / (1 + k / self.horizon)


def resolve_decay(decay: float | Schedule) -> Schedule:
    """The schedule itself, or the exponential decay with a given rate."""
    return decay if isinstance(decay, Schedule) else Exponential(decay)


def polyak_momentum(curvature: float, step: float | Tensor) -> float | Tensor:
    r"""Heavy-ball momentum for a quadratic with curvature in :math:`[\mu, 1/\eta]`: :math:`(1 - \sqrt{\mu\eta})^2`.

    Every mode is then critically or under-damped, and all contract at the rate :math:`1 - \sqrt{\mu\eta}`.

    >>> polyak_momentum(0.25, 1.0)
    0.25
    """
    root = (curvature * step) ** 0.5
    return (1 - root) ** 2


def nesterov_momentum(curvature: float, step: float | Tensor) -> float | Tensor:
    r"""The constant momentum of a strongly convex problem, :math:`(1-\sqrt{\mu\eta})/(1+\sqrt{\mu\eta})`.

    >>> round(nesterov_momentum(0.25, 1.0), 4)
    0.3333
    """
    root = (curvature * step) ** 0.5
    return (1 - root) / (1 + root)


def inertial_limit(momentum: Tensor) -> Tensor:
    r"""The limit of :math:`\eta L` below which proximal gradient steps from :math:`x + \beta(x - x_-)` converge for a
    constant momentum :math:`\beta < 1`, with any convex function beside the quadratic:

    .. math:: \max\Bigl(1,\; 2 - \frac{2\beta(1 + \beta)}{(1 - \beta)^2}\Bigr) .

    Up to one, the energy :math:`F(x) + \frac{1}{2\eta}\|x - x_-\|^2` decreases. Above one, with
    :math:`\kappa = 1 - \eta L/2`, a minimiser p, :math:`h = \|x - p\|^2` and :math:`\delta = \|x - x_-\|^2`,

    .. math:: h^+ - h - \beta(h - h_-) \le -\kappa(1 - \beta)\,\delta^+
        + \bigl(\beta(1 + \beta) + \kappa\beta(1 - \beta)\bigr)\,\delta ,

    since the step is an averaged map; the :math:`\delta` are summable where
    :math:`\kappa(1 - \beta)^2 > \beta(1 + \beta)`, which is the second term.

    Source: Attouch, Cabot, *Convergence of a relaxed inertial forward–backward algorithm for structured monotone
    inclusions*, Appl. Math. Optim. 2019.

    >>> import torch
    >>> inertial_limit(torch.tensor([0.0, 0.1, 0.5, 0.9]))
    tensor([2.0000, 1.7284, 1.0000, 1.0000])
    """
    return (2 - 2 * momentum * (1 + momentum) / (1 - momentum).square()).clamp_min(1)

r"""Deterministic first-order methods: proximal gradient, heavy ball, FISTA."""

import dataclasses
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import OptionError
from ..functions.separable import Zero
from .base import Solver, require_count, require_flag
from .momentum import extrapolate, fista_weight, heavy_ball, nesterov_schedule
from .problem import DescentMap, GradientMap, Problem
from .steps import StepSize, check_step_size, gradient_step, nesterov_momentum, polyak_momentum

__all__ = ["FISTA", "HeavyBall", "ProxGD"]


class GradientState(NamedTuple):
    """The point, and the map of a gradient step."""

    x: Tensor | None
    move: GradientMap | DescentMap


@dataclasses.dataclass(frozen=True)
class GradientSolver(Solver):
    """The options of methods with one full gradient per iteration: iterations and step."""

    iters: int = 10
    step: StepSize = "auto"

    def __post_init__(self) -> None:
        require_count("iters", self.iters)
        check_step_size(self.step)

    @property
    def iterations(self) -> int:
        """The fixed number of iterations."""
        return self.iters

    def first_step(self, problem: Problem) -> float | Tensor:
        """The step of every iteration."""
        return gradient_step(self.step, problem)

    def _map(self, problem: Problem) -> GradientMap | DescentMap:
        # The first step from zero takes no product.
        return GradientMap.of(problem, gradient_step(self.step, problem), self.iters - 1)


@dataclasses.dataclass(frozen=True)
class ProxGD(GradientSolver):
    r"""Proximal gradient descent,

    .. math:: x \leftarrow \operatorname{prox}_{\eta g}\bigl(x + \eta\,(Ay + b - AA^\top x - \lambda x)\bigr).

    At :math:`\eta = 1/(L+\lambda)`, the automatic step, the objective never increases. One iteration from zero with
    unit step and no ridge equals the plain layer to the bit.

    Source: [Bibi2019], eq. (3), with the prox parameter equal to the step.

    >>> from minimand.functions import NonNegative
    >>> from minimand.operators import Dense
    >>> A, y = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[4.0, -3.0]])
    >>> from minimand.solvers import solve
    >>> solve(Problem(Dense(A), NonNegative(), y), ProxGD(iters=50)).x
    tensor([[2., 0.]])
    """

    def init(self, problem: Problem, x0: Tensor | None) -> GradientState:
        """The step and its map, once."""
        return GradientState(x0, self._map(problem))

    def advance(
        self, problem: Problem, state: GradientState, k: int, generator: torch.Generator | None
    ) -> GradientState:
        """One proximal gradient step."""
        return state._replace(x=problem.prox(state.move(state.x), state.move.step))


class MomentumState(NamedTuple):
    """As :class:`GradientState`, with the previous point and the momentum."""

    x: Tensor | None
    previous: Tensor | None
    move: GradientMap | DescentMap
    momentum: float | Tensor


@dataclasses.dataclass(frozen=True)
class HeavyBall(GradientSolver):
    r"""Proximal gradient descent with Polyak's momentum,

    .. math:: x^+ = \operatorname{prox}_{\eta g}\bigl(x - \eta\nabla f(x) + \beta\,(x - x_-)\bigr).

    Args:
        iters: Iterations.
        step: :math:`\eta`; automatic: :math:`1/(L+\lambda)`.
        momentum: :math:`\beta \in [0, 1)`; automatic: for :math:`g = 0` and a ridge, where the problem is a
            strongly convex quadratic, :math:`(1-\sqrt{\lambda\eta})^2`, which contracts at the accelerated rate
            :math:`1-\sqrt{\lambda\eta}`; otherwise ½, the largest for which convergence with this step and any
            convex g is proved (Ochs, Chen, Brox & Pock, iPiano, 2014: :math:`\eta \le 2(1-\beta)/L`).
            ``"growing"`` is the schedule of [Lin2019], Theorem 2: iteration k = 0, 1, … takes the step
            :math:`\eta/(k+2)` with the momentum :math:`k/(k+2)`; for :math:`g = 0` its gap is at most
            :math:`\|x_0 - x^*\|^2/(2\eta(t+1))` after t iterations.

    Source: [Lin2019], eq. (16) and Theorem 2 (Ghadimi, Feyzmahdavian & Johansson, 2015); Polyak, 1964.

    >>> from minimand.functions import Zero
    >>> from minimand.operators import Dense
    >>> from minimand.solvers import solve
    >>> A, y = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[4.0, -3.0]])
    >>> solve(Problem(Dense(A), Zero(), y), HeavyBall(iters=100)).x
    tensor([[ 2., -3.]])
    """

    momentum: float | Literal["auto", "growing"] = "auto"

    @property
    def reach(self) -> float:
        """Momentum lengthens steps by up to 1/(1 − β); where it is automatic, β may be close to 1."""
        further = self.iterations - 1
        if self.momentum == "auto":
            return further * (further + 1) / 2
        return further / (1 - (0.0 if isinstance(self.momentum, str) else self.momentum))

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.momentum, int | float) and 0 <= self.momentum < 1
        if not number and self.momentum not in ("auto", "growing"):
            raise OptionError(f'momentum is "auto", "growing" or a number in [0, 1), got {self.momentum!r}')

    def first_step(self, problem: Problem) -> float | Tensor:
        """The step of every iteration; with growing momentum, the first and largest."""
        step = gradient_step(self.step, problem)
        return step / 2 if self.momentum == "growing" else step

    def init(self, problem: Problem, x0: Tensor | None) -> MomentumState:
        """The step, its map and the momentum, once."""
        move = self._map(problem)
        momentum: float | Tensor
        if not isinstance(self.momentum, str):
            momentum = self.momentum
        elif isinstance(problem.function, Zero) and problem.is_quadratic and problem.ridge > 0:
            momentum = polyak_momentum(problem.ridge, move.step)
        else:
            momentum = 0.5
        return MomentumState(x0, x0, move, momentum)

    def advance(
        self, problem: Problem, state: MomentumState, k: int, generator: torch.Generator | None
    ) -> MomentumState:
        """A gradient step at x plus the momentum times the last displacement."""
        x, previous, move, momentum = state
        target, step = move(x), move.step
        if self.momentum == "growing":
            momentum, share = k / (k + 2), 1 / (k + 2)
            target, step = share * target if x is None else x + share * (target - x), step * share
        if x is not None and previous is not x:
            target = heavy_ball(target, x, torch.zeros_like(x) if previous is None else previous, momentum)
        return state._replace(x=problem.prox(target, step), previous=x)


class NesterovState(NamedTuple):
    """As :class:`GradientState`, with the extrapolated point and Nesterov's weight per sample."""

    x: Tensor | None
    ahead: Tensor | None
    weight: Tensor
    move: GradientMap | DescentMap


@dataclasses.dataclass(frozen=True)
class FISTA(GradientSolver):
    r"""Accelerated proximal gradient,

    .. math::

        x^+ = \operatorname{prox}_{\eta g}(z - \eta\nabla f(z)), \qquad
        z^+ = x^+ + \beta\,(x^+ - x), \qquad \beta = \frac{t-1}{t^+},\quad t^+ = \tfrac12(1+\sqrt{1+4t^2}) .

    With a ridge the momentum never exceeds :math:`(1-\sqrt{\lambda\eta})/(1+\sqrt{\lambda\eta})`, the constant
    of strongly convex problems.

    Args:
        iters: Iterations.
        step: :math:`\eta`; automatic: :math:`1/(L+\lambda)`, the largest that the theory allows.
        restart: Reset the momentum of a sample when it points uphill:
            :math:`\langle z - x^+, x^+ - x\rangle > 0` (O'Donoghue & Candès, 2015).

    Source: Beck & Teboulle, 2009; [Lin2019], eq. (18).

    >>> from minimand.functions import NonNegative
    >>> from minimand.operators import Dense
    >>> from minimand.solvers import solve
    >>> A, y = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[4.0, -3.0]])
    >>> solve(Problem(Dense(A), NonNegative(), y), FISTA(iters=60)).x
    tensor([[2., 0.]])
    """

    restart: bool = True

    @property
    def reach(self) -> float:
        """Steps grow with Nesterov's momentum."""
        velocity, total = 0.0, 0.0
        for momentum in nesterov_schedule(max(self.iterations - 1, 1))[: self.iterations - 1]:
            velocity = momentum * velocity + 1
            total += velocity
        return total

    def __post_init__(self) -> None:
        super().__post_init__()
        require_flag("restart", self.restart)

    def init(self, problem: Problem, x0: Tensor | None) -> NesterovState:
        """The step and its map, once; weight one everywhere."""
        lead = problem.shape[: problem.operator.output_dim]
        weight = problem.operator.per_feature(torch.ones(*lead, 1, device=problem.y.device))
        return NesterovState(x0, x0, weight, self._map(problem))

    def advance(
        self, problem: Problem, state: NesterovState, k: int, generator: torch.Generator | None
    ) -> NesterovState:
        """A proximal gradient step at the extrapolated point, then the next extrapolation."""
        x, ahead, weight, move = state
        new = problem.prox(move(ahead), move.step)
        if k + 1 == self.iters:
            return state._replace(x=new)
        if self.restart and ahead is not None:
            change = new if x is None else new - x
            over = ((ahead - new) * change).detach().flatten(problem.operator.output_dim).sum(-1, keepdim=True)
            weight = torch.where(problem.operator.per_feature(over) > 0, torch.ones_like(weight), weight)
        following = fista_weight(weight)
        momentum = (weight - 1) / following
        if problem.ridge > 0:
            momentum = momentum.clamp(max=nesterov_momentum(problem.ridge, move.step))
        ahead = extrapolate(new, torch.zeros_like(new) if x is None else x, momentum.to(new.dtype))
        return state._replace(x=new, ahead=ahead, weight=following)

"""The contract of a solver: frozen options, ``init`` and ``advance``."""

import abc
import dataclasses
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..errors import CapabilityError, OptionError
from ..functions.base import Function
from ..operators.base import LinearOperator
from .problem import Problem
from .steps import Scaled, StepSize

__all__ = ["Solver", "State", "check_relaxation", "require_count", "require_flag"]


class State(Protocol):
    """The state between two iterations; ``x`` is the current point, None at the origin."""

    @property
    def x(self) -> Tensor | None:
        """The current point."""
        ...


@dataclasses.dataclass(frozen=True)
class Solver(abc.ABC):
    """An iterative method for :class:`~minimand.solvers.Problem`, as a record of its options.

    ``init`` makes the state and ``advance`` performs one iteration (``step`` is the name of the step *size*).
    :func:`~minimand.solvers.iterate.iterate` runs the loop for all solvers.

    Attributes:
        stochastic: Whether it draws random samples, which only an operator with ``sampled = True`` allows.
        needs_separable: Whether it updates single entries, which only a separable function allows.
        updates_some: Whether an iteration leaves some entries as they are.
        needs_curvature: Whether it takes its steps from a bound on the curvature of the datafit.
    """

    stochastic: ClassVar[bool] = False
    needs_separable: ClassVar[bool] = False
    updates_some: ClassVar[bool] = False
    needs_curvature: ClassVar[bool] = True

    @property
    def checked_every(self) -> int:
        """Iterations between two measurements, which cost as much as an iteration or two."""
        return 5

    @property
    def unrolls(self) -> bool:
        """Whether its iterations can be differentiated."""
        return True

    @property
    @abc.abstractmethod
    def iterations(self) -> int:
        """The number of iterations of a run without a tolerance."""

    @abc.abstractmethod
    def init(self, problem: Problem, x0: Tensor | None) -> Any:
        """The state before the first iteration, with everything that is computed once; ``x0=None`` is zero."""

    @abc.abstractmethod
    def advance(self, problem: Problem, state: Any, k: int, generator: torch.Generator | None) -> Any:
        """One iteration."""

    @property
    def reach(self) -> float:
        """How many unit steps along a constant gradient the iterations after the first amount to, about."""
        return float(self.iterations - 1)

    def plain(self, problem: Problem, generator: torch.Generator | None) -> Tensor:
        """The plain layer before its activation: a unit step from zero, with the sample of this method as dropout."""
        return problem.linear()

    def start(self, problem: Problem, preactivation: Tensor) -> Any:
        """The state before the first iteration from the activation of a point; momentum is at rest."""
        return self.init(problem, problem.function.prox(preactivation))

    def weakened(self, strength: float | Tensor) -> "Solver":
        """The same method with ``strength`` times its steps."""
        step: StepSize | None = getattr(self, "step", None)
        if step is None:
            raise CapabilityError(
                f"{type(self).__name__} has no step that a strength could scale; implement weakened(strength), or use "
                f'start="zero" and strength=1'
            )
        changes: dict[str, Any] = {"step": Scaled(step, strength)}
        return dataclasses.replace(self, **changes)

    def shortened(self, longest: float) -> "Solver":
        """The same method with automatic steps of at most ``longest``."""
        step: StepSize | None = getattr(self, "step", None)
        if step is None or isinstance(step, int | float):
            return self
        changes: dict[str, Any] = {"step": Scaled(step, 1.0, longest)}
        return dataclasses.replace(self, **changes)

    def first_step(self, problem: Problem) -> float | Tensor | None:
        """The step size of the first iteration; None for a method without step sizes."""
        return None

    def prepare(self, problem: Problem) -> Problem:
        """The same problem, with the bounds and fast products that this solver uses computed in advance."""
        # A single iteration from zero is the plain layer to the bit, so its product must be torch's own.
        return problem.bounded() if self.iterations == 1 else problem.bounded().repeated()

    def noiseless(self) -> "Solver":
        """The deterministic counterpart of a stochastic method; a deterministic method returns itself."""
        return self

    def check(self, operator: LinearOperator, function: Function) -> None:
        """Raise :class:`~minimand.errors.CapabilityError` for a problem that this solver cannot solve."""
        name = type(self).__name__
        if self.needs_separable and not function.separable:
            raise CapabilityError(
                f"{name} updates single entries and needs a separable function, "
                f"but {type(function).__name__} couples them; use ProxGD or FISTA"
            )
        if self.stochastic and not operator.sampled:
            raise CapabilityError(
                f"{name} samples features of the operator, but {type(operator).__name__} does not support sampling; "
                f"pass input_norms_sq to operator(…), set sampled = True in a subclass, or use ProxGD, FISTA or ADMM"
            )


def check_relaxation(value: float | Tensor, most: float) -> None:
    """Raise :class:`~minimand.errors.OptionError` unless ``value`` lies in (0, most], or is learned."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not isinstance(value, Tensor) and not (number and 0 < value <= most):
        raise OptionError(f"relaxation must lie in (0, {most:g}], got {value!r}")


def require_flag(name: str, value: bool) -> None:
    """Raise :class:`~minimand.errors.OptionError` unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, got {value!r}")


def require_count(name: str, value: int) -> None:
    """Raise :class:`~minimand.errors.OptionError` unless ``value`` is a whole number ≥ 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name} must be a whole number ≥ 1, got {value!r}")

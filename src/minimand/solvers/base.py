"""The solver's contract: options that are frozen, and ``init`` / ``advance``."""

import abc
import dataclasses
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..errors import CapabilityError, OptionError
from ..functions.base import Function
from ..operators.base import LinearOperator
from .problem import Problem

__all__ = ["Solver", "State", "require_count"]


class State(Protocol):
    """What a solver carries from one iteration to the next; ``x`` is the current point, None at the origin."""

    @property
    def x(self) -> Tensor | None:
        """The current point."""
        ...


@dataclasses.dataclass(frozen=True)
class Solver(abc.ABC):
    """An iterative method for :class:`~minimand.solvers.Problem`, as a record of its options.

    ``init`` makes the state, ``advance`` moves it by one iteration (``step`` is the name of the step *size*).
    A solver never loops: :func:`~minimand.solvers.iterate.iterate` does, for all of them.

    Attributes:
        stochastic: Whether it draws random samples.
        needs_separable: Whether it updates single entries, which only a separable function allows.
    """

    stochastic: ClassVar[bool] = False
    needs_separable: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def iterations(self) -> int:
        """How many steps a fixed-length run takes."""

    @abc.abstractmethod
    def init(self, problem: Problem, x0: Tensor | None) -> Any:
        """The state before the first step, with everything that is computed once; ``x0=None`` is zero."""

    @abc.abstractmethod
    def advance(self, problem: Problem, state: Any, k: int, generator: torch.Generator | None) -> Any:
        """One iteration."""

    def first_step(self, problem: Problem) -> float | Tensor | None:
        """The step size of the first iteration; None for a method without one."""
        return None

    def prepare(self, problem: Problem) -> Problem:
        """The same problem, set up for what this solver will ask of it: bounds, and products with the operator."""
        # One iteration from zero applies the operator once, to the bit as the plain layer does.
        return problem.bounded() if self.iterations == 1 else problem.bounded().repeated()

    def noiseless(self) -> "Solver":
        """The deterministic method that this one is a noisy version of; itself, if it has no noise."""
        return self

    def check(self, operator: LinearOperator, function: Function) -> None:
        """Refuse a problem that this solver cannot solve, before the first iteration."""
        if self.needs_separable and not function.separable:
            raise CapabilityError(
                f"{type(self).__name__} updates single entries and needs a separable function, "
                f"but {type(function).__name__} couples them; use ProxGD or FISTA"
            )


def require_count(name: str, value: int) -> None:
    """Refuse an iteration count that is not a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name} must be a whole number ≥ 1, got {value!r}")

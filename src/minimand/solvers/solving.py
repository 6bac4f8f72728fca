""":func:`solve` and :func:`trace`: run a solver on a problem."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import checked
from ..errors import CapabilityError, ShapeError, require_finite, require_positive, require_real
from ..functions.base import widened
from .adjoints import Adjoint, Run, Unroll
from .base import Solver, State
from .problem import Problem

__all__ = ["Solution", "Trace", "solve", "trace"]

# Iterations between two checks: measuring optimality costs as much as an iteration.
_CHECK_EVERY = 5


@dataclasses.dataclass(frozen=True)
class Solution:
    """The result of :func:`solve`.

    Attributes:
        x: The point, differentiable as the adjoint defines.
        objective: The objective at x, summed over the batch.
        optimality: The largest norm of the gradient mapping over the samples; zero only at the minimiser.
        iterations: The number of iterations.
        converged: Whether ``optimality`` is at most ``tol``; None where no ``tol`` was given.
    """

    x: Tensor
    objective: Tensor
    optimality: Tensor
    iterations: int
    converged: bool | None


@checked
def solve(
    problem: Problem,
    solver: Solver,
    *,
    x0: Tensor | None = None,
    adjoint: Adjoint = Unroll(),  # noqa: B008 -- frozen
    tol: float | None = None,
    generator: torch.Generator | None = None,
) -> Solution:
    r"""Minimise the objective of a problem.

    A problem in half precision is solved in float32, and x has the type of y. Autocast is ignored.

    Args:
        problem: :math:`\tfrac12\|A^\top x - y\|^2 - \langle b,x\rangle + \tfrac\lambda2\|x\|^2 + g(x)`.
        solver: The method and its options; its iterations are a maximum where ``tol`` is given.
        x0: The start; None is zero.
        adjoint: The rule for gradients through the solve.
        tol: Stop once the optimality measure is at most this.
        generator: The source of randomness; None is torch's global one.

    >>> from minimand.functions import NonNegative
    >>> from minimand.operators import Dense
    >>> from minimand.solvers import FISTA
    >>> problem = Problem(Dense(torch.eye(2, dtype=torch.float64)), NonNegative(),
    ...                   torch.tensor([[3.0, -1.0]], dtype=torch.float64))
    >>> solution = solve(problem, FISTA(iters=100), tol=1e-10)
    >>> solution.x, solution.converged
    (tensor([[3., 0.]], dtype=torch.float64), True)
    """
    check(problem, solver, adjoint, x0=x0)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise CapabilityError(f"generator must be a torch.Generator or None, got {generator!r}")
    if tol is not None:
        require_positive("tol", tol)
    x0 = None if x0 is None else widened(x0)
    with torch.autocast(problem.y.device.type, enabled=False):
        prepared = solver.prepare(problem.working())
        x, iterations = adjoint(Run(prepared, solver, x0, generator, _stopper(prepared, tol)))
        x = problem.as_given(x).to(problem.y.dtype)
        require_finite(f"the solution in {x.dtype}", x, "use step='auto', or a type with more range")
        with torch.no_grad():
            objective, optimality = prepared.objective(x), prepared.optimality(x)
    converged = None if tol is None else bool(optimality <= tol)
    return Solution(x, objective, optimality, iterations, converged)


class Trace(NamedTuple):
    """Objective and optimality after 1, 2, … iterations."""

    objective: Tensor
    optimality: Tensor


@checked
def trace(
    problem: Problem,
    solver: Solver,
    *,
    x0: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Trace:
    """Run a solver and record objective and optimality after every iteration, without gradients.

    >>> from minimand.functions import NonNegative
    >>> from minimand.operators import Dense
    >>> from minimand.solvers import ProxGD
    >>> problem = Problem(Dense(2 * torch.eye(2)), NonNegative(), torch.tensor([[4.0, -1.0]]))
    >>> trace(problem, ProxGD(iters=3)).objective
    tensor([0.5000, 0.5000, 0.5000])
    """
    check(problem, solver, Unroll(), x0=x0)
    rows: list[tuple[Tensor, Tensor]] = []

    def record(state: State, done: int) -> bool:
        assert state.x is not None
        rows.append((prepared.objective(state.x), prepared.optimality(state.x)))
        return False

    x0 = None if x0 is None else widened(x0)
    with torch.no_grad(), torch.autocast(problem.y.device.type, enabled=False):
        prepared = solver.prepare(problem.working())
        Run(prepared, solver, x0, generator, record).forward()
    objective, optimality = (torch.stack(column) for column in zip(*rows, strict=True))
    return Trace(objective, optimality)


def check(problem: Problem, solver: Solver, adjoint: Adjoint, *, x0: Tensor | None) -> None:
    """Raise for arguments that do not fit each other, before any work."""
    if not isinstance(solver, Solver) or not isinstance(adjoint, Adjoint):
        raise CapabilityError(
            f"solve takes a solver such as ProxGD() and an adjoint such as Unroll(), got {solver!r} and {adjoint!r}"
        )
    if not isinstance(problem, Problem):
        raise CapabilityError(f"solve takes a Problem(operator, function, y), got a {type(problem).__name__}")
    problem.check()
    solver.check(problem.operator, problem.function)
    adjoint.check(solver)
    if x0 is not None:
        require_real("x0", x0)
        if x0.shape != problem.shape:
            raise ShapeError(f"x0 has shape {tuple(x0.shape)}, but the problem's x has {tuple(problem.shape)}")
        problem.check_dtype("x0", x0)
        require_finite("x0", x0)


def _stopper(problem: Problem, tol: float | None) -> Callable[[State, int], bool] | None:
    if tol is None:
        return None

    checked = 0

    def reached(state: State, done: int) -> bool:
        nonlocal checked
        if done - checked < _CHECK_EVERY:
            return False
        checked = done
        assert state.x is not None
        with torch.no_grad():
            return bool(problem.optimality(state.x) <= tol)

    return reached

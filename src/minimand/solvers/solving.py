""":func:`solve` and :func:`trace`: run a solver on a problem."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import checked
from ..errors import CapabilityError, OptionError, ShapeError, require_finite, require_positive, require_real
from ..functions.base import widened
from ..tracing import holds, is_traced, unwrapped
from .adjoints import Adjoint, Run, Unroll
from .base import Solver, State
from .choosing import Choice, choose
from .gap import GapBound
from .implicit import Parts, transformed
from .problem import Problem
from .recession import require_minimum, require_range
from .rows import stop_rows
from .spectral import spread
from .watching import Progress, Watch

__all__ = ["Solution", "Trace", "solve", "trace"]


@dataclasses.dataclass(frozen=True)
class Solution:
    """The result of :func:`solve`.

    Attributes:
        x: The point, differentiable as the adjoint defines.
        objective: The objective at x, summed over the batch; computed in double precision and rounded down to the type
            of the computation.
        optimality: The largest norm of the gradient mapping over the samples; zero only at the minimiser.
        iterations: The number of iterations.
        converged: Whether the tolerance was reached; None where no ``tol`` was given.
        gap: A bound on the distance of ``objective`` to its minimum, summed over the batch; infinite where none is
            known, and in graphs of torch.compile and torch.export.
        solver: The solver that ran; where none was given, a :class:`~minimand.solvers.Choice` with the reason.
    """

    x: Tensor
    objective: Tensor
    optimality: Tensor
    iterations: int
    converged: bool | None
    gap: Tensor = dataclasses.field(default_factory=lambda: torch.tensor(torch.inf))
    solver: Solver | Choice | None = None


@checked
def solve(
    problem: Problem,
    solver: Solver | None = None,
    *,
    x0: Tensor | None = None,
    adjoint: Adjoint = Unroll(),  # noqa: B008 -- frozen
    tol: float | None = None,
    generator: torch.Generator | None = None,
    callback: Callable[[Progress], bool | None] | None = None,
    verbose: bool = False,
) -> Solution:
    r"""Minimise the objective of a problem.

    A problem in half precision is solved in float32, and x has the type of y. Autocast is ignored.

    Args:
        problem: :math:`\sum_i f((A^\top x)_i; y_i) - \langle b,x\rangle + \tfrac\lambda2\|x\|^2 + g(x)`.
        solver: The method and its options; its iterations are a maximum where ``tol`` is given. None: one is chosen for
            the problem, and named with the reason in ``Solution.solver``; ``tol`` is then 1e-6, or 1e-5 in single
            precision, unless it is given.
        x0: The start; None is zero.
        adjoint: The rule for gradients through the solve. Those of ``Unroll()`` are of the iterations that were made:
            where a tolerance ended them, they are less accurate than the solution. ``Implicit()`` differentiates the
            minimiser.
        tol: Stop once the duality gap is at most ``tol`` times the absolute value of the objective at the start, or,
            where no gap is known, the optimality measure at most ``tol`` times its value at the start. Samples that
            have converged are no longer computed, unless the iterations are differentiated.
        generator: The source of randomness; None is torch's global one.
        callback: Called with a :class:`~minimand.solvers.Progress` every few iterations; it stops the run by
            returning True.
        verbose: Print a line of progress every few iterations.

    >>> from minimand.functions import NonNegative
    >>> from minimand.operators import Dense
    >>> from minimand.solvers import FISTA
    >>> problem = Problem(Dense(torch.eye(2, dtype=torch.float64)), NonNegative(),
    ...                   torch.tensor([[3.0, -1.0]], dtype=torch.float64))
    >>> solution = solve(problem, FISTA(iters=100), tol=1e-10)
    >>> solution.x, solution.converged, bool(solution.gap <= 1e-10 * 5)
    (tensor([[3., 0.]], dtype=torch.float64), True, True)
    >>> print(solve(problem).solver)
    Spectral(iters=2000, polish=8): ...
    """
    if solver is None:
        _check_problem(problem, adjoint, x0)
    else:
        check(problem, solver, adjoint, x0=x0)
    reached = tol
    if reached is None and solver is None:
        reached = 1e-6 if problem.y.dtype == torch.float64 else 1e-5
    if reached is not None:
        require_positive("tol", reached)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise CapabilityError(f"generator must be a torch.Generator or None, got {generator!r}")
    if reached is not None or callback is not None or verbose:
        _require_values(problem, x0)
    needed = torch.is_grad_enabled() and _differentiated(problem, x0, solver)
    # FISTA is chosen for callables, too: its iterates tell whether a problem without a matrix is unbounded.
    unrolled = torch.is_grad_enabled() and not adjoint.of_minimizer and (needed or Parts.of(problem).opaque)
    used: Solver | Choice = choose(problem, differentiated=unrolled) if solver is None else solver
    method = used.solver if isinstance(used, Choice) else used
    check(problem, method, adjoint, x0=x0, differentiated=needed)
    x0 = _start(problem, x0)
    with torch.autocast(problem.y.device.type, enabled=False), torch.set_grad_enabled(needed):
        prepared = method.prepare(problem.working())
        watch = Watch(GapBound(problem.working()), x0, reached, callback, verbose)
        run = Run(
            prepared,
            method,
            x0,
            generator,
            watch.until(method.checked_every),
            loop=stop_rows(watch) if watch.drops else None,
        )
        x, iterations = adjoint(run)
        x = problem.as_given(x).to(problem.y.dtype)
        require_finite(f"the solution in {x.dtype}", x, "use step='auto' or rho='auto', or a type with more range")
        with torch.no_grad():
            objective, optimality, gap = watch.measured(prepared, x)
    converged = None if reached is None else watch.reached(gap, optimality)
    if converged is False or (converged and not holds(gap < torch.inf)):
        require_minimum(watch.bound, x)
    return Solution(x, objective, optimality, iterations, converged, gap, used)


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

    x0 = _start(problem, x0)
    with torch.no_grad(), torch.autocast(problem.y.device.type, enabled=False):
        prepared = solver.prepare(problem.working())
        Run(prepared, solver, x0, generator, record).forward()
    objective, optimality = (torch.stack(column) for column in zip(*rows, strict=True))
    return Trace(objective, optimality)


def check(
    problem: Problem, solver: Solver, adjoint: Adjoint, *, x0: Tensor | None, differentiated: bool = False
) -> None:
    """Raise for arguments that do not fit each other, before any work."""
    if not isinstance(solver, Solver):
        raise CapabilityError(f"solve takes a solver such as ProxGD() and an adjoint such as Unroll(), got {solver!r}")
    _check_problem(problem, adjoint, x0)
    solver.check(problem.operator, problem.function)
    if solver.needs_curvature and not problem.is_smooth:
        raise CapabilityError(
            f"{type(solver).__name__} takes its steps from a bound on the curvature of f, which {problem.datafit!r} "
            f"lacks; use Spectral(), or ADMM(), or a background > 0 for Poisson's loss"
        )
    adjoint.check(solver)
    if differentiated and not adjoint.of_minimizer and not solver.unrolls:
        raise CapabilityError(
            f"the iterations of {solver!r} cannot be differentiated; use adjoint=Implicit(), or torch.no_grad()"
        )


def _check_problem(problem: Problem, adjoint: Adjoint, x0: Tensor | None) -> None:
    if not isinstance(adjoint, Adjoint):
        raise CapabilityError(f"solve takes a solver such as ProxGD() and an adjoint such as Unroll(), got {adjoint!r}")
    if not isinstance(problem, Problem):
        raise CapabilityError(f"solve takes a Problem(operator, function, y), got a {type(problem).__name__}")
    problem.check()
    require_range(problem)
    if x0 is not None:
        require_real("x0", x0)
        if x0.shape != problem.shape:
            raise ShapeError(f"x0 has shape {tuple(x0.shape)}, but the problem's x has {tuple(problem.shape)}")
        problem.check_dtype("x0", x0)
        require_finite("x0", x0)


def _start(problem: Problem, x0: Tensor | None) -> Tensor | None:
    """The start in the precision of the computation; where f may be infinite at zero, a multiple of A1 instead."""
    x0 = None if x0 is None else widened(x0)
    if problem.is_smooth:
        return x0
    with torch.no_grad(), torch.autocast(problem.y.device.type, enabled=False):
        problem = problem.working()
        given, dims = x0 is not None, problem.input_dims
        if x0 is None:
            back = problem.operator.apply(torch.ones_like(problem.y))
            image, counts = (v.flatten(-dims).sum(-1) for v in (problem.operator.adjoint(back), problem.y))
            # The multiple is the best one.
            x0 = problem.function.prox(spread(problem, counts / torch.where(image > 0, image, 1.0)) * back, 1e-16)
        if not is_traced(x0) and not holds(GapBound(problem).objectives(x0).isfinite()):
            raise OptionError(
                f"the objective is infinite at {'x0' if given else 'the start'}; pass an x0 in the domain of g with "
                f"Aᵀx0 > 0 where counts are, or a background > 0; where there is no such x0, the problem is infeasible"
            )
    return x0


def _require_values(problem: Problem, x0: Tensor | None) -> None:
    """Raise inside of vmap, where no run can stop."""
    tensors = (*Parts.of(problem).tensors, *([] if x0 is None else [x0]))
    if transformed() and any(torch._C._functorch.is_batchedtensor(unwrapped(each)) for each in tensors):
        raise CapabilityError(
            "vmap hides the values that a tolerance, a callback and a line of progress need; pass a solver, such as "
            "FISTA(iters=200), without them, or solve for the whole batch at once, outside of vmap"
        )


def _differentiated(problem: Problem, x0: Tensor | None, solver: Solver | None) -> bool:
    """Whether a gradient may be wanted: a tensor requires one, or a callable captures one that does."""
    parts = Parts.of(problem)
    if transformed() or any(each.requires_grad for each in Parts.of((problem, x0, solver)).tensors):
        return True
    return parts.opaque and (is_traced(problem.y) or _captures(problem.working()))


def _captures(problem: Problem) -> bool:
    """Whether a proximal gradient step depends on a tensor that requires a gradient."""
    with torch.autocast(problem.y.device.type, enabled=False):
        linear = problem.linear()
        return problem.prox(problem.descent(torch.zeros_like(linear), linear), 1.0).requires_grad

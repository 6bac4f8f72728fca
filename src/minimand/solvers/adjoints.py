r"""Rules for gradients through a solve; each is an argument of :func:`~minimand.solvers.solve`.

================  =====================================  ================  ==================================
adjoint           gradient                               memory            use it for
================  =====================================  ================  ==================================
``Unroll``        of the K iterations                    K states          everything; the default
``Checkpoint``    the same, to rounding                  about 2√K states  everything, when memory is short
``Implicit``      of the exact minimiser                 one state         deterministic solvers, converged
``JacobianFree``  the first term of Implicit's series    one state         everything; an approximation
================  =====================================  ================  ==================================
"""

import abc
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..errors import CapabilityError, OptionError, require_positive
from .base import Solver, State, require_count
from .iterate import iterate
from .linear import conjugate_gradient
from .problem import Problem, as_number, reciprocal

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

__all__ = ["Adjoint", "Checkpoint", "Implicit", "JacobianFree", "Run", "Unroll"]

Until = Callable[[State, int], bool]


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a solver on a prepared problem.

    Attributes:
        problem: The result of ``solver.prepare``.
        solver: The method.
        x0: The start; None is zero.
        generator: The source of randomness; None is torch's global one.
        until: Stops the run early where it returns True.
        ending: The problem of the last iteration, where it ends in a pre-activation; None: ``problem``. Solvers that
            update some entries only take all their steps in it.
        known: The solution and the number of iterations, where they are known.
    """

    problem: Problem
    solver: Solver
    x0: Tensor | None = None
    generator: torch.Generator | None = None
    until: Until | None = None
    ending: Problem | None = None
    known: tuple[Tensor, int] | None = None

    def init(self) -> Any:
        """The state before the first iteration."""
        return self.solver.init(self.problem, self.x0)

    def advance(self, state: Any, k: int) -> Any:
        """The state after iteration k."""
        last = self.solver.updates_some or k + 1 == self.solver.iterations
        problem = self.problem if self.ending is None or not last else self.ending
        return self.solver.advance(problem, state, k, self.generator)

    def forward(self) -> tuple[Tensor, int]:
        """All iterations: the solution, and their number."""
        if self.known is not None:
            return self.known
        state, done = iterate(self.advance, self.init(), self.solver.iterations, until=self.until)
        return state.x, done


@dataclasses.dataclass(frozen=True)
class Adjoint(abc.ABC):
    """A rule for gradients: it runs a solver and makes the solution differentiable."""

    @abc.abstractmethod
    def __call__(self, run: Run) -> tuple[Tensor, int]:
        """The solution of a run, and the number of iterations."""

    def preactivation(self, run: Run) -> Tensor:
        """The pre-activation of the solution, of a run with an ``ending``."""
        return self(run)[0]

    def check(self, solver: Solver) -> None:  # noqa: B027 -- most adjoints take every solver
        """Raise for a solver that this adjoint cannot differentiate."""


@dataclasses.dataclass(frozen=True)
class Unroll(Adjoint):
    """Ordinary automatic differentiation through every iteration."""

    def __call__(self, run: Run) -> tuple[Tensor, int]:
        """The plain loop."""
        return run.forward()


@dataclasses.dataclass(frozen=True)
class Checkpoint(Adjoint):
    """Unrolling that keeps only every ``every``-th state and recomputes the others in the backward pass.

    The recomputation replays the forward pass's random samples, so the gradient is :class:`Unroll`'s.

    Args:
        every: Iterations per segment; None is about √K, which minimises the memory.
    """

    every: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None:
            require_count("every", self.every)

    def __call__(self, run: Run) -> tuple[Tensor, int]:
        """One checkpoint per segment; ``until`` is evaluated at the ends of segments."""
        total = run.solver.iterations
        every = self.every or math.isqrt(total - 1) + 1

        def segment(state: Any, s: int) -> Any:
            length = min(every, total - s * every)
            body = _replaying(lambda state: iterate(run.advance, state, length, start=s * every)[0], run.generator)
            return checkpoint(body, state, use_reentrant=False)

        until = run.until
        reached = None if until is None else lambda state, s: until(state, min(s * every, total))
        state, segments = iterate(segment, run.init(), -(-total // every), until=reached)
        return state.x, min(segments * every, total)


def _replaying(body: Callable[[Any], Any], generator: torch.Generator | None) -> Callable[[Any], Any]:
    """``body``, drawing the same samples in every call (torch's checkpoint does so for the global generator only)."""
    if generator is None:
        return body
    begin = generator.get_state()
    calls: list[None] = []

    def replay(state: Any) -> Any:
        calls.append(None)
        if len(calls) == 1:
            return body(state)
        now = generator.get_state()
        generator.set_state(begin)
        try:
            return body(state)
        finally:
            generator.set_state(now)

    return replay


@dataclasses.dataclass(frozen=True)
class JacobianFree(Adjoint):
    r"""Differentiate one proximal gradient step at the solution, and nothing else.

    With :math:`T(x, \theta) = \operatorname{prox}_{\eta g}(x - \eta\nabla f(x))` and the solution x as a constant,
    the gradient is :math:`\partial_\theta T(x, \theta)^\top v`: the first term of the Neumann series of
    :class:`Implicit`. It is cheap, needs the memory of one step, and is an approximation.

    Source: Fung et al., *Jacobian-free backpropagation*, 2022.
    """

    def __call__(self, run: Run) -> tuple[Tensor, int]:
        """The forward pass records nothing."""
        with torch.no_grad():
            x, done = run.forward()
        return _attach(run.problem, x, None), done

    def preactivation(self, run: Run) -> Tensor:
        """The pre-activation of the solution, with the gradient of that of one step at the solution."""
        assert run.ending is not None
        with torch.no_grad():
            z, _ = run.forward()
            x, step = run.ending.solution(z), as_number(reciprocal(run.problem.smoothness()))
        moved = run.ending.prox(x + step * run.problem.descent(x, run.problem.linear()), step)
        return z + (moved - moved.detach())


@dataclasses.dataclass(frozen=True)
class Implicit(Adjoint):
    r"""The gradient of the exact minimiser, by the implicit function theorem.

    At the minimiser :math:`x = T(x, \theta)`, so
    :math:`\frac{dx}{d\theta} = (I - \partial_x T)^{-1}\partial_\theta T`. The backward pass solves

    .. math:: u = v + (I - \eta H)\,D\,u, \qquad D = \operatorname{prox}', \quad H = AA^\top + \lambda I,

    for separable g in the symmetric form
    :math:`(I - D + \eta D^{1/2} H D^{1/2})\,q = D^{1/2} v`, :math:`u = v + (I-\eta H)D^{1/2}q`, by conjugate
    gradients; for others by conjugate gradients on the normal equations.

    The gradient is as accurate as the solver has converged, and requires that the prox is differentiable at the
    solution. Stochastic solvers have no fixed point and are refused.

    Args:
        iters: The maximum number of iterations of the backward solve.
        tol: Its relative tolerance; None: 1e-6, and 1e-12 in double precision.
        method: ``"cg"``, or ``"neumann"`` for the plain series, whose truncation after k terms is a
            compromise between :class:`JacobianFree` and the exact gradient.
    """

    iters: int = 200
    tol: float | None = None
    method: Literal["cg", "neumann"] = "cg"

    def __post_init__(self) -> None:
        require_count("iters", self.iters)
        if self.tol is not None:
            require_positive("tol", self.tol)
        if self.method not in ("cg", "neumann"):
            raise OptionError(f'Implicit(method=…) is "cg" or "neumann", got {self.method!r}')

    def check(self, solver: Solver) -> None:
        """Raise for stochastic solvers, which have no fixed point."""
        if solver.stochastic:
            raise CapabilityError(
                f"Implicit differentiates a fixed point, but {type(solver).__name__} draws new samples in every "
                f"iteration and has none; use Unroll, Checkpoint or JacobianFree"
            )

    def __call__(self, run: Run) -> tuple[Tensor, int]:
        """The forward pass records nothing; the backward pass solves a linear system."""
        with torch.no_grad():
            x, done = run.forward()
        return _attach(run.problem, x, partial(self._pull_back, run.problem, x.detach())), done

    def preactivation(self, run: Run) -> Tensor:
        """The pre-activation of the solution, with the gradient of x − ∇f(x), which it is at the minimiser."""
        assert run.ending is not None
        with torch.no_grad():
            z, done = run.forward()
            known = run.ending.solution(z), done
        x, _ = self(Run(run.problem, run.solver, known=known))
        moved = x + run.problem.descent(x, run.problem.linear())
        return z + (moved - moved.detach())

    def _pull_back(self, problem: Problem, x: Tensor, v: Tensor) -> Tensor:
        """Solve u = v + (I − ηH) D u."""
        step = as_number(reciprocal(problem.smoothness()))
        inner = (x + step * problem.descent(x, problem.linear())).requires_grad_()
        with torch.enable_grad():
            outer = problem.prox(inner, step)

        def derivative(u: Tensor) -> Tensor:
            (product,) = torch.autograd.grad(outer, inner, u, retain_graph=True)
            return product

        def contract(u: Tensor) -> Tensor:
            return problem.operator.onto(None, 1 - step * problem.ridge if problem.ridge else 1.0, u, -step)

        tol = self.tol or (1e-12 if x.dtype == torch.float64 else 1e-6)
        if self.method == "neumann":
            return _neumann(lambda u: contract(derivative(u)), v, self.iters, tol)
        dims = len(problem.operator.output_shape)
        solve = partial(conjugate_gradient, iterations=self.iters, sample_dims=dims, tol=tol)
        if problem.function.separable:
            root = derivative(torch.ones_like(v)).clamp_min(0).sqrt()
            q = solve(lambda q: q - root * contract(root * q), root * v)
            return v + contract(root * q)
        # K u = v with K = I − (I − ηH)D has no symmetric form without a square root of D.
        forward = lambda u: u - contract(derivative(u))  # noqa: E731
        transposed = lambda u: u - derivative(contract(u))  # noqa: E731
        return solve(lambda u: transposed(forward(u)), transposed(v))


def _neumann(apply: Callable[[Tensor], Tensor], v: Tensor, iterations: int, tol: float) -> Tensor:
    """The series v + Jv + J²v + …, until a term is below the tolerance."""

    def add(state: tuple[Tensor, Tensor], k: int) -> tuple[Tensor, Tensor]:
        total, term = state
        term = apply(term)
        return total + term, term

    def small(state: tuple[Tensor, Tensor], done: int) -> bool:
        total, term = state
        return bool(term.norm() <= tol * total.norm())

    return iterate(add, (v, v), iterations, until=small)[0][0]


class _Transform(torch.autograd.Function):
    """The identity, whose backward passes the gradient through a function."""

    @staticmethod
    def forward(ctx: "FunctionCtx", x: Tensor, pull_back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.pull_back = pull_back  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # once_differentiable: the second derivative of the linear solve is not implemented, and would be wrong.
        return ctx.pull_back(grad), None


def _attach(problem: Problem, x: Tensor, pull_back: Callable[[Tensor], Tensor] | None) -> Tensor:
    """The value ``x`` with the gradient of one proximal gradient step at it."""
    x = x.detach()
    step = as_number(reciprocal(problem.smoothness()))
    moved = problem.prox(x + step * problem.descent(x, problem.linear()), step)
    if moved.requires_grad:
        moved = _Transform.apply(moved, pull_back or (lambda grad: grad))
    return x + (moved - moved.detach())

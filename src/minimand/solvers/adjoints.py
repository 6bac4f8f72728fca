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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..errors import CapabilityError, OptionError, require_positive
from ..tracing import constant, holds, is_compiled, is_traced, pullback
from .base import Solver, State, require_count
from .implicit import Equation, Parts, attached, full_precision, transformed
from .iterate import iterate
from .linear import conjugate_gradient
from .newton import solved_on_active_set
from .problem import Problem, as_number, reciprocal

__all__ = ["Adjoint", "Checkpoint", "Implicit", "JacobianFree", "Run", "Unroll"]

Until = Callable[[State, int], bool]
Linear = Callable[[Tensor], Tensor]


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
        start: A point whose activation is the start, instead of ``x0``.
        made: The number of iterations that the start stands for.
        loop: Another loop, for runs that are not differentiated: samples that have converged stop.
    """

    problem: Problem
    solver: Solver
    x0: Tensor | None = None
    generator: torch.Generator | None = None
    until: Until | None = None
    ending: Problem | None = None
    start: Tensor | None = None
    made: int = 0
    loop: "Callable[[Run], tuple[Tensor, int]] | None" = None

    @property
    def iterations(self) -> int:
        """The number of iterations to make."""
        return self.solver.iterations - self.made

    def init(self) -> Any:
        """The state before the first iteration."""
        if self.start is not None:
            return self.solver.start(self.problem, self.start)
        return self.solver.init(self.problem, self.x0)

    def advance(self, state: Any, k: int) -> Any:
        """The state after iteration k."""
        last = self.solver.updates_some or k + 1 == self.iterations
        problem = self.problem if self.ending is None or not last else self.ending
        return self.solver.advance(problem, state, k, self.generator)

    def solution(self, value: Tensor) -> Tensor:
        """The solution that a run's value stands for: itself, or the activation of a pre-activation."""
        return value if self.ending is None else self.ending.solution(value)

    def forward(self) -> tuple[Tensor, int]:
        """All iterations: the solution, and their number."""
        if self.loop is not None and not torch.is_grad_enabled():
            return self.loop(self)
        state, done = iterate(self.advance, self.init(), self.iterations, until=self.until)
        return state.x, done


@dataclasses.dataclass(frozen=True)
class Adjoint(abc.ABC):
    """A rule for gradients: it runs a solver and makes the solution differentiable.

    Attributes:
        of_minimizer: Whether the gradient is that of the minimiser, or an approximation of it, and not of the run.
    """

    of_minimizer: ClassVar[bool] = False

    @abc.abstractmethod
    def __call__(self, run: Run) -> tuple[Tensor, int]:
        """The solution of a run, and the number of iterations."""

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

    The recomputation replays the forward pass's random samples, so the gradient is :class:`Unroll`'s. Threads that draw
    from one generator at the same time may draw equal samples.

    Args:
        every: Iterations per segment; None is about √K, which minimises the memory.
    """

    every: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None:
            require_count("every", self.every)

    def __call__(self, run: Run) -> tuple[Tensor, int]:
        """One checkpoint per segment; ``until`` is evaluated at the ends of segments."""
        if transformed():
            # torch.func and forward mode cannot recompute; the derivatives are the same.
            return run.forward()
        total = run.iterations
        every, source = self.every or math.isqrt(total - 1) + 1, _source(run)

        def segment(state: Any, s: int) -> Any:
            def body(state: Any, generator: torch.Generator | None) -> Any:
                advance = dataclasses.replace(run, generator=generator).advance
                return iterate(advance, state, min(every, total - s * every), start=s * every)[0]

            replay = partial(body, generator=run.generator) if source is None else _replaying(body, source)
            keep = source is None and run.solver.stochastic
            return checkpoint(replay, state, use_reentrant=False, preserve_rng_state=keep)

        until = run.until
        reached = None if until is None else lambda state, s: until(state, min(s * every, total))
        state, segments = iterate(segment, run.init(), -(-total // every), until=reached)
        return state.x, min(segments * every, total)


def _source(run: Run) -> torch.Generator | None:
    """The generator that a run draws from; None where there is none, or where torch's checkpoint replays it."""
    y, given = run.problem.y, run.generator
    usual = None if y.device.type != "cpu" or is_traced(y) else torch.default_generator
    return (usual if given is None else given) if run.solver.stochastic else None


def _replaying(body: Callable[[Any, torch.Generator], Any], source: torch.Generator) -> Callable[[Any], Any]:
    """``body`` with a generator of its own, which draws in every call what ``source`` would draw in the first one,
    whatever other threads draw from it meanwhile."""
    begin, calls = source.get_state(), list[None]()

    def replay(state: Any) -> Any:
        calls.append(None)
        own = torch.Generator(source.device).set_state(begin)
        try:
            result = body(state, own)
        except RuntimeError as error:
            if "random operation" not in str(error):
                raise
            raise CapabilityError(
                "Checkpoint cannot draw its samples again for a batch of gradients (is_grads_batched); use Unroll()"
            ) from None
        if len(calls) == 1 and torch.equal(source.get_state(), begin):
            source.set_state(own.get_state())
        return result

    return replay


@dataclasses.dataclass(frozen=True)
class JacobianFree(Adjoint):
    r"""Differentiate one proximal gradient step at the solution, and nothing else.

    With :math:`T(x, \theta) = \operatorname{prox}_{\eta g}(x - \eta\nabla f(x))` and the solution x as a constant,
    every derivative is that of :math:`\theta \mapsto T(x, \theta)`. The gradient
    :math:`\partial_\theta T(x, \theta)^\top v` is the first term of the Neumann series of :class:`Implicit`. It is
    cheap, needs the memory of one step, and is an approximation.

    Source: Fung et al., *Jacobian-free backpropagation*, 2022.
    """

    of_minimizer: ClassVar[bool] = True

    def __call__(self, run: Run) -> tuple[Tensor, int]:
        """The forward pass records nothing."""
        with constant():
            x, done = run.forward()
            solution = run.solution(x)
            step = _step(run.problem, solution)
        if not torch.is_grad_enabled() and not transformed():
            return x, done
        parts = Parts.of(run.ending or run.problem)
        with full_precision(x):
            wide, *tensors = parts.wide(solution, *parts.tensors)
            moved = _forward_backward(parts.build(tensors), wide, step)
        return _replaced_value(x, moved), done


@dataclasses.dataclass(frozen=True)
class Implicit(Adjoint):
    r"""The gradient of the exact minimiser, by the implicit function theorem.

    At the minimiser :math:`x = T(x, \theta)`, so
    :math:`\frac{dx}{d\theta} = (I - \partial_x T)^{-1}\partial_\theta T`. The backward pass solves

    .. math:: u = v + (I - \eta H)\,D\,u, \qquad D = \operatorname{prox}', \quad
        H = A\operatorname{diag}(f''(A^\top x; y))A^\top + \lambda I,

    for separable g in the symmetric form
    :math:`(I - D + \eta D^{1/2} H D^{1/2})\,q = D^{1/2} v`, :math:`u = v + (I-\eta H)D^{1/2}q`, by conjugate
    gradients; for others by conjugate gradients on the normal equations.

    The derivatives are as accurate as the solver has converged, and require that the prox is differentiable at the
    solution. Second derivatives, forward mode and the transforms of torch.func solve systems with the same matrix, or
    with its transpose. Stochastic solvers have no fixed point and are refused.

    Args:
        iters: The maximum number of iterations of the backward solve.
        tol: Its relative tolerance; None: 1e-6, and 1e-12 in double precision.
        method: ``"cg"``, or ``"neumann"`` for the plain series, whose truncation after k terms is a
            compromise between :class:`JacobianFree` and the exact gradient.
    """

    of_minimizer: ClassVar[bool] = True

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
        with constant():
            x, done = run.forward()
            solution = run.solution(x)
            step = _step(run.problem, solution)
        if is_compiled(x) and (torch.compiler.is_exporting() or not torch.is_grad_enabled()):
            return x, done  # the graph has no backward pass
        solution = self._attached(run.problem, step, solution)
        if run.ending is None:
            return solution, done
        # A pre-activation of the exact minimiser is x − ∇f(x).
        return _replaced_value(x, solution + run.problem.descent(solution, run.problem.linear())), done

    @torch.compiler.disable
    def _attached(self, problem: Problem, step: float | Tensor, x: Tensor) -> Tensor:
        # Not compiled: the backward solve ends when it has converged.
        parts = Parts.of((dataclasses.replace(problem, operator=problem.operator.with_bounds(None)), step))
        return attached(_FixedPoint(parts, self), x, parts)


@dataclasses.dataclass(frozen=True)
class _FixedPoint(Equation):
    r"""The equation :math:`T(x, \theta) - x = 0`. Its derivative in x is :math:`D(I - \eta H) - I`, with
    :math:`D = \operatorname{prox}'` symmetric."""

    parts: Parts
    options: Implicit

    def residual(self, x: Tensor, *params: Tensor) -> Tensor:
        problem, step, x = self._at(x, params)
        return _forward_backward(problem, x, step) - x

    def product(self, u: Tensor, transposed: bool, x: Tensor, *params: Tensor) -> Tensor:
        contract, derivative = self._maps(x, params)
        return u - (contract(derivative(u)) if transposed else derivative(contract(u)))

    def inverse(self, b: Tensor, transposed: bool, x: Tensor, *params: Tensor) -> Tensor:
        contract, derivative = self._maps(x, params)
        (b,), options = self.parts.wide(b), self.options
        tol = options.tol or (1e-12 if b.dtype == torch.float64 else 1e-6)
        first, second = (derivative, contract) if transposed else (contract, derivative)
        if options.method == "neumann":
            return _neumann(lambda u: second(first(u)), b, options.iters, tol)
        problem = self.parts.whole[0]
        dims = problem.output_dims
        solve = partial(conjugate_gradient, iterations=options.iters, sample_dims=dims, tol=tol)
        if problem.function.separable:
            direct = solved_on_active_set(*self._at(x, params), b, transposed, (contract, derivative))
            if direct is not None:
                return direct
            # (I − DC)⁻¹ = I + D(I − CD)⁻¹C, so both systems take the same symmetric one.
            root = derivative(torch.ones_like(b)).clamp_min(0).sqrt()
            v = b if transposed else contract(b)
            u = v + contract(root * solve(lambda q: q - root * contract(root * q), root * v))
            return u if transposed else b + root.square() * u
        # There is no symmetric form without a square root of D.
        forward = lambda u: u - second(first(u))  # noqa: E731
        backward = lambda u: u - first(second(u))  # noqa: E731
        return solve(lambda u: backward(forward(u)), backward(b))

    def _at(self, x: Tensor, params: Sequence[Tensor]) -> tuple[Problem, float | Tensor, Tensor]:
        x, *params = self.parts.wide(x, *params)
        problem, step = self.parts.build(params)
        return problem, step, x

    def _maps(self, x: Tensor, params: Sequence[Tensor]) -> tuple[Linear, Linear]:
        """The symmetric maps C = I − ηH and D."""
        problem, step, x = self._at(x, params)
        pull = pullback(lambda v: problem.prox(v, step), x + step * problem.descent(x, problem.linear()))

        def derivative(u: Tensor) -> Tensor:
            (product,) = pull(u)
            return torch.zeros_like(u) if product is None else product

        return problem.contraction(x, step), derivative


def _step(problem: Problem, x: Tensor) -> float | Tensor:
    return as_number(reciprocal(problem.smoothness(x)))


def _forward_backward(problem: Problem, x: Tensor, step: float | Tensor) -> Tensor:
    """One proximal gradient step T(x)."""
    return problem.prox(x + step * problem.descent(x, problem.linear()), step)


def _neumann(apply: Linear, v: Tensor, iterations: int, tol: float) -> Tensor:
    """The series v + Jv + J²v + …, until a term is below the tolerance."""

    def add(state: tuple[Tensor, Tensor], k: int) -> tuple[Tensor, Tensor]:
        total, term = state
        term = apply(term)
        return total + term, term

    def small(state: tuple[Tensor, Tensor], done: int) -> bool:
        total, term = state
        return holds(term.norm() <= tol * total.norm())

    return iterate(add, (v, v), iterations, until=small)[0][0]


def _replaced_value(value: Tensor, like: Tensor) -> Tensor:
    """A value that is constant, with the derivatives of ``like``."""
    with constant():
        fixed = like.detach()
    return value + (like - fixed).to(value.dtype)

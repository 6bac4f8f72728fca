"""Roots of increasing scalar functions, solved entry by entry and differentiated implicitly.

A prox without a closed form states its optimality condition as an :class:`Increasing` equation; :func:`root` solves
it. The library has no other root finder.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..tracing import constant, forward_rule, holds, is_compiled
from .base import Separable, Step, widened

__all__ = ["Increasing", "bracketed", "mean_preactivation", "precise", "root"]

QUICK_ITERATIONS = 8
#: Limits for functions that are not increasing, which may not converge. Increasing functions never reach them.
EAGER_ITERATIONS = 300
BRACKET_ITERATIONS = 120


class Increasing(abc.ABC):
    r"""The equation :math:`h(z, \eta) = a` with :math:`h` strictly increasing in ``z``.

    Attributes:
        iterations: The number of Newton iterations under tracing, where the loop cannot stop at convergence. It is
            the largest number needed for steps from 1e-4 to 1e4 and targets up to 1e4.
    """

    iterations: ClassVar[int] = 24

    @abc.abstractmethod
    def left(self, z: Tensor, step: Step) -> Tensor:
        r"""The left-hand side :math:`h(z, \eta)`."""

    @abc.abstractmethod
    def slope(self, z: Tensor, step: Step) -> Tensor:
        r"""The derivative :math:`\partial h/\partial z > 0`, in differentiable operations."""

    @abc.abstractmethod
    def sensitivity(self, z: Tensor, step: Step) -> Tensor:
        r"""The derivative :math:`\partial h/\partial\eta`, in differentiable operations."""

    def tangent(self, z: Tensor, step: Step) -> Tensor | None:
        """The slope if it can be computed without autograd; None: the iteration uses secants."""
        return self.slope(z, step)

    def varies(self, like: Tensor) -> bool:
        """Whether the equation holds tensors, besides its arguments, in which derivatives may be asked for."""
        return False

    @abc.abstractmethod
    def slopes(self, step: Step) -> tuple[Step, Step]:
        """A lower and an upper bound of the slope."""

    @abc.abstractmethod
    def bracket(self, target: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """A lower bound, a starting point and an upper bound of the root."""


def precise(x: Tensor, step: Step) -> Tensor:
    """The point in a type in which the root of its step has the relative accuracy of single precision."""
    moderate = not isinstance(step, Tensor) and 1 / 64 <= step <= 1
    return widened(x) if moderate or x.device.type == "mps" else widened(x).double()


def root(equation: Increasing, target: Tensor, step: Step) -> Tensor:
    r"""The root :math:`z(a, \eta)` of :math:`h(z, \eta) = a`, differentiable any number of times.

    The implicit function theorem gives :math:`\partial z/\partial a = 1/h_z` and
    :math:`\partial z/\partial\eta = -h_\eta/h_z`; the iterations themselves are never differentiated. Where the
    equation holds tensors of its own, such as a learned scale, two Newton steps at the root have its derivatives in
    everything, up to the third.
    """
    if isinstance(step, Tensor):
        target, step = torch.broadcast_tensors(target, step)
    if equation.varies(target):
        with constant():
            z = newton(equation, target.detach(), step)
        for _ in range(2):
            z = z - (equation.left(z, step) - target) / equation.slope(z, step)
        return z
    rule = _CompiledRoot if is_compiled(target) else _Root
    return rule.apply(equation, target, step)


class _CompiledRoot(torch.autograd.Function):
    """The root and its gradient by the implicit function theorem; a step that is a number stays one."""

    @staticmethod
    def forward(equation: Increasing, target: Tensor, step: Step) -> Tensor:
        return newton(equation, target, step)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Increasing, Tensor, Step], output: Tensor) -> None:
        ctx.equation, _, step = inputs
        ctx.step = None if isinstance(step, Tensor) else step
        saved = (output, step) if isinstance(step, Tensor) else (output,)
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor | None]:
        z, step = _saved(ctx, ctx.saved_tensors)
        scaled = grad / ctx.equation.slope(z, step)
        return None, scaled, -scaled * ctx.equation.sensitivity(z, step) if ctx.needs_input_grad[2] else None


class _Root(_CompiledRoot):
    """The same with forward-mode derivatives and vmap, which torch.compile refuses to trace."""

    generate_vmap_rule = True

    @forward_rule
    def jvp(ctx: Any, saved: list[Tensor], _: None, target: Tensor | None, step_tangent: Tensor | None) -> Tensor:
        z, step = _saved(ctx, saved)
        change = torch.zeros_like(z) if target is None else target
        if step_tangent is not None:
            change = change - ctx.equation.sensitivity(z, step) * step_tangent
        return change / ctx.equation.slope(z, step)


def _saved(ctx: Any, saved: Sequence[Tensor]) -> tuple[Tensor, Step]:
    z, *step = saved
    return z, step[0] if step else ctx.step


def newton(equation: Increasing, target: Tensor, step: Step) -> Tensor:
    """Newton's method with bisection as a safeguard.

    A step that would leave the bracket is replaced by bisection. Without a derivative the slope is that of the last
    secant, and three secant steps that do not halve the residual are followed by bisection.
    """
    low, z, high = equation.bracket(target, step)
    tracing = is_compiled(target)
    if not tracing and (quick := _clamped_newton(equation, target, step, low, z, high)) is not None:
        return quick
    eps, scale = torch.finfo(target.dtype).eps, target.abs() + 0.1
    residual = mark = equation.left(z, step) - target
    slope = torch.zeros_like(z) + equation.slopes(step)[1]
    large = moving = torch.ones_like(z, dtype=torch.bool)
    for count in range(equation.iterations if tracing else EAGER_ITERATIONS):
        below = residual < 0
        gap = torch.where(below, high, low) - z
        low, high = torch.where(below, z, low), torch.where(below, high, z)
        tangent = equation.tangent(z, step)
        move = -residual / (slope if tangent is None else tangent)
        if tangent is None and count % 3 == 2:
            stalled = moving & (residual.abs() > 0.5 * mark.abs())
            move, mark = torch.where(stalled, gap, move), residual
        move = torch.where(move.abs() < gap.abs(), move, 0.5 * gap)
        z, previous = z + move, residual
        # The error after a Newton step is of the order of its square. A secant may span a kink, so the secant method
        # needs two short steps to stop.
        large, before = move.abs() > eps ** (0.75 if tangent is not None else 0.9) * (z.abs() + scale), large
        moving = large | before if tangent is None else large
        if holds(~moving):
            break
        residual = equation.left(z, step) - target
        if tangent is None:
            slope = torch.where(moving, _secant(residual - previous, move, *equation.slopes(step)), slope)
    return z


def _clamped_newton(
    equation: Increasing, target: Tensor, step: Step, low: Tensor, z: Tensor, high: Tensor
) -> Tensor | None:
    """Newton's method clamped to the initial bracket; None if it has not converged. It takes a third of the work."""
    limit = torch.finfo(target.dtype).eps ** 0.75 * (target.abs() + 0.1)
    for count in range(QUICK_ITERATIONS):
        tangent = equation.tangent(z, step)
        if tangent is None:
            return None
        move = (target - equation.left(z, step)) / tangent
        z = torch.clamp(z + move, low, high)
        if count >= 2 and holds(move.abs() <= limit):
            return z
    return None


def _secant(rise: Tensor, run: Tensor, flattest: Step, steepest: Step) -> Tensor:
    """The slope of a secant, clamped to its bounds; the steepest slope if the secant has zero length."""
    slope = torch.where(run == 0, torch.zeros_like(run) + steepest, rise / run)
    if isinstance(flattest, Tensor) or isinstance(steepest, Tensor):
        return torch.clamp(slope, torch.as_tensor(flattest), torch.as_tensor(steepest))
    return slope.clamp(flattest, steepest)


def bracketed(function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """A root of a non-decreasing function between ``low`` and ``high``, without derivatives.

    Chandrupatla's method (1997): inverse quadratic interpolation where it is safe, bisection elsewhere.
    """
    eps = torch.finfo(low.dtype).eps
    tiny = torch.finfo(low.dtype).tiny
    x1, x2 = high, low
    f1, f2 = function(x1), function(x2)
    best = torch.where(f1.abs() < f2.abs(), x1, x2)
    done = torch.zeros_like(low, dtype=torch.bool)
    t = torch.full_like(low, 0.5)
    for _ in range(BRACKET_ITERATIONS):
        trial = x1 + t * (x2 - x1)
        value = function(trial)
        same = torch.sign(value) == torch.sign(f1)
        x3, f3 = torch.where(same, x1, x2), torch.where(same, f1, f2)
        x2, f2 = torch.where(same, x2, x1), torch.where(same, f2, f1)
        x1, f1 = trial, value
        nearer = f1.abs() < f2.abs()
        best = torch.where(done, best, torch.where(nearer, x1, x2))
        limit = 2 * eps * (best.abs() + 1e-6) / (x2 - x1).abs().clamp_min(tiny)
        done = done | (limit > 0.5) | (torch.minimum(f1.abs(), f2.abs()) == 0)
        if holds(done | ~torch.isfinite(f1)):
            break
        t = _interpolate(x1, x2, x3, f1, f2, f3)
        t = torch.minimum(torch.maximum(t, limit), 1 - limit)
    return best


def _interpolate(x1: Tensor, x2: Tensor, x3: Tensor, f1: Tensor, f2: Tensor, f3: Tensor) -> Tensor:
    """The next fraction of the bracket: inverse quadratic interpolation, or one half where it is unsafe."""
    xi = (x1 - x2) / (x3 - x2)
    phi = (f1 - f2) / (f3 - f2)
    safe = (phi * phi < xi) & ((1 - phi) ** 2 < 1 - xi)
    first = f1 / (f2 - f1) * (f3 / (f2 - f3))
    second = (x3 - x1) / (x2 - x1) * (f1 / (f3 - f1)) * (f2 / (f3 - f2))
    return torch.where(safe, first + second, 0.5)


def mean_preactivation(function: Separable, z: Tensor) -> Tensor:
    """A point at which the activation is the mean of the activations at ``z`` along the first dimension."""
    mean = function.prox(z).mean(0)
    target, low, high = mean.detach(), z.detach().amin(0), z.detach().amax(0)
    point = bracketed(lambda t: function.prox(t) - target, low, high)
    if not mean.requires_grad:
        return point
    with torch.enable_grad():
        inner = point.requires_grad_()
        (slope,) = torch.autograd.grad(function.prox(inner).sum(), inner)
    # The activation at the point may have parameters, too.
    return point.detach() + torch.where(slope > 0, (mean - function.prox(point.detach())) / slope, 0.0)

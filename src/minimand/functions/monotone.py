"""The function whose prox is a given non-decreasing 1-Lipschitz activation, for every step."""

import functools
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..arguments import checked
from ..errors import NotProximal, OptionError
from ..tracing import constant, forward_rule, is_compiled, pullback, unwrapped, varies
from .base import Separable, Step, check_step, widened
from .scalar import Increasing, bracketed, precise, root

__all__ = ["Monotone"]

#: An entry-by-entry map of tensors.
Elementwise = Callable[[Tensor], Tensor]


@checked
@dataclass(frozen=True, repr=False)
class Monotone(Separable):
    r"""The convex function whose prox at step 1 is a given activation :math:`\varphi`.

    For :math:`\varphi` non-decreasing with slope at most 1,

    .. math::

        f(x) = \int_{\varphi(0)}^x \varphi^{-1}(s)\,ds - \tfrac12 x^2, \qquad
        \operatorname{prox}_f = \varphi

    ([Lin2019], Table 1). Its prox at step :math:`\eta` is :math:`\varphi(z)` at the root of

    .. math:: (1 - \eta)\,\varphi(z) + \eta z = a ,

    whose left-hand side increases in ``z`` with a slope between :math:`\eta` and 1. No inverse of :math:`\varphi` is
    needed. The additive constant of f is chosen such that the Fenchel–Young equality
    :math:`f(x) + \tfrac12 x^2 + \int_0^z \varphi = zx` holds at :math:`x = \varphi(z)`.

    :math:`0 \le \varphi' \le 1` is checked on a grid over [−20, 20]; outside it the caller is responsible.
    Steps above 1 and below 1/64 are computed in float64: long steps amplify the rounding error of
    :math:`z - \varphi(z)`, and after short steps of a layer with large weights the solution is far smaller than z.

    Args:
        phi: The activation, applied to tensors entry by entry.
        derivative: Its derivative. Without it the root is found by the secant method, and the gradient by autograd
            of ``phi``.
        integral: :math:`z \mapsto \int_0^z \varphi`; default: quadrature (relative error about 1e-8
            for smooth activations, 1e-5 for kinked ones).
        inverse_integral: :math:`x \mapsto \int_{\varphi(0)}^x \varphi^{-1}`, +inf outside the range of
            :math:`\varphi`; default: from the Fenchel–Young equality.

    Example:
        >>> g = Monotone(torch.tanh)
        >>> x = torch.tensor([-1.0, 0.5, 3.0])
        >>> torch.equal(g.prox(x), torch.tanh(x))
        True
        >>> p = g.prox(x, 0.5)  # the optimality condition of the step ½
        >>> torch.allclose(0.5 * (torch.atanh(p) - p) + p, x, atol=1e-5)
        True
    """

    phi: Elementwise
    derivative: Elementwise | None = None
    _: KW_ONLY
    integral: Elementwise | None = None
    inverse_integral: Elementwise | None = None

    def __post_init__(self) -> None:
        if not callable(self.phi):
            raise OptionError(f"phi must map a tensor entry by entry, got {self.phi!r}")
        _require_monotone(self.phi)

    def __repr__(self) -> str:
        if isinstance(self.phi, functools.partial):
            options = "".join(f", {name}={value}" for name, value in self.phi.keywords.items())
            return f"Monotone({self.phi.func.__name__}{options})"
        return f"Monotone({getattr(self.phi, '__name__', self.phi)})"

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """``phi(x)`` at step 1; otherwise computed from the root."""
        return self.phi(self._root(x, step)).to(x.dtype)

    def preactivation(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """``x`` at step 1; otherwise the root."""
        return self._root(x, step).to(x.dtype)

    def _root(self, x: Tensor, step: Step) -> Tensor:
        if not isinstance(check_step(step, x), Tensor) and step == 1:
            return x
        work = precise(x, step)
        step = step.to(work.dtype) if isinstance(step, Tensor) else step
        return root(_Optimality(self.phi, self.derivative), work, step)

    def values(self, x: Tensor) -> Tensor:
        """f at each entry, +inf outside the closure of the range of ``phi``."""
        # A difference of two squares of x, which cancels in single precision for large x.
        wide = x if x.device.type == "mps" else x.double()
        return (self._lifted(wide) - 0.5 * wide * wide).to(x.dtype)

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        """The Fenchel–Young gap, from the integral of the inverse, which is what is known here."""
        x, z = widened(x), widened(z)
        p = self.prox(z)
        return self._lifted(x) - self._lifted(p) - z * (x - p)

    def _lifted(self, x: Tensor) -> Tensor:
        if self.inverse_integral is not None:
            return self.inverse_integral(x)
        with constant():
            z, attained = _inverse(self.phi, x.detach())
        # z maximises zx − ∫φ, so by the envelope theorem it counts as a constant in the derivative.
        return torch.where(attained, z * x - self.primitive(z), float("inf"))

    def primitive(self, z: Tensor) -> Tensor:
        r"""The integral :math:`\int_0^z \varphi(s)\,ds`, entry by entry."""
        z = widened(z)
        if self.integral is not None:
            return self.integral(z)
        return _quadrature(self.phi, z) if _has_parameters(self.phi, z) else _Quadrature.apply(self.phi, z)


def _require_monotone(phi: Elementwise) -> None:
    """Check on a grid that an activation is non-decreasing with slope at most 1."""
    anchor = next(phi.parameters(), None) if isinstance(phi, nn.Module) else None
    grid = torch.linspace(-20.0, 20.0, 401) if anchor is None else torch.linspace(-20.0, 20.0, 401).to(anchor)
    with torch.no_grad():
        image = phi(grid)
        if not isinstance(image, Tensor) or image.shape != grid.shape:
            raise OptionError(f"phi must map a tensor entry by entry, but {phi!r} changes its shape")
        slopes = unwrapped(torch.diff(image) / torch.diff(grid), batches=True)
    if not bool((slopes >= -1e-3).all()) or not bool((slopes <= 1 + 1e-3).all()):
        raise NotProximal(
            f"{getattr(phi, '__name__', phi)} has slopes from {float(slopes.min()):.3g} to "
            f"{float(slopes.max()):.3g} on [-20, 20], and only slopes between 0 and 1 make a prox; "
            "rescale it or use a monotone relative such as softplus or elu"
        )


@dataclass(frozen=True)
class _Optimality(Increasing):
    r"""The equation :math:`(1-\eta)\varphi(z) + \eta z = a` of the prox."""

    phi: Elementwise
    derivative: Elementwise | None

    def left(self, z: Tensor, step: Step) -> Tensor:
        image = self.phi(z)
        return image + step * (z - image)

    def slope(self, z: Tensor, step: Step) -> Tensor:
        slope = _autograd_slope(self.phi, z) if self.derivative is None else self.derivative(z)
        return slope + step * (1 - slope)

    def tangent(self, z: Tensor, step: Step) -> Tensor | None:
        return None if self.derivative is None else self.slope(z, step)

    def varies(self, like: Tensor) -> bool:
        return _has_parameters(self.phi, like)

    def slopes(self, step: Step) -> tuple[Step, Step]:
        if isinstance(step, Tensor):
            return step.clamp(max=1), step.clamp(min=1)
        return min(step, 1.0), max(step, 1.0)

    def sensitivity(self, z: Tensor, step: Step) -> Tensor:
        return z - self.phi(z)

    def bracket(self, target: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        residual = self.left(target, step) - target
        ends = target - residual, target - residual / step
        # Rounding of the residual may move an end past the root by a few units in the last place.
        margin = 8 * torch.finfo(target.dtype).eps * (target.abs() + residual.abs() + step)
        margin = margin / self.slopes(step)[0]
        return torch.minimum(*ends) - margin, target, torch.maximum(*ends) + margin


def _has_parameters(phi: Elementwise, like: Tensor) -> bool:
    """Whether an activation depends on tensors of its own in which derivatives may be asked for."""
    return varies(phi(torch.zeros(1, dtype=like.dtype, device=like.device)))


def _autograd_slope(phi: Elementwise, z: Tensor) -> Tensor:
    """phi′(z) by autograd, itself differentiable."""
    if is_compiled(z):
        slope: Tensor | None = torch.func.grad(lambda point: phi(point).sum())(z)
    else:
        (slope,) = pullback(phi, z)(torch.ones_like(z))
    return torch.zeros_like(z) if slope is None else slope


def _inverse(phi: Elementwise, x: Tensor) -> tuple[Tensor, Tensor]:
    """Some z with phi(z) = x, and whether x lies in the closure of the range, up to rounding."""
    origin = phi(torch.zeros_like(x))
    # Slopes are at most 1, so z lies at least this far from the origin. There is no z if x is outside the range.
    away = (x - origin).abs()
    far = torch.where(away > 0, away, torch.ones_like(away)) * 2.0**40 + 1e3
    upper = torch.where(x >= origin, far, torch.zeros_like(far))
    lower = torch.where(x >= origin, torch.zeros_like(far), -far)
    high, low = phi(upper), phi(lower)
    tolerance = 8 * torch.finfo(x.dtype).eps * (1 + x.abs())
    attained = (x <= high + tolerance) & (x >= low - tolerance)
    clipped = torch.minimum(torch.maximum(x, low), high)
    # In u = asinh z, so that bisection resolves small and large z alike.
    u = bracketed(lambda u: phi(torch.sinh(u)) - clipped, torch.asinh(lower), torch.asinh(upper))
    return torch.sinh(u), attained


def _quadrature(phi: Elementwise, z: Tensor) -> Tensor:
    r"""The integral of :math:`\varphi` from 0 by composite Gauss–Legendre quadrature.

    The substitution :math:`s = \sinh u` places most nodes near the origin, where activations are curved.
    """
    span = torch.asinh(z)
    total = torch.zeros_like(z)
    for position, weight in _nodes():
        u = span * position
        total = total + weight * phi(torch.sinh(u)) * torch.cosh(u)
    return total * span


class _Quadrature(torch.autograd.Function):
    """The quadrature of an activation without parameters, differentiated exactly."""

    generate_vmap_rule = True

    @staticmethod
    def forward(phi: Elementwise, z: Tensor) -> Tensor:
        return _quadrature(phi, z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Elementwise, Tensor], output: Tensor) -> None:
        ctx.phi, z = inputs
        ctx.save_for_backward(z)
        ctx.save_for_forward(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (z,) = ctx.saved_tensors
        return None, grad * ctx.phi(z)

    @forward_rule
    def jvp(ctx: Any, saved: list[Tensor], _: None, tangent: Tensor) -> Tensor:
        return tangent * ctx.phi(*saved)


@functools.cache
def _nodes(panels: int = 24, order: int = 10) -> list[tuple[float, float]]:
    """Positions and weights on [0, 1]."""
    points, weights = np.polynomial.legendre.leggauss(order)
    return [
        (float((panel + 0.5 + 0.5 * point) / panels), float(0.5 * weight / panels))
        for panel in range(panels)
        for point, weight in zip(points, weights, strict=True)
    ]

r"""The direction :math:`G(A^\top A + I/\tau_\theta)^{-1}` of one layer, in the space where it is cheap.

:math:`A` has one row per sample and position, :math:`\delta` the gradients at the layer's outputs,
:math:`G = \delta^\top A`. With fewer rows than columns the dual form
:math:`[(AA^\top + I/\tau_\theta)^{-1}\delta]^\top A` needs only the small Gram matrix; both are equal.
Source: 004, Proposition 2, eqs. 13–16 and 44.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...linalg import gram
from ...solvers.linear import RidgeFactor, conjugate_gradient, gram_factor
from .options import Options

__all__ = ["Metric", "Pair", "Rows", "added", "dual", "dual_of_gradient", "relate", "scaled", "working"]

# Above this estimate of rounding a system is made and factored in float64 instead: directions keep three digits.
_ROUNDING = 1e-3

# Output units whose conjugate gradients run together: few enough that their vectors stay in a cache.
_UNITS = 256


class Pair(NamedTuple):
    """What belongs to a weight, as a matrix of outputs × columns, and to a bias; None where it is not trained."""

    weight: Tensor | None
    bias: Tensor | None


def working(tensor: Tensor) -> Tensor:
    """The tensor in float32 or float64."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


@dataclass(frozen=True)
class Rows:
    """Inputs ``a`` (rows × columns) and output gradients ``delta`` (rows × outputs); ``ones`` appends such a column."""

    a: Tensor
    delta: Tensor
    ones: bool

    def gradient(self) -> Pair:
        """The plain gradient δᵀA."""
        return Pair(self.delta.mT @ self.a, self.delta.sum(0) if self.ones else None)

    def kernel(self, double: bool = False, half: bool = False) -> Tensor:
        """AAᵀ; with ``half`` only its lower triangle."""
        product = gram(self.a.double() if double else self.a, half=half)
        return product.add_(1.0) if self.ones else product

    def apply(self, v: Pair) -> Tensor:
        """v Aᵀ."""
        assert v.weight is not None
        image = v.weight @ self.a.mT
        return image if v.bias is None else image + v.bias[:, None]

    def adjoint(self, c: Tensor, into: Tensor | None = None) -> Pair:
        """c A, for c of outputs × rows; the weight's part is written ``into`` a tensor, if there is one."""
        fits = into is not None and into.dtype == c.dtype and into.shape == (len(c), self.a.shape[1])
        weight = torch.mm(c, self.a, out=into) if fits else c @ self.a
        return Pair(weight, c.sum(1) if self.ones else None)

    def then(self, other: "Rows") -> "Rows":
        """Both sets of rows."""
        return Rows(torch.cat([self.a, other.a]), torch.cat([self.delta, other.delta]), self.ones)


def _accurate(factor: RidgeFactor) -> bool:
    return factor.factor.dtype == torch.float64 or (factor.damping == 0 and factor.rounding() <= _ROUNDING)


def _kernel_factor(rows: Rows, shift: float) -> RidgeFactor:
    factor = gram_factor(rows.kernel(half=True), shift)
    return factor if _accurate(factor) else gram_factor(rows.kernel(double=True, half=True), shift)


def _solve(factor: RidgeFactor, rows: Tensor) -> Tensor:
    # One product with the inverse beats two triangular solves if there are many rows.
    if rows.shape[-2] < 1.5 * rows.shape[-1]:
        return factor.solve(rows)
    return rows @ factor.inverse().to(rows.dtype)


def dual(rows: Rows, options: Options, into: Tensor | None = None) -> Pair:
    """The direction of the gradient δᵀA, from δ; written ``into`` a tensor, if there is one."""
    if options.method == "cg":
        return rows.adjoint(_dual_conjugate(rows, options), into)
    return rows.adjoint(_solve(_kernel_factor(rows, options.shift), rows.delta.mT), into)


def _conjugate(apply: Callable[[Tensor], Tensor], target: Tensor, options: Options, **how: Any) -> Tensor:
    return conjugate_gradient(apply, target, options.cg_iters, tol=options.cg_tol, **how)


def _dual_conjugate(rows: Rows, options: Options) -> Tensor:
    """Coefficients c of the k-th iterate cA, of outputs × rows.

    A vector cA is held as the pair (c, cK), K = AAᵀ: its inner product with dA is ⟨c, dK⟩, and one product with K is
    all that an iteration costs. The iterates are those of conjugate gradients in the weights.
    """
    kernel = rows.kernel()
    start = rows.delta.mT

    def apply(v: Tensor) -> Tensor:
        c, image = v.unbind(-2)
        out = torch.empty_like(v)
        torch.add(image, c, alpha=options.shift, out=out[:, 0])
        torch.addmm(image, image, kernel, beta=options.shift, out=out[:, 1])
        return out

    def inner(u: Tensor, v: Tensor) -> Tensor:
        return (u[:, 0] * v[:, 1]).sum(-1)[:, None, None]

    def some(units: Tensor) -> Tensor:
        pairs = torch.stack([units, units @ kernel], -2)
        return _conjugate(apply, pairs, options, sample_dims=2, inner=inner)[:, 0]

    return torch.cat([some(units) for units in start.split(_UNITS)])


def dual_of_gradient(rows: Rows, received: Pair, options: Options) -> Pair:
    r"""The direction of a gradient that was changed after it was accumulated (unscaled, clipped, decayed …).

    Written as :math:`c\,\delta^\top A + E`, which holds for any scalar c, the first part is solved from δ, without
    cancellation, and the rest, which is rounding or small, by the Woodbury identity
    :math:`\tau_\theta(E - EA^\top(AA^\top + I/\tau_\theta)^{-1}A)`.
    """
    scale, rest = relate(received, rows.gradient())
    if rest is None:
        return scaled(dual(rows, options), scale)
    if options.method == "cg":
        return _free_conjugate(rows, received, options)
    factor = _kernel_factor(rows, options.shift)
    solved = rows.adjoint(_solve(factor, rows.delta.mT))
    projected = rows.adjoint(_solve(factor, rows.apply(rest)))
    return added(scaled(solved, scale), _map(lambda e, p: (e - p) / options.shift, rest, projected))


def _free_conjugate(rows: Rows, received: Pair, options: Options) -> Pair:
    """Conjugate gradients in the weights with two products by A for each iteration, and no Gram matrix."""
    assert received.weight is not None
    target = received.weight if received.bias is None else torch.cat([received.weight, received.bias[:, None]], 1)

    def apply(v: Tensor) -> Tensor:
        pair = Pair(v[:, :-1], v[:, -1]) if rows.ones else Pair(v, None)
        back = rows.adjoint(rows.apply(pair))
        assert back.weight is not None
        image = back.weight if back.bias is None else torch.cat([back.weight, back.bias[:, None]], 1)
        return image + options.shift * v

    x = _conjugate(apply, target, options)
    return Pair(x[:, :-1], x[:, -1]) if rows.ones else Pair(x, None)


@dataclass(frozen=True)
class Metric:
    """The Gram matrix of many rows (groups × n × n) with the ridge; factored once, when a direction is asked for."""

    gram: Tensor
    shift: float

    @functools.cached_property
    def _first(self) -> RidgeFactor:
        return gram_factor(self.gram, self.shift)

    @functools.cached_property
    def accurate(self) -> bool:
        """Whether the Gram matrix has the digits that a solve needs."""
        return _accurate(self._first)

    @functools.cached_property
    def _factor(self) -> RidgeFactor:
        return self._first if self.accurate else gram_factor(self.gram.double(), self.shift)

    @functools.cached_property
    def _inverse(self) -> Tensor:
        return self._factor.inverse()

    def direction(self, gradient: Tensor, options: Options) -> Tensor:
        """The direction of a gradient, groups × outputs × n."""
        if options.method == "cg":
            return _conjugate(lambda v: v @ self.gram + self.shift * v, gradient, options)
        if gradient.shape[-2] < 1.5 * gradient.shape[-1]:
            return self._factor.solve(gradient)
        return (gradient.to(self._inverse.dtype) @ self._inverse).to(gradient.dtype)

    def gradient(self, direction: Tensor) -> Tensor:
        """What a direction is made from by an exact solve."""
        return (direction.to(self.gram.dtype) @ self.gram).to(direction.dtype) + self.shift * direction


def relate(changed: Pair, made: Pair) -> tuple[Tensor, Pair | None]:
    """A scalar c and a rest E with which ``changed`` = c · ``made`` + E; None for E where it is rounding.

    The scalar is read off where ``made`` is largest: exact to rounding if there is nothing but one.
    """
    known = [(c, m) for c, m in zip(changed, made, strict=True) if c is not None and m is not None]
    first, second = known[0]
    place = second.abs().argmax()
    whole, part = first.flatten()[place].double(), second.flatten()[place].double()
    scale = torch.where(part != 0, whole / part, torch.zeros_like(part))
    rest = _map(lambda g, m: g - (scale * m).to(g.dtype), changed, made)
    close = 4 * torch.finfo(second.dtype).eps
    pairs = [(r, g) for r, g in zip(rest, changed, strict=True) if r is not None and g is not None]
    return scale, None if all(bool((r.abs() <= close * g.abs()).all()) for r, g in pairs) else rest


def scaled(pair: Pair, scale: Tensor) -> Pair:
    """A multiple of both."""
    return _map(lambda t: t * scale.to(t.dtype), pair)


def added(first: Pair, second: Pair) -> Pair:
    """The sum."""
    return _map(torch.add, first, second)


def _map(function, *pairs: Pair) -> Pair:  # type: ignore[no-untyped-def]
    weights, biases = zip(*pairs, strict=True)
    weight = None if any(w is None for w in weights) else function(*weights)
    return Pair(weight, None if any(b is None for b in biases) else function(*biases))

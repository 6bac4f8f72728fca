r"""The direction :math:`G(A^\top A + I/\tau_\theta)^{-1}` of one layer, by a linear solve with the smaller Gram matrix.

:math:`A` has one row per sample and position, :math:`\delta` holds the gradients at the layer's outputs, and
:math:`G = \delta^\top A`. With fewer rows than columns the equal dual form
:math:`[(AA^\top + I/\tau_\theta)^{-1}\delta]^\top A` needs only the smaller Gram matrix.
Source: [Frerix2018], Proposition 2, eqs. 13–16 and 44.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...linalg import gram
from ...solvers.linear import RidgeFactor, conjugate_gradient, gram_factor
from .options import ProxPropOptions

__all__ = [
    "LayerRows",
    "Metric",
    "WeightBias",
    "added",
    "as_multiple",
    "direction_of_changed_gradient",
    "dual_direction",
    "scaled",
    "to_working_precision",
]

# A system whose estimated rounding error exceeds this is formed and factored in float64: directions keep three digits.
_ROUNDING = 1e-3

# Output units whose conjugate gradients run together; few enough that their vectors stay in the processor's cache.
_UNITS = 256


class WeightBias(NamedTuple):
    """A gradient or direction: the weight's part as outputs × columns, and the bias's. None if not trained."""

    weight: Tensor | None
    bias: Tensor | None


def to_working_precision(tensor: Tensor) -> Tensor:
    """The tensor in float32 or float64."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


@dataclass(frozen=True)
class LayerRows:
    """Inputs ``a`` (rows × columns) and output gradients ``delta`` (rows × outputs); ``ones``: A has a ones column."""

    a: Tensor
    delta: Tensor
    ones: bool

    def gradient(self) -> WeightBias:
        """The plain gradient δᵀA."""
        return WeightBias(self.delta.mT @ self.a, self.delta.sum(0) if self.ones else None)

    def kernel(self, double: bool = False, half: bool = False) -> Tensor:
        """AAᵀ; with ``half`` only the lower triangle is valid."""
        product = gram(self.a.double() if double else self.a, half=half)
        return product.add_(1.0) if self.ones else product

    def apply(self, v: WeightBias) -> Tensor:
        """v Aᵀ."""
        assert v.weight is not None
        image = v.weight @ self.a.mT
        return image if v.bias is None else image + v.bias[:, None]

    def adjoint(self, c: Tensor, into: Tensor | None = None) -> WeightBias:
        """c A for c of outputs × rows. The weight's part is written ``into`` a given tensor of the right shape."""
        fits = into is not None and into.dtype == c.dtype and into.shape == (len(c), self.a.shape[1])
        weight = torch.mm(c, self.a, out=into) if fits else c @ self.a
        return WeightBias(weight, c.sum(1) if self.ones else None)

    def then(self, other: "LayerRows") -> "LayerRows":
        """The rows of both, stacked."""
        return LayerRows(torch.cat([self.a, other.a]), torch.cat([self.delta, other.delta]), self.ones)


def _accurate(factor: RidgeFactor) -> bool:
    return factor.factor.dtype == torch.float64 or (factor.damping == 0 and factor.rounding() <= _ROUNDING)


def _kernel_factor(rows: LayerRows, shift: float) -> RidgeFactor:
    factor = gram_factor(rows.kernel(half=True), shift)
    return factor if _accurate(factor) else gram_factor(rows.kernel(double=True, half=True), shift)


def _solve(factor: RidgeFactor, rows: Tensor) -> Tensor:
    # With many rows one product with the inverse is faster than two triangular solves.
    if rows.shape[-2] < 1.5 * rows.shape[-1]:
        return factor.solve(rows)
    return rows @ factor.inverse().to(rows.dtype)


def dual_direction(rows: LayerRows, options: ProxPropOptions, into: Tensor | None = None) -> WeightBias:
    """The direction of the gradient δᵀA, solved from δ; written ``into`` a given tensor."""
    if options.method == "cg":
        return rows.adjoint(_dual_conjugate(rows, options), into)
    return rows.adjoint(_solve(_kernel_factor(rows, options.shift), rows.delta.mT), into)


def _conjugate(apply: Callable[[Tensor], Tensor], target: Tensor, options: ProxPropOptions, **how: Any) -> Tensor:
    return conjugate_gradient(apply, target, options.cg_iters, tol=options.cg_tol, **how)


def _dual_conjugate(rows: LayerRows, options: ProxPropOptions) -> Tensor:
    """Coefficients c, outputs × rows, of the last conjugate gradient iterate cA.

    A vector cA is stored as (c, cK) with K = AAᵀ. Its inner product with dA is ⟨c, dK⟩, so an iteration costs one
    product with K. The iterates equal those of conjugate gradients in the weights.
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


def direction_of_changed_gradient(rows: LayerRows, received: WeightBias, options: ProxPropOptions) -> WeightBias:
    r"""The direction of a gradient that was changed after its accumulation (unscaled, clipped, decayed …).

    The gradient is written as :math:`c\,\delta^\top A + E` with a scalar c. The first part is solved from δ, without
    cancellation. The remainder E is small; the Woodbury identity
    :math:`\tau_\theta(E - EA^\top(AA^\top + I/\tau_\theta)^{-1}A)` gives its direction.
    """
    scale, rest = as_multiple(received, rows.gradient())
    if rest is None:
        return scaled(dual_direction(rows, options), scale)
    if options.method == "cg":
        return _free_conjugate(rows, received, options)
    factor = _kernel_factor(rows, options.shift)
    solved = rows.adjoint(_solve(factor, rows.delta.mT))
    projected = rows.adjoint(_solve(factor, rows.apply(rest)))
    return added(scaled(solved, scale), _map(lambda e, p: (e - p) / options.shift, rest, projected))


def _free_conjugate(rows: LayerRows, received: WeightBias, options: ProxPropOptions) -> WeightBias:
    """Conjugate gradients in the weights, with two products by A per iteration and no Gram matrix."""
    assert received.weight is not None
    target = received.weight if received.bias is None else torch.cat([received.weight, received.bias[:, None]], 1)

    def apply(v: Tensor) -> Tensor:
        pair = WeightBias(v[:, :-1], v[:, -1]) if rows.ones else WeightBias(v, None)
        back = rows.adjoint(rows.apply(pair))
        assert back.weight is not None
        image = back.weight if back.bias is None else torch.cat([back.weight, back.bias[:, None]], 1)
        return image + options.shift * v

    x = _conjugate(apply, target, options)
    return WeightBias(x[:, :-1], x[:, -1]) if rows.ones else WeightBias(x, None)


@dataclass(frozen=True)
class Metric:
    """A Gram matrix (groups × n × n) plus a ridge; factored once, on the first call of :meth:`direction`."""

    gram: Tensor
    shift: float

    @functools.cached_property
    def _first(self) -> RidgeFactor:
        return gram_factor(self.gram, self.shift)

    @functools.cached_property
    def accurate(self) -> bool:
        """Whether the Gram matrix is precise enough for a solve."""
        return _accurate(self._first)

    @functools.cached_property
    def _factor(self) -> RidgeFactor:
        return self._first if self.accurate else gram_factor(self.gram.double(), self.shift)

    @functools.cached_property
    def _inverse(self) -> Tensor:
        return self._factor.inverse()

    def direction(self, gradient: Tensor, options: ProxPropOptions) -> Tensor:
        """The direction of a gradient, groups × outputs × n."""
        if options.method == "cg":
            return _conjugate(lambda v: v @ self.gram + self.shift * v, gradient, options)
        if gradient.shape[-2] < 1.5 * gradient.shape[-1]:
            return self._factor.solve(gradient)
        return (gradient.to(self._inverse.dtype) @ self._inverse).to(gradient.dtype)

    def gradient(self, direction: Tensor) -> Tensor:
        """The gradient whose exact direction this is: the inverse of :meth:`direction`."""
        return (direction.to(self.gram.dtype) @ self.gram).to(direction.dtype) + self.shift * direction


def as_multiple(changed: WeightBias, made: WeightBias) -> tuple[Tensor, WeightBias | None]:
    """Write ``changed`` as c · ``made`` + E with a scalar c; E is None if it is at rounding level.

    c is the ratio at the largest entry of ``made``, which is exact to rounding if ``changed`` is a multiple of it.
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


def scaled(pair: WeightBias, scale: Tensor) -> WeightBias:
    """Weight and bias times a scalar."""
    return _map(lambda t: t * scale.to(t.dtype), pair)


def added(first: WeightBias, second: WeightBias) -> WeightBias:
    """The sum of two pairs."""
    return _map(torch.add, first, second)


def _map(function, *pairs: WeightBias) -> WeightBias:  # type: ignore[no-untyped-def]
    weights, biases = zip(*pairs, strict=True)
    weight = None if any(w is None for w in weights) else function(*weights)
    return WeightBias(weight, None if any(b is None for b in biases) else function(*biases))

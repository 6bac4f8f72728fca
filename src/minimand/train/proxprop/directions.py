r"""The direction :math:`G(A^\top A + I/\tau_\theta)^{-1}` of one layer, in the space where it is cheap.

:math:`A` has one row per sample and position, :math:`\delta` the gradients at the layer's outputs,
:math:`G = \delta^\top A`. With fewer rows than columns the dual form
:math:`[(AA^\top + I/\tau_\theta)^{-1}\delta]^\top A` needs only the small Gram matrix; both are equal.
Source: 004, Proposition 2, eqs. 13–16 and 44.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...operators.gram import gram
from ...solvers.linear import RidgeFactor, conjugate_gradient, gram_factor
from .options import Options

__all__ = ["Metric", "Pair", "Rows", "dual", "dual_of_gradient", "working"]

# Above this estimate of rounding a float32 system is factored in float64 instead; directions then keep three digits.
_ROUNDING = 1e-2


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

    def kernel(self, double: bool = False) -> Tensor:
        """AAᵀ."""
        product = gram(self.a.double() if double else self.a)
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
    factor = gram_factor(rows.kernel(), shift)
    return factor if _accurate(factor) else gram_factor(rows.kernel(double=True), shift)


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
        return conjugate_gradient(apply, pairs, options.cg_iters, sample_dims=2, inner=inner)[:, 0]

    return torch.cat([some(units) for units in start.split(_UNITS)])


def dual_of_gradient(rows: Rows, received: Pair, options: Options) -> Pair:
    r"""The direction of a gradient that was changed after it was accumulated (unscaled, clipped, decayed …).

    Written as :math:`c\,\delta^\top A + E`, which holds for any scalar c, the first part is solved from δ, without
    cancellation, and the rest, which is rounding or small, by the Woodbury identity
    :math:`\tau_\theta(E - EA^\top(AA^\top + I/\tau_\theta)^{-1}A)`.
    """
    made = rows.gradient()
    assert made.weight is not None
    assert received.weight is not None
    scale = _ratio(received.weight, made.weight)
    rest = _map(lambda g, m: g - (scale * m).to(g.dtype), received, made)
    close = 4 * torch.finfo(made.weight.dtype).eps
    pairs = [(r, g) for r, g in zip(rest, received, strict=True) if r is not None and g is not None]
    if all(bool((r.abs() <= close * g.abs()).all()) for r, g in pairs):
        return _map(lambda d: d * scale.to(d.dtype), dual(rows, options))
    if options.method == "cg":
        return _free_conjugate(rows, received, options)
    factor = _kernel_factor(rows, options.shift)
    solved = rows.adjoint(_solve(factor, rows.delta.mT))
    projected = rows.adjoint(_solve(factor, rows.apply(rest)))
    return _map(lambda d, e, p: scale.to(d.dtype) * d + (e - p) / options.shift, solved, rest, projected)


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

    x = conjugate_gradient(apply, target, options.cg_iters)
    return Pair(x[:, :-1], x[:, -1]) if rows.ones else Pair(x, None)


@dataclass(frozen=True)
class Metric:
    """The Gram matrix of many rows (groups × n × n) with the ridge; factored once, when a direction is asked for."""

    gram: Tensor
    shift: float

    @functools.cached_property
    def _factor(self) -> RidgeFactor:
        factor = gram_factor(self.gram, self.shift)
        return factor if _accurate(factor) else gram_factor(self.gram.double(), self.shift)

    @functools.cached_property
    def _inverse(self) -> Tensor:
        return self._factor.inverse().to(self.gram.dtype)

    def direction(self, gradient: Tensor, options: Options) -> Tensor:
        """The direction of a gradient, groups × outputs × n."""
        if options.method == "cg":
            return conjugate_gradient(lambda v: v @ self.gram + self.shift * v, gradient, options.cg_iters)
        if gradient.shape[-2] < 1.5 * gradient.shape[-1]:
            return self._factor.solve(gradient)
        return gradient @ self._inverse

    def gradient(self, direction: Tensor) -> Tensor:
        """What a direction was made from."""
        return direction @ self.gram + self.shift * direction


def _ratio(received: Tensor, made: Tensor) -> Tensor:
    """The factor between two gradients, read off where the second is largest: exact to rounding if there is one."""
    place = made.abs().argmax()
    whole, part = received.flatten()[place].double(), made.flatten()[place].double()
    return torch.where(part != 0, whole / part, torch.zeros_like(part))


def _map(function, *pairs: Pair) -> Pair:  # type: ignore[no-untyped-def]
    weights, biases = zip(*pairs, strict=True)
    weight = None if any(w is None for w in weights) else function(*weights)
    return Pair(weight, None if any(b is None for b in biases) else function(*biases))

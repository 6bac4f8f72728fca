r"""The direction :math:`G(A^\top A + I/\tau_\theta)^{-1}` of one layer, by a linear solve with the smaller Gram matrix.

:math:`A` has one row per sample and position, with a column of ones for a trained bias; :math:`\delta` holds the
gradients at the layer's outputs. A gradient that nobody edited is :math:`G = \delta^\top A`. With fewer rows than
columns the equal dual form :math:`[(AA^\top + I/\tau_\theta)^{-1}\delta]^\top A` needs only the smaller Gram matrix.
Source: [Frerix2018], Proposition 2, eqs. 13–16 and 44.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...errors import NonFiniteError
from ...linalg import gram
from ...solvers.linear import RidgeFactor, conjugate_gradient, gram_factor
from .options import ProxPropOptions

__all__ = ["LayerRows", "Metric", "fingerprint"]

# A system whose estimated rounding error exceeds this is formed and factored in float64: directions keep three digits.
_ROUNDING = 1e-3

# Output units whose conjugate gradients run together; few enough that their vectors stay in the processor's cache.
_UNITS = 256

# Fingerprints that differ by fewer rounding units belong to equal gradients.
_EQUAL = 32


def fingerprint(gradient: Tensor) -> Tensor:
    """The product of a gradient, outputs × columns, with a fixed random vector: one number per output unit."""
    generator = torch.Generator().manual_seed(0)
    return gradient @ torch.randn(gradient.shape[1], generator=generator).to(gradient)


def _accurate(factor: RidgeFactor) -> bool:
    return factor.factor.dtype == torch.float64 or (factor.damping == 0 and factor.rounding() <= _ROUNDING)


def _conjugate(apply: Callable[[Tensor], Tensor], target: Tensor, options: ProxPropOptions, **how: Any) -> Tensor:
    return conjugate_gradient(apply, target, options.cg_iters, tol=options.cg_tol, **how)


@dataclass(frozen=True)
class LayerRows:
    """Fewer rows ``a`` (rows × columns) than columns, with their output gradients ``delta`` (rows × outputs).

    ``mark`` is the fingerprint of the gradient that these rows added to ``.grad``; None if there was no gradient.
    """

    a: Tensor
    delta: Tensor
    mark: Tensor | None = None

    def then(self, other: "LayerRows") -> "LayerRows":
        """The rows of both, stacked."""
        mark = None if self.mark is None or other.mark is None else self.mark + other.mark
        return LayerRows(torch.cat([self.a, other.a]), torch.cat([self.delta, other.delta]), mark)

    def direction(self, options: ProxPropOptions) -> Tensor:
        """The direction of the gradient δᵀA, solved from δ."""
        return (self._conjugate(options) if options.method == "cg" else self._solve(self.delta.mT, options)) @ self.a

    def direction_of(self, gradient: Tensor, options: ProxPropOptions) -> Tensor:
        r"""The direction of the gradient that the optimizer receives.

        It is :math:`c\,\delta^\top A + E` for a scalar c (unscaling, clipping). The first part is solved from δ, without
        cancellation. Equal fingerprints show that E is rounding. Otherwise (a penalty, other edits) the Woodbury
        identity :math:`\tau_\theta(E - EA^\top(AA^\top + I/\tau_\theta)^{-1}A)` gives its direction.
        """
        assert self.mark is not None
        found, own = fingerprint(gradient), self.mark
        scale = torch.nan_to_num((found.double() @ own.double()) / own.double().square().sum()).to(found.dtype)
        limit = _EQUAL * torch.finfo(found.dtype).eps * torch.linalg.vector_norm(gradient, dim=1)
        rows = replace(self, delta=self.delta * scale)
        if bool(((found - scale * own).abs() <= limit).all()):
            return rows.direction(options)
        if options.method == "cg":
            return _conjugate(lambda v: v @ self.a.mT @ self.a + options.shift * v, gradient, options)
        rest = gradient - rows.delta.mT @ self.a
        solved, moved = self._solve(torch.cat([rows.delta.mT, rest @ self.a.mT]), options).chunk(2)
        return solved @ self.a + (rest - moved @ self.a) / options.shift

    def _solve(self, target: Tensor, options: ProxPropOptions) -> Tensor:
        """Multiply by (AAᵀ + I/τθ)⁻¹ from the right."""
        factor = gram_factor(gram(self.a, half=True), options.shift)
        factor = factor if _accurate(factor) else gram_factor(gram(self.a.double(), half=True), options.shift)
        # With many rows one product with the inverse is faster than two triangular solves.
        many = target.shape[-2] >= 1.5 * target.shape[-1]
        return target @ factor.inverse().to(target.dtype) if many else factor.solve(target)

    def _conjugate(self, options: ProxPropOptions) -> Tensor:
        """Coefficients c, outputs × rows, of the last conjugate gradient iterate cA.

        A vector cA is stored as (c, cK) with K = AAᵀ. Its inner product with dA is ⟨c, dK⟩, so an iteration costs one
        product with K. The iterates equal those of conjugate gradients in the weights.
        """
        kernel = gram(self.a)

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

        return torch.cat([some(units) for units in self.delta.mT.split(_UNITS)])


@dataclass(frozen=True)
class Metric:
    """A Gram matrix (groups × n × n) plus a ridge; factored once, on the first use."""

    gram: Tensor
    shift: float

    @functools.cached_property
    def _first(self) -> RidgeFactor:
        return gram_factor(self.gram, self.shift)

    @functools.cached_property
    def accurate(self) -> bool:
        """Whether the Gram matrix is precise enough for a solve; True if it is not finite."""
        try:
            return _accurate(self._first)
        except NonFiniteError:
            return True

    @functools.cached_property
    def _factor(self) -> RidgeFactor:
        return self._first if self.accurate else gram_factor(self.gram.double(), self.shift)

    @functools.cached_property
    def _inverse(self) -> Tensor:
        return self._factor.inverse()

    def direction(self, gradient: Tensor, options: ProxPropOptions) -> Tensor:
        """The direction of a gradient, groups × outputs × n."""
        if options.method == "cg":
            matrix = self.gram.to(gradient.dtype)
            return _conjugate(lambda v: v @ matrix + self.shift * v, gradient, options)
        if gradient.shape[-2] < 1.5 * gradient.shape[-1]:
            return self._factor.solve(gradient)
        return (gradient.to(self._inverse.dtype) @ self._inverse).to(gradient.dtype)

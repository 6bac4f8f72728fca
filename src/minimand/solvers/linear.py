r"""Linear systems with a ridge: the one factorisation and the one conjugate gradient of the library."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..operators.gram import gram
from .iterate import iterate

__all__ = ["RidgeFactor", "conjugate_gradient", "ridge_factor"]


@dataclasses.dataclass(frozen=True)
class RidgeFactor:
    r"""A Cholesky factor with which :math:`(AA^\top + sI)^{-1}` is applied to rows; see :func:`ridge_factor`."""

    factor: Tensor
    shift: float
    matrix: Tensor | None

    def solve(self, rows: Tensor) -> Tensor:
        """Each row r of ``rows`` becomes (AAᵀ + sI)⁻¹ r."""
        if self.matrix is None:
            return self._back(rows)
        # Woodbury: the system of the smaller side.
        wide = rows.to(self.matrix.dtype)
        return ((wide - self._back(wide @ self.matrix) @ self.matrix.mT) / self.shift).to(rows.dtype)

    def _back(self, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, rows.shape[-1]).to(self.factor.dtype)
        return torch.cholesky_solve(flat.mT, self.factor).mT.reshape(rows.shape).to(rows.dtype)


def ridge_factor(matrix: Tensor, shift: float) -> RidgeFactor:
    r"""Factor :math:`AA^\top + sI` once, by the smaller side of ``matrix``.

    For :math:`A \in \mathbb{R}^{m\times n}` with :math:`n < m` the Woodbury identity
    :math:`(AA^\top + sI)^{-1} = (I - A(A^\top A + sI)^{-1}A^\top)/s` needs only an n × n factor. Differentiable.

    >>> A, r = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0, 0.0]])
    >>> x = ridge_factor(A, 0.5).solve(r)
    >>> torch.allclose(x @ (A @ A.mT + 0.5 * torch.eye(2)), r, atol=1e-6)
    True
    """
    rows, columns = matrix.shape[-2:]
    with torch.autocast(matrix.device.type, enabled=False):
        matrix = matrix if matrix.dtype in (torch.float32, torch.float64) else matrix.float()
        product = gram(matrix if rows <= columns else matrix.mT)
        identity = torch.eye(product.shape[-1], dtype=product.dtype, device=product.device)
        factor = torch.linalg.cholesky(product + shift * identity)
    return RidgeFactor(factor, shift, None if rows <= columns else matrix)


class _Conjugate(NamedTuple):
    x: Tensor
    residual: Tensor
    direction: Tensor
    square: Tensor


def conjugate_gradient(
    apply: Callable[[Tensor], Tensor],
    target: Tensor,
    iterations: int,
    *,
    x0: Tensor | None = None,
    sample_dims: int = 1,
    tol: float | None = None,
) -> Tensor:
    r"""Solve :math:`Mx = r` for a symmetric positive definite ``apply``, one conjugate gradient per sample.

    The last ``sample_dims`` dimensions belong to one system; all leading ones are independent systems. A system
    that has converged exactly stays where it is. ``tol`` stops when every residual has shrunk to
    ``tol`` times its target.

    >>> M, r = torch.tensor([[2.0, 1.0], [1.0, 3.0]]), torch.tensor([[1.0, 0.0]])
    >>> x = conjugate_gradient(lambda v: v @ M, r, 2)
    >>> torch.allclose(x @ M, r, atol=1e-6)
    True
    """
    dims = tuple(range(-sample_dims, 0))

    def square(v: Tensor) -> Tensor:
        return v.square().sum(dims, keepdim=True)

    def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
        # Zero over zero is a system already solved: it must not move.
        safe = torch.where(denominator > 0, denominator, torch.ones_like(denominator))
        return torch.where(denominator > 0, numerator / safe, torch.zeros_like(numerator))

    def step(state: _Conjugate, k: int) -> _Conjugate:
        x, residual, direction, before = state
        image = apply(direction)
        length = ratio(before, (direction * image).sum(dims, keepdim=True))
        x = x + length * direction
        residual = residual - length * image
        after = square(residual)
        return _Conjugate(x, residual, residual + ratio(after, before) * direction, after)

    def small(state: _Conjugate, done: int) -> bool:
        assert tol is not None
        return bool((state.square <= tol**2 * scale).all())

    scale = square(target)
    residual = target if x0 is None else target - apply(x0)
    first = _Conjugate(torch.zeros_like(target) if x0 is None else x0, residual, residual, square(residual))
    return iterate(step, first, iterations, until=None if tol is None else small)[0].x

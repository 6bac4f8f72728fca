r"""Linear systems with a ridge: a Cholesky factorisation and conjugate gradients."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..arguments import checked
from ..errors import OptionError, require_finite
from ..functions.base import widened
from ..linalg import gram
from ..norms.exporting import traced_values
from ..tracing import constant, exporting_to_onnx, forward_rule, holds, is_traced
from .iterate import iterate

__all__ = ["RidgeFactor", "conjugate_gradient", "gram_factor", "ridge_factor"]

# Each round multiplies the damping by this factor; the first is one rounding unit of the Gram matrix's size.
_DAMPING_GROWTH = 8.0
_DAMPING_ROUNDS = 12

# From this many rows on, a Cholesky factorisation by panels of products beats LAPACK's on one thread, by 1.3 at 1024.
_WORTH_PANELS = 768
_PANEL = 64


@dataclasses.dataclass(frozen=True)
class RidgeFactor:
    r"""A Cholesky factor that applies :math:`(AA^\top + sI)^{-1}` to rows; see :func:`ridge_factor`.

    ``damping`` was added to the shift so that the factorisation succeeded; it is almost always zero. In a graph for
    ONNX, which has no triangular solve, ``inverted`` says that the inverse takes the place of the factor. Where
    derivatives are recorded, ``system`` has those of the matrix that was factored.
    """

    factor: Tensor
    shift: float | Tensor
    matrix: Tensor | None
    damping: float = 0.0
    inverted: bool = False
    system: Tensor | None = None

    def solve(self, rows: Tensor) -> Tensor:
        """(AAᵀ + sI)⁻¹ r for each row r of ``rows``."""
        if self.matrix is None:
            return self._back(rows)
        # Woodbury: the system of the smaller side.
        wide = rows.to(self.matrix.dtype)
        return ((wide - self._back(wide @ self.matrix) @ self.matrix.mT) / self.shift).to(rows.dtype)

    def inverse(self) -> Tensor:
        """(AAᵀ + sI)⁻¹; for many rows a product with it is faster than two triangular solves."""
        if self.system is None:
            back = torch.cholesky_inverse(self.factor)
        else:
            unit = torch.eye(self.factor.shape[-1], dtype=self.factor.dtype, device=self.factor.device)
            back = self._back(unit.expand_as(self.factor))
        if self.matrix is None:
            return back
        identity = torch.eye(self.matrix.shape[-2], dtype=back.dtype, device=back.device)
        return (identity - self.matrix @ back @ self.matrix.mT) / self.shift

    def rounding(self) -> float:
        r""":math:`\epsilon\|L\|_2^2/\min_i L_{ii}^2`, in practice about fifteen times the relative error of a solve."""
        vector = self.factor.sum(-1, keepdim=True)
        for _ in range(3):
            vector = self.factor @ (self.factor.mT @ (vector / torch.linalg.vector_norm(vector, dim=-2, keepdim=True)))
        size = torch.linalg.vector_norm(vector, dim=(-2, -1))
        smallest = self.factor.diagonal(dim1=-2, dim2=-1).amin(-1).square()
        return torch.finfo(self.factor.dtype).eps * float((size / smallest).max())

    def _back(self, rows: Tensor) -> Tensor:
        if self.inverted:
            return rows @ self.factor
        flat = rows if self.factor.dim() > 2 else rows.reshape(-1, rows.shape[-1])
        flat = flat.to(self.factor.dtype)
        solved = _solved(self.factor, flat) if self.system is None else _Solve.apply(flat, self.system, self.factor)
        return solved.reshape(rows.shape).to(rows.dtype)


def _solved(factor: Tensor, rows: Tensor) -> Tensor:
    half = torch.linalg.solve_triangular(factor.mT, rows, upper=True, left=False)
    return torch.linalg.solve_triangular(factor, half, upper=False, left=False)


class _Solve(torch.autograd.Function):
    """Rows times the inverse of a symmetric system, by its factor. The derivative takes one solve and one product;
    those of a factorisation take several of its size."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, system: Tensor, factor: Tensor) -> Tensor:
        return _solved(factor, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output, *inputs[1:])
        ctx.save_for_forward(output, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, system, factor = ctx.saved_tensors
        u = _Solve.apply(grad, system, factor)
        return u, (x.mT @ u).neg().sum_to_size(system.shape) if ctx.needs_input_grad[1] else None, None

    @forward_rule
    def jvp(ctx: Any, saved: list[Tensor], rows: Tensor | None, system: Tensor | None, _: None) -> Tensor:
        x, at, factor = saved
        change = torch.zeros_like(x) if rows is None else rows
        return _Solve.apply(change if system is None else change - x @ system, at, factor)


def ridge_factor(matrix: Tensor, shift: float | Tensor) -> RidgeFactor:
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
        factored = gram_factor(gram(matrix if rows <= columns else matrix.mT, half=True), shift)
    return dataclasses.replace(factored, matrix=None if rows <= columns else matrix)


def gram_factor(product: Tensor, shift: float | Tensor) -> RidgeFactor:
    r"""Factor :math:`P + sI` for a Gram matrix ``product``, or each of a batch of them. Differentiable.

    Only the lower triangle is read.

    Rounding can leave P with eigenvalues below :math:`-s`. The shift then grows by
    :math:`8^k\,\epsilon\operatorname{tr}(P)/n`, for the first k that lets the factorisation succeed.

    >>> P, r = torch.tensor([[4.0, 2.0], [2.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    >>> x = gram_factor(P, 0.5).solve(r)
    >>> torch.allclose(x @ (P + 0.5 * torch.eye(2)), r, atol=1e-6)
    True
    """
    if is_traced(product):
        known = traced_values(product) if exporting_to_onnx() else None
        if known is not None:
            with _disable_current_modes():
                inverse = torch.linalg.inv(_shifted(known[0].detach().double(), shift)).to(product.dtype)
            return RidgeFactor(inverse, shift, None, inverted=True)
        return RidgeFactor(torch.linalg.cholesky(_shifted(product, shift)), shift, None)
    learned = isinstance(shift, Tensor) and shift.requires_grad
    if product.requires_grad or learned:
        with constant():
            found = gram_factor(product.detach(), shift.detach() if isinstance(shift, Tensor) else shift)
        # A number on the diagonal changes no derivative.
        system = _shifted(product, shift) if learned else product
        return dataclasses.replace(found, shift=shift + found.damping, system=system)
    factor, failed = _cholesky(_shifted(product, shift))
    if not failed:
        return RidgeFactor(factor, shift, None)
    require_finite("the Gram matrix", product)
    unit = torch.finfo(product.dtype).eps * float(product.detach().diagonal(dim1=-2, dim2=-1).mean(-1).max())
    for k in range(_DAMPING_ROUNDS):
        damping = _DAMPING_GROWTH**k * unit
        factor, failed = _cholesky(_shifted(product, shift + damping))
        if not failed:
            return RidgeFactor(factor, shift + damping, None, damping)
    raise OptionError(
        f"a Gram matrix of {product.shape[-1]} rows with shift {shift} is not positive definite; raise the shift"
    )


def _shifted(product: Tensor, shift: float | Tensor) -> Tensor:
    """P + sI in new memory."""
    if product.requires_grad or isinstance(shift, Tensor) or is_traced(product):
        return product + shift * torch.eye(product.shape[-1], dtype=product.dtype, device=product.device)
    shifted = product.clone()
    shifted.diagonal(dim1=-2, dim2=-1).add_(shift)
    return shifted


def _cholesky(matrix: Tensor) -> tuple[Tensor, bool]:
    """The factor, which may overwrite the matrix, and whether the factorisation of any matrix in the batch failed."""
    wide = matrix.dim() == 2 and len(matrix) >= _WORTH_PANELS
    if not wide or matrix.requires_grad or matrix.device.type != "cpu":
        factor, info = torch.linalg.cholesky_ex(matrix)
        return factor, bool(info.any())
    for start in range(0, len(matrix), _PANEL):
        panel = matrix[start:, start : start + _PANEL]
        width = panel.shape[1]
        panel.addmm_(matrix[start:, :start], matrix[start : start + width, :start].mT, alpha=-1)
        corner, info = torch.linalg.cholesky_ex(panel[:width])
        if bool(info):
            return matrix, True
        # A product with the corner's inverse would be faster, but fails on ill-conditioned matrices.
        panel[width:] = torch.linalg.solve_triangular(corner.mT, panel[width:], upper=True, left=False)
        panel[:width] = corner
        matrix[start : start + width, start + width :] = 0
    return matrix, False


class _Conjugate(NamedTuple):
    x: Tensor
    residual: Tensor
    direction: Tensor
    square: Tensor
    #: The residuals before, a matrix per system, and their squares.
    earlier: tuple[Tensor, Tensor] | None = None


@checked
def conjugate_gradient(
    apply: Callable[[Tensor], Tensor],
    target: Tensor,
    iterations: int,
    *,
    x0: Tensor | None = None,
    sample_dims: int = 1,
    tol: float | None = None,
    inner: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    r"""Solve :math:`Mx = r` for a symmetric positive definite ``apply``, one conjugate gradient per sample.

    The last ``sample_dims`` dimensions belong to one system; the leading dimensions are independent systems. A system
    whose residual is below the rounding error of its target does not change any more. With ``tol`` the iteration stops
    when every residual is at most ``tol`` times its target. ``inner(u, v)`` replaces the Euclidean inner product, for
    vectors in coordinates of another basis; ``apply`` must be symmetric in it. It keeps the reduced dimensions.

    >>> M, r = torch.tensor([[2.0, 1.0], [1.0, 3.0]]), torch.tensor([[1.0, 0.0]])
    >>> x = conjugate_gradient(lambda v: v @ M, r, 2)
    >>> torch.allclose(x @ M, r, atol=1e-6)
    True
    """
    return measured_conjugate_gradient(apply, target, iterations, x0, sample_dims, tol, inner)[0]


def measured_conjugate_gradient(
    apply: Callable[[Tensor], Tensor],
    target: Tensor,
    iterations: int,
    x0: Tensor | None,
    sample_dims: int,
    tol: float | None,
    inner: Callable[[Tensor, Tensor], Tensor] | None = None,
    stable: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""The result of :func:`conjugate_gradient`, and whether each residual is at most :math:`\epsilon^{2/3}` times its
    target. In systems that converge slowly, rounding errors and with them the derivatives of the iterations grow from
    one to the next; ``stable`` makes each residual orthogonal to all before it, in double precision."""
    dims = tuple(range(-sample_dims, 0))
    rounding, double = torch.finfo(widened(target).dtype).eps, stable and target.device.type != "mps"

    def product(u: Tensor, v: Tensor) -> Tensor:
        return (u * v).sum(dims, keepdim=True) if inner is None else inner(u, v)

    def wide(v: Tensor) -> Tensor:
        return v.double() if double else widened(v)

    def step(state: _Conjugate, k: int) -> _Conjugate:
        x, residual, direction, before, earlier = state
        # The map may be in a lower precision than the vectors.
        image = wide(apply(direction.to(target.dtype)))
        length = _ratio(before, product(direction, image))
        x = torch.addcmul(x, length, direction)
        earlier = _appended(earlier, residual, before, dims) if stable else None
        residual = torch.addcmul(residual, length, image, value=-1)
        if earlier is not None:
            rows, flat = earlier[0], residual.flatten(dims[0]).unsqueeze(-1)
            residual = (flat - rows.mT @ _ratio(rows @ flat, earlier[1])).reshape(residual.shape)
        after = product(residual, residual)
        # A residual below the rounding error of its target says that the system is solved.
        after = after * (after > floor)
        return _Conjugate(x, residual, torch.addcmul(residual, _ratio(after, before), direction), after, earlier)

    def small(state: _Conjugate, done: int) -> bool:
        return holds(state.square <= limit)

    goal = wide(target)
    residual = goal if x0 is None else goal - wide(apply(x0.to(target.dtype)))
    # Squares of numbers near one do not overflow or vanish. The result does not depend on the size.
    within = dims if inner is None else tuple(range(target.dim()))
    size = torch.maximum(*(each.abs().amax(within, keepdim=True) for each in (goal, residual)))
    size = torch.where(size > 0, size, 1.0)
    goal, residual = product(goal / size, goal / size), residual / size
    floor, limit = rounding**2 * goal, (tol or 0.0) ** 2 * goal
    first = _Conjugate(torch.zeros_like(residual), residual, residual, product(residual, residual))
    last = iterate(step, first, iterations, until=None if tol is None else small)[0]
    x = size * last.x if x0 is None else torch.addcmul(wide(x0), size, last.x)
    return x.to(target.dtype), last.square <= rounding ** (4 / 3) * goal


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    # 0/0 belongs to a system that is already solved, which must not change.
    some = denominator > 0
    return torch.where(some, numerator / torch.where(some, denominator, 1.0), 0.0)


def _appended(
    earlier: tuple[Tensor, Tensor] | None, residual: Tensor, square: Tensor, dims: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    new = residual.flatten(dims[0]).unsqueeze(-2), square.flatten(dims[0]).unsqueeze(-2)
    return new if earlier is None else (torch.cat([earlier[0], new[0]], -2), torch.cat([earlier[1], new[1]], -2))

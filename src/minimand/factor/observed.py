r"""Matrices with missing entries: the loss on the observed entries, its dual point, and alternating ridge regressions.

At balance :math:`\sum_i\|U_i\|\|V_i\| = \tfrac12(\|U\|_F^2 + \|V\|_F^2)`, and with V fixed each row of U is a ridge
regression on the columns that were observed in that row,

.. math:: u_j = (V_{\Omega_j}^\top V_{\Omega_j} + \lambda I)^{-1} V_{\Omega_j}^\top y_j ,

at a cost linear in the number of observed entries. Rows with similar numbers of entries are solved together. No dense
matrix of the data's size is formed.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import ShapeError, require_finite
from ..functions import NonNegative
from ..linalg import gram
from ..operators import Dense
from ..solvers import FISTA, Problem, solve
from .columns import Updated
from .descent import Components, LocalDescent
from .groups import RowGroups
from .inputs import shifted
from .losses import DualValue, Loss, best_multiple
from .matrices import DualMatrix, DualMoments, RowSharding, row_blocks, signs

__all__ = ["Observed", "ObservedDescent", "RowGroups", "SparseDual", "masked", "rotated"]

# Entries that a block of a sparse matrix may have, however small the result is.
SMALL_BLOCK = 2**18
NEGLIGIBLE = 1e-6


class SparseDual(DualMatrix):
    """A matrix that is zero outside the observed entries.

    ``values`` belong to the coordinates ``index`` = (row, column), sorted by row. If ``compact`` is False, a bound may
    form the dense matrix.
    """

    def __init__(
        self,
        values: Tensor,
        index: tuple[Tensor, Tensor],
        shape: tuple[int, int],
        rows: RowSharding,
        *,
        compact: bool = True,
    ) -> None:
        self.compact = compact
        self.values, self.index, self.shape, self.rows = values.to(torch.float64), index, shape, rows
        self._forward = _csr(index[0], index[1], self.values, shape)
        order = torch.argsort(index[1], stable=True)
        self._backward = _csr(index[1][order], index[0][order], self.values[order], (shape[1], shape[0]))

    @property
    def device(self) -> torch.device:
        """The device of the entries."""
        return self.values.device

    def times(self, x: Tensor) -> Tensor:
        """Z x for columns x."""
        return self._forward @ x

    def adjoint(self, y: Tensor) -> Tensor:
        """Zᵀ y, summed over the processes."""
        return self.rows.sum(self._backward @ y)

    def gram(self, part: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """ZᵀZ; with ``part`` that of ``part(Z)``."""
        return self.rows.sum(_gram_of_entries(*self.index, self.values, self.shape, part))

    def outer(self, part: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """ZZᵀ over the rows of all processes; with ``part`` that of ``part(Z)``."""
        if self.rows.ranks > 1:
            whole = self.dense()
            return gram(whole if part is None else part(whole))
        order = torch.argsort(self.index[1], stable=True)
        row, column = (place[order] for place in self.index)
        return _gram_of_entries(column, row, self.values[order], (self.shape[1], self.shape[0]), part)

    def dense(self) -> Tensor:
        """All entries, of all processes."""
        here = self.values.new_zeros(self.shape)
        here[self.index] = self.values
        return self.rows.gather(here)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """The rows, in blocks."""
        for part in row_blocks(*self.shape):
            begin, end = torch.searchsorted(self.index[0], self.index[0].new_tensor([part.start, part.stop])).tolist()
            block = self.values.new_zeros(part.stop - part.start, self.shape[1])
            block[self.index[0][begin:end] - part.start, self.index[1][begin:end]] = self.values[begin:end]
            yield part, block

    def square(self) -> float:
        """‖Z‖² over all processes."""
        return float(self.rows.sum(self.values.square().sum()))

    def work(self) -> float:
        """Floating point operations of a product with one vector; a stored entry costs several."""
        return 16.0 * self.rows.count(len(self.values))

    def moments(self, data: Tensor) -> DualMoments:
        """⟨Y, Z⟩ and ‖Z‖² over all processes."""
        data = data.to(torch.float64)
        totals = [(data * self.values).sum(), self.values.square().sum(), data.square().sum()]
        inner, square, size = self.rows.sum(torch.stack(totals)).tolist()
        return DualMoments(inner, square, size, len(data))


def _gram_of_entries(
    row: Tensor, column: Tensor, values: Tensor, shape: tuple[int, int], part: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """ZᵀZ of a matrix with these entries, sorted by row; only a few rows at a time are formed densely."""
    total = values.new_zeros(shape[1], shape[1])
    # A block has a quarter of the result's size, or a few megabytes if that is more.
    most = max(shape[1] // 4, SMALL_BLOCK // max(shape[1], 1), 1)
    for start in range(0, shape[0], most):
        size = min(most, shape[0] - start)
        begin, end = torch.searchsorted(row, row.new_tensor([start, start + size])).tolist()
        block = values.new_zeros(size, shape[1])
        block[row[begin:end] - start, column[begin:end]] = values[begin:end]
        total += gram((block if part is None else part(block)).mT)
    return total


def _csr(row: Tensor, column: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A compressed sparse matrix from coordinates that are sorted by row."""
    starts = torch.zeros(shape[0] + 1, dtype=torch.int64, device=row.device)
    starts[1:] = torch.bincount(row, minlength=shape[0]).cumsum(0)
    with warnings.catch_warnings():
        # On first use torch warns that compressed matrices are in beta.
        warnings.filterwarnings("ignore", message=".*[Ss]parse", category=UserWarning)
        return torch.sparse_csr_tensor(starts, column, values, shape)


@dataclass(frozen=True)
class Observed(Loss):
    r""":math:`\tfrac12\sum_{(i,j)\in\Omega}(Y_{ij} - (UV^\top)_{ij})^2`; the dual point is zero outside :math:`\Omega`.

    ``index`` holds the rows and columns of ``values``, sorted by row. With ``compact`` no dense matrix of the data's
    size is formed, not even to bound its norm.
    """

    values: Tensor
    index: tuple[Tensor, Tensor]
    shape: tuple[int, int]
    rows: RowSharding = RowSharding()  # noqa: RUF009 -- frozen
    compact: bool = True
    curvature = 1.0
    degree = 2

    def largest(self) -> float:
        """The largest absolute value of an observed entry, over all processes."""
        return self.rows.largest(self.values)

    def scaled(self, exponent: int) -> Self:
        """The loss of the data times 2^exponent."""
        return replace(self, values=shifted(self.values, exponent))

    def weighted(self, roots: Tensor) -> Self:
        """The loss of the observed entries times the ``roots`` of their rows."""
        values = self.values.to(torch.float64)
        return replace(self, values=values * roots.to(values)[self.index[0]])

    def residual(self, U: Tensor, V: Tensor) -> Tensor:
        """Y − UVᵀ on the observed entries, in the factors' precision."""
        return self.values.to(U.dtype) - _products(U, V, self.index)

    def value(self, U: Tensor, V: Tensor) -> float:
        """Half the squared residual of the observed entries."""
        residual = self.residual(U.to(torch.float64), V.to(torch.float64))
        return 0.5 * float(self.rows.sum(residual.square().sum()))

    def value_at(self, U: Tensor, V: Tensor, dual: DualMatrix) -> float:
        """Half the squared norm of the dual point."""
        return 0.5 * dual.square()

    def dual(self, U: Tensor, V: Tensor) -> SparseDual:
        """The residual on the observed entries."""
        return self._sparse(self.residual(U.to(torch.float64), V.to(torch.float64)))

    def lower(self, matrix: DualMatrix, largest: float) -> DualValue:
        """c⟨Y,R⟩ − ½c²‖R‖²."""
        assert isinstance(matrix, SparseDual)
        return best_multiple(matrix.moments(self.values), 1.0, largest)

    def zero(self) -> SparseDual:
        """The data."""
        return self._sparse(self.values)

    def _sparse(self, values: Tensor) -> SparseDual:
        return SparseDual(values, self.index, self.shape, self.rows, compact=self.compact)

    def size(self) -> float:
        """‖P_Ω(Y)‖."""
        return float(self.rows.sum(self.values.to(torch.float64).square().sum())) ** 0.5

    def entries(self) -> int:
        """The number of observed entries."""
        return self.rows.count(len(self.values))

    def explained(self, U: Tensor, V: Tensor, roots: Tensor | None = None) -> float:
        """The share of the variance of the observed entries that UVᵀ explains; ``roots`` are those of rows' weights."""
        roots = torch.ones(self.shape[0]) if roots is None else roots
        roots = roots.to(device=U.device, dtype=torch.float64)
        loss, units = self.weighted(roots).normalized(U, V)
        error = 2 * loss.value(units.lowered(U.to(torch.float64) * roots.unsqueeze(1)), units.lowered(V))
        values, scale = loss.values, roots[self.index[0]]
        mean = (values * scale).sum() / scale.square().sum().clamp_min(torch.finfo(scale.dtype).tiny)
        spread = float((values - mean * scale).square().sum())
        return 1 - error / spread if spread > 0 else float(error == 0)


def not_nan(Y: Tensor, *, compact: bool = True) -> Observed:
    """The loss on the entries of a matrix that are not NaN."""
    row, column = torch.nonzero(~torch.isnan(Y), as_tuple=True)
    return Observed(Y[row, column], (row, column), (Y.shape[0], Y.shape[1]), compact=compact)


def masked(Y: Tensor, mask: Any) -> Observed:
    """The loss on the entries of a matrix with a True ``mask``."""
    seen = torch.as_tensor(mask).to(torch.bool)
    if seen.shape != Y.shape:
        raise ShapeError(f"mask has shape {tuple(seen.shape)}, but Y has {tuple(Y.shape)}")
    index = torch.nonzero(seen, as_tuple=True)
    values = Y[index]
    require_finite("Y, where mask is True,", values)
    return Observed(values, (index[0], index[1]), (Y.shape[0], Y.shape[1]), compact=False)


def _products(U: Tensor, V: Tensor, index: tuple[Tensor, Tensor]) -> Tensor:
    """(UVᵀ)ᵢⱼ at the entries of ``index``, in blocks that fit into cache."""
    row, column = index
    out = torch.empty(len(row), dtype=U.dtype, device=U.device)
    for part in row_blocks(len(row), max(U.shape[1], 1), cached=True):
        out[part] = (U.index_select(0, row[part]) * V.index_select(0, column[part])).sum(-1)
    return out


@dataclass(frozen=True)
class ObservedDescent(LocalDescent):
    """Ridge regressions for U and V in turn; vectors are rows, as in every descent. The regularizer must be L2."""

    loss: Observed

    @cached_property
    def by_row(self) -> RowGroups:
        """The observed entries of each row."""
        return RowGroups.of(*self.loss.index, self.loss.shape)

    @cached_property
    def by_column(self) -> RowGroups:
        """The observed entries of each column."""
        return RowGroups.of(*self.loss.index[::-1], self.loss.shape[::-1])

    def work(self, rank: int) -> float:
        """Gram matrices of the entries of each row and column, bound by memory, and their factorisations."""
        return 16.0 * self.loss.entries() * rank * (rank + 4) + sum(self.loss.shape) * (rank**3 + 100.0)

    def left(self, pairs: Components) -> Updated:
        """The ridge regression of each row."""
        U = self.by_row.ridge(self.loss.values, pairs.V.mT.contiguous(), self.lam)[0].mT
        return Updated(U, math.inf, 1.0)  # the objective decides

    def right(self, pairs: Components) -> tuple[Updated, float]:
        """The ridge regression of each column, and the objective with ½(‖U‖² + ‖V‖²) for the penalty."""
        U = pairs.U.mT.contiguous()
        if self.rows.group is None:
            V, sides = self.by_column.ridge(self.loss.values, U, self.lam)
        else:
            grams, sides = (self.rows.sum(x) for x in self.by_column.normal(self.loss.values, U))
            identity = torch.eye(U.shape[1], dtype=U.dtype, device=U.device)
            V = torch.linalg.solve(grams + self.lam * identity, sides)
        # At the solution of a ridge regression ‖y − Dv‖² + λ‖v‖² = ‖y‖² − ⟨v, Dᵀy⟩, so no residual is needed.
        penalty = 0.5 * self.lam * float(self.rows.sum(U.to(torch.float64).square().sum()))
        explained = 0.5 * float((V.to(torch.float64) * sides.to(torch.float64)).sum())
        return Updated(V.mT, math.inf, 1.0), self.square - explained + penalty

    def normalized(self, pairs: Components) -> Components:
        """The pairs rotated to the singular vectors of their product, at their best sizes, without negligible ones."""
        pairs, values = self._sized(*rotated(pairs, self.rows))
        size = max(float(values.max()), (2 * self.square) ** 0.5) if pairs.rank else 0.0
        return pairs.take(torch.nonzero(values > NEGLIGIBLE * size).squeeze(1))

    def _sized(self, pairs: Components, values: Tensor) -> tuple[Components, Tensor]:
        r"""Singular vectors with the sizes s that are jointly optimal,

        .. math:: \min_{s \ge 0} \tfrac12\|P_\Omega(Y - P\operatorname{diag}(s)Q^\top)\|^2 + \lambda\sum_i s_i .

        In ridge regressions a size near zero changes by a factor near one per sweep; here it takes one step.
        """
        keep = values > torch.finfo(values.dtype).eps * values.max() if pairs.rank else values > 0
        pairs, values = pairs.take(torch.nonzero(keep).squeeze(1)), values[keep]
        if pairs.rank == 0:
            return pairs, values
        root = values.sqrt().unsqueeze(1)
        left, right = (x.div(root).mT.to(torch.float64) for x in pairs)
        row, column = self.loss.index
        product = left.new_zeros(pairs.rank, pairs.rank)
        linear = left.new_zeros(1, pairs.rank)
        for part in row_blocks(len(row), pairs.rank, cached=True):
            atoms = left.index_select(0, row[part]) * right.index_select(0, column[part])
            product += atoms.mT @ atoms
            linear += self.loss.values[part].to(torch.float64) @ atoms
        product, linear = self.rows.sum(product), self.rows.sum(linear)
        squares, vectors = torch.linalg.eigh(product)
        operator = Dense(vectors * squares.clamp_min(0).sqrt())
        problem = Problem(operator, NonNegative(), torch.zeros_like(linear), bias=linear - self.lam)
        start = values.to(torch.float64).unsqueeze(0)
        sizes = solve(problem, FISTA(iters=1000), x0=start, tol=1e-12).x[0]
        if float(problem.objective(sizes.unsqueeze(0))) > float(problem.objective(start)):
            return pairs, values
        scale = (sizes.to(values.dtype) / values).sqrt().unsqueeze(1)
        return Components(pairs.U * scale, pairs.V * scale), sizes.to(values.dtype)


def rotated(pairs: Components, rows: RowSharding) -> tuple[Components, Tensor]:
    r"""The factors :math:`P\Sigma^{1/2}, Q\Sigma^{1/2}` of the same product, and :math:`\Sigma`. Their penalty is the
    nuclear norm of the product.

    >>> pairs, values = rotated(Components(torch.eye(2), torch.eye(2) * 3), RowSharding())
    >>> values
    tensor([3., 3.])
    """
    if pairs.rank == 0:
        return pairs, pairs.U.new_zeros(0)
    wide = torch.float64
    basis, triangle = torch.linalg.qr(pairs.V.mT.to(wide))
    image = pairs.U.mT.to(wide) @ triangle.mT
    squares, mix = torch.linalg.eigh(rows.sum(image.mT @ image))
    order = torch.argsort(squares, descending=True)
    values, mix = squares[order].clamp_min(0).sqrt(), mix[:, order]
    mix = mix * signs(basis @ mix)
    root = values.sqrt().clamp_min(torch.finfo(wide).tiny ** 0.25)
    U, V = (image @ mix / root).mT, ((basis @ mix) * values.sqrt()).mT
    like = pairs.U.dtype
    return Components(U.to(like).contiguous(), V.to(like).contiguous()), values.to(like)

r"""The matrix whose polar is measured: a dual point :math:`Z`, dense by blocks of rows or on the observed entries.

A dual point of :math:`\min \ell(X) + \lambda\Omega(X)` is a matrix; scaled so that its polar is at most
:math:`\lambda`, it bounds the minimum from below. Everything is float64. A dense one is a residual
:math:`Y - UV^\top` that is never held as a whole: its rows are formed block by block, so that :math:`Y` may be a
memory-mapped file, or one rank's share of the rows.
"""

import abc
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..linalg import gram
from ..norms.spectral import EPS
from .rows import Rows, row_blocks

__all__ = ["Dense", "DualMatrix", "Moments", "Sparse", "summation"]

# Entries that a block of a sparse matrix may have in any case.
_FEW = 2**18


@dataclass(frozen=True)
class Moments:
    """The inner product with the data and the squared norm of a dual point, each with what rounding may hide of it."""

    inner: float
    square: float
    inner_margin: float
    square_margin: float


class DualMatrix(abc.ABC):
    """A matrix of float64 that multiplies from both sides; rows may be spread over ranks."""

    rows: Rows
    shape: tuple[int, int]  # the rows here × all columns
    #: Whether nothing dense of the matrix's size may be formed.
    compact: bool = False

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Where the entries are."""

    @property
    def flat(self) -> bool:
        """Whether the rows are the shorter side, and all here: products are then formed of them."""
        return self.rows.ranks == 1 and self.shape[0] < self.shape[1]

    def noise(self, columns: int, generator: torch.Generator | None, *, left: bool = False) -> Tensor:
        """Normal numbers with a row per column of Z, the same on all ranks; with ``left``, a row per row here."""
        drawn = torch.randn(self.shape[0 if left else 1], columns, dtype=torch.float64, generator=generator)
        return self.rows.broadcast(drawn.to(self.device))

    @abc.abstractmethod
    def times(self, x: Tensor) -> Tensor:
        """Z x for columns x."""

    @abc.abstractmethod
    def adjoint(self, y: Tensor) -> Tensor:
        """Zᵀ y, summed over the ranks."""

    @abc.abstractmethod
    def gram(self, part: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """ZᵀZ, of ``part(Z)`` where a function of the entries is given."""

    @abc.abstractmethod
    def outer(self, part: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """ZZᵀ over the rows of all ranks, of ``part(Z)`` where a function of the entries is given."""

    @abc.abstractmethod
    def dense(self) -> Tensor:
        """All entries, of all ranks."""

    def full_rows(self) -> int:
        """The number of rows over all ranks."""
        return self.rows.count(self.shape[0])


class Dense(DualMatrix):
    r""":math:`Z = a(Y - UV^\top, Y)` with an entrywise map a, formed by blocks of rows.

    >>> Z = Dense(torch.eye(2), torch.ones(2, 1), torch.ones(2, 1))
    >>> Z.times(torch.ones(2, dtype=torch.float64))
    tensor([-1., -1.], dtype=torch.float64)
    """

    def __init__(
        self,
        Y: Tensor,
        U: Tensor | None = None,
        V: Tensor | None = None,
        *,
        rows: Rows | None = None,
        entries: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.Y, self.U, self.V = Y, U, V
        self.rows = Rows() if rows is None else rows
        self.entries = entries
        self.shape = (Y.shape[0], Y.shape[1])
        self._kept: Tensor | None = None
        if len(list(row_blocks(*self.shape))) <= 1:
            self._kept = self._block(slice(0, self.shape[0]))

    @property
    def device(self) -> torch.device:
        """Where the entries are."""
        return self.Y.device

    def _block(self, part: slice, columns: slice = slice(None)) -> Tensor:
        data = self.Y[part, columns].to(torch.float64)
        residual = data
        if self.U is not None and self.V is not None and self.U.shape[1]:
            V = self.V[columns].to(torch.float64)
            residual = torch.addmm(data, self.U[part].to(torch.float64), V.mT, alpha=-1)
        return residual if self.entries is None else self.entries(residual, data)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """The rows, in blocks that fit into memory."""
        for part in row_blocks(*self.shape):
            yield part, (self._kept if self._kept is not None else self._block(part))

    def times(self, x: Tensor) -> Tensor:
        """Z x for columns x."""
        parts = [block @ x for _, block in self.blocks()]
        return torch.cat(parts) if parts else x.new_zeros(0, *x.shape[1:])

    def adjoint(self, y: Tensor) -> Tensor:
        """Zᵀ y, summed over the ranks."""
        total = y.new_zeros(self.shape[1], *y.shape[1:])
        for part, block in self.blocks():
            total += block.mT @ y[part]
        return self.rows.sum(total)

    def gram(self, part: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """ZᵀZ, of ``part(Z)`` where a function of the entries is given."""
        total: Tensor | None = None
        for _, block in self.blocks():
            product = gram((block if part is None else part(block)).mT)
            total = product if total is None else total + product
        if total is None:  # a rank without rows
            total = torch.zeros(self.shape[1], self.shape[1], dtype=torch.float64, device=self.Y.device)
        return self.rows.sum(total)

    def outer(self, part: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """ZZᵀ over the rows of all ranks, by blocks of columns where all rows are here."""
        if self._kept is not None or self.rows.ranks > 1:
            whole = self.dense()
            return gram(whole if part is None else part(whole))
        total = torch.zeros(self.shape[0], self.shape[0], dtype=torch.float64, device=self.Y.device)
        for columns in row_blocks(self.shape[1], self.shape[0]):
            block = self._block(slice(None), columns)
            total += gram(block if part is None else part(block))
        return total

    def dense(self) -> Tensor:
        """All entries, of all ranks."""
        return self.rows.gather(torch.cat([block for _, block in self.blocks()]))

    def moments(self) -> Moments:
        """⟨Y, Z⟩ and ‖Z‖², over all ranks."""
        return self._moments_with(self.Y)

    def _moments_with(self, Y: Tensor) -> Moments:
        totals = torch.zeros(3, dtype=torch.float64, device=Y.device)
        for part, block in self.blocks():
            data = Y[part].to(torch.float64)
            totals += torch.stack([(data * block).sum(), block.square().sum(), data.square().sum()])
        return moments(self.rows.sum(totals), self.shape[0] * self.shape[1])


class Sparse(DualMatrix):
    """A matrix that lives on the observed entries.

    ``values`` belong to the coordinates (``row``, ``column``), sorted by row. Where ``compact`` is False a bound may
    form the matrix after all.
    """

    def __init__(
        self,
        values: Tensor,
        index: tuple[Tensor, Tensor],
        shape: tuple[int, int],
        rows: Rows,
        *,
        compact: bool = True,
    ) -> None:
        self.compact = compact
        self.values, self.index, self.shape, self.rows = values.to(torch.float64), index, shape, rows
        self._forward = compressed(index[0], index[1], self.values, shape)
        order = torch.argsort(index[1], stable=True)
        self._backward = compressed(index[1][order], index[0][order], self.values[order], (shape[1], shape[0]))

    @property
    def device(self) -> torch.device:
        """Where the entries are."""
        return self.values.device

    def times(self, x: Tensor) -> Tensor:
        """Z x for columns x."""
        return self._forward @ x

    def adjoint(self, y: Tensor) -> Tensor:
        """Zᵀ y, summed over the ranks."""
        return self.rows.sum(self._backward @ y)

    def gram(self, part: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """ZᵀZ, of ``part(Z)`` where a function of the entries is given."""
        return self.rows.sum(_gram_of_entries(*self.index, self.values, self.shape, part))

    def outer(self, part: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """ZZᵀ over the rows of all ranks, of ``part(Z)`` where a function of the entries is given."""
        if self.rows.ranks > 1:
            whole = self.dense()
            return gram(whole if part is None else part(whole))
        order = torch.argsort(self.index[1], stable=True)
        row, column = (place[order] for place in self.index)
        return _gram_of_entries(column, row, self.values[order], (self.shape[1], self.shape[0]), part)

    def _here(self) -> Tensor:
        dense = self.values.new_zeros(self.shape)
        dense[self.index] = self.values
        return dense

    def dense(self) -> Tensor:
        """All entries, of all ranks."""
        return self.rows.gather(self._here())

    def moments(self, data: Tensor) -> Moments:
        """⟨Y, Z⟩ and ‖Z‖², over all ranks."""
        data = data.to(torch.float64)
        totals = [(data * self.values).sum(), self.values.square().sum(), data.square().sum()]
        return moments(self.rows.sum(torch.stack(totals)), len(data))


def _gram_of_entries(
    row: Tensor, column: Tensor, values: Tensor, shape: tuple[int, int], part: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """ZᵀZ of a matrix with these entries, sorted by row; a few rows at a time have their zeros."""
    total = values.new_zeros(shape[1], shape[1])
    # A quarter of the result, or a few megabytes where that is little.
    most = max(shape[1] // 4, _FEW // max(shape[1], 1), 1)
    for start in range(0, shape[0], most):
        size = min(most, shape[0] - start)
        begin, end = torch.searchsorted(row, row.new_tensor([start, start + size])).tolist()
        block = values.new_zeros(size, shape[1])
        block[row[begin:end] - start, column[begin:end]] = values[begin:end]
        total += gram((block if part is None else part(block)).mT)
    return total


def compressed(row: Tensor, column: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A compressed sparse matrix from coordinates that are sorted by row."""
    starts = torch.zeros(shape[0] + 1, dtype=torch.int64, device=row.device)
    starts[1:] = torch.bincount(row, minlength=shape[0]).cumsum(0)
    with warnings.catch_warnings():
        # torch announces on first use that compressed matrices are in beta.
        warnings.filterwarnings("ignore", message=".*[Ss]parse", category=UserWarning)
        return torch.sparse_csr_tensor(starts, column, values, shape)


def summation(entries: int) -> float:
    """What rounding may hide of a sum of so many terms, relative to the sum of their sizes."""
    return 8 * EPS * (8 + math.sqrt(entries))


def moments(totals: Tensor, entries: int) -> Moments:
    """Inner product and square from (⟨Y, Z⟩, ‖Z‖², ‖Y‖²), with the rounding of sums of so many terms."""
    inner, square, data = totals.tolist()
    hidden = summation(entries)
    return Moments(inner, square, hidden * math.sqrt(data * square), hidden * square)

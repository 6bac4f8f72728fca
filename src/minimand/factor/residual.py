r"""The dual point of dense and of sparse data: a residual :math:`Y - UV^\top`, or a function of its entries.

The matrix is never stored as a whole unless it is small: its rows are computed block by block, so Y may be a
memory-mapped file or one process's share of the rows.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..linalg import gram
from ..norms.spectral import EPS
from . import matrices
from .matrices import DualMatrix, DualMoments, RowSharding
from .sparse import SparseData

__all__ = ["DenseDual"]

# Terms of a sum in the precision of the data, before it is added up in float64.
CHUNK = 256


class DenseDual(DualMatrix):
    r""":math:`Z = a(Y - UV^\top, Y)` with an entrywise map a.

    Products with a residual of data in the matrix's own precision multiply by Y, U and V separately. Everything else
    is computed by blocks of rows; one block is kept if it is all. With ``chunked``, products with Y are sums of few
    terms in the precision of Y that are added up in float64: :meth:`product_error` bounds what that costs.

    >>> Z = DenseDual(torch.eye(2), torch.ones(2, 1), torch.ones(2, 1))
    >>> Z.times(torch.ones(2, dtype=torch.float64))
    tensor([-1., -1.], dtype=torch.float64)
    """

    def __init__(
        self,
        Y: Tensor | SparseData,
        U: Tensor | None = None,
        V: Tensor | None = None,
        *,
        rows: RowSharding | None = None,
        entries: Callable[[Tensor, Tensor], Tensor] | None = None,
        dtype: torch.dtype = torch.float64,
        chunked: bool = False,
    ) -> None:
        self.sparse = isinstance(Y, SparseData)
        self.Y: Any = Y.to(dtype) if isinstance(Y, SparseData) else Y
        self.U, self.V = U, V
        self.rows = RowSharding() if rows is None else rows
        self.entries = entries
        self.dtype = dtype
        self.chunked = chunked and entries is None and self.Y.dtype != dtype
        self.shape = (Y.shape[0], Y.shape[1])
        self.compact = self.sparse and self.Y.numel() > matrices.BLOCK // 8
        self._moments: DualMoments | None = None

    @property
    def device(self) -> torch.device:
        """The device of the data."""
        return self.Y.device

    @cached_property
    def _kept(self) -> Tensor | None:
        whole = not self.compact and len(list(matrices.row_blocks(*self.shape))) <= 1
        return self._block(slice(0, self.shape[0])) if whole else None

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor] | None:
        """U and V in the matrix's precision; None without."""
        if self.U is None or self.V is None or not self.U.shape[1]:
            return None
        return self.U.to(self.dtype), self.V.to(self.dtype)

    @property
    def _apart(self) -> bool:
        """Whether products are those with Y, U and V."""
        return self.entries is None and (self.Y.dtype == self.dtype or self.chunked)

    def _data_times(self, x: Tensor, *, adjoint: bool = False) -> Tensor:
        """Y x or Yᵀ x."""
        data = self.Y.mT if adjoint else self.Y
        if not self.chunked:
            return data @ x
        total, short = x.new_zeros(data.shape[0], *x.shape[1:]), x.to(self.Y.dtype)
        for begin in range(0, data.shape[1], CHUNK):
            total += data[:, begin : begin + CHUNK] @ short[begin : begin + CHUNK]
        return total

    def _block(self, part: slice, columns: slice = slice(None)) -> Tensor:
        data = self.Y[part, columns].to(self.dtype)
        residual = data
        if self._factors is not None:
            U, V = self._factors
            residual = torch.addmm(data, U[part], V[columns].mT, alpha=-1)
        return residual if self.entries is None else self.entries(residual, data)

    def blocks(self, *, cached: bool = False) -> Iterator[tuple[slice, Tensor]]:
        """The rows, in blocks of at most ``BLOCK`` entries, or ``CACHED``."""
        kept = self._kept
        for part in matrices.row_blocks(*self.shape, cached=(cached or self.sparse) and kept is None):
            yield part, (kept if kept is not None else self._block(part))

    def _split(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Blocks of rows whose sum with −UVᵀ is Z, and the block's U, if it has one."""
        if not self._apart and self._kept is None and self.entries is None and self._factors is not None:
            # The residual of a block costs as much as a product with as many vectors as there are components.
            for part in matrices.row_blocks(*self.shape, cached=True):
                yield part, self.Y[part].to(self.dtype), self._factors[0][part]
        else:
            for part, block in self.blocks(cached=True):
                yield part, block, None

    def times(self, x: Tensor) -> Tensor:
        """Z x for columns x."""
        if self._apart:
            image = self._data_times(x)
            return image if self._factors is None else image - self._factors[0] @ (self._factors[1].mT @ x)
        # A list of parts would keep the memory of the blocks between them from being used again.
        found = x.new_empty(self.shape[0], *x.shape[1:])
        for part, block, left in self._split():
            found[part] = block @ x
            if left is not None:
                found[part] -= left @ (self._factors[1].mT @ x)  # type: ignore[index]
        return found

    def adjoint(self, y: Tensor) -> Tensor:
        """Zᵀ y, summed over the processes."""
        if self._apart:
            image = self._data_times(y, adjoint=True)
            return self.rows.sum(
                image if self._factors is None else image - self._factors[1] @ (self._factors[0].mT @ y)
            )
        total = y.new_zeros(self.shape[1], *y.shape[1:])
        for part, block, left in self._split():
            total += block.mT @ y[part]
            if left is not None:
                total -= self._factors[1] @ (left.mT @ y[part])  # type: ignore[index]
        return self.rows.sum(total)

    def normal(self, x: Tensor) -> Tensor:
        """ZᵀZ x for columns x; every block is read once."""
        if self._apart:
            return self.adjoint(self.times(x))
        total = torch.zeros_like(x)
        for _, block, left in self._split():
            image = block @ x
            if left is not None:
                image = image - left @ (self._factors[1].mT @ x)  # type: ignore[index]
                total -= self._factors[1] @ (left.mT @ image)  # type: ignore[index]
            total += block.mT @ image
        return self.rows.sum(total)

    def work(self) -> float:
        """Floating point operations of a product with one vector; a stored entry costs several."""
        return 8.0 * self.Y.values.numel() if self.sparse else super().work()

    def block_work(self) -> float:
        """The residual of each block, unless it is kept."""
        rank = 0 if self._factors is None else self._factors[0].shape[1]
        return 0.0 if self._kept is not None else (rank + 8) * super().work()

    def product_error(self) -> float:
        """γ(‖Y‖ + Σ ‖uᵢ‖‖vᵢ‖): products with Y, U and V cancel."""
        data = self.moments().data ** 0.5 if self._moments is not None else self._size()
        pairs, terms = 0.0, 64 + sum(self.shape)
        if self._factors is not None:
            U, V = (x.to(torch.float64) for x in self._factors)
            pairs = float((self.rows.sum(U.square().sum(0)).sqrt() * V.norm(dim=0)).sum())
            terms += U.shape[1]
        error = terms * torch.finfo(self.dtype).eps * (data + pairs)
        return error + (CHUNK + 4) * torch.finfo(self.Y.dtype).eps * data if self.chunked else error

    def _size(self) -> float:
        """‖Y‖ over all processes."""
        if self.sparse:
            return float(self.Y.values.square().sum()) ** 0.5
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in matrices.row_blocks(*self.shape, cached=True):
            total += self.Y[part].to(torch.float64).square().sum()
        return float(self.rows.sum(total)) ** 0.5

    def square(self) -> float:
        """‖Z‖² over all processes."""
        if self._moments is not None:
            return self._moments.square
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for _, block in self.blocks(cached=True):
            total = total + block.to(torch.float64).square().sum()
        return float(self.rows.sum(total))

    def gram(self, part: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """ZᵀZ; with ``part`` that of ``part(Z)``."""
        total: Tensor | None = None
        for _, block in self.blocks():
            product = gram((block if part is None else part(block)).mT)
            total = product if total is None else total + product
        if total is None:  # a process without rows
            total = torch.zeros(self.shape[1], self.shape[1], dtype=self.dtype, device=self.Y.device)
        return self.rows.sum(total)

    def outer(self, part: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """ZZᵀ over all rows, by blocks of columns if this process has all rows."""
        if self._kept is not None or self.rows.ranks > 1:
            whole = self.dense()
            return gram(whole if part is None else part(whole))
        total = torch.zeros(self.shape[0], self.shape[0], dtype=self.dtype, device=self.Y.device)
        for columns in matrices.row_blocks(self.shape[1], self.shape[0]):
            block = self._block(slice(None), columns)
            total += gram(block if part is None else part(block))
        return total

    def dense(self) -> Tensor:
        """All entries, of all processes."""
        return self.rows.gather(torch.cat([block for _, block in self.blocks()]))

    def moments(self, data: Tensor | None = None) -> DualMoments:
        """⟨Y, Z⟩ and ‖Z‖² over all processes; ``data`` replaces Y if Z was given and is not a residual of Y."""
        if data is None and self._moments is not None:
            return self._moments
        if self.sparse:
            self._moments = self._sparse_moments()
            return self._moments
        Y = self.Y if data is None else data
        totals = torch.zeros(3, dtype=torch.float64, device=Y.device)
        for part, block in self.blocks(cached=True):
            known = Y[part].to(torch.float64)
            totals += torch.stack([(known * block).sum(), block.square().sum(), known.square().sum()])
        inner, square, size = self.rows.sum(totals).tolist()
        found = DualMoments(inner, square, size, self.shape[0] * self.shape[1])
        self._moments = found if data is None else self._moments
        return found

    def _sparse_moments(self) -> DualMoments:
        """⟨Y, Y − X⟩ and ‖Y‖² − 2⟨Y, X⟩ + ‖X‖² from thin products: no entry of X is formed."""
        data = float(self.Y.values.to(torch.float64).square().sum())
        if self._factors is None:
            return DualMoments(data, data, data, self.Y.numel())
        U, V = self._factors
        cross = float(((self.Y @ V) * U).sum())
        left, right = U.mT @ U, V.mT @ V
        norm = float((left * right).sum())
        pairs = float((left.diagonal() * right.diagonal()).sqrt().sum())
        terms = max(self.shape) + self.Y.values.numel() ** 0.5 + 64
        slack = 8 * EPS * terms * (data**0.5 + pairs) ** 2
        return DualMoments(data - cross, max(data - 2 * cross + norm, 0.0), data, self.Y.numel(), slack)

r"""Matrices whose rows may be sharded over processes: the dual points :math:`Z` of a factorisation problem.

A dual point of :math:`\min \ell(X) + \lambda\Omega(X)` is a matrix. Scaled so that its polar is at most
:math:`\lambda`, it bounds the minimum from below. All entries are float64. A dense dual point is a residual
:math:`Y - UV^\top` that is never stored as a whole: its rows are computed block by block, so :math:`Y` may be a
memory-mapped file or one process's share of the rows. The module also has the leading singular triples of such a
matrix.
"""

import abc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..linalg import gram
from ..norms.spectral import EPS
from ..solvers.iterate import iterate

__all__ = ["DenseDual", "DualMatrix", "RowSharding", "leading_singular", "orthonormal"]

# Entries of a block of rows that is computed at once: 64 MB of float64. Blocks of sums and thin products fit into cache.
BLOCK, CACHED = 8_000_000, 262_144
# Terms of a sum in the precision of the data, before it is added up in float64.
CHUNK = 256
OVERSAMPLE = 8
KRYLOV_SWEEPS = 6


@dataclass(frozen=True)
class RowSharding:
    """Where the rows of a matrix are: all in this process (``group`` is None), or sharded over a process group.

    Every sum over rows goes through :meth:`sum`, so each algorithm is written once for both cases.

    >>> RowSharding().sum(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """

    group: Any = None

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of ``tensor`` over the processes."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """The entrywise maximum of ``tensor`` over the processes."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def largest(self, tensor: Tensor) -> float:
        """The largest absolute value over the processes; zero for no entries."""
        ends = torch.stack(torch.aminmax(tensor)) if tensor.numel() else tensor.new_zeros(2)
        return float(self.max(ends.to(torch.float64).abs()).max())

    def _reduce(self, tensor: Tensor, op: Any) -> Tensor:
        if self.group is None:
            return tensor
        total = tensor.contiguous().clone()
        dist.all_reduce(total, op, group=self.group)
        return total

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The first process's ``tensor`` in all processes, which makes a random draw the same everywhere."""
        if self.group is None:
            return tensor
        shared = tensor.contiguous().clone()
        dist.broadcast(shared, dist.get_global_rank(self.group, 0), group=self.group)
        return shared

    def count(self, rows: int) -> int:
        """The total number of rows, given the number in this process."""
        return rows if self.group is None else int(self.sum(torch.tensor(float(rows), dtype=torch.float64)))

    def gather(self, tensor: Tensor) -> Tensor:
        """The rows of all processes, in the order of their ranks."""
        if self.group is None:
            return tensor
        sizes = torch.zeros(self.ranks, dtype=torch.int64)
        sizes[dist.get_rank(self.group)] = len(tensor)
        sizes = self.sum(sizes)
        padded = tensor.new_zeros(int(sizes.max()), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in range(self.ranks)]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes.tolist(), strict=True)])


def row_blocks(rows: int, columns: int, *, cached: bool = False) -> Iterator[slice]:
    """Slices of rows, each with at most ``BLOCK`` entries, or ``CACHED``, and at least one row."""
    step = max(1, (min(BLOCK, CACHED) if cached else BLOCK) // max(columns, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class DualMoments(NamedTuple):
    """The sums ⟨Y, Z⟩, ‖Z‖² and ‖Y‖² of a dual point and the data, each of ``entries`` terms."""

    inner: float
    square: float
    data: float
    entries: int


class DualMatrix(abc.ABC):
    """A matrix with products from both sides; its rows may be sharded."""

    rows: RowSharding
    shape: tuple[int, int]  # the rows of this process × all columns
    #: Certificates need float64. A search for directions may use the precision of the data.
    dtype: torch.dtype = torch.float64
    #: Whether forming a dense matrix of this size is forbidden.
    compact: bool = False

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """The device of the entries."""

    @property
    def flat(self) -> bool:
        """Whether there are fewer rows than columns, all in this process; Gram matrices are then of the rows."""
        return self.rows.ranks == 1 and self.shape[0] < self.shape[1]

    def noise(self, columns: int, generator: torch.Generator | None, *, left: bool = False) -> Tensor:
        """Standard normal numbers with a row per column of Z, equal in all processes; ``left``: a row per row of Z."""
        drawn = torch.randn(self.shape[0 if left else 1], columns, dtype=self.dtype, generator=generator)
        return self.rows.broadcast(drawn.to(self.device))

    @abc.abstractmethod
    def times(self, x: Tensor) -> Tensor:
        """Z x for columns x."""

    @abc.abstractmethod
    def adjoint(self, y: Tensor) -> Tensor:
        """Zᵀ y, summed over the processes."""

    @abc.abstractmethod
    def gram(self, part: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """ZᵀZ; with ``part``, a function of the entries, the Gram matrix of ``part(Z)``."""

    @abc.abstractmethod
    def outer(self, part: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """ZZᵀ over the rows of all processes; with ``part`` that of ``part(Z)``."""

    @abc.abstractmethod
    def dense(self) -> Tensor:
        """All entries, of all processes."""

    @abc.abstractmethod
    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """The rows of this process, in dense blocks of at most ``BLOCK`` entries."""

    @abc.abstractmethod
    def square(self) -> float:
        """‖Z‖² over all processes."""

    def normal(self, x: Tensor) -> Tensor:
        """ZᵀZ x for columns x."""
        return self.adjoint(self.times(x))

    def work(self) -> float:
        """Floating point operations of a product with one vector."""
        return 2.0 * self.full_rows() * self.shape[1]

    def block_work(self) -> float:
        """Floating point operations to form the blocks once."""
        return 4 * self.work()

    def product_error(self) -> float:
        """A bound on the rounding error of a product with a unit vector that is not relative to ‖Z‖."""
        return 0.0

    def full_rows(self) -> int:
        """The number of rows over all processes."""
        return self.rows.count(self.shape[0])


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
        Y: Tensor,
        U: Tensor | None = None,
        V: Tensor | None = None,
        *,
        rows: RowSharding | None = None,
        entries: Callable[[Tensor, Tensor], Tensor] | None = None,
        dtype: torch.dtype = torch.float64,
        chunked: bool = False,
    ) -> None:
        self.Y, self.U, self.V = Y, U, V
        self.rows = RowSharding() if rows is None else rows
        self.entries = entries
        self.dtype = dtype
        self.chunked = chunked and entries is None and Y.dtype != dtype
        self.shape = (Y.shape[0], Y.shape[1])
        self._moments: DualMoments | None = None

    @property
    def device(self) -> torch.device:
        """The device of the data."""
        return self.Y.device

    @cached_property
    def _kept(self) -> Tensor | None:
        return self._block(slice(0, self.shape[0])) if len(list(row_blocks(*self.shape))) <= 1 else None

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
        for part in row_blocks(*self.shape, cached=cached and kept is None):
            yield part, (kept if kept is not None else self._block(part))

    def _split(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Blocks of rows whose sum with −UVᵀ is Z, and the block's U, if it has one."""
        if not self._apart and self._kept is None and self.entries is None and self._factors is not None:
            # The residual of a block costs as much as a product with as many vectors as there are components.
            for part in row_blocks(*self.shape, cached=True):
                yield part, self.Y[part].to(self.dtype), self._factors[0][part]
        else:
            for part, block in self.blocks(cached=True):
                yield part, block, None

    def times(self, x: Tensor) -> Tensor:
        """Z x for columns x."""
        if self._apart:
            image = self._data_times(x)
            return image if self._factors is None else image - self._factors[0] @ (self._factors[1].mT @ x)
        parts = []
        for _, block, left in self._split():
            image = block @ x
            parts.append(image if left is None else image - left @ (self._factors[1].mT @ x))  # type: ignore[index]
        return torch.cat(parts) if parts else x.new_zeros(0, *x.shape[1:])

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

    def block_work(self) -> float:
        """The residual of each block, unless it is kept."""
        rank = 0 if self._factors is None else self._factors[0].shape[1]
        return 0.0 if self._kept is not None else (rank + 8) * self.work()

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
        parts = [self.Y[part].to(torch.float64).square().sum() for part in row_blocks(*self.shape, cached=True)]
        return float(self.rows.sum(torch.stack([*parts, torch.zeros((), dtype=torch.float64)]).sum())) ** 0.5

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
        for columns in row_blocks(self.shape[1], self.shape[0]):
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
        Y = self.Y if data is None else data
        totals = torch.zeros(3, dtype=torch.float64, device=Y.device)
        for part, block in self.blocks(cached=True):
            known = Y[part].to(torch.float64)
            totals += torch.stack([(known * block).sum(), block.square().sum(), known.square().sum()])
        inner, square, size = self.rows.sum(totals).tolist()
        found = DualMoments(inner, square, size, self.shape[0] * self.shape[1])
        self._moments = found if data is None else self._moments
        return found


def summation_error(entries: int) -> float:
    """A bound on the rounding error of a sum of ``entries`` terms, relative to the sum of their absolute values."""
    return 8 * EPS * (8 + math.sqrt(entries))


def orthonormal(columns: Tensor, rows: RowSharding) -> Tensor:
    r"""An orthonormal basis of the span of the columns, whose rows may be sharded.

    In one process it is Householder QR. Over several it is Cholesky QR twice, each with one all-reduce of a small
    Gram matrix.
    """
    if rows.group is None:
        return torch.linalg.qr(columns).Q

    def cholesky_qr(columns: Tensor, k: int) -> Tensor:
        product = rows.sum(columns.mT @ columns)
        values, vectors = torch.linalg.eigh(product)
        keep = values > values[-1].clamp_min(0) * len(values) * 4 * torch.finfo(columns.dtype).eps
        return columns @ (vectors[:, keep] / values[keep].sqrt())

    return iterate(cholesky_qr, columns, 2 if columns.shape[1] else 0)[0]


def leading_singular(
    matrix: DualMatrix, count: int, *, generator: torch.Generator | None = None, sweeps: int = KRYLOV_SWEEPS
) -> tuple[Tensor, Tensor, Tensor]:
    """The ``count`` leading singular triples by block Krylov iteration: left vectors (as rows), values, right vectors.

    The values are lower bounds.

    >>> leading_singular(DenseDual(torch.diag(torch.tensor([1.0, 3.0, 2.0]))), 2)[1].round(decimals=6)
    tensor([3., 2.], dtype=torch.float64)
    """
    n, m = matrix.shape[1], matrix.full_rows()
    count = min(count, n, m)
    width = min(count + OVERSAMPLE, n, m)
    space: list[Tensor] = []

    def power(block: Tensor, k: int) -> Tensor:
        block = torch.linalg.qr(block).Q
        space.append(block)
        return matrix.normal(block)

    iterate(power, matrix.noise(width, generator), max(1, min(sweeps, n // width)))
    # Rayleigh–Ritz on the whole Krylov space, whose blocks are all computed already.
    basis = torch.linalg.qr(torch.cat(space, dim=1)).Q
    left = orthonormal(matrix.times(basis), matrix.rows)
    right, values, mix = torch.linalg.svd(matrix.adjoint(left), full_matrices=False)
    return (left @ mix.mT).mT[:count], values[:count], right.mT[:count]

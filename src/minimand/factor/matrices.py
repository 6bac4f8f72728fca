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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..norms.spectral import EPS
from ..solvers.iterate import iterate

__all__ = ["DualMatrix", "RowSharding", "leading_singular", "orthonormal", "signs"]

# Entries of a block of rows that is computed at once: 64 MB of float64. Those of sums and thin products fit into cache.
BLOCK, CACHED = 8_000_000, 262_144
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
    """The sums ⟨Y, Z⟩, ‖Z‖² and ‖Y‖² of a dual point and the data, each of ``entries`` terms.

    ``slack`` bounds the rounding error of the first two that is not relative to them.
    """

    inner: float
    square: float
    data: float
    entries: int
    slack: float = 0.0


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


def summation_error(entries: int) -> float:
    """A bound on the rounding error of a sum of ``entries`` terms, relative to the sum of their absolute values."""
    return 8 * EPS * (8 + math.sqrt(entries))


def signs(columns: Tensor) -> Tensor:
    """The sign of the largest entry of each column, which makes singular vectors unique.

    >>> signs(torch.tensor([[1.0, 1.0], [-2.0, 0.0]]))
    tensor([-1.,  1.])
    """
    if not len(columns):
        return columns.new_ones(columns.shape[1])
    return torch.copysign(torch.ones_like(columns[0]), columns.gather(0, columns.abs().argmax(0, keepdim=True))[0])


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

    >>> from .residual import DenseDual
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

"""The rows of a matrix, on one process or spread over the ranks of a group."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Rows"]

# Entries of a block of rows that is worked on at once: 64 MB of float64.
BLOCK = 8_000_000


@dataclass(frozen=True)
class Rows:
    """Where the rows are: ``group`` is None for all of them here, else each rank holds its share.

    Everything that is summed over rows passes through :meth:`sum`, so the algorithms are written once.

    >>> Rows().sum(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """

    group: Any = None

    @property
    def ranks(self) -> int:
        """How many processes share the rows."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks of what each computed from its rows."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """The largest over the ranks."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def _reduce(self, tensor: Tensor, op: Any) -> Tensor:
        if self.group is None:
            return tensor
        total = tensor.contiguous().clone()
        dist.all_reduce(total, op, group=self.group)
        return total

    def broadcast(self, tensor: Tensor) -> Tensor:
        """What the first rank has, everywhere: a random draw must be the same on all."""
        if self.group is None:
            return tensor
        shared = tensor.contiguous().clone()
        dist.broadcast(shared, dist.get_global_rank(self.group, 0), group=self.group)
        return shared

    def count(self, rows: int) -> int:
        """The number of rows over all ranks."""
        return rows if self.group is None else int(self.sum(torch.tensor(float(rows), dtype=torch.float64)))

    def gather(self, tensor: Tensor) -> Tensor:
        """All rows, in the order of the ranks."""
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


def row_blocks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of rows whose blocks fit into memory however long the matrix is."""
    step = max(1, BLOCK // max(columns, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))

"""Ridge regressions of all rows on their observed entries, in batches of rows with similar numbers of entries."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..solvers.iterate import iterate
from ..solvers.linear import ridge_factor

__all__ = ["RowGroups"]

# Entries of a batch of ridge regressions.
BATCH = 2_000_000
CODE_SWEEPS = 1000


@dataclass(frozen=True)
class RowGroups:
    """The observed entries row by row, in batches of rows with similar numbers of entries, padded to the longest.

    Each batch holds the rows' indices, the columns of their entries (one past the last column: padding), and the
    entries' positions in the list of values.
    """

    batches: tuple[tuple[Tensor, Tensor, Tensor], ...]
    rows: int

    @classmethod
    def of(cls, row: Tensor, column: Tensor, shape: tuple[int, int], rank: int = 32) -> "RowGroups":
        """Batches for the entries at (row, column) of a matrix, in any order."""
        rows, columns = shape
        order = torch.argsort(row, stable=True)
        counts = torch.bincount(row, minlength=rows)
        starts = counts.cumsum(0) - counts
        by_length = torch.argsort(counts, stable=True)
        batches: list[tuple[Tensor, Tensor, Tensor]] = []

        def next_batch(done: int, k: int) -> int:
            some = by_length[done:]
            lengths = counts[some]
            # The rows that fit if all are as long as the longest of them, and are not much longer than the first.
            fits = lengths * torch.arange(1, len(some) + 1, device=row.device) * rank <= BATCH
            fits &= lengths <= 1.25 * lengths[0] + 8
            take = max(1, int(fits.int().cumprod(0).sum()))
            some, lengths = some[:take], lengths[:take]
            offsets = torch.arange(int(lengths[-1]), device=row.device)
            seen = offsets < lengths.unsqueeze(1)
            places = order[(starts[some].unsqueeze(1) + offsets).clamp_max(len(row) - 1)]
            batches.append((some, torch.where(seen, column[places], columns), places))
            return done + take

        empty = int((counts == 0).sum())  # the regression of a row without entries is zero
        iterate(next_batch, empty, rows - empty, until=lambda done, k: done >= rows)
        return cls(tuple(batches), rows)

    def ridge(self, values: Tensor, other: Tensor, lam: float) -> tuple[Tensor, Tensor]:
        """The ridge solutions of all rows and the right-hand sides of their systems: rows × r."""
        out, sides = other.new_zeros(2, self.rows, other.shape[1])
        for rows, design, target in self._systems(values, other):
            out[rows] = ridge_factor(design.mT, lam).solve(target).squeeze(1)
            sides[rows] = target.squeeze(1)
        return out, sides

    def nonnegative(self, values: Tensor, other: Tensor, lam: float) -> tuple[Tensor, bool]:
        """The ridge solutions u ≥ 0 of all rows, by coordinate descent, and whether they converged."""
        grams, sides = self.normal(values, other)
        diagonal = grams.diagonal(dim1=1, dim2=2) + lam
        size = torch.finfo(other.dtype).eps ** 0.5 * 0.1

        def sweep(state: tuple[Tensor, float], k: int) -> tuple[Tensor, float]:
            before = state[0]
            U = before.clone()
            for i in range(U.shape[1]):
                rest = (grams[:, i] * U).sum(1) - grams[:, i, i] * U[:, i]
                U[:, i] = ((sides[:, i] - rest) / diagonal[:, i]).clamp_min(0.0)
            return U, float((U - before).abs().max()) / max(float(U.abs().max()), torch.finfo(U.dtype).tiny)

        start = (torch.zeros_like(sides), math.inf)
        (U, moved), _ = iterate(sweep, start, CODE_SWEEPS, until=lambda s, k: s[1] <= size)
        return U, moved <= 1e-4

    def normal(self, values: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """The Gram matrices and right-hand sides of all rows, to be summed over processes."""
        grams = other.new_zeros(self.rows, other.shape[1], other.shape[1])
        sides = other.new_zeros(self.rows, other.shape[1])
        for rows, design, target in self._systems(values, other):
            grams[rows] = design.mT @ design
            sides[rows] = target.squeeze(1)
        return grams, sides

    def _systems(self, values: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Rows, their designs (rows × entries × r) and their right-hand sides (rows × 1 × r)."""
        padded = torch.cat([other, other.new_zeros(1, other.shape[1])])
        for rows, columns, places in self.batches:
            design = padded.index_select(0, columns.flatten()).unflatten(0, columns.shape)
            yield rows, design, values[places].to(other.dtype).unsqueeze(1) @ design

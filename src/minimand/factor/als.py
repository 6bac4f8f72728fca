r"""Alternating ridge regressions on the observed entries.

At balance :math:`\sum_i\|U_i\|\|V_i\| = \tfrac12(\|U\|_F^2 + \|V\|_F^2)`, and with V fixed each row of U is a ridge
regression on the columns that were observed in it,

.. math:: u_j = (V_{\Omega_j}^\top V_{\Omega_j} + \lambda I)^{-1} V_{\Omega_j}^\top y_j ,

at a cost linear in the number of observed entries. Rows of similar length are solved together; no dense matrix of the
data's size is formed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..functions import NonNegative
from ..operators import Dense
from ..solvers import FISTA, Problem, solve
from ..solvers.linear import ridge_factor
from .descent import LocalDescent, Pair
from .losses import Observed
from .regularisers import L2
from .rows import Rows, row_blocks

__all__ = ["Groups", "ObservedDescent", "rotated"]

ENTRIES = 2_000_000
NEGLIGIBLE = 1e-6


@dataclass(frozen=True)
class Groups:
    """The observed entries row by row, in batches of rows of similar length, padded to the longest.

    Each batch holds the rows' numbers, the columns of their entries, their places in the list of values, and which
    entries are padding.
    """

    batches: tuple[tuple[Tensor, Tensor, Tensor], ...]
    rows: int

    @classmethod
    def of(cls, row: Tensor, column: Tensor, shape: tuple[int, int], rank: int = 32) -> "Groups":
        """Batches for the entries at (row, column) of a matrix, in any order."""
        rows, columns = shape
        order = torch.argsort(row, stable=True)
        counts = torch.bincount(row, minlength=rows)
        starts = counts.cumsum(0) - counts
        by_length = torch.argsort(counts, stable=True)
        batches = []
        done = int((counts == 0).sum())  # rows without entries stay zero
        while done < rows:
            some = by_length[done:]
            lengths = counts[some]
            # As many rows as fit when all are as long as the longest among them, and not much longer than the first.
            fits = lengths * torch.arange(1, len(some) + 1, device=row.device) * rank <= ENTRIES
            fits &= lengths <= 1.25 * lengths[0] + 8
            take = max(1, int(fits.int().cumprod(0).sum()))
            some, lengths = some[:take], lengths[:take]
            offsets = torch.arange(int(lengths[-1]), device=row.device)
            seen = offsets < lengths.unsqueeze(1)
            places = order[(starts[some].unsqueeze(1) + offsets).clamp_max(len(row) - 1)]
            batches.append((some, torch.where(seen, column[places], columns), places))
            done += take
        return cls(tuple(batches), rows)

    def ridge(self, values: Tensor, other: Tensor, lam: float) -> tuple[Tensor, Tensor]:
        """The ridge solutions of all rows and the right sides of their systems: rows × r."""
        out, sides = other.new_zeros(2, self.rows, other.shape[1])
        for rows, design, target in self._systems(values, other):
            out[rows] = ridge_factor(design.mT, lam).solve(target).squeeze(1)
            sides[rows] = target.squeeze(1)
        return out, sides

    def normal(self, values: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """The Gram matrices and right sides of all rows: what ranks add up."""
        grams = other.new_zeros(self.rows, other.shape[1], other.shape[1])
        sides = other.new_zeros(self.rows, other.shape[1])
        for rows, design, target in self._systems(values, other):
            grams[rows] = design.mT @ design
            sides[rows] = target.squeeze(1)
        return grams, sides

    def _systems(self, values: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Rows, their designs (rows × entries × r) and their right sides (rows × 1 × r)."""
        padded = torch.cat([other, other.new_zeros(1, other.shape[1])])
        for rows, columns, places in self.batches:
            design = padded.index_select(0, columns.flatten()).unflatten(0, columns.shape)
            yield rows, design, values[places].to(other.dtype).unsqueeze(1) @ design


@dataclass(frozen=True)
class ObservedDescent(LocalDescent):
    """Ridge regressions for U and V in turn; vectors are rows, as everywhere in descents."""

    loss: Observed
    by_row: Groups
    by_column: Groups
    lam: float
    rows: Rows
    square: float  # half of the data's squared norm
    tol: float = 1e-6
    theta: L2 = L2()  # noqa: RUF009 -- frozen

    @classmethod
    def of(cls, loss: Observed, lam: float) -> "ObservedDescent":
        """The descent of a loss."""
        row, column = loss.index
        n, m = loss.shape
        groups = Groups.of(row, column, (n, m)), Groups.of(column, row, (m, n))
        return cls(loss, *groups, lam, loss.rows, 0.5 * loss.size() ** 2)

    def left(self, pair: Pair) -> Tensor:
        """Each row's ridge regression."""
        return self.by_row.ridge(self.loss.values, pair.V.mT.contiguous(), self.lam)[0].mT

    def right(self, pair: Pair) -> tuple[Tensor, float]:
        """Each column's ridge regression, and the objective in its quadratic form."""
        U = pair.U.mT.contiguous()
        if self.rows.group is None:
            V, sides = self.by_column.ridge(self.loss.values, U, self.lam)
        else:
            grams, sides = (self.rows.sum(x) for x in self.by_column.normal(self.loss.values, U))
            identity = torch.eye(U.shape[1], dtype=U.dtype, device=U.device)
            V = torch.linalg.solve(grams + self.lam * identity, sides)
        # At the solution of a ridge regression ‖y − Dv‖² + λ‖v‖² = ‖y‖² − ⟨v, Dᵀy⟩: no residual is formed.
        penalty = 0.5 * self.lam * float(self.rows.sum(U.to(torch.float64).square().sum()))
        explained = 0.5 * float((V.to(torch.float64) * sides.to(torch.float64)).sum())
        return V.mT, self.square - explained + penalty

    def settled(self, pair: Pair) -> Pair:
        """Rotated to the singular vectors of the product, at their best sizes, without what is negligible."""
        pair, values = self._sized(*rotated(pair, self.rows))
        size = max(float(values.max()), (2 * self.square) ** 0.5) if pair.rank else 0.0
        return pair.take(torch.nonzero(values > NEGLIGIBLE * size).squeeze(1))

    def _sized(self, pair: Pair, values: Tensor) -> tuple[Pair, Tensor]:
        r"""Singular vectors with the sizes that are best for them together,

        .. math:: \min_{s \ge 0} \tfrac12\|P_\Omega(Y - P\operatorname{diag}(s)Q^\top)\|^2 + \lambda\sum_i s_i .

        Ridge regressions let a size near zero grow or die by a factor near one in each sweep; here it takes one step.
        """
        keep = values > torch.finfo(values.dtype).eps * values.max() if pair.rank else values > 0
        pair, values = pair.take(torch.nonzero(keep).squeeze(1)), values[keep]
        if pair.rank == 0:
            return pair, values
        root = values.sqrt().unsqueeze(1)
        left, right = (x.div(root).mT.to(torch.float64) for x in pair)
        row, column = self.loss.index
        product = left.new_zeros(pair.rank, pair.rank)
        linear = left.new_zeros(1, pair.rank)
        for part in row_blocks(len(row), pair.rank):
            atoms = left[row[part]] * right[column[part]]
            product += atoms.mT @ atoms
            linear += self.loss.values[part].to(torch.float64) @ atoms
        product, linear = self.rows.sum(product), self.rows.sum(linear)
        squares, vectors = torch.linalg.eigh(product)
        operator = Dense(vectors * squares.clamp_min(0).sqrt())
        problem = Problem(operator, NonNegative(), torch.zeros_like(linear), bias=linear - self.lam)
        start = values.to(torch.float64).unsqueeze(0)
        sizes = solve(problem, FISTA(iters=1000), x0=start, tol=1e-10 * float(linear.abs().max()) + 1e-300).x[0]
        if float(problem.objective(sizes.unsqueeze(0))) > float(problem.objective(start)):
            return pair, values
        scale = (sizes.to(values.dtype) / values).sqrt().unsqueeze(1)
        return Pair(pair.U * scale, pair.V * scale), sizes.to(values.dtype)

    def with_tol(self, tol: float) -> "ObservedDescent":
        """The same descent, stopping elsewhere."""
        return replace(self, tol=tol)


def rotated(pair: Pair, rows: Rows) -> tuple[Pair, Tensor]:
    r"""The factors :math:`P\Sigma^{1/2}, Q\Sigma^{1/2}` of the same product, and :math:`\Sigma`: their penalty is the
    nuclear norm.

    >>> pair, values = rotated(Pair(torch.eye(2), torch.eye(2) * 3), Rows())
    >>> values
    tensor([3., 3.])
    """
    if pair.rank == 0:
        return pair, pair.U.new_zeros(0)
    wide = torch.float64
    basis, triangle = torch.linalg.qr(pair.V.mT.to(wide))
    image = pair.U.mT.to(wide) @ triangle.mT
    squares, mix = torch.linalg.eigh(rows.sum(image.mT @ image))
    order = torch.argsort(squares, descending=True)
    values, mix = squares[order].clamp_min(0).sqrt(), mix[:, order]
    root = values.sqrt().clamp_min(torch.finfo(wide).tiny ** 0.25)
    U, V = (image @ mix / root).mT, ((basis @ mix) * values.sqrt()).mT
    like = pair.U.dtype
    return Pair(U.to(like).contiguous(), V.to(like).contiguous()), values.to(like)

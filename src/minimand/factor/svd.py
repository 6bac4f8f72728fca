"""Leading singular triples by block Krylov iteration, of matrices whose rows may be spread over ranks."""

import torch
from torch import Tensor

from .duals import DualMatrix
from .rows import Rows

__all__ = ["leading_singular", "orthonormal"]

OVERSAMPLE = 8
SWEEPS = 6


def orthonormal(columns: Tensor, rows: Rows) -> Tensor:
    r"""An orthonormal basis of the columns, whose rows may be spread over ranks.

    On one process it is Householder's QR; over ranks, Cholesky QR twice, with one all-reduce of a small Gram each.
    """
    if rows.group is None:
        return torch.linalg.qr(columns).Q
    for _ in range(2 if columns.shape[1] else 0):
        product = rows.sum(columns.mT @ columns)
        values, vectors = torch.linalg.eigh(product)
        keep = values > values[-1].clamp_min(0) * len(values) * 4 * torch.finfo(columns.dtype).eps
        columns = columns @ (vectors[:, keep] / values[keep].sqrt())
    return columns


def leading_singular(
    matrix: DualMatrix, count: int, *, generator: torch.Generator | None = None, sweeps: int = SWEEPS
) -> tuple[Tensor, Tensor, Tensor]:
    """The ``count`` leading singular triples, from below: left vectors (as rows), values, right vectors (as rows).

    >>> from .duals import Dense
    >>> leading_singular(Dense(torch.diag(torch.tensor([1.0, 3.0, 2.0]))), 2)[1].round(decimals=6)
    tensor([3., 2.], dtype=torch.float64)
    """
    n, m = matrix.shape[1], matrix.full_rows()
    count = min(count, n, m)
    width = min(count + OVERSAMPLE, n, m)
    block = matrix.noise(width, generator)
    space: list[Tensor] = []
    for _ in range(max(1, min(sweeps, n // width))):
        block = torch.linalg.qr(block).Q
        space.append(block)
        block = matrix.adjoint(matrix.times(block))
    # Rayleigh–Ritz on the whole Krylov space: every block of it has been paid for.
    basis = torch.linalg.qr(torch.cat(space, dim=1)).Q
    left = orthonormal(matrix.times(basis), matrix.rows)
    right, values, mix = torch.linalg.svd(matrix.adjoint(left), full_matrices=False)
    return (left @ mix.mT).mT[:count], values[:count], right.mT[:count]

"""Factors whose terms all weigh the same (003, "Any Factorization Can Be Equalized")."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...solvers.iterate import iterate
from .arrays import as_matrix, like, require_rank
from .objective import check_factors

__all__ = ["equalize", "equalized_factors", "equalizing_rotation"]


def equalize(U: Any, V: Any) -> tuple[Any, Any]:
    r"""Other factors of the same product, every term of which has the same norm.

    .. math::

        U'V'^\top = UV^\top, \qquad \|U'_i\| = \|V'_i\|, \qquad
        \|U'_i\|\|V'_i\| = \frac{\|UV^\top\|_*}{r} \quad \text{for all } i .

    Among all factors of a matrix with r columns these minimise the dropout regulariser
    :math:`\sum_i\|U_i\|^2\|V_i\|^2`, whose minimum is :math:`\|UV^\top\|_*^2/r`. The singular value decomposition
    of the product, from the factors alone, gives :math:`W\Sigma^{1/2}` and :math:`Q\Sigma^{1/2}`; then a rotation makes
    the diagonal of the Gram matrix constant.

    Source: 003; Mianjy, Arora and Vidal 2018, Algorithm 1.

    >>> U, V = equalize(torch.diag(torch.tensor([3.0, 1.0])), torch.eye(2))
    >>> torch.allclose(U @ V.mT, torch.diag(torch.tensor([3.0, 1.0])), atol=1e-6)
    True
    >>> torch.allclose(U.norm(dim=0) * V.norm(dim=0), torch.tensor([2.0, 2.0]))
    True
    """
    left, right = as_matrix("U", U), as_matrix("V", V)
    check_factors(left, right)
    (q_left, r_left), (q_right, r_right) = torch.linalg.qr(left), torch.linalg.qr(right)
    w, values, q = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
    first, second = equalized_factors(q_left @ w, values, (q_right @ q.mT).mT, left.shape[1])
    return like(first, U), like(second, V)


def equalized_factors(left: Tensor, values: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Equalised factors with ``rank`` columns from a singular value decomposition."""
    rotation = equalizing_rotation(values, rank)
    root = values.sqrt()
    return (left * root) @ rotation, (right.mT * root) @ rotation


def equalizing_rotation(values: Tensor, rank: int) -> Tensor:
    r"""The first rows of an orthogonal :math:`R \in \mathbb{R}^{r\times r}` with constant diagonal of
    :math:`R^\top \operatorname{diag}(\sigma, 0, \dots, 0) R`.

    A Hadamard matrix does it for every σ where r is a power of two. Otherwise at most r − 1 Givens rotations do: each
    takes an entry of the diagonal below the mean and one above it, and makes the first the mean. What is left to do
    stays diagonal, so the angle has the closed form :math:`\cos^2 = (d_j - \mu)/(d_j - d_i)`.

    >>> R = equalizing_rotation(torch.tensor([5.0, 1.0]), 3)
    >>> (R.mT @ torch.diag(torch.tensor([5.0, 1.0])) @ R).diagonal()
    tensor([2., 2., 2.])
    """
    require_rank(rank)
    if rank & (rank - 1) == 0:
        return _hadamard(rank, len(values), values)
    return _rotations(rank, values)


class _Rotated(NamedTuple):
    rotation: Tensor
    diagonal: list[float]


def _rotations(rank: int, values: Tensor) -> Tensor:
    """Givens rotations until the diagonal is flat."""
    state = _Rotated(
        torch.eye(len(values), rank, dtype=values.dtype, device=values.device),
        [*values.tolist(), *[0.0] * (rank - len(values))],
    )
    mean = math.fsum(state.diagonal) / rank
    return iterate(lambda s, k: _givens(s, mean), state, rank - 1, until=lambda s, k: _is_flat(s, mean))[0].rotation


def _is_flat(state: _Rotated, mean: float) -> bool:
    return max(state.diagonal) <= mean or min(state.diagonal) >= mean


def _givens(state: _Rotated, mean: float) -> _Rotated:
    """Rotate the smallest and the largest entry of the diagonal so that one of them becomes the mean."""
    rotation, diagonal = state
    high, low = max(diagonal), min(diagonal)
    j, i = diagonal.index(high), diagonal.index(low)
    if high <= mean or low >= mean:
        return state
    cos, sin = math.sqrt((high - mean) / (high - low)), math.sqrt((mean - low) / (high - low))
    # In place: the rotation is this loop's own, and a copy for each of r steps would cost r times as much.
    raised = cos * rotation[:, i] + sin * rotation[:, j]
    rotation[:, j] = cos * rotation[:, j] - sin * rotation[:, i]
    rotation[:, i] = raised
    diagonal[i], diagonal[j] = mean, high + low - mean
    return state


def _hadamard(rank: int, rows: int, like: Tensor) -> Tensor:
    """The first rows of Sylvester's matrix of this power of two, over its root."""
    index = torch.arange(rank, device=like.device)
    common = index[:rows, None] & index
    parity = torch.zeros_like(common)
    for bit in range(rank.bit_length()):
        parity ^= (common >> bit) & 1
    return (1 - 2 * parity).to(like.dtype) / math.sqrt(rank)

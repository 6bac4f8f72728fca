"""The global minimum of dropout in closed form (003, "Global Optima are Low Rank")."""

from typing import Any

import torch
from torch import Tensor

from .arrays import as_matrix, like, require_rank
from .objective import dropout_weight

__all__ = ["closed_form", "dropout_optimum", "nuclear_squared"]


def dropout_optimum(Y: Any, rank: int, p: float) -> tuple[Any, float, int]:
    r"""The global minimum of matrix factorisation with dropout, for a fixed number r of terms.

    .. math::

        \min_{U, V}\; \|Y - UV^\top\|^2 + \lambda \sum_{i=1}^r \|U_i\|^2\|V_i\|^2
        = \min_{\operatorname{rank} X \le r}\; \|Y - X\|^2 + \tfrac{\lambda}{r} \|X\|_*^2,
        \qquad \lambda = \frac{p}{1-p} .

    The solution keeps the :math:`\rho` largest singular values of Y, each lowered by the threshold

    .. math::

        \tau = \frac{\lambda \sum_{i \le \rho} \sigma_i}{r + \lambda\rho}, \qquad
        \rho = \max\Bigl\{k \le \min(r, m, n) : \sigma_k > \frac{\lambda\sum_{i\le k}\sigma_i}{r + \lambda k}\Bigr\} .

    Balanced factors of X with equal :math:`\|U_i\|\|V_i\| = \|X\|_*/r` attain it; :func:`equalize` makes them.
    Sources: 003; Mianjy, Arora and Vidal 2018.

    Args:
        Y: The matrix, an array or a tensor.
        rank: The number r of terms; it may exceed both sides of Y.
        p: The drop rate, in [0, 1).

    Returns:
        X, of Y's kind, shape and precision; τ; and the rank of X.

    >>> X, threshold, rank = dropout_optimum(torch.diag(torch.tensor([4.0, 1.0])), 1, 0.5)
    >>> X, threshold, rank
    (tensor([[2., 0.],
            [0., 0.]]), 2.0, 1)
    """
    left, shrunk, right, threshold = closed_form(as_matrix("Y", Y), rank, dropout_weight(p))
    return like((left * shrunk) @ right, Y), threshold, len(shrunk)


def closed_form(Y: Tensor, rank: int, weight: float) -> tuple[Tensor, Tensor, Tensor, float]:
    """The singular triples of the optimum, and the threshold."""
    require_rank(rank)
    left, values, right = torch.linalg.svd(Y, full_matrices=False)
    values, threshold = _shrink(values, rank, weight, max(Y.shape, default=1))
    count = len(values)
    return left[:, :count], values, right[:count], threshold


def _shrink(values: Tensor, rank: int, weight: float, size: int) -> tuple[Tensor, float]:
    """The singular values of the optimum that are not zero, and the threshold."""
    values = values[:rank]
    if not len(values):
        return values, 0.0
    count = torch.arange(1, len(values) + 1, dtype=values.dtype, device=values.device)
    thresholds = weight * values.cumsum(0) / (rank + weight * count)
    # Without a penalty the singular values that are only rounding would count as rank.
    noise = values[0] * torch.finfo(values.dtype).eps * size
    kept = int(((values > thresholds) & (values > noise)).sum())
    if not kept:
        return values[:0], 0.0
    threshold = float(thresholds[kept - 1])
    return values[:kept] - threshold, threshold


def nuclear_squared(X: Any) -> Any:
    r"""The squared nuclear norm :math:`\|X\|_*^2 = \bigl(\sum_i \sigma_i(X)\bigr)^2`.

    Dropout with the variable rate :math:`\lambda_r = r\lambda_1` *is* this regulariser:

    .. math::

        \min_{UV^\top = X}\; \lambda_r \sum_{i=1}^r \|U_i\|^2 \|V_i\|^2 = \lambda_1 \|X\|_*^2
        \qquad \text{for every } r \ge \operatorname{rank} X

    (003, "Dropout with Variable Rate Works"). Differentiable where the rank is full.

    >>> nuclear_squared(torch.diag(torch.tensor([3.0, 1.0])))
    tensor(16.)
    """
    value = torch.linalg.svdvals(as_matrix("X", X)).sum().square()
    return value if isinstance(X, Tensor) else float(value)

r"""Dropout as a regularizer of matrix factorisation ([Vidal2018], Part II): objective, global minimum, equalisation.

Sampling rank-one terms is stochastic gradient descent on an expectation with a closed form:

.. math::

    \mathbb{E}_z \bigl\|Y - \tfrac1\theta U \operatorname{diag}(z) V^\top\bigr\|^2
    = \|Y - UV^\top\|^2 + \frac{1-\theta}{\theta} \sum_i \|U_i\|^2 \|V_i\|^2,
    \qquad z_i \sim \operatorname{Ber}(\theta).

Here :math:`\theta = 1 - p` for the drop rate p of ``torch.nn.Dropout``.
"""

import math
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import svds
from torch import Tensor

from ..arguments import checked
from ..errors import CapabilityError, NonFiniteError, OptionError, ShapeError, require_finite, require_real
from ..functions.base import widened
from ..linalg import gram, without_autocast
from ..norms.tracker import LipschitzTracker
from ..tracing import is_traced
from .inputs import leveled, middle, raised, real, require_whole, shifted
from .losses import Squared
from .sparse import SparseData

__all__ = ["dropout_objective", "dropout_optimum", "dropout_sample", "equalize", "nuclear_squared", "variable_rate"]

SMALL = 1_000_000  # entries of a sparse matrix that is as well dense

# -- the objective -----------------------------------------------------------------------------------------------------


def dropout_weight(p: float) -> float:
    r"""The weight of the regularizer, :math:`\lambda = (1-\theta)/\theta = p/(1-p)`.

    >>> dropout_weight(0.5)
    1.0
    """
    require_rate(p)
    return float(p) / (1 - float(p))


def variable_rate(p: float, rank: int) -> float:
    r"""The drop rate for r terms whose weight is r times that of the rate ``p``: :math:`\lambda_r = r\lambda_1`
    ([Vidal2018]).

    With a fixed rate, copying every term halves the penalty. With this rate it does not change the penalty.

    >>> round(variable_rate(0.2, 4), 6)
    0.5
    """
    require_whole("rank", rank)
    weight = rank * dropout_weight(p)
    return weight / (1 + weight)


def dropout_objective(Y: Tensor, U: Tensor, V: Tensor, p: float) -> Tensor:
    r"""The expectation that dropout minimises, :math:`\|Y - UV^\top\|^2 + \frac{p}{1-p}\sum_i\|U_i\|^2\|V_i\|^2`.

    >>> import torch
    >>> Y, U, V = torch.eye(2), torch.eye(2), torch.eye(2)
    >>> dropout_objective(Y, U, V, 0.5)
    tensor(2.)
    """
    check_factors(U, V, Y)
    return (Y - U @ V.mT).square().sum() + dropout_weight(p) * (U.square().sum(0) * V.square().sum(0)).sum()


def dropout_sample(Y: Tensor, U: Tensor, V: Tensor, p: float, kept: Tensor) -> Tensor:
    r"""One draw of the stochastic objective: the terms ``kept``, a vector of zeros and ones, scaled by 1/(1−p).

    >>> import torch
    >>> Y, U, V = torch.eye(2), torch.eye(2), torch.eye(2)
    >>> dropout_sample(Y, U, V, 0.5, torch.tensor([1.0, 0.0]))
    tensor(2.)
    """
    check_factors(U, V, Y)
    require_rate(p)
    if not isinstance(kept, Tensor) or tuple(kept.shape) != (U.shape[1],):
        shape = tuple(kept.shape) if isinstance(kept, Tensor) else f"a {type(kept).__name__}"
        raise ShapeError(f"kept must be a vector with an entry for each of the {U.shape[1]} terms, got {shape}")
    return (Y - (U * (kept.to(U.dtype) / (1 - p))) @ V.mT).square().sum()


def check_factors(U: Tensor, V: Tensor, Y: Tensor | None = None) -> None:
    """Raise unless the factors, and the matrix if given, agree in dtype, device and size."""
    named = {"U": U, "V": V} if Y is None else {"Y": Y, "U": U, "V": V}
    for name, tensor in named.items():
        require_real(name, tensor)
    kinds = {f"{tensor.dtype} on {tensor.device}": name for name, tensor in named.items()}
    if len(kinds) > 1:
        listed = " and ".join(f"{name} is {kind}" for kind, name in kinds.items())
        raise CapabilityError(f"{listed}: factors must share precision and device; convert one of them")
    if U.dim() != 2 or V.dim() != 2 or U.shape[1] != V.shape[1]:
        raise ShapeError(f"U and V must be matrices with as many columns, got {tuple(U.shape)} and {tuple(V.shape)}")
    if Y is not None and tuple(Y.shape) != (len(U), len(V)):
        raise ShapeError(f"Y has shape {tuple(Y.shape)}, but UVᵀ has {(len(U), len(V))}")


def block_smoothness(V: Tensor, weight: float, tracker: LipschitzTracker) -> Tensor:
    r"""The smoothness constant :math:`2(\|V\|^2 + \lambda\max_i\|V_i\|^2)` of the objective in U. ``tracker`` bounds
    :math:`\|V\|^2`."""
    return 2 * (tracker.bounds(V).total + weight * V.square().sum(0).amax())


def sample_smoothness(V: Tensor, mask: Tensor) -> Tensor:
    r"""An upper bound on the smoothness constant :math:`2\|V\operatorname{diag}(m)\|^2` of a sampled objective in U.

    With the mask :math:`m = z/(1-p)` it exceeds that of the expectation at large rates, up to :math:`(1-p)^{-2}` times.
    The norm is bounded by :math:`\|P^4\|_F^{1/4}` of the Gram matrix P, at most :math:`r^{1/8}` times as large.

    >>> V, mask = torch.diag(torch.tensor([3.0, 1.0])), torch.tensor([2.0, 0.0])
    >>> bool(72 <= sample_smoothness(V, mask) <= 72.2)
    True
    """
    kept = V * mask
    product = gram(kept if len(kept) < kept.shape[1] else kept.mT)
    size = product.norm()
    if size == 0:
        return size
    power = torch.linalg.matrix_power(product / size, 4)
    return 2 * (1 + 1e-3) * size * power.norm().pow(0.25)


# -- the global minimum ------------------------------------------------------------------------------------------------


@checked
@without_autocast()
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

    Balanced factors of X with equal :math:`\|U_i\|\|V_i\| = \|X\|_*/r` attain it; :func:`equalize` computes them.
    Sources: [Vidal2018], "Global Optima are Low Rank"; Mianjy, Arora and Vidal 2018.

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
    left, shrunk, right, threshold = closed_form(_matrix("Y", Y), rank, dropout_weight(p))
    return _like((left * shrunk) @ right, Y), threshold, len(shrunk)


def closed_form(Y: Any, rank: int, weight: float) -> tuple[Tensor, Tensor, Tensor, float]:
    """The singular triples of the optimum, and the threshold. Of sparse data only ``rank`` triples are computed."""
    require_whole("rank", rank)
    exponent = middle(Squared(Y).largest())
    left, values, right = _leading_triples(shifted(Y, -exponent), rank)
    values, threshold = _shrink(values, rank, weight, max(Y.shape, default=1))
    count = len(values)
    return left[:, :count], shifted(values, exponent), right[:count], raised(threshold, exponent)


def _leading_triples(Y: Any, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """At least the ``rank`` leading singular triples, right vectors as rows.

    A sparse matrix is only multiplied, by Lanczos iteration to full precision, unless it is small or factors with
    ``rank`` columns are of its dense size.
    """
    sparse = isinstance(Y, SparseData)
    if not sparse or Y.numel() <= SMALL or 3 * rank >= min(Y.shape):
        left, values, right = torch.linalg.svd(Y[:] if sparse else Y, full_matrices=False)
        return left, values, right
    wide = Y.to(torch.float64)
    if not bool(wide.values.any()):  # Lanczos iteration has no start
        left, right = (torch.eye(size, int(rank), dtype=Y.dtype) for size in Y.shape)
        return left, torch.zeros(int(rank), dtype=Y.dtype), right.mT
    start = torch.randn(min(Y.shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
    basis = torch.from_numpy(svds(wide.matrix, k=int(rank), v0=start)[2].T.copy())
    # Lanczos iteration squares the matrix. The decomposition on its space is accurate and orthonormal.
    basis = torch.linalg.qr(basis).Q
    left, values, mix = torch.linalg.svd(wide @ basis, full_matrices=False)
    return left.to(Y.dtype), values.to(Y.dtype), (mix @ basis.mT).to(Y.dtype)


def _shrink(values: Tensor, rank: int, weight: float, size: int) -> tuple[Tensor, float]:
    """The non-zero singular values of the optimum, and the threshold."""
    values = values[:rank]
    if not len(values):
        return values, 0.0
    count = torch.arange(1, len(values) + 1, dtype=values.dtype, device=values.device)
    thresholds = weight * values.cumsum(0) / (rank + weight * count)
    # Without a penalty, singular values at the level of rounding would count as rank.
    noise = values[0] * torch.finfo(values.dtype).eps * size
    kept = int(((values > thresholds) & (values > noise)).sum())
    if not kept:
        return values[:0], 0.0
    threshold = float(thresholds[kept - 1])
    return values[:kept] - threshold, threshold


@checked
def nuclear_squared(X: Any) -> Any:
    r"""The squared nuclear norm :math:`\|X\|_*^2 = \bigl(\sum_i \sigma_i(X)\bigr)^2`.

    Dropout with the variable rate :math:`\lambda_r = r\lambda_1` *is* this regularizer:

    .. math::

        \min_{UV^\top = X}\; \lambda_r \sum_{i=1}^r \|U_i\|^2 \|V_i\|^2 = \lambda_1 \|X\|_*^2
        \qquad \text{for every } r \ge \operatorname{rank} X

    ([Vidal2018], "Dropout with Variable Rate Works"). It is differentiable at matrices of full rank.

    >>> nuclear_squared(torch.diag(torch.tensor([3.0, 1.0])))
    tensor(16.)
    """
    value = torch.linalg.svdvals(_matrix("X", X)).sum().square()
    if not is_traced(value) and bool(torch.isinf(value)):
        raise NonFiniteError(
            f"the squared nuclear norm of X exceeds the range of {value.dtype}: divide X by c, which divides it by c²"
        )
    return value if isinstance(X, Tensor) else float(value)


# -- equalisation ------------------------------------------------------------------------------------------------------


@checked
@without_autocast()
def equalize(U: Any, V: Any) -> tuple[Any, Any]:
    r"""Other factors of the same product, whose terms all have the same norm.

    .. math::

        U'V'^\top = UV^\top, \qquad \|U'_i\| = \|V'_i\|, \qquad
        \|U'_i\|\|V'_i\| = \frac{\|UV^\top\|_*}{r} \quad \text{for all } i .

    Among all factors of a matrix with r columns these minimise the dropout regularizer
    :math:`\sum_i\|U_i\|^2\|V_i\|^2`, whose minimum is :math:`\|UV^\top\|_*^2/r`. The singular value decomposition
    of the product is computed from the factors and gives :math:`W\Sigma^{1/2}` and :math:`Q\Sigma^{1/2}`. A rotation
    then makes the diagonal of the Gram matrix constant.

    Source: [Vidal2018], "Any Factorization Can Be Equalized"; Mianjy, Arora and Vidal 2018, Algorithm 1.

    >>> U, V = equalize(torch.diag(torch.tensor([3.0, 1.0])), torch.eye(2))
    >>> torch.allclose(U @ V.mT, torch.diag(torch.tensor([3.0, 1.0])), atol=1e-6)
    True
    >>> torch.allclose(U.norm(dim=0) * V.norm(dim=0), torch.tensor([2.0, 2.0]))
    True
    """
    left, right = _matrix("U", U), _matrix("V", V)
    check_factors(left, right)
    left, right = leveled(left, right)
    half = middle(0.0, left, right) // 2
    (q_left, r_left), (q_right, r_right) = torch.linalg.qr(shifted(left, -half)), torch.linalg.qr(shifted(right, -half))
    w, values, q = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
    first, second = equalized_factors(q_left @ w, values, (q_right @ q.mT).mT, left.shape[1])
    return _like(shifted(first, half), U), _like(shifted(second, half), V)


def equalized_factors(left: Tensor, values: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Equalised factors with ``rank`` columns from a singular value decomposition."""
    rotation = equalizing_rotation(values, rank)
    root = values.sqrt()
    return (left * root) @ rotation, (right.mT * root) @ rotation


def equalizing_rotation(values: Tensor, rank: int) -> Tensor:
    r"""The first rows of an orthogonal :math:`R \in \mathbb{R}^{r\times r}` with constant diagonal of
    :math:`R^\top \operatorname{diag}(\sigma, 0, \dots, 0) R`.

    If r is a power of two, it is a Hadamard matrix, for every σ. Otherwise it is a product of at most r − 1 Givens
    rotations. Each takes an entry of the diagonal below the mean and one above it, and makes the first equal to the
    mean. The rest stays diagonal, so the angle has the closed form :math:`\cos^2 = (d_j - \mu)/(d_j - d_i)`.

    >>> R = equalizing_rotation(torch.tensor([5.0, 1.0]), 3)
    >>> (R.mT @ torch.diag(torch.tensor([5.0, 1.0])) @ R).diagonal()
    tensor([2., 2., 2.])
    """
    require_whole("rank", rank)
    if rank & (rank - 1) == 0:
        return _hadamard(int(rank), len(values), values)
    return _rotations(rank, values)


def _rotations(rank: int, values: Tensor) -> Tensor:
    """At most r − 1 Givens rotations, each of the smallest and the largest entry of the diagonal."""
    rotation = torch.eye(len(values), rank, dtype=values.dtype, device=values.device)
    diagonal = [*values.tolist(), *[0.0] * (rank - len(values))]
    mean = math.fsum(diagonal) / rank
    for _ in range(rank - 1):
        high, low = max(diagonal), min(diagonal)
        if high <= mean or low >= mean:
            break
        j, i = diagonal.index(high), diagonal.index(low)
        cos, sin = math.sqrt((high - mean) / (high - low)), math.sqrt((mean - low) / (high - low))
        raised = cos * rotation[:, i] + sin * rotation[:, j]
        rotation[:, j] = cos * rotation[:, j] - sin * rotation[:, i]
        rotation[:, i] = raised
        diagonal[i], diagonal[j] = mean, high + low - mean
    return rotation


def _hadamard(rank: int, rows: int, like: Tensor) -> Tensor:
    """The first rows of Sylvester's Hadamard matrix of size ``rank``, a power of two, divided by √rank."""
    index = torch.arange(rank, device=like.device)
    common = index[:rows, None] & index
    parity = torch.zeros_like(common)
    for bit in range(rank.bit_length()):
        parity ^= (common >> bit) & 1
    return (1 - 2 * parity).to(like.dtype) / math.sqrt(rank)


# -- input -------------------------------------------------------------------------------------------------------------


def _matrix(name: str, value: Any) -> Tensor:
    """A finite matrix in float32 or float64, the precisions of linear algebra; integers become float64."""
    tensor = real(name, value)
    if tensor.dim() != 2:
        raise ShapeError(f"{name} must be a matrix, got shape {tuple(tensor.shape)}")
    tensor = value if isinstance(value, Tensor) else tensor.clone()
    tensor = widened(tensor) if tensor.is_floating_point() else tensor.double()
    require_finite(name, tensor)
    return tensor


def _like(result: Tensor, source: Any) -> Any:
    """``result`` as a tensor or array like ``source``, in its dtype if that is a floating one."""
    if isinstance(source, Tensor):
        return result.to(source.dtype) if source.is_floating_point() else result
    dtype = np.asarray(source).dtype
    array = result.detach().numpy()
    return array.astype(dtype) if np.issubdtype(dtype, np.floating) else array


def require_rate(p: float, name: str = "p") -> None:
    """Raise :class:`OptionError` for a drop rate outside [0, 1)."""
    if isinstance(p, bool) or not isinstance(p, int | float | np.floating | np.integer) or not 0 <= p < 1:
        raise OptionError(f"{name} is a drop rate and must lie in [0, 1), got {p!r}")

r"""What dropout minimises (003, Part II).

Sampling rank-one terms is stochastic gradient descent on an expectation with a closed form:

.. math::

    \mathbb{E}_z \bigl\|Y - \tfrac1\theta U \operatorname{diag}(z) V^\top\bigr\|^2
    = \|Y - UV^\top\|^2 + \frac{1-\theta}{\theta} \sum_i \|U_i\|^2 \|V_i\|^2,
    \qquad z_i \sim \operatorname{Ber}(\theta).

Here :math:`\theta = 1 - p` for the drop rate p of ``torch.nn.Dropout``.
"""

from torch import Tensor

from ...errors import CapabilityError, ShapeError, require_real
from ...norms.tracker import LipschitzTracker
from .arrays import require_rank, require_rate

__all__ = [
    "block_smoothness",
    "check_factors",
    "dropout_objective",
    "dropout_sample",
    "dropout_weight",
    "variable_rate",
]


def dropout_weight(p: float) -> float:
    r"""The weight of the regulariser, :math:`\lambda = (1-\theta)/\theta = p/(1-p)`.

    >>> dropout_weight(0.5)
    1.0
    """
    require_rate(p)
    return float(p) / (1 - float(p))


def variable_rate(p: float, rank: int) -> float:
    r"""The drop rate for r terms that belongs to the rate ``p`` for one: :math:`\lambda_r = r\lambda_1` (003).

    With a fixed rate, copying every term halves the penalty; with this one it does not change it.

    >>> round(variable_rate(0.2, 4), 6)
    0.5
    """
    require_rank(rank)
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
    """Refuse factors that do not fit each other, or the matrix, in kind, precision or size."""
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
    r"""The smoothness constant :math:`2(\|V\|^2 + \lambda\max_i\|V_i\|^2)` of the objective in U, which is also the
    expected smoothness of the sampled one (Bernoulli sampling of the columns). The tracker follows V."""
    return 2 * (tracker.bounds(V).total + weight * V.square().sum(0).amax())

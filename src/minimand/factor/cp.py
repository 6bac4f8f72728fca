"""Sums of three-way products: their factors, exact updates, directions of a tensor, and the certificate."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError, ShapeError, require_finite
from ..solvers.iterate import iterate
from .bounds import unfolding_bound
from .certificate import Certificate
from .duals import Dense
from .gap import concluded
from .gauges import Euclidean
from .inputs import real, refuse_masked, require_number, working
from .losses import Squared
from .rows import Rows

__all__ = [
    "Factors",
    "ascend",
    "balanced",
    "certify_tensor",
    "descend",
    "empty",
    "factors_of",
    "full",
    "is_cp",
    "khatri_rao",
    "split",
    "tensor_certificate",
    "tensor_of",
]

GAUGE = Euclidean()
STARTS = 16
ASCENT = 60

Factors = tuple[Tensor, Tensor, Tensor]  # vectors as rows: r × size of the mode


def certify_tensor(Y: Any, factors: Any, *, lam: float, tol: float = 1e-3) -> Certificate:
    r"""How far given factors are from the global minimum of the CP problem over all sizes,

    .. math:: \tfrac12\Bigl\|\mathcal{Y} - \sum_i a_i \otimes b_i \otimes c_i\Bigr\|^2
        + \lambda\sum_i \|a_i\|\|b_i\|\|c_i\| ,

    at most: :func:`~minimand.factor.certify` for three dimensions. The bound is the norm of the best unfolding, tight
    for orthogonal components and loose in general.

    Args:
        Y: The tensor of three dimensions; array or tensor.
        factors: (A, B, C), each size × r, or tensorly's (weights, [A, B, C]).
        lam: :math:`\lambda > 0`.
        tol: The relative gap up to which a point counts as certified.

    >>> import numpy as np
    >>> Y = np.zeros((3, 3, 3))
    >>> Y[0, 0, 0] = 3.0
    >>> one = np.eye(3)[:, :1]
    >>> certify_tensor(Y, (np.array([2.0]), [one, one, one]), lam=1.0).status
    <Status.CERTIFIED: 'CERTIFIED'>
    """
    require_number("lam", lam)
    require_number("tol", tol)
    data = tensor_of(Y).to(torch.float64)
    a, b, c = (x.to(torch.float64) for x in factors_of(factors, data))
    return tensor_certificate(data, (a, b, c), float(lam), float(tol), torch.Generator().manual_seed(0))[0]


def tensor_of(Y: Any) -> Tensor:
    """A tensor of three dimensions, finite, in the precision that is computed in."""
    refuse_masked("Y", Y, "a CP decomposition needs them all: fill them")
    data = working(real("Y", Y)).contiguous()
    if data.dim() != 3 or 0 in data.shape:
        raise ShapeError(f"Y must be a tensor of three dimensions with entries, got shape {tuple(data.shape)}")
    require_finite("Y", data)
    return data


def is_cp(value: Any) -> bool:
    """Whether there are three factors, with or without weights: not a pair of codes and components."""
    return isinstance(value, Sequence | Mapping) and (len(value) == 3 or _weighted(value))


def _weighted(value: Any) -> bool:
    # tensorly's own class is a mapping that is indexed like the pair.
    return len(value) == 2 and isinstance(value[1], tuple | list)


def factors_of(value: Any, like: Tensor) -> Factors:
    """The vectors, as rows, of (A, B, C) or (weights, [A, B, C]), checked against a tensor."""
    if not is_cp(value):
        raise OptionError(f"factors are (A, B, C) or (weights, [A, B, C]), got {type(value).__name__}")
    weights, parts = (value[0], value[1]) if _weighted(value) else (None, value)
    found = [working(real("a factor", x)) for x in parts]
    shapes = [tuple(x.shape) for x in found]
    rank = shapes[0][-1] if shapes and shapes[0] else 0
    if shapes != [(size, rank) for size in like.shape]:
        raise ShapeError(f"factors of shapes {shapes} do not fit a tensor of {tuple(like.shape)}: each is size × r")
    if weights is not None:
        scale = working(real("weights", weights))
        if scale.shape != (rank,):
            raise ShapeError(f"weights have shape {tuple(scale.shape)}, but there are {rank} components")
        found[0] = found[0] * scale
    for x in found:
        require_finite("factors", x)
    a, b, c = (x.mT.to(like.device) for x in found)
    return a, b, c


def empty(Y: Tensor) -> Factors:
    """No component yet."""
    a, b, c = (Y.new_zeros(0, size) for size in Y.shape)
    return a, b, c


def split(start: tuple[Tensor, Tensor], Y: Tensor) -> Factors:
    """Factors from codes and components: each component's leading singular pair."""
    U, V = (x.to(Y) for x in start)
    left, values, right = torch.linalg.svd(V.mT.reshape(-1, *Y.shape[1:]), full_matrices=False)
    return balanced((U.mT * values[:, :1], left[..., 0], right[:, 0]))


def khatri_rao(b: Tensor, c: Tensor) -> Tensor:
    """The rows bᵢ ⊗ cᵢ."""
    return (b.unsqueeze(2) * c.unsqueeze(1)).flatten(1)


def full(factors: Factors) -> Tensor:
    """The tensor that they sum to."""
    a, b, c = factors
    return (a.mT @ khatri_rao(b, c)).reshape(a.shape[1], b.shape[1], c.shape[1])


def balanced(factors: Factors) -> Factors:
    """The same sum with ‖a‖ = ‖b‖‖c‖ and ‖b‖ = ‖c‖; a term with a zero factor is dropped."""
    sizes = torch.stack([x.norm(dim=1) for x in factors])
    total = sizes.prod(0)
    alive = total > 16 * torch.finfo(total.dtype).eps * total.max() if len(total) else total > 0
    total, sizes = total[alive], sizes[:, alive]
    goals = total.pow(0.5), total.pow(0.25), total.pow(0.25)
    a, b, c = (x[alive] * (g / s).unsqueeze(1) for x, g, s in zip(factors, goals, sizes, strict=True))
    return a, b, c


def descend(Y: Tensor, factors: Factors, lam: float, tol: float, sweeps: int) -> tuple[Factors, float, int]:
    """Exact column updates of the three modes in turn."""
    if not len(factors[0]):
        return factors, _objective(Y, factors, lam), 0
    unfolded = [Y.movedim(mode, 0).flatten(1).contiguous() for mode in range(3)]

    def step(state: tuple[Factors, float, int], k: int) -> tuple[Factors, float, int]:
        now, before, quiet = state
        for mode in range(3):
            now = _updated(now, mode, unfolded[mode], lam)
        now = balanced(now)
        objective = _objective(Y, now, lam)
        return now, objective, quiet + 1 if before - objective <= tol * abs(objective) else 0

    start = (factors, math.inf, 0)
    (factors, objective, _), made = iterate(
        step, start, max(sweeps, 1), until=lambda s, k: s[2] >= 3 or not len(s[0][0])
    )
    return factors, objective, made


def _updated(factors: Factors, mode: int, unfolded: Tensor, lam: float) -> Factors:
    b, c = (factors[m] for m in range(3) if m != mode)
    other = khatri_rao(b, c)
    product = (b @ b.mT) * (c @ c.mT)
    target = other @ unfolded.mT
    X = factors[mode].clone()
    for i, square in enumerate(product.diagonal().tolist()):
        if square <= 0:
            X[i].zero_()
            continue
        point = torch.addmv(target[i], X.mT, product[i], alpha=-1).div_(square).add_(X[i])
        X[i] = GAUGE.prox_(point, lam / math.sqrt(square))
    return tuple(X if m == mode else factors[m] for m in range(3))  # type: ignore[return-value]


def _objective(Y: Tensor, factors: Factors, lam: float) -> float:
    residual = (Y - full(factors) if len(factors[0]) else Y).to(torch.float64)
    sizes = torch.stack([x.to(torch.float64).norm(dim=1) for x in factors]).prod(0)
    return 0.5 * float(residual.square().sum()) + lam * float(sizes.sum())


def ascend(Z: Tensor, generator: torch.Generator) -> tuple[Tensor, Factors]:
    """Distinct unit directions found by alternating ascent, best first, and what each attains."""
    Z = Z.to(torch.float64)
    starts = [torch.randn(STARTS, Z.shape[2], dtype=torch.float64, generator=generator).to(Z.device)]
    _, _, right = torch.linalg.svd(Z.flatten(0, 1), full_matrices=False)
    starts.append(right[:STARTS])
    c = torch.nn.functional.normalize(torch.cat(starts), dim=1)
    _, values, pairs = torch.linalg.svd(torch.einsum("ijk,rk->rij", Z, c), full_matrices=False)
    b = pairs[:, 0]

    def step(state: tuple[Tensor, Factors], k: int) -> tuple[Tensor, Factors]:
        _, (_, b, c) = state
        a = torch.nn.functional.normalize(torch.einsum("ijk,rj,rk->ri", Z, b, c), dim=1)
        b = torch.nn.functional.normalize(torch.einsum("ijk,ri,rk->rj", Z, a, c), dim=1)
        top = torch.einsum("ijk,ri,rj->rk", Z, a, b)
        values, c = GAUGE.polar(top)
        return values, (a, b, c)

    (values, (a, b, c)), _ = iterate(step, (values[:, 0], (b[:, :0], b, c)), ASCENT)
    order = torch.argsort(values, descending=True)
    a, b, c = a[order], b[order], c[order]
    same = ((a @ a.mT) * (b @ b.mT) * (c @ c.mT)) > 0.9
    kept = [i for i in range(len(order)) if not bool(same[i, :i].any())]
    return values[order][kept], (a[kept], b[kept], c[kept])


def tensor_certificate(
    Y: Tensor, factors: Factors, lam: float, tol: float, generator: torch.Generator
) -> tuple[Certificate, float]:
    """The gap of squared losses, with the unfoldings' bound on the polar."""
    a, b, c = (x.to(torch.float64) for x in factors)
    wide = Y.to(torch.float64)
    other = khatri_rao(b, c)
    loss = Squared(wide.flatten(1), Rows())
    Z = loss.dual(a.mT, other.mT)
    assert isinstance(Z, Dense)
    residual = Z.dense().reshape(wide.shape)
    upper = unfolding_bound(residual, lam)
    lower = float(ascend(residual, generator)[0].max())
    charged = float((a.norm(dim=1) * other.norm(dim=1)).sum())
    return concluded(loss, Z, a.mT, other.mT, charged, (lower, upper), lam, tol)

"""CP decompositions: factor matrices, exact updates, directions of a tensor, growth, bound and certificate."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..arguments import checked
from ..errors import OptionError, ShapeError, require_finite
from ..linalg import gram
from ..solvers.iterate import iterate
from .bounds import Bound, gram_bound
from .certificate import conclude
from .inputs import leveled, real, refuse_masked, require_number, working
from .losses import Squared
from .problem import NOT_CERTIFIED, Certificate, FactorProblem, Factors, GrowthOptions, Report, noted_if_zero
from .regularizers import L2, Euclidean

__all__ = ["certify_tensor", "grow_tensor", "tensor_certificate", "unfolding_bound"]

GAUGE = Euclidean()
STARTS = 16
ASCENT = 60
REFILLS = 3  # rounds in which components that became zero are replaced at a fixed size

Modes = tuple[Tensor, Tensor, Tensor]  # (A, B, C), vectors as rows: r × size of the mode


@checked
def certify_tensor(Y: Any, factors: Any, *, lam: float, tol: float = 1e-3) -> Certificate:
    r"""An upper bound on the distance of given factors to the global minimum of the CP problem over all sizes,

    .. math:: \tfrac12\Bigl\|\mathcal{Y} - \sum_i a_i \otimes b_i \otimes c_i\Bigr\|^2
        + \lambda\sum_i \|a_i\|\|b_i\|\|c_i\| .

    It is :func:`~minimand.factor.certify` for tensors of three dimensions. The bound on the polar is the smallest norm
    of an unfolding, tight for orthogonal components and loose in general.

    Args:
        Y: The tensor of three dimensions; array or tensor.
        factors: (A, B, C), each size × r, or tensorly's (weights, [A, B, C]).
        lam: :math:`\lambda > 0`.
        tol: The largest relative gap of a certified point.

    >>> import numpy as np
    >>> Y = np.zeros((3, 3, 3))
    >>> Y[0, 0, 0] = 3.0
    >>> one = np.eye(3)[:, :1]
    >>> certify_tensor(Y, (np.array([2.0]), [one, one, one]), lam=1.0).status
    <Status.CERTIFIED: 'CERTIFIED'>
    """
    require_number("lam", lam)
    require_number("tol", tol)
    data = require_tensor(Y).to(torch.float64)
    columns = modes_from(factors, data)
    problem, units = FactorProblem(Squared(data), L2(), float(lam)).normalized(*columns)
    a, b, c = (units.lowered(x, share).mT for x, share in zip(columns, (2, 4, 4), strict=True))
    assert isinstance(problem.loss, Squared)
    certificate, _ = tensor_certificate(problem.loss.Y, (a, b, c), problem.lam, tol, torch.Generator().manual_seed(0))
    return certificate.in_units(units)


def require_tensor(Y: Any) -> Tensor:
    """A finite tensor of three dimensions, in the working precision."""
    refuse_masked("Y", Y, "a CP decomposition needs them all: fill them")
    data = working(real("Y", Y)).contiguous()
    if data.dim() != 3 or 0 in data.shape:
        raise ShapeError(f"Y must be a tensor of three dimensions with entries, got shape {tuple(data.shape)}")
    require_finite("Y", data)
    return data


def is_cp(value: Any) -> bool:
    """Whether ``value`` has three factors, with or without weights, and is not a pair of codes and components."""
    return isinstance(value, Sequence | Mapping) and (len(value) == 3 or _weighted(value))


def _weighted(value: Any) -> bool:
    # tensorly's CPTensor is a mapping, indexed like the pair (weights, factors).
    return len(value) == 2 and isinstance(value[1], tuple | list)


def modes_from(value: Any, like: Tensor) -> tuple[Tensor, ...]:
    """The vectors, as columns in float64, of (A, B, C) or (weights, [A, B, C]), checked against the tensor ``like``."""
    if not is_cp(value):
        raise OptionError(f"factors must be (A, B, C) or (weights, [A, B, C]), got {type(value).__name__}")
    weights, parts = (value[0], value[1]) if _weighted(value) else (None, value)
    found = [working(real("a factor", x)) for x in parts]
    shapes = [tuple(x.shape) for x in found]
    rank = shapes[0][-1] if shapes and shapes[0] else 0
    if shapes != [(size, rank) for size in like.shape]:
        raise ShapeError(f"factors of shapes {shapes} do not fit a tensor of {tuple(like.shape)}: each is size × r")
    scale = torch.ones(rank) if weights is None else real("weights", weights)
    if scale.shape != (rank,):
        raise ShapeError(f"weights have shape {tuple(scale.shape)}, but there are {rank} components")
    for x in (*found, scale):
        require_finite("factors", x)
    scale, a, b, c = leveled(*(x.to(like.device, torch.float64) for x in (scale.unsqueeze(0), *found)))
    return a * scale, b, c


def modes_from_codes(start: tuple[Tensor, Tensor], Y: Tensor) -> Modes:
    """Factors from codes and components, by the leading singular pair of each component."""
    U, V = (x.to(Y) for x in start)
    left, values, right = torch.linalg.svd(V.mT.reshape(-1, *Y.shape[1:]), full_matrices=False)
    return balanced_modes((U.mT * values[:, :1], left[..., 0], right[:, 0]))


def khatri_rao(b: Tensor, c: Tensor) -> Tensor:
    """The rows bᵢ ⊗ cᵢ."""
    return (b.unsqueeze(2) * c.unsqueeze(1)).flatten(1)


def _full(factors: Modes) -> Tensor:
    """The tensor Σ aᵢ ⊗ bᵢ ⊗ cᵢ."""
    a, b, c = factors
    return (a.mT @ khatri_rao(b, c)).reshape(a.shape[1], b.shape[1], c.shape[1])


def balanced_modes(factors: Modes) -> Modes:
    """The same sum with ‖a‖ = ‖b‖‖c‖ and ‖b‖ = ‖c‖, without terms that are zero up to rounding."""
    sizes = torch.stack([x.norm(dim=1) for x in factors])
    total = sizes.prod(0)
    alive = total > 16 * torch.finfo(total.dtype).eps * total.max() if len(total) else total > 0
    total, sizes = total[alive], sizes[:, alive]
    goals = total.pow(0.5), total.pow(0.25), total.pow(0.25)
    a, b, c = (x[alive] * (g / s).unsqueeze(1) for x, g, s in zip(factors, goals, sizes, strict=True))
    return a, b, c


def _descend(Y: Tensor, factors: Modes, lam: float, tol: float, sweeps: int) -> tuple[Modes, float, int]:
    """Exact column updates of the three modes in turn; returns the factors, the objective and the sweeps made."""
    if not len(factors[0]):
        return factors, _objective(Y, factors, lam), 0
    unfolded = [Y.movedim(mode, 0).flatten(1).contiguous() for mode in range(3)]

    def step(state: tuple[Modes, float, int], k: int) -> tuple[Modes, float, int]:
        now, before, quiet = state
        for mode in range(3):
            now = _updated(now, mode, unfolded[mode], lam)
        now = balanced_modes(now)
        objective = _objective(Y, now, lam)
        return now, objective, quiet + 1 if before - objective <= tol * abs(objective) else 0

    start = (factors, math.inf, 0)
    (factors, objective, _), made = iterate(
        step, start, max(sweeps, 1), until=lambda s, k: s[2] >= 3 or not len(s[0][0])
    )
    return factors, objective, made


def _updated(factors: Modes, mode: int, unfolded: Tensor, lam: float) -> Modes:
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


def _objective(Y: Tensor, factors: Modes, lam: float) -> float:
    residual = (Y - _full(factors) if len(factors[0]) else Y).to(torch.float64)
    sizes = torch.stack([x.to(torch.float64).norm(dim=1) for x in factors]).prod(0)
    return 0.5 * float(residual.square().sum()) + lam * float(sizes.sum())


def ascend(Z: Tensor, generator: torch.Generator) -> tuple[Tensor, Modes]:
    """Distinct unit directions found by alternating ascent, best first, and the value that each attains."""
    Z = Z.to(torch.float64)
    starts = [torch.randn(STARTS, Z.shape[2], dtype=torch.float64, generator=generator).to(Z.device)]
    _, _, right = torch.linalg.svd(Z.flatten(0, 1), full_matrices=False)
    starts.append(right[:STARTS])
    normalized = partial(torch.nn.functional.normalize, dim=1, eps=torch.finfo(torch.float64).tiny)
    c = normalized(torch.cat(starts))
    _, values, pairs = torch.linalg.svd(torch.einsum("ijk,rk->rij", Z, c), full_matrices=False)
    b = pairs[:, 0]

    def step(state: tuple[Tensor, Modes], k: int) -> tuple[Tensor, Modes]:
        _, (_, b, c) = state
        a = normalized(torch.einsum("ijk,rj,rk->ri", Z, b, c))
        b = normalized(torch.einsum("ijk,ri,rk->rj", Z, a, c))
        top = torch.einsum("ijk,ri,rj->rk", Z, a, b)
        values, c = GAUGE.polar(top)
        return values, (a, b, c)

    (values, (a, b, c)), _ = iterate(step, (values[:, 0], (b[:, :0], b, c)), ASCENT)
    order = torch.argsort(values, descending=True)
    a, b, c = a[order], b[order], c[order]
    same = ((a @ a.mT) * (b @ b.mT) * (c @ c.mT)) > 0.9
    kept = [i for i in range(len(order)) if not bool(same[i, :i].any())]
    return values[order][kept], (a[kept], b[kept], c[kept])


def grow_tensor(
    Y: Tensor,
    lam: float,
    options: GrowthOptions,
    *,
    generator: torch.Generator,
    start: Modes | None = None,
    report: Report,
) -> Factors:
    """Solve the CP problem by descent and growth.

    Each round descends and appends the directions found. Growth is not a fixed-point iteration and loops plainly;
    every round but the first makes a sweep, so there are at most ``max_iter + 1``.
    """
    n, m, k = Y.shape
    factors = (Y.new_zeros(0, n), Y.new_zeros(0, m), Y.new_zeros(0, k)) if start is None else start
    if options.n_components is not None and len(factors[0]) > options.n_components:
        raise OptionError(f"start has {len(factors[0])} components, but n_components={options.n_components}")
    history: list[float] = []
    used = 0
    for _ in range(options.max_iter + 1):
        factors, objective, made = _descend(Y, factors, lam, options.tol * 1e-4, options.max_iter - used)
        used += made
        if len(factors[0]) or made or not history:
            history.append(objective)
        report(used, len(factors[0]), objective)
        room = options.largest - len(factors[0])
        if room <= 0 or used >= options.max_iter:
            break
        values, found = ascend(Y - _full(factors), generator)
        above = values > (0.0 if options.fixed else lam * (1 + options.tol / 4))
        if not bool(above.any()) or (options.fixed and len(history) > REFILLS):
            break
        factors = _appended(factors, values[above][:room], [x[above][:room] for x in found], lam)
    factors = balanced_modes(factors)
    if options.effort is None:
        certificate, objective = NOT_CERTIFIED, _objective(Y, factors, lam)
    else:
        certificate, objective = tensor_certificate(Y, factors, lam, options.tol, generator)
    iterations, history[-1] = max(used, 1), objective
    missing = max((options.n_components or 0) - len(factors[0]), 0)
    a, b, c = (torch.cat([x, x.new_zeros(missing, x.shape[1])]) for x in factors)
    return Factors(
        a.mT,
        khatri_rao(b, c).mT,
        objective,
        noted_if_zero(certificate, len(factors[0]), lam),
        tuple(history),
        iterations,
        options.stopped(certificate, lam, iterations, len(a)),
        modes=(a.mT, b.mT, c.mT),
    )


def _appended(factors: Modes, values: Tensor, found: Sequence[Tensor], lam: float) -> Modes:
    scale = ((values - lam).clamp_min(0.05 * values) / len(values)).pow(1 / 3).unsqueeze(-1)
    a, b, c = (torch.cat([old, (scale * new).to(old.dtype)]) for old, new in zip(factors, found, strict=True))
    return a, b, c


def unfolding_bound(tensor: Tensor, level: float) -> Bound:
    r"""An upper bound on :math:`\max \langle Z, u \otimes v \otimes w\rangle` over unit vectors.

    An unfolding into a matrix replaces :math:`v \otimes w` by any unit vector, so its norm is a bound. The smallest of
    the three is returned. It is tight for orthogonally decomposable tensors and loose in general.

    >>> T = torch.zeros(2, 2, 2, dtype=torch.float64)
    >>> T[0, 0, 0], T[1, 1, 1] = 3.0, 1.0
    >>> round(unfolding_bound(T, 3.0).value, 5)
    3.0
    """
    tensor = tensor.to(torch.float64)
    bounds = []
    for mode in range(tensor.dim()):
        unfolded = tensor.movedim(mode, 0).flatten(1)
        if unfolded.shape[0] > unfolded.shape[1]:
            unfolded = unfolded.mT
        bounds.append(math.sqrt(gram_bound(gram(unfolded), level)))
    return Bound(min(bounds), "smallest unfolding norm, loose")


def tensor_certificate(
    Y: Tensor, factors: Modes, lam: float, tol: float, generator: torch.Generator
) -> tuple[Certificate, float]:
    """The certificate and the objective of CP factors, with the unfoldings' bound on the polar."""
    a, b, c = (x.to(torch.float64) for x in factors)
    wide = Y.to(torch.float64)
    other = khatri_rao(b, c)
    problem = FactorProblem(Squared(wide.flatten(1)), L2(), lam)
    Z = problem.loss.dual(a.mT, other.mT)
    residual = Z.dense().reshape(wide.shape)
    upper = unfolding_bound(residual, lam)
    lower = float(ascend(residual, generator)[0].max())
    penalty = float((a.norm(dim=1) * other.norm(dim=1)).sum())
    return conclude(problem, a.mT, other.mT, dual=Z, penalty=penalty, polar=(lower, upper), tol=tol)

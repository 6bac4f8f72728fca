"""CP decompositions: factor matrices, exact updates, directions of a tensor, growth, bound and certificate."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..arguments import checked
from ..errors import OptionError, ShapeError, require_finite
from ..linalg import gram, without_autocast
from ..solvers.iterate import iterate
from .bounds import Bound, gram_bound
from .certificate import conclude
from .inputs import leveled, real, refuse_masked, require_number, working
from .losses import Squared
from .problem import (
    INTERRUPTED,
    NOT_CERTIFIED,
    Certificate,
    FactorProblem,
    Factors,
    GrowthOptions,
    Report,
    Stop,
    noted_if_zero,
)
from .regularizers import L2, Euclidean

__all__ = ["certify_tensor", "grow_tensor", "tensor_certificate", "unfolding_bound"]

GAUGE = Euclidean()
STARTS = 16
ASCENT = 60
REFILLS = 3  # rounds in which components that became zero are replaced at a fixed size
SPLITS = 6  # the largest order for which unfoldings by groups of modes are tried
GROUPED = 3000  # the largest side of such an unfolding

Modes = tuple[Tensor, ...]  # (A, B, C, …), vectors as rows: r × size of the mode


@checked
@without_autocast()
def certify_tensor(Y: Any, factors: Any, *, lam: float, tol: float = 1e-3) -> Certificate:
    r"""An upper bound on the distance of given factors to the global minimum of the CP problem over all sizes,

    .. math:: \tfrac12\Bigl\|\mathcal{Y} - \sum_i a_i \otimes b_i \otimes c_i\Bigr\|^2
        + \lambda\sum_i \|a_i\|\|b_i\|\|c_i\| .

    It is :func:`~minimand.factor.certify` for tensors of three or more dimensions, with as many factors in each term.
    The bound on the polar is the smallest norm of an unfolding, tight for orthogonal components and loose in general.

    Args:
        Y: The tensor; array or tensor.
        factors: (A, B, C, …), each size × r, or tensorly's (weights, [A, B, C, …]).
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
    modes = tuple(units.lowered(x, share).mT for x, share in zip(columns, shares(data.dim()), strict=True))
    assert isinstance(problem.loss, Squared)
    certificate, _ = tensor_certificate(problem.loss.Y, modes, problem.lam, tol, torch.Generator().manual_seed(0))
    return certificate.in_units(units)


def require_tensor(Y: Any) -> Tensor:
    """A finite tensor of three or more dimensions, in the working precision."""
    refuse_masked("Y", Y, "a CP decomposition needs them all: fill them")
    data = working(real("Y", Y)).contiguous()
    if data.dim() < 3 or 0 in data.shape:
        raise ShapeError(f"Y must be a tensor of three dimensions or more with entries, got shape {tuple(data.shape)}")
    require_finite("Y", data)
    return data


def shares(order: int) -> tuple[int, ...]:
    """The shares of the exponent of a product that the factors of a balanced decomposition take; see ``Units``."""
    return 2, *[2 * (order - 1)] * (order - 1)


def is_cp(value: Any) -> bool:
    """Whether ``value`` has three or more factors, or weights and factors, and is no pair of codes and components."""
    return isinstance(value, Sequence | Mapping) and (len(value) >= 3 or _weighted(value))


def _weighted(value: Any) -> bool:
    # tensorly's CPTensor is a mapping, indexed like the pair (weights, factors).
    return len(value) == 2 and isinstance(value[1], tuple | list)


def modes_from(value: Any, like: Tensor) -> tuple[Tensor, ...]:
    """The vectors, as columns in float64, of (A, B, C, …) or (weights, [A, B, C, …]), checked against ``like``."""
    if not is_cp(value):
        raise OptionError(f"factors must be (A, B, C, …) or (weights, [A, B, C, …]), got {type(value).__name__}")
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
    scale, first, *rest = leveled(*(x.to(like.device, torch.float64) for x in (scale.unsqueeze(0), *found)))
    return first * scale, *rest


def modes_from_codes(start: tuple[Tensor, Tensor], Y: Tensor) -> Modes:
    """Factors from codes and components, by leading singular pairs of each component, mode after mode."""
    U, V = (x.to(Y) for x in start)
    rest, found = V.mT, [U.mT]
    for size in Y.shape[1:-1]:
        left, values, right = torch.linalg.svd(rest.reshape(len(rest), size, -1), full_matrices=False)
        found, rest = [found[0] * values[:, :1], *found[1:], left[..., 0]], right[:, 0]
    return balanced_modes((*found, rest))


def khatri_rao(first: Tensor, *others: Tensor) -> Tensor:
    """The rows bᵢ ⊗ cᵢ ⊗ …"""
    for other in others:
        first = (first.unsqueeze(2) * other.unsqueeze(1)).flatten(1)
    return first


def _full(factors: Modes) -> Tensor:
    """The tensor Σ aᵢ ⊗ bᵢ ⊗ cᵢ …"""
    return (factors[0].mT @ khatri_rao(*factors[1:])).reshape([x.shape[1] for x in factors])


def _unfolded(Y: Tensor) -> list[Tensor]:
    """The unfolding of each mode: its size × the product of the others."""
    return [Y.movedim(mode, 0).flatten(1).contiguous() for mode in range(Y.dim())]


def _without(factors: Modes, mode: int) -> Modes:
    return factors[:mode] + factors[mode + 1 :]


def balanced_modes(factors: Modes) -> Modes:
    """The same sum with ‖a‖ = ‖b‖‖c‖… and ‖b‖ = ‖c‖ = …, without terms that are zero up to rounding."""
    sizes = torch.stack([x.norm(dim=1) for x in factors])
    total = sizes.prod(0)
    alive = total > 16 * torch.finfo(total.dtype).eps * total.max() if len(total) else total > 0
    total, sizes = total[alive], sizes[:, alive]
    goals = [total.pow(1 / share) for share in shares(len(factors))]
    return tuple(x[alive] * (g / s).unsqueeze(1) for x, g, s in zip(factors, goals, sizes, strict=True))


def _descend(
    Y: Tensor, factors: Modes, lam: float, tol: float, sweeps: int, keep: Callable[[Modes], None]
) -> tuple[Modes, float, int]:
    """Exact column updates of the modes in turn; returns the factors, the objective and the sweeps made.

    ``keep`` is called with the factors of each sweep."""
    if not len(factors[0]):
        return factors, _objective(Y, factors, lam), 0
    unfolded = _unfolded(Y)

    def step(state: tuple[Modes, float, int], k: int) -> tuple[Modes, float, int]:
        now, before, quiet = state
        for mode in range(Y.dim()):
            now = _updated(now, mode, unfolded[mode], lam)
        now = balanced_modes(now)
        keep(now)
        objective = _objective(Y, now, lam)
        return now, objective, quiet + 1 if before - objective <= tol * abs(objective) else 0

    start = (factors, math.inf, 0)
    (factors, objective, _), made = iterate(
        step, start, max(sweeps, 1), until=lambda s, k: s[2] >= 3 or not len(s[0][0])
    )
    return factors, objective, made


def _updated(factors: Modes, mode: int, unfolded: Tensor, lam: float) -> Modes:
    others = _without(factors, mode)
    product = torch.stack([x @ x.mT for x in others]).prod(0)
    target = khatri_rao(*others) @ unfolded.mT
    X = factors[mode].clone()
    for i, square in enumerate(product.diagonal().tolist()):
        if square <= 0:
            X[i].zero_()
            continue
        point = torch.addmv(target[i], X.mT, product[i], alpha=-1).div_(square).add_(X[i])
        X[i] = GAUGE.prox_(point, lam / math.sqrt(square))
    return *factors[:mode], X, *factors[mode + 1 :]


def _objective(Y: Tensor, factors: Modes, lam: float) -> float:
    residual = (Y - _full(factors) if len(factors[0]) else Y).to(torch.float64)
    sizes = torch.stack([x.to(torch.float64).norm(dim=1) for x in factors]).prod(0)
    return 0.5 * float(residual.square().sum()) + lam * float(sizes.sum())


def ascend(Z: Tensor, generator: torch.Generator) -> tuple[Tensor, Modes]:
    """Distinct unit directions found by alternating ascent, best first, and the value that each attains."""
    Z = Z.to(torch.float64)
    unfolded = _unfolded(Z)
    normalized = partial(torch.nn.functional.normalize, dim=1, eps=torch.finfo(torch.float64).tiny)
    ends = tuple(normalized(x) for x in _starts(Z, unfolded, generator))
    matrices = (khatri_rao(*ends) @ Z.flatten(2).flatten(0, 1).mT).reshape(-1, *Z.shape[:2])
    _, values, pairs = torch.linalg.svd(matrices, full_matrices=False)

    def step(state: tuple[Tensor, Modes], k: int) -> tuple[Tensor, Modes]:
        values, modes = state
        for mode in range(Z.dim()):
            values, new = GAUGE.polar(khatri_rao(*_without(modes, mode)) @ unfolded[mode].mT)
            modes = (*modes[:mode], new, *modes[mode + 1 :])
        return values, modes

    first = (values[:, 0], (pairs[:, :0, 0], pairs[:, 0], *ends))
    (values, modes), _ = iterate(step, first, ASCENT)
    order = torch.argsort(values, descending=True)
    modes = tuple(x[order] for x in modes)
    same = torch.stack([x @ x.mT for x in modes]).prod(0) > 0.9
    kept = [i for i in range(len(order)) if not bool(same[i, :i].any())]
    return values[order][kept], tuple(x[kept] for x in modes)


def _starts(Z: Tensor, unfolded: list[Tensor], generator: torch.Generator) -> Iterator[Tensor]:
    """Starts for the modes from the third on: random vectors, and the leading singular vectors of the unfoldings."""
    count = min(STARTS, max(Z.shape[2:]))
    for mode in range(2, Z.dim()):
        random = torch.randn(STARTS, Z.shape[mode], dtype=torch.float64, generator=generator).to(Z.device)
        _, _, right = torch.linalg.svd(unfolded[mode].mT, full_matrices=False)
        yield torch.cat([random, right[torch.arange(count, device=Z.device) % len(right)]])


def grow_tensor(
    Y: Tensor,
    lam: float,
    options: GrowthOptions,
    *,
    generator: torch.Generator,
    start: Modes | None = None,
    report: Report,
) -> Factors:
    """Solve the CP problem by descent and growth; an interruption keeps the factors of the last sweep."""
    factors = tuple(Y.new_zeros(0, size) for size in Y.shape) if start is None else start
    if options.n_components is not None and len(factors[0]) > options.n_components:
        raise OptionError(f"start has {len(factors[0])} components, but n_components={options.n_components}")
    growth = _TensorGrowth(Y, lam, options, generator, report, factors)
    try:
        growth.run()
        factors = balanced_modes(growth.factors)
        if options.effort is None:
            certificate, objective = NOT_CERTIFIED, _objective(Y, factors, lam)
        else:
            certificate, objective = tensor_certificate(Y, factors, lam, options.tol, generator)
        stop = None
    except KeyboardInterrupt:
        factors, stop = balanced_modes(growth.factors), Stop.INTERRUPTED
        certificate, objective = INTERRUPTED, _objective(Y, factors, lam)
    iterations = max(growth.used, 1)
    missing = max((options.n_components or 0) - len(factors[0]), 0)
    first, *rest = (torch.cat([x, x.new_zeros(missing, x.shape[1])]) for x in factors)
    return Factors(
        first.mT,
        khatri_rao(*rest).mT,
        objective,
        noted_if_zero(certificate, len(factors[0]), lam),
        (*growth.history[:-1], objective),
        iterations,
        stop or options.stopped(certificate, lam, iterations, len(first)),
        modes=(first.mT, *(x.mT for x in rest)),
    )


@dataclass
class _TensorGrowth:
    """The state of the meta-algorithm for tensors."""

    Y: Tensor
    lam: float
    options: GrowthOptions
    generator: torch.Generator
    report: Report
    factors: Modes
    history: list[float] = field(default_factory=list)
    used: int = 0

    def run(self) -> None:
        """Descend and append the directions found, in turn.

        Growth is not a fixed-point iteration and loops plainly; every round but the first makes a sweep, so there are
        at most ``max_iter + 1``.
        """
        Y, options = self.Y, self.options
        for _ in range(options.max_iter + 1):
            sweeps = options.max_iter - self.used
            self.factors, objective, made = _descend(Y, self.factors, self.lam, options.tol * 1e-4, sweeps, self.keep)
            self.used += made
            if len(self.factors[0]) or made or not self.history:
                self.history.append(objective)
            self.report(self.used, len(self.factors[0]), objective)
            room = options.largest - len(self.factors[0])
            if room <= 0 or self.used >= options.max_iter:
                return
            values, found = ascend(Y - _full(self.factors), self.generator)
            above = values > (0.0 if options.fixed else self.lam * (1 + options.tol / 4))
            if not bool(above.any()) or (options.fixed and len(self.history) > REFILLS):
                return
            self.append(values[above][:room], [x[above][:room] for x in found])

    def keep(self, factors: Modes) -> None:
        """Remember the factors of a sweep, for an interruption."""
        self.factors = factors

    def append(self, values: Tensor, found: Sequence[Tensor]) -> None:
        """Append directions, each with its share of the size that their values allow."""
        size = (values - self.lam).clamp_min(0.05 * values) / len(values)
        scale = size.pow(1 / len(found)).unsqueeze(-1)
        pairs = zip(self.factors, found, strict=True)
        self.factors = tuple(torch.cat([old, (scale * new).to(old.dtype)]) for old, new in pairs)


def unfolding_bound(tensor: Tensor, level: float) -> Bound:
    r"""An upper bound on :math:`\max \langle Z, u \otimes v \otimes w\rangle` over unit vectors.

    An unfolding into a matrix replaces :math:`v \otimes w` by any unit vector, so its norm is a bound. The result is
    the smallest over all splits of the modes into two groups; beyond six modes, and where a side is long, only over
    those of one mode against the others. It is tight for orthogonally decomposable tensors and loose in general.

    >>> T = torch.zeros(2, 2, 2, dtype=torch.float64)
    >>> T[0, 0, 0], T[1, 1, 1] = 3.0, 1.0
    >>> round(unfolding_bound(T, 3.0).value, 5)
    3.0
    """
    tensor = tensor.to(torch.float64)
    order = tensor.dim()
    bounds = []
    for count in range(1, order // 2 + 1 if order <= SPLITS else 2):
        for group in itertools.combinations(range(order), count):
            if 2 * count == order and group[0]:
                continue  # the complement of a group that contains the first mode
            unfolded = tensor.movedim(group, tuple(range(count))).flatten(count).flatten(0, count - 1)
            if unfolded.shape[0] > unfolded.shape[1]:
                unfolded = unfolded.mT
            if count == 1 or len(unfolded) <= GROUPED:
                bounds.append(math.sqrt(gram_bound(gram(unfolded), level)))
    return Bound(min(bounds), "smallest unfolding norm, loose")


def tensor_certificate(
    Y: Tensor, factors: Modes, lam: float, tol: float, generator: torch.Generator
) -> tuple[Certificate, float]:
    """The certificate and the objective of CP factors, with the unfoldings' bound on the polar."""
    first, *rest = (x.to(torch.float64) for x in factors)
    wide, other = Y.to(torch.float64), khatri_rao(*rest)
    problem = FactorProblem(Squared(wide.flatten(1)), L2(), lam)
    Z = problem.loss.dual(first.mT, other.mT)
    residual = Z.dense().reshape(wide.shape)
    upper = unfolding_bound(residual, lam)
    lower = float(ascend(residual, generator)[0].max())
    penalty = float((first.norm(dim=1) * other.norm(dim=1)).sum())
    return conclude(problem, first.mT, other.mT, dual=Z, penalty=penalty, polar=(lower, upper), tol=tol)

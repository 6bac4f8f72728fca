r"""Upper bounds on polars. Certificates rest on them.

The polar of a matrix Z is :math:`p = \max\{u^\top Z v : \theta(u, v) \le 1\}`. Each function returns a
:class:`Bound`: a number that no direction exceeds, and the name of the method. A bound by Cholesky is a theorem about
the computed matrix in floating point. A bound by Lanczos fails with a probability that its name states. There is one
bound for each regularizer: :func:`spectral_bound` (L2), :func:`sparse_bound`, and those for non-negative factors in
``nonnegative``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..functions import L1
from ..linalg import gram
from ..norms.spectral import EPS, SPECTRUM, certified_lambda_max, lanczos, start_vector
from ..solvers.iterate import iterate
from .matrices import DualMatrix, leading_singular

__all__ = ["Bound", "BoundOptions", "affordable_bound", "quick_bound", "sparse_bound", "spectral_bound"]

FAILURE = 1e-9
# The largest number of columns of a Gram matrix that is formed and factorised.
LARGEST_GRAM = 6000
# Entries of a Krylov basis: half a gigabyte of float64.
BASIS = 64_000_000
# Floating point operations at effort 1: about five seconds of one core. Every bound may spend the least.
BUDGET, LEAST = 6e10, 3e7
CALLS = 1e6  # in the time of the calls of torch of a sweep
# Products with vectors are bound by memory: they cost several operations of a product of matrices.
VECTOR = 8.0
# Splittings: vectors of the subspace iteration, products a step, steps, and steps between two looks at the progress.
WIDTH, SPLIT_WORK, MAX_SPLIT, CHECKS = 24, 5.0, 400, 20
THRESHOLDS = 24
GRID = 2000


@dataclass(frozen=True)
class Bound:
    """A number that the polar does not exceed, and the method that proves it."""

    value: float
    method: str


@dataclass(frozen=True)
class BoundOptions:
    """Options of an upper bound on the polar.

    Attributes:
        accuracy: The relative distance above the level at which a bound is good enough.
        effort: The budget; 1 is about five seconds of one core. At zero only the cheapest bounds are computed.
        pairs: The current factors, vectors as rows: a start for relaxations.
        generator: For random starts.
        relax: Whether relaxations may be solved; a point that is known to be improvable needs none.
    """

    accuracy: float = 1e-4
    effort: float = 1.0
    pairs: tuple[Tensor, Tensor] | None = None
    generator: torch.Generator | None = None
    relax: bool = True

    def affords(self, work: float) -> bool:
        """Whether the budget suffices for this many floating point operations."""
        return work <= max(self.effort * BUDGET, LEAST)


DEFAULT = BoundOptions()


def quick_bound(matrix: DualMatrix) -> Bound:
    """‖Z‖_F, which costs one pass over Z: no polar over unit vectors exceeds it."""
    return Bound(
        math.sqrt(matrix.square()) * (1 + 64 * EPS * (8 + math.sqrt(math.prod(matrix.shape)))), "Frobenius norm"
    )


def affordable_bound(matrix: DualMatrix, level: float, options: BoundOptions) -> Bound:
    """:func:`spectral_bound` if the budget suffices for it, else :func:`quick_bound`."""
    return (
        spectral_bound(matrix, level, options.accuracy, options.generator)
        if options.affords(spectral_work(matrix, options.accuracy))
        else quick_bound(matrix)
    )


def spectral_work(matrix: DualMatrix, accuracy: float) -> float:
    """Floating point operations of :func:`spectral_bound`."""
    side = _side(matrix)
    if _factorizes(matrix, accuracy):
        return 0.5 * side * matrix.work() + side**3
    steps = _lanczos_steps(side, accuracy)
    return steps * (2 * VECTOR * matrix.work() + 8 * steps * side)


# -- the largest singular value: L2 ------------------------------------------------------------------------------------


def has_gram(matrix: DualMatrix) -> bool:
    """Whether the Gram matrix of the shorter side may be formed."""
    return _side(matrix) <= LARGEST_GRAM and not matrix.compact


def _side(matrix: DualMatrix) -> int:
    """The size of :func:`small_gram`."""
    return matrix.shape[0] if matrix.flat else matrix.shape[1]


def small_gram(matrix: DualMatrix, part: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """The Gram matrix of the shorter side; with ``part``, a function of the entries, that of ``part(Z)``."""
    return matrix.outer(part) if matrix.flat else matrix.gram(part)


def spectral_bound(
    matrix: DualMatrix, level: float, accuracy: float = 1e-4, generator: torch.Generator | None = None
) -> Bound:
    r"""An upper bound on :math:`\sigma_{\max}(Z)`: by Cholesky if the shorter side is small enough, else by Lanczos.

    If Lanczos needs as many vectors as the side is long, its basis is as large as the Gram matrix. Then Cholesky is
    cheaper, and it cannot fail.
    """
    if _factorizes(matrix, accuracy):
        return cholesky_bound(matrix, level, accuracy)
    return lanczos_bound(matrix, accuracy=accuracy, generator=generator)


def _factorizes(matrix: DualMatrix, accuracy: float) -> bool:
    """Whether :func:`spectral_bound` forms a Gram matrix."""
    side = _side(matrix)
    return has_gram(matrix) or (_lanczos_steps(side, accuracy) >= side and side * side <= BASIS)


def largest_singular(matrix: DualMatrix, generator: torch.Generator | None = None) -> float:
    r""":math:`\sigma_{\max}(Z)`: an upper bound from the eigenvalues of the Gram matrix if that may be formed, else a
    lower bound by block Krylov iteration.

    >>> from .residual import DenseDual
    >>> round(largest_singular(DenseDual(torch.diag(torch.tensor([1.0, 2.0])))), 9)
    2.0
    """
    if not has_gram(matrix):
        return float(leading_singular(matrix, 2, generator=generator, sweeps=40)[1][0])
    product = small_gram(matrix)
    return math.sqrt(max(float(torch.linalg.eigvalsh(product)[-1]), 0.0) + _product_error(product))


def cholesky_bound(matrix: DualMatrix, level: float, accuracy: float = 1e-4) -> Bound:
    r"""An upper bound on :math:`\sigma_{\max}(Z)` by a Cholesky factorisation that succeeds.

    :math:`\lambda^2(1+\varepsilon)I - Z^\top Z` is factorised at the level that would certify and, if that fails, at a
    Lanczos estimate of the norm. The rounding errors of the product and of the factorisation are part of the bound.

    >>> from .residual import DenseDual
    >>> 2.0 <= cholesky_bound(DenseDual(torch.diag(torch.tensor([1.0, 2.0]))), 2.0).value <= 2.00001
    True
    """
    product = small_gram(matrix)
    return Bound(math.sqrt(gram_bound(product, level, rtol=min(5e-5, accuracy))), "Cholesky")


def _product_error(product: Tensor) -> float:
    """A bound on the error of the largest eigenvalue that the rounding of a float64 product causes."""
    return 8 * (product.shape[-1] + 4096) * EPS * float(product.diagonal().sum())


def gram_bound(product: Tensor, level: float, rtol: float = 5e-5) -> float:
    r"""An upper bound on :math:`\lambda_{\max}` of a product :math:`ZZ^\top` that was computed in float64.

    A computed product differs from the exact one by at most :math:`\gamma_n \|Z\|_F^2`, which its trace bounds.
    """
    # The level is tried first only if it is near the norm: a needlessly high bound scales the dual point down, and the
    # factorisation at a level below an estimate, which is a lower bound, fails. Small matrices get their spectrum.
    near, floor = level * level * (1 + 1e-9), 0.0
    if near > 0 and product.numel() > SPECTRUM:
        estimate = float(lanczos(lambda v: product @ v, start_vector((len(product),), product), 12)[0])
        floor = near if 0.9 * near < estimate <= near * (1 + 1e-9) else 0.0
    return max(0.0, float(certified_lambda_max(product, rtol=rtol, floor=floor))) + _product_error(product)


def lanczos_slack(n: int, steps: int, failure: float) -> float:
    r"""The :math:`\varepsilon` for which ``steps`` steps of Lanczos on an n × n matrix, from a random start, give less
    than :math:`(1-\varepsilon)\lambda_{\max}` with probability at most ``failure``.

    After k steps that probability is at most :math:`1.648\sqrt{n}\,e^{-\sqrt\varepsilon(2k-1)}` (Kuczyński &
    Woźniakowski, *Estimating the largest eigenvalue by the power and Lanczos algorithms with a random start*, 1992,
    Theorem 4.2). It is zero for a Krylov space of full dimension.

    >>> lanczos_slack(10, 10, 1e-9), 0.0 < lanczos_slack(10**6, 1000, 1e-9) < 2e-4
    (0.0, True)
    """
    return 0.0 if steps >= n else (math.log(1.648 * math.sqrt(n) / failure) / (2 * steps - 1)) ** 2


def lanczos_bound(matrix: DualMatrix, *, accuracy: float = 2.5e-4, generator: torch.Generator | None = None) -> Bound:
    r"""An upper bound on :math:`\sigma_{\max}(Z)` that fails with probability at most ``FAILURE``.

    The number of steps is the one that ``accuracy`` needs by :func:`lanczos_slack`, limited by the size ``BASIS`` of
    the Krylov basis, whose vectors are as long as the shorter side.

    >>> from .residual import DenseDual
    >>> 2.0 <= lanczos_bound(DenseDual(torch.diag(torch.tensor([1.0, 2.0])))).value <= 2.001
    True
    """
    flat, n = matrix.flat, _side(matrix)
    steps = min(_lanczos_steps(n, accuracy), max(BASIS // n, 1))
    epsilon = lanczos_slack(n, steps, FAILURE)
    method = f"Lanczos, failure probability {FAILURE:g}"
    if epsilon >= 1:
        return Bound(math.inf, method)

    def squared(x: Tensor) -> Tensor:
        return matrix.times(matrix.adjoint(x)) if flat else matrix.normal(x)

    value, _ = lanczos(squared, matrix.noise(1, generator, left=flat).squeeze(1), steps)
    slack = 64 * (n + 64) * EPS
    error = 2 * math.sqrt(steps) * matrix.product_error()
    return Bound(math.sqrt(max(float(value), 0.0) * (1 + slack) / (1 - epsilon)) + error, method)


def _lanczos_steps(n: int, accuracy: float) -> int:
    """The number of steps after which :func:`lanczos_slack` bounds the norm to within a relative ``accuracy``."""
    share = max(-math.expm1(-2 * math.log1p(accuracy)), EPS)  # 1 − (1 + accuracy)⁻²
    return math.ceil((math.log(1.648 * math.sqrt(n) / FAILURE) / math.sqrt(share) + 1) / 2)


# -- splittings --------------------------------------------------------------------------------------------------------


def split_matrix(
    matrix: DualMatrix, level: float, options: BoundOptions, feasible: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, float] | None:
    r"""A matrix A whose norm bounds the polar of Z, and a bound on its norm: None if the budget does not suffice.

    ``feasible(Z, P)`` is the projection of P to the matrices A for which :math:`\sigma_{\max}(A) \le t` proves that the
    polar is at most t, for every t ≥ ``level``. For non-negative factors these are the :math:`A = Z + N` with
    :math:`N \ge 0`, because :math:`u^\top Zv \le u^\top Av` for :math:`u, v \ge 0`. The projected gradient method with
    momentum lowers the squared distance of A to the matrices of norm at most the level: it clips the singular values
    of A, of which a warm subspace iteration finds those above the level, and projects. Every A gives a valid bound: the
    result is that of a Cholesky factorisation for the last A, in floating point.
    """
    if matrix.compact or matrix.rows.ranks > 1 or not has_gram(matrix):
        return None
    price = spectral_work(matrix, options.accuracy)
    steps = int((options.effort * BUDGET - price) / (SPLIT_WORK * WIDTH * matrix.work() + 2 * CALLS))
    if steps < 3 or not options.relax:
        return None
    Z = matrix.dense()
    noise = matrix.noise(min(WIDTH, *Z.shape), options.generator)
    start = _SplitState(Z, Z, noise, 1.0, math.inf, math.inf)

    def step(state: _SplitState, k: int) -> _SplitState:
        A, ahead, right, momentum, _, _ = state
        basis = torch.linalg.qr(ahead.mT @ (ahead @ right)).Q
        left, values, mix = torch.linalg.svd(ahead @ basis, full_matrices=False)
        right = basis @ mix.mT
        over = (values - level).clamp_min(0.0)
        count = int((over > 0).sum())
        new = feasible(Z, ahead - (left[:, :count] * over[:count]) @ right[:, :count].mT)
        after = (1 + math.sqrt(1 + 4 * momentum * momentum)) / 2
        ahead = new + (momentum - 1) / after * (new - A)
        # The distance to the matrices of norm at most the level, here and CHECKS steps before.
        distance = float(over.norm())
        marked = distance if k % CHECKS == 0 else state.marked
        quiet = k % CHECKS == CHECKS - 1 and distance > 0.97 * state.marked
        return _SplitState(new, ahead, right, after, marked, 0.0 if quiet else distance)

    state, _ = iterate(
        step, start, min(steps, MAX_SPLIT), until=lambda s, k: s.distance <= 0.1 * options.accuracy * level
    )
    product = gram(state.A if matrix.flat else state.A.mT)
    return state.A, math.sqrt(gram_bound(product, level, rtol=min(5e-5, options.accuracy)))


class _SplitState(NamedTuple):
    A: Tensor
    ahead: Tensor
    right: Tensor
    momentum: float
    marked: float
    distance: float


# -- sparse codes ------------------------------------------------------------------------------------------------------


def sparse_bound(matrix: DualMatrix, level: float, gamma: float, options: BoundOptions = DEFAULT) -> Bound:
    r"""An upper bound on the polar of :math:`\theta(u, v) = \|v\|_2(\|u\|_2 + \gamma\|u\|_1)`.

    With :math:`s = \|u\|_1/\|u\|_2 \in [1, \sqrt n]`,

    .. math::

        p = \max_u \frac{\sqrt{u^\top Q u}}{\|u\|_2 + \gamma\|u\|_1}
          \le \max_s \min_\rho \frac{\sqrt{\lambda_{\max}(\operatorname{ST}_\rho(Q)) + \rho s^2}}{1 + \gamma s},
        \qquad Q = ZZ^\top ,

    because :math:`u^\top Q u \le u^\top \operatorname{ST}_\rho(Q) u + \rho\|u\|_1^2` (the dual bound of sparse
    principal components: d'Aspremont, El Ghaoui, Jordan & Lanckriet, 2007). Between two grid points of s, the numerator
    is taken at the right end and the denominator at the left.

    >>> from .residual import DenseDual
    >>> Z = torch.ones(9, 1)                                  # the polar is attained at u = 1: 3/(1 + 3γ)
    >>> 1.2 <= sparse_bound(DenseDual(Z), 1.2, 0.5).value <= 1.5
    True
    """
    n = matrix.full_rows()
    if gamma == 0 or n > LARGEST_GRAM or n == 0 or not options.relax or matrix.compact:
        norm = affordable_bound(matrix, level * (1 + gamma), options)
        return Bound(norm.value / (1 + gamma), f"{norm.method}, norm")
    split = _row_split(matrix, level, gamma, options)
    if split is not None and split.value <= level * (1 + options.accuracy):
        return split
    product = matrix.outer()
    largest = float(product.abs().max())
    if largest == 0:
        return Bound(0.0, "zero")
    error = _product_error(product)
    # A code of one entry needs a threshold near the largest off-diagonal entry; a dense code needs none.
    ratios = torch.cat([torch.zeros(1), torch.logspace(-3, 0, THRESHOLDS)]).to(torch.float64)
    thresholds = ratios * largest
    tops = torch.tensor(
        [
            gram_bound(product if rho == 0 else L1(1.0).prox(product, float(rho)), 0.0, rtol=1e-4) + error
            for rho in thresholds
        ],
        dtype=torch.float64,
    )
    edges = torch.linspace(1.0, math.sqrt(n) * (1 + 1e-12), GRID + 1, dtype=torch.float64)
    above = (tops.unsqueeze(1) + thresholds.unsqueeze(1) * edges[1:].square()).amin(0)
    bound = float((above.clamp_min(0).sqrt() / (1 + gamma * edges[:-1])).max()) * (1 + 1e-14)
    known = Bound(bound, "Cholesky, thresholded Gram")
    return known if split is None or split.value >= known.value else split


def _row_split(matrix: DualMatrix, level: float, gamma: float, options: BoundOptions) -> Bound | None:
    r"""The larger of :math:`\sigma_{\max}(Z - N)` and :math:`\max_i\|N_i\|/\gamma` over the rows of N, for the best N
    that :func:`split_matrix` finds.

    It is a bound, because :math:`u^\top Zv \le \|v\|(\sigma_{\max}(Z - N)\|u\|_2 + \max_i\|N_i\|\|u\|_1)`.
    """

    def feasible(Z: Tensor, P: Tensor) -> Tensor:
        N = Z - P
        norms = N.norm(dim=1, keepdim=True)
        return Z - N * (level * gamma / norms.clamp_min(level * gamma))

    found = split_matrix(matrix, level, options, feasible)
    if found is None:
        return None
    A, norm = found
    Z = matrix.dense()
    # The subtraction rounds each entry of N by at most a unit in its last place.
    slack = 1 + 8 * (Z.shape[1] + 8) * EPS
    return Bound(max(norm, float((Z - A).norm(dim=1).max()) * slack / gamma), "Cholesky, split into norm and rows")

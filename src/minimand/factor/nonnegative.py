"""Upper bounds on the polar of non-negative factors, from cheap to tight."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..functions import PositiveSemidefinite
from ..norms.spectral import EPS, certified_lambda_max
from ..solvers.iterate import iterate
from .bounds import BUDGET, DEFAULT, VECTOR, Bound, BoundOptions, affordable_bound, split_matrix
from .branching import SHORTEST, branched_bound
from .matrices import DualMatrix

__all__ = ["doubly_nonnegative_bound", "perron_bound"]

CHECK_EVERY = 20
RELAXATION = 1.6
MAX_ADMM = 600
PERRON = 5
BRANCH = 30  # operations of a product of matrices in the time of one on cones


def doubly_nonnegative_bound(matrix: DualMatrix, level: float, options: BoundOptions = DEFAULT) -> Bound:
    r"""An upper bound on :math:`\max\{u^\top Z v : u, v \ge 0, \|u\| = \|v\| = 1\}`.

    For :math:`u, v \ge 0` of unit length and any symmetric :math:`N \ge 0`,

    .. math::

        2u^\top Z v = w^\top M w \le w^\top (M + N) w \le 2\lambda_{\max}(M + N), \qquad
        M = \begin{pmatrix} 0 & Z \\ Z^\top & 0 \end{pmatrix}, \quad w = \begin{pmatrix} u \\ v \end{pmatrix},

    so :math:`p \le \lambda_{\max}(M + N)`. The best N solves the dual of maximising :math:`\langle M, W\rangle` over
    matrices W that are positive semidefinite and non-negative. ADMM approximates it. Every N gives a valid bound,
    because the largest eigenvalue is then bounded by a Cholesky factorisation.

    The norms of Z and of its positive part are tried first. If neither is at most ``level``, the norm of
    :math:`Z + N` with a rectangular :math:`N \ge 0` follows, which is M + N without its diagonal blocks and costs far
    less (:func:`split_matrix`), and then the relaxation, to within the accuracy, for as many iterations as the effort
    allows, from the W of the current factors. If the shorter side has at most five entries, branch and bound decides
    what the relaxation leaves open (:func:`~minimand.factor.branching.branched_bound`).

    >>> from .residual import DenseDual
    >>> Z = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])          # norm 2; the polar over u, v ≥ 0 is 1
    >>> round(doubly_nonnegative_bound(DenseDual(Z), 1.0).value, 3)
    1.0
    """
    accuracy, pairs = options.accuracy, options.pairs
    bound = _norm_bound(matrix, level, options)
    if bound.value > level * (1 + accuracy):
        found = split_matrix(matrix, level, options, torch.maximum)
        if found is not None and found[1] < bound.value:
            bound = Bound(found[1], "Cholesky, norm of Z + N with N ≥ 0")
    size = matrix.full_rows() + matrix.shape[1]
    iterations = min(MAX_ADMM, int(options.effort * BUDGET / (12.0 * max(size, 1) ** 3)))
    if not options.relax or matrix.compact or bound.value <= level * (1 + accuracy) or iterations < 2 * CHECK_EVERY:
        return bound
    Z = matrix.dense()
    if pairs is not None:
        pairs = (matrix.rows.gather(pairs[0].mT.contiguous()).mT, pairs[1])
    value = _relaxation(Z, level, iterations, pairs, accuracy)
    bound = Bound(value, "doubly non-negative dual") if value < bound.value else bound
    if bound.value <= level * (1 + accuracy) or min(Z.shape) > SHORTEST:
        return bound
    # A search that its limits end leaves cones with loose bounds, so the accuracy is reached in steps.
    for step in (10, 3, 1):
        value = branched_bound(Z, level, step * accuracy, options.effort * BUDGET / BRANCH)
        if value >= bound.value:
            break
        bound = Bound(value, "branch and bound")
    return bound


def _norm_bound(matrix: DualMatrix, level: float, options: BoundOptions) -> Bound:
    """The smallest of the norm of Z, if the budget suffices for it, and that of its positive part."""
    best = affordable_bound(matrix, level, options)
    price = PERRON * (2 * VECTOR * matrix.work() + matrix.block_work())
    if best.value > level * (1 + options.accuracy) and options.affords(price):
        best = min(best, perron_bound(matrix), key=lambda bound: bound.value)
    return best


def perron_bound(matrix: DualMatrix) -> Bound:
    r"""An upper bound on the norm of the positive part of Z, :math:`\sigma_{\max}(A)` with :math:`A = Z_+`.

    For every :math:`x > 0`, :math:`\sigma_{\max}(A)^2 \le \max_i (A^\top A x)_i / x_i` (Collatz & Wielandt). The power
    method from the ones converges to the best x. All terms are positive, so rounding errors are relative.

    >>> from .residual import DenseDual
    >>> Z = torch.tensor([[1.0, -5.0], [2.0, 2.0]])           # −5 does not count
    >>> sigma = float(torch.linalg.matrix_norm(Z.relu(), 2))
    >>> sigma <= perron_bound(DenseDual(Z)).value <= 1.001 * sigma
    True
    """

    def image(x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for _, block in matrix.blocks():
            positive = block.relu()
            total += positive.mT @ (positive @ x)
        return matrix.rows.sum(total)

    def step(state: tuple[Tensor, float], k: int) -> tuple[Tensor, float]:
        x, best = state
        moved = image(x)
        top = float((moved / x).max())
        # A column without positive entries would end at zero: a small share of the ones keeps x positive.
        size = float(moved.max())
        return (moved / size + 1e-9 if size > 0 else x), min(best, top)

    ones = torch.ones(matrix.shape[1], dtype=torch.float64, device=matrix.device)
    (_, best), _ = iterate(step, (ones, math.inf), PERRON)
    terms = matrix.full_rows() + matrix.shape[1]
    return Bound(math.sqrt(best * (1 + 8 * terms * EPS)), "Collatz–Wielandt, norm of the positive part")


class _RelaxationState(NamedTuple):
    N: Tensor
    t: float
    W: Tensor  # the multiplier divided by the penalty
    best: float
    stalls: int


def _relaxation(
    Z: Tensor, level: float, iterations: int, pairs: tuple[Tensor, Tensor] | None, accuracy: float
) -> float:
    r"""ADMM on :math:`\min t` subject to :math:`S + M + N = tI`, :math:`S \succeq 0`, :math:`N \ge 0`, over-relaxed."""
    rows, columns = Z.shape
    size = rows + columns
    scale = max(level, 1e-30 * float(torch.linalg.matrix_norm(Z))) or 1.0
    M = Z.new_zeros(size, size)
    M[:rows, rows:], M[rows:, :rows] = Z / scale, Z.mT / scale
    W = _first_multiplier(pairs, size, Z)
    # Ten times the ratio of the two sides' sizes: measured to be near the best over sizes and ranks.
    penalty = 10 * float(W.norm()) / math.sqrt(size)
    identity = torch.eye(size, dtype=Z.dtype, device=Z.device)
    cone = PositiveSemidefinite()

    def step(state: _RelaxationState, k: int) -> _RelaxationState:
        N, t, W, best, stalls = state
        shifted = t * identity - M - N
        S = RELAXATION * cone.prox(shifted - W) + (1 - RELAXATION) * shifted
        N = torch.relu(-M - S - W)
        # A positive diagonal entry only raises the eigenvalue.
        N.diagonal().zero_()
        t = float((S + W).diagonal().sum() - 1 / penalty) / size
        W = W + S + M + N - t * identity
        if (k + 1) % CHECK_EVERY == 0:
            found = float(certified_lambda_max(M + N, rtol=min(1e-5, accuracy / 4), floor=1.0))
            stalls = stalls + 1 if found > best - 0.05 * accuracy else 0
            best = min(best, found)
        return _RelaxationState(N, t, W, best, stalls)

    def done(state: _RelaxationState, k: int) -> bool:
        return state.best <= 1 + accuracy or state.stalls >= 3

    start = _RelaxationState(torch.relu(-M), 1.0, W / penalty, math.inf, 0)
    state, _ = iterate(step, start, iterations, until=done)
    # The factor covers the rounding of the division by the scale and of M + N.
    return state.best * scale * (1 + 1e-13)


def _first_multiplier(pairs: tuple[Tensor, Tensor] | None, size: int, like: Tensor) -> Tensor:
    """The primal point of the factors: Σ wwᵀ, scaled to trace one."""
    uniform = torch.eye(size, dtype=like.dtype, device=like.device) / size
    if pairs is None or not len(pairs[0]):
        return uniform
    stacked = torch.cat([pairs[0], pairs[1]], dim=1).to(like.dtype)
    W = stacked.mT @ stacked
    trace = float(W.diagonal().sum())
    return W / trace if trace > 0 else uniform

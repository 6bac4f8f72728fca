r"""The doubly non-negative bound on the polar of non-negative factorisation.

For :math:`u, v \ge 0` of unit length and any symmetric :math:`N \ge 0`,

.. math::

    2u^\top Z v = w^\top M w \le w^\top (M + N) w \le 2\lambda_{\max}(M + N), \qquad
    M = \begin{pmatrix} 0 & Z \\ Z^\top & 0 \end{pmatrix}, \quad w = \begin{pmatrix} u \\ v \end{pmatrix},

so that :math:`p \le \lambda_{\max}(M + N)`. The best N is the dual of maximising :math:`\langle M, W\rangle` over
matrices W that are positive semidefinite and non-negative at once. ADMM finds it; whatever it finds is valid, since the
largest eigenvalue is then bounded by a Cholesky factorisation.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..functions import PositiveSemidefinite
from ..norms.spectral import certified_lambda_max
from ..solvers.iterate import iterate
from .bounds import Bound, gram_bound, has_gram, small_gram, spectral_bound
from .duals import DualMatrix

__all__ = ["doubly_nonnegative_bound"]

# Floating point operations that a bound may spend at effort one: about five seconds of one core.
BUDGET = 6e10
CHECK_EVERY = 20
RELAXATION = 1.6
LONGEST = 600


def doubly_nonnegative_bound(
    matrix: DualMatrix,
    level: float,
    *,
    accuracy: float = 1e-4,
    effort: float = 1.0,
    pairs: tuple[Tensor, Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> Bound:
    r"""An upper bound on :math:`\max\{u^\top Z v : u, v \ge 0, \|u\| = \|v\| = 1\}`.

    First the norms of Z and of its positive part, which cost one factorisation each. If neither reaches ``level``, the
    relaxation is solved to within ``accuracy`` of it, as far as ``effort`` allows; ``pairs`` (the factors, as rows)
    start its matrix W.

    >>> from .duals import Dense
    >>> Z = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])          # norm 2; the polar over u, v ≥ 0 is 1
    >>> round(doubly_nonnegative_bound(Dense(Z), 1.0).value, 3)
    1.0
    """
    bound = _elementary(matrix, level, accuracy, generator)
    size = matrix.full_rows() + matrix.shape[1]
    iterations = min(LONGEST, int(effort * BUDGET / (12.0 * max(size, 1) ** 3)))
    if bound.value <= level * (1 + accuracy) or iterations < 2 * CHECK_EVERY:
        return bound
    Z = matrix.dense()
    if pairs is not None:
        pairs = (matrix.rows.gather(pairs[0].mT.contiguous()).mT, pairs[1])
    value = _relaxation(Z, level, iterations, pairs, accuracy)
    return Bound(value, "doubly non-negative dual") if value < bound.value else bound


def _elementary(matrix: DualMatrix, level: float, accuracy: float, generator: torch.Generator | None) -> Bound:
    """The norms of Z and of its positive part."""
    plain = spectral_bound(matrix, level, accuracy, generator)
    if plain.value <= level * (1 + accuracy) or not has_gram(matrix):
        return plain
    positive = math.sqrt(gram_bound(small_gram(matrix, torch.relu), level))
    return Bound(positive, "Cholesky, norm of the positive part") if positive < plain.value else plain


class _Splitting(NamedTuple):
    N: Tensor
    t: float
    W: Tensor  # the multiplier over the penalty
    best: float
    stalls: int


def _relaxation(
    Z: Tensor, level: float, iterations: int, pairs: tuple[Tensor, Tensor] | None, accuracy: float
) -> float:
    r"""ADMM on :math:`\min t` subject to :math:`S + M + N = tI`, :math:`S \succeq 0`, :math:`N \ge 0`, over-relaxed."""
    rows, columns = Z.shape
    size = rows + columns
    scale = level if level > 0 else float(torch.linalg.matrix_norm(Z)) or 1.0
    M = Z.new_zeros(size, size)
    M[:rows, rows:], M[rows:, :rows] = Z / scale, Z.mT / scale
    W = _start(pairs, size, Z)
    # Ten times the ratio of the two sides' sizes: measured to be near the best over sizes and ranks.
    penalty = 10 * float(W.norm()) / math.sqrt(size)
    identity = torch.eye(size, dtype=Z.dtype, device=Z.device)
    cone = PositiveSemidefinite()

    def step(state: _Splitting, k: int) -> _Splitting:
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
        return _Splitting(N, t, W, best, stalls)

    def done(state: _Splitting, k: int) -> bool:
        return state.best <= 1 + accuracy or state.stalls >= 3

    start = _Splitting(torch.relu(-M), 1.0, W / penalty, math.inf, 0)
    state, _ = iterate(step, start, iterations, until=done)
    # The rounding of the division by the scale and of M + N, entry by entry.
    return state.best * scale * (1 + 1e-13)


def _start(pairs: tuple[Tensor, Tensor] | None, size: int, like: Tensor) -> Tensor:
    """The primal point that the factors themselves are: Σ wwᵀ of trace one."""
    uniform = torch.eye(size, dtype=like.dtype, device=like.device) / size
    if pairs is None or not len(pairs[0]):
        return uniform
    stacked = torch.cat([pairs[0], pairs[1]], dim=1).to(like.dtype)
    W = stacked.mT @ stacked
    trace = float(W.diagonal().sum())
    return W / trace if trace > 0 else uniform

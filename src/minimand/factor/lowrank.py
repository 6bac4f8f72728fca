r"""The estimator LowRank: the prox of the nuclear norm from a randomised SVD of adaptive width, and its certificate.

Subspace iteration finds the leading triples of Y; the width doubles until the smallest singular value found lies below
the threshold. The certificate then bounds the error of the randomised SVD: with the orthonormal :math:`P, Q` of the
kept triples, and :math:`R = Y - X`,

.. math::

    \|R\|_2 \le \left\| \begin{pmatrix} \|P^\top R Q\| & \|P^\top R Q_\perp\| \\ \|P_\perp^\top R Q\| &
    \|P_\perp^\top R Q_\perp\| \end{pmatrix} \right\|_2 ,

where all matrices but the last are thin. The norm of the last is far below the threshold unless a singular value lies
next to it, so a few Lanczos steps bound it.
"""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..norms.spectral import EPS, lanczos
from ..solvers.iterate import iterate
from .base import Factorization
from .bounds import FAILURE, Bound, lanczos_slack, spectral_bound
from .certificate import conclude
from .checking import WeightedRows
from .matrices import DualMatrix, RowSharding, orthonormal, signs
from .problem import Certificate, FactorProblem, Factors, Report, noted_if_zero, stop_reason
from .sparse import SparseData

__all__ = ["LowRank", "Triples", "all_triples", "shrunk", "shrunk_certificate"]

WIDTH = 24
SMALL = 1_000_000  # entries of a sparse matrix that is as well dense
# Relative change of the singular values at which subspace iteration stops.
SETTLED = {torch.float64: 1e-7, torch.float32: 1e-5}
LANCZOS_STEPS = (15, 24, 48)


@dataclass(eq=False, repr=False)
class LowRank(WeightedRows, Factorization):
    r"""Low-rank approximation,

    .. math:: \min_{r,U,V} \tfrac12\|Y - UV^\top\|_F^2 + \lambda\sum_i\|U_i\|_2\|V_i\|_2 \;=\;
        \min_X \tfrac12\|Y - X\|_F^2 + \lambda\|X\|_* ,

    whose minimiser has the singular values above :math:`\lambda`, lowered by :math:`\lambda`: the prox of the nuclear
    norm. A randomised SVD computes the triples; its width doubles until its smallest value lies below
    :math:`\lambda`.

    Args:
        lam: :math:`\lambda > 0`.
        tol: The relative gap to certify.
        max_iter: The number of products with Y and its transpose at each width.
        random_state: Seed of the randomised SVD.
        verbose: Show a progress bar.

    Source: [Vidal2018], matrix factorisation; Cai, Candès & Shen, 2010, Theorem 2.1.

    >>> import numpy as np
    >>> model = LowRank(lam=1.0).fit(np.diag([3.0, 2.0, 0.5]))
    >>> model.n_components_, round(model.objective_, 6), model.certificate_.status
    (2, 4.125, <Status.CERTIFIED: 'CERTIFIED'>)
    """

    _: KW_ONLY
    max_iter: int = 100
    _takes_sparse = True

    def _solve(self, problem: Any, start: Any, report: Report) -> Factors:
        Y, rows, lam, generator = problem.loss.Y, problem.rows, problem.lam, self._generator()
        triples = shrunk(Y, lam, rows=rows, generator=generator, start=start, sweeps=int(self.max_iter))
        report(int(self.max_iter), len(triples.kept), 0.0)
        certificate, objective = shrunk_certificate(problem, triples, self.tol, generator)
        if certificate.polar_lower > lam * (1 + 1e-6) and not isinstance(Y, SparseData):
            # The randomised SVD missed a singular value next to λ.
            triples = all_triples(Y, lam, rows)
            certificate, objective = shrunk_certificate(problem, triples, self.tol, generator)
        certificate = noted_if_zero(certificate, len(triples.kept), lam)
        stop = stop_reason(certificate, lam=lam, tol=self.tol, out_of_iterations=self.max_iter <= 1)
        return Factors(*triples.factors(), objective, certificate, (objective,), 1, stop)


@dataclass(frozen=True)
class Triples:
    """Singular triples: vectors as columns, and the singular values minus the threshold."""

    left: Tensor
    kept: Tensor
    right: Tensor

    def factors(self) -> tuple[Tensor, Tensor]:
        """Balanced factors of the shrunk matrix."""
        root = self.kept.sqrt() * signs(self.right)
        return self.left * root, self.right * root


def shrunk(
    Y: Any,
    threshold: float,
    *,
    rows: RowSharding,
    generator: torch.Generator,
    start: tuple[Tensor, Tensor] | None = None,
    sweeps: int = 100,
) -> Triples:
    """The triples of Y above ``threshold``, lowered by it.

    >>> found = shrunk(torch.diag(torch.tensor([3.0, 2.0, 0.5])), 1.0, rows=RowSharding(), generator=torch.Generator())
    >>> found.kept
    tensor([2., 1.])
    """
    n, m = Y.shape
    smaller = min(rows.count(n), m)
    width = min(smaller, max(WIDTH, 0 if start is None else start[1].shape[1] + 8))
    sparse = isinstance(Y, SparseData)
    if sparse and (smaller <= 2 * WIDTH or Y.numel() <= SMALL):
        return all_triples(Y[:], threshold, rows)
    if smaller <= 2 * WIDTH or 3 * width > smaller:
        return all_triples(Y, threshold, rows)
    block = _start_block(Y, width, start, rows, generator)
    for _ in range(smaller.bit_length()):
        state = _subspace_iteration(Y, block, threshold, rows, sweeps)
        if state.passed(threshold):
            return _above(threshold, *state.triples())
        if 3 * 2 * block.shape[1] > smaller and not sparse:
            break
        extra = torch.randn(m, min(block.shape[1], smaller - block.shape[1]), dtype=Y.dtype, generator=generator).to(
            Y.device
        )
        block = torch.cat([state.block, rows.broadcast(extra)], dim=1)
    return all_triples(Y, threshold, rows)  # most triples lie above the threshold: a full SVD is cheaper


def _above(threshold: float, left: Tensor, values: Tensor, right: Tensor) -> Triples:
    keep = values > threshold
    return Triples(left[:, keep], values[keep] - threshold, right[:, keep])


def _start_block(
    Y: Any, width: int, start: tuple[Tensor, Tensor] | None, rows: RowSharding, generator: torch.Generator
) -> Tensor:
    noise = torch.randn(Y.shape[1], width, dtype=Y.dtype, generator=generator).to(Y.device)
    if start is not None:
        known = start[1].to(dtype=Y.dtype, device=Y.device)
        noise[:, : known.shape[1]] = known / known.norm(dim=0).clamp_min(torch.finfo(Y.dtype).tiny)
    return rows.broadcast(noise)


class _SubspaceState(NamedTuple):
    """Y ≈ left triangleᵀ blockᵀ with an orthonormal basis ``block`` of right vectors, and its singular values."""

    block: Tensor
    left: Tensor
    triangle: Tensor
    values: Tensor
    settled: bool  # whether the values above the threshold are those of the iteration before

    def passed(self, threshold: float) -> bool:
        """Whether the smallest singular value found lies below the threshold."""
        return float(self.values[-1]) < threshold

    def triples(self) -> tuple[Tensor, Tensor, Tensor]:
        """Singular triples, vectors as columns."""
        mix, values, other = torch.linalg.svd(self.triangle.mT, full_matrices=False)
        return self.left @ mix, values, self.block @ other.mT


def _subspace_iteration(Y: Any, block: Tensor, threshold: float, rows: RowSharding, sweeps: int) -> _SubspaceState:
    """Subspace iteration until the values above the threshold have settled, or the width is found to be too small."""

    def advanced(block: Tensor, before: Tensor | None) -> _SubspaceState:
        left = orthonormal(Y @ block, rows)
        core = rows.sum(Y.mT @ left)  # m × width
        # Only the singular values are needed here; the vectors are computed at the end.
        block, triangle = torch.linalg.qr(core)
        values = torch.linalg.svdvals(triangle)
        return _SubspaceState(block, left, triangle, values, settled(values, before))

    def settled(values: Tensor, before: Tensor | None) -> bool:
        if before is None:
            return False
        above, before = values[values > threshold], before[before > threshold]
        return len(above) == len(before) and bool(((above - before).abs() <= SETTLED[Y.dtype] * values[0]).all())

    return iterate(
        lambda state, k: advanced(state.block, state.values),
        advanced(block, None),
        max(sweeps - 1, 0),
        until=lambda state, k: state.settled or not state.passed(threshold),
    )[0]


def all_triples(Y: Tensor, threshold: float, rows: RowSharding) -> Triples:
    """As :func:`shrunk`, from a full SVD; with sharded rows, from the Gram matrix of the columns."""
    if rows.group is None:
        left, values, right = torch.linalg.svd(Y, full_matrices=False)
        return _above(threshold, left, values, right.mT)
    wide = Y.to(torch.float64)
    squares, vectors = torch.linalg.eigh(rows.sum(wide.mT @ wide))
    order = torch.argsort(squares, descending=True)
    values, right = squares[order].clamp_min(0).sqrt(), vectors[:, order]
    keep = values > threshold
    left = (wide @ right[:, keep]) / values[keep]
    return Triples(left.to(Y.dtype), (values[keep] - threshold).to(Y.dtype), right[:, keep].to(Y.dtype))


def shrunk_certificate(
    problem: FactorProblem, triples: Triples, tol: float, generator: torch.Generator
) -> tuple[Certificate, float]:
    """The certificate of a shrunk SVD, by the block bound, and its objective."""
    U, V = (factor.to(torch.float64) for factor in triples.factors())
    Z, lam = problem.loss.dual(U, V), problem.lam
    penalty = float((problem.rows.sum(U.square().sum(0)).sqrt() * V.norm(dim=0)).sum())
    problem.loss.value_at(U, V, Z)  # the moments, which also scale the rounding errors
    lower, upper = _block_bound(Z, problem.loss.chunked(U, V), triples, lam, generator)
    if upper.value > lam * (1 + tol / 4):
        bound = spectral_bound(Z, lam, tol / 4, generator)
        upper = bound if bound.value < upper.value else upper
    return conclude(problem, U, V, dual=Z, penalty=penalty, polar=(lower, upper), tol=tol)


def _block_bound(
    Z: DualMatrix, chunked: DualMatrix, triples: Triples, lam: float, generator: torch.Generator
) -> tuple[float, Bound]:
    """A lower and an upper bound on the norm of Z, from the blocks on and off the kept triples.

    ``chunked`` is Z with cheaper products, for the block off the triples, which may be rough.
    """
    P, Q = orthonormal(triples.left.to(torch.float64), Z.rows), torch.linalg.qr(triples.right.to(torch.float64)).Q
    down, across = Z.times(Q), Z.adjoint(P)  # R Q and Rᵀ P
    core = Z.rows.sum(P.mT @ down)
    corner = _norm(core, RowSharding())
    below, beside = _norm(down - P @ core, Z.rows), _norm(across - Q @ core.mT, RowSharding())

    def rest(v: Tensor) -> Tensor:
        v = v - Q @ (Q.mT @ v)
        image = chunked.times(v)
        image = image - P @ Z.rows.sum(P.mT @ image)
        back = chunked.adjoint(image)
        return back - Q @ (Q.mT @ back)

    n = Z.shape[1]
    found, epsilon, error = 0.0, 1.0, chunked.product_error()
    vector = Z.noise(1, generator).squeeze(1)
    for steps in LANCZOS_STEPS:
        # Each attempt may fail, so each gets a share of the failure probability.
        epsilon = lanczos_slack(n, steps, FAILURE / len(LANCZOS_STEPS))
        found = max(found, float(lanczos(rest, vector, steps)[0]))
        if steps >= n or found <= lam * lam * (1 - min(epsilon, 1.0)):
            break
    last = math.sqrt(found / (1 - epsilon)) + 2 * math.sqrt(steps) * error if epsilon < 1 else math.inf
    lower = max(corner, math.sqrt(max(found, 0.0)) - 2 * math.sqrt(steps) * error)
    if math.isinf(last):
        return lower, Bound(math.inf, "none")
    table = torch.tensor([[corner, beside], [below, last]], dtype=torch.float64)
    upper = float(torch.linalg.matrix_norm(table, ord=2)) * (1 + 64 * (n + 64) * EPS)
    return lower, Bound(upper, f"Lanczos off the kept triples, failure probability {FAILURE:g}")


def _norm(thin: Tensor, rows: RowSharding) -> float:
    """An upper bound on the norm of a thin matrix."""
    if thin.shape[1] == 0:
        return 0.0
    product = rows.sum(thin.mT @ thin)
    top = float(torch.linalg.eigvalsh(product)[-1])
    return math.sqrt(max(top, 0.0) + 64 * (len(product) + 64) * EPS * float(product.diagonal().sum()))

r"""The prox of the nuclear norm from a randomised SVD that is as wide as it needs to be, and its certificate.

Subspace iteration finds the leading triples of Y; the width doubles until the smallest singular value found lies below
the threshold. What was missed is bounded afterwards, so the result is checked, not trusted: with the orthonormal
:math:`P, Q` of the kept triples, and :math:`R = Y - X`,

.. math::

    \|R\|_2 \le \left\| \begin{pmatrix} \|P^\top R Q\| & \|P^\top R Q_\perp\| \\ \|P_\perp^\top R Q\| &
    \|P_\perp^\top R Q_\perp\| \end{pmatrix} \right\|_2 ,

where all but the last entry are thin matrices, and the last is far below the threshold unless a singular value lies
next to it: a few Lanczos steps bound it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..norms.spectral import EPS, lanczos
from .bounds import FAILURE, Bound, lanczos_slack, spectral_bound
from .certificate import Certificate
from .duals import Dense
from .gap import concluded
from .losses import Squared
from .rows import Rows
from .svd import orthonormal

__all__ = ["Triples", "all_triples", "shrunk", "shrunk_certificate"]

WIDTH = 24
CLOSE = 1e-7
STEPS = (15, 24, 48)


@dataclass(frozen=True)
class Triples:
    """Kept singular triples: orthonormal columns, and singular values minus the threshold."""

    left: Tensor
    kept: Tensor
    right: Tensor

    def factors(self) -> tuple[Tensor, Tensor]:
        """Balanced factors of the shrunk matrix."""
        root = self.kept.sqrt()
        return self.left * root, self.right * root


def shrunk(
    Y: Tensor,
    threshold: float,
    *,
    rows: Rows,
    generator: torch.Generator,
    start: tuple[Tensor, Tensor] | None = None,
    sweeps: int = 100,
) -> Triples:
    """The triples of Y above ``threshold``, shrunk by it.

    >>> found = shrunk(torch.diag(torch.tensor([3.0, 2.0, 0.5])), 1.0, rows=Rows(), generator=torch.Generator())
    >>> found.kept
    tensor([2., 1.])
    """
    n, m = Y.shape
    smaller = min(rows.count(n), m)
    width = min(smaller, max(WIDTH, 0 if start is None else start[1].shape[1] + 8))
    if smaller <= 2 * WIDTH or 3 * width > smaller:
        return all_triples(Y, threshold, rows)
    block = _started(Y, width, start, rows, generator)
    while True:
        left, values, right, block = _iterate(Y, block, threshold, rows, sweeps)
        if float(values[-1]) < threshold:
            keep = values > threshold
            return Triples(left[:, keep], values[keep] - threshold, right[:, keep])
        width = min(smaller, 2 * block.shape[1])
        if 3 * width > smaller:
            return all_triples(Y, threshold, rows)
        extra = torch.randn(m, width - block.shape[1], dtype=Y.dtype, generator=generator).to(Y.device)
        block = torch.cat([block, rows.broadcast(extra)], dim=1)


def _started(
    Y: Tensor, width: int, start: tuple[Tensor, Tensor] | None, rows: Rows, generator: torch.Generator
) -> Tensor:
    noise = torch.randn(Y.shape[1], width, dtype=Y.dtype, generator=generator).to(Y.device)
    if start is not None:
        known = start[1].to(Y)
        noise[:, : known.shape[1]] = known / known.norm(dim=0).clamp_min(torch.finfo(Y.dtype).tiny)
    return rows.broadcast(noise)


def _iterate(
    Y: Tensor, block: Tensor, threshold: float, rows: Rows, sweeps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Subspace iteration until the values above the threshold have settled."""
    before = None
    for _ in range(max(sweeps, 1)):
        left = orthonormal(Y @ block, rows)
        core = rows.sum(Y.mT @ left)  # m × width
        # The singular values of the core come from its small Gram; the factors only at the end.
        right, triangle = torch.linalg.qr(core)
        values = torch.linalg.svdvals(triangle)
        block = right
        above = values[values > threshold]
        small = CLOSE if Y.dtype == torch.float64 else 1e-5
        settled = (
            before is not None
            and len(above) == len(before)
            and bool(((above - before).abs() <= small * values[0]).all())
        )
        if settled or (float(values[-1]) >= threshold and before is not None):
            break
        before = above
    mix, values, other = torch.linalg.svd(triangle.mT, full_matrices=False)
    return left @ mix, values, right @ other.mT, block


def all_triples(Y: Tensor, threshold: float, rows: Rows) -> Triples:
    """All triples: by an SVD on one process, else from the Gram matrix of the columns."""
    if rows.group is None:
        left, values, right = torch.linalg.svd(Y, full_matrices=False)
        keep = values > threshold
        return Triples(left[:, keep], values[keep] - threshold, right.mT[:, keep])
    wide = Y.to(torch.float64)
    squares, vectors = torch.linalg.eigh(rows.sum(wide.mT @ wide))
    order = torch.argsort(squares, descending=True)
    values, right = squares[order].clamp_min(0).sqrt(), vectors[:, order]
    keep = values > threshold
    left = (wide @ right[:, keep]) / values[keep]
    return Triples(left.to(Y.dtype), (values[keep] - threshold).to(Y.dtype), right[:, keep].to(Y.dtype))


def shrunk_certificate(
    loss: Squared, triples: Triples, lam: float, tol: float, generator: torch.Generator
) -> tuple[Certificate, float]:
    """The certificate of a shrunk SVD, by the block bound, and its objective."""
    U, V = (factor.to(torch.float64) for factor in triples.factors())
    Z = loss.dual(U, V)
    charged = float((loss.rows.sum(U.square().sum(0)).sqrt() * V.norm(dim=0)).sum())
    lower, upper = _block_bound(Z, triples, lam, generator)
    if upper.value > lam * (1 + tol / 4):
        bound = spectral_bound(Z, lam, tol / 4, generator)
        upper = bound if bound.value < upper.value else upper
    return concluded(loss, Z, U, V, charged, (lower, upper), lam, tol)


def _block_bound(Z: Dense, triples: Triples, lam: float, generator: torch.Generator) -> tuple[float, Bound]:
    """What is attained, and a bound on the norm."""
    P, Q = orthonormal(triples.left.to(torch.float64), Z.rows), torch.linalg.qr(triples.right.to(torch.float64)).Q
    down, across = Z.times(Q), Z.adjoint(P)  # R Q and Rᵀ P
    core = Z.rows.sum(P.mT @ down)
    corner = _norm(core, Rows())
    below, beside = _norm(down - P @ core, Z.rows), _norm(across - Q @ core.mT, Rows())

    def rest(v: Tensor) -> Tensor:
        v = v - Q @ (Q.mT @ v)
        image = Z.times(v)
        image = image - P @ Z.rows.sum(P.mT @ image)
        back = Z.adjoint(image)
        return back - Q @ (Q.mT @ back)

    n = Z.shape[1]
    found, epsilon = 0.0, 1.0
    vector = Z.noise(1, generator).squeeze(1)
    for steps in STEPS:
        # Any of the tries may fail, so each has its share of the probability.
        epsilon = lanczos_slack(n, steps, FAILURE / len(STEPS))
        found = max(found, float(lanczos(rest, vector, steps)[0]))
        if steps >= n or found <= lam * lam * (1 - min(epsilon, 1.0)):
            break
    last = math.sqrt(found / (1 - epsilon)) if epsilon < 1 else math.inf
    lower = max(corner, math.sqrt(max(found, 0.0)))
    if math.isinf(last):
        return lower, Bound(math.inf, "none")
    table = torch.tensor([[corner, beside], [below, last]], dtype=torch.float64)
    upper = float(torch.linalg.matrix_norm(table, ord=2)) * (1 + 64 * (n + 64) * EPS)
    return lower, Bound(upper, f"Lanczos off the kept triples, failure probability {FAILURE:g}")


def _norm(thin: Tensor, rows: Rows) -> float:
    """The norm of a thin matrix, on the safe side."""
    if thin.shape[1] == 0:
        return 0.0
    product = rows.sum(thin.mT @ thin)
    top = float(torch.linalg.eigvalsh(product)[-1])
    return math.sqrt(max(top, 0.0) + 64 * (len(product) + 64) * EPS * float(product.diagonal().sum()))

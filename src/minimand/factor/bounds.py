r"""Upper bounds on polars: the only thing that certifies.

Each function returns a number that no direction exceeds, with the name of its proof. A bound is either a theorem
about the computed matrix in floating point (Cholesky), or holds with a failure probability that its name states
(Lanczos).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..operators.gram import gram
from ..operators.spectral import EPS, certified_lambda_max, lanczos, start_vector
from .duals import DualMatrix

__all__ = ["Bound", "cholesky_bound", "lanczos_bound", "spectral_bound", "unfolding_bound"]

FAILURE = 1e-9
# Columns beyond which a Gram matrix is neither formed nor factorised.
LARGEST_GRAM = 6000


@dataclass(frozen=True)
class Bound:
    """A number that the polar does not exceed, and why."""

    value: float
    method: str


def spectral_bound(matrix: DualMatrix, level: float, generator: torch.Generator | None = None) -> Bound:
    r"""An upper bound on :math:`\sigma_{\max}(Z)`: Cholesky where the smaller side allows, else Lanczos."""
    small = matrix.shape[1] <= LARGEST_GRAM or (matrix.rows.ranks == 1 and matrix.shape[0] <= LARGEST_GRAM)
    if small and not matrix.compact:
        return cholesky_bound(matrix, level)
    return lanczos_bound(matrix, generator=generator)


def cholesky_bound(matrix: DualMatrix, level: float) -> Bound:
    r"""An upper bound on :math:`\sigma_{\max}(Z)` by a Cholesky factorisation that ends.

    :math:`\lambda^2(1+\varepsilon)I - Z^\top Z` is factorised first at the level that would certify, then at a Lanczos
    estimate of what the norm is; the rounding of the product and of the factorisation are part of the bound.

    >>> from .duals import Dense
    >>> 2.0 <= cholesky_bound(Dense(torch.diag(torch.tensor([1.0, 2.0]))), 2.0).value <= 2.00001
    True
    """
    product = _small_gram(matrix)
    return Bound(math.sqrt(gram_bound(product, level)), "Cholesky")


def _small_gram(matrix: DualMatrix) -> Tensor:
    if matrix.rows.ranks == 1 and matrix.shape[0] < matrix.shape[1]:
        return gram(matrix.dense())
    return matrix.gram()


def gram_bound(product: Tensor, level: float, rtol: float = 5e-5) -> float:
    r"""An upper bound on :math:`\lambda_{\max}` of a product :math:`ZZ^\top` that was computed in float64.

    A computed product differs from the true one by at most :math:`\gamma_n \|Z\|_F^2`, which its trace bounds.
    """
    hidden = 8 * (product.shape[-1] + 4096) * EPS * float(product.diagonal().sum())
    # The level is tried first only where it can be near: a bound that is needlessly high wastes the dual's scale.
    near, floor = level * level * (1 + 1e-9), 0.0
    if near > 0:
        estimate = lanczos(lambda v: product @ v, start_vector((len(product),), product), 12)[0]
        floor = near if float(estimate) > 0.9 * near else 0.0
    return max(0.0, float(certified_lambda_max(product, rtol=rtol, floor=floor))) + hidden


def lanczos_bound(matrix: DualMatrix, *, epsilon: float = 5e-4, generator: torch.Generator | None = None) -> Bound:
    r"""An upper bound on :math:`\sigma_{\max}(Z)` that fails with probability at most ``FAILURE``.

    From a random start, k steps of Lanczos on an n × n matrix lie below :math:`(1-\varepsilon)\lambda_{\max}` with
    probability at most :math:`1.648\sqrt{n}\,e^{-\sqrt\varepsilon(2k-1)}` (Kuczyński & Woźniakowski, *Estimating the
    largest eigenvalue by the power and Lanczos algorithms with a random start*, 1992, Theorem 4.2).

    >>> from .duals import Dense
    >>> 2.0 <= lanczos_bound(Dense(torch.diag(torch.tensor([1.0, 2.0])))).value <= 2.001
    True
    """
    n = matrix.shape[1]
    steps = math.ceil((math.log(1.648 * math.sqrt(n) / FAILURE) / math.sqrt(epsilon) + 1) / 2)
    start = matrix.noise(1, generator).squeeze(1)
    value, _ = lanczos(lambda v: matrix.adjoint(matrix.times(v)), start, steps)
    # A Krylov space that fills the whole space has no probability left to fail, only rounding.
    slack = 64 * (n + 64) * EPS
    norm = math.sqrt(max(float(value), 0.0) * (1 + slack) / (1 - (0 if steps >= n else epsilon)))
    return Bound(norm, f"Lanczos, failure probability {FAILURE:g}")


def unfolding_bound(tensor: Tensor, level: float) -> Bound:
    r"""An upper bound on :math:`\max \langle Z, u \otimes v \otimes w\rangle` over unit vectors.

    Each unfolding of the tensor into a matrix replaces :math:`v \otimes w` by any unit vector, so its norm is a
    bound; the smallest of them is returned. It is tight for orthogonally decomposable tensors and loose in general.

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

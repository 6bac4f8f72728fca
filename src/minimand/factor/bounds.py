r"""Upper bounds on polars: the only thing that certifies.

Each function returns a number that no direction exceeds, with the name of its proof. A bound is either a theorem
about the computed matrix in floating point (Cholesky), or holds with a failure probability that its name states
(Lanczos).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..linalg import gram
from ..norms.spectral import EPS, certified_lambda_max, lanczos, start_vector
from .duals import DualMatrix
from .svd import leading_singular

__all__ = [
    "Bound",
    "cholesky_bound",
    "gram_bound",
    "has_gram",
    "lanczos_bound",
    "lanczos_slack",
    "largest_singular",
    "small_gram",
    "spectral_bound",
    "unfolding_bound",
]

FAILURE = 1e-9
# Columns beyond which a Gram matrix is neither formed nor factorised.
LARGEST_GRAM = 6000
# Entries of a Krylov basis: half a gigabyte of float64.
BASIS = 64_000_000


@dataclass(frozen=True)
class Bound:
    """A number that the polar does not exceed, and why."""

    value: float
    method: str


def has_gram(matrix: DualMatrix) -> bool:
    """Whether the Gram matrix of a side may be formed."""
    return _side(matrix) <= LARGEST_GRAM and not matrix.compact


def _side(matrix: DualMatrix) -> int:
    """The length of the shorter side, or of the one that is all here."""
    return matrix.shape[0] if matrix.flat else matrix.shape[1]


def small_gram(matrix: DualMatrix, part: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """The Gram matrix of the shorter side, of ``part(Z)`` where a function of the entries is given."""
    return matrix.outer(part) if matrix.flat else matrix.gram(part)


def spectral_bound(
    matrix: DualMatrix, level: float, accuracy: float = 1e-4, generator: torch.Generator | None = None
) -> Bound:
    r"""An upper bound on :math:`\sigma_{\max}(Z)`: Cholesky where the shorter side allows, else Lanczos.

    Where Lanczos would need as many vectors as the side is long, their basis is as large as the Gram matrix, and
    Cholesky is the cheaper proof, and one that cannot fail.
    """
    side = _side(matrix)
    if has_gram(matrix) or (_lanczos_steps(side, accuracy) >= side and side * side <= BASIS):
        return cholesky_bound(matrix, level, accuracy)
    return lanczos_bound(matrix, accuracy=accuracy, generator=generator)


def largest_singular(matrix: DualMatrix, generator: torch.Generator | None = None) -> float:
    r""":math:`\sigma_{\max}(Z)`: the spectrum of the Gram matrix, its rounding on the safe side, where that may be
    formed; else block Krylov iteration, from below.

    >>> from .duals import Dense
    >>> round(largest_singular(Dense(torch.diag(torch.tensor([1.0, 2.0])))), 9)
    2.0
    """
    if not has_gram(matrix):
        return float(leading_singular(matrix, 2, generator=generator, sweeps=40)[1][0])
    product = small_gram(matrix)
    return math.sqrt(max(float(torch.linalg.eigvalsh(product)[-1]), 0.0) + _hidden(product))


def cholesky_bound(matrix: DualMatrix, level: float, accuracy: float = 1e-4) -> Bound:
    r"""An upper bound on :math:`\sigma_{\max}(Z)` by a Cholesky factorisation that ends.

    :math:`\lambda^2(1+\varepsilon)I - Z^\top Z` is factorised first at the level that would certify, then at a Lanczos
    estimate of what the norm is; the rounding of the product and of the factorisation are part of the bound.

    >>> from .duals import Dense
    >>> 2.0 <= cholesky_bound(Dense(torch.diag(torch.tensor([1.0, 2.0]))), 2.0).value <= 2.00001
    True
    """
    product = small_gram(matrix)
    return Bound(math.sqrt(gram_bound(product, level, rtol=min(5e-5, accuracy))), "Cholesky")


def _hidden(product: Tensor) -> float:
    """What the rounding of a product of float64 may hide of its largest eigenvalue."""
    return 8 * (product.shape[-1] + 4096) * EPS * float(product.diagonal().sum())


def gram_bound(product: Tensor, level: float, rtol: float = 5e-5) -> float:
    r"""An upper bound on :math:`\lambda_{\max}` of a product :math:`ZZ^\top` that was computed in float64.

    A computed product differs from the true one by at most :math:`\gamma_n \|Z\|_F^2`, which its trace bounds.
    """
    # The level is tried first only where it can be near: a bound that is needlessly high wastes the dual's scale.
    near, floor = level * level * (1 + 1e-9), 0.0
    if near > 0:
        estimate = lanczos(lambda v: product @ v, start_vector((len(product),), product), 12)[0]
        floor = near if float(estimate) > 0.9 * near else 0.0
    return max(0.0, float(certified_lambda_max(product, rtol=rtol, floor=floor))) + _hidden(product)


def lanczos_slack(n: int, steps: int, failure: float) -> float:
    r"""The :math:`\varepsilon` for which ``steps`` of Lanczos on an n × n matrix, from a random start, lie below
    :math:`(1-\varepsilon)\lambda_{\max}` with probability at most ``failure``.

    After k steps that probability is at most :math:`1.648\sqrt{n}\,e^{-\sqrt\varepsilon(2k-1)}` (Kuczyński &
    Woźniakowski, *Estimating the largest eigenvalue by the power and Lanczos algorithms with a random start*, 1992,
    Theorem 4.2). A Krylov space that fills the whole space has no probability left to fail.

    >>> lanczos_slack(10, 10, 1e-9), 0.0 < lanczos_slack(10**6, 1000, 1e-9) < 2e-4
    (0.0, True)
    """
    return 0.0 if steps >= n else (math.log(1.648 * math.sqrt(n) / failure) / (2 * steps - 1)) ** 2


def lanczos_bound(matrix: DualMatrix, *, accuracy: float = 2.5e-4, generator: torch.Generator | None = None) -> Bound:
    r"""An upper bound on :math:`\sigma_{\max}(Z)` that fails with probability at most ``FAILURE``.

    The number of steps is what ``accuracy`` needs by :func:`lanczos_slack`, as far as the basis of the Krylov space, of
    vectors as long as the shorter side, fits into ``BASIS``.

    >>> from .duals import Dense
    >>> 2.0 <= lanczos_bound(Dense(torch.diag(torch.tensor([1.0, 2.0])))).value <= 2.001
    True
    """
    flat, n = matrix.flat, _side(matrix)
    steps = min(_lanczos_steps(n, accuracy), max(BASIS // n, 1))
    epsilon = lanczos_slack(n, steps, FAILURE)
    method = f"Lanczos, failure probability {FAILURE:g}"
    if epsilon >= 1:
        return Bound(math.inf, method)

    def squared(x: Tensor) -> Tensor:
        return matrix.times(matrix.adjoint(x)) if flat else matrix.adjoint(matrix.times(x))

    value, _ = lanczos(squared, matrix.noise(1, generator, left=flat).squeeze(1), steps)
    slack = 64 * (n + 64) * EPS
    return Bound(math.sqrt(max(float(value), 0.0) * (1 + slack) / (1 - epsilon)), method)


def _lanczos_steps(n: int, accuracy: float) -> int:
    """The steps after which :func:`lanczos_slack` allows a norm that is so much larger."""
    return math.ceil((math.log(1.648 * math.sqrt(n) / FAILURE) / math.sqrt(1 - (1 + accuracy) ** -2) + 1) / 2)


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

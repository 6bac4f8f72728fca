r"""The bound on the polar of dictionary learning with sparse codes.

With :math:`\theta(u, v) = \|v\|_2(\|u\|_2 + \gamma\|u\|_1)` and :math:`s = \|u\|_1/\|u\|_2 \in [1, \sqrt n]`,

.. math::

    p = \max_u \frac{\sqrt{u^\top Q u}}{\|u\|_2 + \gamma\|u\|_1}
      \le \max_s \min_\rho \frac{\sqrt{\lambda_{\max}(\operatorname{ST}_\rho(Q)) + \rho s^2}}{1 + \gamma s},
    \qquad Q = ZZ^\top ,

because :math:`u^\top Q u \le u^\top \operatorname{ST}_\rho(Q) u + \rho\|u\|_1^2` (the dual bound of sparse principal
components: d'Aspremont, El Ghaoui, Jordan & Lanckriet, 2007). Between two grid points the numerator is taken at the
right end and the denominator at the left.
"""

import math

import torch

from ..functions import L1
from .bounds import LARGEST_GRAM, Bound, gram_bound, spectral_bound
from .duals import DualMatrix

__all__ = ["sparse_bound"]

THRESHOLDS = 24
POINTS = 2000


def sparse_bound(
    matrix: DualMatrix,
    level: float,
    gamma: float,
    *,
    accuracy: float = 1e-4,
    generator: torch.Generator | None = None,
) -> Bound:
    """An upper bound on the polar for codes (the rows of Z) that are sparse.

    >>> import torch
    >>> from .duals import Dense
    >>> Z = torch.ones(9, 1)                                  # the polar is attained at u = 1: 3/(1 + 3γ)
    >>> 1.2 <= sparse_bound(Dense(Z), 1.2, 0.5).value <= 1.5
    True
    """
    n = matrix.full_rows()
    if gamma == 0 or n > LARGEST_GRAM or n == 0:
        norm = spectral_bound(matrix, level * (1 + gamma), accuracy, generator)
        return Bound(norm.value / (1 + gamma), f"{norm.method}, norm")
    product = matrix.outer()
    largest = float(product.abs().max())
    if largest == 0:
        return Bound(0.0, "zero")
    hidden = 8 * (n + 4096) * torch.finfo(torch.float64).eps * float(product.diagonal().sum())
    # A code of one entry needs a threshold near the largest off-diagonal entry, a dense one none at all.
    ratios = torch.cat([torch.zeros(1), torch.logspace(-3, 0, THRESHOLDS)]).to(torch.float64)
    thresholds = ratios * largest
    tops = torch.tensor(
        [
            gram_bound(product if rho == 0 else L1(1.0).prox(product, float(rho)), 0.0, rtol=1e-4) + hidden
            for rho in thresholds
        ],
        dtype=torch.float64,
    )
    edges = torch.linspace(1.0, math.sqrt(n) * (1 + 1e-12), POINTS + 1, dtype=torch.float64)
    above = (tops.unsqueeze(1) + thresholds.unsqueeze(1) * edges[1:].square()).amin(0)
    bound = float((above.clamp_min(0).sqrt() / (1 + gamma * edges[:-1])).max()) * (1 + 1e-14)
    return Bound(bound, "Cholesky, thresholded Gram")

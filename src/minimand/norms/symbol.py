r"""The symbol of a convolution: its Gram matrix at each frequency, and certified maxima over frequencies.

On each phase of its input a convolution with stride :math:`s` and dilation :math:`d` is a convolution with stride one;
a remaining dilation only permutes frequencies. The Gram matrix of the polyphase kernel :math:`P` ([Bibi2019], Lemma 2
for stride one),

.. math:: G(\omega) = \hat P(\omega) \hat P(\omega)^H = \sum_\delta C_\delta e^{i \omega\cdot\delta},
          \qquad C_\delta = \sum_t P_{t + \delta} P_t^\top,

is a trigonometric polynomial with real matrix coefficients. These are computed once; a frequency then costs one linear
combination of them.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .spectral import EPS, certified_lambda_max, power_of_two, product_of_bounds, to_float64

__all__ = ["Symbol", "grid_factor", "polyphase"]

BUDGET = 1 << 24  # bytes of one chunk of Gram matrices; the factorisation needs about four times that


def polyphase(weight: Tensor, stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    r"""The stride-one kernel ``(n2, n1 · phases, taps…)`` of a strided and dilated ``(n2, n1, k…)``.

    The input of tap :math:`t` at output :math:`p` is :math:`sp + dt`, so with :math:`S = s/\gcd(s,d)` the
    taps :math:`t \equiv r \bmod S` see one phase of the input each, at unit distance in units of
    :math:`\operatorname{lcm}(s, d)`.

    >>> polyphase(torch.ones(1, 1, 3), [2], [1]).shape, polyphase(torch.ones(1, 1, 3), [2], [2]).shape
    (torch.Size([1, 2, 2]), torch.Size([1, 1, 3]))
    """
    for axis, (s, d) in enumerate(zip(stride, dilation, strict=True), start=2):
        k = weight.shape[axis]
        phases = min(s // math.gcd(s, d), k)
        taps = -(-k // phases)
        padding = weight.new_zeros(*weight.shape[:axis], taps * phases - k, *weight.shape[axis + 1 :])
        padded = torch.cat([weight, padding], axis)
        split = padded.reshape(*weight.shape[:axis], taps, phases, *weight.shape[axis + 1 :])
        weight = split.movedim(axis + 1, 2).flatten(1, 2)
    return weight


def grid_factor(degree: int, points: int) -> float:
    r"""The factor from the maximum over an equispaced grid to that over all frequencies, for one dimension.

    Ehlich and Zeller (1964): a trigonometric polynomial of degree :math:`d` that is bounded by :math:`m` on
    :math:`N > 2d` equispaced points is bounded by :math:`m / \cos(\pi d/N)` everywhere. For a non-negative
    polynomial the theorem applied to :math:`T - m/2` gives the smaller
    :math:`\tfrac12 (1 + 1/\cos(\pi d / N))`.

    >>> round(grid_factor(2, 12), 4), grid_factor(0, 1)
    (1.0774, 1.0)
    """
    return (1 + 1 / math.cos(math.pi * degree / points)) / 2


class Symbol:
    r"""The Gram matrices of a batch of stride-one kernels ``(batch, r, c, taps…)`` as functions of frequency.

    ``maxima`` returns one bound per kernel of the batch (for the channels of a convolution), ``maximum`` the
    largest over the batch (for its groups).
    """

    def __init__(self, kernel: Tensor) -> None:
        kernel = to_float64(kernel)
        self.scale = power_of_two(kernel)
        kernel = kernel / self.scale
        if kernel.shape[1] > kernel.shape[2]:
            kernel = kernel.transpose(1, 2)
        self.taps = tuple(kernel.shape[3:])
        self.size = kernel.shape[1]
        self.batch = kernel.shape[0]
        self.kernel = kernel
        self.lags, self.coefficients = _autocorrelation(kernel)
        terms = kernel.shape[2] * math.prod(self.taps)
        # Forming a coefficient, evaluating the series and its phases each lose a few units in the last
        # place of at most (number of taps) · ‖P‖_F².
        energy = kernel.square().flatten(1).sum(1) * math.prod(self.taps)
        self.rounding = 16 * (terms + len(self.lags) + 16) * EPS * energy

    def frequencies(self, points: Sequence[int]) -> Tensor:
        """Half of the grid with ``points`` per dimension, in radians; the other half gives complex conjugates."""
        grid = [a for a in product(*map(range, points)) if a <= _mirrored(a, points)]
        device = self.coefficients.device
        ends = torch.tensor(points, dtype=torch.float64, device=device)
        return 2 * math.pi * (torch.tensor(grid, dtype=torch.float64, device=device) / ends)

    def grams(self, points: Sequence[int]) -> Iterator[Tensor]:
        """The Gram matrices ``(frequencies, batch, size, size)`` over the grid, in chunks."""
        angles = self.frequencies(points) @ self.lags.T
        even = (self.coefficients + self.coefficients.mT).flatten(1)
        odd = (self.coefficients - self.coefficients.mT).flatten(1)
        chunk = max(1, BUDGET // (16 * max(1, even.shape[1])))
        for part in angles.split(chunk):
            gram = torch.complex(part.cos() @ even, part.sin() @ odd)
            yield gram.reshape(-1, self.batch, self.size, self.size)

    def maximum(self, points: Sequence[int], rtol: float = 1e-3) -> Tensor:
        """An upper bound on the largest eigenvalue over the grid and the batch."""
        known = torch.zeros((), dtype=torch.float64, device=self.coefficients.device)
        for gram in self.grams(points):
            known = certified_lambda_max(gram, rtol=rtol, floor=known)
        return product_of_bounds(known + self.rounding.max(), self.scale, self.scale)

    def peak(self, points: Sequence[int]) -> Tensor:
        """As :meth:`maximum`, tight to rounding: singular values where the eigenvalue is near the largest."""
        bound = self.maximum(points)
        near = bound / self.scale / self.scale / 1.002
        shift = near * torch.eye(self.size, dtype=torch.float64, device=near.device)
        low = [torch.linalg.cholesky_ex(shift - gram).info == 0 for gram in self.grams(points)]
        frequency, group = torch.nonzero(~torch.cat(low), as_tuple=True)
        taps = torch.tensor(list(product(*map(range, self.taps))), dtype=torch.float64, device=near.device)
        angles = self.frequencies(points) @ taps.T
        rows, columns = self.kernel.shape[1:3]
        best, chunk = torch.zeros_like(near), max(1, BUDGET // (16 * rows * columns))
        for some in range(0, len(group), chunk):
            there, which = angles[frequency[some : some + chunk]], group[some : some + chunk]
            phases = torch.polar(torch.ones_like(there), there)
            values = torch.einsum("grct,gt->grc", self.kernel.flatten(3)[which].to(phases.dtype), phases)
            best = torch.maximum(best, torch.linalg.svdvals(values).max())
        # The rounding errors of the sums over the taps, in units of the Frobenius norm, and of the decomposition.
        size = self.kernel.square().flatten(1).sum(1).max().sqrt() * math.sqrt(len(taps))
        best = best * (1 + 16 * (rows + columns + 8) * EPS) + 8 * (len(taps) + 8) * EPS * size
        best = best.square() * (1 + 4 * EPS)
        return torch.where(best > near * (1 + 1e-6), torch.minimum(best * self.scale * self.scale, bound), bound)

    def maxima(self, points: Sequence[int]) -> Tensor:
        """Upper bounds ``(batch,)`` on the largest eigenvalues over the grid, one per kernel."""
        known = torch.zeros(self.batch, dtype=torch.float64, device=self.coefficients.device)
        for gram in self.grams(points):
            known = torch.maximum(known, _schatten(gram).amax(0))
        return product_of_bounds(known + self.rounding, self.scale, self.scale)


def _mirrored(a: tuple[int, ...], points: Sequence[int]) -> tuple[int, ...]:
    return tuple((-x) % n for x, n in zip(a, points, strict=True))


def _autocorrelation(kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Half of the lags and their real coefficients. The other half are transposes; lag zero is halved."""
    taps = kernel.shape[3:]
    spans = [range(-k + 1, k) for k in taps]
    lags = [lag for lag in product(*spans) if lag >= (0,) * len(taps)]
    coefficients = []
    for lag in lags:
        ahead: list[Any] = [slice(max(d, 0), k + min(d, 0)) for d, k in zip(lag, taps, strict=True)]
        behind: list[Any] = [slice(max(-d, 0), k + min(-d, 0)) for d, k in zip(lag, taps, strict=True)]
        value = kernel[..., *ahead].flatten(2) @ kernel[..., *behind].flatten(2).mT
        coefficients.append(value / 2 if not any(lag) else value)
    stacked = torch.stack(coefficients)
    return torch.tensor(lags, dtype=torch.float64, device=kernel.device).reshape(len(lags), -1), stacked


def _schatten(gram: Tensor, squarings: int = 4) -> Tensor:
    r"""The Schatten norm of order :math:`2^{q+1}`, at most :math:`n^{2^{-q-1}}\lambda_{\max}`."""
    n = gram.shape[-1]
    if n == 1:
        return gram[..., 0, 0].real.clamp_min(0)
    norm = torch.linalg.matrix_norm(gram)
    matrix = gram / torch.where(norm > 0, norm, torch.ones_like(norm))[..., None, None]
    for _ in range(squarings):
        matrix = matrix @ matrix
    # Each squaring has a relative error of at most n² ε, which the root divides.
    root = torch.linalg.matrix_norm(matrix) ** (0.5**squarings)
    return norm * root * (1 + 16 * n * (n + 8) * EPS)

r"""Certified upper bounds on largest eigenvalues, and the Lanczos estimate that guides them.

A bound on the largest eigenvalue is far cheaper than the eigenvalue: if the Cholesky factorisation of :math:`tI - G`
succeeds, then :math:`\lambda_{\max}(G) \le t` up to a known rounding error. Everything is computed in float64, so that
rounding errors are negligible next to the bound, and half-precision types need no separate code.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from ..arguments import checked
from ..linalg import gram as gram_matrix

__all__ = [
    "Top", "certified_lambda_max", "certified_norm_sq", "certified_top", "lanczos", "quick_norm_sq", "round_up",
    "strips_norm_sq", "top_singular",
]  # fmt: skip

EPS = torch.finfo(torch.float64).eps
STEPS = (1, 2, 4)  # Lanczos steps of the successive estimates, in units of max(16, √n), before a spectrum is computed
WARM_STEPS = 4  # steps of the power method, from the top vector of a nearby matrix
FRESH = 0.03  # share of a new random direction in a start that was used before and may have missed the top
SPECTRUM = 40_000  # real numbers in a batch up to which spectra cost less than an estimate and factorisations
PROBES = 4  # matrices of a batch from which the estimate is made
STRIPS, STRIP = 8, 256  # the most block rows of a quick bound, and the fewest rows of one
COLUMNS = 2048  # terms of a sum in single precision


class Top(NamedTuple):
    """A bound on a largest eigenvalue, and a unit vector that nearly attains it: a start for a nearby matrix."""

    bound: Tensor
    vector: Tensor


def to_float64(tensor: Tensor) -> Tensor:
    """``tensor``, detached, in float64 (complex128), on its own device or on the CPU where that has no float64."""
    tensor = tensor.detach()
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).to(dtype)


def round_up(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest number of type ``dtype`` that is at least ``value`` (float64).

    >>> value = torch.tensor(1 / 3, dtype=torch.float64)
    >>> bool(round_up(value, torch.float32) >= value), bool(round_up(value, torch.bfloat16) >= value)
    (True, True)
    """
    if dtype == torch.float64:
        return value
    low = value.to(dtype)
    # Some devices have no nextafter in float16; half a unit in the last place is added in float64 instead.
    step = torch.finfo(dtype)
    up = (value * (1 + step.eps)).clamp_min(step.tiny).to(dtype)
    return torch.where(low.to(torch.float64) >= value, low, up)


def power_of_two(tensor: Tensor) -> float:
    """A power of two near the largest entry (1 for zero). Division by it is exact and prevents overflow."""
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    largest = max(abs(float(end)) for end in torch.aminmax(parts)) if tensor.numel() else 0.0
    # Not above the largest entry, whose next power may be infinite; normal, because devices multiply by the inverse.
    return math.ldexp(1.0, max(math.frexp(largest)[1] - 1, -1022)) if 0.0 < largest < math.inf else 1.0


def powers_of_two(tensor: Tensor, dim: int) -> Tensor:
    """:func:`power_of_two` along a dimension, which is kept."""
    largest = tensor.abs().amax(dim, keepdim=True)
    power = (largest / (2 * torch.frexp(largest).mantissa)).clamp_min(torch.finfo(largest.dtype).tiny)
    return torch.where((largest > 0) & (largest < math.inf), power, 1.0)


def product_of_bounds(first: Tensor, *others: Tensor | float) -> Tensor:
    """The product of upper bounds, which is one, too: never rounded to zero, infinite beyond the range.

    >>> small = torch.tensor(1e-200, dtype=torch.float64)
    >>> bool(product_of_bounds(small, small) > 0), float(product_of_bounds(small, 0.0))
    (True, 0.0)
    """
    product = first
    for other in others:
        # Below the smallest normal number a product may be rounded down by any factor.
        known = (product * other).clamp_min(torch.finfo(product.dtype).tiny)
        product = torch.where((product == 0) | (other == 0), 0.0, known)
    return product


def in_range(tensor: Tensor, exponent: int) -> tuple[Tensor, float]:
    """``tensor`` divided by a power of two, and the power: 1 unless the largest entry is outside of 2^±exponent."""
    scale = power_of_two(tensor)
    if math.ldexp(1.0, -exponent) <= scale <= math.ldexp(1.0, exponent):
        return tensor, 1.0
    return tensor / scale, scale


def _scaled(bound: Tensor, *scales: float) -> Tensor:
    return bound if scales[0] == 1.0 else product_of_bounds(bound, *scales)


def sum_of_squares(tensor: Tensor, dim: int) -> Tensor:
    """An upper bound on the sum of squares along ``dim``, tight to float64's rounding."""
    exact, slack = to_float64(tensor), 1 + 4 * (tensor.shape[dim] + 4) * EPS
    if tensor.dtype != torch.float64 or tensor.numel() == 0:  # then no square leaves the range
        return exact.square().sum(dim) * slack
    scale = powers_of_two(exact, dim)
    total = (exact / scale).square().sum(dim) * slack
    return product_of_bounds(total, scale.squeeze(dim), scale.squeeze(dim))


def lanczos(matvec: Callable[[Tensor], Tensor], start: Tensor, steps: int = 24) -> tuple[Tensor, Tensor]:
    r"""Lower estimates of :math:`\lambda_{\max}` of Hermitian maps, with the vectors that attain them.

    ``matvec`` maps a batch of vectors ``(..., n)`` to a batch of the same shape, each by its own Hermitian
    map; ``start`` is the first vector of each Krylov space. The returned vector is a good ``start`` for the
    next call when the map has changed little (warm start). Every vector is orthogonalised
    against all before it. In exact arithmetic the value never exceeds :math:`\lambda_{\max}`.

    >>> diagonal = torch.arange(1.0, 6.0, dtype=torch.float64)
    >>> value, _ = lanczos(lambda v: diagonal * v, torch.ones(5, dtype=torch.float64), steps=5)
    >>> round(float(value), 9)
    5.0
    """
    steps = max(1, min(steps, start.shape[-1]))
    basis = start.new_zeros(*start.shape[:-1], steps, start.shape[-1])
    vector = _normalized(start)
    alphas: list[Tensor] = []
    betas: list[Tensor] = []
    largest = vector.new_zeros(()).abs()
    for j in range(steps):
        basis[..., j, :] = vector
        image = matvec(vector).unsqueeze(-1)
        space = basis[..., : j + 1, :]
        along = space.conj() @ image
        alphas.append(along[..., -1, 0].real)
        if j + 1 == steps:
            break
        image = image - space.mT @ along
        image = image - space.mT @ (space.conj() @ image)  # in floating point it takes two of these
        norm = torch.linalg.vector_norm(image, dim=(-2, -1))
        largest = torch.maximum(largest, torch.maximum(alphas[-1].abs(), norm))
        # Once the Krylov space is exhausted only rounding noise is left, which must not become a direction.
        alive = norm > 64 * torch.finfo(norm.dtype).eps * largest
        betas.append(norm * alive)
        vector = image.squeeze(-1) * torch.where(alive, 1 / norm, 0.0).unsqueeze(-1)
    tridiagonal = torch.diag_embed(torch.stack(alphas, -1))
    if betas:
        # Only the lower triangle is read.
        tridiagonal = tridiagonal + torch.diag_embed(torch.stack(betas, -1), -1)
    values, vectors = torch.linalg.eigh(tridiagonal)
    top = vectors[..., -1].to(start.dtype).unsqueeze(-2)
    return values[..., -1], (top @ basis).squeeze(-2)


def _normalized(vector: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
    return vector / torch.where(norm > 0, norm, torch.ones_like(norm))


def start_vector(shape: tuple[int, ...], like: Tensor, seed: int = 0) -> Tensor:
    """A Gaussian start from a fixed seed: reproducible, and in practice not orthogonal to the top eigenvector."""
    generator = torch.Generator(like.device).manual_seed(seed)
    # vmap forbids random numbers, even constant ones.
    with temporarily_clear_interpreter_stack():
        return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


def certified_lambda_max(gram: Tensor, *, rtol: float = 1e-3, floor: Tensor | float = 0.0) -> Tensor:
    r"""An upper bound on the largest eigenvalue of any matrix in a Hermitian batch ``(..., n, n)``.

    With a Lanczos estimate :math:`s` of the maximum, :math:`tI - G` is factorised at
    :math:`t = (1 + \mathrm{rtol})s` for all matrices at once. Matrices whose factorisation fails get a new estimate and
    another attempt; in the end the spectra of the remaining ones are computed. By Demmel's theorem
    (Rump, *Verification of positive definiteness*, BIT 2006) a factorisation that succeeds proves
    :math:`\lambda_{\max}(G) \le t + \gamma_{n+1} \operatorname{tr}(tI - G)`, which is returned. It is within about
    ``rtol`` of the truth, at a fraction of the cost of a spectrum. Only the lower triangles
    are read. ``rtol=0`` computes the spectra. The result is at least ``floor``, a maximum over other matrices.

    >>> G = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
    >>> bool(3 <= certified_lambda_max(G) <= 3.01)
    True
    """
    return certified_top(gram, rtol=rtol, floor=floor).bound


def certified_top(gram: Tensor, *, rtol: float = 1e-3, floor: Tensor | float = 0.0) -> Top:
    """:func:`certified_lambda_max` with a vector that nearly attains it."""
    n = gram.shape[-1]
    batch = to_float64(gram).reshape(-1, n, n)
    known = torch.as_tensor(floor, dtype=torch.float64, device=batch.device)
    vector = start_vector((n,), batch)
    if n == 0 or batch.shape[0] == 0:
        return Top(known, vector)
    batch, scale = in_range(batch, 200)
    known = known / scale
    if n <= 4 or batch.numel() * (2 if batch.is_complex() else 1) <= SPECTRUM:
        return Top(_scaled(torch.maximum(known, _spectrum_bound(batch)), scale), _normalized(vector))
    trace = batch.diagonal(dim1=-2, dim2=-1).abs().sum(-1).max()
    for tries, share in enumerate(STEPS if rtol > 0 else ()):
        if float(known) > 0:
            batch = batch[~_factorizes(batch, known)]
        if batch.shape[0] == 0:
            break
        if tries:  # the missed direction may be orthogonal to the Krylov space so far
            vector = _normalized(vector) + FRESH * _normalized(start_vector((n,), batch, seed=tries))
        # Steps beyond the second term would be more accurate than rtol asks for.
        steps = min(max(16, math.isqrt(n)), math.ceil(2 / rtol**0.5))
        estimate, vector = _estimate(batch, vector, share * steps)
        known = torch.maximum(known, estimate * (1 + rtol))
    if batch.shape[0] and float(known) > 0:
        batch = batch[~_factorizes(batch, known)]
    if batch.shape[0]:
        known = torch.maximum(known, _spectrum_bound(batch))
    return Top(_scaled(known + _factorization_error(n, known, trace), scale), vector)


@checked
def certified_norm_sq(matrix: Tensor, *, rtol: float = 1e-3) -> Tensor:
    r"""An upper bound on :math:`\|M\|_2^2`, the largest over a batch ``(..., m, n)``, in float64.

    It is the bound of :func:`certified_lambda_max` on the Gram matrix of the smaller side, plus the rounding error of
    that matrix, :math:`\gamma_n \|M\|_F^2`.

    >>> bool(4 <= certified_norm_sq(torch.diag(torch.tensor([1.0, 2.0]))) <= 4.01)
    True
    """
    return top_singular(matrix, rtol=rtol).bound


def quick_norm_sq(matrix: Tensor) -> Tensor:
    r"""An upper bound on :math:`\|M\|_2^2`, the largest over a batch, float64, from Gram matrices in single precision.

    The rounding error :math:`\gamma_n\|M\|_F^2` of the sums is added; they are of at most ``COLUMNS`` terms each.

    >>> bool(4 <= quick_norm_sq(torch.diag(torch.tensor([1.0, 2.0]))) <= 4.3)
    True
    """
    matrix, scale = in_range(matrix.detach(), 16)
    matrix = matrix.float()
    single, terms = torch.finfo(torch.float32), min(COLUMNS, matrix.shape[-1])
    parts = (matrix[0] if matrix.dim() > 2 and len(matrix) == 1 else matrix).split(terms, -1)
    product = sum((to_float64(gram_matrix(part)) for part in parts[1:]), to_float64(gram_matrix(parts[0])))
    # The trace is the squared Frobenius norm, up to the same error.
    share = (terms + 8) * single.eps
    size = product.diagonal(dim1=-2, dim2=-1).sum(-1).max() / (1 - share)
    # Squares below the smallest normal number may have been lost.
    error = share * size + math.prod(matrix.shape[-2:]) * single.tiny
    return product_of_bounds((certified_lambda_max(product, rtol=5e-2) + error) * (1 + 1e-9), scale, scale)


def strips_norm_sq(matrix: Tensor, most: int = STRIPS) -> Tensor:
    r"""An upper bound on :math:`\|M\|_2^2` of one large matrix, float64; with eight strips at a tenth of the cost.

    With the smaller side split into at most ``most`` block rows, :math:`\|M\|_2^2 \le \sum_i \|M_i\|_2^2`. The sum is
    at most about ``most`` times the truth; for random matrices and eight strips it is two to five times.

    >>> bool(1 <= strips_norm_sq(torch.eye(300)) <= 2.2)
    True
    """
    rows = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    strips = rows.split(max(STRIP, -(-len(rows) // most)))
    return torch.stack([quick_norm_sq(strip) for strip in strips]).sum() * (1 + 1e-9)


def top_singular(matrix: Tensor, *, rtol: float = 1e-3, start: Tensor | None = None) -> Top:
    """:func:`certified_norm_sq` with a singular vector of the smaller side (the left one of a square) that nearly
    attains it.

    The vector of a nearby matrix as ``start`` saves nearly all of the estimate. The bound holds for every start.
    """
    matrix = to_float64(matrix)
    if matrix.shape[-2] > matrix.shape[-1]:
        matrix = matrix.mH
    if matrix.numel() == 0:
        return Top(matrix.new_zeros((), dtype=torch.float64), matrix.new_zeros(matrix.shape[-2]))
    matrix, scale = in_range(matrix, 40)
    gram = _gram(matrix)
    trace = gram.diagonal(dim1=-2, dim2=-1).real.sum(-1).max()
    found = None if start is None else _warm_top(gram, trace, start, rtol)
    bound, vector = found or certified_top(gram if start is None else _gram(matrix), rtol=rtol)
    return Top(_scaled(bound + 8 * (matrix.shape[-1] + 8) * EPS * trace, scale, scale), vector)


def _gram(matrix: Tensor) -> Tensor:
    return matrix @ matrix.mH if matrix.is_complex() else gram_matrix(matrix)


def _warm_top(gram: Tensor, trace: Tensor, start: Tensor, rtol: float) -> Top | None:
    """One attempt from the top vector of a nearby matrix; ``gram``, a single matrix, is overwritten."""
    vector = start.to(gram)
    for _ in range(WARM_STEPS):
        before, vector = vector, gram @ vector
    sizes = [float(torch.linalg.vector_norm(v)) for v in (before, vector)]
    if not 0 < sizes[0] < math.inf or not 0 < sizes[1] < math.inf:
        return None
    # By the Cauchy–Schwarz inequality the ratio of norms is at most the largest eigenvalue.
    bound = trace.new_full((), sizes[1] / sizes[0] * (1 + rtol))
    if not bool(_factorizes(gram.unsqueeze(0), bound, overwrite=True)):
        return None
    return Top(bound + _factorization_error(gram.shape[-1], bound, trace), vector / sizes[1])


def _estimate(batch: Tensor, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """A lower estimate of the largest eigenvalue, by Lanczos on the few matrices that stretch a vector most."""
    if batch.shape[0] > PROBES:
        stretch = torch.linalg.vector_norm(batch @ start, dim=-1)
        batch = batch[stretch.topk(PROBES).indices]
    starts = start.expand(batch.shape[0], -1)
    values, vectors = lanczos(lambda v: (batch @ v.unsqueeze(-1)).squeeze(-1), starts, steps)
    best = values.argmax()
    return values[best], vectors[best]


def _factorizes(batch: Tensor, shift: Tensor, *, overwrite: bool = False) -> Tensor:
    shifted = batch.neg_() if overwrite else -batch
    shifted.diagonal(dim1=-2, dim2=-1).add_(shift)
    if batch.device.type != "cpu":
        return torch.linalg.cholesky_ex(shifted)[1] == 0
    # In place, because new memory costs more than the factorisation. The transpose has LAPACK's layout, and its upper
    # triangle is the lower one here. The conjugate of a Hermitian matrix has the same eigenvalues.
    factor, info = shifted.mT, batch.new_empty(batch.shape[0], dtype=torch.int32)
    torch.linalg.cholesky_ex(factor, upper=True, out=(factor, info))
    return info == 0


def _factorization_error(n: int, shift: Tensor, trace: Tensor) -> Tensor:
    """The rounding error of a factorisation of ``shift·I − G``."""
    # The constant covers complex arithmetic and the rounding of the shifted diagonal.
    return 16 * (n + 8) * EPS * (n * shift.abs() + trace)


def _spectrum_bound(batch: Tensor) -> Tensor:
    n = batch.shape[-1]
    margin = 16 * (n + 8) * EPS * torch.linalg.matrix_norm(batch).max()
    return torch.linalg.eigvalsh(batch).max() + margin

r"""Certified upper bounds on largest eigenvalues, and the Lanczos estimate that guides them.

A largest eigenvalue is bounded from above far more cheaply than it is computed: if the Cholesky
factorisation of :math:`tI - G` runs to its end, then :math:`\lambda_{\max}(G) \le t` up to its rounding
error, which is known. Everything is computed in float64: rounding is then invisible next to the bound, and
half-precision types, for which no factorisation exists, need no path of their own.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["certified_lambda_max", "certified_norm_sq", "lanczos", "round_up"]

EPS = torch.finfo(torch.float64).eps
STEPS = (1, 2, 4)  # of one Lanczos estimate after another, in units of max(24, √n), before a spectrum is computed
PROBES = 4  # matrices of a batch that an estimate looks at


def to_float64(tensor: Tensor) -> Tensor:
    """``tensor``, detached, in float64, on its own device or on the CPU where that has no float64."""
    tensor = tensor.detach()
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).to(torch.float64)


def round_up(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest number of type ``dtype`` that is not below ``value`` (float64).

    >>> value = torch.tensor(1 / 3, dtype=torch.float64)
    >>> bool(round_up(value, torch.float32) >= value), bool(round_up(value, torch.bfloat16) >= value)
    (True, True)
    """
    if dtype == torch.float64:
        return value
    low = value.to(dtype)
    # float16 has no nextafter on every device; half a unit in the last place is added in float64 instead.
    step = torch.finfo(dtype)
    up = (value * (1 + step.eps)).clamp_min(step.tiny).to(dtype)
    return torch.where(low.to(torch.float64) >= value, low, up)


def power_of_two(tensor: Tensor) -> float:
    """A power of two near the largest entry (1 for zero): dividing by it is exact and prevents overflow."""
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    largest = max(abs(float(end)) for end in torch.aminmax(parts)) if tensor.numel() else 0.0
    return math.ldexp(1.0, math.frexp(largest)[1]) if 0.0 < largest < math.inf else 1.0


def sum_of_squares(tensor: Tensor, dim: int) -> Tensor:
    """An upper bound on the sum of squares along ``dim``, tight to float64's rounding."""
    exact = to_float64(tensor)
    scale = power_of_two(exact)
    total = (exact / scale).square().sum(dim)
    return total * (1 + 4 * (tensor.shape[dim] + 4) * EPS) * scale * scale


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
    basis = start.new_zeros(*start.shape, steps)
    vector = _normalised(start)
    alphas: list[Tensor] = []
    betas: list[Tensor] = []
    for j in range(steps):
        basis[..., j] = vector
        image = matvec(vector)
        alphas.append((vector.conj() * image).sum(-1).real)
        if j + 1 == steps:
            break
        space = basis[..., : j + 1]
        for _ in range(2):  # once is not enough in floating point, twice is
            image = image - (space @ (space.mH @ image.unsqueeze(-1))).squeeze(-1)
        norm = torch.linalg.vector_norm(image, dim=-1)
        # An exhausted Krylov space leaves rounding noise, which must not be normalised into a direction.
        alive = norm > 64 * torch.finfo(norm.dtype).eps * torch.stack([*alphas, *betas]).abs().amax(0)
        betas.append(torch.where(alive, norm, 0.0))
        vector = torch.where(alive.unsqueeze(-1), image / torch.where(alive, norm, 1.0).unsqueeze(-1), 0.0)
    tridiagonal = torch.diag_embed(torch.stack(alphas, -1))
    if betas:
        off = torch.stack(betas, -1)
        tridiagonal = tridiagonal + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    values, vectors = torch.linalg.eigh(tridiagonal)
    top = vectors[..., -1].to(start.dtype).unsqueeze(-1)
    return values[..., -1], (basis @ top).squeeze(-1)


def _normalised(vector: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
    return vector / torch.where(norm > 0, norm, torch.ones_like(norm))


def start_vector(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A fixed pseudo-random start: deterministic, yet orthogonal to no eigenvector that anyone would meet."""
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


def certified_lambda_max(gram: Tensor, *, rtol: float = 1e-3, floor: Tensor | float = 0.0) -> Tensor:
    r"""An upper bound on the largest eigenvalue of any matrix in a Hermitian batch ``(..., n, n)``.

    With a Lanczos estimate :math:`s` of the maximum, :math:`tI - G` is factorised at
    :math:`t = (1 + \mathrm{rtol})s` for every matrix at once. A matrix that passes is settled; the others
    get a new estimate and another try, and what still fails has its spectrum computed. By Demmel's theorem
    (Rump, *Verification of positive definiteness*, BIT 2006) a factorisation that ends proves
    :math:`\lambda_{\max}(G) \le t + \gamma_{n+1} \operatorname{tr}(tI - G)`, which is what is returned:
    within about ``rtol`` of the truth, and a fraction of the cost of a spectrum. Only the lower triangles
    are read. ``rtol=0`` computes the spectra. ``floor`` is a value that the caller's maximum has reached
    already.

    >>> G = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
    >>> bool(3 <= certified_lambda_max(G) <= 3.01)
    True
    """
    n = gram.shape[-1]
    batch = _as_double(gram).reshape(-1, n, n)
    known = torch.as_tensor(floor, dtype=torch.float64, device=batch.device)
    if n == 0 or batch.shape[0] == 0:
        return known
    scale = power_of_two(batch)
    batch, known = batch / scale, known / scale
    if n <= 4 or batch.shape[0] * n**3 <= 32**3:
        return torch.maximum(known, _spectrum_bound(batch)) * scale
    diagonal = batch.diagonal(dim1=-2, dim2=-1).abs().sum(-1).max()
    unit = max(24, math.isqrt(n))
    for steps in STEPS if rtol > 0 else ():
        if float(known) > 0:
            batch = batch[~_factorises(batch, known)]
        if batch.shape[0] == 0:
            break
        known = torch.maximum(known, _estimate(batch, steps * unit) * (1 + rtol))
    if batch.shape[0] and float(known) > 0:
        batch = batch[~_factorises(batch, known)]
    if batch.shape[0]:
        known = torch.maximum(known, _spectrum_bound(batch))
    # The constant covers complex arithmetic and the rounding of the shifted diagonal.
    return (known + 16 * (n + 8) * EPS * (n * known.abs() + diagonal)) * scale


def certified_norm_sq(matrix: Tensor, *, rtol: float = 1e-3) -> Tensor:
    r"""An upper bound on :math:`\|M\|_2^2`, the largest over a batch ``(..., m, n)``, in float64.

    The Gram matrix of the smaller side goes to :func:`certified_lambda_max`, plus what its rounding can hide,
    :math:`\gamma_n \|M\|_F^2`.

    >>> bool(4 <= certified_norm_sq(torch.diag(torch.tensor([1.0, 2.0]))) <= 4.01)
    True
    """
    matrix = _as_double(matrix)
    if matrix.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=matrix.device)
    scale = power_of_two(matrix)
    matrix = matrix / scale
    if matrix.shape[-2] > matrix.shape[-1]:
        matrix = matrix.mH
    frobenius = torch.linalg.matrix_norm(matrix).square().max()
    bound = certified_lambda_max(matrix @ matrix.mH, rtol=rtol)
    return (bound + 8 * (matrix.shape[-1] + 8) * EPS * frobenius) * scale * scale


def _as_double(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = tensor.detach()
        return (tensor.cpu() if tensor.device.type == "mps" else tensor).to(torch.complex128)
    return to_float64(tensor)


def _estimate(batch: Tensor, steps: int) -> Tensor:
    """A lower estimate of the largest eigenvalue: Lanczos on the few matrices that stretch a vector most."""
    start = start_vector((batch.shape[-1],), batch)
    if batch.shape[0] > PROBES:
        stretch = torch.linalg.vector_norm(batch @ start, dim=-1)
        batch = batch[stretch.topk(PROBES).indices]
    starts = start.expand(batch.shape[0], -1)
    return lanczos(lambda v: (batch @ v.unsqueeze(-1)).squeeze(-1), starts, steps)[0].max()


def _factorises(batch: Tensor, shift: Tensor) -> Tensor:
    shifted = -batch
    shifted.diagonal(dim1=-2, dim2=-1).add_(shift)
    return torch.linalg.cholesky_ex(shifted)[1] == 0


def _spectrum_bound(batch: Tensor) -> Tensor:
    n = batch.shape[-1]
    margin = 16 * (n + 8) * EPS * torch.linalg.matrix_norm(batch).max()
    return torch.linalg.eigvalsh(batch).max() + margin

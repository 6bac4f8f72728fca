"""Functions of the singular values and eigenvalues of matrices, with derivatives by divided differences."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..errors import CapabilityError
from .base import Step
from .structured import Isotonic, require_common_step

__all__ = ["ordered", "rectify", "singular", "symmetric"]


def symmetric(x: Tensor) -> Tensor:
    """The symmetric part."""
    return 0.5 * (x + x.mT)


def _full_precision(x: Tensor) -> torch.autocast:
    """Turns autocast off, which would multiply the factors in half precision."""
    return torch.autocast(x.device.type, enabled=False)


def _ratio(numerator: Tensor, denominator: Tensor, limit: float = 0.0) -> Tensor:
    """The quotient of non-negative numbers, ``limit`` where both vanish."""
    positive = denominator > 0
    return torch.where(positive, numerator, limit) / torch.where(positive, denominator, 1.0)


def _decomposable(x: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices with zero in place of those that are not finite, which LAPACK rejects, and NaN for these."""
    lost = (0.0 * x).sum((-2, -1), keepdim=True)
    return torch.where(lost == 0, x, 0.0), lost


def _loewner(signed: Tensor) -> Tensor:
    """The divided differences of ReLU: 1 between positive, 0 between negative, else a ratio."""
    positive, size = torch.relu(signed), signed.abs()
    return _ratio(
        positive.unsqueeze(-1) + positive.unsqueeze(-2),
        size.unsqueeze(-1) + size.unsqueeze(-2),
    )


def _require_first_derivative() -> None:
    # once_differentiable of torch gives zeros where the gradient that it receives is a constant.
    if torch.is_grad_enabled():
        raise CapabilityError(
            "the prox of a function of matrices has no second derivative here; call backward or autograd.grad without "
            "create_graph=True"
        )


def rectify(x: Tensor) -> Tensor:
    """ReLU of the eigenvalues of symmetric matrices."""
    return _Rectify.apply(x)


class _Rectify(torch.autograd.Function):
    """ReLU of the eigenvalues of symmetric matrices."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        with _full_precision(x):
            x, lost = _decomposable(x)
            eigenvalues, q = torch.linalg.eigh(x)
            ctx.save_for_backward(eigenvalues, q)
            return symmetric((q * torch.relu(eigenvalues).unsqueeze(-2)) @ q.mT) + lost

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        _require_first_derivative()
        eigenvalues, q = ctx.saved_tensors  # type: ignore[attr-defined]
        with _full_precision(q):
            core = q.mT @ symmetric(grad) @ q
            return q @ (core * _loewner(eigenvalues)) @ q.mT


def singular(x: Tensor, threshold: Step, *, clip: bool) -> Tensor:
    """U f(Σ) Vᵀ, where f is the soft threshold, or clipping with ``clip``."""
    require_common_step(threshold, 2, "a function of matrices")
    if not isinstance(threshold, Tensor):
        threshold = x.new_full((), threshold)
    # One threshold per matrix, broadcast over the batch by operations that autograd records.
    threshold = threshold.reshape(threshold.shape[:-2]) if threshold.dim() >= 2 else threshold.reshape(())
    return _Singular.apply(x, threshold.expand(x.shape[:-2]), clip)


class _Singular(torch.autograd.Function):
    r"""A thresholding of singular values.

    With :math:`P = U^\top\,dX\,V` the differential is :math:`U(K_1 \circ \operatorname{sym} P + K_2 \circ
    \operatorname{skew} P)V^\top` on the core, :math:`K_1 = [f_i - f_j]/[\sigma_i - \sigma_j]`,
    :math:`K_2 = [f_i + f_j]/[\sigma_i + \sigma_j]`, and :math:`f_i/\sigma_i` on the rest of a rectangle. It
    is self-adjoint, so the gradient takes the same form.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, threshold: Tensor, clip: bool) -> Tensor:
        with _full_precision(x):
            x, lost = _decomposable(x)
            u, sigma, vt = torch.linalg.svd(x, full_matrices=False)
            over = sigma - threshold.unsqueeze(-1)
            kept = torch.minimum(sigma, threshold.unsqueeze(-1)) if clip else torch.relu(over)
            ctx.save_for_backward(u, sigma, vt, over, kept)
            ctx.clip = clip  # type: ignore[attr-defined]
            return (u * kept.unsqueeze(-2)) @ vt + lost

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        _require_first_derivative()
        u, sigma, vt, over, kept = ctx.saved_tensors  # type: ignore[attr-defined]
        sign = -1.0 if ctx.clip else 1.0  # type: ignore[attr-defined]
        with _full_precision(u):
            core = u.mT @ grad @ vt.mT
            fall = -(core.diagonal(dim1=-2, dim2=-1) * (over > 0)).sum(-1)
            # f(σ)/σ tends to one at zero where f clips, and to zero where it shrinks.
            passed = _spectral_gradient(u, sigma, vt, kept, _loewner(sign * over), 0.5 - 0.5 * sign, grad, core)
            return passed, sign * fall, None


def _pooled(over: Tensor) -> tuple[Tensor, Tensor]:
    """The projection of vectors onto decreasing ones, and the matrix that averages its blocks of equal entries."""
    fitted = Isotonic().prox(over.flip(-1)).flip(-1)
    # The residuals add up to zero at the end of a block and nowhere inside it.
    size = over.abs().amax(-1, keepdim=True) if over.shape[-1] else over
    room = 16 * over.shape[-1] * torch.finfo(over.dtype).eps * size
    ends = ((over - fitted).cumsum(-1).abs() <= room)[..., :-1]
    label = torch.nn.functional.pad(ends.to(torch.int64).cumsum(-1), (1, 0))
    same = (label.unsqueeze(-1) == label.unsqueeze(-2)).to(over.dtype)
    average = same / same.sum(-1, keepdim=True)
    return (average @ over.unsqueeze(-1)).squeeze(-1), average


def ordered(x: Tensor, threshold: Tensor) -> Tensor:
    """The singular values less a threshold for each, which do not increase, kept in order and at zero or above."""
    return _Ordered.apply(x, threshold)


class _Ordered(torch.autograd.Function):
    r"""A threshold for each singular value, the largest for the largest, with the form of :class:`_Singular`.

    On the diagonal of the core the derivative averages the blocks of the projection; between two entries of a block
    the divided difference is zero.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, threshold: Tensor) -> Tensor:
        with _full_precision(x):
            x, lost = _decomposable(x)
            u, sigma, vt = torch.linalg.svd(x, full_matrices=False)
            level, average = _pooled(sigma - threshold)
            # A value without a threshold passes unchanged, and its quotients are one, also where it is zero.
            free = (threshold == 0) & (average.diagonal(dim1=-2, dim2=-1) == 1)
            sigma = torch.where(free, sigma.clamp_min(torch.finfo(sigma.dtype).tiny), sigma)
            level = torch.where(free, sigma, level)
            ctx.save_for_backward(u, sigma, vt, threshold, level, average)
            return (u * torch.relu(level).unsqueeze(-2)) @ vt + lost

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        _require_first_derivative()
        u, sigma, vt, threshold, level, average = ctx.saved_tensors  # type: ignore[attr-defined]
        with _full_precision(u):
            core, kept = u.mT @ grad @ vt.mT, torch.relu(level)
            active = core.diagonal(dim1=-2, dim2=-1) * (level > 0)
            along = (average @ active.unsqueeze(-1)).squeeze(-1)
            apart = (sigma.unsqueeze(-1) - sigma.unsqueeze(-2)).abs()
            quotient = _ratio((kept.unsqueeze(-1) - kept.unsqueeze(-2)).abs(), apart).clamp(max=1.0)
            # Two values that are thresholded alike and not averaged have a quotient without cancellation.
            alone = average.diagonal(dim1=-2, dim2=-1) == 1
            alike = (threshold.unsqueeze(-1) == threshold.unsqueeze(-2)) & alone.unsqueeze(-1) & alone.unsqueeze(-2)
            slopes = torch.where(alike, _loewner(level), torch.where(average > 0, 0.0, quotient))
            slopes = slopes - torch.diag_embed(slopes.diagonal(dim1=-2, dim2=-1))
            passed = _spectral_gradient(u, sigma, vt, kept, slopes, 0.0, grad, core)
            return passed + (u * along.unsqueeze(-2)) @ vt, -along


def _spectral_gradient(
    u: Tensor, sigma: Tensor, vt: Tensor, kept: Tensor, slopes: Tensor, limit: float, grad: Tensor, core: Tensor
) -> Tensor:
    """The gradient through f(Σ) = ``kept``, with divided differences ``slopes`` and f(σ)/σ → ``limit`` at zero."""
    sums = _ratio(kept.unsqueeze(-1) + kept.unsqueeze(-2), sigma.unsqueeze(-1) + sigma.unsqueeze(-2), limit)
    inner = u @ (slopes * symmetric(core) + sums * 0.5 * (core - core.mT)) @ vt
    ratios = _ratio(kept, sigma, limit)
    if grad.shape[-2] > grad.shape[-1]:
        rest = (grad - u @ (u.mT @ grad)) @ vt.mT
        return inner + (rest * ratios.unsqueeze(-2)) @ vt
    if grad.shape[-2] < grad.shape[-1]:
        rest = u.mT @ (grad - (grad @ vt.mT) @ vt)
        return inner + u @ (rest * ratios.unsqueeze(-1))
    return inner

r"""Functions of singular values and eigenvalues. They act on the last two dimensions.

Their proxes apply a scalar function to the spectrum. Differentiating the decomposition divides by differences of
singular values and fails where two coincide. The derivative of the prox is computed from the divided differences of
the scalar function (Löwner's form). For thresholding and clipping these have closed forms without cancellation.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..errors import CapabilityError, OptionError, ShapeError, is_traced, require_positive
from .base import Function, Step, check_step, indicator_of_all, require_weight, scaled, widened
from .structured import Isotonic, require_common_step

__all__ = ["NegativeSemidefinite", "NuclearNorm", "PositiveSemidefinite", "SpectralBall"]


@dataclass(frozen=True)
class NuclearNorm(Function):
    r"""The weighted sum of singular values, :math:`g(X) = w\|X\|_*`, or :math:`\sum_i w_i\sigma_i(X)` with
    :math:`w_1 \ge w_2 \ge \dots \ge 0` and the largest singular value first.

    .. math:: \operatorname{prox}_{\eta g}(X) = U \max(P(\Sigma - \eta w), 0) V^\top, \qquad X = U \Sigma V^\top

    with the projection :math:`P` onto decreasing sequences, which changes nothing where all weights are equal. The
    weights 1, …, 1, 0, …, 0 give the Ky Fan norms, 1, 0, …, 0 the spectral norm. With weights that increase somewhere,
    as those of reweighted methods, g is not convex; they are refused.

    The prox gives activations of low rank ([Bibi2019], section 3.2). The gradient is finite and correct
    at repeated and at zero singular values, and reaches the weights.

    Args:
        weight: A number ≥ 0, or a tensor with one for each singular value.

    Example:
        >>> NuclearNorm(1.0).prox(torch.diag(torch.tensor([3.0, 0.5])))
        tensor([[2., 0.],
                [0., 0.]])
        >>> NuclearNorm(torch.tensor([2.0, 0.0])).prox(torch.diag(torch.tensor([3.0, 2.0])))
        tensor([[1.5000, 0.0000],
                [0.0000, 1.5000]])
    """

    coupled: ClassVar[int] = 2

    weight: float | Tensor

    def __post_init__(self) -> None:
        require_weight("weight", self.weight)
        if isinstance(self.weight, Tensor) and not is_traced(self.weight):
            if self.weight.dim() != 1:
                raise OptionError(
                    f"weight must be a number or a tensor with one number for each singular value, got shape "
                    f"{tuple(self.weight.shape)}"
                )
            if bool((self.weight.detach().diff() > 0).any()):
                raise OptionError(
                    "weight must not increase from one singular value to the next, the largest being the first: the "
                    "sum would not be convex; sort the weights in descending order"
                )

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise unless points are matrices, with a weight for each singular value."""
        _require_matrix(shape)
        if isinstance(self.weight, Tensor) and len(self.weight) != min(shape[-2:]):
            raise ShapeError(
                f"weight has {len(self.weight)} numbers, but matrices of shape {tuple(shape[-2:])} have "
                f"{min(shape[-2:])} singular values"
            )

    def value(self, x: Tensor) -> Tensor:
        """The weighted nuclear norms, summed over the batch."""
        wide = _matrix(x)
        self.check_shape(x.shape)
        weight = self.weight.to(wide.dtype) if isinstance(self.weight, Tensor) else self.weight
        return (weight * torch.linalg.svdvals(wide)).sum()

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The singular values soft-thresholded."""
        wide = _matrix(x)
        self.check_shape(x.shape)
        if isinstance(self.weight, Tensor):
            require_common_step(step, 2, "NuclearNorm")
            eta = scaled(step, 1.0, wide)
            each = eta.squeeze(-1) if isinstance(eta, Tensor) and eta.dim() > 1 else eta
            threshold = (each * self.weight.to(wide.dtype)).expand(*x.shape[:-2], len(self.weight))
            return _Ordered.apply(wide, threshold).to(x.dtype)
        limit = scaled(step, self.weight, wide)
        return x if self.weight == 0 else _singular(wide, limit, clip=False).to(x.dtype)

    def conjugate(self) -> "SpectralBall":
        """The indicator of the dual ball, for one weight."""
        if isinstance(self.weight, Tensor):
            raise CapabilityError(f"{self!r} has no conjugate in closed form; with one number for all it has")
        return SpectralBall(self.weight)


@dataclass(frozen=True)
class SpectralBall(Function):
    r"""The indicator of :math:`\|X\|_2 \le r`, conjugate of :class:`NuclearNorm`.

    .. math:: \operatorname{prox}(X) = U \min(\Sigma, r) V^\top

    Example:
        >>> SpectralBall(1.0).prox(torch.diag(torch.tensor([3.0, 0.5])))
        tensor([[1.0000, 0.0000],
                [0.0000, 0.5000]])
    """

    coupled: ClassVar[int] = 2

    radius: float

    def __post_init__(self) -> None:
        require_positive("radius", self.radius, zero=True)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise unless points are matrices."""
        _require_matrix(shape)

    def value(self, x: Tensor) -> Tensor:
        """Zero where every matrix lies in the ball, +inf otherwise."""
        room = self.radius * (1 + 8 * max(x.shape[-2:]) * torch.finfo(x.dtype).eps)
        norms = torch.linalg.matrix_norm(_matrix(x), ord=2)
        return indicator_of_all(norms <= room, norms)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The singular values clipped."""
        check_step(step, x)
        wide = _matrix(x)
        return x * 0.0 if self.radius == 0 else _singular(wide, self.radius, clip=True).to(x.dtype)

    def conjugate(self) -> NuclearNorm:
        """The weighted nuclear norm."""
        return NuclearNorm(self.radius)


@dataclass(frozen=True)
class PositiveSemidefinite(Function):
    r"""The indicator of symmetric positive semidefinite matrices.

    .. math::

        \operatorname{prox}(X) = Q \max(\Lambda, 0) Q^\top, \qquad \tfrac12(X + X^\top) = Q \Lambda Q^\top

    for any square ``X``: the projection depends only on the symmetric part ([Bibi2019], section 3.2; ReEig). The
    gradient is finite and correct at repeated eigenvalues. At a zero eigenvalue the projection has a kink, and the
    gradient is the one of ReLU at zero.

    Example:
        >>> PositiveSemidefinite().prox(torch.tensor([[2.0, 1.0], [-1.0, -3.0]]))
        tensor([[2., 0.],
                [0., 0.]])
    """

    coupled: ClassVar[int] = 2

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise unless points are square matrices."""
        _require_square(shape)

    def value(self, x: Tensor) -> Tensor:
        """Zero where every matrix is symmetric and has no negative eigenvalue, +inf otherwise."""
        return _semidefinite(x, _square(x), symmetric=True)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The negative eigenvalues of the symmetric part removed."""
        check_step(step, x)
        return _Rectify.apply(_symmetric(_square(x))).to(x.dtype)

    def conjugate(self) -> "NegativeSemidefinite":
        """The indicator of the polar cone."""
        return NegativeSemidefinite()


@dataclass(frozen=True)
class NegativeSemidefinite(Function):
    r"""The indicator of matrices whose symmetric part has no positive eigenvalue, polar of
    :class:`PositiveSemidefinite`.

    .. math:: \operatorname{prox}(X) = \tfrac12(X - X^\top) + Q \min(\Lambda, 0) Q^\top

    The skew-symmetric part is unconstrained, because it is orthogonal to every symmetric matrix.

    Example:
        >>> NegativeSemidefinite().prox(torch.tensor([[2.0, 1.0], [-1.0, -3.0]]))
        tensor([[ 0.,  1.],
                [-1., -3.]])
    """

    coupled: ClassVar[int] = 2

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise unless points are square matrices."""
        _require_square(shape)

    def value(self, x: Tensor) -> Tensor:
        """Zero where every symmetric part is negative semidefinite, +inf otherwise."""
        return _semidefinite(x, -_square(x), symmetric=False)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The positive eigenvalues of the symmetric part removed."""
        check_step(step, x)
        wide = _square(x)
        return (0.5 * (wide - wide.mT) - _Rectify.apply(-_symmetric(wide))).to(x.dtype)

    def conjugate(self) -> PositiveSemidefinite:
        """The indicator of the polar cone."""
        return PositiveSemidefinite()


def _require_matrix(shape: tuple[int, ...]) -> None:
    if len(shape) < 2:
        raise ShapeError(f"a function of matrices needs two dimensions or more, got shape {tuple(shape)}")


def _require_square(shape: tuple[int, ...]) -> None:
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise ShapeError(f"a semidefinite cone needs square matrices, got shape {tuple(shape)}")


def _matrix(x: Tensor) -> Tensor:
    wide = widened(x)
    _require_matrix(x.shape)
    return wide


def _square(x: Tensor) -> Tensor:
    wide = widened(x)
    _require_square(x.shape)
    return wide


def _symmetric(x: Tensor) -> Tensor:
    return 0.5 * (x + x.mT)


def _semidefinite(x: Tensor, wide: Tensor, *, symmetric: bool) -> Tensor:
    """The indicator, with a tolerance for rounding in ``x``'s precision."""
    size = wide.abs().amax((-2, -1)).clamp_min(1.0)
    room = 8 * x.shape[-1] * torch.finfo(x.dtype).eps * size
    inside = torch.linalg.eigvalsh(_symmetric(wide))[..., 0] >= -room
    if symmetric:
        inside = inside & ((wide - wide.mT).abs().amax((-2, -1)) <= room)
    return indicator_of_all(inside, wide)


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


class _Rectify(torch.autograd.Function):
    """ReLU of the eigenvalues of symmetric matrices."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        with _full_precision(x):
            x, lost = _decomposable(x)
            eigenvalues, q = torch.linalg.eigh(x)
            ctx.save_for_backward(eigenvalues, q)
            return _symmetric((q * torch.relu(eigenvalues).unsqueeze(-2)) @ q.mT) + lost

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        _require_first_derivative()
        eigenvalues, q = ctx.saved_tensors  # type: ignore[attr-defined]
        with _full_precision(q):
            core = q.mT @ _symmetric(grad) @ q
            return q @ (core * _loewner(eigenvalues)) @ q.mT


def _singular(x: Tensor, threshold: Step, *, clip: bool) -> Tensor:
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
    inner = u @ (slopes * _symmetric(core) + sums * 0.5 * (core - core.mT)) @ vt
    ratios = _ratio(kept, sigma, limit)
    if grad.shape[-2] > grad.shape[-1]:
        rest = (grad - u @ (u.mT @ grad)) @ vt.mT
        return inner + (rest * ratios.unsqueeze(-2)) @ vt
    if grad.shape[-2] < grad.shape[-1]:
        rest = u.mT @ (grad - (grad @ vt.mT) @ vt)
        return inner + u @ (rest * ratios.unsqueeze(-1))
    return inner

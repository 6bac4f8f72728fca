r"""Functions of singular values and eigenvalues. They act on the last two dimensions.

Their proxes apply a scalar function to the spectrum. Differentiating the decomposition divides by differences of
singular values and fails where two coincide. The derivative of the prox is computed from the divided differences of
the scalar function (Löwner's form). For thresholding and clipping these have closed forms without cancellation.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import CapabilityError, OptionError, ShapeError, require_positive
from ..tracing import is_traced
from .base import Function, Step, check_step, indicator_of_all, require_weight, scaled, widened
from .decompositions import ordered, rectify, singular, symmetric
from .structured import require_common_step

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
        """Raise unless points are matrices, and there is a weight for each singular value."""
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
            return ordered(wide, threshold).to(x.dtype)
        limit = scaled(step, self.weight, wide)
        return x if self.weight == 0 else singular(wide, limit, clip=False).to(x.dtype)

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
        return x * 0.0 if self.radius == 0 else singular(wide, self.radius, clip=True).to(x.dtype)

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
        return _semidefinite(x, _square(x), both=True)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The negative eigenvalues of the symmetric part removed."""
        check_step(step, x)
        return rectify(symmetric(_square(x))).to(x.dtype)

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
        return _semidefinite(x, -_square(x), both=False)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The positive eigenvalues of the symmetric part removed."""
        check_step(step, x)
        wide = _square(x)
        return (0.5 * (wide - wide.mT) - rectify(-symmetric(wide))).to(x.dtype)

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


def _semidefinite(x: Tensor, wide: Tensor, *, both: bool) -> Tensor:
    """The indicator, with a tolerance for rounding in ``x``'s precision."""
    size = wide.abs().amax((-2, -1)).clamp_min(1.0)
    room = 8 * x.shape[-1] * torch.finfo(x.dtype).eps * size
    inside = torch.linalg.eigvalsh(symmetric(wide))[..., 0] >= -room
    if both:
        inside = inside & ((wide - wide.mT).abs().amax((-2, -1)) <= room)
    return indicator_of_all(inside, wide)

r"""The learned regulariser :math:`R(x) = \sum_c \sum_i \psi_c((Wx)_{c,i})`, its value and its gradient."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...functions import Charbonnier
from ...operators import Conv2d
from ...tracing import is_traced
from .filterbank import analysis, patches, strips, synthesis, weight_gradient

__all__ = ["RidgeRegularizer", "bank_norm_sq"]

# Exponents this near to 1 are moved, so that 1/(1 − p) is finite in single precision.
_APART = 1e-6


class RidgeRegularizer(NamedTuple):
    r"""A sum of potentials after a bank of convolutions, :math:`R(x) = \sum_c\sum_i\psi_c((Wx)_{c,i})`.

    In the grammar it is the function :class:`~minimand.functions.Charbonnier` after the operator
    :class:`~minimand.operators.Conv2d`. Its gradient :math:`W^\top\psi'(Wx)` is Lipschitz with constant
    :math:`\|W\|^2`. Images with more channels than the filters are treated channel by channel.

    >>> R = RidgeRegularizer(torch.ones(1, 1, 1, 1), torch.ones(1), torch.zeros(1))  # half a square
    >>> x = torch.tensor([[[[3.0, 4.0]]]])
    >>> R.value(x), R.gradient(x)
    (tensor([12.5000], dtype=torch.float64), tensor([[[[3., 4.]]]]))
    """

    #: The filters (F, C, k, k).
    weight: Tensor
    #: One scale and one exponent per filter.
    scale: Tensor
    exponent: Tensor

    def operator(self, size: tuple[int, int]) -> Conv2d:
        """W on images of this size."""
        return Conv2d(self.weight, size, padding=self.weight.shape[-1] // 2)

    @property
    def potential(self) -> Charbonnier:
        """ψ, one per feature map."""
        return Charbonnier(self.scale[:, None, None], self.exponent[:, None, None])

    def smoothness(self, size: tuple[int, int]) -> float:
        r"""A certified bound on :math:`\|W\|^2` on images of this size."""
        return float(self.operator(size).norm_sq())

    def scaled(self, factor: Tensor) -> "RidgeRegularizer":
        """The same with all scales multiplied."""
        return self._replace(scale=self.scale * factor)

    def value(self, x: Tensor) -> Tensor:
        """R of each sample, summed in float64."""
        folded = self._folded(x)
        return self.measured(folded)[1].reshape(len(x), x.shape[1] // self.weight.shape[1]).sum(1)

    def gradient(self, x: Tensor) -> Tensor:
        """The gradient; differentiable once in the image, the filters, scales and exponents."""
        folded = self._folded(x)
        arguments = (folded, self.weight, 1 / self.scale, _apart(self.exponent))
        if is_traced(x):
            inner = Charbonnier(self.scale[:, None, None], self.exponent[:, None, None])
            features = inner.gradient(F.conv2d(folded, self.weight, padding=self.weight.shape[-1] // 2))
            return F.conv_transpose2d(features, self.weight, padding=self.weight.shape[-1] // 2).reshape(x.shape)
        if torch.is_grad_enabled() and any(each.requires_grad for each in arguments):
            found: Tensor = _Gradient.apply(*arguments)
        else:
            found = synthesis(self._slopes_at(folded), self.weight)
        return found.reshape(x.shape)

    def _folded(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.weight.shape[1], *x.shape[-2:])

    @torch.no_grad()
    def _slopes_at(self, x: Tensor) -> Tensor:
        """ψ′ of the features of folded images, whose features are not stored."""
        size, features, (batch, _, height, width) = self.weight.shape[-1], len(self.weight), x.shape
        matrix, padded = self.weight.reshape(features, -1), F.pad(x, (size // 2,) * 4)
        inverse, exponent = (1 / self.scale)[:, None], -_apart(self.exponent)[:, None]
        out = x.new_empty(batch, features, height, width)
        for image, into in zip(padded, out, strict=True):
            for rows in strips(height, width, features):
                u = matrix @ patches(image, rows, size)
                v = (u * inverse).square_().log1p_().mul_(exponent).exp_().mul_(u)
                into[:, rows] = v.reshape(features, -1, width)
        return out

    # Without derivatives, for a solver that keeps the features of its points

    @torch.no_grad()
    def measured(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The features of folded images and R of each, computed together while the features are in the cache."""
        size, features = self.weight.shape[-1], len(self.weight)
        batch, _, height, width = x.shape
        matrix, padded = self.weight.reshape(features, -1), F.pad(x, (size // 2,) * 4)
        inverse, exponent = (1 / self.scale)[:, None], _apart(self.exponent)[:, None]
        out, sums = x.new_empty(batch, features, height, width), torch.zeros(batch, features, dtype=torch.float64)
        sums = sums.to(x.device)
        for image, into, total in zip(padded, out, sums, strict=True):
            for rows in strips(height, width, features):
                u = matrix @ patches(image, rows, size)
                into[:, rows] = u.reshape(features, -1, width)
                logarithm = u.mul_(inverse).square_().log1p_()
                total += logarithm.mul_(1 - exponent).expm1_().sum(1, dtype=torch.float64)
        factor = self.scale.double().square() / (2 * (1 - exponent[:, 0].double()))
        return out, (sums * factor).sum(1)

    @torch.no_grad()
    def slopes(self, features: Tensor, before: Tensor | None = None, momenta: Sequence[float] = ()) -> Tensor:
        """ψ′ of features, or of the points beyond them, ``features + β (features − before)`` with one β per image."""
        inverse, exponent = (1 / self.scale)[:, None, None], -_apart(self.exponent)[:, None, None]
        out = torch.empty_like(features)
        for index, (given, into) in enumerate(zip(features, out, strict=True)):
            beyond = before is not None and momenta[index] != 0
            for rows in strips(given.shape[1], given.shape[2], len(given)):
                u = given[:, rows]
                if before is not None and beyond:
                    u = torch.lerp(before[index][:, rows], u, 1 + momenta[index])
                into[:, rows] = (u * inverse).square_().log1p_().mul_(exponent).exp_().mul_(u)
        return out


class _Gradient(torch.autograd.Function):
    """Wᵀψ′(Wx) with one forward and one backward pass of each convolution."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, inverse: Tensor, exponent: Tensor) -> Tensor:
        u = analysis(x, weight)
        logarithm, slope = torch.empty_like(u), torch.empty_like(u)
        for given, log, into in zip(u, logarithm, slope, strict=True):
            torch.mul(given, inverse[:, None, None], out=log)
            log.square_().log1p_()
            torch.mul(log, -exponent[:, None, None], out=into)
            into.exp_()
        ctx.save_for_backward(x, weight, inverse, exponent, u, logarithm, slope)
        return synthesis(u * slope, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, inverse, exponent, u, logarithm, slope = ctx.saved_tensors
        grad = grad.contiguous()
        back = analysis(grad, weight)
        change, value = torch.empty_like(u), torch.empty_like(u)
        to_exponent, to_inverse = torch.zeros_like(exponent), torch.zeros_like(inverse)
        for a, feature, log, w, d, v in zip(back, u, logarithm, slope, change, value, strict=True):
            torch.mul(feature, w, out=v)
            av = a * v
            to_exponent -= (av * log).sum((1, 2))
            share = torch.expm1(-log)  # −t²/(s² + t²)
            to_inverse += (av * share).sum((1, 2))
            share.mul_(2 * exponent[:, None, None]).add_(1).mul_(w)
            torch.mul(a, share, out=d)
        to_weight = weight_gradient(x, change, weight) + weight_gradient(grad, value, weight)
        to_x = synthesis(change, weight) if ctx.needs_input_grad[0] else None
        return to_x, to_weight, to_inverse * (2 * exponent / inverse), to_exponent


def _apart(exponent: Tensor) -> Tensor:
    return torch.where((exponent - 1).abs() < _APART, torch.full_like(exponent, 1 - _APART), exponent)


def bank_norm_sq(weight: Tensor, grid: int = 64) -> Tensor:
    r"""The largest :math:`\lambda_{\max}(\hat W^H\hat W)` over a grid of frequencies, differentiable in the weight.

    It lies slightly below :math:`\|W\|^2`, which the certified bound is for. It scales filters while they are trained.
    """
    grid = max(grid, 1 << math.ceil(math.log2(2 * weight.shape[-1])))
    symbols = torch.fft.rfft2(weight, s=(grid, grid)).flatten(2)
    if weight.shape[1] == 1:
        return symbols.abs().square().sum((0, 1)).max()
    grams = torch.einsum("fcn,fdn->ncd", symbols.conj(), symbols)
    return torch.linalg.eigvalsh(grams)[:, -1].max()

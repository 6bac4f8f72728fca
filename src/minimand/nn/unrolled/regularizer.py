r"""The learned regulariser :math:`R(x) = \sum_c \sum_i \psi_c((Wx)_{c,i})`, its value and its gradient."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...functions import Charbonnier
from ...norms.spectral import powers_of_two
from ...operators import Conv2d
from ...tracing import in_transform, is_traced, pullback, tangent_of
from .filterbank import inner, patches, scatter, strips

__all__ = ["RidgeRegularizer", "bank_norm_sq", "normalized_bank"]

# Exponents this near to 1 are moved, so that 1/(1 − p) is finite in single precision.
_APART = 1e-6
# Squares t² above this are rounded down, so that powers stay finite in single precision.
_LARGEST = 1e37


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
        return self.evaluated(x)[0]

    def gradient(self, x: Tensor) -> Tensor:
        """The gradient; differentiable in the image, the filters, scales and exponents."""
        arguments = (self._folded(x), self.weight, 1 / self.scale, _apart(self.exponent))
        if _is_plain(*arguments):
            return _plain_gradient(*arguments).reshape(x.shape)
        if torch.is_grad_enabled() and any(each.requires_grad for each in arguments):
            found: Tensor = _Gradient.apply(*arguments)
            return found.reshape(x.shape)
        return self.evaluated(x)[1]

    @torch.no_grad()
    def evaluated(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """R of each sample in float64, and the gradient: one pass over the image that stores no features."""
        folded = self._folded(x)
        if _is_plain(x, *self):
            features = self.operator((x.shape[-2], x.shape[-1])).apply(folded)
            values, slopes = self.potential.values(features.double()).flatten(1).sum(1), self.gradient(x)
        else:
            values, slopes = self._in_strips(folded)
        return values.reshape(len(x), x.shape[1] // self.weight.shape[1]).sum(1), slopes.reshape(x.shape)

    def _folded(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.weight.shape[1], *x.shape[-2:])

    def _in_strips(self, x: Tensor) -> tuple[Tensor, Tensor]:
        size, count, (batch, _, height, width) = self.weight.shape[-1], len(self.weight), x.shape
        matrix, padded = self.weight.reshape(count, -1), F.pad(x, (size // 2,) * 4)
        back, inverse, exponent = matrix.mT.contiguous(), (1 / self.scale)[:, None], _apart(self.exponent)[:, None]
        out, sums = torch.zeros_like(padded), torch.zeros(batch, count, dtype=torch.float64)
        for image, into, total in zip(padded, out, sums, strict=True):
            for rows in strips(height, width, count):
                u = matrix @ patches(image, rows, size)
                square = (u * inverse).square_().clamp_(max=_LARGEST)
                power = torch.log1p(square).mul_(1 - exponent).expm1_()  # (1 + t²)^(1 − p) − 1
                total += power.sum(1, dtype=torch.float64)
                u.mul_(power.add_(1).div_(square.add_(1)))
                scatter(back @ u, into, rows, size)
        factor = self.scale.double().square() / (2 * (1 - exponent[:, 0].double()))
        return (sums * factor).sum(1), inner(out, size)


class _Gradient(torch.autograd.Function):
    """Wᵀψ′(Wx) with one forward and one backward pass of each convolution."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, inverse: Tensor, exponent: Tensor) -> Tensor:
        (batch, _, height, width), (count, _, size, _) = x.shape, weight.shape
        features = x.new_empty(3, batch, count, height, width)
        matrix, padded = weight.reshape(count, -1), F.pad(x, (size // 2,) * 4)
        out = torch.zeros_like(padded)
        for image, into, (u, log, share) in zip(padded, out, features.unbind(1), strict=True):
            for rows in strips(height, width, count):
                given = matrix @ patches(image, rows, size)
                logarithm = (given * inverse[:, None]).square_().clamp_(max=_LARGEST).log1p_()
                slope = (logarithm * -exponent[:, None]).exp_()
                for part, stored in zip((given, logarithm, slope), (u, log, share), strict=True):
                    stored[:, rows] = part.reshape(count, -1, width)
                scatter(matrix.mT @ slope.mul_(given), into, rows, size)
        ctx.save_for_backward(x, weight, inverse, exponent, features)
        return inner(out, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, inverse, exponent, features = ctx.saved_tensors
        if torch.is_grad_enabled() or _is_plain(grad):  # of further derivatives, or of a batch of gradients
            return pullback(_plain_gradient, x, weight, inverse, exponent)(grad)
        (_, _, height, width), (count, _, size, _) = x.shape, weight.shape
        matrix, images, grads = weight.reshape(count, -1), *(F.pad(each, (size // 2,) * 4) for each in (x, grad))
        out, to_weight = torch.zeros_like(images), torch.zeros_like(matrix)
        to_exponent, to_inverse = torch.zeros_like(exponent), torch.zeros_like(inverse)
        for image, back, into, given in zip(images, grads, out, features.unbind(1), strict=True):
            for rows in strips(height, width, count):
                u, log, slope = (part[:, rows].reshape(count, -1) for part in given)
                copies = patches(back, rows, size)
                a = (matrix @ copies).mul_(slope)
                au, value = a * u, u * slope
                to_exponent.sub_((au * log).sum(1))
                square = (u * inverse[:, None]).square_().clamp_(max=_LARGEST)
                share = square.div_(square + 1).neg_()  # −t²/(1 + t²)
                to_inverse.add_(au.mul_(share).sum(1))
                change = share.mul_(2 * exponent[:, None]).add_(1).mul_(a)
                to_weight.addmm_(change, patches(image, rows, size).mT).addmm_(value, copies.mT)
                if ctx.needs_input_grad[0]:
                    scatter(matrix.mT @ change, into, rows, size)
        to_x = inner(out, size) if ctx.needs_input_grad[0] else None
        return to_x, to_weight.reshape(weight.shape), to_inverse * (2 * exponent / inverse), to_exponent


def _plain_gradient(x: Tensor, weight: Tensor, inverse: Tensor, exponent: Tensor) -> Tensor:
    """Wᵀψ′(Wx) by torch's own convolutions."""
    edge, shape = weight.shape[-1] // 2, (-1, 1, 1)
    potential = Charbonnier(1 / inverse.reshape(shape), exponent.reshape(shape))
    return F.conv_transpose2d(potential.gradient(F.conv2d(x, weight, padding=edge)), weight, padding=edge)


def _is_plain(*tensors: Tensor) -> bool:
    """Whether torch's own convolutions are used: in graphs, under function transforms, in forward mode, and on other
    devices."""
    traced = any(is_traced(each) or each.device.type != "cpu" for each in tensors)
    return traced or in_transform() or any(tangent_of(each) is not None for each in tensors)


def _apart(exponent: Tensor) -> Tensor:
    return torch.where((exponent - 1).abs() < _APART, torch.full_like(exponent, 1 - _APART), exponent)


def normalized_bank(filters: Tensor) -> Tensor:
    """Filters of zero mean, scaled so that the norm of the bank is about one."""
    centred = filters - filters.mean((-2, -1), keepdim=True)
    # Squares of entries near one exist.
    centred = centred / powers_of_two(centred.detach().flatten(), 0)
    return centred / bank_norm_sq(centred).sqrt()


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

r"""Derivatives, integrals, and integrals of the inverse of the smooth activations.

For an activation :math:`\varphi`, ``<name>_slope`` is :math:`\varphi'`, ``<name>_integral`` is
:math:`\tilde g(z) = \int_0^z \varphi`, and ``<name>_inverse_integral`` is
:math:`\tilde f(x) = \int_{\varphi(0)}^x \varphi^{-1}`, which is +inf outside the closed range of :math:`\varphi`.
[Lin2019], Table 1, lists :math:`f = \tilde f - \tfrac12 x^2` and :math:`g = \tilde g - \tfrac12 x^2`. For some
activations it omits the constants with which :math:`\tilde f(\varphi(z)) + \tilde g(z) = z\varphi(z)` holds.

The functions are defined at module level, so that networks that hold them can be pickled.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_exporting

from .base import slack, widened

_LOG2 = math.log(2.0)
_ZETA = math.pi**2 / 12  # −Li₂(−1)


def _within(low: float, high: float, x: Tensor, value: Tensor) -> Tensor:
    inside = (x >= low - slack(x)) & (x <= high + slack(x))
    return torch.where(inside, value, math.inf)


def xlogx(x: Tensor) -> Tensor:
    """x log x, zero at zero, with a finite derivative there."""
    x = x.clamp_min(torch.finfo(x.dtype).tiny)
    return x * torch.log(x)


# ONNX Runtime has the next three in single precision only, so that an exported graph, of which an ONNX file may be made
# later, has their definitions.


def elu(z: Tensor, alpha: float) -> Tensor:
    """torch's ELU."""
    return torch.where(z > 0, z, alpha * torch.expm1(z.clamp_max(0))) if is_exporting() else F.elu(z, alpha)


def softplus(z: Tensor, beta: float, threshold: float) -> Tensor:
    """torch's softplus."""
    if is_exporting():
        # Its derivative at zero is 1/2, as that of torch is; that of a clamp is 1.
        return torch.maximum(z, torch.zeros_like(z)) + torch.log1p(torch.exp(-beta * z.abs())) / beta
    return F.softplus(z, beta, threshold)


def tanh_slope(z: Tensor) -> Tensor:
    """The derivative of tanh."""
    return 1.0 - torch.tanh(z).square()


def tanh_integral(z: Tensor) -> Tensor:
    """The integral of tanh from 0."""
    return z.abs() + F.softplus(-2 * z.abs(), threshold=100) - _LOG2


def tanh_inverse_integral(x: Tensor) -> Tensor:
    """The integral of the inverse of tanh from its value at 0."""
    return _within(-1.0, 1.0, x, 0.5 * (xlogx(1 + x) + xlogx(1 - x)))


def sigmoid_slope(z: Tensor) -> Tensor:
    """The derivative of the sigmoid."""
    return torch.sigmoid(z) * torch.sigmoid(-z)


def sigmoid_integral(z: Tensor) -> Tensor:
    """The integral of the sigmoid from 0."""
    return F.softplus(z, threshold=100) - _LOG2


def sigmoid_inverse_integral(x: Tensor) -> Tensor:
    """The integral of the inverse of the sigmoid from its value at 0."""
    return _within(0.0, 1.0, x, xlogx(x) + xlogx(1 - x) + _LOG2)


def softplus_slope(z: Tensor, beta: float = 1.0) -> Tensor:
    """The derivative of softplus."""
    return torch.sigmoid(beta * z)


def softplus_integral(z: Tensor, beta: float = 1.0) -> Tensor:
    r"""The integral :math:`-\mathrm{Li}_2(-e^z) - \pi^2/12` of softplus, at scale ``beta``."""
    z = beta * z
    sign = torch.where(z < 0, -1.0, 1.0).to(z.dtype)
    tail = sign * (_ZETA + dilogarithm(-torch.exp(-sign * z)))
    return (0.5 * torch.relu(z).square() + tail) / beta**2


def softplus_inverse_integral(x: Tensor, beta: float = 1.0) -> Tensor:
    r"""The integral :math:`\tfrac12 x^2 + \mathrm{Li}_2(e^{-x}) - \pi^2/12` of softplus's inverse."""
    scaled = torch.relu(beta * x)
    value = 0.5 * scaled.square() + dilogarithm(torch.exp(-scaled)) - _ZETA
    return _within(0.0, math.inf, x, value / beta**2)


def softplus_inverse(x: Tensor) -> Tensor:
    """The inverse of softplus, for x > 0."""
    return x + torch.log(-torch.expm1(-x))


def logsigmoid_slope(z: Tensor) -> Tensor:
    """The derivative of the log-sigmoid."""
    return torch.sigmoid(-z)


def logsigmoid_integral(z: Tensor) -> Tensor:
    """The integral of the log-sigmoid from 0."""
    return softplus_integral(-z)


def logsigmoid_inverse_integral(x: Tensor) -> Tensor:
    """The integral of the inverse of the log-sigmoid from its value at 0."""
    return softplus_inverse_integral(-x)


def elu_slope(z: Tensor, alpha: float = 1.0) -> Tensor:
    """The derivative of ELU."""
    return torch.where(z > 0, 1.0, alpha * torch.exp(z.clamp(max=0)))


def elu_integral(z: Tensor, alpha: float = 1.0) -> Tensor:
    """The integral of ELU from 0."""
    negative = z.clamp(max=0)
    return 0.5 * torch.relu(z).square() + alpha * (torch.expm1(negative) - negative)


def elu_inverse_integral(x: Tensor, alpha: float = 1.0) -> Tensor:
    """The integral of the inverse of ELU from its value at 0."""
    negative = x.clamp(max=0)
    value = 0.5 * torch.relu(x).square() + alpha * xlogx(1 + negative / alpha) - negative
    return _within(-alpha, math.inf, x, value)


def celu_slope(z: Tensor, alpha: float = 1.0) -> Tensor:
    """The derivative of CELU."""
    return torch.exp(z.clamp(max=0) / alpha)


def celu_integral(z: Tensor, alpha: float = 1.0) -> Tensor:
    """The integral of CELU from 0."""
    negative = z.clamp(max=0) / alpha
    return 0.5 * torch.relu(z).square() + alpha**2 * (torch.expm1(negative) - negative)


def celu_inverse_integral(x: Tensor, alpha: float = 1.0) -> Tensor:
    """The integral of the inverse of CELU from its value at 0."""
    negative = x.clamp(max=0) / alpha
    value = 0.5 * torch.relu(x).square() + alpha**2 * (xlogx(1 + negative) - negative)
    return _within(-alpha, math.inf, x, value)


def softsign_slope(z: Tensor) -> Tensor:
    """The derivative of softsign."""
    return (1.0 + z.abs()).square().reciprocal()


def softsign_integral(z: Tensor) -> Tensor:
    """The integral of softsign from 0."""
    return z.abs() - torch.log1p(z.abs())


def softsign_inverse_integral(x: Tensor) -> Tensor:
    """The integral of the inverse of softsign from its value at 0."""
    # The integral diverges at ±1. Softsign reaches ±1 only by rounding.
    size = x.abs().clamp(max=1 - torch.finfo(x.dtype).eps / 2)
    return _within(-1.0, 1.0, x, -size - torch.log1p(-size))


def hardsigmoid(z: Tensor) -> Tensor:
    """torch's function to the bit; its own has no second derivative."""
    return (F.relu6(widened(z) + 3) / 6).to(z.dtype)


def hardsigmoid_slope(z: Tensor) -> Tensor:
    """The derivative of the hard sigmoid."""
    return (z.abs() < 3).to(z.dtype) / 6


def hardsigmoid_integral(z: Tensor) -> Tensor:
    """The integral of the hard sigmoid from 0."""
    middle = z.clamp(-3, 3)
    return middle.square() / 12 + middle / 2 + torch.relu(z - 3)


def hardsigmoid_inverse_integral(x: Tensor) -> Tensor:
    """The integral of the inverse of the hard sigmoid from its value at 0."""
    return _within(0.0, 1.0, x, 3 * (x - 0.5).square())


def tanhshrink_slope(z: Tensor) -> Tensor:
    """The derivative of tanhshrink."""
    return torch.tanh(z).square()


def tanhshrink_integral(z: Tensor) -> Tensor:
    """The integral of tanhshrink from 0."""
    return 0.5 * z.square() - tanh_integral(z)


def silu_integral(z: Tensor) -> Tensor:
    """The integral of SiLU (Swish) from 0, by parts. SiLU has no inverse, since it is not monotone."""
    return z * F.softplus(z, threshold=100) - softplus_integral(z)


#: Bernoulli numbers B₂ₙ/(2n+1)!, n = 1, 2, …: coefficients of the dilogarithm in powers of −log(1 − y).
_BERNOULLI = (
    1 / 36,
    -1 / 3600,
    1 / 211680,
    -1 / 10886400,
    5 / 2634508800,
    -691 / 16999766784000,
    7 / 7846046208000,
    -3617 / 181400588328960000,
    43867 / 97072790126247936000,
)


def dilogarithm(y: Tensor) -> Tensor:
    r"""The dilogarithm :math:`\mathrm{Li}_2(y) = -\int_0^y \log(1-t)/t\,dt` for :math:`-1 \le y \le 1`.

    With :math:`u = -\log(1-y)` it is :math:`\sum_n B_n u^{n+1}/(n+1)!`. For :math:`y \le ½` each term adds a
    digit. Larger arguments are reflected by :math:`\mathrm{Li}_2(y) = \pi^2/6 - \log y \log(1-y) -
    \mathrm{Li}_2(1-y)`.

    Example:
        >>> dilogarithm(torch.tensor([1.0, -1.0], dtype=torch.float64)) * 12 / math.pi**2
        tensor([ 2., -1.], dtype=torch.float64)
    """
    reflect = y > 0.5
    tiny = torch.finfo(y.dtype).tiny
    near = torch.where(reflect, 1 - y, y)
    u = -torch.log1p(-near)
    square, series = u * u, torch.zeros_like(u)
    for coefficient in reversed(_BERNOULLI):
        series = (series + coefficient) * square
    value = u * (1 - 0.25 * u + series)
    product = torch.log(torch.where(reflect, y, 1.0)) * torch.log(near.clamp_min(tiny))
    return torch.where(reflect, 2 * _ZETA - product - value, value)

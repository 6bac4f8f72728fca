r"""The change of an activation over a step, divided by the step's length, without cancellation.

For a step t > 0 along p the functions here compute :math:`(\varphi(z + tp) - \varphi(z))/t`. As t → 0 this tends to
:math:`\varphi'(z)p`, but no derivative is used, and a difference of two nearly equal values is never formed. So the
result is accurate for steps far below the precision of z.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...functions.monotone import Elementwise

__all__ = ["Change", "change_of", "relu_change", "secant_change"]

#: A map of (z, p, t) to the divided change.
Change = Callable[[Tensor, Tensor, float], Tensor]

#: The shortest step of a secant, relative to 1 + |z|; it is taken in double precision.
_SECANT = 1e-7


def relu_change(z: Tensor, p: Tensor, t: float) -> Tensor:
    """The divided change of ReLU; for z = 0 its one-sided limit.

    >>> relu_change(torch.tensor([1.0, -1.0, 1.0]), torch.tensor([-3.0, 3.0, 3.0]), 0.5)
    tensor([-2.,  1.,  3.])
    """
    scaled = z / t
    return torch.maximum(scaled.clamp(max=0).add_(p), scaled.neg_().clamp_(max=0))


def _piecewise(slope: float, kinks: tuple[tuple[float, float], ...], z: Tensor, p: Tensor, t: float) -> Tensor:
    """The divided change of ``slope · z + Σ c relu(z − k)``, for pairs (k, c)."""
    found = slope * p
    for kink, jump in kinks:
        found = found + jump * relu_change(z - kink if kink else z, p, t)
    return found


def _exponential(p: Tensor, t: float) -> Tensor:
    """``expm1(tp)/t``, which is p for steps below rounding."""
    step = t * p
    return torch.where(step.abs() < torch.finfo(p.dtype).eps, p, torch.expm1(step) / t)


def _sigmoid(scale: float, out: float, z: Tensor, p: Tensor, t: float) -> Tensor:
    """The divided change of ``out · sigmoid(scale · z)``."""
    z, p = scale * z, scale * p
    end = z + t * p
    slope = torch.sigmoid(torch.maximum(z, end)) * torch.sigmoid(-torch.minimum(z, end))
    return out * slope * _exponential(-p.abs(), t).abs().copysign(p)


def _softplus(beta: float, z: Tensor, p: Tensor, t: float) -> Tensor:
    z, p = beta * z, beta * p
    near = torch.log1p(torch.sigmoid(z) * torch.expm1((t * p).clamp(-1, 1))) / t
    near = torch.where((t * p).abs() < torch.finfo(p.dtype).eps, torch.sigmoid(z) * p, near)
    far = (torch.logaddexp(z + t * p, z.new_zeros(())) - torch.logaddexp(z, z.new_zeros(()))) / t
    return torch.where((t * p).abs() < 1, near, far) / beta


def _logsigmoid(z: Tensor, p: Tensor, t: float) -> Tensor:
    return -_softplus(1.0, -z, -p, t)


def _elu(alpha: float, rate: float, scale: float, z: Tensor, p: Tensor, t: float) -> Tensor:
    """The divided change of ``scale · (relu(z) + alpha · expm1(rate · min(z, 0)))``."""
    below = -relu_change(-z, -p, t)
    low = (rate * z).clamp(max=0)
    moved = (rate * t * below).abs() < 1
    near = torch.exp(low) * _exponential(torch.where(moved, rate * below, 0), t)
    far = (torch.expm1(low + rate * t * below) - torch.expm1(low)) / t
    return scale * (relu_change(z, p, t) + alpha * torch.where(moved, near, far))


def secant_change(phi: Elementwise, z: Tensor, p: Tensor, t: float) -> Tensor:
    r"""The divided change of any activation by values in double precision.

    A step shorter than 1e-7 (1 + |z|) is lengthened to that, which replaces a limit by a secant.
    """
    point, along = (tensor if tensor.device.type == "mps" else tensor.double() for tensor in (z, p))
    least = _SECANT * (1 + point.abs())
    length = (t * along.abs()).maximum(least)
    change = phi(point + length.copysign(along)) - phi(point)
    return (change.abs() * (along / length)).to(z.dtype)


def _steep_leaky(module: nn.Module) -> Change:
    slope = float(module.negative_slope)  # type: ignore[arg-type]
    return functools.partial(_piecewise, slope, ((0.0, 1 - slope),))


def _identity(z: Tensor, p: Tensor, t: float) -> Tensor:
    return p


#: The changes of torch's activations, by class; each entry takes the module.
_KNOWN: dict[type[nn.Module], Callable[..., Change]] = {
    nn.Identity: lambda module: _identity,
    nn.ReLU: lambda module: relu_change,
    nn.LeakyReLU: _steep_leaky,
    nn.ReLU6: lambda module: functools.partial(_piecewise, 0.0, ((0.0, 1.0), (6.0, -1.0))),
    nn.Hardtanh: lambda m: functools.partial(_piecewise, 0.0, ((float(m.min_val), 1.0), (float(m.max_val), -1.0))),
    nn.Hardsigmoid: lambda module: functools.partial(_piecewise, 0.0, ((-3.0, 1 / 6), (3.0, -1 / 6))),
    nn.Sigmoid: lambda module: functools.partial(_sigmoid, 1.0, 1.0),
    nn.Tanh: lambda module: functools.partial(_sigmoid, 2.0, 2.0),
    nn.Softplus: lambda module: functools.partial(_softplus, float(module.beta)),
    nn.LogSigmoid: lambda module: _logsigmoid,
    nn.ELU: lambda module: functools.partial(_elu, float(module.alpha), 1.0, 1.0),
    nn.CELU: lambda module: functools.partial(_elu, float(module.alpha), 1 / float(module.alpha), 1.0),
    nn.SELU: lambda module: functools.partial(_elu, 1.6732632423543772, 1.0, 1.0507009873554805),
}


def change_of(module: nn.Module) -> Change | None:
    """The divided change of one of torch's activations in closed form; None where there is none."""
    make = _KNOWN.get(type(module))
    return None if make is None else make(module)

"""A check of a user's datafit: derivative, convexity, curvature, conjugate, prox."""

import itertools

import torch
from torch import Tensor

from ..arguments import checked
from ..errors import CapabilityError, OptionError
from .datafits import Datafit

__all__ = ["check_datafit"]

_SIZES = (0.1, 1.0, 10.0)


@checked
def check_datafit(datafit: Datafit, y: Tensor, *, trials: int = 5, generator: torch.Generator | None = None) -> None:
    r"""Raise unless the methods of a datafit belong to each other, at random predictions t for the data ``y``.

    ``gradient`` is compared with the derivative of ``values``, ``second`` with that of ``gradient``, and ``prox`` with
    its optimality condition. Convexity and the curvature bound are one inequality: for any two predictions
    :math:`0 \le (f'(t) - f'(s))(t - s) \le \kappa(t - s)^2`. A ``conjugate`` satisfies the Fenchel–Young equality
    :math:`f(t) + f^*(f'(t)) = tf'(t)`.

    Args:
        datafit: Any datafit.
        y: Data that it takes; computed in float64.
        trials: Random predictions of each size.
        generator: The source of randomness; None: a fixed seed.

    Raises:
        OptionError: A law is violated; the message says which, and by how much.
        CapabilityError: A method returns a wrong shape.

    >>> from minimand.solvers import Huber
    >>> check_datafit(Huber(0.5), torch.linspace(-2, 2, 9))
    """
    if not isinstance(datafit, Datafit):
        raise CapabilityError(f"check_datafit takes a Datafit, got a {type(datafit).__name__}")
    generator = torch.Generator(y.device).manual_seed(0) if generator is None else generator
    y = y.detach().double()
    datafit.check(y)
    for size in _SIZES:
        for _ in range(trials):
            t, s = (size * torch.randn(y.shape, dtype=y.dtype, device=y.device, generator=generator) for _ in "ts")
            # Where the loss is infinite a little below, on the other side.
            t, s = (torch.where(datafit.values(v - 0.01, y) < torch.inf, v, v.abs() + 0.01) for v in (t, s))
            _check_shapes(datafit, t, y)
            _check_derivative(datafit, t, y)
            _check_curvature(datafit, t, s, y)
            _check_near_kinks(datafit, t, y)
            _check_conjugate(datafit, t, y)
            _check_prox(datafit, t, y)


def _check_shapes(datafit: Datafit, t: Tensor, y: Tensor) -> None:
    for name in ("values", "gradient", "second"):
        got = getattr(datafit, name)(t, y).shape
        if got != t.shape:
            raise CapabilityError(
                f"{name} of {type(datafit).__name__} returned shape {tuple(got)}; expected {tuple(t.shape)}"
            )
    curvature = datafit.curvature(y)
    if isinstance(curvature, Tensor) and curvature.numel() != 1:
        raise CapabilityError(
            f"curvature of {type(datafit).__name__} returned shape {tuple(curvature.shape)}; expected one number"
        )


def _check_derivative(datafit: Datafit, t: Tensor, y: Tensor) -> None:
    step = 1e-4 * (1 + t.abs())
    rise = datafit.values(t + step, y) - datafit.values(t - step, y)
    # The gradients at the ends bound the mean slope of a convex function.
    low, high = datafit.gradient(t - step, y), datafit.gradient(t + step, y)
    slack = 1e-8 * (1 + datafit.values(t, y).abs()) / step
    outside = torch.maximum(low - rise / (2 * step), rise / (2 * step) - high) - slack
    _require(datafit, "gradient is not the derivative of values", outside, t)


def _check_curvature(datafit: Datafit, t: Tensor, s: Tensor, y: Tensor) -> None:
    product = (datafit.gradient(t, y) - datafit.gradient(s, y)) * (t - s)
    room = 1e-9 * (1 + product.abs())
    _require(datafit, "gradient decreases, so the loss is not convex", -product - room, t)
    excess = product - float(datafit.curvature(y)) * (t - s).square() - room
    _require(datafit, f"the curvature exceeds curvature(y) = {float(datafit.curvature(y)):.4g}", excess, t)


def _check_near_kinks(datafit: Datafit, t: Tensor, y: Tensor) -> None:
    """``second`` lies between the slopes of secants to both sides; kinks of the gradient are allowed."""
    second, step = datafit.second(t, y), 1e-5 * (1 + t.abs())
    gradients = [datafit.gradient(t + k * step, y) for k in (-1, 0, 1)]
    slopes = [(b - a) / step for a, b in itertools.pairwise(gradients)]
    room = 1e-3 * (1 + torch.maximum(*slopes).abs())
    outside = torch.maximum(torch.minimum(*slopes) - second, second - torch.maximum(*slopes)) - room
    _require(datafit, "second is not the derivative of gradient", outside, t)


def _check_conjugate(datafit: Datafit, t: Tensor, y: Tensor) -> None:
    u = datafit.gradient(t, y)
    try:
        dual = datafit.conjugate(u, y)
    except CapabilityError:
        return
    value, product = datafit.values(t, y), t * u
    room = 1e-7 * (1 + value.abs() + product.abs())
    _require(datafit, "conjugate violates f(t) + f*(f′(t)) = t f′(t)", (value + dual - product).abs() - room, t)


def _check_prox(datafit: Datafit, t: Tensor, y: Tensor) -> None:
    for step in (0.1, 3.0):
        p = datafit.prox(t, step, y)
        left = p + step * datafit.gradient(p, y) - t
        # At the lower end of the domain a minimiser may slope upwards.
        end = datafit.values(p - 1e-6 * (1 + p.abs()), y) == torch.inf
        left = torch.where(end, left.clamp_max(0), left)
        _require(datafit, f"prox at step {step:g} is not a minimiser", left.abs() - 1e-7 * (1 + t.abs()), t)


def _require(datafit: Datafit, what: str, excess: Tensor, t: Tensor) -> None:
    # Written so that NaN fails, too.
    if not bool((excess <= 0).all()):
        worst = int(torch.nan_to_num(excess, nan=torch.inf).argmax())
        raise OptionError(
            f"{type(datafit).__name__}: {what}, by {float(excess.flatten()[worst]):.3g} at the prediction "
            f"{float(t.flatten()[worst]):.4g}; correct the method"
        )

"""Monotone activations for lifted training: values, Fenchel–Young gaps, and the solution of a monotone equation."""

import dataclasses
import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ChainError, NotProximal
from ...functions import Monotone, NonNegative, Separable, Zero, curves, from_activation
from ...functions.learned import LearnedHinge
from ...functions.monotone import Elementwise
from .changes import Change, change_of, secant_change

__all__ = ["LINEAR", "Unit", "unit_of"]

_SELU_SCALE = 1.0507009873554804934193349852946
_SELU_ALPHA = 1.6732632423543772848170429916717
#: Half the lengths of the grids on which the slope of a user's activation may grow no more.
_TAILS = (40.0, 80.0, 160.0, 320.0, 640.0, 1280.0)


@dataclasses.dataclass(frozen=True)
class Unit:
    r"""A non-decreasing activation :math:`\varphi` whose slope is at most :math:`\beta`.

    :math:`\varphi/\beta` has slope at most one, so it is the prox of a convex ``function`` :math:`f`. LPOM needs two
    quantities, and both follow from that prox:

    - the Fenchel–Young gap :math:`\tilde f(x) + \tilde g(z) - xz` with :math:`\tilde f(x) = \int_{\varphi(0)}^x
      \varphi^{-1}` and :math:`\tilde g(z) = \int_0^z \varphi` is :math:`\beta` times the gap of :math:`f` at
      :math:`(x/\beta, z)`;
    - the solution of :math:`x = \varphi(s)`, :math:`s + c\varphi(s) = v` is
      :math:`\beta \operatorname{prox}_{\eta f}(\eta v)` with :math:`\eta = 1/(1 + \beta c)`.

    Only values of :math:`\varphi` are used.

    >>> unit = unit_of("net.1", nn.ELU(alpha=2.0))
    >>> unit.slope
    2.0
    >>> v = torch.tensor([-1.0, 0.5])
    >>> x = unit.resolve(v, 3.0)
    >>> torch.allclose(unit.phi(v - 3.0 * x), x, atol=1e-6)
    True
    """

    function: Separable
    slope: float = 1.0
    stable: Change | None = None

    @functools.cached_property
    def linear(self) -> bool:
        """Whether it is the identity."""
        return isinstance(self.function, Zero) and self.slope == 1

    @functools.cached_property
    def relu(self) -> bool:
        """Whether it is ReLU."""
        return isinstance(self.function, NonNegative) and self.slope == 1

    def phi(self, z: Tensor) -> Tensor:
        """The activation. The identity returns z itself, not a copy."""
        if self.linear:
            return z
        if self.relu:
            # The same values as the prox, without its checks of the step.
            return torch.relu(z)
        value = self.function.prox(z)
        return value if self.slope == 1 else self.slope * value

    def phi_(self, z: Tensor) -> Tensor:
        """The activation; may overwrite z."""
        return torch.relu_(z) if self.relu else self.phi(z)

    def residual(self, x: Tensor, z: Tensor) -> Tensor:
        r""":math:`x - \varphi(z)`."""
        values = self.phi(z)
        return torch.sub(x, values, out=values) if self.relu else x - values

    def change(self, z: Tensor, p: Tensor, t: float) -> Tensor:
        r""":math:`(\varphi(z + tp) - \varphi(z))/t` without cancellation; see :mod:`~minimand.train.lifted.changes`."""
        return p if self.linear else secant_change(self.phi, z, p, t) if self.stable is None else self.stable(z, p, t)

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        """The Fenchel–Young gap, summed; in double precision if the device supports it."""
        if x.device.type != "mps":
            x, z = x.double(), z.double()
        return self.slope * self.function.gap(x / self.slope, z).sum()

    def resolve(self, v: Tensor, c: float) -> Tensor:
        r"""The :math:`x = \varphi(s)` that solves :math:`s + c\varphi(s) = v`, to rounding."""
        eta = 1.0 / (1.0 + self.slope * c)
        value = self.function.prox(eta * v, eta)
        return value if self.slope == 1 else self.slope * value

    def derivative(self, z: Tensor) -> Tensor:
        r""":math:`\varphi'(z)` by automatic differentiation.

        The methods whose optimality conditions contain the derivative use it; LPOM does not.
        """
        with torch.enable_grad():
            point = z.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.phi(point).sum(), point)
        return slope


#: The activation after the last linear map.
LINEAR = Unit(Zero())


def unit_of(path: str, module: nn.Module) -> Unit:
    """The unit of an activation module. A user's own module is accepted if its values pass the checks.

    Raises:
        NotProximal: If the activation is not monotone, or (a user's own) steeper than one.
        ChainError: If the module is not an activation.
    """
    if (scaled := _scaled(module)) is not None:
        return dataclasses.replace(scaled, stable=change_of(module))
    try:
        if isinstance(function := from_activation(module), LearnedHinge):
            raise NotProximal("lifted training does not train its slope; use LeakyReLU")
        return Unit(_without_derivative(function), stable=change_of(module))
    except NotProximal as refusal:
        if type(module).__module__.startswith("torch."):
            raise NotProximal(f"{path} ({type(module).__name__}) cannot be lifted: {refusal}") from None
    return _own(path, module)


def _scaled(module: nn.Module) -> Unit | None:
    """Torch activations whose largest slope is known and is not 1. Those with a larger slope are not proxes."""
    if type(module) is nn.Sigmoid:
        return _multiple(torch.sigmoid, 0.25, curves.sigmoid_integral, curves.sigmoid_inverse_integral)
    if type(module) is nn.Hardsigmoid:
        return _multiple(F.hardsigmoid, 1 / 6, curves.hardsigmoid_integral, curves.hardsigmoid_inverse_integral)
    if type(module) is nn.LeakyReLU and module.negative_slope > 1:
        steep = float(module.negative_slope)
        phi, inverse = (functools.partial(F.leaky_relu, negative_slope=slope) for slope in (steep, 1 / steep))
        return _multiple(phi, steep, functools.partial(_triangle, phi), functools.partial(_triangle, inverse))
    if type(module) is nn.SELU:
        return _elu(_SELU_ALPHA, _SELU_SCALE)
    if type(module) is nn.ELU and module.alpha > 1:
        return _elu(float(module.alpha), 1.0)
    return None


def _elu(alpha: float, scale: float) -> Unit:
    """``scale · ELU(alpha)``; its slope is largest just below zero."""
    shapes = (F.elu, curves.elu_integral, curves.elu_inverse_integral)
    phi, integral, inverse = (functools.partial(shape, alpha=alpha) for shape in shapes)
    return _multiple(
        functools.partial(_stretched, phi, 1.0, scale),
        scale * alpha,
        functools.partial(_stretched, integral, 1.0, scale),
        functools.partial(_stretched, inverse, 1 / scale, scale),
    )


def _multiple(phi: Elementwise, slope: float, integral: Elementwise, inverse_integral: Elementwise) -> Unit:
    r"""The unit of :math:`\varphi` with slope :math:`\beta`, from the integrals of :math:`\varphi` and its inverse."""
    over = 1 / slope
    function = Monotone(
        functools.partial(_stretched, phi, 1.0, over),
        integral=functools.partial(_stretched, integral, 1.0, over),
        inverse_integral=functools.partial(_stretched, inverse_integral, slope, over),
    )
    return Unit(function, slope)


def _stretched(curve: Elementwise, inside: float, outside: float, t: Tensor) -> Tensor:
    return outside * curve(t if inside == 1 else inside * t)


def _triangle(line: Elementwise, t: Tensor) -> Tensor:
    """The integral from 0 to t of a function that is linear on each side of zero."""
    return 0.5 * t * line(t)


def _own(path: str, module: nn.Module) -> Unit:
    """The unit of a user's own activation, checked on a grid."""
    kind = type(module).__name__
    if next(module.parameters(), None) is not None or next(module.children(), None) is not None:
        raise ChainError(
            f"{path} ({kind}) has parameters or submodules and is not a linear layer, so it is not an activation; "
            f"lifted training takes chains of Linear or Conv2d and activations, so write it in those"
        )
    grid = torch.linspace(-4.0, 4.0, 64)
    with torch.no_grad():
        try:
            images = [module(grid), module(grid.flip(0)).flip(0), module(grid.reshape(1, 8, 8)).flatten()]
        except Exception as error:
            raise ChainError(
                f"{path} ({kind}) is not an activation: it does not accept inputs of every shape: {error}"
            ) from None
    if any(image.shape != grid.shape or not torch.allclose(image, images[0]) for image in images):
        raise ChainError(
            f"{path} ({kind}) does not act entry by entry, so it is not an activation; "
            f"lifted training takes chains of Linear or Conv2d and activations"
        )
    slope = _steepest(path, module)
    try:
        if slope <= 1:
            return Unit(Monotone(module))
        return Unit(Monotone(functools.partial(_stretched, module, 1.0, 1 / slope)), slope)
    except NotProximal as refusal:
        raise NotProximal(f"{path} ({kind}) cannot be lifted: {refusal}") from None


def _steepest(path: str, module: nn.Module) -> float:
    """A bound on the slope of a user's activation, from secants on two grids over [−20, 20] and on longer ones."""
    with torch.no_grad():
        coarse, fine = (_secant(module, 20.0, count) for count in (20_001, 200_001))
        tails = [_secant(module, end, 2_001) for end in _TAILS]
    before, last = [math.inf, math.inf, *(slope for slope in tails if slope < math.inf)][-2:]
    if not fine < math.inf or fine > 2 * max(coarse, 1.0):
        reason = f"it jumps or its slope is not bounded (secants reach {fine:.3g})"
    elif not last <= 1.05 * before < math.inf:
        reason = f"its slope is not bounded (secants reach {fine:.3g} within [-20, 20] and {last:.3g} outside)"
    else:
        steepest = max(fine, last)
        return 1.01 * steepest if steepest > 1 + 1e-9 else 1.0
    remedy = "and the majorised step needs a bound; use a piecewise linear approximation of it"
    raise NotProximal(f"{path} ({type(module).__name__}) cannot be lifted: {reason}, {remedy}")


def _secant(module: nn.Module, end: float, count: int) -> float:
    """The largest slope of secants on a grid over [−end, end]; infinite where a value overflows."""
    grid = torch.linspace(-end, end, count, dtype=torch.float64)
    slopes = module(grid).diff() / grid.diff()
    return float(slopes.max()) if bool(torch.isfinite(slopes).all()) else math.inf


def _without_derivative(function: Separable) -> Separable:
    # Its root finder then uses secants, so that LPOM needs values of φ only.
    return dataclasses.replace(function, derivative=None) if isinstance(function, Monotone) else function

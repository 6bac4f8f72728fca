"""Activations as proximal operators, and the activations that are none."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import NotProximal, OptionError
from . import curves
from .base import Separable
from .intervals import L1, Box
from .learned import LearnedHinge
from .monotone import Elementwise, Monotone
from .separable import LeakyHinge, NonNegative, Zero

__all__ = ["activation_module", "from_activation", "is_activation"]


def from_activation(act: str | nn.Module | Callable[..., Any] | Separable) -> Separable:
    r"""The convex function :math:`g` whose prox at step 1 is the activation, exactly.

    .. math:: \operatorname{prox}_g(x) = \operatorname{act}(x)

    holds to the bit at step 1. Other steps give the true prox of the same function. Piecewise linear
    activations have a closed form (:class:`NonNegative`, :class:`LeakyHinge`, :class:`Box`, :class:`L1`,
    :class:`Zero`). The others are :class:`Monotone` with values and integrals in closed form
    ([Lin2019], Table 1).

    Args:
        act: A name such as ``"relu"``, a module such as ``nn.LeakyReLU(0.2)``, a function such as
            ``torch.tanh``, or a ``functools.partial`` of one such as ``partial(F.elu, alpha=0.5)``.

    Raises:
        NotProximal: If the activation is not the prox of a convex function of one variable.
        OptionError: If the name is unknown.

    Example:
        >>> x = torch.tensor([-1.0, 0.5, 2.0])
        >>> torch.equal(from_activation("tanh").prox(x), torch.tanh(x))
        True
        >>> from_activation(nn.Hardtanh(-2, 2))
        Box(low=-2.0, high=2.0)
        >>> from_activation("gelu")
        Traceback (most recent call last):
        minimand.errors.NotProximal: GELU is not monotone (it falls below zero and rises again), so ...
    """
    if isinstance(act, Separable):
        return act
    if isinstance(act, str):
        return _from_name(act)
    if isinstance(act, nn.Module):
        return _from_module(act)
    if isinstance(act, functools.partial):
        return _from_partial(act)
    if isinstance(act, type) and issubclass(act, nn.Module):
        raise OptionError(f"{act.__name__} is a class; pass an instance, nn.{act.__name__}()")
    if callable(act) and _hashable(act) and act in _FUNCTIONALS:
        return _from_name(_FUNCTIONALS[act])
    raise _unknown(getattr(act, "__name__", repr(act)))


def is_activation(act: object) -> bool:
    """Whether a module or function is one of torch's entrywise activations. It need not be a prox.

    >>> is_activation(nn.GELU()), is_activation(torch.tanh), is_activation(F.softmax), is_activation(nn.Identity())
    (True, True, False, False)
    """
    if isinstance(act, nn.Module):
        return isinstance(act, _ENTRYWISE)
    name = _FUNCTIONALS.get(act) if _hashable(act) else None
    return name is not None and not (name in _REFUSED and _REFUSED[name][1] == _VECTOR)


def activation_module(function: Callable[..., Any], *args: Any, **options: Any) -> nn.Module:
    """The module equivalent to the call ``function(x, *args, **options)`` of one of torch's activation functions.

    Raises:
        NotProximal: If the function is not a prox, or is unknown.
        OptionError: If the function does not take these options.

    >>> activation_module(F.leaky_relu, 0.2, inplace=True)
    LeakyReLU(negative_slope=0.2)
    """
    name = _FUNCTIONALS.get(function) if _hashable(function) else None
    if name is None:
        raise _unknown(getattr(function, "__name__", repr(function)))
    if name in _REFUSED:
        raise _refused(name)
    names = [p for p in inspect.signature(_MODULES[name].__init__).parameters if p != "self"]
    options = dict(zip(names, args, strict=False)) | options
    options.pop("inplace", None)
    try:
        return _MODULES[name](**options)
    except TypeError as error:
        raise OptionError(f"{name} does not take the options {options}: {error}") from None


def _from_name(name: str) -> Separable:
    key = name.lower().replace("-", "_")
    if key in _REFUSED:
        raise _refused(key)
    if key not in _MODULES:
        raise OptionError(f"unknown activation {name!r}; known are {', '.join(sorted(_MODULES))}")
    return _from_module(_MODULES[key]())


def _from_module(module: nn.Module) -> Separable:
    for kind in type(module).__mro__:
        if kind in _BUILDERS or kind in _REFUSED_MODULES:
            # A subclass that overrides forward may compute something else.
            if type(module).forward is not kind.forward:  # type: ignore[attr-defined]
                break
            if kind in _REFUSED_MODULES:
                raise _refused(_REFUSED_MODULES[kind])
            return _BUILDERS[kind](module)
    raise _unknown(type(module).__name__)


def _from_partial(act: "functools.partial[Any]") -> Separable:
    if act.args:  # positional arguments would precede the input
        raise _unknown(getattr(act.func, "__name__", repr(act.func)))
    return _from_module(activation_module(act.func, **act.keywords))


def _hashable(thing: object) -> bool:
    return getattr(type(thing), "__hash__", None) is not None


def _refused(name: str) -> NotProximal:
    kind, why, remedy = _REFUSED[name]
    return _refusal(kind.__name__, why, remedy)


def _refusal(what: str, why: str, remedy: str) -> NotProximal:
    return NotProximal(f"{what} {why}, so it is not the prox of any convex function of one variable; {remedy}")


def _unknown(name: str) -> NotProximal:
    return NotProximal(
        f"{name} is not an activation that minimand knows; if it is non-decreasing with slope "
        f"at most 1, pass functions.Monotone(activation), otherwise use one of {', '.join(sorted(_MODULES))}"
    )


def _smooth(
    phi: Elementwise,
    slope: Callable[..., Tensor],
    integral: Callable[..., Tensor],
    inverse_integral: Callable[..., Tensor] | None = None,
    **options: float,
) -> Monotone:
    """A smooth activation with its curves; ``options`` are bound to the curves."""

    def bound(curve: Callable[..., Tensor] | None) -> Callable[..., Tensor] | None:
        return functools.partial(curve, **options) if curve is not None and options else curve

    return Monotone(phi, bound(slope), integral=bound(integral), inverse_integral=bound(inverse_integral))


def _leaky_relu(module: nn.LeakyReLU) -> Separable:
    slope = float(module.negative_slope)
    if not 0 <= slope <= 1:
        why = "decreases below zero" if slope < 0 else "is steeper than 1 below zero"
        raise _refusal(f"LeakyReLU with slope {slope}", why, "use a negative_slope in [0, 1]")
    if slope in (0.0, 1.0):
        return NonNegative() if slope == 0 else Zero()
    return LeakyHinge(slope)


def _prelu(module: nn.PReLU) -> Separable:
    LearnedHinge(module).current(2)  # raises for slopes outside of [0, 1]
    return LearnedHinge(module)


def _elu(module: nn.ELU) -> Separable:
    alpha = float(module.alpha)
    if not 0 <= alpha <= 1:
        why = "decreases below zero" if alpha < 0 else f"has slope {alpha:g} > 1 just below zero"
        raise _refusal(f"ELU with alpha={alpha:g}", why, "use alpha in [0, 1], or CELU for any alpha")
    if alpha == 0:
        return NonNegative()
    phi = functools.partial(curves.elu, alpha=alpha)
    return _smooth(phi, curves.elu_slope, curves.elu_integral, curves.elu_inverse_integral, alpha=alpha)


def _celu(module: nn.CELU) -> Separable:
    alpha = float(module.alpha)
    if not alpha > 0:
        raise _refusal(f"CELU with alpha={alpha:g}", "is not monotone", "use alpha > 0")
    phi = functools.partial(F.celu, alpha=alpha)
    return _smooth(phi, curves.celu_slope, curves.celu_integral, curves.celu_inverse_integral, alpha=alpha)


def _softplus(module: nn.Softplus) -> Separable:
    beta, threshold = float(module.beta), float(module.threshold)
    if not beta > 0:
        raise _refusal(f"Softplus with beta={beta:g}", "is concave or undefined", "use beta > 0")
    if threshold < 15:
        jump = math.log1p(math.exp(-threshold)) / beta
        raise _refusal(
            f"Softplus with threshold={threshold:g}",
            f"drops by {jump:.2g} where it switches to the identity",
            "use the default threshold=20",
        )
    phi = functools.partial(curves.softplus, beta=beta, threshold=threshold)
    return _smooth(phi, curves.softplus_slope, curves.softplus_integral, curves.softplus_inverse_integral, beta=beta)


def _hardtanh(module: nn.Hardtanh) -> Separable:
    return Box(float(module.min_val), float(module.max_val))


def _threshold(module: nn.Threshold) -> Separable:
    threshold, value = float(module.threshold), float(module.value)
    if threshold != value:
        raise _refusal(
            f"Threshold({threshold:g}, {value:g})",
            "jumps at its threshold",
            f"use Threshold({threshold:g}, {threshold:g}), which is max(x, {threshold:g})",
        )
    return Box(threshold, math.inf)


_TANH = _smooth(torch.tanh, curves.tanh_slope, curves.tanh_integral, curves.tanh_inverse_integral)
_SIGMOID = _smooth(torch.sigmoid, curves.sigmoid_slope, curves.sigmoid_integral, curves.sigmoid_inverse_integral)
_LOGSIGMOID = _smooth(
    F.logsigmoid, curves.logsigmoid_slope, curves.logsigmoid_integral, curves.logsigmoid_inverse_integral
)
_SOFTSIGN = _smooth(F.softsign, curves.softsign_slope, curves.softsign_integral, curves.softsign_inverse_integral)
_HARDSIGMOID = _smooth(
    curves.hardsigmoid, curves.hardsigmoid_slope, curves.hardsigmoid_integral, curves.hardsigmoid_inverse_integral
)
_TANHSHRINK = _smooth(F.tanhshrink, curves.tanhshrink_slope, curves.tanhshrink_integral)

#: The module of every activation that is a prox, and the function of such a module.
_KNOWN: Mapping[str, tuple[type[nn.Module], Callable[[Any], Separable]]] = {
    "celu": (nn.CELU, _celu),
    "elu": (nn.ELU, _elu),
    "hardsigmoid": (nn.Hardsigmoid, lambda module: _HARDSIGMOID),
    "hardtanh": (nn.Hardtanh, _hardtanh),
    "identity": (nn.Identity, lambda module: Zero()),
    "leaky_relu": (nn.LeakyReLU, _leaky_relu),
    "logsigmoid": (nn.LogSigmoid, lambda module: _LOGSIGMOID),
    "relu": (nn.ReLU, lambda module: NonNegative()),
    "relu6": (nn.ReLU6, _hardtanh),
    "sigmoid": (nn.Sigmoid, lambda module: _SIGMOID),
    "softplus": (nn.Softplus, _softplus),
    "softshrink": (nn.Softshrink, lambda module: L1(float(module.lambd))),
    "softsign": (nn.Softsign, lambda module: _SOFTSIGN),
    "tanh": (nn.Tanh, lambda module: _TANH),
    "tanhshrink": (nn.Tanhshrink, lambda module: _TANHSHRINK),
}
_MODULES: Mapping[str, Callable[..., nn.Module]] = {name: kind for name, (kind, _) in _KNOWN.items()}
_BUILDERS: Mapping[type, Callable[[Any], Separable]] = {
    **dict(_KNOWN.values()),
    nn.Threshold: _threshold,
    nn.PReLU: _prelu,
}

_DIP = "is not monotone (it falls below zero and rises again)"
_VECTOR = "mixes the entries of a vector instead of acting on each"

#: The module of every activation that is no prox, why it is none, and a remedy.
_REFUSED: Mapping[str, tuple[type[nn.Module], str, str]] = {
    "gelu": (nn.GELU, _DIP, "use softplus or elu, its nearest monotone relatives"),
    "silu": (nn.SiLU, f"(Swish) {_DIP}", "use softplus or elu, its nearest monotone relatives"),
    "mish": (nn.Mish, _DIP, "use softplus or elu, its nearest monotone relatives"),
    "hardswish": (nn.Hardswish, _DIP, "use relu6 or hardsigmoid"),
    "selu": (nn.SELU, "has slope up to 1.76 > 1", "use elu, which has the same shape and slope at most 1"),
    "hardshrink": (nn.Hardshrink, "jumps at its threshold", "use softshrink, its continuous relative"),
    "rrelu": (nn.RReLU, "draws its slope at random in training", "use leaky_relu with a fixed slope"),
    "prelu": (nn.PReLU, "learns its slope", "use an nn.PReLU module with slopes in [0, 1]"),
    "glu": (nn.GLU, "gates one half of its input by the other and halves it", "use sigmoid or relu"),
    "softmax": (nn.Softmax, _VECTOR, "use functions.SimplexEntropy(), whose prox at step 1 is softmax"),
    "softmin": (nn.Softmin, _VECTOR, "use functions.SimplexEntropy(), whose prox at step 1 is softmax"),
    "log_softmax": (nn.LogSoftmax, _VECTOR, "leave it to the loss"),
}
_REFUSED_MODULES: Mapping[type, str] = {
    **{kind: name for name, (kind, _, _) in _REFUSED.items() if kind not in _BUILDERS},
    nn.Softmax2d: "softmax",
}
_REFUSED = {**_REFUSED, "swish": _REFUSED["silu"], "logsoftmax": _REFUSED["log_softmax"]}

#: Activations that act entry by entry: without the identity, and without those that mix entries.
_ENTRYWISE = (
    *(kind for kind in _BUILDERS if kind is not nn.Identity),
    *(kind for kind, name in _REFUSED_MODULES.items() if _REFUSED[name][1] != _VECTOR),
)

#: torch has most activations in several namespaces, some with an in-place variant.
_FUNCTIONALS: Mapping[Any, str] = {
    getattr(place, spelling): name
    for name in (*_MODULES, *_REFUSED)
    for place in (torch, F, torch.Tensor, torch.special)
    for spelling in (name, name + "_")
    if hasattr(place, spelling)
} | {torch.special.expit: "sigmoid"}

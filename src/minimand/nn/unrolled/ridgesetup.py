"""The options of RidgeNet: their checks, the theorems of its guarantees, and the initial filters."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ...errors import CapabilityError, OptionError, ShapeError, require_finite, require_real
from ...functions.base import widened
from ...operators import LinearOperator
from ...solvers import Datafit, Quadratic
from ...solvers.base import require_count
from ...solvers.implicit import full_precision
from ...tracing import is_traced
from .fidelity import Fidelity, tightness

__all__ = [
    "RANGES",
    "THEOREMS",
    "check_datafit_option",
    "check_sizes",
    "cosines",
    "exponent_range",
    "exponential",
    "given_start",
    "in_full_precision",
    "refuse_exact",
    "refuse_other_range",
    "refuse_traced",
]

# Squares of e to this power, and of its inverse, are numbers of single precision.
_FAR = 43.0

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: The range of exponents for which each guarantee is proved.
RANGES = {"convex": (0.0, 0.5), "convergent": (0.0, 1.0), "descent": (0.0, 2.0)}
THEOREMS = {
    "convex": (
        "the objective is convex, never rises, and tends to its global minimum from every start; the iterates converge"
    ),
    "convergent": (
        "the objective never rises, and the iterates converge to a critical point (Kurdyka and Łojasiewicz)"
    ),
    "descent": "the objective never rises, and the steps and the gradient mapping tend to zero",
}


def check_sizes(phases: int, filters: int, size: int, channels: str) -> None:
    """Raise for sizes that no network has."""
    for name, value in (("phases", phases), ("filters", filters), ("size", size)):
        require_count(name, value)
    if size % 2 == 0 or size < 3:
        raise OptionError(f"size, the side of the filters, must be odd and at least 3, got {size}")
    if channels not in ("apart", "together"):
        raise OptionError(f'channels must be "apart" or "together", got {channels!r}')


def exponent_range(guarantee: str, exponents: tuple[float, float] | None) -> tuple[float, float]:
    """The range of exponents of a guarantee, or the given one inside of it."""
    if not isinstance(guarantee, str) or guarantee not in RANGES:
        raise OptionError(f"guarantee must be one of {', '.join(map(repr, RANGES))}, got {guarantee!r}")
    low, high = RANGES[guarantee]
    if exponents is None:
        return low, high
    numbers = isinstance(exponents, tuple | list) and all(isinstance(each, int | float) for each in exponents)
    if not numbers or len(exponents) != 2:
        raise OptionError(f"exponents must be a pair of numbers, got {exponents!r:.60}")
    if not low <= exponents[0] < exponents[1] <= high:
        raise OptionError(
            f"the guarantee {guarantee!r} is proved for exponents in ({low:g}, {high:g}), but exponents="
            f"{tuple(exponents)} is no range inside; narrow it, or choose another guarantee"
        )
    return float(exponents[0]), float(exponents[1])


def refuse_other_range(net: Any, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Raise for the state of a network whose exponents have another range, for which the guarantee is not proved."""
    own = net.exponents
    ends = [state.get(f"{prefix}parametrizations.exponent.0.{end}") for end in ("low", "high")]
    for end, limit in zip(ends, own, strict=True):
        # Bounds in half precision are rounded.
        if isinstance(end, Tensor) and not abs(float(end) - limit) <= 0.01 * (own[1] - own[0]):
            there = ", ".join(f"{round(float(each), 3):g}" for each in ends if isinstance(each, Tensor))
            raise OptionError(
                f"the state has exponents in ({there}), but this network, with the guarantee {net.guarantee!r}, in "
                f"({own[0]:g}, {own[1]:g}); build it with the guarantee and the exponents of the state"
            )


def check_datafit_option(datafit: Datafit, noise: float | None) -> None:
    """Raise for a loss without a noise level, and for what is no loss."""
    if not isinstance(datafit, Datafit):
        raise OptionError(f"datafit must be a datafit such as Huber(0.1), got a {type(datafit).__name__}")
    if noise is None and not isinstance(datafit, Quadratic):
        raise OptionError(f"{datafit!r} needs a noise level, by which its weight is set; give noise=σ")
    if not datafit._has_bound(torch.ones(1)):
        raise OptionError(f"steps need a bound on the curvature, which {datafit!r} lacks; give a background")


def refuse_exact(operator: LinearOperator) -> None:
    """Raise for an operator without a projection onto exact measurements."""
    raise OptionError(
        f"exact measurements need orthonormal rows, up to one factor c, but ΦᵀΦΦᵀ differs from c Φᵀ by "
        f"{tightness(operator)[1]:.2g} relative to it on a random vector; orthonormalise the rows, or give noise=σ"
    )


def refuse_traced(y: Tensor) -> None:
    """Raise where the number of iterations cannot depend on values: in transforms of torch.func and exported graphs."""
    if is_traced(y) and not is_dynamo_compiling():
        raise CapabilityError(
            "the number of iterations to a tolerance depends on values, which torch.func and torch.export hide; "
            "use net.unrolled(y), the learned phases, there"
        )


def in_full_precision(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """A method of a network with autocast off: bounds hold for products in the type of the parameters."""

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        net: Any = args[0]
        with full_precision(net.filters):
            return method(*args, **kwargs)

    return call


def exponential(name: str, logarithm: Tensor, shift: float = 0.0) -> Tensor:
    """exp(logarithm + shift) of a learned logarithm; raises where squares of it leave the range of single precision."""
    shifted = widened(logarithm) + shift
    if not is_traced(shifted) and not shifted.is_meta:
        require_finite(name, shifted)
        far = shifted.detach()[shifted.detach().abs() > _FAR]
        if far.numel():
            added, cause = (f" {shift:+.3g}", "a noise level in other units, or ") if shift else ("", "")
            raise OptionError(
                f"exp({name}{added}) = exp({float(far.flatten()[0]):.3g}) is out of range; the usual cause is {cause}"
                f"a training run that diverged, at too high a learning rate"
            )
    return shifted.exp()


def given_start(x0: Tensor, fidelity: Fidelity) -> Tensor:
    """A start of the user's, as a batch of images that satisfy the constraint."""
    require_real("x0", x0)
    require_finite("x0", x0)
    shape = (len(fidelity.y), *fidelity.operator.input_shape)
    if x0.numel() != math.prod(shape):
        raise ShapeError(f"x0 has shape {tuple(x0.shape)}, but the images have {shape}")
    x = x0.reshape(shape).to(fidelity.y)
    return x if fidelity.weight is not None else fidelity.step(x, 1.0)


def cosines(filters: int, inputs: int, size: int) -> Tensor:
    """Cosine filters without the constant one, in the order of their frequency; further ones are random."""
    k = torch.arange(size)
    basis = torch.cos(math.pi * (k[None] + 0.5) * k[:, None] / size)
    basis = basis / basis.norm(dim=1, keepdim=True)
    order = sorted(((i, j) for i in range(size) for j in range(size)), key=lambda f: (f[0] + f[1], f))[1:]
    single = torch.stack([torch.outer(basis[i], basis[j]) for i, j in order])
    mixes, _ = torch.linalg.qr(torch.ones(inputs, inputs) + torch.diag(torch.arange(inputs) + 1.0))
    bank = torch.einsum("cd,fij->fcdij", mixes, single).flatten(0, 1)[:filters]
    if len(bank) < filters:
        more = torch.randn(filters - len(bank), inputs, size, size, generator=torch.Generator().manual_seed(0))
        bank = torch.cat([bank, more / size])
    return bank.contiguous()

"""The exceptions of the library, and the checks that raise them.

Every exception is a :class:`MinimandError` and also a builtin exception (``ValueError`` or ``TypeError``), so that
``except ValueError`` works. A message states the problem, its place, its cause and a remedy.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor

__all__ = [
    "CapabilityError",
    "ChainError",
    "ConversionError",
    "DataError",
    "MinimandError",
    "MissingExtra",
    "NonFiniteError",
    "NotProximal",
    "OperatorError",
    "OptionError",
    "ShapeError",
]


class MinimandError(Exception):
    """The base of all exceptions of the library."""


class ShapeError(MinimandError, ValueError):
    """Two sizes do not fit; the message names both."""


class NonFiniteError(MinimandError, ValueError):
    """A tensor holds NaN or Inf; the message names it."""


class OptionError(MinimandError, ValueError):
    """An option lies outside its range or is unknown; the message names the range."""


class OperatorError(MinimandError, ValueError):
    """An operator's adjoint or bound does not fit its ``apply``; the message states the mismatch."""


class NotProximal(MinimandError, ValueError):
    """An activation is not the proximal operator of a convex function."""


class CapabilityError(MinimandError, TypeError):
    """A solver, function, operator or adjoint lacks a capability that another one needs."""


class ChainError(MinimandError, ValueError):
    """A network is not a chain of linear maps and activations; the message names the module that breaks it."""


class ConversionError(MinimandError, ValueError):
    """A network cannot be converted by the given rules; the message lists every problem with its path."""


class DataError(MinimandError, ValueError):
    """A data file is missing, damaged or of another format; the message names it and a remedy."""


class MissingExtra(MinimandError, ImportError):
    """An optional package is not installed; the message has the command that installs it."""


def located(error: MinimandError, where: str) -> MinimandError:
    """The same error, with the place ``where`` it occurred in front."""
    return type(error)(f"{where}: {error}")


def is_traced(tensor: Tensor) -> bool:
    """Whether Python cannot branch on the tensor's values: under a compiler, an exporter, torch.func or
    ``is_grads_batched``."""
    known = torch._C._functorch
    return torch.compiler.is_compiling() or bool(
        known.is_functorch_wrapped_tensor(tensor) or known.is_legacy_batchedtensor(tensor)
    )


def unwrapped(tensor: Tensor, *, batches: bool = False) -> Tensor:
    """The tensor without the wrappers of torch.func's derivatives; with ``batches`` also without those of ``vmap``."""
    known = torch._C._functorch
    wraps = known.is_functorch_wrapped_tensor if batches else known.is_gradtrackingtensor
    while not torch.compiler.is_compiling() and wraps(tensor):
        tensor = known.get_unwrapped(tensor)
    return tensor


def holds(condition: Tensor) -> bool:
    """Whether a condition holds in every entry, those that ``vmap`` hides included; False where Python cannot know."""
    hidden = torch.compiler.is_compiling() or torch._C._functorch.is_legacy_batchedtensor(condition)
    return not hidden and bool(unwrapped(condition, batches=True).all())


def forward_rule(jvp: Callable[..., Tensor]) -> Any:
    """The forward-mode rule ``jvp(ctx, saved, *tangents)`` of a custom function. torch calls it with forward mode off,
    which makes second derivatives zero. Here it is on, and saved tensors have lost the tangents of this level."""

    def rule(ctx: Any, *tangents: Tensor | None) -> Tensor:
        with forward_mode._set_fwd_grad_enabled(True):
            return jvp(ctx, [_primal(each) for each in ctx.saved_tensors], *tangents)

    return staticmethod(rule)


def _primal(tensor: Tensor) -> Tensor:
    known = torch._C._functorch
    if known.is_legacy_batchedtensor(tensor):
        return tensor
    if known.is_batchedtensor(tensor):
        # torch has no rule for a batch of dual numbers.
        dim, level = known.maybe_get_bdim(tensor), known.maybe_get_level(tensor)
        return known._add_batch_dim(_primal(known.get_unwrapped(tensor)), dim, level)
    return forward_mode.unpack_dual(tensor).primal


def require_finite(name: str, tensor: Tensor) -> None:
    """Raise :class:`NonFiniteError` when ``tensor`` holds NaN or Inf.

    It does nothing while tracing, because a branch on data would break the graph.
    """
    if is_traced(tensor):
        return
    if not bool(torch.isfinite(tensor.detach()).all()):
        bad = int((~torch.isfinite(tensor.detach())).sum())
        raise NonFiniteError(
            f"{name} holds {bad} NaN or Inf among its {tensor.numel()} entries; "
            f"clean or mask the data; in a weight or an activation, the usual cause is a training run that diverged"
        )


def require_real(name: str, tensor: Tensor) -> None:
    """Raise :class:`CapabilityError` unless ``tensor`` is a tensor of real floating-point numbers."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        kind = f"a tensor of {tensor.dtype}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise CapabilityError(f"{name} must be a tensor of real floating-point numbers, got {kind}; convert it first")


def require_dtype(name: str, tensor: Tensor, weight: Tensor) -> None:
    """Raise :class:`OptionError` for a tensor of another type than the weight's, unless autocast converts it."""
    if tensor.dtype == weight.dtype:
        return
    # Autocast does not convert float64.
    if torch.float64 in (tensor.dtype, weight.dtype) or not torch.is_autocast_enabled(tensor.device.type):
        raise OptionError(f"{name} is {tensor.dtype} and the operator's weight {weight.dtype}; convert one of them")


def require_fitting(where: str, tensor: Tensor, weight: Tensor, error: Exception) -> None:
    """In the handler of an ``error`` that torch's layer raised: raise a clearer one if the input's type is the cause.

    Inputs that torch's layer accepts are never checked. An error whose text does not mention a type has another cause,
    such as a hook or a module of the caller's; the function then returns.
    """
    if isinstance(tensor, Tensor) and not re.search("type|not implemented for '", str(error), re.IGNORECASE):
        return
    try:
        require_real("the input", tensor)
        require_dtype("the input", tensor, weight)
    except MinimandError as problem:
        raise located(problem, where) from error


def require_positive(name: str, value: float, *, zero: bool = False) -> None:
    """Raise :class:`OptionError` unless ``value`` is a finite number > 0 (≥ 0 with ``zero``)."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise OptionError(f"{name} must be one number, got a tensor of {tuple(value.shape)}")
    if isinstance(value, Tensor) and is_traced(value):
        return
    if value is None or isinstance(value, bool | str | complex):
        raise OptionError(f"{name} must be a number, got {value!r}")
    if not (value > 0 or (zero and value == 0)) or value == float("inf"):
        bound = "≥ 0" if zero else "> 0"
        raise OptionError(f"{name} must be a finite number {bound}, got {value}")

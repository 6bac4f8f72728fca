"""What can go wrong, said once: what, where, why, and what to do about it.

Every exception here is a :class:`MinimandError` and also the builtin that a caller would expect
(``ValueError`` or ``TypeError``), so ``except ValueError`` keeps working.
"""

import re

import torch
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
    "OptionError",
    "ShapeError",
    "is_traced",
    "located",
    "require_dtype",
    "require_finite",
    "require_fitting",
    "require_positive",
    "require_real",
]


class MinimandError(Exception):
    """Base of everything the library raises on purpose."""


class ShapeError(MinimandError, ValueError):
    """Two sizes do not fit; the message names both."""


class NonFiniteError(MinimandError, ValueError):
    """A tensor holds NaN or Inf; the message names it."""


class OptionError(MinimandError, ValueError):
    """An option lies outside its range or is unknown; the message names the range."""


class NotProximal(MinimandError, ValueError):
    """An activation is the proximal operator of no convex function."""


class CapabilityError(MinimandError, TypeError):
    """A solver, function, operator or adjoint lacks what another needs of it."""


class ChainError(MinimandError, ValueError):
    """A network is no chain of linear maps and activations; the message names the module that breaks it."""


class ConversionError(MinimandError, ValueError):
    """A network cannot be converted as asked; the message lists every problem with its path."""


class DataError(MinimandError, ValueError):
    """A data file is missing, damaged or of another format; the message names it and says what to do."""


class MissingExtra(MinimandError, ImportError):
    """An optional package is not installed; the message says how to install it."""


def located(error: MinimandError, where: str) -> MinimandError:
    """The same error, with the place that it comes from in front."""
    return type(error)(f"{where}: {error}")


def is_traced(tensor: Tensor) -> bool:
    """Whether a branch on the tensor's values is impossible: under a compiler, an exporter or torch.func, or where it
    stands for several (``is_grads_batched``)."""
    known = torch._C._functorch
    return torch.compiler.is_compiling() or bool(
        known.is_functorch_wrapped_tensor(tensor) or known.is_legacy_batchedtensor(tensor)
    )


def require_finite(name: str, tensor: Tensor) -> None:
    """Raise :class:`NonFiniteError` when ``tensor`` holds NaN or Inf.

    Skipped while tracing: a branch on data would break the graph.
    """
    if is_traced(tensor):
        return
    if not bool(torch.isfinite(tensor.detach()).all()):
        bad = int((~torch.isfinite(tensor.detach())).sum())
        raise NonFiniteError(
            f"{name} holds {bad} NaN or Inf among its {tensor.numel()} entries; "
            f"clean or mask the data; of a weight or an activation, a training run that diverged is the usual cause"
        )


def require_real(name: str, tensor: Tensor) -> None:
    """Raise :class:`CapabilityError` unless ``tensor`` is a tensor of real floating-point numbers."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        kind = f"a tensor of {tensor.dtype}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise CapabilityError(f"{name} must be a tensor of real floating-point numbers, got {kind}; convert it first")


def require_dtype(name: str, tensor: Tensor, weight: Tensor) -> None:
    """Raise :class:`OptionError` for a tensor of another type than the weight's, unless autocast sees to it."""
    if tensor.dtype == weight.dtype:
        return
    # Autocast leaves float64 as it is.
    if torch.float64 in (tensor.dtype, weight.dtype) or not torch.is_autocast_enabled(tensor.device.type):
        raise OptionError(f"{name} is {tensor.dtype} and the operator's weight {weight.dtype}; convert one of them")


def require_fitting(where: str, tensor: Tensor, weight: Tensor, error: Exception) -> None:
    """Raise, with its place, what keeps a layer of torch from taking an input: that it is no real tensor, or its type.

    For the handler of torch's own ``error``: what torch takes is not refused, and a pass without error costs nothing.
    An error that speaks of no type has another cause, such as a hook or a module of the caller's, and stays as it is.
    """
    if isinstance(tensor, Tensor) and not re.search("type|not implemented for '", str(error), re.IGNORECASE):
        return
    try:
        require_real("the input", tensor)
        require_dtype("the input", tensor, weight)
    except MinimandError as problem:
        raise located(problem, where) from error


def require_positive(name: str, value: float, *, zero: bool = False) -> None:
    """Raise :class:`OptionError` unless ``value`` is a finite number above zero (or at it, with ``zero``)."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise OptionError(f"{name} must be one number, got a tensor of {tuple(value.shape)}")
    if value is None or isinstance(value, bool | str | complex):
        raise OptionError(f"{name} must be a number, got {value!r}")
    if not (value > 0 or (zero and value == 0)) or value == float("inf"):
        bound = "≥ 0" if zero else "> 0"
        raise OptionError(f"{name} must be a finite number {bound}, got {value}")

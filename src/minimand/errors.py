"""The exceptions of the library, and the checks that raise them.

Every exception is a :class:`MinimandError` and also a builtin exception (such as ``ValueError``), so that
``except ValueError`` works. A message states the problem, its place, its cause and a remedy.
"""

import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from .tracing import is_traced

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
    "ReadOnlyError",
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


class ReadOnlyError(MinimandError, AttributeError):
    """An attribute cannot be set, because the value would be ignored; the message names what can be set."""


class MissingExtra(MinimandError, ImportError):
    """An optional package is not installed; the message has the command that installs it."""


def located(error: MinimandError, where: str) -> MinimandError:
    """The same error, with the place ``where`` it occurred in front."""
    return type(error)(f"{where}: {error}")


_CLEAN = "clean or mask the data; in a weight or an activation, the usual cause is a training run that diverged"


def require_finite(name: str, tensor: Tensor, remedy: str = _CLEAN) -> None:
    """Raise :class:`NonFiniteError` when ``tensor`` holds NaN or Inf.

    It does nothing while tracing, because a branch on data would break the graph.
    """
    if is_traced(tensor) or tensor.is_meta:
        return
    require_strided(name, tensor)
    # NaN and Inf remain in a sum, which needs no memory; a sum that overflowed is looked at entry by entry.
    if bool(torch.isfinite(tensor.detach().sum())):
        return
    bad = int((~torch.isfinite(tensor.detach())).sum())
    if bad:
        raise NonFiniteError(f"{name} holds {bad} NaN or Inf among its {tensor.numel()} entries; {remedy}")


def require_real(name: str, tensor: Tensor) -> None:
    """Raise :class:`CapabilityError` unless ``tensor`` is a tensor of real floating-point numbers."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        kind = f"a tensor of {tensor.dtype}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise CapabilityError(f"{name} must be a tensor of real floating-point numbers, got {kind}; convert it first")
    require_strided(name, tensor)


def require_values(name: str, tensor: Tensor) -> None:
    """Raise :class:`CapabilityError` for a tensor whose entries cannot be read: a sparse one, or one without data."""
    require_strided(name, tensor)
    if tensor.is_meta:
        raise CapabilityError(f"{name} is on the meta device and has no data; move or make it on another device")


def require_constant(name: str, tensor: Tensor) -> None:
    """Raise :class:`CapabilityError` for a tensor with gradients where a constant is kept: it would not be trained."""
    if tensor.requires_grad:
        raise CapabilityError(f"{name} requires gradients, but it is held fixed and would not be trained; detach() it")


def require_strided(name: str, tensor: Tensor) -> None:
    """Raise :class:`CapabilityError` for a sparse tensor."""
    if tensor.layout is not torch.strided:
        raise CapabilityError(f"{name} is sparse ({tensor.layout}); call its to_dense() first")


def require_dtype(name: str, tensor: Tensor, weight: Tensor) -> None:
    """Raise :class:`OptionError` for a tensor on another device than the weight, or of another type than the weight's
    unless autocast converts it."""
    if tensor.device != weight.device:
        raise OptionError(
            f"{name} is on {tensor.device} and the operator's weight on {weight.device}; move one of them"
        )
    if tensor.dtype == weight.dtype:
        return
    # Autocast does not convert float64.
    if torch.float64 in (tensor.dtype, weight.dtype) or not torch.is_autocast_enabled(tensor.device.type):
        raise OptionError(f"{name} is {tensor.dtype} and the operator's weight {weight.dtype}; convert one of them")


def require_fitting(where: str, tensor: Tensor, weight: Tensor, error: Exception) -> None:
    """In the handler of an ``error`` that torch's layer raised: raise a clearer one if the input's type or device is
    the cause.

    Inputs that torch's layer accepts are never checked. An error whose text mentions neither has another cause,
    such as a hook or a module of the caller's; the function then returns.
    """
    if isinstance(tensor, Tensor) and not re.search("type|device|not implemented for '", str(error), re.IGNORECASE):
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
    if not isinstance(value, int | float | np.number | Tensor) or isinstance(value, bool | np.complexfloating):
        raise OptionError(f"{name} must be a number, got {value!r:.60}")
    if not (value > 0 or (zero and value == 0)) or value == float("inf"):
        bound = "≥ 0" if zero else "> 0"
        raise OptionError(f"{name} must be a finite number {bound}, got {value}")


# The likeness of names from which one is taken for a slip of the pen for the other.
_NEAR = 0.86


class Sealed:
    """A base of classes that refuse assignments which they would ignore.

    After construction a public attribute can be set if it is a property with a setter, one of ``_settable``, or a
    parameter, buffer or child of a module. Everything else raises :class:`ReadOnlyError`, except that modules take
    names which are neither nearly their own, nor arguments of their constructor, nor keywords of a method, nor options
    of a record they hold.
    """

    _settable: ClassVar[tuple[str, ...]] = ()
    _arguments: ClassVar[frozenset[str]] = frozenset()
    _sealed: frozenset[str] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls._arguments = frozenset(inspect.signature(cls.__init__).parameters)
            setattr(cls, "__init__", _sealing(cls, cls.__init__))  # noqa: B010 -- mypy forbids the assignment

    def _seal(self) -> None:
        vars(self)["_sealed"] = self._arguments.union(vars(self))

    def __setattr__(self, name: str, value: Any) -> None:
        if self._sealed is not None and name[0] != "_" and name != "training" and name not in self._settable:
            self._require_settable(name)
        super().__setattr__(name, value)

    def _require_settable(self, name: str) -> None:
        """Raise unless an assignment to this attribute has an effect, or concerns a name of the caller's own."""
        kind, module = type(self), self if isinstance(self, nn.Module) else None
        label = kind.__name__.removeprefix("Parametrized")  # a class that torch derives
        # The Parameters of a replica for data parallelism are attributes.
        if name in self._settable or getattr(self, "_is_replica", False):
            return
        if module is not None and (name in module._parameters or name in module._buffers):
            return
        member = inspect.getattr_static(kind, name, None)
        if _has_setter(member) or (module is not None and name in module._modules):
            return
        known = (self._sealed or frozenset()).union(_options(vars(self).values()))
        free = {*self._settable, *(n for n, member in inspect.getmembers_static(kind) if _has_setter(member))}
        if module is not None and name not in known and not isinstance(member, property):
            if methods := _methods_with(kind, name):  # type: ignore[arg-type]
                raise ReadOnlyError(f"{label}.{name} would have no effect; it is an argument of {methods}")
            names = sorted(n for n in (*known, *free) if not n.startswith("_"))
            if near := difflib.get_close_matches(name, names, 1, _NEAR):
                raise ReadOnlyError(f"{label}.{name} would have no effect; did you mean {near[0]}?")
            return
        can = ", ".join(sorted(n for n in free if not n.startswith("_")))
        raise ReadOnlyError(
            f"{label}.{name} cannot be set after construction; build another {label}{can and ', or set one of: '}{can}"
        )


def _sealing(owner: type, init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        # Only after the constructor of the object's own class, which may be decorated further.
        if next(kind for kind in type(self).__mro__ if "__init__" in vars(kind)) is owner:
            self._seal()

    return wrapped


def _has_setter(member: object) -> bool:
    if isinstance(member, property):
        return member.fset is not None
    return hasattr(type(member), "__set__") and not inspect.isgetsetdescriptor(member)


@functools.lru_cache  # a forward pass may set attributes
def _methods_with(kind: type, argument: str) -> str:
    """The public methods of the library's that take this keyword."""
    found = []
    for name, member in inspect.getmembers_static(kind, inspect.isfunction):
        if not name.startswith("_") and member.__module__.startswith(__package__):
            given = inspect.signature(member).parameters.get(argument)
            if given is not None and given.kind is given.KEYWORD_ONLY:
                found.append(name)
    return ", ".join(found)


def _options(values: Iterable[Any]) -> Iterator[str]:
    """The names of the options of all records among the values, and inside of them."""
    for value in values:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            yield from (*held, *_options(held.values()))

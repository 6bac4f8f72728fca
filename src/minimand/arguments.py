"""Errors about arguments, at the border between a user's code and the library."""

import functools
import inspect
import os
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, TypeVar, Union

import torch
from torch import Tensor

from .errors import CapabilityError, MinimandError, OptionError

__all__ = ["check_methods", "checked"]

F = TypeVar("F", bound=Callable[..., Any])

_KINDS: dict[Any, str] = {Tensor: "a tensor", float: "a number", int: "a whole number", str: "a string"}
_KINDS[bool] = "True or False"
_OURS = tuple(os.path.dirname(path) + os.sep for path in (__file__, str(torch.__file__)))
_STANDARD = os.path.dirname(inspect.__file__) + os.sep


def checked(function: F) -> F:
    """Answer wrong arguments of a function, or of a class's constructor, with an error of the library.

    What is annotated as ``bool`` must be True or False, since Python takes every object for one of them: a function
    in the place of ``bias`` would be ignored. Otherwise a call that succeeds is not affected. When it fails with an
    exception of Python or torch, the arguments are compared with the annotations, and
    :class:`~minimand.errors.CapabilityError` names the first that does not fit. If all fit,
    :class:`~minimand.errors.OptionError` repeats torch's reason with the shapes and types of the tensors. Exceptions
    from the caller's own code, such as a module's forward, pass through.

    >>> @checked
    ... def double(x: Tensor) -> Tensor:
    ...     return x.mul(2)
    >>> double("one")
    Traceback (most recent call last):
    minimand.errors.CapabilityError: double(x=…) takes a tensor, got a str
    """
    if isinstance(function, type):
        function.__init__ = checked(function.__init__)  # type: ignore[misc]
        return function

    @functools.wraps(function)
    def answering(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (MinimandError, torch.OutOfMemoryError):
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise _answer(function, args, kwargs, error) from error

    # Calls without flags are traced by torch.compile, which does not know signatures.
    signature = inspect.signature(function)
    flags = [name for name, parameter in signature.parameters.items() if parameter.annotation is bool]
    return typing.cast(F, _flagged(answering, signature, flags) if flags else answering)


def _flagged(function: Callable[..., Any], signature: inspect.Signature, flags: list[str]) -> Callable[..., Any]:
    """The function, which refuses other objects than True and False for its flags."""

    @functools.wraps(function)
    def checking(*args: Any, **kwargs: Any) -> Any:
        # Not bound: a call with other arguments than the function's gets Python's error, which names the function.
        given = dict(zip(signature.parameters, args, strict=False)) | kwargs
        for name in flags:
            _require_flag(function, args, name, given.get(name, False))
        return function(*args, **kwargs)

    return checking


def _require_flag(function: Callable[..., Any], args: tuple[Any, ...], name: str, value: Any) -> None:
    # The numbers 0 and 1, and numpy's booleans, say the same.
    if (
        value is not True
        and value is not False
        and not (type(value).__name__ in ("int", "bool_", "bool") and value in (0, 1))
    ):
        raise CapabilityError(f"{_named(function, args)}({name}=…) takes True or False, got {_kind(value)}")


def _named(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    return type(args[0]).__name__ if function.__name__ == "__init__" else function.__qualname__


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def check_methods(cls: type, *names: str) -> None:
    """Apply :func:`checked` to methods that a class defines itself."""
    for name in names:
        if name in vars(cls):
            setattr(cls, name, checked(vars(cls)[name]))


def _answer(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Exception:
    """The error to raise instead of ``error``; itself if the caller's code raised it."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
        hints = typing.get_type_hints(function)
    except (TypeError, NameError):
        return error  # a wrong number of arguments, which Python explains best
    name = _named(function, args)
    given = {key: value for key, value in bound.items() if key in hints and key != "self"}
    for key, value in given.items():
        if not _fits(value, hints[key]):
            return CapabilityError(f"{name}({key}=…) takes {_words(hints[key])}, got {_kind(value)}")
    if not _internal(error):
        return error
    several = ((key, each) for key, value in given.items() for each in (value if _holds_tensor(value) else [value]))
    described = (_described(key, value) for key, value in several)
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return OptionError(f"{name} cannot use its arguments ({', '.join(filter(None, described))}): {reason:.300}")


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, tuple | list) and any(isinstance(each, Tensor) for each in value)


def _described(key: str, value: Any) -> str:
    """An argument in an error message; empty for an object of which only the type matters."""
    if isinstance(value, Tensor):
        return f"{key} {tuple(value.shape)} {value.dtype} on {value.device}"
    return f"{key}={value!r:.40}" if isinstance(value, int | float | str | tuple) else ""


def _internal(error: Exception) -> bool:
    """Whether the exception comes from the library or torch, without a frame of other code in between."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return all(
        file.startswith((*_OURS, "<")) or (file.startswith(_STANDARD) and "site-packages" not in file) for file in files
    )


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the annotated kind; annotations that cannot be checked fit."""
    hint = hint.__bound__ if isinstance(hint, TypeVar) else hint
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts if isinstance(value, str | int | None) else False
    if origin is tuple:
        if not isinstance(value, tuple | list | torch.Size):
            return False
        kinds = parts[:1] * len(value) if parts[-1:] == (Ellipsis,) else parts
        return len(kinds) == len(value) and all(map(_fits, value, kinds))
    if hint is Any:
        return True
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool) and hasattr(value, "__float__")
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is not None and isinstance(origin, type):
        plain = isinstance(value, str) and issubclass(origin, Sequence)
        return isinstance(value, origin) and not plain
    return isinstance(value, hint) if isinstance(hint, type) and not getattr(hint, "_is_protocol", False) else True


def _words(hint: Any) -> str:
    """An annotation in words."""
    hint = hint.__bound__ if isinstance(hint, TypeVar) else hint
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(part) for part in parts if part is not type(None)))
    if origin is Literal:
        return ", ".join(repr(part) for part in parts)
    if origin is tuple:
        return "a tuple of whole numbers" if int in parts else "a tuple"
    if origin is Mapping:
        return "a dictionary"
    if origin in (Callable, Sequence):
        return "a function" if origin is Callable else "a list"
    return _KINDS.get(hint) or f"a {getattr(origin or hint, '__name__', str(hint))}"

"""Copies of networks that share the tensors."""

import copy
import functools
import inspect
import types
from typing import Any, TypeVar

from torch import Tensor, nn

from ...errors import ConversionError

__all__ = ["INTERNAL", "ORIGINAL", "clone"]

M = TypeVar("M", bound=nn.Module)
#: The attributes that every module has in its ``__dict__``.
INTERNAL = frozenset(vars(nn.Module()))
_TENSORS = ("_parameters", "_buffers")
#: The attribute of a solver layer that holds the layer it replaces.
ORIGINAL = "_minimand_original"


def clone(model: M) -> M:
    """Copy every module of ``model``; Parameters, buffers and tensors held as attributes are the same objects.

    Attributes are deep-copied, or shared if they cannot be copied. References between modules point to the copies.
    Hooks are shared, except hooks that are bound to a module of the network: these are bound to its copy.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> copied = clone(model)
    >>> copied[0] is model[0], copied[0].weight is model[0].weight
    (False, True)
    """
    modules = list(model.modules())
    modules += [vars(module)[ORIGINAL].module for module in modules if ORIGINAL in vars(module)]
    shells = [object.__new__(type(module)) for module in modules]
    memo: dict[int, Any] = {id(module): shell for module, shell in zip(modules, shells, strict=True)}
    for module in modules:
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(value, Tensor):
                memo[id(value)] = value
    inside = frozenset(map(id, modules))
    for module, shell in zip(modules, shells, strict=True):
        for name, value in vars(module).items():
            shell.__dict__[name] = _attribute(name, value, memo, inside)
    return memo[id(model)]


def _attribute(name: str, value: Any, memo: dict[int, Any], inside: frozenset[int]) -> Any:
    if name == "_compiled_call_impl":
        return None  # compiled for the original
    if name == "_modules":
        return {key: memo.get(id(child), child) for key, child in value.items()}
    if name in _TENSORS:
        return copy.copy(value)
    if name in INTERNAL and isinstance(value, dict):
        hooks = copy.copy(value)
        for key, hook in value.items():
            hooks[key] = _copied(hook, memo) if _bound(hook, inside) else hook
        return hooks
    return _copied(value, memo)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return _rebound(value, memo) if isinstance(value, types.FunctionType) else copy.deepcopy(value, memo)
    except ConversionError:  # an edited method must not stay bound to the original
        raise
    except Exception:  # locks, files and generators cannot be copied, and are shared
        return value


def _rebound(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    """A function that holds the copies of the modules that a function holds, such as a lambda in a constructor."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    held = {name: memo.get(id(value)) for name, value in inspect.getclosurevars(function).nonlocals.items()}
    cells |= {name: types.CellType(copied) for name, copied in held.items() if isinstance(copied, nn.Module)}
    space, defaults = function.__globals__, function.__defaults__
    made = types.FunctionType(function.__code__, space, function.__name__, defaults, tuple(cells.values()))
    made.__kwdefaults__ = function.__kwdefaults__
    return made if any(isinstance(copied, nn.Module) for copied in held.values()) else function


def _bound(hook: Any, inside: frozenset[int]) -> bool:
    """Whether a hook holds a module of the network."""
    if isinstance(hook, types.MethodType):
        return id(hook.__self__) in inside
    if isinstance(hook, functools.partial):
        parts = (*hook.args, *hook.keywords.values())
        return _bound(hook.func, inside) or any(id(part) in inside for part in parts)
    # torch's wrapper of hooks with a module argument supports copying.
    return type(hook).__name__ == "_WrappedHook"

"""A copy of a network whose modules are new and whose tensors are not."""

import copy
import functools
import types
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

__all__ = ["INTERNAL", "clone"]

M = TypeVar("M", bound=nn.Module)
#: What every module has in its ``__dict__``.
INTERNAL = frozenset(vars(nn.Module()))
_TENSORS = ("_parameters", "_buffers")


def clone(model: M) -> M:
    """Copy every module of ``model``; Parameters, buffers and tensors held as attributes are the same objects.

    Attributes are deep-copied (shared where they cannot be), references between the modules lead to the copies.
    Hooks are shared, unless they are bound to a module of the network: then they are bound to its copy.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> twin = clone(model)
    >>> twin[0] is model[0], twin[0].weight is model[0].weight
    (False, True)
    """
    modules = list(model.modules())
    shells = [object.__new__(type(module)) for module in modules]
    memo: dict[int, Any] = {id(module): shell for module, shell in zip(modules, shells, strict=True)}
    for module in modules:
        for value in (*_values(module, _TENSORS), *vars(module).values()):
            if isinstance(value, Tensor):
                memo[id(value)] = value
    inside = frozenset(map(id, modules))
    for module, shell in zip(modules, shells, strict=True):
        for name, value in vars(module).items():
            shell.__dict__[name] = _attribute(name, value, memo, inside)
    return memo[id(model)]


def _values(module: nn.Module, names: tuple[str, ...]) -> Iterator[Any]:
    for name in names:
        yield from vars(module)[name].values()


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
        return copy.deepcopy(value, memo)
    except Exception:  # locks, files, generators: whatever cannot be copied is shared
        return value


def _bound(hook: Any, inside: frozenset[int]) -> bool:
    """Whether a hook holds a module of the network."""
    if isinstance(hook, types.MethodType):
        return id(hook.__self__) in inside
    if isinstance(hook, functools.partial):
        parts = (*hook.args, *hook.keywords.values())
        return _bound(hook.func, inside) or any(id(part) in inside for part in parts)
    # torch wraps hooks that ask for their module; the wrapper knows how to be copied.
    return type(hook).__name__ == "_WrappedHook"

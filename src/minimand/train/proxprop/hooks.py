"""Hooks that have no effect in copies and pickles of the model or the optimizer."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Hook"]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The hook in a copy: no effect."""


def _none() -> Callable[..., Any]:
    return _nothing


class Hook:
    """A callable that is replaced by one without effect when it is copied or pickled."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the hooked function."""
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _none, ()

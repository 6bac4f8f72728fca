"""Hooks that a copy or a pickle of the model or the optimizer does not take along."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Hook"]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What remains of a hook in a copy."""


def _none() -> Callable[..., Any]:
    return _nothing


class Hook:
    """A callable that becomes one without effect when it is copied or pickled."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is hooked in."""
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _none, ()

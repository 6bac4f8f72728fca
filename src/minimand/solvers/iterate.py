"""The loop that runs every solver."""

from collections.abc import Callable
from typing import TypeVar

__all__ = ["iterate"]

State = TypeVar("State")


def iterate(
    step: Callable[[State, int], State],
    state: State,
    iterations: int,
    *,
    start: int = 0,
    until: Callable[[State, int], bool] | None = None,
) -> tuple[State, int]:
    """Apply ``state ← step(state, k)`` for k = start, start + 1, … and count.

    Without ``until`` the number of iterations is fixed, so that the loop can be exported, compiled and differentiated
    like straight-line code. With ``until`` the loop stops as soon as ``until(state, k + 1)`` is true.

    Returns the last state and the index after the last iteration.

    >>> iterate(lambda x, k: x + k, 0, 4)
    (6, 4)
    >>> iterate(lambda x, k: 2 * x, 1, 100, until=lambda x, done: x > 50)
    (64, 6)
    """
    k = start
    while k < start + iterations:
        state = step(state, k)
        k += 1
        if until is not None and until(state, k):
            break
    return state, k

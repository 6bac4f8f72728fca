"""Side by side with peers, in ratios: ``python -m benchmarks [name …]``.

A benchmark is a module of this package with a ``run() -> list[Row]``; it joins by existing. Ratios are taken in one
run on one thread, because absolute times do not travel between machines.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Row", "seconds"]


@dataclass(frozen=True)
class Row:
    """One measured ratio, and what it was to reach."""

    name: str
    ratio: float
    target: str
    met: bool
    note: str = ""


def at_least(name: str, ratio: float, target: float, note: str = "") -> Row:
    """A row whose ratio should be ``target`` or more."""
    return Row(name, ratio, f"≥ {target:g}", ratio >= target, note)


def at_most(name: str, ratio: float, target: float, note: str = "") -> Row:
    """A row whose ratio should be ``target`` or less."""
    return Row(name, ratio, f"≤ {target:g}", ratio <= target, note)


def reported(name: str, ratio: float, note: str = "") -> Row:
    """A row that was set no target."""
    return Row(name, ratio, "", True, note)


def seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """The median wall time of a call, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]

"""Run time and memory relative to peers: ``python -m benchmarks [name …]``.

A benchmark is a module of this package with a function ``run() -> list[Row]``. Ratios are measured in one process on
one thread, because absolute times differ between machines.
"""

import dataclasses
import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

__all__ = [
    "Ratio",
    "Row",
    "along",
    "at_least",
    "at_most",
    "in_turn",
    "peer",
    "ratio",
    "ratios",
    "reported",
    "skipped",
    "training_step",
]


_MOST_ROUNDS, _ENOUGH_SECONDS = 200, 3.0


class Ratio(NamedTuple):
    """One time over another: the median of the ratios of single rounds, and their interquartile range."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One measured ratio, its spread over the rounds, and its target.

    The ratio is None if a peer is missing. Rows of one name with an ``at`` are the points of a curve.
    """

    name: str
    ratio: float | None
    target: str
    met: bool
    note: str = ""
    spread: tuple[float, float] | None = None
    at: float | None = None


def at_least(name: str, ratio: float | Ratio, target: float, note: str = "") -> Row:
    """A row whose ratio should be ``target`` or more."""
    value, spread = _parts(ratio)
    return Row(name, value, f"≥ {target:g}", value >= target, note, spread)


def at_most(name: str, ratio: float | Ratio, target: float, note: str = "") -> Row:
    """A row whose ratio should be ``target`` or less."""
    value, spread = _parts(ratio)
    return Row(name, value, f"≤ {target:g}", value <= target, note, spread)


def reported(name: str, ratio: float | Ratio, note: str = "") -> Row:
    """A row without a target."""
    value, spread = _parts(ratio)
    return Row(name, value, "", True, note, spread)


def along(name: str, at: float, ratio: Ratio, note: str = "") -> Row:
    """A point of a curve."""
    return dataclasses.replace(reported(name, ratio, note), at=at)


def skipped(name: str, module: str) -> Row:
    """A row that was not measured, because the peer is not installed."""
    return Row(name, None, "", True, f"{module} is not installed: pip install -c constraints.txt . './papers[bench]'")


def peer(module: str) -> Any | None:
    """A peer's module, or None if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def in_turn(calls: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Seconds of each call in every round, after one warm-up round.

    There are ``rounds`` rounds; for short calls as many as take three seconds, up to 200. The calls take turns, so that
    a slower machine slows all of them. Processor time is measured, which on one thread does not depend on other load.
    """
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    while len(times[0]) < rounds or (len(times[0]) < _MOST_ROUNDS and sum(map(sum, times)) < _ENOUGH_SECONDS):
        for call, record in zip(calls, times, strict=True):
            begin = time.process_time()
            call()
            record.append(time.process_time() - begin)
    return times


def ratio(times: Sequence[float], base: Sequence[float], *, mean: bool = False) -> Ratio:
    """The ratio of seconds, round by round; with ``mean`` the ratio of the means, for rounds of unequal work."""
    single = sorted(ours / theirs for ours, theirs in zip(times, base, strict=True))
    quarter = len(single) // 4
    value = statistics.mean(times) / statistics.mean(base) if mean else statistics.median(single)
    return Ratio(value, single[quarter], single[-1 - quarter])


def ratios(base: Callable[[], object], others: Sequence[Callable[[], object]], rounds: int) -> list[Ratio]:
    """The time of each other call over the time of the first, measured in turn."""
    first, *rest = in_turn([base, *others], rounds)
    return [ratio(times, first) for times in rest]


def training_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Callable[[], None]:
    """One step of training a classifier on one batch."""

    def call() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return call


def _parts(ratio: float | Ratio) -> tuple[float, tuple[float, float] | None]:
    return (ratio.value, (ratio.low, ratio.high)) if isinstance(ratio, Ratio) else (float(ratio), None)

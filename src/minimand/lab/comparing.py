"""Saying what beats what: means with their spread, and no claim that the spread does not support."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from .experiment import Results

__all__ = ["mean_std", "verdict"]


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation; the latter is NaN for a single value, and where a value is not finite.

    >>> mean_std([1.0, 3.0])
    (2.0, 1.4142135623730951)
    """
    spread = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan
    return statistics.fmean(values), spread


def verdict(
    results: Results[Any], ours: str, other: str, key: str = "test", *, unit: str = " points", higher: bool = True
) -> str:
    """A sentence on two parts, by their difference in each seed and its spread.

    "Beats" needs a mean difference above its standard deviation over seeds, and at least two seeds.
    """
    gaps = results.paired(ours, other, key)
    if not gaps:
        return f"{ours} and {other} have not been measured together yet."
    mean, spread = mean_std(gaps)
    if not math.isfinite(mean):
        return f"{ours} or {other} diverged: there is no difference to speak of."
    size = f"{abs(mean):.2f}{unit}"
    word = "above" if mean > 0 else "below"
    if abs(mean) < 0.005 and not spread > 0.005:
        return f"{ours} equals {other}."
    if len(gaps) == 1:
        return f"{ours} is {size} {word} {other}, in one seed: no claim."
    if abs(mean) <= spread:
        return f"{ours} is {size} {word} {other} (± {spread:.2f} over {len(gaps)} seeds): within the spread, no claim."
    verb = "beats" if (mean > 0) == higher else "loses to"
    return f"{ours} {verb} {other} by {size} (± {spread:.2f} over {len(gaps)} seeds)."

"""Saying what beats what: means with their spread, and no claim that the spread does not support."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from .experiment import Results

__all__ = ["half_width", "mean_std", "verdict"]


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
    """A sentence on two parts, by their difference in each seed.

    "Beats" needs three seeds at least, and a 95 % interval of the mean difference (Student's, seeds paired) that leaves
    out zero: a mean of 2.5 standard deviations with three seeds, of 1.2 with five. A smaller one above its standard
    deviation is said to be. Two seeds whose differences happen to agree would look certain.
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
    over = f"(± {spread:.2f} over {len(gaps)} seeds)"
    if len(gaps) < 3 or abs(mean) <= half_width(spread, len(gaps)):
        return f"{ours} is {size} {word} {other} {over}: more than the spread, too few seeds for a claim."
    verb = "beats" if (mean > 0) == higher else "loses to"
    return f"{ours} {verb} {other} by {size} {over}."


def half_width(spread: float, count: int) -> float:
    """Of the 95 % interval of a mean of ``count`` numbers with the standard deviation ``spread``.

    >>> round(half_width(1.0, 3), 2)
    2.48
    """
    from scipy.stats import t

    return float(t.ppf(0.975, count - 1)) * spread / math.sqrt(count)

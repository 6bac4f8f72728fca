"""Differences between two parts of an experiment: paired by seed, with their spread and a test."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal

from .experiment import Results

__all__ = ["LEGEND", "Difference", "Outcome", "difference", "half_width", "mean_std"]

Outcome = Literal["better", "worse", "equal", "open", "diverged", "not measured"]

LEGEND = (
    "Differences are paired by seed, ± is their standard deviation. “better” and “worse” need at least three seeds and "
    "a 95 % interval of the mean difference that excludes zero. “open” is everything else: one or two seeds, or an "
    "interval that includes zero."
)
"""What the last column of a table of differences means."""


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation; the latter is NaN for a single value, or if a value is not finite.

    >>> mean_std([1.0, 3.0])
    (2.0, 1.4142135623730951)
    """
    spread = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan
    return statistics.fmean(values), spread


def half_width(spread: float, count: int) -> float:
    """Half the 95 % interval (Student's t) of a mean of ``count`` numbers with standard deviation ``spread``.

    >>> round(half_width(1.0, 3), 2)
    2.48
    """
    from scipy.stats import t

    return float(t.ppf(0.975, count - 1)) * spread / math.sqrt(count)


@dataclasses.dataclass(frozen=True)
class Difference:
    """How one part differs from another in one quantity.

    Args:
        ours: The part.
        other: The part that it is compared with.
        gaps: The last value of ``ours`` minus that of ``other``, one per seed.
        unit: Written behind the number.
        higher: Whether a larger value is better.
        quantity: What is compared; empty: the experiment's main number.
    """

    ours: str
    other: str
    gaps: tuple[float, ...]
    unit: str = " points"
    higher: bool = True
    quantity: str = ""

    @property
    def outcome(self) -> Outcome:
        """Whether ``ours`` is better; see :data:`LEGEND`.

        >>> Difference("a", "b", (10.0, 9.5, 10.0)).outcome, Difference("a", "b", (10.0, 10.0)).outcome
        ('better', 'open')
        """
        if not self.gaps:
            return "not measured"
        mean, spread = mean_std(self.gaps)
        if not math.isfinite(mean):
            return "diverged"
        if abs(mean) < 0.005 and not spread > 0.005:
            return "equal"
        count = len(self.gaps)
        if count < 3 or abs(mean) <= half_width(spread, count):
            return "open"
        return "better" if (mean > 0) == self.higher else "worse"

    @property
    def mean(self) -> float:
        """The mean over the seeds; NaN if there are none."""
        return mean_std(self.gaps)[0] if self.gaps else math.nan

    @property
    def size(self) -> str:
        """The mean difference with its spread, as text.

        >>> Difference("a", "b", (1.0, 2.0), " dB").size
        '+1.50 ± 0.71 dB'
        """
        if self.outcome in ("not measured", "diverged"):
            return "–"
        mean, spread = mean_std(self.gaps)
        return f"{mean:+.2f}".replace("-", "−") + (f" ± {spread:.2f}" if len(self.gaps) > 1 else "") + self.unit

    def __str__(self) -> str:
        """One sentence."""
        about = f"{self.quantity}: " if self.quantity else ""
        seeds = "1 seed" if len(self.gaps) == 1 else f"{len(self.gaps)} seeds"
        match self.outcome:
            case "not measured":
                return f"{about}{self.ours} and {self.other} have no seed in common yet."
            case "diverged":
                return f"{about}{self.ours} or {self.other} diverged in at least one seed."
            case "equal":
                return f"{about}{self.ours} equals {self.other} ({seeds})."
            case "open":
                return f"{about}{self.ours} − {self.other} = {self.size} ({seeds}): open."
        verb = "beats" if self.outcome == "better" else "loses to"
        return f"{about}{self.ours} {verb} {self.other}: {self.size} ({seeds})."


def difference(
    results: Results[Any],
    ours: str,
    other: str,
    key: str = "test",
    *,
    unit: str = " points",
    higher: bool = True,
    quantity: str = "",
) -> Difference:
    """The difference of two parts in the last value of ``key``, over the seeds that both have."""
    return Difference(ours, other, tuple(results.paired(ours, other, key)), unit, higher, quantity)

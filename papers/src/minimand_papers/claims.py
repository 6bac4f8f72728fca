"""From measurements to a verdict on a source's claim, by fixed rules.

A claim is judged cell by cell (a cell is one network, rate or task of a table), then the cells are combined.

- A **difference** (:func:`judge_gain`) is *reproduced* with at least three seeds, a 95 % interval of the mean paired
  difference that excludes zero on the claimed side, and at least half the source's size where the source gives one.
  It is *partly* reproduced with the claimed sign and a mean above the standard deviation, if seeds, interval or size
  fall short. With one seed it is at most *partly*, and only above a size that the experiment states as larger than
  the usual variation between seeds. Otherwise it is *not* reproduced.
- **No loss** (:func:`judge_parity`) is *reproduced* with at least three seeds if the mean shortfall is at most one
  standard deviation, *not* if the 95 % interval excludes zero on the losing side, else *partly*.
- A **bound** (:func:`judge_bound`), for example a theorem's, has to hold in every seed; it is *partly* reproduced if it
  holds in at least half of them. It is not a statement about a mean, so one seed is enough.
- A **certificate** (:func:`judge_certificates`) is *reproduced* if every fit is certified, *partly* if at least half of
  the fits are, or if every gap is at most 1 % of the objective, else *not*.
- Cells are combined (:func:`combine`) to *reproduced* if all are, *partly* if at least half are at least partly
  reproduced, else *not*. Without measurements the claim is *not run*.

Runs of the preset ``smoke`` support no verdict. The scale of a run is part of its row.
"""

import math
from collections.abc import Sequence
from typing import Any

from .comparing import half_width, mean_std
from .experiment import Claim, Results, Verdict

__all__ = [
    "ACCURACY",
    "combine",
    "judge_bound",
    "judge_certificates",
    "judge_gain",
    "judge_parity",
    "not_run",
    "scale",
    "signed",
    "span",
]

# A difference that one seed may support: well above the variation between seeds of the networks here.
ACCURACY = 3.0


def judge_gain(gains: Sequence[float], size: float | None = None, *, single: float = math.inf) -> Verdict:
    """Whether a claimed difference is there.

    >>> judge_gain([10.0, 10.5, 9.8], 8.5), judge_gain([10.0, 10.5, 9.8], 30.0), judge_gain([10.0, 10.5], 8.5)
    ('reproduced', 'partly', 'partly')
    >>> judge_gain([-1.0, -1.2, -1.1]), judge_gain([0.3], single=0.5), judge_gain([2.1], single=0.5), judge_gain([])
    ('not', 'not', 'partly', 'not run')

    Args:
        gains: One difference per seed, positive in the claimed direction.
        size: The source's difference, positive; None: it has none.
        single: With one seed, the size from which on the difference counts as partly reproduced.
    """
    if not gains:
        return "not run"
    mean, spread = mean_std(gains)
    if not math.isfinite(mean) or mean <= 0:
        return "not"
    if len(gains) == 1:
        return "partly" if mean >= single else "not"
    if mean <= spread:
        return "not"
    sure = len(gains) >= 3 and mean > half_width(spread, len(gains))
    return "reproduced" if sure and (size is None or mean >= size / 2) else "partly"


def judge_parity(gains: Sequence[float]) -> Verdict:
    """Whether a method is no worse than another; ``gains`` as in :func:`judge_gain`.

    >>> judge_parity([0.1, -0.2, 0.0]), judge_parity([-2.0, -2.1, -2.2]), judge_parity([0.1])
    ('reproduced', 'not', 'partly')
    """
    if not gains:
        return "not run"
    mean, spread = mean_std(gains)
    if not math.isfinite(mean):
        return "not"
    if len(gains) == 1:
        return "partly" if mean >= 0 else "not"
    if mean < 0 and -mean > half_width(spread, len(gains)):
        return "not"
    return "reproduced" if len(gains) >= 3 and -mean <= spread else "partly"


def judge_bound(values: Sequence[float], limit: float) -> Verdict:
    """Whether values are at most ``limit``.

    >>> judge_bound([0.1, 0.2], 1.0), judge_bound([0.1, 2.0], 1.0), judge_bound([2.0], 1.0)
    ('reproduced', 'partly', 'not')
    """
    return combine(["reproduced" if value <= limit else "not" for value in values])


def judge_certificates(statuses: Sequence[str], gaps: Sequence[float]) -> Verdict:
    """Whether fits are certified; ``gaps`` are in per cent of the objective.

    >>> judge_certificates(["CERTIFIED", "UNDECIDED"], [0.1, 5.0]), judge_certificates(["UNDECIDED"], [5.0])
    ('partly', 'not')
    """
    found = combine(["reproduced" if status == "CERTIFIED" else "not" for status in statuses])
    return "partly" if found == "not" and max(gaps) <= 1 else found


def combine(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict for several cells; those that were not run are left out.

    >>> combine(["reproduced", "partly"]), combine(["partly", "not", "not"]), combine(["not run"])
    ('partly', 'not', 'not run')
    """
    known = [verdict for verdict in verdicts if verdict != "not run"]
    if not known:
        return "not run"
    if all(verdict == "reproduced" for verdict in known):
        return "reproduced"
    return "partly" if 2 * sum(verdict != "not" for verdict in known) >= len(known) else "not"


def not_run(text: str, paper: str, why: str) -> Claim:
    """A claim without measurements; ``why`` stands in the place of the scale."""
    return Claim(text, paper, "–", why, "not run")


def scale(results: Results[Any], *words: str) -> str:
    """Preset, reductions against the source, and the number of seeds."""
    seeds = {seed for runs in results.records.values() for seed, records in runs.items() if records}
    return ", ".join([results.preset, *words, f"{len(seeds)} seed{'s' * (len(seeds) != 1)}"])


def signed(values: Sequence[float], unit: str = " points", digits: int = 2) -> str:
    """A mean difference with its spread.

    >>> signed([1.0, 2.0], " dB"), signed([-0.4])
    ('+1.50 ± 0.71 dB', '−0.40 points')
    """
    if not values:
        return "–"
    mean, spread = mean_std(values)
    text = f"{mean:+.{digits}f}".replace("-", "−")
    return text + ("" if math.isnan(spread) else f" ± {spread:.{digits}f}") + unit


def span(values: Sequence[float], unit: str = "", digits: int = 1, *, plus: bool = False) -> str:
    """The smallest and the largest of several means.

    >>> span([96.66, 98.12], " %"), span([2.1, -1.0], " dB", plus=True)
    ('96.7 to 98.1 %', '−1.0 to +2.1 dB')
    """
    if not values:
        return "–"
    kind = f"{'+' if plus else ''}.{digits}f"
    ends = list(dict.fromkeys(f"{end:{kind}}".replace("-", "−") for end in (min(values), max(values))))
    return " to ".join(ends) + unit

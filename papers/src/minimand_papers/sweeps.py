"""The range of learning rates that work: a result of its own beside the accuracy at the best rate."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from .drawing import COLORS, figure, logarithmic, style
from .experiment import Plot

__all__ = ["Sweep", "best_of", "edges", "range_plot", "shares", "usable"]

#: The accuracies of several seeds at each learning rate.
Sweep = Mapping[float, Sequence[float]]


def best_of(sweeps: Iterable[Sweep]) -> float:
    """The best mean accuracy at any rate; NaN without measurements.

    >>> best_of([{0.1: [1.0, 3.0]}, {0.1: [0.0], 1.0: [5.0]}])
    5.0
    """
    return max((statistics.fmean(values) for sweep in sweeps for values in sweep.values()), default=float("nan"))


def usable(sweep: Sweep, best: float) -> tuple[float, float] | None:
    """The mean accuracy over all rates, and the share of the rates within a point of ``best``; None if there are none.

    >>> usable({0.1: [90.0], 1.0: [10.0]}, 90.5)
    (50.0, 0.5)
    """
    means = [statistics.fmean(values) for values in sweep.values()]
    return (statistics.fmean(means), sum(mean >= best - 1 for mean in means) / len(means)) if means else None


def shares(sweeps: Mapping[str, Sweep]) -> str:
    """The shares of the rates that work, method by method, as a sentence's end; empty without measurements."""
    best = best_of(sweeps.values())
    found = {method: usable(sweep, best) for method, sweep in sweeps.items()}
    return "; ".join(f"{method} {one[1]:.0%}, mean {one[0]:.1f} %" for method, one in found.items() if one is not None)


def edges(sweeps: Mapping[str, Sweep]) -> str:
    """The methods whose best mean is at the first or last rate, as a sentence; empty if there are none.

    >>> edges({"a": {0.1: [90.0], 1.0: [80.0], 10.0: [70.0]}, "b": {0.1: [1.0], 1.0: [2.0], 10.0: [0.0]}})
    'Best at the edge of the grid, where a wider one may give more: a at 0.1.'
    """
    best = {method: max(sweep, key=lambda r: statistics.fmean(sweep[r])) for method, sweep in sweeps.items() if sweep}
    found = [f"{m} at {rate:g}" for m, rate in best.items() if rate in (min(sweeps[m]), max(sweeps[m]))]
    return f"Best at the edge of the grid, where a wider one may give more: {', '.join(found)}." if found else ""


def range_plot(title: str, sweeps: Mapping[str, Sweep], y: str = "test accuracy, %", x: str = "learning rate") -> Plot:
    """Accuracy over the learning rate, one line per method, with a band from the smallest to the largest."""
    canvas = figure()
    axes = canvas.subplots()
    sentences = []
    for color, (method, sweep) in zip(COLORS, sweeps.items(), strict=False):
        if not sweep:
            continue
        means = [statistics.fmean(values) for values in sweep.values()]
        axes.plot(list(sweep), means, color=color, marker="o", label=method)
        low, high = [min(values) for values in sweep.values()], [max(values) for values in sweep.values()]
        axes.fill_between(list(sweep), low, high, color=color, alpha=0.18, linewidth=0)
        shown = ", ".join(f"{mean:.1f} at {rate:g}" for rate, mean in zip(sweep, means, strict=True))
        sentences.append(f"{method}: {shown}")
    style(axes, x, y, title)
    if sentences:
        logarithmic(axes, "x")
        axes.legend(frameon=False)
    return Plot(title, "; ".join(sentences) or "nothing measured yet", canvas)

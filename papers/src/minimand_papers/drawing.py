"""Plots for the experiments, in colours that are safe for colour-blind readers."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .comparing import mean_std
from .experiment import Comparison, Plot, Results

__all__ = ["COLORS", "bars", "curves", "dots", "figure", "logarithmic", "style"]

# Okabe–Ito without its yellow, which vanishes on white, and its black, which vanishes on a dark page.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#999999", "#B15928", "#6A9F3C")


def figure(width: float = 7.0, height: float = 4.0) -> Any:
    """An empty figure."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def style(axes: Any, x: str, y: str, title: str = "") -> None:
    """Labels, a light grid, no box."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if title:
        axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def logarithmic(axes: Any, which: str) -> None:
    """Make the axis "x" or "y" logarithmic; within two decades it has ticks at 1, 2 and 5."""
    from matplotlib import ticker

    axis = getattr(axes, f"{which}axis")
    getattr(axes, f"set_{which}scale")("log")
    low, high = getattr(axes, f"get_{which}lim")()
    if high < 100 * low:
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.set_minor_formatter(ticker.NullFormatter())


def curves(
    results: Results[Any],
    parts: Sequence[str] | None = None,
    *,
    key: str,
    over: str = "epoch",
    title: str,
    y: str,
    x: str | None = None,
    log: bool = False,
    dashed: Sequence[str] = (),
    shown: Callable[[float], float] = float,
) -> Plot:
    """One line per part: the mean of ``shown(key)`` over seeds, with a band from the smallest to the largest."""
    drawn = figure()
    axes = drawn.subplots()
    ends = []
    for number, part in enumerate(parts if parts is not None else results.parts()):
        ours, places = results.curve(part, key), results.curve(part, over)
        runs = [(places[seed][: len(values)], values) for seed, values in ours.items() if values]
        if not runs:
            continue
        length = min(len(values) for _, values in runs)
        at = [sum(where[i] for where, _ in runs) / len(runs) for i in range(length)]
        columns = [[shown(values[i]) for _, values in runs] for i in range(length)]
        mean = [sum(column) / len(column) for column in columns]
        color = COLORS[number % len(COLORS)]
        line = "--" if part in dashed else "-"
        marker = "o" if length == 1 else None
        axes.plot(at, mean, line, color=color, label=part, linewidth=1.6, marker=marker)
        if len(runs) > 1:
            low, high = [min(column) for column in columns], [max(column) for column in columns]
            axes.fill_between(at, low, high, color=color, alpha=0.18, linewidth=0)
        ends.append(f"{part} {mean[-1]:.4g}")
    if log:
        logarithmic(axes, "y")
    style(axes, x or over, y, title)
    if ends:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return Plot(title, f"{y} over {x or over}; at the end: {', '.join(ends) or 'nothing measured yet'}", drawn)


def bars(rows: Sequence[Comparison], *, title: str, y: str, groups: Mapping[str, str] | None = None) -> Plot:
    """Bars of the measured means with their spread, and the source's numbers as lines."""
    drawn = figure(7.0, 0.42 * len(rows) + 1.4)
    axes = drawn.subplots()
    sentences = []
    for number, row in enumerate(rows):
        if row.measured:
            mean, spread = mean_std(row.measured)
            color = COLORS[number % 2] if groups is None else groups.get(row.label, COLORS[7])
            axes.barh(number, mean, color=color, height=0.6, xerr=None if spread != spread else spread)
            sentences.append(f"{row.label} {mean:.{row.digits}f}{row.unit}")
        if row.paper is not None:
            axes.plot([row.paper] * 2, [number - 0.42, number + 0.42], color="#CC79A7", linewidth=2.5)
    axes.set_yticks(range(len(rows)), [textwrap.fill(row.label, 48) for row in rows])
    axes.invert_yaxis()
    key = " (bars: measured; lines: the source)" if any(row.paper is not None for row in rows) else ""
    style(axes, f"{y}{key}", "", title)
    return Plot(title, f"{y}: {', '.join(sentences) or 'nothing measured yet'}", drawn)


def dots(rows: Mapping[str, Mapping[str, Sequence[float]]], *, title: str, x: str, log: bool = False) -> Plot:
    """One row per label with a dot for the mean of each series and its spread; the axis need not start at zero."""
    drawn = figure(7.0, 0.42 * len(rows) + 1.6)
    axes = drawn.subplots()
    names = list(dict.fromkeys(name for row in rows.values() for name, values in row.items() if values))
    sentences = []
    for name, color, marker in zip(names, COLORS, "osD^v<>pP*", strict=False):
        at = [(number, *mean_std(row[name])) for number, row in enumerate(rows.values()) if row.get(name)]
        places, means, spreads = zip(*at, strict=True)
        error = [0.0 if spread != spread else spread for spread in spreads]
        axes.errorbar(means, places, xerr=error, color=color, marker=marker, linestyle="", label=name, alpha=0.85)
        sentences += [f"{list(rows)[number]}, {name}: {mean:.2f}" for number, mean, _ in at]
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    if log:
        logarithmic(axes, "x")
    style(axes, x, "", title)
    if names:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return Plot(title, f"{x}: {', '.join(sentences) or 'nothing measured yet'}", drawn)

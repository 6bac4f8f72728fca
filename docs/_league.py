"""The league table of the documentation, from the committed ``benchmarks/results/*.json``: tables and curves."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

TITLES = {
    "layers": (
        "Solver layers",
        "Time and memory of forward and backward pass, relative to dropout → linear or convolution → ReLU.",
    ),
    "lipschitz": (
        "Norms of convolutions",
        "Speed and tightness of the bounds, and the cost of tracking a bound during training.",
    ),
    "proxprop": (
        "Proximal backpropagation",
        "Time of a training step, relative to the same step by plain backpropagation.",
    ),
    "lifted": ("Training without backpropagation", "Time and memory of LPOM, relative to SGD."),
    "blocks": (
        "Networks that are algorithms",
        "Step time and memory held for the backward pass, relative to the plain network.",
    ),
    "unrolled": (
        "Unrolled reconstruction",
        "Training steps of ISTA-Net as in the paper, relative to ours; inference of RidgeNet, relative to ISTA-Net+.",
    ),
    "factor": (
        "Factorisations",
        "Time against scikit-learn, SoftImpute, tensorly and singular values.",
    ),
    "ranks": (
        "Factorisations over several processes",
        "Processor time of a sweep of the slowest process, relative to one process.",
    ),
    "solve": (
        "Composite problems",
        "Time of ``solve`` without options, relative to other libraries at the same duality gap; layers, relative to "
        "the plain block.",
    ),
    "imports": ("Import time", "Import time relative to the packages that the library imports."),
    "scaling": ("How costs grow", "Ratios over problem size; bars show the middle half of the rounds."),
}


def write(results: Path, out: Path) -> None:
    """One reST file to include, and the pictures beside it."""
    out.mkdir(exist_ok=True)
    lines: list[str] = []
    for name, (title, about) in TITLES.items():
        paths = [*results.glob(f"{name}.json"), *sorted(results.glob(f"{name}-*.json"))]
        lines += [title, "-" * len(title), "", about, ""] if paths else []
        for number, path in enumerate(paths):
            lines += ["The same on another processor:", ""] if number else []
            lines += _section(path.stem, json.loads(path.read_text()), out)
    (out / "league.rst").write_text("\n".join(lines) + "\n")


def _section(name: str, record: dict[str, Any], out: Path) -> Iterator[str]:
    rows = [row for row in record["rows"] if row.get("at") is None]
    if rows:
        yield from _table(rows)
    curves: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in record["rows"]:
        if row.get("at") is not None:
            axis, _, series = row["name"].partition(": ")
            curves.setdefault(axis, {}).setdefault(series, []).append(row)
    for number, (axis, series) in enumerate(curves.items()):
        file = out / f"{name}-{number}.svg"
        _draw(axis, series).savefig(file)
        said = "; ".join(
            f"{label}: {points[0]['ratio']:.3g} to {points[-1]['ratio']:.3g}" for label, points in series.items()
        )
        yield from (f".. image:: {out.name}/{file.name}", f"    :alt: Cost over {axis}. {said}", "    :width: 90 %", "")
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
    machine = " ".join(filter(None, (record["machine"], record.get("processor"), record["capability"])))
    yield f"*{versions}; Python {record['python']}, {machine}, one thread.*"
    yield ""


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield from (".. list-table::", "    :header-rows: 1", "    :widths: 46 12 14 10 28", "")
    yield from _row(["what", "ratio", "middle half", "target", "remark"])
    for row in rows:
        value = "–" if row["ratio"] is None else f"{row['ratio']:.3g}"
        spread = "" if row["spread"] is None else "{:.3g} – {:.3g}".format(*row["spread"])
        target = row["target"] if row["met"] or not row["target"] else f"{row['target']} **missed**"
        yield from _row([row["name"], value, spread, target, row["note"]])
    yield ""


def _row(cells: list[str]) -> Iterator[str]:
    for place, cell in enumerate(cells):
        # Names hold reST's own signs, such as those of an absolute value.
        text = cell if "**missed**" in cell else cell.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*")
        yield f"    {'*' if place == 0 else ' '} - {text}".rstrip()


def _draw(axis: str, series: dict[str, list[dict[str, Any]]]) -> Figure:
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for colour, (label, points) in zip(("#0072B2", "#D55E00", "#009E73"), series.items(), strict=False):
        x, y = ([point[key] for point in points] for key in ("at", "ratio"))
        low, high = zip(*(point["spread"] for point in points), strict=True)
        below = [max(0.0, b - a) for a, b in zip(low, y, strict=True)]
        above = [max(0.0, b - a) for a, b in zip(y, high, strict=True)]
        axes.errorbar(x, y, [below, above], color=colour, marker="o", capsize=3, label=label)
    axes.set(xscale="log", yscale="log", xlabel=axis, ylabel="ratio")
    axes.set_xticks(x, [f"{value:g}" for value in x])
    axes.minorticks_off()
    axes.axhline(1, color="#888888", linewidth=0.8)
    axes.legend(frameon=False, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure

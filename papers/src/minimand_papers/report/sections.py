"""One experiment in the report: rows with their spread, differences, claims, pictures as SVG, and the protocol."""

import dataclasses
import io
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minimand.errors import MinimandError

from ..comparing import Difference, mean_std
from ..experiment import PRESETS, Claim, Comparison, Experiment, Plot, Results
from ..registry import experiments, source_of
from ..results import RESULT, read_results
from ..store import slug

__all__ = ["Picture", "Row", "Section", "complaint", "folders", "section", "sections"]

# Plots are drawn in this colour; in the page it is replaced by the colour of the text.
_INK = "#123456"
# A sentence about a file that cannot be shown is cut after so many letters.
_LONGEST = 500


@dataclasses.dataclass(frozen=True)
class Row:
    """A comparison as text; columns are sorted by ``order`` and ``paper_order``."""

    label: str
    paper: str
    measured: str
    order: float
    paper_order: float
    seeds: int
    note: str


@dataclasses.dataclass(frozen=True)
class Picture:
    """An SVG with its title and text alternative."""

    title: str
    alt: str
    svg: str


@dataclasses.dataclass(frozen=True)
class Section:
    """One experiment at one preset."""

    name: str
    title: str
    source: str
    about: str
    preset: str
    changed: dict[str, Any]
    missing: list[str]
    complete: bool
    rows: list[Row]
    differences: list[Difference]
    findings: list[str]
    claims: list[Claim]
    pictures: list[Picture]
    protocol: list[tuple[str, str]]
    command: str
    number: int = 1

    @property
    def anchor(self) -> str:
        """The section's id in a page: the experiment's name at the preset laptop, with what differs behind it."""
        preset = "" if self.preset == "laptop" else f"-{self.preset}"
        data = f"-{self.changed['dataset']}" if "dataset" in self.changed else ""
        return slug(self.name + preset + data + (f"-{self.number}" if self.number > 1 else ""))

    @property
    def key(self) -> str:
        """The citation key of the source; empty for a user's experiment."""
        source = source_of(self.name)
        return "" if source is None else source.key

    @property
    def quantities(self) -> bool:
        """Whether the differences name what they compare."""
        return any(difference.quantity for difference in self.differences)

    @property
    def scale(self) -> str:
        """The preset and the options that differ from it."""
        return ", ".join([self.preset, *(f"{key} = {_plain(value)}" for key, value in self.changed.items())])


def sections(
    out: Path, *, pictures: bool = True, own: Sequence[Experiment[Any]] = ()
) -> tuple[list[Section], list[str]]:
    """A section for every result below ``out``, and a sentence for every file that cannot be read.

    ``own``: the experiments that come from files of the user.
    """
    found, problems = [], []
    for folder in folders(out):
        try:
            found.append(section(folder, pictures=pictures, own=own))
        except Exception as error:  # an experiment meets the values of somebody's file with whatever they lead to
            problems.append(complaint(folder, error))
    order = [experiment.name for experiment in experiments()]
    found.sort(key=lambda section: order.index(section.name) if section.name in order else len(order))
    anchors = [section.anchor for section in found]
    numbers = [anchors[:place].count(anchor) + 1 for place, anchor in enumerate(anchors)]
    return [dataclasses.replace(s, number=number) for s, number in zip(found, numbers, strict=True)], problems


def folders(out: Path) -> list[Path]:
    """The folders below ``out`` with a result; runs that were moved aside are left out."""
    found = [path.parent for path in sorted(out.glob(f"*/*/{RESULT}"))]
    return [folder for folder in found if folder.name.split("-")[0] in PRESETS and ".old" not in folder.name]


def complaint(folder: Path, error: Exception) -> str:
    """A sentence about a result that cannot be shown."""
    why = str(error) if isinstance(error, MinimandError) else f"its values do not fit ({error!r})"
    return f"{folder / RESULT} cannot be shown: {' '.join(why.split())[:_LONGEST]}"


def section(directory: Path, *, pictures: bool = True, own: Sequence[Experiment[Any]] = ()) -> Section:
    """The section of one result file."""
    experiment, results, stored = read_results(directory, own)
    place = slug(
        f"{experiment.name}-{directory.name}"
    )  # the folder's name is anybody's, and goes into the page as it is
    preset = experiment.preset(results.preset)
    usual = dataclasses.asdict(preset.options)
    changed = {key: value for key, value in dataclasses.asdict(results.options).items() if value != usual[key]}
    again = ["minimand", "run", stored.get("file") or experiment.name, "--preset", results.preset]
    again += [word for key, value in changed.items() for word in _flag(key, value)]
    if tuple(stored["seeds"]) != preset.seeds:
        again += ["--seed", *map(str, stored["seeds"])]
    drawn = _pictures(experiment, results, place) if pictures else []
    findings, seeds = experiment.findings(results), set(stored["seeds"])
    return Section(
        experiment.name,
        experiment.title,
        experiment.source,
        experiment.about,
        results.preset,
        changed,
        [p.name for p in experiment.parts(results.options) if not seeds <= results.records.get(p.name, {}).keys()],
        stored["complete"],
        [_row(comparison) for comparison in experiment.compare(results)],
        [finding for finding in findings if isinstance(finding, Difference)],
        [finding for finding in findings if isinstance(finding, str)],
        list(experiment.claims(results)),
        drawn,
        _protocol(stored),
        shlex.join(again),
    )


def _flag(key: str, value: Any) -> list[str]:
    """An option in the form of the command line."""
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]


def _number(value: float, digits: int, unit: str) -> str:
    if not math.isfinite(value):
        # A time is infinite if the target was never reached.
        return "never" if value == math.inf else "diverged"
    return f"{value:.{digits}f}{unit}"


def _row(comparison: Comparison) -> Row:
    measured, order = "not measured", -math.inf
    values = list(comparison.measured)
    if values:
        mean, spread = mean_std(values)
        order = mean if math.isfinite(mean) else -math.inf
        measured = _number(mean, comparison.digits, comparison.unit)
        if math.isfinite(mean) and len(values) > 1:
            measured += f" ± {spread:.{comparison.digits}f}"
    paper = comparison.paper
    shown = "–" if paper is None else _number(paper, comparison.digits, comparison.unit)
    return Row(
        comparison.label, shown, measured, order, -math.inf if paper is None else paper, len(values), comparison.note
    )


def _protocol(stored: dict[str, Any]) -> list[tuple[str, str]]:
    minutes = stored["seconds"] / 60
    options = ", ".join(f"{key} = {_plain(value)}" for key, value in stored["options"].items())
    versions = ", ".join(f"{name} {version}" for name, version in stored["versions"].items())
    time = f"{minutes:.1f} minutes" if minutes >= 1 else f"{stored['seconds']:.0f} seconds"
    return [
        ("options", options),
        ("seeds", ", ".join(map(str, stored["seeds"]))),
        ("time", f"{time} on {stored['device']}, {stored['threads']} thread(s) per part, summed over parts and seeds"),
        ("versions", versions),
    ]


def _plain(value: Any) -> str:
    return " / ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _pictures(experiment: Experiment[Any], results: Results[Any], place: str) -> list[Picture]:
    """The pictures of an experiment, in matplotlib's own style."""
    import matplotlib as mpl

    with mpl.rc_context():
        # A matplotlibrc in the current folder, which may be somebody's results, could have LaTeX run on their texts.
        mpl.rcdefaults()
        return [_picture(plot, f"{place}-{number}-") for number, plot in enumerate(experiment.plots(results), 1)]


def _picture(plot: Plot, prefix: str) -> Picture:
    """A plot as SVG: text stays text, and lines in the ink colour take the page's text colour."""
    import matplotlib as mpl

    for axes in plot.figure.axes:
        _recolor(axes)
    for text in plot.figure.texts:
        text.set_color(_INK)
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.title}):
        plot.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    # Without a fixed size the picture shrinks with the page. The alternative text is on the enclosing element.
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt" ', 'aria-hidden="true" ', svg, count=1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return Picture(plot.title, plot.alt, _own_ids(svg, prefix))


def _recolor(axes: Any) -> None:
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts):
        text.set_color(_INK)
    axes.tick_params(colors=_INK, which="both")
    for spine in axes.spines.values():
        spine.set_edgecolor(_INK)
    legend = axes.get_legend()
    if legend is not None:
        for text in legend.get_texts():
            text.set_color(_INK)


def _own_ids(svg: str, prefix: str) -> str:
    """Make ids unique, because all pictures are in one page."""
    for pattern in (r'id="', r'href="#', r"url\(#"):
        svg = re.sub(pattern, lambda match: match.group(0) + prefix, svg)
    return svg

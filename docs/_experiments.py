"""Pages made from committed results: the lineage's table of experiments, and one results page per source."""

import json
from pathlib import Path

from minimand_papers.registry import experiments
from minimand_papers.report.blocks import as_rst
from minimand_papers.report.pages import claims_of, counts, drawings, page_of
from minimand_papers.report.sections import sections
from minimand_papers.sources import SOURCES

# Labels of the sections on the results pages.
PREFIX = "result-"


def write(results: Path, out: Path) -> None:
    """Write the reST files that the pages include."""
    (out / "results").mkdir(parents=True, exist_ok=True)
    found, problems = sections(results)
    if problems:
        raise RuntimeError("; ".join(problems))
    for source in SOURCES.values():
        own = [section for section in found if section.name in source.experiments]
        for section in own:
            for name, picture in zip(drawings(section), section.pictures, strict=True):
                # An image in a file of its own does not know the colour of the page's text.
                svg = picture.svg.replace("currentColor", "#808080")
                (out / "results" / name).write_text(svg, encoding="utf-8")
        page = as_rst(page_of(source, own), PREFIX).replace(".. figure:: ", f".. figure:: /{out.name}/results/")
        (out / "results" / f"{source.folder}.rst").write_text(page, encoding="utf-8")
    rows = [
        [f":doc:`{source.short} <results/{source.folder}>`", counts(claims_of(source, found))]
        for source in SOURCES.values()
    ]
    (out / "verdicts.rst").write_text(_table(("source", "claims"), rows, (30, 70)), encoding="utf-8")
    anchors = {section.name: section.anchor for section in reversed(found)}
    lines = [
        [experiment.source, f"``{experiment.name}``", _result(results / experiment.name, anchors.get(experiment.name))]
        for experiment in experiments()
    ]
    head = ("source", "``minimand run``", "committed result")
    (out / "experiments.rst").write_text(_table(head, lines, (38, 30, 32)), encoding="utf-8")


def _table(head: tuple[str, ...], rows: list[list[str]], widths: tuple[int, ...]) -> str:
    """A list table whose cells are reST already."""
    lines = [".. list-table::", "    :header-rows: 1", f"    :widths: {' '.join(map(str, widths))}", ""]
    for row in [list(head), *rows]:
        lines += [f"    {'* -' if not k else '  -'} {cell}" for k, cell in enumerate(row)]
    return "\n".join(lines) + "\n"


def _result(folder: Path, anchor: str | None) -> str:
    """Presets and seeds of the committed results, with a link to the results page."""
    found = []
    for file in sorted(folder.glob("*/result.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        seeds = len(record["seeds"])
        lacking = "" if record["complete"] else ", incomplete"
        found.append(f"{record['preset']}, {seeds} seed{'s' * (seeds > 1)}{lacking}")
    return f":ref:`{'; '.join(found)} <{PREFIX}{anchor}>`" if found else "not run"

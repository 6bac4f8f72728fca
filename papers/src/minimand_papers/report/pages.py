"""The results of one source as a page: the verdicts on its claims first, then a section per experiment."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..comparing import LEGEND
from ..experiment import Claim, Experiment, Results, Verdict
from ..registry import experiments, source_of
from ..sources import SOURCES, Publication
from ..store import atomically, encoded
from .blocks import Block, Bullets, Cell, Code, Drawing, Heading, PageLink, Paragraph, Table, as_markdown
from .sections import Section, sections

__all__ = ["INDEX", "claims_of", "counts", "drawings", "index_table", "page_of", "write_pages"]

INDEX = "README.md"
OTHER = "other"
# Notes up to this length stay in their rows.
_SHORT = 24
VERDICTS: tuple[Verdict, ...] = ("reproduced", "partly", "not", "not run")


def write_pages(out: Path, folder: Path, *, own: Sequence[Experiment[Any]] = ()) -> list[Path]:
    """Write one Markdown page for each source with results below ``out``, one for users' experiments, and an index."""
    found, problems = sections(out, pictures=False, own=own)
    pages: dict[str, Sequence[Block]] = {}
    for source in SOURCES.values():
        if listed := [section for section in found if section.name in source.experiments]:
            pages[f"{source.folder}.md"] = page_of(source, listed)
    if users := [section for section in found if source_of(section.name) is None]:
        pages[f"{OTHER}.md"] = [
            Heading("Results of experiments outside the four sources", 1),
            Paragraph(LEGEND),
            *(block for section in users for block in _section(section)),
        ]
    texts = {name: as_markdown(blocks) for name, blocks in pages.items()}
    texts[INDEX] = _index(found, problems)
    for name, text in texts.items():
        with atomically(folder / name) as file:
            file.write(encoded(text))
    return [folder / name for name in texts]


# Claims ------------------------------------------------------------------------------------------


def claims_of(source: Publication, found: Sequence[Section]) -> list[tuple[str, Claim]]:
    """The claims of a source, each with the name of its experiment, in the source's order.

    The largest preset counts, and ``smoke`` does not: without another one the claims of an experiment are not run. A
    claim that is not run under one dataset is left out if it was run under another.
    """
    listed: list[tuple[str, Claim]] = []
    for experiment in experiments(source):
        own = [section for section in found if section.name == experiment.name and section.preset != "smoke"]
        largest = [section for section in own if section.preset == "paper"] or own
        claims = [claim for section in largest for claim in section.claims] if largest else _unmeasured(experiment)
        done = {claim.text for claim in claims if claim.verdict != "not run"}
        listed += [(experiment.name, claim) for claim in claims if claim.verdict != "not run" or claim.text not in done]
    return listed


def _unmeasured(experiment: Experiment[Any]) -> list[Claim]:
    """The claims of an experiment that has no result."""
    empty = Results(experiment.preset("laptop").options, "laptop", {})
    hours = experiment.preset("laptop").minutes / 60
    why = f"no {experiment.needs_data} data" if experiment.needs_data else f"no result yet ({hours:.1f} hours)"
    return [
        dataclasses.replace(claim, measured="–", scale=why, verdict="not run") for claim in experiment.claims(empty)
    ]


def counts(claims: Sequence[tuple[str, Claim]]) -> str:
    """How many claims have which verdict, as text."""
    numbers = Counter(claim.verdict for _, claim in claims)
    return ", ".join(f"{numbers[verdict]} {verdict}" for verdict in VERDICTS if numbers[verdict])


# Pages -------------------------------------------------------------------------------------------


def page_of(source: Publication, found: Sequence[Section]) -> list[Block]:
    """The page of a source."""
    claims = claims_of(source, found)
    anchors = {id(claim): section.anchor for section in found for claim in section.claims}
    rows = [
        [_linked(claim.text, anchors.get(id(claim))), claim.paper, claim.measured, claim.scale, claim.verdict]
        for _, claim in claims
    ]
    return [
        Heading(f"Results: {source.short}", 1),
        Table(("claim", "source", "ours", "scale", "verdict"), rows, (30, 16, 22, 18, 14)),
        Paragraph(f"{source.reference} Verdicts: {counts(claims)}.{_without_claims(source, claims)}"),
        Paragraph(
            "“±” is the standard deviation over seeds. The verdicts follow from the numbers by the rules in "
            "`papers/src/minimand_papers/claims.py`: a difference is reproduced only with three seeds, a 95 % interval "
            "that excludes zero, and half the source's size. “not run” names the reason in the column scale. Our runs "
            "are smaller than the source's where the scale says so. This page is generated by `minimand report "
            "--markdown`; do not edit it."
        ),
        Paragraph(f"In the sections below, differences between methods are tables. {LEGEND}"),
        *(block for section in found for block in _section(section)),
    ]


def _without_claims(source: Publication, claims: Sequence[tuple[str, Claim]]) -> str:
    names = [name for name in source.experiments if name not in {name for name, _ in claims}]
    return f" Experiments of ours, without a claim of the source: {', '.join(names)}." if names else ""


def _linked(text: str, anchor: str | None) -> Cell:
    return text if anchor is None else PageLink(text, anchor)


def _section(section: Section) -> list[Block]:
    blocks: list[Block] = [
        Heading(section.anchor, 2, section.anchor),
        Paragraph(f"{_sentence(section.title)} Source: {section.source}. Scale: {section.scale}."),
        Paragraph(section.about),
    ]
    if not section.complete:
        lacking = "; ".join(section.missing) or "some seeds"
        blocks.append(Paragraph(f"Incomplete. Not run, or not with every seed: {lacking}."))
    if section.rows:
        marks, notes = _footnotes([row.note for row in section.rows])
        rows = [
            [row.label, row.paper, row.measured, str(row.seeds), mark]
            for row, mark in zip(section.rows, marks, strict=True)
        ]
        blocks.append(Table(("quantity", "source", "ours", "seeds", "note"), rows, (40, 14, 20, 8, 18)))
        if notes:
            blocks.append(Bullets(notes))
    if section.differences:
        rows = [[d.ours, d.other, d.quantity, d.size, str(len(d.gaps)), d.outcome] for d in section.differences]
        head, widths = ["method", "compared with", "quantity", "difference", "seeds", "result"], [26, 26, 14, 16, 8, 10]
        if not section.quantities:
            rows = [[*row[:2], *row[3:]] for row in rows]
            head.pop(2)
            widths.pop(2)
        blocks.append(Table(head, rows, widths))
    if section.findings:
        blocks.append(Bullets(section.findings))
    names = drawings(section)
    blocks += [Drawing(name, drawn.title, drawn.alt) for name, drawn in zip(names, section.pictures, strict=True)]
    protocol = "; ".join(f"{key}: {value}" for key, value in section.protocol)
    return [*blocks, Paragraph("Run it again with"), Code(section.command), Paragraph(f"{protocol}.")]


def drawings(section: Section) -> list[str]:
    """The names of the files of a section's pictures, relative to the page."""
    return [f"{section.anchor}-{number}.svg" for number in range(1, len(section.pictures) + 1)]


def _footnotes(notes: Sequence[str]) -> tuple[list[str], list[str]]:
    """Long notes that several rows share become numbers, explained below the table.

    >>> _footnotes(["the same long note in two rows", "short", "the same long note in two rows", ""])
    (['(1)', 'short', '(1)', ''], ['(1) the same long note in two rows'])
    """
    shared = [note for note, times in Counter(notes).items() if len(note) > _SHORT and times > 1]
    marks = {note: f"({number})" for number, note in enumerate(shared, 1)}
    return [marks.get(note, note) for note in notes], [f"{mark} {note}" for note, mark in marks.items()]


def index_table(found: Sequence[Section], prefix: str = "") -> str:
    """A table in Markdown: for each source its page and how many claims have which verdict."""
    lines = ["| source | claims |", "| --- | --- |"]
    for source in SOURCES.values():
        lines.append(f"| [{source.short}]({prefix}{source.folder}.md) | {counts(claims_of(source, found))} |")
    return "\n".join(lines) + "\n"


def _index(found: Sequence[Section], problems: Sequence[str]) -> str:
    return f"""# Results

`NAME/PRESET/result.json` holds what `minimand run` wrote: options, seeds, versions and every record. The pages are
generated from these files by `minimand report --out papers/results --markdown papers/results`.

{index_table(found)}
A file whose `complete` is false lacks parts or seeds. `seconds` are processor time for parts with one thread. In files
of version 0.1.0 they may be wall-clock times on two shared cores; ratios of speed are in `benchmarks/results/`.
""" + "".join(f"\n{line}\n" for line in as_markdown([Paragraph(problem) for problem in problems]).splitlines() if line)


def _sentence(title: str) -> str:
    return title if title.endswith(("?", "!")) else f"{title}."

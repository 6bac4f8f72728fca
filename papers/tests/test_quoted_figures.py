"""Law: a figure of a result that README or the documentation quotes stands in a committed result.

A passage is a paragraph, an item of a list or a table. It quotes the experiments that it names; without a name, those
of the passage before it in the same section. Each of its figures (a number with a decimal point, or in per cent, points
or dB) must be on the results page of one of these experiments, at the same or a higher precision, or be the value of a
single seed, or be among the values that ``DERIVED`` computes from the records. In passages of no experiment, per cent,
points and dB must be listed in ``OTHER``, as must all other figures that are no results. The sentences of
``HEADLINES`` are made from the results and stand in their pages word by word.

Remedy: correct the figure, name its experiment in the passage, or list what it is if it is no result.
"""

import functools
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minimand_papers.comparing import mean_std
from minimand_papers.experiment import Results
from minimand_papers.registry import experiments, find
from minimand_papers.report.sections import folders
from minimand_papers.results import read_results

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "papers" / "results"
PAGES = [ROOT / "README.md", ROOT / "papers" / "README.md", *sorted((ROOT / "docs").glob("*.rst"))]
PAGES += sorted((ROOT / "docs" / "papers").glob("*.rst"))
NUMBER = r"(?<![\w.§])[−-]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w.]\d|\w|,\d)"
FIGURE = re.compile(rf"(?P<number>{NUMBER})(?P<unit>[ \n]*(?:%|points?\b|dB\b))?")

# Figures that are no results of the experiments, in the words around them.
EVERYWHERE = ("95 % interval",)
OTHER: dict[str, tuple[str, ...]] = {
    # The output of code on the page, and benchmarks.
    "README.md": (
        "13.7 %",
        "14% of the gap",
        "remove 86 %",
        "about 14.5 times",
        "time to 95 % of held-out digits",
        "drops 95 %",
        "dropout of 95 %",
    ),
    "papers/README.md": ("a network with 95 % dropout",),
    "docs/architectures.rst": ("at most 15 % longer",),
    "docs/dropout.rst": ("within 8 % of the minimum", "within 1 % after 4,000"),
    "docs/layers.rst": ("−0.05 points at p = 0.1", "about 90 %"),
    "docs/lifted.rst": (
        "to reach 95 % of held-out",
        "dampings from 0.01 to 2",
    ),
    "docs/factor.rst": ('``Share(0.05)`` or ``"5%"``',),
    "docs/index.rst": (":width: 80 %",),
    "docs/reliability.rst": ("was 33 % off", "up to 17 % off", "at most 2 % in", "by 30 to 42 % on", "9 to 13 %, as"),
}

Values = Callable[[Results[Any]], Iterator[float]]


def _gaps(results: Results[Any]) -> Iterator[float]:
    """The gap after 1, 10, 30 and 60 iterations in per cent."""
    for part in results.parts():
        for step in (1, 10, 30, 60):
            if found := [100 * values[step - 1] for values in results.curve(part, "gap").values() if values]:
                yield statistics.fmean(found)


def _best_epochs(results: Results[Any]) -> Iterator[float]:
    """The best validation accuracy of every seed, and of all."""
    for part in results.parts():
        yield from (max(values) for values in results.curve(part, "validation").values() if values)


def _phases(results: Results[Any]) -> Iterator[float]:
    """The smallest and the largest step and gain of every unrolled network."""
    for part, seeds in results.records.items():
        for last in (records[-1] for records in seeds.values()):
            for key in ("steps", "gains"):
                if part.partition(",")[0] and last.get(key):
                    yield from (min(last[key]), max(last[key]))


DERIVED: dict[str, Values] = {
    "layer-convergence": _gaps,
    "proxprop-mlp": _best_epochs,
    "cs-set11": _phases,
    "mri-brain": _phases,
}


def _heavy_dropout(results: Results[Any]) -> str:
    plain, solver, none = (
        mean_std(results.final(part, "test"))[0] for part in ("p = 0.95 dropout", "p = 0.95 solver", "no dropout")
    )
    return (
        f"a network that drops 95 % of its hidden inputs has an accuracy of {plain:.1f} % when it is plain, "
        f"{solver:.1f} % when it is trained converted, and {none:.1f} % without any dropout"
    )


def _conversion(results: Results[Any]) -> str:
    rows = {row.label: row.measured for row in find("solvers-conversion").compare(results)}
    nets = results.options.nets
    changes = [mean_std(rows[f"{net}, right after conversion"])[0] - mean_std(rows[net])[0] for net in nets]
    learned, plain = "{}, converted, learned strength", "{}, fine-tuned"
    gains = [mean_std(rows[learned.format(net)])[0] - mean_std(rows[plain.format(net)])[0] for net in nets]
    low, high = (f"{value:+.2f}".replace("-", "−") for value in (min(gains), max(gains)))
    return (
        f"it changed the test accuracy of five kinds of networks by {min(changes):+.2f} to {max(changes):+.2f} points, "
        f"and after fine-tuning with learned strengths they ended {low} to {high} points from"
    ).replace("by -", "by −")


HEAVY = ("p = 0.95, dropout", "p = 0.95, Prox-SG")


def _range_of_rates(results: Results[Any]) -> str:
    rows = {row.label: row for row in find("solvers-heads").compare(results)}
    net, plain, solver = (mean_std(rows[key].measured)[0] for key in ("FastNet", *HEAVY))
    narrow, wide = (re.findall(r"(\d+)% of them", rows[key].note)[0] for key in HEAVY)
    return (
        f"in the head of a network of {net:.1f} % on CIFAR-10 (`solvers-heads`, one network, ten heads, rates tuned), "
        f"dropout of 95 % reaches {plain:.2f} % and the solver {solver:.2f} %, but {narrow} % of the rates come within "
        f"a point of the best with dropout, and {wide} % with the solver"
    )


HEADLINES: dict[tuple[str, str], Callable[[Results[Any]], str]] = {
    ("README.md", "dropout-digits"): _heavy_dropout,
    ("README.md", "solvers-conversion"): _conversion,
    ("README.md", "solvers-heads"): _range_of_rates,
}


# Evidence ----------------------------------------------------------------------------------------


def _numbers(text: str) -> list[float]:
    found = re.findall(r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", text)
    return [float(number.replace(",", "")) for number in found]


@functools.cache
def _pages() -> dict[str, str]:
    """The text of every section of the results pages, with its claims, by anchor."""
    found: dict[str, str] = {}
    for page in RESULTS.glob("*.md"):
        top, *rest = re.split(r"^## ", page.read_text(), flags=re.M)
        for text in rest:
            anchor, _, body = text.partition("\n")
            # Several results of an experiment have sections of the same name.
            found[anchor] = found.get(anchor, "") + body.partition("Run it again with")[0]
        for anchor, claim in re.findall(r"^\| \[.*?\]\(#([\w-]+)\)(.*)$", top, flags=re.M):
            found[anchor] += claim
    return found


@functools.cache
def _evidence(name: str) -> tuple[float, ...]:
    """All figures of an experiment: on its page, of single seeds, and derived."""
    values: list[float] = []
    for anchor, text in _pages().items():
        if anchor == name or (anchor.startswith(f"{name}-") and anchor not in _names()):
            values += _numbers(text)
    for folder in folders(RESULTS):
        if folder.parent.name == name:
            experiment, results, _ = read_results(folder)
            values += [value for row in experiment.compare(results) for value in row.measured]
            values += DERIVED[name](results) if name in DERIVED else ()
    return tuple(map(abs, values))


@functools.cache
def _names() -> tuple[str, ...]:
    return tuple(experiment.name for experiment in experiments())


# Quotations --------------------------------------------------------------------------------------


def _key(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _passages(text: str) -> Iterator[tuple[str, list[str]]]:
    """Every passage with the experiments that it quotes, without code, formulas and names of tests."""
    text = re.sub(r"^\.\. code-block::.*\n(?:\n| +.*\n)*", "\n", text, flags=re.M)
    text = re.sub(r":math:`[^`]*`", "", text)
    quoted: list[str] = []
    for passage in re.split(r"\n\s*\n|\n(?=- )", text):
        if re.search(r"^(?:[=~^-]{3,}|#+ .*)$", passage, re.M):
            quoted = []
        here = [name for name in _names() if re.search(rf"(?<![\w-]){name}(?![\w-])", passage)]
        quoted = here or quoted
        yield passage, quoted


def _figures(passage: str, quoted: list[str]) -> Iterator[str]:
    """The figures of a passage that must be results."""
    for found in FIGURE.finditer(passage):
        if found["unit"] or ("." in found["number"] and quoted):
            yield found["number"].replace("−", "").replace("-", "").replace(",", "")


def _unfounded(text: str) -> list[str]:
    """The figures that no committed result has, each with its passage."""
    found = []
    for passage, quoted in _passages(text):
        known = [value for name in quoted for value in _evidence(name)]
        for figure in _figures(passage, quoted):
            half = 0.5000001 * 10.0 ** -len(figure.partition(".")[2])
            if not any(abs(value - float(figure)) <= half for value in known):
                found.append(f"{figure} of {quoted or 'no experiment'}: {' '.join(passage.split())[:200]}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=_key)
def test_every_quoted_figure_is_in_a_committed_result(page: Path) -> None:
    text = page.read_text()
    for words in (*OTHER.get(_key(page), ()), *EVERYWHERE):
        text, times = re.subn(r"\s+".join(map(re.escape, words.split())), "", text)
        assert times or words in EVERYWHERE, f"{_key(page)} no longer says {words!r}: take it out of OTHER"
    assert _unfounded(text) == []


@pytest.mark.parametrize(("place", "sentence"), HEADLINES.items(), ids=[name for _, name in HEADLINES])
def test_headlines_are_made_from_results(place: tuple[str, str], sentence: Callable[[Results[Any]], str]) -> None:
    page, name = place
    _, results, _ = read_results(RESULTS / name / "laptop")
    assert sentence(results) in " ".join((ROOT / page).read_text().split())


def test_a_wrong_figure_is_found() -> None:
    right = "``dropout-digits``: the plain network has 10.5 %, the solver 86.1 ± 1.1 %."
    assert not _unfounded(right)
    assert len(_unfounded(right.replace("86.1", "87.9"))) == 1
    assert len(_unfounded("A network gains 7 points.")) == 1
    assert not _unfounded("Two layers, a factor of 1.5, §3.4.")

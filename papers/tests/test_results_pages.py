"""Laws: the results pages are those of the committed result files, and their verdicts follow from the rules."""

import re
from pathlib import Path

import pytest

from minimand_papers.claims import combine, judge_certificates, judge_gain, judge_parity
from minimand_papers.experiment import Results
from minimand_papers.registry import experiments
from minimand_papers.report.pages import claims_of, index_table, write_pages
from minimand_papers.report.sections import Section, sections
from minimand_papers.sources import SOURCES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
VERDICTS = {"reproduced", "partly", "not", "not run"}
# Experiments that compare methods without a claim of the source.
OURS = {
    "solvers-compare",
    "solvers-conversion",
    "solvers-uncertainty",
    "conversion-digits",
    "lifted-conv",
    "lifted-deep-sigmoid",
    "lifted-resnet",
    "proxprop-autoencoder",
    "proxprop-peers",
    "deblur",
    "superres",
    "prior-transfer",
}


@pytest.fixture(scope="module")
def found() -> list[Section]:
    known, problems = sections(RESULTS, pictures=False)
    assert problems == []
    return known


def test_the_committed_pages_are_not_stale(tmp_path: Path) -> None:
    """Remedy: minimand report --out papers/results --markdown papers/results; the same table in papers/README.md."""
    for path in write_pages(RESULTS, tmp_path):
        assert (RESULTS / path.name).read_text() == path.read_text(), path.name


def test_the_overview_has_the_same_counts(found: list[Section]) -> None:
    assert index_table(found, "results/") in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("source", SOURCES.values(), ids=lambda source: source.folder)
def test_a_page_begins_with_at_most_twenty_five_lines_of_verdicts(source) -> None:
    lines = (RESULTS / f"{source.folder}.md").read_text().splitlines()
    table = [line for line in lines[: lines.index("", 2)] if line.startswith("|")]
    assert lines[2] == table[0] == "| claim | source | ours | scale | verdict |"
    assert len(table) <= 25
    assert {line.split(" | ")[-1].removesuffix(" |") for line in table[2:]} <= VERDICTS
    anchors = set(re.findall(r"\]\(#([\w-]+)\)", "\n".join(table)))
    assert anchors <= {line.removeprefix("## ") for line in lines if line.startswith("## ")}
    assert "no claim" not in "\n".join(lines)


def test_every_experiment_of_a_source_has_a_claim(found: list[Section]) -> None:
    for source in SOURCES.values():
        names = {name for name, _ in claims_of(source, found)}
        assert names == set(source.experiments) - OURS


def test_claims_without_measurements_are_not_run(found: list[Section]) -> None:
    for experiment in experiments():
        for name in ("smoke", "laptop", "paper"):
            empty = Results(experiment.preset(name).options, name, {})
            assert {claim.verdict for claim in experiment.claims(empty)} <= {"not run"}, experiment.name
    reasons = {
        claim.scale
        for source in SOURCES.values()
        for _, claim in claims_of(source, found)
        if claim.verdict == "not run"
    }
    reasons = {why for why in reasons if not why.startswith(("no processor time", "no result yet"))}
    assert reasons == {"no CIFAR-100 data", "no SVHN data", "no ImageNet data"}


@pytest.mark.parametrize(
    ("gains", "size", "verdict"),
    [
        ((8.0, 8.5, 9.0), 8.0, "reproduced"),
        ((8.0, 8.5, 9.0), None, "reproduced"),
        # Two seeds, a third of the source's size, an interval that includes zero: partly.
        ((8.0, 8.5), 8.0, "partly"),
        ((8.0, 8.5, 9.0), 30.0, "partly"),
        ((1.0, 3.0, 5.0), 2.0, "partly"),
        # Inside the spread, the wrong sign, a run that diverged, one seed: not.
        ((-1.0, 3.0, 0.5), 2.0, "not"),
        ((-8.0, -8.5, -9.0), 8.0, "not"),
        ((8.0, float("nan"), 9.0), 8.0, "not"),
        ((8.0,), 8.0, "not"),
        ((), 8.0, "not run"),
    ],
)
def test_a_difference_is_judged_by_seeds_interval_and_size(gains: tuple, size: float | None, verdict: str) -> None:
    assert judge_gain(gains, size) == verdict


def test_other_verdicts() -> None:
    assert judge_gain((4.0,), 8.0, single=3.0) == "partly"
    assert judge_parity((-0.1, 0.1, -0.1)) == "reproduced"
    assert judge_parity((-0.1, 0.1)) == "partly"
    assert judge_parity((-2.0, -2.1, -2.05)) == "not"
    assert judge_certificates(["UNDECIDED"], [0.5]) == "partly"
    assert judge_certificates(["UNDECIDED"], [1.5]) == "not"
    assert judge_certificates([], []) == "not run"
    assert combine(["not", "partly", "reproduced", "not"]) == "partly"
    assert combine(["not", "not", "reproduced"]) == "not"


def test_a_claim_links_to_the_result_that_it_was_judged_by(found: list[Section]) -> None:
    """Also where an experiment has several results."""
    for source in SOURCES.values():
        own = [section for section in found if section.name in source.experiments]
        table = [line for line in (RESULTS / f"{source.folder}.md").read_text().splitlines() if line.startswith("| [")]
        judged = {id(claim) for _, claim in claims_of(source, own)}
        for section in own:
            for claim in section.claims:
                if id(claim) in judged:
                    assert any(f"](#{section.anchor}) |" in line and claim.scale in line for line in table)


@pytest.mark.parametrize(("gap", "verdict"), [(99.9, "not"), (0.5, "partly")])
def test_gaps_of_grown_networks_are_judged_in_per_cent(gap: float, verdict: str) -> None:
    experiment = next(known for known in experiments() if known.name == "grow-alexnet")
    records = {"grown": {0: [{"round": 0, "status": "UNDECIDED", "gap": gap}]}}
    results = Results(experiment.presets["laptop"].options, "laptop", records)
    assert [claim.verdict for claim in experiment.claims(results)] == [verdict]

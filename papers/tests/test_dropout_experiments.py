"""The experiments on dropout and on homogeneous networks run, and their smoke numbers obey the theory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minimand.factor import DropoutFactorization
from minimand_papers.experiment import Experiment, Results
from minimand_papers.experiments.vidal2018._dropout import followed
from minimand_papers.progress import Display
from minimand_papers.runner import RunSetting, read_results, run

NAMES = [
    "dropout-factorization",
    "dropout-variable-rate",
    "dropout-closed-form",
    "dropout-equalization",
    "dropout-landscape",
    "dropout-mnist",
    "grow-relu-1d",
    "grow-relu-digits",
    "grow-alexnet",
    "degree-mismatch",
    "jacobian-regularizer",
]


def _excess_is_small(results: Results[Any]) -> None:
    for part in results.parts():
        curve = next(iter(results.curve(part, "excess").values()))
        assert curve[-1] <= 0.2
        assert curve[-1] <= curve[0]


def _closed_form_is_exact(results: Results[Any]) -> None:
    for lam in results.options.weights:
        assert results.final(f"closed_form, λ = {lam:g}", "excess")[0] <= 1e-12
        assert results.final(f"dropout, λ = {lam:g}", "excess")[0] <= 0.2


def _variable_rate_ignores_the_size(results: Results[Any]) -> None:
    closed = next(iter(results.curve("closed form, variable rate", "nuclear").values()))
    assert closed[-1] == pytest.approx(closed[0], rel=0.05)
    fixed = next(iter(results.curve("fixed rate", "nuclear").values()))
    assert fixed[-1] > closed[-1]
    ranks = {rate: results.final(f"closed form, {rate} rate", "rank")[0] for rate in ("fixed", "variable")}
    assert ranks["fixed"] > ranks["variable"] >= results.options.rank


def _dropout_equalizes(results: Results[Any]) -> None:
    for size in results.options.sizes:
        ours, expected, control = (
            results.final(f"{m}, r = {size}", "unequal")[0] for m in ("dropout", "dropout's expectation", "no dropout")
        )
        assert expected < 0.01
        assert expected < ours < 0.3
        assert ours < control


def _minima_are_equalized(results: Results[Any]) -> None:
    for p in results.options.rates:
        assert results.final(f"p = {p:g}", "worst")[0] <= 1e-5
        if p > 0:
            assert results.final(f"p = {p:g}", "unequal")[0] <= 1e-2


def _growth_is_certified_and_below_random_starts(results: Results[Any]) -> None:
    assert results.final("grown", "certified") == [1.0]
    grown = results.final("grown", "objective")[0]
    for width in results.options.widths:
        assert results.final(f"width {width}", "objective")[0] >= results.final("grown", "lower")[0]
    values = next(iter(results.curve("grown", "objective").values()))
    assert values[0] > grown


def _growth_is_no_certificate_in_many_dimensions(results: Results[Any]) -> None:
    assert next(iter(results.curve("grown", "status").values()))[-1] != "CERTIFIED"
    assert results.final("grown", "width")[0] <= results.options.neurons
    assert results.final("grown", "bound")[0] >= results.final("grown", "polar")[0]


def _parallel_networks_are_judged_honestly(results: Results[Any]) -> None:
    values = next(iter(results.curve("grown", "objective").values()))
    assert values[-1] < values[0]
    assert 1 <= results.final("grown", "networks")[0] <= results.options.networks
    assert results.final("grown", "bound")[0] >= results.final("grown", "polar")[0]
    assert next(iter(results.curve("grown", "status").values()))[-1] in ("UNDECIDED", "IMPROVABLE", "CERTIFIED")


def _only_mismatched_degrees_are_trapped(results: Results[Any]) -> None:
    assert results.final("weight decay, K = 3", "trapped") == [100.0]
    assert results.final("weight decay, K = 2", "trapped") == [0.0]
    assert results.final("smooth surrogate, K = 3", "output")[0] > results.final("weight decay, K = 3", "output")[0]


def _accuracies_are_percentages(results: Results[Any]) -> None:
    for part in results.parts():
        key = "error" if results.final(part, "error") else "test"
        assert all(0 <= value < 100 for value in results.final(part, key))


LAWS = dict(
    zip(
        NAMES,
        [
            _excess_is_small,
            _variable_rate_ignores_the_size,
            _closed_form_is_exact,
            _dropout_equalizes,
            _minima_are_equalized,
            _accuracies_are_percentages,
            _growth_is_certified_and_below_random_starts,
            _growth_is_no_certificate_in_many_dimensions,
            _parallel_networks_are_judged_honestly,
            _only_mismatched_degrees_are_trapped,
            _accuracies_are_percentages,
        ],
        strict=True,
    )
)


@pytest.mark.parametrize("name", NAMES)
def test_smoke(name: str, tmp_path: Path) -> None:
    run(RunSetting(name, "smoke", out=tmp_path, jobs=1), Display())
    experiment, results, _ = read_results(tmp_path / name / "smoke")
    LAWS[name](results)
    rows = experiment.compare(results)
    assert rows
    assert all(row.measured for row in rows)
    assert all(plot.alt and plot.figure.axes for plot in experiment.plots(results))
    assert all(str(finding) for finding in experiment.findings(results))
    _works_with_nothing_measured(experiment, results)


def _works_with_nothing_measured(experiment: Experiment[Any], results: Results[Any]) -> None:
    empty: Results[Any] = Results(results.options, results.preset, {})
    assert not any(row.measured for row in experiment.compare(empty))
    experiment.plots(empty)
    experiment.findings(empty)


def test_the_excess_over_a_minimum_of_zero_is_a_share_of_the_data() -> None:
    Y = np.random.default_rng(0).normal(size=(5, 3))
    model = DropoutFactorization(3, 0.0, method="gradient", max_iter=30, tol=0.0, random_state=0)
    records = list(followed(Y, model))
    assert model.optimum_ < 1e-20
    assert records[0]["excess"] == pytest.approx(model.history_[0] / (Y**2).sum())
    assert records[-1]["excess"] == pytest.approx(model.objective_ / (Y**2).sum())

"""Law: every experiment runs at smoke scale from bundled data, and its table, pictures and sentences follow."""

import dataclasses
from pathlib import Path

import pytest

from minimand.lab.experiment import Results
from minimand.lab.registry import experiments, find
from minimand.lab.runner import Setting, read_results, run
from tests.test_data import write_cifar

NAMES = [experiment.name for experiment in experiments()]


@pytest.mark.parametrize("name", NAMES)
def test_smoke(name: str, tmp_path: Path) -> None:
    path = run(Setting(name, "smoke", out=tmp_path, jobs=1))
    experiment, results, stored = read_results(path.parent)
    assert stored["complete"]
    assert path.stat().st_size < 400_000
    rows = experiment.compare(results)
    assert rows
    assert all(len(row.measured) for row in rows), [row.label for row in rows if not len(row.measured)]
    assert all(isinstance(sentence, str) and sentence for sentence in experiment.findings(results))
    plots = experiment.plots(results)
    assert plots
    assert all(plot.alt and plot.title for plot in plots)
    # Half a run has a table and pictures, too.
    nothing = Results(results.options, results.preset, {})
    assert not any(len(row.measured) for row in experiment.compare(nothing))
    experiment.plots(nothing)
    experiment.findings(nothing)


@pytest.mark.parametrize("name", ["solvers-alexnet", "solvers-vgg", "solvers-dropout-rates"])
def test_cifar_100_columns_run_on_a_file_in_its_format(name: str, tmp_path: Path) -> None:
    write_cifar(tmp_path / "data", "cifar100", 60)
    preset = find(name).presets["smoke"]
    options = dataclasses.replace(preset.options, dataset="cifar100", enlarge=1, batch=20, limit=40)
    path = run(Setting(name, "smoke", options, (0,), tmp_path / "out", tmp_path / "data", jobs=1))
    experiment, results, _ = read_results(path.parent)
    papers = [row.paper for row in experiment.compare(results) if row.paper is not None]
    assert papers
    assert all(30 < number < 72 for number in papers)

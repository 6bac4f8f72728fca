"""Laws of the experiments on structure: theorems hold, pairs have equal sizes and equal starts, tables are 002's."""

from pathlib import Path

import pytest
import torch

from minimand.lab.experiment import Results
from minimand.lab.experiments._structure import network, one_cycle
from minimand.lab.registry import find
from minimand.lab.runner import Setting, read_results, run
from minimand.lab.training import Loaders


def _smoke(name: str, out: Path) -> Results:
    return read_results(run(Setting(name, "smoke", out=out, jobs=1)).parent)[1]


def test_rates_hold_and_are_used(tmp_path: Path) -> None:
    results = _smoke("structure-rates", tmp_path)
    rows = find("structure-rates").compare(results)
    assert len(rows) == 5
    for row in rows:
        assert all(0 < share <= 1 for share in row.measured), row.label
    # Momentum is ahead of plain descent on the quadratic.
    final = {part: results.final(part, "final") for part in results.parts()}
    for seed in range(2):
        assert final["Nesterov"][seed] < final["gradient descent"][seed]
        assert final["heavy ball, ½"][seed] < final["gradient descent"][seed]
    assert any("Theorem 3 holds" in sentence for sentence in find("structure-rates").findings(results))


def test_the_cifar_table_has_equal_sizes(tmp_path: Path) -> None:
    results = _smoke("structure-cifar", tmp_path)
    size = {part: results.final(part, "parameters")[0] for part in results.parts()}
    assert size["HB-Net (n = 1)"] == size["ResNet (n = 1)"] + 6
    assert size["AGD-Net (k = 4, L = 10)"] == size["DenseNet (k = 4, L = 10)"] + 3  # two layers a stage: one pair
    coefficients = results.curve("HB-Net (n = 1)", "coefficients")[0][-1]
    assert len(coefficients) == 6
    assert any(abs(value - start) > 1e-4 for value, start in zip(coefficients, [1, 0] * 3, strict=True))


def test_depth_names_the_layers(tmp_path: Path) -> None:
    results = _smoke("structure-depth", tmp_path)
    assert set(results.parts()) == {
        f"{family}, {layers} layers" for family in ("ResNet", "HB-Net", "Nesterov") for layers in (8, 14)
    }
    said = find("structure-depth").findings(results)
    assert len(said) == 6
    assert not any("beats" in sentence or "loses" in sentence for sentence in said)  # there is one seed


def test_laptop_networks_have_the_same_parameters_to_a_percent() -> None:
    data = Loaders(None, None, None, 10, (3, 32, 32))  # type: ignore[arg-type]
    options = find("structure-cifar").presets["laptop"].options
    sizes = []
    for family, size in (("ResNet", (1,)), ("HB-Net", (1,)), ("DMRNet", (1,)), ("DenseNet", options.dense[0])):
        sizes.append(sum(p.numel() for p in network(family, size, data, 1.0).parameters()))
    assert max(sizes) / min(sizes) < 1.02


@pytest.mark.parametrize("family", ["HB-Net", "Nesterov"])
def test_pairs_of_one_seed_start_as_the_same_function(family: str) -> None:
    data = Loaders(None, None, None, 10, (3, 32, 32))  # type: ignore[arg-type]
    nets = []
    for name in ("ResNet", family):
        torch.manual_seed(3)
        nets.append(network(name, (1,), data, 0.25))
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(nets[0](images), nets[1](images), atol=0, rtol=0)


def test_the_paper_preset_is_002s_table() -> None:
    experiment = find("structure-cifar")
    preset = experiment.presets["paper"]
    rows = experiment.compare(Results(preset.options, "paper", {}))
    assert {row.label: row.paper for row in rows if row.paper is not None}["HB-Net (n = 18) +"] == 5.04
    assert sum(row.paper is not None for row in rows) == 16


def test_one_cycle_rises_and_falls() -> None:
    rates = one_cycle(0.1, 9)
    assert max(rates) == rates[2] == pytest.approx(0.1)
    assert rates[-1] == pytest.approx(1e-3)

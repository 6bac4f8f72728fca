"""Laws of the experiments on structure: theorems hold, pairs have equal sizes and starts, tables as in [Lin2019]."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from minimand.errors import DataError
from minimand.nn import coefficient_parameters
from minimand_papers.context import Lab
from minimand_papers.experiment import Results
from minimand_papers.experiments.lin2019 import structure_cifar
from minimand_papers.experiments.lin2019._structure import network, one_cycle
from minimand_papers.registry import find
from minimand_papers.runner import RunSetting, read_results, run
from minimand_papers.store import slug
from minimand_papers.training import Loaders

DATA = Loaders(None, None, None, 10, (3, 32, 32))  # type: ignore[arg-type]


def _smoke(name: str, out: Path) -> Results:
    return read_results(run(RunSetting(name, "smoke", out=out, jobs=1)).parent)[1]


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
    assert size["HB-Net (n = 2)"] == size["ResNet (n = 2)"] + 12
    assert size["AGD-Net (k = 4, L = 10)"] == size["DenseNet (k = 4, L = 10)"] + 3  # two layers a stage: one pair
    coefficients = results.curve("HB-Net (n = 2)", "coefficients")[0][-1]
    assert len(coefficients) == 12
    assert any(abs(value - start) > 1e-4 for value, start in zip(coefficients, [1, 0] * 6, strict=True))


def test_depth_names_the_layers(tmp_path: Path) -> None:
    results = _smoke("structure-depth", tmp_path)
    assert set(results.parts()) == {
        f"{family}, {layers} layers" for family in ("ResNet", "HB-Net", "Nesterov") for layers in (14, 20)
    }
    said = find("structure-depth").findings(results)
    # Depth alone; each algorithm at each depth; against the deeper ResNet only where that is the better one.
    shallow, deep = (results.final(f"ResNet, {layers} layers", "error")[0] for layers in (14, 20))
    assert len(said) == (7 if deep < shallow else 6)
    assert any("cannot be seen here" in str(finding) for finding in said) == (deep >= shallow)
    assert not any("beats" in str(finding) or "loses" in str(finding) for finding in said)  # there is one seed


def test_laptop_networks_have_the_same_parameters_to_four_per_cent() -> None:
    options = find("structure-cifar").presets["laptop"].options
    sizes = []
    for family, size in (("ResNet", (2,)), ("HB-Net", (2,)), ("DMRNet", (2,)), ("DenseNet", options.dense[0])):
        sizes.append(sum(p.numel() for p in network(family, size, DATA, options.width).parameters()))
    assert max(sizes) / min(sizes) < 1.04


@pytest.mark.parametrize("name", ["structure-cifar", "structure-depth"])
@pytest.mark.parametrize("preset", ["smoke", "laptop", "paper"])
def test_the_smallest_heavy_ball_network_has_momentum(name: str, preset: str) -> None:
    """Where (1, 0) and (0.3, 0.7) are one function, β₂ is no coefficient of its own."""
    options = find(name).presets[preset].options
    net = network("HB-Net", (min(options.blocks),), DATA, 0.25).double().eval()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        before = net(images)
        for weight in coefficient_parameters(net):
            weight.copy_(torch.tensor([0.3, 0.7], dtype=torch.float64))
        assert (net(images) - before).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["structure-cifar", "structure-depth", "structure-imagenet"])
@pytest.mark.parametrize("preset", ["smoke", "laptop", "paper"])
def test_every_part_has_a_folder_of_its_own(name: str, preset: str) -> None:
    names = [slug(part.name) for part in find(name).parts(find(name).presets[preset].options)]
    assert len(set(names)) == len(names)


def test_laptop_presets_have_five_seeds() -> None:
    for name in ("structure-cifar", "structure-depth", "structure-imagenet"):
        assert find(name).presets["laptop"].seeds == (0, 1, 2, 3, 4)


def test_dense_networks_have_dropout_only_without_augmentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(options: object, lab: object, data: object, model: nn.Module) -> Iterator[dict[str, float]]:
        rates = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
        yield {"dropout": max(rates, default=0.0)}

    monkeypatch.setattr(structure_cifar, "trained", record)
    options = dataclasses.replace(
        find("structure-cifar").presets["paper"].options, dataset="digits", enlarge=2, dense=((4, 10),), blocks=(2,)
    )
    results = read_results(run(RunSetting("structure-cifar", "paper", options, (0,), tmp_path, jobs=1)).parent)[1]
    seen = {part: results.final(part, "dropout")[0] for part in results.parts()}
    assert len(seen) == 10
    assert {part for part, rate in seen.items() if rate} == {"DenseNet (k = 4, L = 10)", "AGD-Net (k = 4, L = 10)"}
    assert seen["DenseNet (k = 4, L = 10)"] == 0.2


@pytest.mark.parametrize("family", ["HB-Net", "Nesterov"])
def test_pairs_of_one_seed_start_as_the_same_function(family: str) -> None:
    nets = []
    for name in ("ResNet", family):
        torch.manual_seed(3)
        nets.append(network(name, (2,), DATA, 0.25))
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(nets[0](images), nets[1](images), atol=0, rtol=0)


def test_the_paper_preset_is_the_table_of_lin2019() -> None:
    experiment = find("structure-cifar")
    preset = experiment.presets["paper"]
    rows = experiment.compare(Results(preset.options, "paper", {}))
    assert {row.label: row.paper for row in rows if row.paper is not None}["HB-Net (n = 18), augmented"] == 5.04
    assert sum(row.paper is not None for row in rows) == 16


def _pictures(folder: Path) -> None:
    """Two classes, 24 images each to train and 3 to test: dark ones and bright ones, of several sizes."""
    for part, count in (("train", 24), ("val", 3)):
        for name, level in (("bright", 200), ("dark", 20)):
            (folder / part / name).mkdir(parents=True)
            for k in range(count):
                image = Image.new("RGB", (40 + k, 50), (level, level, level))
                image.putpixel((0, 0), (255, 0, 0))
                image.save(folder / part / name / f"{k}.png")


def test_the_imagenet_experiment_reads_a_folder(tmp_path: Path) -> None:
    _pictures(tmp_path / "images")
    small = find("structure-imagenet").presets["smoke"].options
    options = dataclasses.replace(
        small, folder=str(tmp_path / "images"), side=32, batch=8, limit=0, width=0.05, growth=2
    )
    lab = Lab(tmp_path, 0)
    data = options.loaders(lab)
    assert (data.classes, data.shape) == (2, (3, 32, 32))
    assert sum(len(labels) for _, labels in data.test) == 6
    batch, labels = next(iter(data.train))
    assert batch.shape == (8, 3, 32, 32)
    assert torch.equal(batch.mean((1, 2, 3)) > 0, labels == 0)  # in order of the names: bright, dark
    orders = [torch.cat([labels for _, labels in data.train]) for _ in range(2)]
    assert not torch.equal(*orders)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(data.test, data.test, strict=True))
    shares = [dataclasses.replace(data.test, lab=Lab(tmp_path, 0, rank=r, world=2)) for r in range(2)]
    assert sum(len(labels) for share in shares for _, labels in share) == 6
    with pytest.raises(DataError, match="no folders of images"):
        dataclasses.replace(options, folder=str(tmp_path / "none")).loaders(lab)


def test_the_imagenet_table_is_002s() -> None:
    experiment = find("structure-imagenet")
    rows = experiment.compare(Results(experiment.presets["paper"].options, "paper", {}))
    assert [row.paper for row in rows] == [26.73, 26.33, 25.02, 24.62, 8.74, 8.56, 7.71, 7.39]
    rows = experiment.compare(Results(experiment.presets["laptop"].options, "laptop", {}))
    assert all(row.paper is None for row in rows)  # CIFAR-10 is not ImageNet


def test_one_cycle_rises_and_falls() -> None:
    rates = one_cycle(0.1, 9)
    assert max(rates) == rates[2] == pytest.approx(0.1)
    assert rates[-1] == pytest.approx(1e-3)

"""The reconstruction experiments run on bundled photographs and report correct numbers."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio

from minimand.nn import UnrolledNet, least_squares_start
from minimand.operators import pad_to_blocks, to_blocks
from minimand_papers.context import Lab
from minimand_papers.experiment import Experiment, Results
from minimand_papers.experiments._reconstruction import (
    ImageSplits,
    bordered,
    build,
    crops,
    measurement,
    train,
    training_images,
)
from minimand_papers.experiments.lin2019 import cs_phases, cs_set11, deblur, mri_brain, prior_transfer, superres
from minimand_papers.progress import Display
from minimand_papers.runner import RunSetting, read_results, run

EXPERIMENTS = {"cs-set11": cs_set11, "cs-phases": cs_phases, "mri-brain": mri_brain}
EXPERIMENTS |= {"deblur": deblur, "superres": superres, "prior-transfer": prior_transfer}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Experiment[Any], Results[Any]]]:
    out = tmp_path_factory.mktemp("runs")
    found = {}
    for name in EXPERIMENTS:
        run(RunSetting(name, "smoke", out=out, jobs=1), Display())
        experiment, results, _ = read_results(out / name / "smoke")
        found[name] = experiment, results
    return found


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_part_is_scored_compared_and_drawn(
    name: str, smoke: dict[str, tuple[Experiment[Any], Results[Any]]]
) -> None:
    experiment, results = smoke[name]
    names = [part.name for part in experiment.parts(results.options)]
    assert results.parts() == names
    for part in names:
        (score,) = results.final(part, "test")
        assert 0 < score < 60
    assert sum(bool(row.measured) for row in experiment.compare(results)) >= len(names)
    assert experiment.findings(results)
    for plot in experiment.plots(results):
        assert plot.alt
        assert "nothing measured" not in plot.alt


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_nothing_measured_is_no_error(name: str) -> None:
    experiment: Experiment[Any] = EXPERIMENTS[name].experiment
    empty = Results(experiment.preset("smoke").options, "smoke", {})
    assert not any(row.measured for row in experiment.compare(empty))
    assert experiment.plots(empty)
    assert all("no seed in common" in said or "networks:" in said for said in map(str, experiment.findings(empty)))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_constrained_networks_keep_the_range_of_a_solver(
    name: str, smoke: dict[str, tuple[Experiment[Any], Results[Any]]]
) -> None:
    _, results = smoke[name]
    constrained = [part for part in results.parts() if "constrained" in part or "phase" in part]
    proved = [part for part in results.parts() if results.final(part, "rises")]
    assert constrained or proved or name == "prior-transfer"
    for part in constrained:
        assert results.final(part, "in_range") == [1.0]
    for part in proved:
        assert results.final(part, "rises") == [0.0]


def test_the_linear_start_is_numpys_least_squares_and_scikit_images_score(
    smoke: dict[str, tuple[Experiment[Any], Results[Any]]], tmp_path: Path
) -> None:
    _, results = smoke["cs-set11"]
    lab = Lab(tmp_path, 0)
    images = training_images(results.options, lab)
    phi, start = measurement(0.25, images, lab)
    image = images.tests["photographs"][0][0].double().numpy()
    assert image.shape == (66, 66)
    answer = np.zeros_like(image)
    for top in (0, 33):
        for left in (0, 33):
            block = image[top : top + 33, left : left + 33].ravel()
            answer[top : top + 33, left : left + 33] = (
                start.double().numpy() @ (phi.double().numpy() @ block)
            ).reshape(33, 33)
    expected = peak_signal_noise_ratio(image, answer.clip(0, 1), data_range=1.0)
    assert results.final("linear start, 25%", "test") == pytest.approx([expected], abs=1e-3)


def test_the_last_phase_is_the_networks_answer(smoke: dict[str, tuple[Experiment[Any], Results[Any]]]) -> None:
    _, results = smoke["cs-phases"]
    for part in results.parts():
        (by_phase,) = results.curve(part, "by_phase")[0]
        assert len(by_phase) == int(part.split()[0]) + 1
        assert by_phase[-1] > by_phase[0]
        assert by_phase[-1] == pytest.approx(results.curve(part, "validation")[0][-1], abs=1e-2)


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    """The recipe of the experiments, on one batch."""
    options = dataclasses.replace(cs_set11.SMOKE, limit=3, epochs=4, steps=8)
    lab = Lab(tmp_path, 0)
    images = training_images(options, lab)
    phi, start = measurement(0.25, images, lab)
    batch = crops(images, options, phi)()
    net = build("ISTA-Net plus constrained", phi, options, start)
    losses = [record["loss"] for record in train(lab, net, lambda: batch, options, lambda: 0.0)]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 4


def _trained(folder: Path, stop: int | None = None) -> tuple[UnrolledNet, list[float]]:
    """The network and losses of a short run, or of an interrupted one."""
    options = dataclasses.replace(cs_set11.SMOKE, epochs=4, steps=3)
    torch.manual_seed(0)
    lab = Lab(folder, 0)
    images = training_images(options, lab)
    phi, start = measurement(0.25, images, lab)
    net = build("ISTA-Net plus constrained", phi, options, start)
    training = train(lab, net, crops(images, options, phi), options, lambda: 0.0)
    records = list(itertools.islice(training, stop))
    return net, [record["loss"] for record in records]


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_run_that_is_killed_goes_on_to_the_same_network(stop: int, tmp_path: Path) -> None:
    whole, losses = _trained(tmp_path / "whole")
    _trained(tmp_path / "parts", stop)
    again, rest = _trained(tmp_path / "parts")
    # The epoch that was not saved is repeated.
    assert rest == losses[stop - 1 :]
    for (name, ours), (_, theirs) in zip(again.named_parameters(), whole.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_some_crops_end_like_padded_images() -> None:
    torch.manual_seed(0)
    x = 0.5 + 0.5 * torch.rand(200, 1, 66, 66)
    cut = bordered(x)
    kept = cut > 0
    assert torch.equal(cut[kept], x[kept])
    rows, columns = kept[:, 0, :, 0].sum(1), kept[:, 0, 0].sum(1)
    for left in (rows, columns):
        assert int(left.min()) > 33
        assert 0.1 < float((left < 66).float().mean()) < 0.4
    assert int(kept.sum()) == int((rows * columns).sum())


def test_the_start_knows_the_borders_of_whole_images(tmp_path: Path) -> None:
    """Better on padded images than a start fitted to inner blocks, which have no zero padding."""
    torch.manual_seed(0)
    images = [torch.rand(1, 50, 50).cumsum(-1) / 50 for _ in range(12)]
    phi, start = measurement(0.25, ImageSplits(images, [], {}, ""), Lab(tmp_path, 0))
    inner = torch.cat([to_blocks(image[:, k : k + 33, k : k + 33], 33) for image in images for k in (0, 16)])
    whole = torch.cat([to_blocks(pad_to_blocks(image), 33) for image in images])
    alone = least_squares_start(phi, inner, ridge=1e-5)
    errors = [float((whole - whole @ phi.mT @ q.mT).square().mean()) for q in (start, alone)]
    assert errors[0] < 0.5 * errors[1]

"""Law: every experiment runs at smoke scale from bundled data, and its table, pictures, findings and claims follow."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from minimand.nn import SolverLinear
from minimand.solvers import ProxGD, ProxSG
from minimand_papers.experiment import Results
from minimand_papers.experiments.bibi2019 import solvers_lenet
from minimand_papers.experiments.vidal2018.dropout_mnist import clip, penalty
from minimand_papers.experiments.vidal2018.jacobian_regularizer import jacobian_norm
from minimand_papers.registry import experiments, find
from minimand_papers.runner import RunSetting, read_results, run
from minimand_papers.training import stages
from test_data import write_cifar, write_svhn

NAMES = [experiment.name for experiment in experiments()]


@pytest.mark.parametrize("name", NAMES)
def test_smoke(name: str, tmp_path: Path) -> None:
    path = run(RunSetting(name, "smoke", out=tmp_path, jobs=1))
    experiment, results, stored = read_results(path.parent)
    assert stored["complete"]
    assert path.stat().st_size < 400_000
    rows = experiment.compare(results)
    assert rows
    assert all(len(row.measured) for row in rows), [row.label for row in rows if not len(row.measured)]
    assert all(str(finding) for finding in experiment.findings(results))
    claims = experiment.claims(results)
    assert all(claim.text and claim.paper and claim.measured for claim in claims)
    plots = experiment.plots(results)
    assert plots
    assert all(plot.alt and plot.title for plot in plots)
    # Half a run has a table and pictures, too.
    nothing = Results(results.options, results.preset, {})
    assert not any(len(row.measured) for row in experiment.compare(nothing))
    experiment.plots(nothing)
    experiment.findings(nothing)
    assert [claim.text for claim in experiment.claims(nothing)] == [claim.text for claim in claims]
    assert {claim.verdict for claim in experiment.claims(nothing)} <= {"not run"}


@pytest.mark.parametrize("name", ["solvers-alexnet", "solvers-vgg", "solvers-dropout-rates"])
def test_cifar_100_columns_run_on_a_file_in_its_format(name: str, tmp_path: Path) -> None:
    write_cifar(tmp_path / "data", "cifar100", 60)
    preset = find(name).presets["smoke"]
    options = dataclasses.replace(preset.options, dataset="cifar100", enlarge=1, batch=20, limit=40)
    path = run(RunSetting(name, "smoke", options, (0,), tmp_path / "out", tmp_path / "data", jobs=1))
    experiment, results, _ = read_results(path.parent)
    papers = [row.paper for row in experiment.compare(results) if row.paper is not None]
    assert papers
    assert all(30 < number < 72 for number in papers)


def test_learning_rates_have_equal_stages() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-2)
    schedule = stages(optimizer, (1e-2, 1e-3, 1e-4), 7)
    seen = []
    for _ in range(7):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx([1e-2] * 3 + [1e-3] * 2 + [1e-4] * 2)


@pytest.mark.parametrize(
    ("part", "solver", "blocks", "dropout"),
    [
        ("D-D baseline", None, (), (0.5, 0.5)),
        ("D-ND baseline", None, (), (0.5, 0.0)),
        ("D-D Prox-SG", ProxSG, (1, 4), ()),
        ("D-ND Prox-SG", ProxSG, (1,), ()),
        ("ND-D Prox-SG", ProxSG, (4,), ()),
        ("no dropout", None, (), (0.0, 0.0)),
        ("no dropout, Prox-GD", ProxGD, (1, 4), ()),
    ],
)
def test_table_2_replaces_the_blocks_it_names(part: str, solver: type | None, blocks: tuple, dropout: tuple) -> None:
    net = solvers_lenet.network(solvers_lenet.SolversLeNetOptions(), part, 10, (3, 32, 32))
    layers = {i: layer for i, layer in enumerate(net.classifier) if isinstance(layer, SolverLinear)}
    assert tuple(layers) == blocks
    assert all(type(layer.solver) is solver and layer.solver.iters == 10 for layer in layers.values())
    assert all(layer.solver.tau == 0.5 for layer in layers.values() if solver is ProxSG)
    if dropout:
        assert tuple(layer.p for layer in net.classifier if isinstance(layer, nn.Dropout)) == dropout
    else:
        # The solver layer samples in place of the dropout, which passes its input on.
        x = torch.ones(2, 8)
        assert all(torch.equal(layer.train()(x), x) for layer in net.classifier if isinstance(layer, nn.Dropout))


def test_the_jacobian_of_a_linear_network_is_its_weight() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 3).double()
    x = torch.randn(20_000, 5, dtype=torch.float64, requires_grad=True)
    # One random projection for each of many inputs: their mean is the squared Frobenius norm.
    assert float(jacobian_norm(layer(x), x).detach()) == pytest.approx(
        float(layer.weight.detach().square().sum()), rel=0.02
    )


def test_regularizers_of_the_digits_are_what_they_say() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    weights = [model[0].weight, model[2].weight]
    sizes = [torch.cat([layer.weight.flatten(), layer.bias]).norm() for layer in (model[0], model[2])]
    torch.testing.assert_close(penalty("product of norms", 2.0, model, x, late=False), 2 * sizes[0] * sizes[1])
    torch.testing.assert_close(penalty("L2 + L1", 2.0, model, x, late=True), 2 * sum(w.abs().sum() for w in weights))
    assert penalty("L2 + L1", 2.0, model, x, late=False) == 0
    rate = torch.sigmoid(model[0](x)).mean(0)
    target, aim = (torch.distributions.Bernoulli(probs=p) for p in (torch.full_like(rate, 0.05), rate))
    divergence = torch.distributions.kl_divergence(target, aim).sum()
    torch.testing.assert_close(penalty("L2 + KL-sparsity", 2.0, model, x, late=True), 2 * divergence)
    directions = [w / w.norm(dim=1, keepdim=True) for w in weights]
    clip(model, 0.1)
    for weight, direction in zip(weights, directions, strict=True):
        assert float(weight.detach().norm(dim=1).max()) <= 0.1 + 1e-6
        torch.testing.assert_close(weight / weight.norm(dim=1, keepdim=True), direction)


def test_house_numbers_run_on_a_file_in_their_format(tmp_path: Path) -> None:
    write_svhn(tmp_path / "data")
    preset = find("lpom-svhn").presets["smoke"]
    options = dataclasses.replace(preset.options, dataset="svhn", enlarge=1, batch=4, epochs=1, digits=())
    path = run(RunSetting("lpom-svhn", "smoke", options, (0,), tmp_path / "out", tmp_path / "data", jobs=1))
    experiment, results, stored = read_results(path.parent)
    assert stored["complete"]
    assert [row.paper for row in experiment.compare(results)[:3]] == [98.3, 95.0, 96.5]

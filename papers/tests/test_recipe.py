"""The fast recipe: whitening, groups, the schedule, lookahead, and heads on cached features."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from minimand.errors import OptionError, ShapeError
from minimand.nn import SolverLinear
from minimand_papers.context import Lab
from minimand_papers.data import CropFlip
from minimand_papers.experiment import Results
from minimand_papers.experiments.bibi2019 import solvers_heads as heads
from minimand_papers.experiments.bibi2019 import solvers_lenet as lenet
from minimand_papers.features import Features, HeadTraining, cache, cached, head_accuracy, train_head
from minimand_papers.recipe import FastRecipe, Lookahead, fast_train
from minimand_papers.sweeps import best_of, usable
from minimand_papers.training import loaders
from minimand_papers.zoo import FastNet


def test_the_first_convolution_whitens_patches() -> None:
    generator = torch.Generator().manual_seed(0)
    images = nn.functional.avg_pool2d(torch.randn(200, 3, 34, 34, generator=generator), 3, 1)
    net = FastNet(width=0.1, hidden=8)
    net.whiten(images, floor=0.0)
    out = net.whitening(images).permute(0, 2, 3, 1).flatten(0, 2).double()
    half = out.shape[1] // 2
    moment = out[:, :half].mT @ out[:, :half] / len(out)
    assert torch.allclose(moment, torch.eye(half, dtype=torch.float64), atol=1e-3)
    assert torch.equal(out[:, half:], -out[:, :half])
    assert not net.whitening.weight.requires_grad
    with pytest.raises(ShapeError, match="3 channels, got 1"):
        net.whiten(images[:, :1])


def test_first_filters_copy_and_head_has_the_blocks_of_the_paper() -> None:
    net = FastNet(width=0.1, hidden=8, dropout=(0.25, 0.75)).eval()
    x = torch.rand(2, 24, 6, 6)
    convolution = next(layer for layer in net.features[2:] if isinstance(layer, nn.Conv2d))
    count = min(convolution.weight.shape[:2])
    assert torch.allclose(convolution(x)[:, :count], x[:, :count], atol=1e-6)
    assert [type(net.classifier[i]) for i in (0, 1, 3, 4)] == [nn.Dropout, nn.Linear, nn.Dropout, nn.Linear]
    assert (net.classifier[0].p, net.classifier[3].p) == (0.25, 0.75)


def test_every_trained_parameter_is_in_one_group_with_its_rate() -> None:
    net, recipe = FastNet(width=0.1, hidden=8), FastRecipe()
    groups = recipe.groups(net)
    listed = [parameter for group in groups for parameter in group["params"]]
    assert len(set(listed)) == len(listed)
    assert set(listed) == {p for p in net.parameters() if p.requires_grad}
    assert [group["lr"] for group in groups] == [recipe.convolutions[0], recipe.norms[0], recipe.head[0]]
    assert {p.dim() for p in groups[0]["params"]} == {4}
    free = net.classifier[1].bias
    *others, last = recipe.groups(net, [free])
    assert (last["params"], last["weight_decay"]) == ([free], 0.0)
    assert all(free is not parameter for group in others for parameter in group["params"])


def test_lookahead_returns_to_the_average() -> None:
    net = nn.BatchNorm1d(2)
    average = Lookahead(net, 2)
    with torch.no_grad():
        net.bias.fill_(1.0)
        net.running_mean.fill_(3.0)
    average.after(1, 4)
    assert float(net.bias.detach()[0]) == 1.0
    average.after(2, 4)
    decay = 0.95**2 * 0.5**3
    assert net.bias.detach().tolist() == pytest.approx([1 - decay] * 2)
    assert net.running_mean.tolist() == pytest.approx([3 * (1 - decay)] * 2)
    other = Lookahead(nn.BatchNorm1d(2), 2)
    other.load_state_dict(average.state_dict())
    assert all(torch.equal(average.average[name], tensor) for name, tensor in other.average.items())


def test_wrong_recipes_are_refused() -> None:
    for wrong in ({"epochs": 0}, {"restart": -1}, {"rise": 1.0}):
        with pytest.raises(OptionError):
            FastRecipe(**wrong)
    for wrong in ({"p": (1.0,)}, {"rates": (0.0,)}, {"heads": 0}, {"rates": ()}):
        with pytest.raises(OptionError):
            dataclasses.replace(heads.SMOKE, **wrong)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_the_recipe_learns_digits(tmp_path: Path, bfloat16: bool) -> None:
    torch.manual_seed(0)
    lab = Lab(tmp_path / "net", 0)
    data = loaders(lab, "digits", 25, limit=800, enlarge=4, augment=CropFlip(2, flip=False, reflect=True))
    net = FastNet(data.classes, data.shape[0], width=0.2, hidden=256)
    net.whiten(data.train.normalize(data.train.split.images))
    *_, last = fast_train(lab, net, data, FastRecipe(4, 1, bfloat16=bfloat16))
    assert last["test"] > 80


@pytest.mark.parametrize("has", [False, True])
def test_products_are_in_bfloat16_only_where_the_processor_has_instructions(
    monkeypatch: pytest.MonkeyPatch, has: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": has})
    seen = set[torch.dtype]()
    net = nn.Linear(4, 3)
    net.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    rows = torch.randn(6, 4), torch.randint(3, (6,))
    train_head(net, Features(rows, rows, rows), HeadTraining(0.1, bfloat16=True), torch.Generator())
    assert seen == {torch.bfloat16 if has else torch.float32}


def test_cached_features_are_the_trunks_and_train_a_head(tmp_path: Path) -> None:
    torch.manual_seed(0)
    lab = Lab(tmp_path / "net", 0)
    data = loaders(lab, "digits", 50, limit=300)
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU())
    cache(lab, trunk, data, 2)
    found = cached(Lab(tmp_path / "head", 0), "net")
    assert len(found.train[0]) == 600
    images = torch.cat([images for images, _ in data.test])
    assert torch.allclose(found.test[0], trunk(images), rtol=1e-3, atol=1e-3)
    net = nn.Linear(40, 10)
    train_head(net, found, HeadTraining(0.1, 5, batch=25), torch.Generator().manual_seed(0))
    assert head_accuracy(net, found.test) > 80
    again = nn.Linear(40, 10)
    again.load_state_dict(net.state_dict())
    assert head_accuracy(again, found.test) == head_accuracy(net, found.test)


def test_heads_have_the_solver_where_their_part_says() -> None:
    features = Features(*[(torch.randn(20, 12), torch.arange(20) % 10)] * 3)
    for part, replaced in {
        "p = 0.5, dropout": (),
        "p = 0.5, dropout, equal compute": (),
        "p = 0.95, Prox-SG": ("4",),
        "p = 0, one step": ("4",),
        "both blocks, Prox-SG": ("1", "4"),
        "both blocks, dropout": (),
    }.items():
        net = heads.network(heads.SMOKE, part, features)
        assert tuple(n for n, layer in net.named_modules() if isinstance(layer, SolverLinear)) == replaced
        assert net(features.train[0]).shape == (20, 10)


def test_rates_are_chosen_on_validation_and_heads_are_paired() -> None:
    options = dataclasses.replace(heads.SMOKE, p=(0.0,), rates=(0.1, 1.0), heads=3)

    def rows(validation: tuple[float, float], test: tuple[float, float], heads: int) -> list[dict[str, float]]:
        return [
            {"head": h, "rate": r, "validation": v + h, "test": t + h}
            for h in range(heads)
            for r, v, t in zip((0.1, 1.0), validation, test, strict=True)
        ]

    # The third head of Prox-SG has one rate only, and is left out.
    sampled = [*rows((50, 60), (70, 40), 2), {"head": 2, "rate": 0.1, "validation": 99.0, "test": 99.0}]
    records = {"p = 0, dropout": {0: rows((30, 20), (35, 90), 3)}, "p = 0, Prox-SG": {0: sampled}}
    results = Results(options, "laptop", records)
    chosen = heads.tuned(results)
    assert chosen.final("p = 0, dropout", "test") == [35, 36, 37]
    assert chosen.final("p = 0, Prox-SG", "test") == [40, 41]
    assert chosen.paired("p = 0, Prox-SG", "p = 0, dropout", "test") == [5, 5]
    sweeps = heads.at(results, 0.0)
    assert best_of(sweeps.values()) == 91
    assert usable(sweeps["dropout"], 91) == (63.5, 0.5)
    assert usable(sweeps["Prox-SG"], 91) == (55.5, 0.0)
    assert usable(sweeps["one step"], 91) is None
    assert heads.compare(results)
    assert heads.claims(results)


def test_lenet_with_the_sources_steps_stands_beside_ours() -> None:
    options = lenet.SolversLeNetOptions(steps="source", both=(0.5, 0.95), iters=4)
    names = [part.name for part in lenet.parts(options)]
    assert names[8:] == [
        "D-D Prox-SG; our steps",
        "D-D baseline; p = 0.95",
        "D-D Prox-SG; p = 0.95; the source's steps",
        "D-D Prox-SG; p = 0.95; our steps",
    ]
    for part, step, tau in (
        ("D-D Prox-SG", "1/L", 0.5),
        ("D-D Prox-SG; our steps", "auto", 0.5),
        ("D-D Prox-SG; p = 0.95; the source's steps", "1/L", 0.05),
    ):
        layer = lenet.network(options, part, 10, (3, 32, 32)).classifier[1]
        assert layer.solver.step == step
        assert layer.solver.tau == pytest.approx(tau)
        assert layer.options.start == "zero"
    plain = lenet.network(options, "D-D baseline; p = 0.95", 10, (3, 32, 32))
    assert plain.classifier[0].p == plain.classifier[3].p == 0.95
    with pytest.raises(OptionError, match="dropout rate"):
        dataclasses.replace(options, both=(1.0,))

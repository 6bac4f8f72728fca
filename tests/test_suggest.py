"""Suggestions: which layers, which solver and how many iterations fit a budget of time."""

import itertools

import pytest
import torch
from torch import nn

from minimand.errors import ConversionError, OptionError
from minimand.nn import SolverLayer, convert, suggest
from minimand.nn.suggest import _LADDER, _Measured, _Search
from minimand.solvers import ProxGD, ProxSG


def network():
    layers = (nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(96, 12))
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 3))


def test_a_suggestion_is_a_plan_with_reasons_and_leaves_the_model_alone():
    net, x = network(), torch.randn(32, 2, 6, 6)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    state, text = torch.get_rng_state(), str(net)
    plan = suggest(net, x, budget=200.0)
    assert torch.equal(torch.get_rng_state(), state)
    assert str(net) == text
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert isinstance(plan.converted["0"].options.solver, ProxGD)
    assert isinstance(plan.converted["5"].options.solver, ProxSG), "it samples in the place of the dropout"
    assert plan.converted["5"].options.solver.tau == 0.5
    assert "GELU" in plan.refused["7"]
    assert "neither an activation nor a dropout" in plan.left["9"]
    assert "of its gap" in str(plan)
    assert "budget 200 ×" in str(plan)
    converted = convert(net, plan)
    assert [type(m).__name__ for m in converted if isinstance(m, SolverLayer)] == ["SolverBlockConv2d", "SolverLinear"]
    converted(x).sum().backward()


def test_keywords_tuples_and_losses():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

        def forward(self, *, image, scale):
            return {"logits": self.net(image) * scale, "label": torch.arange(len(image))}

    batch = {"image": torch.randn(64, 8), "scale": 2.0}
    plan = suggest(Named(), batch, budget=50.0, loss=lambda out: out["logits"].square().sum())
    assert "net.0" in plan.converted
    assert "net.0" in suggest(Named(), batch, budget=50.0).converted


class _Skip(nn.Module):
    """A skip without a normalisation: the layer is computed first, the skip is added later."""

    def __init__(self):
        super().__init__()
        self.into, self.layer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = torch.relu(self.into(x))
        return torch.relu(self.layer(h) + h)


def test_a_residual_layer_without_a_normalisation_is_measured():
    model, x = _Skip(), torch.randn(32, 8)
    plan = suggest(model, x, budget=100.0)
    assert {"into", "layer"} <= plan.converted.keys()
    convert(model, plan)(x).sum().backward()


def test_a_suggestion_to_convert_nothing_converts_nothing():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)), torch.randn(4, 8)
    plan = suggest(model, x)
    assert not plan.converted
    assert "No layer is converted" in str(plan)
    assert torch.equal(convert(model, plan)(x), model(x))


class _Mixed(nn.Sequential):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


def test_layers_under_autocast_are_measured():
    net = _Mixed(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    assert suggest(net, torch.randn(64, 8), budget=200.0).converted.keys() == {"0", "2"}


def test_iterations_go_where_they_close_most_of_the_gap_for_the_time(monkeypatch):
    """Against all combinations of two layers: the greedy choice is within the budget and cannot be extended."""
    monkeypatch.setattr(_Search, "__init__", lambda self: None)
    monkeypatch.setattr(_Search, "_set", lambda self, counts: None)
    search = _Search()
    search.plain, search.ratio = 1.0, 1.0
    closed = [1 - 0.5**k for k in range(_LADDER[-1] + 1)]
    search.measured = {
        "cheap": _Measured(0.1, 0.2, 0.1, (0.0, *closed[:-1])),
        "dear": _Measured(0.1, 0.6, 0.5, (0.0, *closed[:-1])),
    }
    search.counts = dict.fromkeys(search.measured, 1)

    def cost(counts):
        return sum(search.measured[path].extra(count) for path, count in counts.items())

    def gain(counts):
        return sum(search.measured[path].closed[count] for path, count in counts.items())

    monkeypatch.setattr(_Search, "_ratio", lambda self: 1 + cost(self.counts))
    search.spend(3.0)
    assert cost(search.counts) <= 2.0
    assert search.counts["cheap"] > search.counts["dear"]
    best = max(
        gain(counts)
        for pair in itertools.product(_LADDER, repeat=2)
        if cost(counts := dict(zip(search.measured, pair, strict=True))) <= 2.0
    )
    assert gain(search.counts) >= 0.9 * best


def test_a_step_that_measures_above_the_budget_loses_iterations(monkeypatch):
    ratios = iter([9.0, 7.0, 2.5])
    monkeypatch.setattr(_Search, "_ratio", lambda self: next(ratios))
    found = suggest(network(), torch.randn(16, 2, 6, 6), budget=1000.0)
    monkeypatch.setattr(_Search, "_ratio", lambda self: 2.5)
    assert "this one 2.5 ×" in found.summary or found.converted
    monkeypatch.setattr(_Search, "_ratio", lambda self: 99.0)
    none = suggest(network(), torch.randn(16, 2, 6, 6), budget=2.0)
    assert not none.converted
    assert "no iteration fits" in none.summary
    x = torch.randn(3, 2, 6, 6)
    assert torch.equal(convert(none.model.eval(), none)(x), none.model(x))


def test_wrong_arguments_get_a_sentence():
    with pytest.raises(OptionError, match="batch is a tensor, or a tuple or dictionary of arguments with one, got str"):
        suggest(network(), "images")
    net = network()
    for budget in (1.0, 0.5, -1, float("nan"), True, "three"):
        with pytest.raises((OptionError, ConversionError), match="budget"):
            suggest(net, torch.randn(4, 2, 6, 6), budget=budget)
    with pytest.raises(ConversionError, match="does not run on the example"):
        suggest(net, torch.randn(4, 3, 6, 6))
    with pytest.raises(ConversionError, match="does not run on the example"):
        suggest(net, torch.randn(4, 2, 6, 6).double())
    with pytest.raises(OptionError, match="no samples"):
        suggest(net, torch.randn(0, 2, 6, 6))
    with pytest.raises(ConversionError, match="fails on the batch"):
        suggest(net, torch.randn(4, 2, 6, 6), loss=lambda out: out["missing"])
    other = network()
    with pytest.raises(ConversionError, match="another model"):
        convert(other, suggest(net, torch.randn(16, 2, 6, 6), budget=200.0))

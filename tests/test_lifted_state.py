"""Laws: lifted training carries no stale state between calls and changes only the parameters that it trains."""

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from minimand.errors import CapabilityError, ChainError, MinimandError, NonFiniteError, OptionError, ShapeError
from minimand.train.lifted import LPOM, MAC, BlockPenalty, Recipe
from minimand.train.lifted.nonlinear import pre_activation
from minimand.train.lifted.runs import MiniBatchRun
from minimand.train.lifted.units import unit_of
from tests.test_lifted import ACTIVATIONS, METHODS, STEEP, _batch, _loss, _net


def _state(net):
    return [tensor.clone() for tensor in net.state_dict().values()]


def _same(net, state):
    return all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), state, strict=True))


# The last good weights


@pytest.mark.parametrize("epochs", [1, 2, 3, 50])
def test_a_diverged_fit_ends_with_the_last_weights_that_gave_a_finite_loss(epochs, monkeypatch):
    """Bit-identical, whether the run diverges in the middle or with its last update."""
    net = _net(nn.ReLU).float()
    x, y = _batch()
    x, seen = x.float(), []

    def batch(self, x, y, share, plain=MiniBatchRun.batch):
        if math.isfinite(_loss(net, x, y, "squared")):
            seen.append(_state(net))
        return plain(self, x, y, share)

    monkeypatch.setattr(MiniBatchRun, "batch", batch)
    with pytest.raises(NonFiniteError, match=r"last good weights: the (weight|activation) update (of|below) [024]\b"):
        LPOM(net, recipe=Recipe(rate=1e22, damping=1e-6)).fit([(x, y)], epochs)
    assert _same(net, seen[-1])
    assert math.isfinite(_loss(net, x, y, "squared"))


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_weights_that_are_not_finite_are_named(part):
    net = _net(nn.ReLU)
    with torch.no_grad():
        getattr(net[2], part).view(-1)[0] = math.inf
    x, y = _batch()
    for call in (LPOM(net).step, lambda x, y: LPOM(net).fit([(x, y)], 1)):
        with pytest.raises(NonFiniteError, match=r"of 2\b"):
            call(x, y)


def test_an_energy_that_overflows_names_its_largest_term():
    net = _net(nn.ReLU, sizes=(6, 8, 3)).float()
    x, y = _batch()
    method = MAC(net, mu=[1e38, 1.0])
    kept = _state(net)
    # Finite activations and weights, but μ‖·‖² is not.
    method._sweep = lambda v: v.xs.__setitem__(1, v.xs[1] + 10)
    method._move_weights = lambda v: None
    with pytest.raises(NonFiniteError, match="the term of 0 is the largest part"):
        method.step(x.float(), y)
    assert _same(net, kept)


# Weights that change between calls, and dtypes


def test_variables_start_again_when_the_weights_have_changed():
    x, y = _batch()
    net = _net(nn.Tanh)
    lpom = LPOM(net)
    lpom.step(x, y)
    for change in (lambda: net[2].weight.data.mul_(1.1), lambda: net.load_state_dict(_net(nn.Tanh, 5).state_dict())):
        assert abs(lpom.energy(x, y) - _loss(net, x, y, "squared")) > 1e-6
        with torch.no_grad():
            change()
            net[0].bias.add_(0.0)
        assert lpom.energy(x, y) == pytest.approx(_loss(net, x, y, "squared"), rel=1e-12)
        lpom.step(x, y)


def test_fit_after_a_change_of_precision_is_a_first_fit():
    x, y = _batch(samples=64)
    net = _net(nn.ReLU, sizes=(6, 20, 20, 3)).float()
    lpom = LPOM(net)
    lpom.fit([(x.float(), y)], 2)
    net.double()
    other = copy.deepcopy(net)
    lpom.fit([(x, y)], 2)
    LPOM(other).fit([(x, y)], 2)
    assert _same(net, _state(other))
    with pytest.raises(CapabilityError, match=r"0 is torch.bfloat16.*\.float\(\)"):
        LPOM(_net(nn.ReLU).bfloat16()).fit([(x.bfloat16(), y)], 1)


@pytest.mark.parametrize("mode", ["fast", "monotone"])
@pytest.mark.parametrize("mu", [None, [0.5, 1.0, 2.0]])
def test_the_penalty_schedule_grows_in_a_fit_and_starts_anew_in_the_next(mode, mu, monkeypatch):
    seen = []

    def sweep(self, v, plain=MAC._sweep):
        seen.append(self.mu)
        plain(self, v)

    monkeypatch.setattr(MAC, "_sweep", sweep)
    recipe = Recipe(continuation=1)
    method, batches = MAC(_net(nn.Tanh), mu=mu, growth=2.0, recipe=recipe), [_batch()]
    method.fit(batches, 3, mode)
    method.fit(batches, 3, mode)
    first = mu or ((0.01, 0.1, 1.0) if mode == "fast" else (1.0, 1.0, 1.0))
    for found, scale in zip(seen, (1, 2, 4, 1, 2, 4), strict=True):
        assert found == pytest.approx([scale * m for m in first])


@pytest.mark.parametrize("name", ["tanh", "softplus", "elu", "selu", "elu2", "leaky3"])
def test_pre_activations_are_minimizers(name):
    """To a thousandth, against every point of a fine grid, including steep activations."""
    unit = unit_of("unit", (ACTIVATIONS | STEEP)[name]())
    g = torch.Generator().manual_seed(0)
    center, x, noise = 3 * torch.randn(3, 300, generator=g, dtype=torch.float64)
    x = unit.phi(x) + 0.2 * noise

    def value(u):
        return (u - center).square() + (x - unit.phi(u)).square()

    ends = torch.stack([center, center + unit.slope * (x - unit.phi(center))])
    grid = ends[0] + torch.linspace(0, 1, 2001, dtype=torch.float64)[:, None] * (ends[1] - ends[0])
    found, least = value(pre_activation(unit, center, center, x)), value(grid).amin(0)
    assert bool((found <= least * (1 + 1e-3) + 1e-4).all())


# What is not trained


@pytest.mark.parametrize("name", list(METHODS))
def test_frozen_layers_stay(name):
    net = _net(nn.ReLU)
    net[2].requires_grad_(False)
    kept = _state(net[2])
    others = [_state(net[k]) for k in (0, 4)]
    x, y = _batch()
    method = METHODS[name](net)
    method.step(x, y)
    method.fit([(x, y)], 2)
    assert _same(net[2], kept)
    assert not any(_same(net[k], state) for k, state in zip((0, 4), others, strict=True))


def _normalized():
    torch.manual_seed(0)
    parts = (nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
    return nn.Sequential(*parts).double(), torch.randn(10, 2, 6, 6, dtype=torch.float64), torch.randint(3, (10,))


def test_running_statistics_move_with_training_only():
    net, x, y = _normalized()
    kept, twin = _state(net[1]), copy.deepcopy(net)
    lpom = LPOM(net)
    lpom.energy(x, y)
    for refused in (lambda: lpom.step(x, y[:-1]), lambda: lpom.step(1e200 * x, 1e200 * F.one_hot(y, 3).double())):
        with pytest.raises(MinimandError):
            refused()
    assert _same(net[1], kept)
    twin(x)
    lpom.step(x, y)
    torch.testing.assert_close(dict(net[1].named_buffers()), dict(twin[1].named_buffers()))
    lpom.step(x, y)
    torch.testing.assert_close(dict(net[1].named_buffers()), dict(twin[1].named_buffers()))
    net, x, y = _normalized()
    LPOM(net).fit([(x, y)], 1)
    torch.testing.assert_close(dict(net[1].named_buffers()), dict(twin[1].named_buffers()))


class _Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def _hooked():
    net = _net(nn.ReLU)
    net[2].register_forward_hook(lambda module, args, output: 2 * output)
    return net


def _half_frozen():
    net = _net(nn.ReLU)
    net[2].bias.requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (
            lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4)), nn.ReLU(), nn.Linear(4, 3)),
            "0 has a param",
        ),
        (
            lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), parametrizations.spectral_norm(nn.Linear(4, 3))),
            "2 has a par",
        ),
        (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), _Doubled(4, 3)), "2 (_Doubled) has a forward of its own"),
        (_hooked, "2 (Linear) has a forward hook"),
        (_half_frozen, "2 has its weight or its bias frozen"),
        (lambda: nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 3)), "0 (LazyLinear) has no weight yet"),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)),
            "put the activation before the pooling",
        ),
    ],
)
def test_models_that_would_be_trained_as_something_else_are_refused(build, says):
    with pytest.raises(ChainError, match=re.escape(says)):
        BlockPenalty(build())


class _Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        return self.second(hidden), hidden


def test_errors_say_what_was_given():
    x, y = _batch()
    lpom = LPOM(_net(nn.ReLU))
    with pytest.raises(ChainError, match="returns more than one tensor"):
        BlockPenalty(_Two())
    for call in (lpom.step, lpom.energy, lambda x, y: lpom.fit([(x, y)], 1)):
        with pytest.raises(ShapeError, match="at least one sample"):
            call(x[:0], y[:0])
        with pytest.raises(CapabilityError, match="a list"):
            call(x, y.tolist())
    for mu in (True, "1", [1.0, True, 1.0]):
        with pytest.raises(OptionError, match="mu must be a number"):
            LPOM(_net(nn.ReLU), mu=mu)
    assert LPOM(_net(nn.ReLU), mu=torch.tensor(2.0)).mu == (2.0,) * 3
    assert LPOM(_net(nn.ReLU), mu=torch.tensor([1.0, 2.0, 3.0])).mu == (1.0, 2.0, 3.0)
    negative = torch.randn(20, 3, dtype=torch.float64)
    with pytest.raises(OptionError, match="cross-entropy must be ≥ 0"):
        LPOM(_net(nn.ReLU), loss="cross_entropy").step(x, negative)
    BlockPenalty(_net(nn.ReLU)).step(x, negative)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("method", [LPOM, MAC, BlockPenalty])
def test_continuation_lowers_the_loss_of_deep_chains(method, activation):
    """Five layers: without continuation the energy falls and LPOM's loss rises; with it the loss never rises."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), activation())]
    start = nn.Sequential(*layers, nn.Linear(6, 3)).double()
    x, y = torch.randn(40, 6, dtype=torch.float64), torch.randint(0, 3, (40,))
    net = copy.deepcopy(start)
    history = method(net).fit([(x, y)], 8, mode="monotone")
    losses = [_loss(start, x, y, "squared") / 40, *(epoch.loss for epoch in history)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.99 * losses[0]
    assert losses[-1] == pytest.approx(_loss(net, x, y, "squared") / 40)
    if method is LPOM:
        plain = LPOM(copy.deepcopy(start), recipe=Recipe(continuation=1)).fit([(x, y)], 8, mode="monotone")
        assert plain[-1].energy < plain[0].energy
        assert plain[-1].loss > losses[-1]

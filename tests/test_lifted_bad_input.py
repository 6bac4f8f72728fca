"""Lifted training rejects bad models and inputs by name, before any work; a diverged run keeps good weights."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from minimand.errors import (
    CapabilityError,
    ChainError,
    MinimandError,
    NonFiniteError,
    NotProximal,
    OptionError,
    ShapeError,
)
from minimand.train.lifted import LPOM, MAC, BlockPenalty, LiftedReLU, Recipe, SplitADMM
from minimand.train.lifted.chain import parse
from minimand.train.lifted.units import unit_of
from tests.test_lifted import METHODS, _batch, _loss, _net


@pytest.mark.parametrize("activation", [nn.GELU, nn.SiLU, nn.Mish])
def test_refuses_what_is_not_monotone(activation):
    with pytest.raises(NotProximal, match="1 "):
        LPOM(_net(activation))


@pytest.mark.parametrize("phi", [torch.exp, lambda z: torch.relu(z) ** 2, torch.sinh, lambda z: z**3])
def test_refuses_slopes_that_grow_forever(phi):
    """Such an activation was taken with its largest slope on [−20, 20], and no step was safe beyond."""
    with pytest.raises(NotProximal, match="slope is not bounded"):
        LPOM(_net(lambda: _Own(phi)))


@pytest.mark.parametrize(
    ("phi", "slope"),
    [
        (lambda z: torch.relu(z) + 5 * torch.relu(z - 100), 6),  # a kink far out
        (lambda z: torch.log1p(torch.exp(z)), 1),  # overflows far out
        (torch.asinh, 1),
    ],
)
def test_slopes_of_own_activations_bound_them_far_out(phi, slope):
    assert slope <= unit_of("1", _Own(phi)).slope <= 1.02 * slope


class _Own(nn.Module):
    def __init__(self, phi):
        super().__init__()
        self.phi = phi

    def forward(self, z):
        return self.phi(z)


class _Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)) + x)


class _Functional(_Skip):
    def forward(self, x):
        return self.second(F.relu(self.first(torch.flatten(x, 1))))


def test_functional_chains_are_chains():
    assert [layer.path for layer in parse(_Functional()).layers] == ["first", "second"]


class _Square(nn.Module):
    def forward(self, x):
        return x * x


@pytest.mark.parametrize(
    ("net", "names"),
    [
        (_Skip(), "add"),
        (nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU()), "2"),
        (nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3)), "1 .LayerNorm"),
        (nn.Sequential(nn.Linear(6, 4), nn.Dropout(), nn.Linear(4, 3)), "1 .Dropout"),
        (nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Tanh(), nn.Linear(4, 3)), "2 .Tanh"),
        (nn.Sequential(nn.Linear(6, 4), _Square(), nn.Linear(4, 3)), "1 ._Square"),
        (nn.Sequential(nn.Linear(6, 4), nn.Softmax(1), nn.Linear(4, 3)), "1 .Softmax"),
        (nn.ReLU(), "ReLU"),
    ],
)
def test_names_what_breaks_the_chain(net, names):
    """The relatives of LPOM take chains only."""
    with pytest.raises((ChainError, NotProximal), match=names):
        MAC(net)


def test_refuses_shared_weights():
    layer = nn.Linear(4, 4)
    with pytest.raises(ChainError, match="share"):
        MAC(nn.Sequential(layer, nn.ReLU(), layer))


@pytest.mark.parametrize("mu", [0, -1.0, math.nan, math.inf, [1.0, 1.0], [1.0, 0.0, 1.0]])
def test_refuses_mu(mu):
    for method in (LPOM, MAC, BlockPenalty, SplitADMM, LiftedReLU):
        with pytest.raises(OptionError, match="mu"):
            method(_net(nn.ReLU), mu=mu)


def test_refuses_targets_and_inputs_that_do_not_fit():
    lpom, (x, y) = LPOM(_net(nn.ReLU)), _batch()
    for bad in (y[:-1], y.double(), y.unsqueeze(1), torch.zeros(20, 4, dtype=torch.float64)):
        with pytest.raises(ShapeError):
            lpom.step(x, bad)
    with pytest.raises(OptionError, match="3 outputs"):
        lpom.step(x, y + 1)
    with pytest.raises(ShapeError, match=r"0 \(Linear"):
        lpom.step(x[:, :-1], y)
    with pytest.raises(ShapeError, match="float32"):
        lpom.step(x.float(), y)
    with pytest.raises(NonFiniteError, match="input x"):
        lpom.step(torch.where(x > 1, math.nan, x), y)
    with pytest.raises(OptionError, match="mode"):
        lpom.fit([(x, y)], 1, mode="slow")
    with pytest.raises(OptionError, match="iterator"):
        lpom.fit(iter([(x, y)]), 2)
    with pytest.raises(OptionError, match="no batch"):
        lpom.fit([], 1)
    with pytest.raises(OptionError, match="loss"):
        LPOM(_net(nn.ReLU), loss="hinge")
    with pytest.raises(TypeError, match="ReLU only"):
        LiftedReLU(_net(nn.Tanh))


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*_batch(), strict=True))


def test_takes_a_loader_of_unknown_length():
    assert len(LPOM(_net(nn.ReLU)).fit(DataLoader(_Stream(), 10), 2)) == 2


def test_a_diverged_fit_names_the_layer_and_keeps_the_last_good_weights():
    net = _net(nn.ReLU).float()
    x, y = _batch()
    with pytest.raises(NonFiniteError, match="last good weights"):
        LPOM(net, recipe=Recipe(rate=1e30, damping=1e-6)).fit([(x.float(), y)], 50)
    assert all(bool(torch.isfinite(p).all()) for p in net.parameters())
    assert math.isfinite(_loss(net, x.float(), y, "squared"))


@pytest.mark.parametrize("name", list(METHODS))
def test_a_step_that_is_not_finite_leaves_the_weights(name):
    net = _net(nn.ReLU).float()
    x, y = _batch()
    method = METHODS[name](net)
    method.step(x.float(), y)
    kept = [p.clone() for p in net.parameters()]
    with pytest.raises(MinimandError):
        method.step(1e30 * x.float(), 1e30 * F.one_hot(y, 3).float())
    torch.testing.assert_close([p.detach() for p in net.parameters()], [p.detach() for p in kept])


@pytest.mark.parametrize("name", list(METHODS))
def test_a_step_whose_forward_pass_overflows_names_the_layer(name):
    net = _net(nn.ReLU).float()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1e20)
    x, y = _batch()
    with pytest.raises(NonFiniteError, match=r"of 2|of 4"):
        METHODS[name](net).step(x.float(), y)


@pytest.mark.parametrize("name", METHODS)
def test_inference_mode_trains_the_same_or_refuses(name):
    """In inference mode, and on tensors made there, the energies are the same. Weights made there are refused."""
    (x, y), energies = _batch(), []
    for inside in (False, True):
        method = METHODS[name](_net(nn.ReLU))
        with torch.inference_mode(inside):
            u, v = (x * 1, y * 1) if inside else (x, y)
            energies.append([method.step(u, v) for _ in range(3)])
            u.mul_(0.5)
            energies[-1].append(method.step(u, v))
            u.mul_(2.0)
            energies[-1] += [epoch.energy for epoch in method.fit([(u, v)], 2)]
    assert energies[0] == energies[1]
    with torch.inference_mode():
        built = METHODS[name](_net(nn.ReLU))
    for call in (lambda: built.step(x, y), lambda: built.fit([(x, y)], 1)):
        with pytest.raises(MinimandError, match="weight of 0 was made in inference mode"):
            call()


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_layer_that_is_frozen_in_part_later_is_refused(part):
    net, (x, y) = _net(nn.ReLU), _batch()
    method = LPOM(net)
    method.step(x, y)
    net[0].get_parameter(part).requires_grad_(False)
    for call in (lambda: method.step(x, y), lambda: method.fit([(x, y)], 1)):
        with pytest.raises(ChainError, match="0 has its weight or its bias frozen, but not both"):
            call()


@pytest.mark.parametrize("name", METHODS)
def test_autocast_changes_nothing(name):
    """Under autocast everything is computed in the type of the parameters."""
    (x, y), found = _batch(), []
    for on in (False, True):
        net = _net(nn.ReLU).float()
        method = METHODS[name](net)
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            found.append([method.backward(x.float(), y), method.step(x.float(), y), method.energy(x.float(), y)])
            found[-1] += [epoch.energy for epoch in method.fit([(x.float(), y)], 2)]
        assert net[0].weight.grad.dtype == torch.float32
    assert found[0] == found[1]


def test_a_layer_that_was_replaced_is_named_and_not_trained_in_place_of_the_new_one():
    net, (x, y) = _net(nn.ReLU), _batch()
    methods = LPOM(net), MAC(net)
    net[0] = nn.Linear(6, 8).double()
    for method in methods:
        for call in (lambda m=method: m.step(x, y), lambda m=method: m.fit([(x, y)], 1)):
            with pytest.raises(OptionError, match=r"replaced since (LPOM|MAC) read it"):
                call()
    assert methods[0].backward(x, y) > 0
    assert net[0].weight.grad is not None


def test_refuses_data_parallel_networks_and_optimizers_that_need_a_closure():
    net, (x, y) = _net(nn.ReLU), _batch()
    with pytest.raises(OptionError, match="LBFGS evaluates the loss several times"):
        LPOM(net).fit([(x, y)], 1, optimizer=torch.optim.LBFGS(net.parameters()))
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = net
    with pytest.raises(CapabilityError, match="averages the gradients of"):
        LPOM(wrapped)
    with pytest.raises(CapabilityError, match="x is sparse"):
        LPOM(net).backward(x.to_sparse(), y)


def test_a_closure_may_call_backward():
    net, (x, y) = _net(nn.Tanh), _batch()
    lpom, optimizer = LPOM(net, loss="cross_entropy"), torch.optim.LBFGS(net.parameters(), max_iter=5)

    def closure():
        optimizer.zero_grad()
        return lpom.backward(x, y)

    first = optimizer.step(closure)
    assert float(optimizer.step(closure)) < 0.8 * float(first)

"""Laws of lifted training: energies that equal the loss, blocks that are convex, steps that never rise."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import nn

from minimand.train.lifted import LPOM, MAC, BlockPenalty, LiftedReLU, Recipe, SplitADMM
from minimand.train.lifted.losses import CrossEntropy, SquaredError
from minimand.train.lifted.units import unit_of

from .oracles import ridge_control

ACTIVATIONS = {
    "relu": nn.ReLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.1),
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "elu": nn.ELU,
}
STEEP = {"selu": nn.SELU, "elu2": lambda: nn.ELU(2.0), "leaky3": lambda: nn.LeakyReLU(3.0)}
METHODS = {
    "lpom": LPOM,
    "jacobi": lambda net, **options: LPOM(net, sweep="jacobi", **options),
    "mac": MAC,
    "mac_gradient": lambda net, **options: MAC(net, x_step="gradient", **options),
    "penalty": BlockPenalty,
    "admm_output": SplitADMM,
    "admm_all": lambda net, **options: SplitADMM(net, splitting="all", **options),
    "lifted_relu": LiftedReLU,
}
DESCENDING = [name for name in METHODS if not name.startswith("admm")]


def _net(activation, seed=0, sizes=(6, 8, 7, 3)):
    torch.manual_seed(seed)
    layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1]).double()


def _batch(seed=0, samples=20):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 6, generator=g, dtype=torch.float64), torch.randint(3, (samples,), generator=g)


def _loss(net, x, y, loss):
    with torch.no_grad():
        if loss == "squared":
            return float(0.5 * (net(x) - F.one_hot(y, 3)).square().sum())
        return float(F.cross_entropy(net(x), y, reduction="sum"))


@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
@pytest.mark.parametrize("name", [*ACTIVATIONS, *STEEP])
def test_energy_at_a_forward_pass_is_the_loss(name, loss):
    net = _net((ACTIVATIONS | STEEP)[name])
    x, y = _batch()
    for mu in (None, 3.0, [0.1, 1.0, 7.0]):
        for method in (LPOM, MAC, BlockPenalty, SplitADMM):
            assert method(net, mu=mu, loss=loss).energy(x, y) == pytest.approx(_loss(net, x, y, loss), abs=1e-10)


def test_energy_of_lifted_relu_exceeds_the_loss():
    """[Lin2019]: a forward pass does not satisfy its optimality conditions."""
    net = _net(nn.ReLU)
    x, y = _batch()
    assert LiftedReLU(net).energy(x, y) > _loss(net, x, y, "squared") + 0.1


@pytest.mark.parametrize("sweep", ["gauss_seidel", "jacobi"])
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_energy_never_rises(name, sweep):
    """0 increases in 100 full-batch steps in float64."""
    for loss in ("squared", "cross_entropy"):
        steps = 100 if sweep == "gauss_seidel" and loss == "squared" else 15
        net = _net(ACTIVATIONS[name])
        x, y = _batch()
        lpom = LPOM(net, loss=loss, sweep=sweep)
        energies = [lpom.energy(x, y), *(lpom.step(x, y) for _ in range(steps))]
        assert energies == sorted(energies, reverse=True)
        assert energies[-1] < 0.7 * energies[0]


@pytest.mark.parametrize("name", list(STEEP))
def test_energy_never_rises_for_steep_activations(name):
    """SELU and ELU(α > 1) are not proxes, but the majorised step needs monotonicity only."""
    lpom = LPOM(_net(STEEP[name]), mu=[0.5, 1.0, 2.0])
    x, y = _batch()
    energies = [lpom.energy(x, y), *(lpom.step(x, y) for _ in range(30))]
    assert energies == sorted(energies, reverse=True)


@pytest.mark.parametrize("name", [*ACTIVATIONS, *STEEP, "hardsigmoid"])
def test_slopes_bound_the_activation_and_are_attained(name):
    """A slope bound that is too large shortens every step; the sigmoid's slope is at most ¼."""
    module = (ACTIVATIONS | STEEP | {"hardsigmoid": nn.Hardsigmoid})[name]()
    unit, z = unit_of("net.1", module), torch.linspace(-8, 8, 4001, dtype=torch.float64)
    rises = module(z).diff() / z.diff()
    assert 0.99 * unit.slope <= float(rises.max()) <= unit.slope * (1 + 1e-9)
    torch.testing.assert_close(unit.phi(z), module(z))


@pytest.mark.parametrize("name", [name for name in DESCENDING if "lpom" not in name and name != "jacobi"])
def test_objectives_of_the_relatives_never_rise(name):
    for activation in (nn.ReLU,) if name == "lifted_relu" else (nn.ReLU, nn.LeakyReLU, nn.Tanh):
        method = METHODS[name](_net(activation), loss="cross_entropy", mu=[0.5, 1.0, 2.0])
        x, y = _batch()
        energies = [method.energy(x, y), *(method.step(x, y) for _ in range(15))]
        assert energies == sorted(energies, reverse=True)
        assert energies[-1] < 0.9 * energies[0]


def test_the_plain_fixed_point_diverges_where_the_majorised_step_descends():
    """Erratum: X ← φ(z − r Wᵀ(φ(WX) − X⁺)) of [Lin2019] is a contraction only for r‖W‖² < 1."""
    net = _net(nn.LeakyReLU, seed=3)
    with torch.no_grad():
        net[2].weight.mul_(8)
    x, y = _batch()
    lpom = LPOM(net)
    lpom.step(x, y)
    v = lpom._variables
    energies = [lpom._energy(v)]
    for _ in range(10):
        pull = v.maps[1].adjoint(v.xs[2] - v.maps[1].layer.unit.phi(v.zs[1]))
        v.xs[1] = v.maps[0].layer.unit.phi(v.zs[0] + pull)
        v.zs[1] = v.maps[1].apply(v.xs[1])
        energies.append(lpom._energy(v))
    assert max(energies) > 10 * energies[0]


@given(st.sampled_from([*ACTIVATIONS, *STEEP]), st.integers(0, 2**16), st.floats(0.05, 0.95))
def test_theorem_4_block_multiconvexity(name, seed, t):
    """F is convex in each activation and in each weight with the others fixed."""
    net = _net((ACTIVATIONS | STEEP)[name], seed=1)
    lpom = LPOM(net, loss="cross_entropy")
    x, y = _batch(samples=4)
    with torch.no_grad():
        v = lpom._forward_variables(x, y)
        g = torch.Generator().manual_seed(seed)

        def noise(like, scale=2.0):
            return scale * torch.randn(like.shape, generator=g, dtype=torch.float64)

        def energy():
            v.zs[:] = [affine.apply(point) for affine, point in zip(v.maps, v.xs, strict=False)]
            return float(lpom._energy(v))

        # Points of the domain: images of the activation.
        for k in range(1, len(v.xs) - 1):
            v.xs[k] = v.maps[k - 1].layer.unit.phi(noise(v.xs[k]))
        v.xs[-1] = noise(v.xs[-1])

        def convex(read, write):
            a, b = read(), read(other=True)
            write(a)
            first = energy()
            write(b)
            second = energy()
            write(t * a + (1 - t) * b)
            assert energy() <= t * first + (1 - t) * second + 1e-9 * (1 + abs(first) + abs(second))

        for k in range(1, len(v.xs)):
            unit = v.maps[k - 1].layer.unit

            def read(other=False, k=k, unit=unit):
                return unit.phi(noise(v.xs[k])) if other else v.xs[k].clone()

            convex(read, lambda value, k=k: v.xs.__setitem__(k, value))
        for affine in v.maps:
            layer = affine.layer

            def read_weight(other=False, layer=layer):
                return noise(layer.parameters(), 1.0) if other else layer.parameters()

            convex(read_weight, layer.assign)


def test_the_penalty_of_mac_is_not_convex_in_an_activation():
    """The quadratic penalty lacks the convexity of Theorem 4: ½(x⁺ − φ(wx))² is not convex for a saturating φ."""
    grid = torch.linspace(-6, 6, 241, dtype=torch.float64)
    values = 0.5 * (1.0 - torch.tanh(grid)) ** 2
    assert float(torch.diff(values, n=2).min()) < -1e-4


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.where(x > 0, x, 0.25 * x)

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("LPOM called autograd")


class _Own(nn.Module):
    def forward(self, x):
        return _NoBackward.apply(x)


def test_lpom_never_differentiates():
    net = _net(_Own)
    x, y = _batch()
    lpom = LPOM(net)
    energies = [lpom.energy(x, y), *(lpom.step(x, y) for _ in range(3))]
    assert energies[-1] < energies[0]
    lpom.fit([(x, y)], 2)
    plain = LPOM(_net(lambda: nn.LeakyReLU(0.25)))
    expected = [plain.energy(x, y), *(plain.step(x, y) for _ in range(3))]
    assert energies == pytest.approx(expected, rel=1e-6)
    assert all(p.grad is None for p in net.parameters())


def test_derivatives_of_activations_are_never_asked_for(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("LPOM asked for a slope")

    monkeypatch.setattr("minimand.functions.curves.tanh_slope", refuse)
    monkeypatch.setattr("minimand.train.lifted.units.Unit.derivative", refuse)
    lpom = LPOM(_net(nn.Tanh))
    x, y = _batch()
    assert lpom.step(x, y) < math.inf
    assert all(layer.unit.function.derivative is None for layer in lpom.chain.layers[:-1])


def test_step_continues_on_the_same_tensors_only():
    x, y = _batch()
    lpom = LPOM(_net(nn.ReLU))
    after = lpom.step(x, y)
    assert lpom.energy(x, y) == pytest.approx(after, rel=1e-12)
    assert lpom.energy(x.clone(), y) == pytest.approx(_loss(lpom.model, x, y, "squared"), rel=1e-12)
    x.mul_(1.5)
    assert lpom.energy(x, y) == pytest.approx(_loss(lpom.model, x, y, "squared"), rel=1e-12)


def test_float_targets_equal_labels():
    x, y = _batch()
    one, two = LPOM(_net(nn.Tanh)), LPOM(_net(nn.Tanh))
    assert one.step(x, y) == two.step(x, F.one_hot(y, 3).double())


def test_weight_step_of_the_last_layer_is_the_ridge_regression():
    """With the activations at the forward pass, the output layer's step is least squares (dense oracle)."""
    net = _net(nn.ReLU, sizes=(6, 5, 3))
    x, y = _batch(samples=40)
    lpom = LPOM(net)
    hidden = torch.relu(x @ net[0].weight.mT + net[0].bias).detach()
    with torch.no_grad():
        v = lpom._forward_variables(x, y)
        v.xs[-1] = F.one_hot(y, 3).double()
        lpom._move_weights(v)
    wide = torch.cat([hidden, torch.ones(40, 1, dtype=torch.float64)], 1)
    oracle = torch.linalg.lstsq(wide, F.one_hot(y, 3).double()).solution
    found = torch.cat([net[2].weight, net[2].bias.unsqueeze(1)], 1).detach().mT
    torch.testing.assert_close(found, oracle, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("weight", [0.5, 1.0, 4.0])
def test_quick_steps_are_proximal_gradient_steps(weight):
    """Three majorised steps from x on the loss plus (w/2)‖· − x‖², with the Lipschitz constant ½."""
    g = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(7, 4, generator=g, dtype=torch.float64)
    loss = CrossEntropy(torch.rand(7, 4, generator=g, dtype=torch.float64))
    point = x
    for _ in range(3):
        point = (weight * x + 0.5 * point - loss.gradient(point)) / (weight + 0.5)
    torch.testing.assert_close(loss.approximate_prox(x, 1 / weight), point)
    squared = SquaredError(loss.target)
    torch.testing.assert_close(squared.approximate_prox(x, 1 / weight), squared.prox(x, 1 / weight))


@pytest.mark.parametrize("coupled", [False, True])
def test_estimates_move_by_the_inverse_of_their_preconditioner(coupled):
    """P = I + κrAAᵀ, and 2(I + 2κrAAᵀ) if the neighbours move as well (dense oracle)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    lpom = LPOM(net)
    with torch.no_grad():
        v = lpom._forward_variables(torch.randn(6, 5, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64))
        v.xs[-1] = torch.randn(6, 3, dtype=torch.float64)
        q, (mu, r) = torch.randn(6, 3, dtype=torch.float64), ((0.1, 1.0), 10.0)
        share = 2.0 if coupled else 1.0
        P = share * (torch.eye(3) + share * r * net[2].weight @ net[2].weight.mT)
        missing = v.xs[-1] - v.zs[-1]
        for start in (None, q):
            found = lpom.dual.estimate(v, mu, 1, start, coupled=coupled)
            begin = torch.zeros_like(q) if start is None else start
            torch.testing.assert_close(found, begin + torch.linalg.solve(P, (missing - begin).mT).mT)


@pytest.mark.parametrize("weight", [0.02, 1.0, 50.0])
def test_prox_of_the_losses(weight):
    g = torch.Generator().manual_seed(0)
    x = 5 * torch.randn(7, 4, generator=g, dtype=torch.float64)
    target = F.one_hot(torch.randint(4, (7,), generator=g), 4).double()
    for loss in (SquaredError(target), CrossEntropy(target)):
        found = loss.prox(x, 1 / weight).requires_grad_()
        (loss.value(found) + 0.5 * weight * (found - x).square().sum()).backward()
        assert float(found.grad.abs().max()) < 1e-11 * max(1, weight)


# On real data: every method against random features and a ridge regression.


def _digits():
    """Scikit-learn's digits, a fifth of every class held out."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(np.rint(images * (255 / 16)), dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held = torch.zeros(len(x), dtype=torch.bool)
    for digit in range(10):
        members = order[y[order] == digit]
        held[members[: round(len(members) * 359 / 1797)]] = True
    x = (x - x[~held].mean()) / x[~held].std()
    return x[~held], y[~held], x[held], y[held]


def _batches(x, y, size, seed):
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return [(x[part], y[part]) for part in order.split(size) if len(part) == size]


def _accuracy(net, x, y):
    with torch.no_grad():
        return 100 * float((net(x).argmax(1) == y).float().mean())


@pytest.mark.parametrize("name", list(METHODS))
def test_beats_random_features_by_eight_points(name):
    """64-30-30-10 on the digits: all lifted methods train their hidden layers."""
    x, y, x_test, y_test = _digits()
    net = _net(nn.ReLU, sizes=(64, 30, 30, 10)).float()
    control = max(_accuracy(ridge_control(net, x, y, ridge), x_test, y_test) for ridge in (1e-2, 1.0, 100.0))
    epochs = {"mac": 2, "admm_all": 2, "mac_gradient": 6}.get(name, 4)
    METHODS[name](net).fit(_batches(x, y, 64, 0), epochs)
    assert _accuracy(net, x_test, y_test) >= control + 8


@pytest.mark.parametrize("hidden", [(30,), (30, 30), (30, 30, 30)])
def test_steps_of_the_split_methods_reach_those_of_mac(hidden):
    """26 steps at the defaults on 500 digits, from four starts.

    μ = 1 everywhere gave 77 % of them with one hidden layer, and weights without a ridge lost 20 points from one start.
    """
    x, y, x_test, y_test = _digits()
    x, y, reached = x[:500], y[:500], []
    for method in (MAC, BlockPenalty, SplitADMM, functools.partial(SplitADMM, splitting="all")):
        found = []
        for seed in range(4):
            torch.manual_seed(seed)
            trained = method(_plain(64, *hidden, 10))
            for _ in range(26):
                trained.step(x, y)
            found.append((_accuracy(trained.model, x, y), _accuracy(trained.model, x_test, y_test)))
        reached.append(torch.tensor(found))
    for split in reached[1:]:
        assert bool((split.mean(0) >= reached[0].mean(0) - 1).all())
        assert bool((split.amin(0) >= reached[0].amin(0) - 2).all())


def _plain(*sizes):
    """With PyTorch's initial weights."""
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


@pytest.mark.parametrize("name", [*ACTIVATIONS, "selu"])
def test_fast_fit_trains_every_activation(name):
    x, y, x_test, y_test = _digits()
    net = _net((ACTIVATIONS | STEEP)[name], sizes=(64, 30, 30, 10)).float()
    LPOM(net).fit(_batches(x, y, 64, 0), 6)
    assert _accuracy(net, x_test, y_test) > 90


def test_monotone_fit_without_continuation_is_steps():
    x, y = _batch()
    one, two = LPOM(_net(nn.ReLU), recipe=Recipe(continuation=1)), LPOM(_net(nn.ReLU))
    history = one.fit([(x, y)], 3, mode="monotone")
    assert [epoch.energy * len(x) for epoch in history] == pytest.approx([two.step(x, y) for _ in range(3)])


def test_training_without_bias_and_with_one_layer():
    x, y = _batch()
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False)).double()
    before = _loss(net, x, y, "squared")
    LPOM(net).fit([(x, y)], 30)
    assert _loss(net, x, y, "squared") < 0.9 * before
    linear = nn.Sequential(nn.Linear(6, 3)).double()
    lpom = LPOM(linear)
    for _ in range(60):
        lpom.step(x, y)
    wide = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    oracle = wide @ torch.linalg.lstsq(wide, F.one_hot(y, 3).double()).solution
    torch.testing.assert_close(linear(x).detach(), oracle, atol=1e-3, rtol=1e-2)

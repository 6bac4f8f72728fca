"""Laws: the algorithms and propositions of [Frerix2018], written out, against autograd and against ProxProp.

A network has hidden layers z = φ(θ, a), a = σ(z) and a last linear layer before the loss. Samples are rows.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd import grad

from minimand.errors import MinimandError
from minimand.train import (
    ProxProp,
    descent_angle,
    metric_range,
    paper_tau_theta,
    penalty_energy,
    penalty_sweep,
)


def _net(sizes=(5, 7, 6, 3), seed=0):
    torch.manual_seed(seed)
    layers = []
    for before, after in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(*sizes[-2:])).double()


def _data(rows=9, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5, generator=g, dtype=torch.float64), torch.randint(3, (rows,), generator=g)


def _theta(layer):
    return torch.cat([layer.weight, layer.bias[:, None]], 1).detach()


def _with_ones(a):
    return torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1)


def _loss(z, y):
    return nn.functional.cross_entropy(z, y)


def _sweep(net, x, y, tau, theta_step):
    """Algorithms 1 and 2: the forward pass (7), then (8) to (12) from the last layer down; ``theta_step`` is step c."""
    hidden = [m for m in net if isinstance(m, nn.Linear)]
    *hidden, last = hidden
    a, z = [x], []
    for layer in hidden:
        z.append(_with_ones(a[-1]) @ _theta(layer).T)
        a.append(torch.tanh(z[-1]))
    new = {}
    # (8) and (12): explicit steps on the loss in the last activation and the last layer's parameters.
    top, theta = a[-1].clone().requires_grad_(), _theta(last).requires_grad_()
    d_top, d_theta = grad(_loss(_with_ones(top) @ theta.T, y), (top, theta))
    a_half = a[-1] - tau * d_top
    new[last] = _theta(last) - tau * d_theta
    for level in reversed(range(len(hidden))):
        # (9): a gradient step on ½‖σ(z) − a⁺‖².
        derivative = 1 - torch.tanh(z[level]) ** 2
        z_half = z[level] - derivative * (torch.tanh(z[level]) - a_half)
        # (10): a gradient step on ½‖φ(θ, a) − z⁺‖² in the activation below.
        theta = _theta(hidden[level])
        a_half = a[level] - (_with_ones(a[level]) @ theta.T - z_half) @ theta[:, :-1]
        new[hidden[level]] = theta_step(theta, _with_ones(a[level]), z_half)
    return new


def _explicit(theta, A, z_half):
    """A unit gradient step on ½‖Aθᵀ − z⁺‖²: with ρ = 1/τ, step c of Algorithm 1."""
    return theta - (A @ theta.T - z_half).T @ A


def _proximal(tau_theta):
    """Eq. 11 in the closed form of eq. 44."""

    def step(theta, A, z_half):
        eye = torch.eye(A.shape[1], dtype=A.dtype)
        return torch.linalg.solve(A.T @ A + eye / tau_theta, (z_half.T @ A + theta / tau_theta).T).T

    return step


@given(tau=st.floats(1e-3, 10), seed=st.integers(0, 20))
def test_proposition_1_the_penalty_form_is_a_gradient_step(tau, seed):
    net, (x, y) = _net(seed=seed), _data(seed=seed)
    _loss(net(x), y).backward()
    for layer, theta in _sweep(net, x, y, tau, _explicit).items():
        expected = torch.cat([layer.weight - tau * layer.weight.grad, (layer.bias - tau * layer.bias.grad)[:, None]], 1)
        torch.testing.assert_close(theta, expected.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("rows", [4, 30])
@pytest.mark.parametrize(("tau", "tau_theta"), [(1.0, 0.05), (0.1, 1.0), (5.0, 20.0)])
def test_algorithm_2_is_what_the_hooks_and_sgd_do(tau, tau_theta, rows, fused):
    net, (x, y) = _net(), _data(rows)
    expected = {list(net).index(layer): theta for layer, theta in _sweep(net, x, y, tau, _proximal(tau_theta)).items()}
    optimizer = torch.optim.SGD(net.parameters(), lr=tau)
    prox = ProxProp(net, tau_theta=tau_theta, fused=fused).attach(optimizer)
    _loss(net(x), y).backward()
    optimizer.step()
    prox.detach()
    for index, theta in expected.items():
        torch.testing.assert_close(_theta(net[index]), theta, rtol=1e-9, atol=1e-11)


def test_the_proximal_step_minimizes_eq_11():
    net, (x, _) = _net(), _data()
    layer, tau_theta = net[0], 0.3
    A, theta = _with_ones(x), _theta(net[0])
    z_half = A @ theta.T - torch.randn(len(x), 7, dtype=torch.float64)
    best = _proximal(tau_theta)(theta, A, z_half).requires_grad_()
    energy = 0.5 * (A @ best.T - z_half).square().sum() + (best - theta).square().sum() / (2 * tau_theta)
    (slope,) = grad(energy, best)
    assert slope.abs().max() < 1e-10
    assert layer.weight.shape == (7, 5)


def test_erratum_eq_42_lacks_the_step_on_the_target():
    """(I + τAᵀA)⁻¹(θ + Aᵀz) is not the minimiser of (41); with τAᵀz it is, and equals (44)."""
    A, z = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    theta, tau = torch.randn(3, 4, dtype=torch.float64), 0.2
    eye = torch.eye(4, dtype=torch.float64)
    right = torch.linalg.solve(eye + tau * A.T @ A, theta.T + tau * A.T @ z).T
    printed = torch.linalg.solve(eye + tau * A.T @ A, theta.T + A.T @ z).T
    torch.testing.assert_close(right, _proximal(tau)(theta, A, z))
    assert not torch.allclose(printed, right, rtol=0.1)


def _directions(net, x, y, **options):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    prox = ProxProp(net, **options).attach(optimizer)
    optimizer.zero_grad()
    _loss(net(x), y).backward()
    optimizer.step()
    prox.detach()
    found = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    _loss(net(x), y).backward()
    plain = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    return found, plain


@pytest.mark.parametrize("options", [{}, {"method": "cg", "cg_iters": 2}, {"skip_last": False}])
def test_proposition_3_fixed_points_are_stationary(options):
    """At a fixed point of ProxProp the plain gradient, which was not zero at the start, vanishes."""
    net, (x, y) = _net((5, 4, 3)), _data(8)

    def ridge():
        return _loss(net(x), y) + 0.1 * sum(p.square().sum() for p in net.parameters())

    def slope():
        return torch.cat([g.flatten() for g in grad(ridge(), list(net.parameters()))]).norm()

    assert slope() > 0.1
    sgd = torch.optim.SGD(net.parameters(), lr=1.5, momentum=0.5)
    prox = ProxProp(net, tau_theta=1.0, **options).attach(sgd)
    moved = 1.0
    for _ in range(1500):
        before = nn.utils.parameters_to_vector(net.parameters()).detach()
        sgd.zero_grad()
        ridge().backward()
        sgd.step()
        moved = float((nn.utils.parameters_to_vector(net.parameters()).detach() - before).norm())
        if moved < 1e-12:
            break
    prox.detach()
    assert moved < 1e-12
    assert slope() < 1e-9


@given(
    tau_theta=st.floats(1e-3, 1e3),
    method=st.sampled_from(["exact", "cg"]),
    iters=st.integers(1, 6),
    rows=st.sampled_from([3, 40]),
    seed=st.integers(0, 50),
)
def test_propositions_4_and_5_every_direction_descends(tau_theta, method, iters, rows, seed):
    net, (x, y) = _net(seed=seed), _data(rows, seed)
    found, plain = _directions(net, x, y, tau_theta=tau_theta, method=method, cg_iters=iters)
    slopes = [(direction * gradient).sum() for direction, gradient in zip(found, plain, strict=True)]
    for layer in range(2):
        # The weight and the bias of a layer are one unknown: together they descend, alone they need not.
        assert slopes[2 * layer] + slopes[2 * layer + 1] > 0
    if method == "exact":
        # Eq. 33: the cosine is at least the ratio of the metric's smallest and largest eigenvalue.
        A = _with_ones(x)
        eigenvalues = torch.linalg.eigvalsh(A.T @ A + torch.eye(6, dtype=torch.float64) / tau_theta)
        d, g = torch.cat([found[0], found[1][:, None]], 1), torch.cat([plain[0], plain[1][:, None]], 1)
        assert (d * g).sum() / (d.norm() * g.norm()) >= eigenvalues[0] / eigenvalues[-1] - 1e-9


@pytest.mark.parametrize("tau_theta", [1e-6, 1e-2])
def test_small_steps_are_gradient_steps(tau_theta):
    net, (x, y) = _net(), _data()
    found, plain = _directions(net, x, y, tau_theta=tau_theta)
    close = 100 * tau_theta
    torch.testing.assert_close(found[0] / tau_theta, plain[0], rtol=0, atol=close * float(plain[0].abs().max()))


def test_the_proximal_step_lowers_the_penalty_at_any_length():
    """§4.1: implicit steps are unconditionally stable; an explicit step of the same size is not."""
    A = 10 * torch.rand(20, 5, dtype=torch.float64)
    theta, z = torch.randn(3, 5, dtype=torch.float64), torch.randn(20, 3, dtype=torch.float64)

    def energy(t):
        return 0.5 * (A @ t.T - z).square().sum()

    for tau in (1e-4, 1.0, 1e4):
        assert energy(_proximal(tau)(theta, A, z)) <= energy(theta)
    assert energy(_explicit(theta, A, z)) > 100 * energy(theta)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("copies", [1, 3])
def test_tau_theta_translates_between_batches_and_reductions(copies, reduction):
    """A batch repeated several times gives the same step with the converted values."""
    x, y = _data(6)
    tau_theta, factor = paper_tau_theta(0.4, paper_rows=6, rows=6 * copies, reduction=reduction)
    steps = []
    for rows, lr, theta, how in ((1, 0.5, 0.4, "mean"), (copies, 0.5 * factor, tau_theta, reduction)):
        net = _net()
        optimizer = torch.optim.SGD(net[:-1].parameters(), lr=lr)
        ProxProp(net, tau_theta=theta).attach(optimizer)
        nn.functional.cross_entropy(net(x.repeat(rows, 1)), y.repeat(rows), reduction=how).backward()
        optimizer.step()
        steps.append([p.detach() for p in net[:-1].parameters()])
    torch.testing.assert_close(*steps)


def test_the_gram_is_a_sum_whatever_the_loss_does():
    net, (x, y) = _net(), _data()
    mean, _ = _directions(net, x, y)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    prox = ProxProp(net).attach(optimizer)
    nn.functional.cross_entropy(net(x), y, reduction="sum").backward()
    optimizer.step()
    prox.detach()
    torch.testing.assert_close(net[0].weight.grad, len(x) * mean[0])


@pytest.mark.parametrize("tau_theta", [None, 0.3])
def test_the_sweep_is_that_of_the_hand_written_algorithms(tau_theta):
    net, (x, y) = _net(), _data()
    found = penalty_sweep(net, x, y, _loss, tau=0.4, tau_theta=tau_theta)
    step = _explicit if tau_theta is None else _proximal(tau_theta)
    for layer, theta in _sweep(net, x, y, 0.4, step).items():
        name = list(net).index(layer)
        torch.testing.assert_close(torch.cat([found[f"{name}.weight"], found[f"{name}.bias"][:, None]], 1), theta)


def test_convolutions_have_the_same_sweep_as_the_hooks():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double()
    x, y = torch.randn(4, 2, 3, 3, dtype=torch.float64), torch.randint(3, (4,))
    expected = penalty_sweep(net, x, y, _loss, tau=0.5, tau_theta=2.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    prox = ProxProp(net, tau_theta=2.0).attach(optimizer)
    _loss(net(x), y).backward()
    optimizer.step()
    prox.detach()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name])


def test_a_proximal_step_lowers_the_energy_at_fixed_activations():
    """[Frerix2018], section 4.1: at any step size, for the activations of the sweep."""
    net, (x, y) = _net(), _data()
    z1 = net[0](x).detach()
    a1 = z1.tanh()
    z2 = net[2](a1).detach() + torch.randn(9, 6, dtype=torch.float64)
    before = penalty_energy(net, x, y, _loss, [a1, z2.tanh()], [z1, z2])
    for tau_theta in (1e-3, 1.0, 1e6):
        moved = _proximal(tau_theta)(_theta(net[2]), _with_ones(a1), z2)
        other = _net()
        with torch.no_grad():
            other[2].weight.copy_(moved[:, :-1])
            other[2].bias.copy_(moved[:, -1])
        assert penalty_energy(other, x, y, _loss, [a1, z2.tanh()], [z1, z2]) < before


@given(tau_theta=st.floats(1e-3, 1e3), rows=st.sampled_from([3, 40]), seed=st.integers(0, 20))
def test_the_angle_is_within_the_range_of_the_metric(tau_theta, rows, seed):
    net, (x, y) = _net(seed=seed), _data(rows, seed)
    found, plain = _directions(net, x, y, tau_theta=tau_theta)
    low, high = metric_range(x, tau_theta, bias=True)
    A = _with_ones(x)
    inverse = torch.linalg.inv(A.T @ A + torch.eye(6, dtype=A.dtype) / tau_theta)
    assert (low, high) == pytest.approx(tuple(torch.linalg.eigvalsh(inverse)[[0, -1]].tolist()), rel=1e-6)
    assert 0 < low <= high <= tau_theta * (1 + 1e-9)
    angle = descent_angle(found[:2], plain[:2])
    assert angle < 90
    assert math.cos(math.radians(angle)) >= low / high - 1e-9


def test_bad_arguments_of_the_theory_are_refused():
    net, (x, y) = _net(), _data()
    for wrong in (
        lambda: penalty_energy(net, x, y, _loss, [x], [x]),
        lambda: penalty_sweep(net, x, y, _loss, tau=0.0),
        lambda: penalty_sweep(net[:-1], x, y, _loss, tau=1.0),
        lambda: penalty_sweep(net[0], x, y, _loss, tau=1.0),
        lambda: metric_range(x, -1.0),
        lambda: descent_angle([x], [x[0]]),
    ):
        with pytest.raises(MinimandError):
            wrong()

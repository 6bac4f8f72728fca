"""RidgeNet: its objective and gradient, and the guarantees that its class states."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from minimand.errors import OptionError
from minimand.nn import RidgeNet, RidgeTrainer, diagnose
from minimand.nn.unrolled import filterbank
from minimand.nn.unrolled.descent import descend
from minimand.nn.unrolled.fidelity import Fidelity, tightness
from minimand.nn.unrolled.regularizer import RidgeRegularizer, bank_norm_sq, normalized_bank
from minimand.operators import BlockSensing, Conv2d, Inpainting, gaussian_blur, orthonormal_gaussian

GUARANTEES = ("convex", "convergent", "descent")
SIDE = 12


def _net(guarantee: str, *, noise: float | None = None, seed: int = 0, **options: object) -> RidgeNet:
    """A network with random parameters over the whole range of its guarantee, in float64."""
    generator = torch.Generator().manual_seed(seed)
    phi = orthonormal_gaussian(14, 36, generator=generator, dtype=torch.float64)
    net = RidgeNet(phi, 3, 8, 3, guarantee, noise=noise, **options)
    with torch.no_grad():
        net.filters.add_(0.3 * torch.randn(net.filters.shape, generator=generator, dtype=torch.float64))
        net.log_scale.copy_(-4 + torch.randn(8, generator=generator, dtype=torch.float64))
        low, high = net.exponents
        net.exponent = low + (high - low) * torch.rand(8, generator=generator, dtype=torch.float64)
    return net.eval()


def _measured(net: RidgeNet, batch: int = 3, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(batch, 1, SIDE, SIDE, generator=generator, dtype=torch.float64)
    x = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1)
    assert net._sensor.matrix is not None
    y = BlockSensing(net._sensor.matrix, (SIDE, SIDE)).apply(x)
    return y, x


# The bank and the regulariser


@settings(max_examples=25)
@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    channels=st.integers(1, 3),
    size=st.sampled_from([1, 3, 5, 7]),
)
def test_the_fast_bank_is_the_convolution_and_its_adjoint(height: int, width: int, channels: int, size: int) -> None:
    """With exponents of zero the potentials are squares: R is half the energy of the features, its gradient WᵀWx."""
    torch.manual_seed(0)
    weight = torch.randn(5, channels, size, size, dtype=torch.float64)
    x = torch.randn(2, channels, height, width, dtype=torch.float64)
    features = F.conv2d(x, weight, padding=size // 2)
    value, slope = RidgeRegularizer(weight, torch.ones(5).double(), torch.zeros(5).double()).evaluated(x)
    torch.testing.assert_close(value, features.square().flatten(1).sum(1) / 2)
    torch.testing.assert_close(slope, F.conv_transpose2d(features, weight, padding=size // 2))


@pytest.mark.parametrize("channels", [1, 2])
def test_value_and_gradient_are_those_of_the_grammar(channels: int) -> None:
    """R is the function of the features; channels beyond the filters are treated one by one."""
    torch.manual_seed(0)
    weight, x = torch.randn(6, 1, 3, 3, dtype=torch.float64), torch.randn(2, channels, 9, 8, dtype=torch.float64)
    R = RidgeRegularizer(weight, torch.rand(6, dtype=torch.float64) + 0.1, 1.5 * torch.rand(6, dtype=torch.float64))
    x.requires_grad_()
    features = R.operator((9, 8)).apply(x.reshape(-1, 1, 9, 8))
    value = R.potential.values(features).reshape(2, -1).sum(1)
    torch.testing.assert_close(R.value(x.detach()), value.detach(), rtol=1e-9, atol=1e-9)
    (slope,) = torch.autograd.grad(value.sum(), x)
    torch.testing.assert_close(R.gradient(x.detach()), slope)
    together, gradient = R.evaluated(x.detach())
    torch.testing.assert_close(together, value.detach())
    torch.testing.assert_close(gradient, slope)
    parts = [part.clone().requires_grad_() for part in R]
    assert torch.autograd.gradcheck(lambda x, *parts: RidgeRegularizer(*parts).gradient(x), (x, *parts))


@pytest.mark.parametrize("rows", [1, 5, 100])
def test_the_regulariser_does_not_depend_on_the_strips(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value, gradient and their derivatives are torch's, strip by strip."""
    monkeypatch.setattr(filterbank, "_STRIP", rows * 6 * 8)
    torch.manual_seed(0)
    parts = [torch.randn(6, 2, 3, 3), torch.rand(6) + 0.1, 1.5 * torch.rand(6), torch.randn(3, 2, 9, 8)]
    *parts, x = (part.double().requires_grad_() for part in parts)
    R = RidgeRegularizer(*parts)
    features = F.conv2d(x, R.weight, padding=1)
    torch.testing.assert_close(R.value(x), R.potential.values(features).flatten(1).sum(1).detach())
    plain = F.conv_transpose2d(R.potential.gradient(features), R.weight, padding=1)
    torch.testing.assert_close(R.gradient(x), plain)
    probe = torch.randn_like(x)
    ours, theirs = (torch.autograd.grad((each * probe).sum(), (x, *R)) for each in (R.gradient(x), plain))
    torch.testing.assert_close(ours, theirs)


def test_the_value_of_large_and_small_features_is_finite_and_accurate() -> None:
    """Single precision against double precision, from 1e-6 to 1e30 times the scale."""
    weight, scale, exponent = torch.ones(3, 1, 1, 1), torch.full((3,), 1e-3), torch.tensor([0.0, 0.75, 0.999])
    for size in (1e-9, 1e-6, 1e-3, 1.0, 1e15):
        x = size * torch.linspace(0.1, 1, 20).reshape(1, 1, 4, 5)
        value, slope = RidgeRegularizer(weight, scale, exponent).evaluated(x)
        exact = RidgeRegularizer(weight.double(), scale.double(), exponent.double()).evaluated(x.double())
        torch.testing.assert_close(value, exact[0], rtol=1e-5, atol=0)
        torch.testing.assert_close(slope.double(), exact[1], rtol=1e-4, atol=0)
    value, slope = RidgeRegularizer(weight, scale, exponent).evaluated(torch.full((1, 1, 4, 5), 1e30))
    assert bool(value.isfinite())
    assert bool(slope.isfinite().all())


def test_under_a_function_transform_the_gradient_is_the_same() -> None:
    torch.manual_seed(0)
    R = RidgeRegularizer(torch.randn(4, 1, 3, 3), torch.rand(4) + 0.1, torch.rand(4))
    x = torch.randn(3, 1, 7, 7)
    together = torch.func.vmap(lambda each: R.gradient(each[None])[0])(x)
    torch.testing.assert_close(together, R.gradient(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_filters_are_scaled_by_a_norm_that_the_bound_covers(channels: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, channels, 5, 5, dtype=torch.float64)
    dense = torch.func.jacrev(lambda x: F.conv2d(x[None], weight, padding=2)[0])(
        torch.zeros(channels, 11, 11, dtype=torch.float64)
    )
    truth = float(torch.linalg.matrix_norm(dense.reshape(-1, channels * 121), 2)) ** 2
    bound = RidgeRegularizer(weight, torch.ones(6), torch.ones(6)).smoothness((11, 11))
    assert truth <= bound
    large = RidgeRegularizer(weight, torch.ones(6), torch.ones(6)).smoothness((200, 200))
    assert 0.98 * large <= float(bank_norm_sq(weight)) <= large


@pytest.mark.parametrize("exponent", [-70, 70])
def test_filters_of_every_size_are_the_same_bank(exponent):
    filters = torch.randn(5, 1, 3, 3)
    assert torch.equal(normalized_bank(filters * 2.0**exponent), normalized_bank(filters))


# The guarantees


@pytest.mark.parametrize("noise", [None, 0.05], ids=["exact", "noisy"])
@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_the_objective_never_rises_and_steps_vanish_from_any_start(guarantee: str, noise: float | None) -> None:
    net = _net(guarantee, noise=noise)
    y, x = _measured(net)
    starts = (None, torch.zeros_like(x), torch.rand_like(x), 5 * torch.randn_like(x))
    for x0 in starts:
        found = net.descended(y, x0=x0, tol=0.0, iterations=1200)
        history = torch.tensor([float(found.start.sum()), *found.history], dtype=torch.float64)
        assert bool((history.diff() <= 0).all())
        assert bool((found.change <= 1e-4).all())
        assert bool((found.objective <= found.start).all())
        solution = net.solve(y, x0=found.x, tol=1e-30, iterations=1)
        first = net.solve(y, x0=x if x0 is None else x0, tol=1e30, iterations=1)
        assert float(solution.optimality) <= 1e-2 * float(first.optimality)


@pytest.mark.parametrize("noise", [None, 0.05], ids=["exact", "noisy"])
def test_a_convex_network_has_one_minimum(noise: float | None) -> None:
    """The same objective from different starts, and the same image, as ker W = 0."""
    net = _net("convex", noise=noise)
    assert net.injective
    y, x = _measured(net)
    one = net.solve(y, x0=torch.zeros_like(x), tol=1e-9, iterations=6000)
    two = net.solve(y, x0=torch.randn_like(x), tol=1e-9, iterations=6000)
    learned = net.solve(y, tol=1e-9, iterations=6000)
    for other in (two, learned):
        assert float(other.objective) == pytest.approx(float(one.objective), rel=1e-6)
        torch.testing.assert_close(other.x, one.x, atol=2e-4, rtol=0)


@pytest.mark.parametrize("guarantee", ["convex", "convergent"])
def test_the_gradient_vanishes_without_a_closed_form(guarantee: str) -> None:
    """A stiff data term whose prox is conjugate gradients: few of them, and the objective of many certified steps."""
    blur = gaussian_blur((SIDE, SIDE), 1.0, padding_mode="reflect")
    blur = blur.with_weight(blur.weight.double())
    net = RidgeNet(blur, 2, 8, 3, guarantee, noise=1e-3).eval()
    with torch.no_grad():
        net.log_scale.fill_(-4.0)
        net.log_temperature.fill_(math.log(1e-4))
    torch.manual_seed(0)
    y = blur.apply(torch.rand(1, 1, SIDE, SIDE, dtype=torch.float64))
    first = net.solve(y, x0=y, tol=1e30, iterations=1)
    found = [net.solve(y, x0=x0, tol=0.0, iterations=150) for x0 in (None, torch.zeros_like(y))]
    for each in found:
        assert float(each.optimality) <= 1e-4 * float(first.optimality)
    if guarantee == "convex":
        assert float(found[0].objective) == pytest.approx(float(found[1].objective), rel=1e-8)


def test_the_minimum_of_a_square_is_the_linear_solution() -> None:
    """At exponent zero the objective is quadratic, and a dense solve finds its minimum."""
    net = _net("convex", noise=0.1)
    with torch.no_grad():
        net.parametrizations.exponent.original.fill_(-50.0)
    y, _ = _measured(net, 1)
    fidelity, R = net.fidelity(y), net.regularizer()
    identity = torch.eye(SIDE * SIDE, dtype=torch.float64).reshape(-1, 1, SIDE, SIDE)
    W = R.operator((SIDE, SIDE)).apply(identity).detach().flatten(1)
    phi = fidelity.operator.apply(identity).flatten(1)
    mu = float(fidelity.weight.detach())
    dense = torch.linalg.solve(W @ W.mT + mu * phi @ phi.mT, mu * phi @ y.flatten())
    found = net.solve(y, tol=1e-10, iterations=8000).x
    torch.testing.assert_close(found.flatten(), dense, atol=1e-4, rtol=0)


def test_more_iterations_reach_the_objective_of_scipy() -> None:
    from scipy.optimize import minimize

    net = _net("convex", noise=0.05)
    y, _ = _measured(net, 1)
    fidelity, R = net.fidelity(y), net.regularizer()

    def objective(flat):
        x = torch.tensor(flat).reshape(1, 1, SIDE, SIDE)
        residual = fidelity.operator.apply(x) - y
        with torch.no_grad():
            slope = R.gradient(x) + fidelity.weight * fidelity.operator.adjoint(residual)
            return float(R.value(x) + fidelity.value(x)), slope.flatten().numpy()

    oracle = minimize(objective, torch.zeros(SIDE * SIDE).double().numpy(), jac=True, method="L-BFGS-B",
                      options={"maxiter": 4000, "maxfun": 8000, "ftol": 1e-15, "gtol": 1e-10})  # fmt: skip
    assert float(net.solve(y, tol=1e-9, iterations=6000).objective) == pytest.approx(oracle.fun, rel=1e-6)


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_exponents_stay_in_the_range_of_the_guarantee(guarantee: str) -> None:
    net = _net(guarantee)
    for value in (-50.0, 50.0):
        with torch.no_grad():
            net.parametrizations.exponent.original.fill_(value)
        potential = net.regularizer().potential
        assert {"convex": potential.convex, "convergent": potential.coercive, "descent": True}[guarantee]
        low, high = torch.aminmax(net.exponent.detach())
        assert 0 < float(low) <= float(high) < net.exponents[1]


def test_a_state_of_another_guarantee_is_refused() -> None:
    """Its exponents would leave the range that this one is proved for, also inside of another module."""
    convex, convergent = (RidgeNet(orthonormal_gaussian(8, 25), 2, 8, 3, each) for each in GUARANTEES[:2])
    for one, other in ((convex, convergent), (convergent, convex)):
        with pytest.raises(OptionError, match=f"guarantee '{one.guarantee}'"):
            one.load_state_dict(other.state_dict())
        with pytest.raises(OptionError, match="build it with"):
            nn.Sequential(one).load_state_dict(nn.Sequential(other).state_dict())
    assert float(convex.exponent.detach().max()) <= 0.5
    rounded = {name: value.bfloat16() for name, value in convergent.state_dict().items()}
    convergent.load_state_dict(rounded)
    assert float(convergent.exponent.detach().max()) < 1


def test_a_step_that_rises_is_replaced_by_a_plain_one() -> None:
    """With momentum too large for the potential, acceleration overshoots; the objective falls all the same."""
    net = _net("descent", seed=3)
    y, x = _measured(net)
    fidelity, R = net.fidelity(y), net.regularizer()
    smoothness = net.smoothness(fidelity.operator)
    # A bound below the truth breaks the certificate: plain steps may rise, and the sample ends there instead.
    for bound in (smoothness, 0.3 * smoothness):
        found = descend(R, fidelity, fidelity.step(torch.randn_like(x), 1.0), bound, 200, 1e-12)
        assert bool((torch.tensor([float(found.start.sum()), *found.history]).diff() <= 1e-9).all())


def test_rows_are_independent() -> None:
    net = _net("convergent")
    y, _ = _measured(net, 4)
    together = net.descended(y, tol=1e-5)
    for row in range(4):
        alone = net.descended(y[row : row + 1], tol=1e-5)
        assert int(alone.iterations) == int(together.iterations[row])
        torch.testing.assert_close(alone.x[0], together.x[row], atol=1e-9, rtol=0)
    assert net.descended(y[:0]).x.shape == (0, 1, SIDE, SIDE)


def test_the_result_does_not_depend_on_the_learned_phases_in_the_convex_case() -> None:
    net = _net("convex")
    y, _ = _measured(net)
    before = net.solve(y, tol=1e-9, iterations=6000)
    with torch.no_grad():
        net.step = torch.full((3,), 0.2, dtype=torch.float64)
        net.log_homotopy.fill_(1.5)
    after = net.solve(y, tol=1e-9, iterations=6000)
    assert float(after.objective) == pytest.approx(float(before.objective), rel=1e-6)


# Data terms


MAPS = (gaussian_blur((SIDE, SIDE), 1.0), Conv2d(torch.ones(1, 1, 2, 2) / 4, (SIDE, SIDE), 2))


@pytest.mark.parametrize("operator", MAPS, ids=["blur", "binning"])
def test_the_step_of_any_operator_is_the_prox_of_its_data_term(operator: Conv2d) -> None:
    operator = operator.with_weight(operator.weight.double())
    torch.manual_seed(0)
    x, v = torch.rand(1, 1, SIDE, SIDE, dtype=torch.float64), torch.rand(1, 1, SIDE, SIDE, dtype=torch.float64)
    weight = torch.tensor(1.5, dtype=torch.float64)
    fidelity = Fidelity(operator, operator.apply(x), weight, None, float(operator.norm_sq()))
    identity = torch.eye(SIDE * SIDE, dtype=torch.float64).reshape(-1, 1, SIDE, SIDE)
    phi = operator.apply(identity).flatten(1)
    right = v.flatten() + 0.7 * weight * phi @ fidelity.y.flatten()
    dense = torch.linalg.solve(identity.flatten(1) + 0.7 * weight * phi @ phi.mT, right)
    torch.testing.assert_close(fidelity.step(v, 0.7).flatten(), dense, atol=2e-4, rtol=0)


def test_the_closed_form_is_the_linear_system() -> None:
    torch.manual_seed(0)
    operator = Inpainting((torch.rand(6, 6) < 0.5).double())
    assert tightness(operator)[1] < 1e-12
    v, y = torch.rand(2, 1, 6, 6, dtype=torch.float64), operator.apply(torch.rand(2, 1, 6, 6, dtype=torch.float64))
    closed = Fidelity(operator, y, torch.tensor(2.0, dtype=torch.float64), 1.0, 1.0)
    general = dataclasses.replace(closed, tight=None)
    torch.testing.assert_close(closed.step(v, 0.3), general.step(v, 0.3))
    exact = dataclasses.replace(closed, weight=None).step(v, 0.3)
    torch.testing.assert_close(operator.apply(exact), y)


# Training and use


def test_training_leaves_the_linear_start_behind_and_the_tail_improves_it() -> None:
    torch.manual_seed(0)
    phi = orthonormal_gaussian(16, 64)

    def draw() -> tuple[Tensor, Tensor]:
        edges = torch.rand(8, 1, 1, 16).round().repeat_interleave(16, 2) + torch.rand(8, 1, 16, 1).round()
        x = F.avg_pool2d(0.5 * edges, 3, 1, 1)
        return BlockSensing(phi, (16, 16)).apply(x), x

    net = RidgeNet(phi, 4, 8, 3)
    y, x = draw()
    start = F.mse_loss(net._sensor.start(net.fidelity(y).operator, y), x)
    trainer = RidgeTrainer(net, 120, rate=2.0)
    for _ in range(120):
        trainer.step(*draw())
    net.eval()
    assert F.mse_loss(net(y), x) < 0.5 * start
    trained = {name for name, p in net.named_parameters() if p.grad is not None and bool(p.grad.abs().sum() > 0)}
    assert {"filters", "log_scale", "parametrizations.exponent.original"} <= trained


def test_blocks_and_whole_images_and_copies() -> None:
    import copy

    net = _net("convergent")
    y, _ = _measured(net, 2)
    assert net(y).shape == (2, 1, SIDE, SIDE)
    assert net(y[..., 0, 0]).shape == (2, 36)
    twin = copy.deepcopy(net)
    twin.load_state_dict(net.state_dict())
    assert torch.equal(twin(y), net(y))
    assert net.float()(y.float()).dtype == torch.float32
    assert sum(p.numel() for p in RidgeNet(orthonormal_gaussian(272, 1089)).parameters()) == 2478


def test_another_operator_shares_the_prior() -> None:
    net = _net("convergent")
    blur = gaussian_blur((15, 17), 1.0)
    blur = blur.with_weight(blur.weight.double())
    other = net.using(blur, noise=0.02)
    assert other.filters is net.filters
    assert torch.equal(other.exponent, net.exponent)
    x = torch.rand(1, 1, 15, 17, dtype=torch.float64)
    assert other(blur.apply(x)).shape == x.shape
    with torch.no_grad():
        net.filters.mul_(1.1)
    assert torch.equal(other.regularizer().weight, net.regularizer().weight)


def test_a_figure_is_drawn() -> None:
    import matplotlib

    matplotlib.use("Agg")
    figure = _net("convex").plot()
    assert len(figure.axes) == 3


def test_the_diagnosis_says_what_is_proved() -> None:
    for guarantee in GUARANTEES:
        net = _net(guarantee)
        report = diagnose(net, _measured(net)[0])
        assert report.convergent is (True if guarantee != "descent" else None)
        assert net.theorem in str(report)
        assert "measured" in str(report)
        assert isinstance(net, nn.Module)


@pytest.mark.parametrize("kind", ["matrix", "operator"])
def test_bounds_follow_the_measurement(kind: str) -> None:
    """A matrix that ``load_state_dict`` replaces, and an operator whose weight changes in place."""
    torch.manual_seed(0)
    weight = torch.randn(1, 1, 3, 3) / 9
    phi = 0.3 * torch.randn(8, 36) if kind == "matrix" else Conv2d(weight, (6, 6), padding=1)
    net = RidgeNet(phi, phases=2, filters=4, size=3, noise=0.1).eval()
    y = torch.randn(2, 8) if kind == "matrix" else torch.randn(2, 1, 6, 6)
    before = net.fidelity(y).norm_sq
    if kind == "matrix":
        net.load_state_dict({name: 3 * t if name.endswith("matrix") else t for name, t in net.state_dict().items()})
    else:
        weight.mul_(3)
    assert net.fidelity(y).norm_sq == pytest.approx(9 * before, rel=1e-3)
    # Rows that are orthonormal now are seen to be.
    if kind == "matrix":
        rows = orthonormal_gaussian(8, 36)
        net.load_state_dict({n: rows if n.endswith("matrix") else t for n, t in net.state_dict().items()})
        assert net.fidelity(y).tight == pytest.approx(1.0)


# The range of numbers


@pytest.mark.parametrize("parameter", ["log_scale", "log_temperature", "log_homotopy"])
@pytest.mark.parametrize("value", [-200.0, -60.0, 60.0, 200.0])
def test_a_parameter_that_diverged_is_named(parameter: str, value: float) -> None:
    net = _net("convergent", noise=0.05)
    with torch.no_grad():
        getattr(net, parameter).fill_(value)
    y, _ = _measured(net)
    for call in (net.train(), net.eval(), net.solve):
        with pytest.raises(OptionError, match=rf"^exp\({parameter}.*\) = exp\(.*\) is out of range"):
            call(y)


def test_a_noise_level_in_other_units_is_named() -> None:
    net = _net("convergent", noise=0.05)
    y, _ = _measured(net)
    with pytest.raises(OptionError, match="usual cause is a noise level in other units, or a training run"):
        net.using(net._sensor.matrix, noise=1e-14)(y)


@pytest.mark.parametrize("logarithm", [-40.0, 40.0])
def test_gradients_at_the_ends_of_the_range_are_finite(logarithm: float) -> None:
    net = _net("convergent", noise=0.05)
    y, x = _measured(net)
    with torch.no_grad():
        net.float().log_scale.fill_(logarithm)
    net.train().loss(y.float(), x.float()).backward()
    assert all(bool(p.grad.isfinite().all()) for p in net.parameters() if p.grad is not None)


def test_a_descent_that_rounding_ends_early_has_not_converged() -> None:
    """In single precision the objective of measurements this large hides steps of a hundredth of the image."""
    phi = orthonormal_gaussian(8, 25, generator=torch.Generator().manual_seed(0))
    y = torch.rand(2, 25, generator=torch.Generator().manual_seed(1)) @ phi.mT
    found = {}
    for scale in (1.0, 1e6):
        net = RidgeNet(scale * phi, 3, 8, 3, noise=0.05).eval()
        found[scale] = net.solve(scale * y, tol=1e-6)
    assert found[1.0].converged
    assert not found[1e6].converged

"""Unrolled networks equal the library's solvers with learned parameters."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimand.functions import L1
from minimand.functions.base import Function
from minimand.nn import (
    ADMMNet,
    Architecture,
    FISTANet,
    ISTANet,
    UnrolledNet,
    least_squares_start,
)
from minimand.nn.unrolled.parameters import assign
from minimand.nn.unrolled.transform import soft_threshold
from minimand.operators import (
    BlockSensing,
    Inpainting,
    LinearOperator,
    SubsampledFourier,
    Transposed,
    from_blocks,
    gaussian_blur,
    orthonormal_gaussian,
    radial_mask,
    to_blocks,
)
from minimand.solvers import ADMM, FISTA, Problem, ProxGD, solve

SMALL = Architecture(channels=4)
PLAIN = Architecture(channels=1, depth=1)
NETS: dict[str, Callable[..., UnrolledNet]] = {"ista": ISTANet, "fista": FISTANet, "admm": ADMMNet}
every_net = pytest.mark.parametrize("build", NETS.values(), ids=NETS)


def _phi(rows: int = 5, columns: int = 16, scale: float = 1.0) -> Tensor:
    g = torch.Generator().manual_seed(0)
    return scale * orthonormal_gaussian(rows, columns, generator=g, dtype=torch.float64)


def _delta(net: UnrolledNet, factor: float = 1.0) -> None:
    """Every convolution becomes a multiple of the identity."""
    for weight in net.transforms.parameters():
        with torch.no_grad():
            weight.zero_()
            weight[0, 0, 1, 1] = factor


# The networks are the solvers


@pytest.mark.parametrize("scale", [1.0, 1.7])
@pytest.mark.filterwarnings("ignore:the rows of phi")
def test_ista_net_is_proximal_gradient_descent(scale: float) -> None:
    phi, phases, weight = _phi(scale=scale), 6, 0.02
    net = ISTANet(phi, phases, architecture=PLAIN).double()
    _delta(net)
    eta = 0.8 / net.lipschitz
    assign(net, "step", torch.full((phases,), eta).double())
    assign(net, "threshold", torch.full((phases,), eta * weight).double())
    y = torch.rand(3, 16, dtype=torch.float64) @ phi.mT
    problem = Problem(Transposed(BlockSensing(phi, (4, 4))), L1(weight), y[:, :, None, None])
    expected = solve(problem, ProxGD(phases, step=eta), x0=problem.linear())
    torch.testing.assert_close(net(y), expected.x.flatten(1), rtol=1e-6, atol=1e-7)


def test_admm_net_is_admm() -> None:
    phi, phases, weight, rho = _phi(), 6, 0.02, 0.7
    net = ADMMNet(phi, phases, plus=False, architecture=PLAIN).double()
    _delta(net)
    assign(net, "penalty", torch.full((phases,), rho).double())
    assign(net, "threshold", torch.full((phases,), weight / rho).double())
    y = torch.rand(3, 16, dtype=torch.float64) @ phi.mT
    problem = Problem(Transposed(BlockSensing(phi, (4, 4))), L1(weight), y[:, :, None, None])
    expected = solve(problem, ADMM(phases, rho, cg_iters=2), x0=problem.linear())
    torch.testing.assert_close(net(y), expected.x.flatten(1), rtol=1e-6, atol=1e-7)


def test_two_conjugate_gradients_solve_a_split_with_orthonormal_rows() -> None:
    phi, rho = _phi(), 0.3
    net = ADMMNet(phi, 1, plus=False, architecture=PLAIN).double()
    _delta(net)
    assign(net, "penalty", torch.tensor([rho]).double())
    assign(net, "threshold", torch.tensor([1e-12]).double())
    y = torch.rand(3, 16, dtype=torch.float64) @ phi.mT
    system = phi.mT @ phi + rho * torch.eye(16, dtype=torch.float64)
    exact = torch.linalg.solve(system, (1 + rho) * (y @ phi).mT).mT
    torch.testing.assert_close(net(y), exact)


class _Residual(Function):
    """v + g S_θ(v), the residual transform with identities."""

    def __init__(self, gain: float, threshold: float) -> None:
        self.gain, self.threshold = gain, threshold

    def value(self, x: Tensor) -> Tensor:
        return x.abs().sum()

    def prox(self, x: Tensor, step: float | Tensor = 1.0) -> Tensor:
        return x + self.gain * F.softshrink(x, self.threshold)


def test_fista_net_is_fista() -> None:
    phi, phases = _phi(), 20
    net = FISTANet(phi, phases, architecture=PLAIN).double()
    _delta(net, 0.5)
    with torch.no_grad():
        net.transforms[0].get_parameter("reduce.weight").neg_()
    for schedule in (net.step_schedule, net.threshold_schedule):
        nn.init.zeros_(schedule.slope)
    setting = net.settings()[0]
    step, threshold = float(setting.step.detach()), float(setting.threshold.detach())
    # D, F and F̃ halve, so that the threshold acts on a quarter of v; G subtracts half of what is left.
    function = _Residual(-1 / 16, 4 * threshold)
    y = torch.rand(3, 16, dtype=torch.float64) @ phi.mT
    problem = Problem(Transposed(BlockSensing(phi, (4, 4))), function, y[:, :, None, None])
    expected = solve(problem, FISTA(phases, step=step, restart=False), x0=problem.linear())
    torch.testing.assert_close(net(y), expected.x.flatten(1), rtol=1e-6, atol=1e-7)
    # Long enough for the momentum to overshoot: neither no momentum nor one that restarts gives the same.
    for other in (ProxGD(phases, step=step), FISTA(phases, step=step, restart=True)):
        assert not torch.allclose(solve(problem, other, x0=problem.linear()).x, expected.x, atol=1e-4)


def test_learned_momentum_is_fista_nets_formula() -> None:
    net = FISTANet(_phi(), 5, architecture=SMALL, momentum="learned").double()
    assert net.momentum_schedule is not None
    w, c = (float(p.detach()) for p in (net.momentum_schedule.slope, net.momentum_schedule.offset))
    for k, setting in enumerate(net.settings()):
        sp, first = math.log1p(math.exp(w * k + c)), math.log1p(math.exp(c))
        assert setting.momentum is not None
        assert float(setting.momentum.detach()) == pytest.approx((sp - first) / sp)
    # The third phase starts from the point that the momentum of the second pushed to.
    y = torch.rand(2, 16, dtype=torch.float64) @ _phi().mT
    with torch.no_grad():
        one, two, three = (result.x for result in net.trajectory(y)[:3])
        beta, setting = net.settings()[1].momentum, net.settings()[2]
        ahead = two + beta * (two - one)
        problem = net.problem(y)
        r = ahead + setting.step * problem.descent(ahead, problem.linear())
        transform = net.transforms[0]
        shrunk = transform.synthesize(soft_threshold(transform.analyze(transform.features(r)), setting.threshold))
        torch.testing.assert_close(three, transform.image(shrunk, r))


@pytest.mark.parametrize("threshold", [0.3, 0.0, -0.3])
def test_soft_threshold_of_any_sign(threshold: float) -> None:
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    t = torch.tensor(threshold, dtype=torch.float64, requires_grad=True)
    plain = x.sign() * F.relu(x.abs() - t)
    torch.testing.assert_close(soft_threshold(x, t), plain)
    if threshold:
        upstream = torch.randn_like(x)
        ours = torch.autograd.grad(soft_threshold(x, t), (x, t), upstream)
        torch.testing.assert_close(ours, torch.autograd.grad(plain, (x, t), upstream))


def test_the_soft_threshold_of_a_number_is_the_general_one() -> None:
    """The fast path of L1.prox against the broadcasting one, derivatives included."""
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    t = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(L1(0.7).prox, (x, t))
    assert torch.autograd.gradgradcheck(L1(0.7).prox, (x, t))
    torch.testing.assert_close(L1(0.7).prox(x, t), L1(0.7).prox(x, t.expand(3, 1)))


# Blocks and whole images


@every_net
def test_one_block_is_an_image_of_one_block(build: Callable[..., UnrolledNet]) -> None:
    phi = _phi()
    net = build(phi, 2, architecture=SMALL, initial=least_squares_start(phi, torch.rand(30, 16).double())).double()
    y = torch.rand(3, 16, dtype=torch.float64) @ phi.mT
    torch.testing.assert_close(net(y), net(y[:, :, None, None]).flatten(1))


def test_whole_images_are_measured_by_block_and_transformed_across_borders() -> None:
    phi = _phi()
    x = torch.rand(2, 1, 8, 12, dtype=torch.float64)
    y = BlockSensing(phi, (8, 12)).apply(x)
    rows = y.permute(0, 2, 3, 1).reshape(-1, 5)
    pointwise = ISTANet(phi, 3, architecture=PLAIN).double()
    _delta(pointwise)
    torch.testing.assert_close(pointwise(y), from_blocks(pointwise(rows), (8, 12)))
    net = ISTANet(phi, 3, architecture=SMALL).double()
    whole, apart = net(y), from_blocks(net(rows), (8, 12))
    assert not torch.allclose(whole, apart, atol=1e-4)
    assert to_blocks(whole, 4).shape == (12, 16)


OPERATORS: dict[str, Callable[[], LinearOperator]] = {
    "fourier": lambda: SubsampledFourier(radial_mask((9, 9), 0.4)),
    "inpainting": lambda: Inpainting((torch.rand(9, 9) < 0.5).float()),
    "blur": lambda: gaussian_blur((9, 9), 0.7),
    "blocks": lambda: BlockSensing(orthonormal_gaussian(4, 9), (9, 9)),
}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
@every_net
def test_every_measurement_trains(build: Callable[..., UnrolledNet], operator: Callable[[], LinearOperator]) -> None:
    phi, x = operator(), torch.rand(4, 1, 9, 9)
    y = phi.apply(x)
    net = build(phi, 2, architecture=Architecture(channels=6, scale=0.1), constrained=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        loss = net.loss(y, x)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert net(y).shape == x.shape


# Starts and controls


def test_the_start_is_least_squares() -> None:
    phi, x = _phi(), torch.rand(50, 16, dtype=torch.float64)
    y = x @ phi.mT
    q = least_squares_start(phi, x, ridge=1e-14)
    expected = np.linalg.lstsq(y.numpy(), x.numpy(), rcond=None)[0].T
    np.testing.assert_allclose(q.numpy(), expected, atol=1e-6)
    net = ISTANet(phi, 1, initial=q, architecture=SMALL).double()
    problem = net.problem(y)
    torch.testing.assert_close(net.start(problem).flatten(1), y @ q.mT)


# Copies


@every_net
def test_grown_networks_begin_like_their_seedling(build: Callable[..., UnrolledNet]) -> None:
    phi = _phi()
    y = torch.rand(2, 16, dtype=torch.float64) @ phi.mT
    for constrained in (False, True):
        net = build(phi, 2, architecture=SMALL, constrained=constrained).double()
        tall = net.grown(4)
        ours, theirs = tall.trajectory(y), net.trajectory(y)
        assert (len(ours), len(theirs)) == (4, 2)
        torch.testing.assert_close(ours[0].x, theirs[0].x)
        torch.testing.assert_close(ours[1].x, theirs[1].x)
        if not net.shared:
            torch.testing.assert_close(ours[3].setting.threshold, theirs[1].setting.threshold)
        tall.loss(y, torch.zeros(2, 16).double()).backward()
        assert all(p.grad is None for p in net.parameters())


@every_net
@pytest.mark.parametrize("constrained", [False, True])
def test_states_copies_and_precisions(build: Callable[..., UnrolledNet], constrained: bool) -> None:
    phi = _phi().float()
    make = lambda: build(phi, 2, architecture=SMALL, constrained=constrained)  # noqa: E731
    one, two = make(), make()
    y = torch.rand(2, 16) @ phi.mT
    assert not torch.equal(one(y), two(y))
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(y), two(y))
    torch.testing.assert_close(one.double()(y.double()).float(), two(y), rtol=1e-4, atol=1e-5)


@every_net
def test_gradients_in_the_measurements_and_the_numbers(build: Callable[..., UnrolledNet]) -> None:
    phi = _phi(2, 4)
    net = build(phi, 2, architecture=Architecture(channels=2), constrained=True).double()
    y = (torch.rand(1, 4, dtype=torch.float64) @ phi.mT).requires_grad_()
    numbers = [p for name, p in net.named_parameters() if "transforms" not in name]

    def run(y: Tensor, *values: Tensor) -> Tensor:
        return net(y)

    assert torch.autograd.gradcheck(run, (y, *numbers), atol=1e-5)


@every_net
def test_networks_export(build: Callable[..., UnrolledNet]) -> None:
    phi = _phi().float()
    net = build(phi, 2, architecture=SMALL, constrained=True).eval()
    y = torch.rand(2, 16) @ phi.mT
    exported = torch.export.export(net, (y,))
    torch.testing.assert_close(exported.module()(y), net(y), rtol=1e-4, atol=1e-5)

"""Laws: the iterates of a network are those of its algorithm ([Lin2019], Lemma 4) and of the solvers."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate
from torch import nn

from minimand.errors import OptionError, ShapeError
from minimand.functions import LayerObjective, NonNegative, curves
from minimand.nn import HeavyBallUpdate, NesterovUpdate, OptimizationNet
from minimand.nn.blocks import AcceleratedUpdate, ADMMUpdate, MergeUpdate, TwoStreamBlock
from minimand.operators import Dense
from minimand.solvers import FISTA, HeavyBall, Problem, ProxGD, solve
from minimand.solvers.problem import GradientMap

# The table of objectives of [Lin2019]: each activation with its integral, errata corrected, up to a constant.
LI2 = curves.dilogarithm
TABLE = {
    "sigmoid": ("sigmoid", torch.sigmoid, lambda t: t + torch.log(torch.exp(-t) + 1)),
    "tanh": ("tanh", torch.tanh, lambda t: t + torch.log(torch.exp(-2 * t) + 1)),
    "softplus": ("softplus", F.softplus, None),
    "softsign": (
        "softsign",
        F.softsign,
        lambda t: torch.where(t > 0, t - torch.log(t.clamp_min(0) + 1), -t - torch.log(1 - t.clamp_max(0))),
    ),
    "relu": ("relu", torch.relu, lambda t: torch.where(t > 0, t * t / 2, 0.0)),
    "leaky relu": (
        nn.LeakyReLU(0.2),
        lambda t: F.leaky_relu(t, 0.2),
        lambda t: torch.where(t > 0, t * t / 2, 0.2 * t * t / 2),
    ),
    "elu": (
        nn.ELU(0.7),
        lambda t: F.elu(t, 0.7),
        lambda t: torch.where(t > 0, t * t / 2 + 0.7, 0.7 * (torch.exp(t) - t)),
    ),
    "steep elu": (
        nn.ELU(1.5),
        lambda t: F.elu(t, 1.5),
        lambda t: torch.where(t > 0, t * t / 2 + 1.5, 1.5 * (torch.exp(t) - t)),
    ),
    "swish": (
        "swish",
        F.silu,
        lambda t: (
            t * t / 2 + t * torch.log(torch.exp(-t) + 1) - torch.where(t > 0, LI2(-torch.exp(-t.clamp_min(0))), 0.0)
        ),
    ),
}
STEPS = 12


def _weight(seed: int = 0, n: int = 6, top: float = 1.0) -> torch.Tensor:
    """Symmetric positive definite, with a known largest eigenvalue."""
    g = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64)).Q
    return q * torch.linspace(0.05, top, n, dtype=torch.float64) @ q.T


def _points(seed: int = 1, rows: int = 3, n: int = 6) -> torch.Tensor:
    return 2 * torch.randn(rows, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Layer(nn.Module):
    """Φ(Wx)."""

    def __init__(self, weight, phi):
        super().__init__()
        self.weight, self.phi = weight, phi

    def forward(self, x):
        return self.phi(x @ self.weight)


def _net(name, algorithm, steps=STEPS, **options):
    layer = Layer(_weight(), TABLE[name][1])
    return OptimizationNet([layer] * steps, algorithm, **options)


# The objective ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLE)
def test_the_gradient_of_the_objective_is_x_minus_u_phi_ux(name):
    act, phi, _ = TABLE[name]
    f, z = LayerObjective(_weight(), act), _points().requires_grad_()
    (gradient,) = torch.autograd.grad(f.value(z), z)
    values, vectors = torch.linalg.eigh(_weight())
    root = vectors * values.sqrt() @ vectors.T
    torch.testing.assert_close(gradient, f.gradient(z), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(gradient, z - phi(z @ root) @ root, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", [name for name in TABLE if TABLE[name][2] is not None])
def test_values_are_the_tables_up_to_a_constant(name):
    act, _, integral = TABLE[name]
    f = LayerObjective(_weight(), act)
    # On the side where the table's swish avoids the dilogarithm of large arguments.
    z = _points().abs() @ torch.eye(6, dtype=torch.float64)
    x = z @ f.root
    x = x.abs() if name == "swish" else x
    z = x @ f.inverse_root
    table = 0.5 * z.square().sum(1) - integral(x).sum(1)
    ours = torch.stack([f.value(row[None]) for row in z])
    torch.testing.assert_close(ours - ours[0], table - table[0], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", TABLE)
def test_the_integrals_integrate_the_activations(name):
    act, phi, _ = TABLE[name]
    integral = LayerObjective(_weight(), act).integral
    for t in (-7.0, -0.6, 0.3, 5.0):
        expected, _ = integrate.quad(lambda s: float(phi(torch.tensor(s, dtype=torch.float64))), 0, t, points=[0.0])
        assert float(integral(torch.tensor([t], dtype=torch.float64))) == pytest.approx(expected, abs=1e-9)


def test_weights_that_are_not_symmetric_positive_definite_are_refused():
    with pytest.raises(ShapeError, match="square"):
        LayerObjective(torch.ones(2, 3))
    for weight in (torch.tensor([[1.0, 0.5], [0.0, 1.0]]), -torch.eye(2), torch.ones(2, 2)):
        with pytest.raises(OptionError, match="symmetric positive definite"):
            LayerObjective(weight)


# Lemma 4: the algorithms below know gradients of f alone --------------------------------------------------------------


def _descend(f, z):
    while True:
        yield z
        z = z - f.gradient(z)


def _heavy_ball(f, z, beta=0.5):
    previous = z
    while True:
        yield z
        z, previous = z - f.gradient(z) + beta * (z - previous), z


def _nesterov(f, z):
    """The sequences λ and γ of the slides; y is the sequence with the rate, gradients are taken at x."""
    y, lam = z, 1.0
    while True:
        yield y
        following = (1 + (1 + 4 * lam**2) ** 0.5) / 2
        gamma, lam = (1 - lam) / following, following
        y, old = z - f.gradient(z), y
        z = (1 - gamma) * y + gamma * old


def _admm(f, z):
    """Alternating minimisation of the linearised augmented Lagrangian with unit weights, and the multiplier."""
    first, second, dual = z, z, torch.zeros_like(z)
    while True:
        yield 0.5 * (first + second)
        # ⟨∇f(z′), u⟩ + ½‖u − z′‖² + ½‖u − z + λ‖² is least at the mean of two points.
        first = 0.5 * ((first - f.gradient(first)) + (second - dual))
        second = 0.5 * ((second - f.gradient(second)) + (first + dual))
        dual = dual + first - second


ALGORITHMS = {"gd": _descend, "heavy_ball": _heavy_ball, "nesterov": _nesterov, "admm": _admm}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", TABLE)
def test_lemma_4_each_network_is_the_algorithm_iterate_by_iterate(name, algorithm):
    f, x = LayerObjective(_weight(), TABLE[name][0]), _points()
    expected = list(itertools.islice(ALGORITHMS[algorithm](f, f.lift(x)), STEPS + 1))
    got = _net(name, algorithm).iterates(x)
    torch.testing.assert_close([f.lift(point) for point in got], expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("learnable", [False, True])
@pytest.mark.parametrize("name", TABLE)
def test_all_past_terms_are_the_points_of_the_two_term_form(name, learnable):
    x = _points()
    net = _net(name, AcceleratedUpdate(), learnable=learnable).double()
    two = _net(name, "nesterov").iterates(x)
    momenta = [-c(2)[1] for c in _net(name, "nesterov", STEPS + 1).coefficients]
    ahead = [x, *(b + m * (b - a) for a, b, m in zip(two, two[1:], momenta[1:], strict=False))]
    tolerance = 1e-5 if learnable else 1e-9  # learned coefficients are stored in single precision
    torch.testing.assert_close(net.iterates(x), ahead, atol=tolerance, rtol=tolerance)


def test_admm_minimises_the_objective():
    """The fixed points are those of the gradient step; the objective is convex for ‖W‖ < 1."""
    f = LayerObjective(_weight(top=0.9), "tanh")
    net = OptimizationNet([Layer(_weight(top=0.9), torch.tanh)] * 300, "admm")
    assert f.gradient(f.lift(net(_points()))).abs().max() < 1e-6


# The recurrences as written in [Lin2019] --------------------------------------------------------------------------


class Blocks(nn.Module):
    """Different blocks, so that terms cannot be confused."""

    def __init__(self, count, n=5):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(n, n), nn.Tanh()) for _ in range(count)).double()


def test_heavy_ball_is_eq_16():
    blocks, x = Blocks(5).layers, torch.randn(3, 5, dtype=torch.float64)
    net = OptimizationNet(blocks, HeavyBallUpdate(0.8, -0.3))
    z, previous = x, x
    for block in blocks:
        z, previous = block(z) + 0.8 * z - 0.3 * previous, z
    torch.testing.assert_close(net(x), z)


def test_accelerated_is_eq_18_with_learned_coefficients():
    blocks, x = Blocks(5).layers, torch.randn(3, 5, dtype=torch.float64)
    net = OptimizationNet(blocks, AcceleratedUpdate(), learnable=True).double()
    for row in net.coefficients:
        nn.init.normal_(row.weight)
    points, values = [x], []
    for k, block in enumerate(blocks):
        values.append(block(points[-1]))
        alpha, beta = net.coefficients[k].weight.chunk(2)
        points.append(
            sum(a * v for a, v in zip(alpha, values, strict=True))
            + sum(b * p for b, p in zip(beta, points, strict=True))
        )
    torch.testing.assert_close(net(x), points[-1])


def test_merge_is_eq_20_with_its_sums():
    """α and β that depend on the term alone, δ = 1: a running sum."""
    first, second = Blocks(5).layers, Blocks(5).layers
    x = torch.randn(3, 5, dtype=torch.float64)
    net = OptimizationNet(
        [TwoStreamBlock(a, b) for a, b in zip(first, second, strict=True)], MergeUpdate(0.4, 0.1, 1.0)
    )
    primes, plains = [x], [x]
    for a, b in zip(first, second, strict=True):
        total = sum(0.4 * p for p in primes) + sum(0.1 * q for q in plains)
        prime, plain = a(primes[-1]) + total, b(plains[-1]) + total
        primes.append(prime)
        plains.append(plain)
    torch.testing.assert_close(net(x), 0.5 * (primes[-1] + plains[-1]))


@pytest.mark.parametrize(
    "update", [ADMMUpdate(), MergeUpdate(), HeavyBallUpdate(), NesterovUpdate(), AcceleratedUpdate()], ids=str
)
def test_learned_coefficients_start_at_the_algorithm(update):
    blocks, x = Blocks(4).layers, torch.randn(3, 5, dtype=torch.float64)
    fixed = OptimizationNet(blocks, update)
    for learnable in ("scalar", "channel"):
        net = OptimizationNet(blocks, update, learnable=learnable, channels=5).double()
        torch.testing.assert_close(net(x), fixed(x), atol=1e-6, rtol=1e-6)


# The solvers' rules ------------------------------------------------------------------------------------------------


class GradientStep(nn.Module):
    """The gradient step x − η∇f(x) of a layer's problem."""

    def __init__(self, problem):
        super().__init__()
        self.move = GradientMap.of(problem, ProxGD().first_step(problem), 1)

    def forward(self, x):
        return self.move(x)


@given(seed=st.integers(0, 10_000))
def test_networks_of_gradient_steps_are_the_solvers(seed):
    """With the prox as the activation: proximal gradient, heavy ball and FISTA, to rounding."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 7, generator=g, dtype=torch.float64)
    problem = Problem(Dense(weight), NonNegative(), torch.randn(2, 7, generator=g, dtype=torch.float64))
    x0 = torch.rand(2, 5, generator=g, dtype=torch.float64)
    for algorithm, solver in {
        "gd": ProxGD(9),
        "heavy_ball": HeavyBall(9),
        "nesterov": FISTA(9, restart=False),
    }.items():
        net = OptimizationNet([GradientStep(problem)] * 9, algorithm, activation=nn.ReLU())
        # FISTA keeps its weights in single precision.
        tolerance = 1e-7 if algorithm == "nesterov" else 1e-12
        torch.testing.assert_close(net(x0), solve(problem, solver, x0=x0).x, atol=tolerance, rtol=tolerance)

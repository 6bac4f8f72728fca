"""Laws: the convergence rates of [Lin2019], Theorems 1 to 3, on random convex problems, with the library's solvers."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimand.functions import LayerObjective, NonNegative, Zero
from minimand.nn import OptimizationNet
from minimand.operators import Dense
from minimand.solvers import FISTA, HeavyBall, Problem, ProxGD, solve, trace

STEPS = 60
SEEDS = st.integers(0, 10_000)
FUNCTIONS = st.sampled_from([Zero(), NonNegative()])


def _problem(function, seed, *, outputs=8, inputs=6, ridge=0.0):
    """Convex, and not strongly: more outputs than inputs."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=g, dtype=torch.float64)
    y = torch.randn(1, inputs, generator=g, dtype=torch.float64)
    return Problem(Dense(weight), function, y, ridge=ridge), torch.randn(1, outputs, generator=g, dtype=torch.float64)


def _smoothness(problem):
    return float(torch.linalg.matrix_norm(problem.operator.weight, 2) ** 2) + problem.ridge


def _nearest(problem, x0):
    """The minimum, and the squared distance of x0 from a minimiser: for g = 0 the nearest, by the pseudo-inverse."""
    if isinstance(problem.function, Zero):
        A = problem.operator.weight
        best = x0 + (problem.y - x0 @ A) @ torch.linalg.pinv(A)
    else:
        best = solve(problem, FISTA(iters=5000), x0=x0).x
    return problem.objective(best), (x0 - best).square().sum()


def _gap(problem, solver, x0):
    best, distance = _nearest(problem, x0)
    return trace(problem, solver, x0=x0).objective - best, distance


@given(function=FUNCTIONS, seed=SEEDS)
@settings(max_examples=15)
def test_theorem_1_gradient_descent(function, seed):
    """f(x_t) − f* ≤ 2β‖x₁ − x*‖²/(t − 1); x₁ is the start."""
    problem, x0 = _problem(function, seed)
    gap, distance = _gap(problem, ProxGD(STEPS), x0 := function.prox(x0))
    t = torch.arange(2, STEPS + 2)
    bound = 2 * _smoothness(problem) * distance / (t - 1)
    assert (gap <= bound + 1e-9).all()
    # A quarter of it is the sharp constant (Beck & Teboulle, Theorem 3.1).
    assert (gap <= bound / 4 + 1e-9).all()


@given(seed=SEEDS, share=st.sampled_from([1.0, 0.3]))
def test_theorem_2_heavy_ball_with_growing_momentum(seed, share):
    """f(x_t) − f* ≤ ‖x₀ − x*‖²/(2α₀(t + 1)) with α₀ ≤ 1/L."""
    problem, x0 = _problem(Zero(), seed)
    step = share / _smoothness(problem)
    gap, distance = _gap(problem, HeavyBall(STEPS, step, momentum="growing"), x0)
    t = torch.arange(1, STEPS + 1)
    assert (gap <= distance / (2 * step * (t + 1)) + 1e-9).all()


def test_theorem_2_is_the_schedule_of_the_slide():
    problem, x0 = _problem(Zero(), 3)
    alpha0, A = 1 / _smoothness(problem), problem.operator.weight
    x, previous = x0, x0
    for k in range(7):
        gradient = (x @ A - problem.y) @ A.T
        x, previous = x - alpha0 / (k + 2) * gradient + k / (k + 2) * (x - previous), x
    torch.testing.assert_close(solve(problem, HeavyBall(7, alpha0, momentum="growing"), x0=x0).x, x)
    # From the origin, which solvers need not store.
    zero = torch.zeros_like(x0)
    solver = HeavyBall(7, momentum="growing")
    torch.testing.assert_close(solve(problem, solver).x, solve(problem, solver, x0=zero).x)
    assert float(solver.first_step(problem)) == pytest.approx(float(ProxGD().first_step(problem)) / 2)


@given(function=FUNCTIONS, seed=SEEDS)
@settings(max_examples=15)
def test_theorem_3_nesterov(function, seed):
    """f(y_t) − f* ≤ 2β‖x₁ − x*‖²/t²; y₁ = x₁ is the start."""
    problem, x0 = _problem(function, seed)
    gap, distance = _gap(problem, FISTA(STEPS, restart=False), x0 := function.prox(x0))
    t = torch.arange(2, STEPS + 2)
    assert (gap <= 2 * _smoothness(problem) * distance / t**2 + 1e-9).all()


def test_the_rates_are_not_vacuous():
    """On an ill-conditioned problem plain descent breaks Nesterov's bound."""
    n = 200
    spectrum = (torch.arange(1, n + 1, dtype=torch.float64) / n) ** 2
    problem = Problem(Dense(torch.diag(spectrum)), Zero(), torch.ones(1, n, dtype=torch.float64))
    x0, t = torch.zeros(1, n, dtype=torch.float64), torch.arange(2, 602)
    best = (problem.y / spectrum)[:, 20:]
    problem = Problem(Dense(torch.diag(spectrum[20:])), Zero(), torch.ones(1, n - 20, dtype=torch.float64))
    gaps = [trace(problem, s, x0=x0[:, 20:]).objective for s in (ProxGD(600), FISTA(600, restart=False))]
    bound = 2 * best.square().sum() * _smoothness(problem) / t**2
    assert (gaps[0] > bound).any()
    assert (gaps[1] <= bound + 1e-9).all()


# Strong convexity: the slide's q ----------------------------------------------------------------------------------


def _quadratic(low, high, n=12):
    """A quadratic with curvature from ``low`` to ``high``, of which the optimum is zero."""
    spectrum = torch.linspace(0, high - low, n, dtype=torch.float64)
    return Problem(Dense(torch.diag(spectrum.sqrt())), Zero(), torch.zeros(1, n, dtype=torch.float64), ridge=low)


def _distances(problem, solver, x0):
    runs = (dataclasses.replace(solver, iters=k) for k in range(1, 81))
    return torch.stack([solve(problem, run, x0=x0).x.norm() for run in runs])


def test_linear_rates_of_gradient_descent_and_heavy_ball():
    """‖x_k − x*‖ ≤ q^k‖x₀ − x*‖ for descent; for the heavy ball q is the rate in the limit, and its square root per
    step is far below descent's."""
    low, high = 0.02, 1.0
    problem, x0 = _quadratic(low, high), torch.ones(1, 12, dtype=torch.float64)
    descent = (high - low) / (high + low)
    k = torch.arange(1, 81, dtype=torch.float64)
    distance = _distances(problem, ProxGD(1, 2 / (high + low)), x0)
    assert (distance <= descent**k * x0.norm() + 1e-12).all()
    polyak = (high**0.5 - low**0.5) / (high**0.5 + low**0.5)
    heavy = HeavyBall(1, 4 / (high**0.5 + low**0.5) ** 2, polyak**2)
    distance = _distances(problem, heavy, x0)
    assert (distance <= (1 + 4 * k) * polyak**k * x0.norm()).all()
    assert float(distance[-1] / distance[39]) ** (1 / 40) == pytest.approx(polyak, abs=0.04)


def test_erratum_heavy_ball_needs_a_constant():
    """[Lin2019] states ‖x_k − x*‖ ≤ q^k‖x₀ − x*‖ for the heavy ball: on a quadratic it is off by a factor above two."""
    low, high = 0.02, 1.0
    problem, x0 = _quadratic(low, high), torch.ones(1, 12, dtype=torch.float64)
    q = (high**0.5 - low**0.5) / (high**0.5 + low**0.5)
    distance = _distances(problem, HeavyBall(1, 4 / (high**0.5 + low**0.5) ** 2, q**2), x0)
    k = torch.arange(1, 81, dtype=torch.float64)
    assert float((distance / (q**k * x0.norm())).max()) > 2


# Depth: the same theorems for networks, by Lemma 4 ----------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self, weight, phi):
        super().__init__()
        self.weight, self.phi = weight, phi

    def forward(self, x):
        return self.phi(x @ self.weight)


@pytest.mark.parametrize("act", ["tanh", "softsign", "sigmoid", "softplus", "elu"])
@given(seed=SEEDS)
@settings(max_examples=4)
def test_theorems_1_and_3_hold_over_the_depth_of_a_network(act, seed):
    """Where 0 ≤ φ′ ≤ 1 and W ⪯ I the objective of Lemma 4 is convex and 1-smooth: layers are iterations."""
    g = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(8, 8, generator=g, dtype=torch.float64)).Q
    weight = q * torch.linspace(0.3, 0.95, 8, dtype=torch.float64) @ q.T
    f = LayerObjective(weight, act)
    x = torch.randn(1, 8, generator=g, dtype=torch.float64)
    layer = Layer(weight, f.phi)
    best = f.lift(OptimizationNet([layer] * 400, "nesterov")(x))
    distance = (f.lift(x) - best).square().sum()
    for algorithm, bound in {"gd": lambda t: 2 / (t - 1), "nesterov": lambda t: 2 / t**2}.items():
        points = OptimizationNet([layer] * 30, algorithm).iterates(x)[1:]
        gap = torch.stack([f.value(f.lift(point)) for point in points]) - f.value(best)
        assert (gap <= bound(torch.arange(2, 32)) * distance + 1e-9).all()

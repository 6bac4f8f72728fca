"""Laws: monotone descent at 1/L, and the rates of the accelerated methods."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimand.functions import NonNegative, Zero
from minimand.solvers import FISTA, HeavyBall, ProxGD, solve, trace
from minimand.solvers.momentum import extrapolate
from minimand.solvers.steps import inertial_limit

from .cases import problems


@given(
    name=st.sampled_from(sorted(problems.SEPARABLE)),
    seed=st.integers(0, 10_000),
    ridge=st.sampled_from([0.0, 1e-3, 1.0]),
)
def test_proxgd_never_raises_the_objective_at_one_over_L(name, seed, ridge):
    problem = problems.dense(problems.SEPARABLE[name], seed=seed, ridge=ridge)
    objective = trace(problem, ProxGD(iters=30)).objective
    assert (objective.diff() <= 1e-12 * objective[:-1].abs().clamp_min(1)).all()


def _spectrum(kappa: float) -> problems.Problem:
    """A quadratic with curvature from ridge to 1, known exactly."""
    g = torch.Generator().manual_seed(3)
    n = 30
    q = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64)).Q
    ridge = 1 / kappa
    squares = torch.linspace(0, 1, n, dtype=torch.float64) * (1 - ridge)
    y = torch.randn(2, n, generator=g, dtype=torch.float64)
    return problems.Problem(problems.Dense(q * squares.sqrt()), Zero(), y, None, ridge)


def _gap(problem, solver):
    A, ridge = problem.operator.weight, problem.ridge
    best = torch.linalg.solve(A @ A.T + ridge * torch.eye(len(A), dtype=A.dtype), (problem.y @ A.T).T).T
    return trace(problem, solver).objective - problem.objective(best)


@pytest.mark.parametrize("solver", [FISTA(iters=300), FISTA(iters=300, restart=False), HeavyBall(iters=300)])
@pytest.mark.parametrize("kappa", [100.0, 400.0])
def test_accelerated_rates_on_strongly_convex_quadratics(solver, kappa):
    """After t iterations the gap has shrunk by (1 − 1/√κ)^t up to a polynomial factor; plain descent has not."""
    problem = _spectrum(kappa)
    start = problem.objective(torch.zeros(problem.shape, dtype=torch.float64)) + 1e-30
    gap = _gap(problem, solver)
    plain = _gap(problem, ProxGD(iters=300))
    rate = 1 - kappa**-0.5
    for t in (100, 200, 300):
        assert gap[t - 1] <= 4 * t**2 * start * rate**t + 1e-11
    assert gap[-1] < 1e-2 * plain[-1] + 1e-11


@given(seed=st.integers(0, 10_000))
def test_fista_obeys_its_sublinear_bound_without_strong_convexity(seed):
    """f(x_t) − f* ≤ 2L‖x*‖²/(t+1)² (Beck & Teboulle, Theorem 4.4)."""
    problem = problems.dense(NonNegative(), outputs=8, inputs=8, rows=1, seed=seed, ridge=0.0)
    reference = solve(problem, FISTA(iters=5000))
    L, radius = problem.smoothness(), reference.x.square().sum()
    gap = trace(problem, FISTA(iters=40, restart=False)).objective - reference.objective
    t = torch.arange(1, 41, dtype=torch.float64)
    assert (gap <= 2 * L * radius / (t + 1) ** 2 + 1e-9).all()


@given(seed=st.integers(0, 10_000))
def test_heavy_ball_converges_for_any_convex_function(seed):
    """The automatic momentum is the proved one: no cycles, whatever the active set does."""
    problem = problems.dense(NonNegative(), seed=seed, ridge=0.05)
    assert solve(problem, HeavyBall(iters=2000), tol=1e-8).converged


@given(
    name=st.sampled_from(sorted(problems.SEPARABLE)),
    seed=st.integers(0, 10_000),
    momentum=st.floats(0, 0.9),
)
def test_steps_below_the_inertial_limit_converge(name, seed, momentum):
    """Proximal gradient steps from x + β(x − x₋), just below the limit, end where FISTA does."""
    problem = problems.dense(problems.SEPARABLE[name], seed=seed)
    step = 0.99 * float(inertial_limit(torch.tensor(momentum, dtype=torch.float64))) / float(problem.smoothness())
    x = previous = torch.zeros(problem.shape, dtype=torch.float64)
    for _ in range(3000):
        ahead = extrapolate(x, previous, momentum)
        moved = ahead + step * problem.descent(ahead, problem.linear())
        x, previous = problem.function.prox(moved, step), x
    reference = solve(problem, FISTA(iters=5000))
    torch.testing.assert_close(x, reference.x, atol=1e-7, rtol=0)


@given(momentum=st.floats(0, 0.99))
def test_the_inertial_limit_stays_below_where_a_quadratic_diverges(momentum):
    """λ² − (1+β)(1−ηL)λ + β(1−ηL) has its roots in the unit disc up to ηL = 2(1+β)/(1+2β), in closed form."""
    limit = float(inertial_limit(torch.tensor(momentum, dtype=torch.float64)))
    assert 1 <= limit <= 2 * (1 + momentum) / (1 + 2 * momentum)


@given(n=st.integers(1, 30), seed=st.integers(0, 10_000), ridge=st.sampled_from([0.0, 1e-3, 1.0]))
def test_the_automatic_step_is_at_most_one_over_the_smoothness(n, seed, ridge):
    """In float32, against the exact norm, without tolerance."""
    weight = torch.randn(n, n, generator=torch.Generator().manual_seed(seed))
    problem = problems.Problem(problems.Dense(weight), NonNegative(), torch.zeros(1, n), None, ridge)
    truth = float(torch.linalg.matrix_norm(weight.double(), 2) ** 2)
    assert float(ProxGD().first_step(problem)) <= 1 / (truth + ridge)

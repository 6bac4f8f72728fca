"""Law: every solver reaches the optimum that an interior point method finds."""

import pytest
import torch

from minimand.functions import L1, NonNegative, from_activation
from minimand.solvers import FISTA, ProxGD, ProxSG, solve

from .cases import problems, solvers
from .oracles import cvxpy_optimum

CONVEX = {**problems.SEPARABLE, **problems.COUPLED}
CVXPY = [name for name in CONVEX if name != "tanh"]


@pytest.mark.parametrize("name", CVXPY)
@pytest.mark.parametrize("case", solvers.DETERMINISTIC, ids=solvers.ids(solvers.DETERMINISTIC))
def test_deterministic_solvers_reach_the_cvxpy_optimum(case, name):
    problem = problems.dense(CONVEX[name])
    best, minimum = cvxpy_optimum(problem)
    solution = solve(problem, case.long, tol=1e-14)
    assert solution.converged
    assert solution.objective.item() == pytest.approx(minimum, abs=1e-7)
    torch.testing.assert_close(solution.x, best, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", solvers.DETERMINISTIC, ids=solvers.ids(solvers.DETERMINISTIC))
def test_convolutions_reach_the_cvxpy_optimum(case):
    problem = problems.conv(NonNegative())
    best, minimum = cvxpy_optimum(problem)
    solution = solve(problem, case.long, tol=1e-14)
    assert solution.converged
    assert solution.objective.item() == pytest.approx(minimum, abs=1e-7)
    torch.testing.assert_close(solution.x, best, atol=1e-4, rtol=0)


@pytest.mark.parametrize("make", [problems.dense, problems.conv], ids=["dense", "conv"])
@pytest.mark.parametrize("one_for_all", [False, True], ids=["per-row", "shared"])
@pytest.mark.parametrize("case", solvers.VARIANCE_REDUCED, ids=solvers.ids(solvers.VARIANCE_REDUCED))
def test_variance_reduced_solvers_reach_the_same_point_as_fista(case, one_for_all, make, generator):
    problem = make(L1(0.1), ridge=0.5)
    reference = solve(problem, FISTA(iters=2000))
    solver = solvers.shared(case.long) if one_for_all else case.long
    solution = solve(problem, solver, tol=1e-13, generator=generator)
    torch.testing.assert_close(solution.x, reference.x, atol=1e-5, rtol=0)


@pytest.mark.parametrize("one_for_all", [False, True], ids=["per-row", "shared"])
@pytest.mark.parametrize("case", solvers.NOISY, ids=solvers.ids(solvers.NOISY))
def test_noisy_solvers_approach_the_optimum_with_a_decaying_step(case, one_for_all, generator):
    problem = problems.dense(NonNegative())
    best = solve(problem, FISTA(iters=2000)).objective
    start = problem.objective(torch.zeros(problem.shape, dtype=torch.float64))
    solver = solvers.shared(case.long) if one_for_all else case.long
    solution = solve(problem, solver, generator=generator)
    assert solution.objective >= best - 1e-9
    assert solution.objective - best < 0.02 * (start - best)


def test_small_samples_need_the_expected_smoothness():
    """The paper's step 1/L diverges for small τ; the automatic one does not."""
    g = torch.Generator().manual_seed(0)
    problem = problems.dense(NonNegative(), outputs=256, inputs=512, rows=4, ridge=1e-3)
    best = solve(problem, FISTA(iters=500)).objective
    start = problem.objective(torch.zeros(problem.shape, dtype=torch.float64))
    paper = 1 / float(problem.smoothness())
    safe = solve(problem, ProxSG(iters=30, tau=26), generator=g)
    unsafe = solve(problem, ProxSG(iters=30, tau=26, step=paper, decay=1.0), generator=g)
    assert best <= safe.objective < 1.1 * start
    assert unsafe.objective > 100 * start


@pytest.mark.parametrize("act", ["tanh", "sigmoid", "softplus", "elu"])
def test_exact_activations_agree_across_solvers(act):
    problem = problems.dense(from_activation(act))
    first = solve(problem, ProxGD(iters=3000))
    second = solve(problem, FISTA(iters=1000))
    torch.testing.assert_close(first.x, second.x, atol=1e-8, rtol=0)


def test_a_tolerance_out_of_reach_is_reported():
    problem = problems.dense(NonNegative(), ridge=0.0)
    solution = solve(problem, ProxGD(iters=3), tol=1e-12)
    assert solution.converged is False
    assert solution.iterations == 3
    assert solution.optimality > 1e-12


def test_a_warm_start_at_the_optimum_stays_there():
    problem = problems.dense(NonNegative())
    best = solve(problem, FISTA(iters=2000)).x
    for case in solvers.DETERMINISTIC[:3]:
        torch.testing.assert_close(solve(problem, case.solver, x0=best).x, best, atol=1e-10, rtol=0)

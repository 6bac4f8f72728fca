"""Poisson's loss without a background: infinite outside of its domain, and without a bound on its curvature."""

import dataclasses

import cvxpy as cp
import numpy as np
import pytest
import torch
from torch import Tensor

from minimand.adjoints import Implicit, Unroll
from minimand.errors import CapabilityError, OptionError
from minimand.factor import factorize
from minimand.functions import L1, Box, Function, GroupL2, NonNegative, Simplex
from minimand.nn.unrolled import RidgeNet
from minimand.operators import Dense, operator
from minimand.solvers import ADMM, Poisson, Problem, ProxGD, Spectral, WorkingSet, solve, trace
from minimand.solvers.gap import GapBound

from .cases import solvers

BOUNDED = [case.solver for case in solvers.ALL if case.solver.needs_curvature]


def _problem(function: Function | None = None, *, ridge: float = 0.0, bias: bool = False, seed: int = 0) -> Problem:
    """An emission: a sparse A with entries ≥ 0, sparse x ≥ 0, counts with zeros, one of them everywhere."""
    g = torch.Generator().manual_seed(seed)
    uniform = lambda *shape: torch.rand(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    A = uniform(6, 10) * (uniform(6, 10) < 0.6)
    A[0] += 0.05
    y = torch.poisson(3 * (uniform(3, 6) * (uniform(3, 6) < 0.6)) @ A, generator=g)
    y[:, 0] = 0
    # With x of both signs a count of zero would be a constraint.
    y = y + 1 if isinstance(function, L1 | GroupL2) else y
    b = 0.1 * torch.randn(6, generator=g, dtype=torch.float64) if bias else None
    return Problem(Dense(A), NonNegative() if function is None else function, y, b, ridge, Poisson(0.0))


def _minimum(problem: Problem) -> float:
    """By cvxpy."""
    A, total = problem.operator.weight.numpy(), 0.0
    for y in problem.y.numpy():
        x = cp.Variable(len(A), nonneg=True)
        t = A.T @ x
        # t − y log t = kl_div(y, t) + y − y log y.
        some = np.flatnonzero(y)
        fit = cp.sum(cp.kl_div(y[some], t[some])) + cp.sum(t[np.flatnonzero(y == 0)])
        fit += float((y[some] - y[some] * np.log(y[some])).sum()) + 0.5 * problem.ridge * cp.sum_squares(x)
        fit -= 0 if problem.bias is None else problem.bias.numpy() @ x
        total += cp.Problem(cp.Minimize(fit)).solve(solver=cp.CLARABEL, tol_gap_abs=1e-10, tol_gap_rel=1e-10)
    return total


def test_the_domain():
    t = torch.tensor([2.0, 0.0, 3.0, 0.0, -1.0, -1.0], dtype=torch.float64)
    y = torch.tensor([4.0, 0.0, 0.0, 1.0, 0.0, 2.0], dtype=torch.float64)
    inf = float("inf")
    values = torch.tensor([2 - 4 * np.log(2), 0.0, 3.0, inf, inf, inf], dtype=torch.float64)
    torch.testing.assert_close(Poisson(0.0).values(t, y), values)
    gradient = torch.tensor([-1.0, 1.0, 1.0, -inf, -inf, -inf], dtype=torch.float64)
    torch.testing.assert_close(Poisson(0).gradient(t, y), gradient)
    assert Poisson(background=0).curvature(y) == inf
    y = torch.tensor([0.0, 3.0, 0.0, 3.0, 0.0, 1.0], dtype=torch.float64)
    u = torch.tensor([0.5, 0.5, 1.0, 1.0, 1.1, -50.0], dtype=torch.float64)
    grid = torch.logspace(-6, 6, 200001, dtype=torch.float64)[:, None]
    sup = (u * grid - Poisson(0.0).values(grid, y)).amax(0)
    conjugate = Poisson(0.0).conjugate(u, y)
    torch.testing.assert_close(conjugate[[0, 1, 2, 5]], sup[[0, 1, 2, 5]], atol=2e-6, rtol=1e-7)
    assert conjugate[[3, 4]].tolist() == [inf, inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_prox_solves_its_equation_at_every_scale(dtype):
    size = torch.logspace(-6, 6, 13, dtype=dtype)
    v, step, y = torch.meshgrid(torch.cat([-size, size]), size, torch.cat([torch.zeros(1), size]), indexing="ij")
    t = Poisson(0.0).prox(v, step, y)
    assert bool((t[y > 0] > 0).all())
    torch.testing.assert_close(t[y == 0], (v - step).clamp_min(0)[y == 0])
    left, right = t * t + step * t, v * t + step * y
    error = (left - right).abs() / (t * t + step * t + v.abs() * t + step * y)
    assert float(error[y > 0].max()) < 8 * torch.finfo(dtype).eps
    leaves = [each.flatten()[7::97].double().requires_grad_() for each in (v, step, y)]
    moderate = (each.detach().clamp(-10, 10).requires_grad_() for each in leaves[:1])
    steps, counts = (each.detach().clamp(0.3, 10).requires_grad_() for each in leaves[1:])
    assert torch.autograd.gradcheck(lambda v, s, y: Poisson(0.0).prox(v, s, y), (*moderate, steps, counts))


@pytest.mark.parametrize("solver", [None, Spectral(2000), ADMM(3000, "auto")], ids=str)
@pytest.mark.parametrize("options", [{}, {"ridge": 0.3}, {"bias": True}], ids=["plain", "ridge", "bias"])
def test_the_cvxpy_optimum_is_reached_with_a_gap(solver, options):
    problem = _problem(**options)
    best, found = _minimum(problem), solve(problem, solver, tol=1e-8)
    assert found.converged
    assert abs(float(found.objective) - best) <= float(found.gap) + 1e-7
    assert float(found.gap) < 2e-6
    assert bool((found.x >= 0).all())


@pytest.mark.parametrize("solver", [None, ADMM(3000, "auto")], ids=str)
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3, 1e6])
def test_nothing_depends_on_the_scale(scale, solver):
    problem = _problem()
    best = solve(problem, tol=1e-10).objective
    # f(t; cy) at ct is c f(t; y) less cy log c.
    more = dataclasses.replace(problem, y=scale * problem.y)
    shift = scale * float(problem.y.sum()) * np.log(scale)
    for other, expected, size in [
        (dataclasses.replace(problem, operator=Dense(scale * problem.operator.weight)), best, 1.0),
        (more, scale * best - shift, scale * (1 + abs(np.log(scale)))),
    ]:
        found = solve(other, solver, tol=1e-7)
        assert found.converged
        assert abs(float(found.objective - expected)) <= 1e-5 * size
        assert float(found.gap) <= 1e-4 * size


@pytest.mark.parametrize("function", [NonNegative(), L1(0.3), GroupL2(0.4), Simplex(2.0), Box(0.0, 0.5)], ids=repr)
@pytest.mark.parametrize("ridge", [0.0, 0.3])
@pytest.mark.parametrize("bias", [False, True])
def test_the_gap_is_a_true_bound(function, ridge, bias, generator):
    problem = _problem(function, ridge=ridge, bias=bias)
    best = solve(problem, Spectral(400, polish=8), tol=1e-9)
    bound, least = GapBound(problem), float(best.objective)
    assert float(best.gap) < 1e-5
    finite = 0
    for size in (1e-3, 0.3, 1.0, 30.0):
        x = problem.function.prox(best.x + size * torch.rand(problem.shape, generator=generator, dtype=torch.float64))
        objective, gap = bound(x)
        assert not bool(gap.isnan().any())
        assert float(gap.sum()) >= float(objective.sum()) - least - 1e-12
        finite += bool(gap.isfinite().all())
    assert finite > 0
    outside = -torch.ones(problem.shape, dtype=torch.float64)
    assert bool((bound(outside)[1] == torch.inf).all())
    assert float(problem.optimality(outside)) == torch.inf


@pytest.mark.parametrize("polish", [None, 3])
def test_the_line_search_stays_inside(polish):
    for function in (NonNegative(), L1(0.3), GroupL2(0.4)):
        steps = trace(_problem(function), Spectral(30, polish)).objective
        assert bool(steps.isfinite().all())
        assert bool((steps.diff() <= 1e-12 * (1 + steps[:-1].abs())).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_takes_other_types_and_operators(dtype):
    problem = _problem()
    A, best = problem.operator.weight, solve(problem, tol=1e-10)
    narrow = dataclasses.replace(problem, operator=Dense(A.to(dtype)), y=problem.y.to(dtype))
    # A differs after rounding to eight bits.
    assert abs(float(solve(narrow).objective - best.objective)) < (1e-4 if dtype == torch.float32 else 0.1)
    called = operator(lambda y: y @ A.mT, lambda x: x @ A, (10,), (6,))
    found = solve(dataclasses.replace(problem, operator=called))
    torch.testing.assert_close(found.objective, best.objective, atol=1e-4, rtol=0)


@pytest.mark.parametrize("solver", [None, Spectral(3000, polish=8), ADMM(3000, "auto")], ids=str)
def test_the_implicit_gradient_is_that_of_the_minimiser(solver, generator):
    problem = _problem(ridge=0.3)
    A = problem.operator.weight

    def run(A: Tensor, y: Tensor) -> Tensor:
        one = dataclasses.replace(problem, operator=Dense(A), y=y)
        return solve(one, solver, adjoint=Implicit(), tol=1e-13).x.square().sum()

    y = problem.y + 1.0
    free = [A.clone().requires_grad_(), y.clone().requires_grad_()]
    ways = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in free]
    slope = sum((g * d).sum() for g, d in zip(torch.autograd.grad(run(*free), free), ways, strict=True))
    with torch.no_grad():
        ends = [run(A + e * ways[0], y + e * ways[1]) for e in (1e-5, -1e-5)]
    torch.testing.assert_close(slope, (ends[0] - ends[1]) / 2e-5, atol=1e-5, rtol=1e-4)


def test_the_chosen_solver_can_be_unrolled_where_that_is_asked_for():
    problem = _problem()
    A = problem.operator.weight.clone().requires_grad_()
    found = solve(dataclasses.replace(problem, operator=Dense(A)), adjoint=Unroll())
    assert isinstance(found.solver.solver, ADMM)
    (gradient,) = torch.autograd.grad(found.x.sum(), A)
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("solver", [*BOUNDED, ProxGD(3, step=0.1), WorkingSet()], ids=repr)
def test_steps_from_the_curvature_are_refused(solver):
    name = type(solver).__name__
    with pytest.raises(CapabilityError, match=rf"{name} takes its steps .*Spectral\(\), or ADMM\(\), or a background"):
        solve(_problem(), solver)


def test_a_start_without_a_finite_objective_is_refused():
    problem = _problem()
    for solver in (None, Spectral(), ADMM()):
        with pytest.raises(OptionError, match=r"infinite at x0; pass an x0"):
            solve(problem, solver, x0=torch.zeros(problem.shape, dtype=torch.float64))
        weight = problem.operator.weight.clone()
        weight[:, int(problem.y.sum(0).argmax())] = 0
        with pytest.raises(OptionError, match=r"infinite at the start; .* the problem is infeasible"):
            solve(dataclasses.replace(problem, operator=Dense(weight)), solver)
    x0 = torch.ones(problem.shape, dtype=torch.float64)
    best = solve(problem, tol=1e-9)
    torch.testing.assert_close(solve(problem, x0=x0, tol=1e-9).objective, best.objective)


def test_an_unbounded_problem_is_said_to_be_one():
    problem = _problem()
    steep = problem.operator.weight.sum(-1) + torch.linspace(-1.0, 1.0, 6, dtype=torch.float64)
    for solver in (None, ADMM(100, "auto")):
        with pytest.raises(OptionError, match="the problem is unbounded"):
            solve(dataclasses.replace(problem, bias=steep), solver, tol=1e-8)


def test_no_counts_at_all():
    problem = _problem()
    for solver in (None, Spectral(50), ADMM(200, "auto")):
        found = solve(dataclasses.replace(problem, y=0 * problem.y), solver)
        torch.testing.assert_close(found.x, torch.zeros_like(found.x), atol=1e-8, rtol=0)


def test_factors_and_networks_need_a_bound():
    with pytest.raises(OptionError, match="needs a bound on its curvature"):
        factorize(np.ones((4, 3)), lam=0.1, loss=Poisson(0.0))
    with pytest.raises(OptionError, match="need a bound on the curvature"):
        RidgeNet(torch.rand(8, 25), 2, 8, 3, noise=1.0, datafit=Poisson(0.0))
    with pytest.raises(OptionError, match="background must be a finite number > 0"):
        Poisson(torch.zeros(()))

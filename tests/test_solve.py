"""Law: the gap bounds the distance to the minimum, the tolerance is relative, and the chosen solver reaches it."""

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.linear_model import Lasso

from minimand import solve
from minimand.adjoints import Implicit
from minimand.errors import CapabilityError, ShapeError
from minimand.functions import (
    L1,
    Ball,
    Box,
    GroupL2,
    L1Ball,
    NonNegative,
    NuclearNorm,
    PositiveSemidefinite,
    Simplex,
    SpectralBall,
    Zero,
    from_activation,
)
from minimand.nn import SolverLinear
from minimand.operators import Conv2d, Dense
from minimand.solvers import (
    ADMM,
    FISTA,
    Choice,
    Huber,
    Logistic,
    Problem,
    ProxGD,
    Quadratic,
    Spectral,
    WorkingSet,
    trace,
)
from minimand.solvers.gap import GapBound

from .cases import datafits, problems, solvers

FUNCTIONS = {**problems.SEPARABLE, **problems.COUPLED}
every = pytest.mark.parametrize("case", datafits.ALL, ids=datafits.IDS)


def _lasso(rows=5, inputs=20, outputs=40, share=0.1, seed=0):
    g = torch.Generator().manual_seed(seed)
    A = torch.randn(outputs, inputs, generator=g, dtype=torch.float64)
    x = torch.randn(rows, outputs, generator=g, dtype=torch.float64) * (torch.rand(rows, outputs, generator=g) < 0.1)
    y = x @ A + 0.1 * torch.randn(rows, inputs, generator=g, dtype=torch.float64)
    return Problem(Dense(A), L1(share * float((y @ A.mT).abs().max())), y)


@every
@pytest.mark.parametrize("ridge", [0.0, 0.3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gap_is_a_true_bound(case, name, ridge, generator):
    """At far, random, near and infeasible points; where it is known, it vanishes at the solution."""
    problem = case.problem(FUNCTIONS[name], ridge=ridge, bias=ridge > 0)
    best = solve(problem, FISTA(300))
    bound, least = GapBound(problem), problem.objective(best.x)
    points = [torch.randn(problem.shape, generator=generator, dtype=torch.float64) * s for s in (0.01, 0.3, 3.0)]
    points += [problem.function.prox(points[1]), best.x + 1e-3 * points[1], problem.function.prox(0 * best.x)]
    for x in points:
        objective, gap = bound(x)
        assert not bool(gap.isnan().any())
        # The reference is feasible, so its objective is never below the minimum.
        assert float(gap.sum()) >= float(objective.sum() - least) - 1e-9
    if ridge > 0:
        assert bound.known
        assert float(best.gap) <= 1e-3 * (1 + abs(float(least)))


@pytest.mark.parametrize(
    "function", [L1(0.3), NonNegative(), Zero(), Box(-0.4, 0.6), Simplex(), GroupL2(0.5)], ids=repr
)
def test_gaps_vanish_without_a_ridge(function):
    """Norms and bounded domains by duality, cones by strong convexity."""
    g = torch.Generator().manual_seed(0)
    A = torch.randn(5, 9, generator=g, dtype=torch.float64)
    problem = Problem(Dense(A), function, torch.randn(4, 9, generator=g, dtype=torch.float64))
    solution = solve(problem, FISTA(3000))
    assert float(solution.gap) < 1e-9


def test_without_any_bound_the_optimality_decides():
    problem = problems.dense(from_activation("tanh"), ridge=0.0, outputs=10, inputs=6)
    solution = solve(problem, FISTA(5000), tol=1e-6)
    start = problem.optimality(torch.zeros(problem.shape, dtype=torch.float64))
    assert solution.gap.isinf()
    assert solution.converged
    assert solution.optimality <= 1e-6 * start


@pytest.mark.parametrize("case", solvers.DETERMINISTIC, ids=solvers.ids(solvers.DETERMINISTIC))
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_the_tolerance_is_relative(case, scale):
    problem = problems.dense(NonNegative())
    problem = dataclasses.replace(problem, y=scale * problem.y, bias=scale * problem.bias)
    found = solve(problem, case.long, tol=1e-4)
    start = problem.objective(torch.zeros(problem.shape, dtype=torch.float64)).abs()
    assert found.converged
    assert found.gap <= 1e-4 * start
    assert found.iterations < case.long.iterations
    assert not solve(problem, case.of(1), tol=1e-9).converged


@pytest.mark.parametrize("solver", [FISTA(2000), ProxGD(5000), ADMM(2000), Spectral(500), Spectral(500, 5)], ids=repr)
def test_samples_that_have_converged_stop(solver):
    """The result is that of each sample alone, to the tolerance; and the callback sees the others leave."""
    problem, seen = _lasso(rows=12), []
    together = solve(problem, solver, tol=1e-8, callback=lambda progress: seen.append(progress))
    assert together.converged
    assert [each.samples for each in seen] == sorted((each.samples for each in seen), reverse=True)
    assert seen[0].samples == 12
    assert seen[-1].samples < 12 or len(seen) == 1
    for k in range(0, 12, 5):
        alone = solve(dataclasses.replace(problem, y=problem.y[k : k + 1]), FISTA(3000))
        torch.testing.assert_close(together.x[k : k + 1], alone.x, atol=2e-3, rtol=0)


def test_a_callback_stops_the_run_and_a_line_is_printed(capsys):
    problem = _lasso()
    stopped = solve(problem, FISTA(1000), callback=lambda progress: progress.iterations >= 20, verbose=True)
    assert stopped.iterations == 20
    assert stopped.converged is None
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 4
    assert all("objective" in line and "gap" in line for line in lines)


@pytest.mark.parametrize("seed", range(20))
def test_the_gap_bounds_the_objective_that_is_returned(seed: int):
    """In single precision the objective is rounded by more than the gap."""
    generator = torch.Generator().manual_seed(seed)
    A, y = torch.randn(6, 9, generator=generator), torch.randn(2, 9, generator=generator)
    for function, datafit in ((L1(0.5), Quadratic()), (Ball(0.3), Logistic()), (Simplex(), Huber(0.7))):
        data = y.sign() if isinstance(datafit, Logistic) else y
        found = solve(Problem(Dense(A), function, data, datafit=datafit), tol=1e-9)
        exact = solve(Problem(Dense(A.double()), function, data.double(), datafit=datafit), FISTA(5000), tol=1e-13)
        assert found.objective.dtype == torch.float32
        assert found.objective.double() - found.gap <= exact.objective


def test_without_a_solver_one_is_chosen_and_named():
    cases = [
        (_lasso(), Spectral, "matrix"),
        (_lasso(rows=1, outputs=600, inputs=40), WorkingSet, "sparse"),
        (problems.conv(NonNegative()), Spectral, "no matrix"),
        (problems.dense(Simplex()), Spectral, "couples"),
        (dataclasses.replace(problems.dense(Simplex()), datafit=Huber(0.5)), FISTA, "couples"),
    ]
    for problem, kind, reason in cases:
        found = solve(problem)
        assert isinstance(found.solver, Choice)
        assert isinstance(found.solver.solver, kind)
        assert reason in str(found.solver)
        assert found.converged
        assert found.gap <= 1e-6 * problem.objective(problem.function.prox(torch.zeros_like(found.x))).abs()
    assert solve(_lasso(), FISTA(5)).solver == FISTA(5)


@every
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_chosen_solver_reaches_the_optimum_of_every_problem(case, name):
    problem = case.problem(FUNCTIONS[name])
    found, best = solve(problem, tol=1e-9), solve(problem, FISTA(300))
    assert found.converged
    assert float(found.objective - best.objective) <= 1e-8 * (1 + abs(float(best.objective)))


@every
@pytest.mark.parametrize("polish", [None, 3])
def test_spectral_steps_never_raise_the_objective(case, polish):
    for function in (L1(0.1), NonNegative(), GroupL2(0.3)):
        steps = trace(case.problem(function, ridge=0.0), Spectral(30, polish)).objective
        assert bool((steps.diff() <= 1e-12 * (1 + steps[:-1].abs())).all())


@pytest.mark.parametrize("datafit", [Quadratic(), Huber(50.0)], ids=repr)
def test_spectral_steps_are_no_steepest_descent(datafit):
    """On an ill-conditioned problem the line search keeps the length of the steps."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(30, 30, generator=generator, dtype=torch.float64))[0] for _ in "lr")
    A, y = (
        left * torch.logspace(0, -1.5, 30, dtype=torch.float64) @ right,
        torch.randn(3, 30, generator=generator).double(),
    )
    found = solve(Problem(Dense(A), Zero(), y, datafit=datafit), Spectral(1400), tol=1e-6)
    assert found.converged


def test_a_step_that_is_too_long_is_shortened():
    """Curvatures of a Huber loss may vanish along a step, after which the next one is too long for the line search."""
    generator = torch.Generator().manual_seed(3)
    A = 3 * torch.randn(11, 13, generator=generator, dtype=torch.float64)
    y = 5 * torch.randn(8, 13, generator=generator, dtype=torch.float64)
    weight = torch.rand(11, generator=generator, dtype=torch.float64)
    assert solve(Problem(Dense(A), L1(weight), y, ridge=0.1, datafit=Huber(1.7)), tol=1e-9).converged


def test_the_chosen_solver_is_differentiated():
    problem = problems.dense(L1(0.1))
    leaves = [problem.operator.weight.clone().requires_grad_(), problem.bias.clone().requires_grad_()]
    exact = Problem(Dense(leaves[0]), L1(0.1), problem.y, leaves[1], 0.1)
    found = [solve(exact, tol=1e-14, adjoint=Implicit()).x, solve(exact, tol=1e-14).x]
    reference = torch.autograd.grad(solve(exact, FISTA(1000), adjoint=Implicit()).x.square().sum(), leaves)
    for x in found:
        for mine, theirs in zip(torch.autograd.grad(x.square().sum(), leaves), reference, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    with pytest.raises(CapabilityError, match="Implicit"):
        solve(exact, Spectral(10))


@pytest.mark.parametrize("share", [0.3, 0.05])
def test_scikit_learn_agrees_on_one_lasso(share):
    problem = _lasso(rows=1, inputs=60, outputs=700, share=share)
    A, y = problem.operator.weight.numpy(), problem.y[0].numpy()
    theirs = Lasso(problem.function.weight / len(y), fit_intercept=False, tol=1e-12, max_iter=100000).fit(A.T, y)
    for solver in (None, WorkingSet(), Spectral(2000, 10)):
        found = solve(problem, solver, tol=1e-12)
        assert found.converged
        np.testing.assert_allclose(found.x[0].numpy(), theirs.coef_, atol=1e-5)


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_an_automatic_penalty_does_not_depend_on_the_scale(scale):
    """x/s solves the problem of sA, and s²λ is its ridge: the iterations are the same."""
    problem = _lasso()
    plain = solve(problem, ADMM(30, "auto"))
    scaled = Problem(Dense(scale * problem.operator.weight), L1(scale * problem.function.weight), problem.y)
    found = solve(scaled, ADMM(30, "auto"))
    torch.testing.assert_close(scale * found.x, plain.x, rtol=1e-6, atol=1e-8)
    assert float(found.gap) < 1e-2 * float(solve(scaled, ADMM(30, 1e-6)).gap)


def test_a_working_set_takes_other_datafits_and_a_bias():
    case = datafits.ALL[1]
    g = torch.Generator().manual_seed(0)
    A = torch.randn(300, 40, generator=g, dtype=torch.float64)
    bias = 0.1 * torch.randn(300, generator=g, dtype=torch.float64)
    problem = Problem(Dense(A), L1(2.0), case.data(1, 40), bias, 0.01, case.datafit)
    torch.testing.assert_close(
        solve(problem, WorkingSet(), tol=1e-12).x, solve(problem, FISTA(3000)).x, atol=1e-6, rtol=0
    )


def test_a_warm_start_saves_iterations():
    problem = _lasso()
    found = solve(problem, FISTA(3000), tol=1e-10)
    assert solve(problem, FISTA(3000), x0=found.x, tol=1e-8).iterations < found.iterations


def test_solvers_without_steps_need_no_norm(monkeypatch):
    """Short solves are short: neither the run nor the measures compute a certified norm."""

    def forbidden(self):
        raise AssertionError("a certified norm was computed")

    monkeypatch.setattr(Dense, "bound", forbidden)
    problem = _lasso()
    for solver in (None, Spectral(20), Spectral(20, 5), ADMM(20)):
        assert solve(problem, solver, tol=1e-6).optimality >= 0


def test_single_precision_reaches_its_tolerance():
    problem = _lasso()
    single = Problem(Dense(problem.operator.weight.float()), problem.function, problem.y.float())
    found = solve(single)
    assert found.converged
    assert found.x.dtype == torch.float32
    assert float(found.gap) >= float(found.objective) - float(solve(problem, tol=1e-12).objective) - 1e-3


def test_convolutions_and_several_leading_dimensions():
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 2, 3, 3, generator=g, dtype=torch.float64) / 4
    y = torch.randn(2, 3, 2, 5, 5, generator=g, dtype=torch.float64)
    problem = Problem(Conv2d(weight, (5, 5), padding=1), L1(0.1), y.flatten(0, 1), ridge=0.1, datafit=Quadratic())
    found = solve(problem, tol=1e-10)
    assert found.converged
    assert found.gap < 1e-7
    A = torch.randn(4, 6, generator=g, dtype=torch.float64)
    rows = torch.randn(2, 3, 6, generator=g, dtype=torch.float64)
    nested = solve(Problem(Dense(A), NonNegative(), rows), tol=1e-10).x
    flat = solve(Problem(Dense(A), NonNegative(), rows.flatten(0, 1)), tol=1e-10).x
    torch.testing.assert_close(nested.flatten(0, 1), flat, atol=1e-4, rtol=0)


MATRICES = pytest.mark.parametrize("function", [NuclearNorm(2.0), SpectralBall(0.3), PositiveSemidefinite()], ids=repr)


def _matrix_problem(function, ridge=0.5):
    g = torch.Generator().manual_seed(0)
    A, y = (torch.randn(5, 7, generator=g, dtype=torch.float64) for _ in range(2))
    return Problem(Dense(A.requires_grad_()), function, y, ridge=ridge)


@MATRICES
@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_a_function_of_matrices_joins_the_vectors_of_a_batch(function, ridge):
    """The batch is one problem: one gap, one step, and a tolerance that is reached together."""
    problem = _matrix_problem(function, ridge)
    with torch.no_grad():
        best = solve(problem, ProxGD(3000))
        for solver in (None, FISTA(2000)):
            found = solve(problem, solver, tol=1e-9)
            assert found.converged
            assert found.objective - best.objective <= found.gap <= 1e-9 * 0.5 * problem.y.square().sum()
        torch.testing.assert_close(best.objective, problem.objective(best.x))
    with pytest.raises(ShapeError, match="matrices"):
        solve(dataclasses.replace(problem, y=problem.y[0]), FISTA(5))


@MATRICES
def test_implicit_gradients_of_a_function_of_matrices_are_those_of_the_iterations(function):
    problem = _matrix_problem(function)
    weight, direction = problem.operator.weight, torch.arange(25.0, dtype=torch.float64).reshape(5, 5)
    exact, found = (
        torch.autograd.grad((solve(problem, ProxGD(400), **options).x * direction).sum(), weight)[0]
        for options in ({}, {"adjoint": Implicit()})
    )
    torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-8 * float(exact.abs().max()))


def test_a_layer_with_a_function_of_matrices_does_not_drop_rows():
    """Rows that have converged stay in the matrix."""
    torch.manual_seed(0)
    layer = SolverLinear(7, 5, activation=NuclearNorm(0.5), solver=FISTA(300), ridge=0.5).double().eval()
    y = torch.randn(5, 7, dtype=torch.float64) * torch.logspace(-4, 0, 5, dtype=torch.float64)[:, None]
    with torch.no_grad():
        exact, layer.tol = layer(y), 1e-3
        torch.testing.assert_close(layer(y), exact, rtol=0, atol=1e-2 * float(exact.abs().max()))


@pytest.mark.parametrize("rho", [1e-4, 1e4])
def test_adapted_penalties_do_not_need_a_scale(rho: float) -> None:
    """A penalty ten thousand times off leaves a gap that balanced residuals close, in as many iterations."""
    generator = torch.Generator().manual_seed(0)
    A, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((30, 20), (4, 20)))
    problem = Problem(Dense(A), L1(1.0), y)
    best = solve(problem, tol=1e-12).objective
    fixed, adapted = (solve(problem, ADMM(300, rho=rho, adapt=adapt)).objective - best for adapt in (0, 6))
    assert float(adapted) <= 1e-8 * float(best)
    assert float(fixed) >= 1e-3 * float(best)


def test_penalties_change_finitely_often() -> None:
    A, y = torch.diag(torch.tensor([1.0, 3.0])), torch.tensor([[4.0, -3.0]])
    problem, solver = Problem(Dense(A), L1(1.0), y), ADMM(100, rho=1e3, adapt=2)
    state, seen = solver.init(problem, None), []
    for k in range(100):
        state = solver.advance(problem, state, k, None)
        seen.append(float(state.rho))
    changes = [k + 1 for k in range(1, 100) if seen[k] != seen[k - 1]]
    assert set(changes) <= {5, 10}
    assert changes


def test_a_cone_has_no_gap_by_its_polar() -> None:
    """The polar of a cone contains no multiple of a point outside; NNLS has its gap from strong convexity."""
    generator = torch.Generator().manual_seed(0)
    A, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((12, 24), (5, 24)))
    found = solve(Problem(Dense(A), NonNegative(), y), tol=1e-8)
    assert found.converged
    assert found.iterations < 200


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_gaps_are_true_at_every_scale(scale: float) -> None:
    """Indicators have a tolerance for rounding, which must not make infeasible dual points feasible."""
    generator = torch.Generator().manual_seed(0)
    A, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((30, 20), (4, 20)))
    problem = Problem(Dense(A), L1(scale), scale * y)
    rough, best = solve(problem, FISTA(3)), solve(problem, tol=1e-10)
    assert best.converged
    assert float(rough.objective - best.objective) <= float(rough.gap)
    torch.testing.assert_close(best.x / scale, solve(Problem(Dense(A), L1(1.0), y), tol=1e-10).x, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [Box(-0.1, 0.3), L1Ball(0.4), Ball(0.4), Simplex(2.1)], ids=str)
def test_rounding_does_not_move_a_solution_out_of_the_domain(function, dtype) -> None:
    """-0.1 in single precision is below the -0.1 of double precision, in which gaps are computed."""
    problem = _lasso(rows=3, inputs=8, outputs=6)
    weight = problem.operator.weight.to(dtype)
    found = solve(Problem(Dense(weight), function, problem.y.to(dtype)))
    exact = solve(Problem(Dense(weight.double()), function, problem.y.to(dtype).double()), tol=1e-9)
    assert float(found.objective) == pytest.approx(float(exact.objective), rel=8 * torch.finfo(dtype).eps)
    assert found.objective <= exact.objective + found.gap
    assert dtype != torch.float32 or found.converged


def test_the_optimality_decides_where_no_dual_point_is_feasible() -> None:
    """With a bias no multiple of the residual need satisfy the constraints of the dual."""
    case = next(case for case in datafits.ALL if case.id == "Logistic")
    weight = torch.linspace(0.05, 0.5, 5, dtype=torch.float64)
    found = solve(case.problem(L1(weight), ridge=0.0))
    assert found.converged
    assert found.iterations < 200


def test_rounding_does_not_stop_the_line_search() -> None:
    g = torch.Generator().manual_seed(0)
    A, y = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((6, 9), (3, 9)))
    problem = Problem(Dense(A / 3), L1(0.1), y, datafit=Huber(0.3))
    found = solve(problem, tol=1e-12)
    assert found.converged
    assert found.iterations < 300


@pytest.mark.parametrize("function", [NonNegative(), Zero(), L1], ids=["cone", "zero", "norm"])
@pytest.mark.parametrize("solver", [None, Spectral(100), Spectral(100, 8)], ids=repr)
def test_spectral_steps_at_every_scale(solver, function):
    """Also where squares of the entries of a gradient or of a solution leave the range of single precision."""
    generator = torch.Generator().manual_seed(0)
    A, y = torch.randn(6, 9, generator=generator), torch.randn(2, 9, generator=generator)
    own = lambda strength: function(strength) if isinstance(function, type) else function  # noqa: E731
    expected = float(solve(Problem(Dense(A.double()), own(0.3), y.double()), FISTA(500)).objective)
    for scale, size in ((1e-15, 1e-12), (1e-15, 1e6), (1e-15, 1e10), (1e6, 1e6), (1e12, 1.0), (1e15, 1e10)):
        found = solve(Problem(Dense(scale * A), own(0.3 * scale * size), size * y), solver)
        assert float(found.objective) / size**2 == pytest.approx(expected, rel=1e-4)

"""Law: every solver, sampling, step rule and adjoint takes every datafit, as it takes the square."""

import dataclasses

import cvxpy as cp
import numpy as np
import pytest
import torch
from torch import Tensor

from minimand.adjoints import Checkpoint, Implicit, JacobianFree
from minimand.errors import CapabilityError, OptionError
from minimand.functions import L1, GroupL2, NonNegative
from minimand.operators import Conv2d, Dense, operator
from minimand.solvers import (
    ADMM,
    FISTA,
    RCD,
    SVRG,
    Datafit,
    Huber,
    Logistic,
    Poisson,
    Problem,
    ProxGD,
    ProxSG,
    Quadratic,
    Spectral,
    SquaredHingeLoss,
    WorkingSet,
    check_datafit,
    solve,
    trace,
)

from .cases import datafits, solvers

every = pytest.mark.parametrize("case", datafits.ALL, ids=datafits.IDS)
OTHERS = [case for case in datafits.ALL if not isinstance(case.datafit, Quadratic)]
other = pytest.mark.parametrize("case", OTHERS, ids=[case.id for case in OTHERS])


@pytest.mark.parametrize("case", datafits.ALL + datafits.WITHOUT_BOUND, ids=lambda case: case.id)
def test_a_datafit_passes_its_own_check(case):
    check_datafit(case.datafit, case.data(4, 5))


@every
def test_the_curvature_bounds_the_smoothness_and_is_attained(case):
    """κ‖A‖² + λ is never below the Hessian's norm; at the steepest point of the loss it is within a factor of it."""
    problem = case.problem(NonNegative())
    A, t = problem.operator.weight, torch.linspace(-6, 6, 2001, dtype=torch.float64)
    second = case.datafit.second(t[:, None, None].expand(-1, 3, 8), problem.y.expand(2001, 3, 8))
    kappa = float(case.datafit.curvature(problem.y))
    assert kappa * (1 - 1e-2) <= float(second.max()) <= kappa * (1 + 1e-12)
    steep = A @ torch.diag(second[1000, 0]) @ A.mT + problem.ridge * torch.eye(5, dtype=torch.float64)
    assert torch.linalg.matrix_norm(steep, 2) <= problem.smoothness() * (1 + 1e-9)


@every
@pytest.mark.parametrize("solver", solvers.DETERMINISTIC, ids=solvers.ids(solvers.DETERMINISTIC))
def test_deterministic_solvers_reach_the_cvxpy_optimum(case, solver):
    problem = case.problem(NonNegative())
    long = dataclasses.replace(solver.long, iters=300 if isinstance(solver.long, ADMM) else 1500)
    solution, total = solve(problem, long), 0.0
    for y in problem.y.numpy():
        x = cp.Variable(5)
        fit = case.convex(problem.operator.weight.numpy().T @ x, y)
        smooth = fit - problem.bias.numpy() @ x + 0.5 * problem.ridge * cp.sum_squares(x)
        total += cp.Problem(cp.Minimize(smooth), [x >= 0]).solve(solver=cp.CLARABEL)
    assert solution.objective.item() == pytest.approx(total, abs=2e-6)
    assert solution.optimality < 1e-6


@other
@pytest.mark.parametrize("one_for_all", [False, True], ids=["per-row", "shared"])
@pytest.mark.parametrize("solver", [SVRG(60, 20), RCD(600), RCD(1500, tau=1)], ids=repr)
def test_variance_reduced_solvers_reach_the_same_point(case, solver, one_for_all, generator):
    problem = case.problem(L1(0.1), ridge=1.0)
    best = solve(problem, FISTA(1000))
    solver = dataclasses.replace(solver, shared_sample=one_for_all)
    torch.testing.assert_close(solve(problem, solver, generator=generator).x, best.x, atol=1e-4, rtol=0)


@other
@pytest.mark.parametrize("solver", solvers.NOISY, ids=solvers.ids(solvers.NOISY))
def test_noisy_solvers_approach_the_optimum(case, solver, generator):
    problem = case.problem(NonNegative())
    best = solve(problem, FISTA(2000)).objective
    start = problem.objective(torch.zeros(problem.shape, dtype=torch.float64))
    reached = solve(problem, dataclasses.replace(solver.long, iters=400), generator=generator).objective
    assert best - 1e-9 <= reached < best + 0.05 * (start - best)


@every
def test_one_step_from_zero_is_the_plain_block_of_the_first_residual(case, generator):
    """Proposition 1's analogue: the plain block, with dropout, applied to −f′(0; y); to the bit."""
    problem = case.problem(NonNegative(), ridge=0.0)
    first = case.datafit.residual(None, problem.y)
    plain = torch.relu(torch.nn.functional.linear(first, problem.operator.weight, problem.bias))
    assert torch.equal(solve(problem, ProxGD(1, step=1.0)).x, plain)
    twin = torch.Generator().set_state(generator.get_state())
    solver = ProxSG(1, tau=0.5, step=1.0)
    mask = solver.draw(problem, None, twin).weight
    dropped = torch.relu(torch.nn.functional.linear(mask * first, problem.operator.weight, problem.bias))
    assert torch.equal(solve(problem, solver, generator=generator).x, dropped)


@every
def test_the_second_reduced_step_adds_dropout_noise_of_the_change(case, generator):
    """Proposition 2's analogue: from zero SVRG's first step is the plain block, the second adds noise to the change of
    the residual only."""
    problem = case.problem(NonNegative(), ridge=0.0)
    solver = SVRG(1, 2, tau=0.5, step=0.5)
    twin = torch.Generator().set_state(generator.get_state())
    first = torch.relu(0.5 * problem.linear())
    assert torch.equal(solve(problem, SVRG(1, 1, step=0.5)).x, first)
    mask, A, f = solver.draw(problem, first, twin).weight, problem.operator.weight, case.datafit
    change = f.residual(first @ A, problem.y) - f.residual(None, problem.y)
    expected = torch.relu(first + 0.5 * (problem.linear() + (mask * change) @ A.mT))
    torch.testing.assert_close(solve(problem, solver, generator=generator).x, expected, rtol=1e-12, atol=1e-12)


@every
def test_the_automatic_step_never_raises_the_objective(case):
    problem = case.problem(L1(0.05), ridge=0.0)
    objective = trace(problem, ProxGD(60)).objective
    assert bool((objective.diff() <= 1e-12).all())


@other
@pytest.mark.parametrize("function", [NonNegative(), L1(0.1), GroupL2(0.2)], ids=repr)
def test_the_implicit_gradient_is_that_of_the_minimiser(case, function, generator):
    problem = case.problem(function)
    leaves = [problem.operator.weight, problem.bias] + [problem.y] * (case.kind == "real")

    def run(A: Tensor, b: Tensor, y: Tensor = problem.y) -> Tensor:
        x = solve(Problem(Dense(A), function, y, b, 0.1, case.datafit), FISTA(2000), adjoint=Implicit()).x
        return x.square().sum() + x.sum()

    directions = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in leaves]
    free = [each.clone().requires_grad_() for each in leaves]
    slope = sum((g * d).sum() for g, d in zip(torch.autograd.grad(run(*free), free), directions, strict=True))
    with torch.no_grad():
        ends = [run(*(each + e * d for each, d in zip(leaves, directions, strict=True))) for e in (1e-5, -1e-5)]
    torch.testing.assert_close(slope, (ends[0] - ends[1]) / 2e-5, atol=1e-6, rtol=1e-5)


@other
@pytest.mark.parametrize("solver", [ADMM(5), SVRG(2, 3), RCD(4), ProxSG(4), FISTA(5)], ids=lambda s: type(s).__name__)
def test_gradcheck(case, solver):
    problem = case.problem(L1(0.1))

    def run(A: Tensor, b: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        built = Problem(Dense(A), L1(0.1), problem.y, b, 0.1, case.datafit)
        fixed = solver if isinstance(solver, ADMM) else dataclasses.replace(solver, step=0.3)
        return solve(built, fixed, generator=generator).x

    leaves = [problem.operator.weight.clone().requires_grad_(), problem.bias.clone().requires_grad_()]
    assert torch.autograd.gradcheck(run, leaves, atol=1e-5)


@other
@pytest.mark.parametrize("adjoint", [Checkpoint(), JacobianFree()], ids=repr)
def test_other_adjoints_take_it(case, adjoint):
    problem = case.problem(NonNegative())
    A = problem.operator.weight.clone().requires_grad_()
    built = dataclasses.replace(problem, operator=Dense(A))
    plain = solve(built, FISTA(8))
    found = solve(built, FISTA(8), adjoint=adjoint)
    torch.testing.assert_close(found.x, plain.x)
    (gradient,) = torch.autograd.grad(found.x.sum(), A)
    if isinstance(adjoint, Checkpoint):
        torch.testing.assert_close(gradient, torch.autograd.grad(plain.x.sum(), A)[0])


@pytest.mark.parametrize(("make", "name"), [(Huber, "delta"), (Poisson, "background")])
def test_parameters_of_a_datafit_have_gradients(make, name):
    case = next(each for each in datafits.ALL if isinstance(each.datafit, make))
    problem = case.problem(NonNegative())

    def run(value: Tensor) -> Tensor:
        fitted = dataclasses.replace(problem, datafit=make(value))
        return solve(fitted, FISTA(3000), adjoint=Implicit()).x

    value = torch.tensor(getattr(case.datafit, name), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (value,), eps=1e-6, atol=1e-5)


@pytest.mark.parametrize("solver", [ProxGD(4), ADMM(4), RCD(4, tau=1.0)], ids=lambda s: type(s).__name__)
def test_steps_that_follow_the_data_are_constants_of_every_derivative(solver):
    """The curvature of Poisson's loss depends on its background, and with it the steps and penalties."""
    problem = next(each for each in datafits.ALL if isinstance(each.datafit, Poisson)).problem(NonNegative())

    def run(value: Tensor) -> Tensor:
        return solve(dataclasses.replace(problem, datafit=Poisson(value)), solver).x.sin().sum()

    value = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(run(value), value)
    one = torch.ones((), dtype=torch.float64)
    torch.testing.assert_close(torch.func.jvp(run, (value.detach(),), (one,))[1], slope)
    torch.testing.assert_close(torch.func.grad(run)(value.detach()), slope)


@other
def test_operators_without_a_matrix_take_it(case):
    g = torch.Generator().manual_seed(0)
    A = Conv2d(torch.randn(3, 2, 3, 3, generator=g, dtype=torch.float64).abs() / 6, (4, 5), padding=1)
    conv = Problem(A, NonNegative(), case.data(2, 2, 4, 5), ridge=0.5, datafit=case.datafit)
    best = solve(conv, FISTA(600))
    assert best.optimality < 1e-6
    torch.testing.assert_close(solve(conv, ADMM(100, cg_iters=10)).x, best.x, atol=1e-3, rtol=0)
    dense = case.problem(NonNegative())
    A = dense.operator.weight
    own = operator(lambda y: y @ A.mT, lambda x: x @ A, (8,), (5,))
    mine = solve(dataclasses.replace(dense, operator=own), FISTA(800))
    torch.testing.assert_close(mine.x, solve(dense, FISTA(800)).x, atol=1e-6, rtol=0)


def test_scikit_learn_agrees_on_sparse_logistic_regression():
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 12))
    y = np.sign(X @ rng.normal(size=12) + rng.normal(size=60))
    options = {"fit_intercept": False, "tol": 1e-10, "solver": "saga", "max_iter": 20000}
    theirs = LogisticRegression(l1_ratio=1.0, C=0.5, **options).fit(X, y)
    problem = Problem(Dense(torch.from_numpy(X.T.copy())), L1(2.0), torch.from_numpy(y)[None], datafit=Logistic())
    mine = solve(problem, FISTA(3000)).x
    np.testing.assert_allclose(mine[0].numpy(), theirs.coef_[0], atol=1e-5)


@dataclasses.dataclass(frozen=True)
class Broken(Datafit):
    """A square with one wrong method."""

    what: str = ""

    def values(self, t, y):
        return 0.5 * (t - y) ** 2

    def gradient(self, t, y):
        return (1.01 if self.what == "gradient" else 1.0) * (t - y)

    def curvature(self, y):
        return 0.99 if self.what == "curvature" else 1.0

    def second(self, t, y):
        return torch.full_like(t, 0.9 if self.what == "second" else 1.0)

    def conjugate(self, u, y):
        return 0.5 * u * u + (0.0 if self.what == "conjugate" else u * y)

    def prox(self, v, step, y):
        return v if self.what == "prox" else (v + step * y) / (1 + step)


def test_the_check_names_what_is_wrong():
    y = torch.linspace(-2, 2, 7)
    check_datafit(Broken(), y)
    for what in ("gradient", "curvature", "second", "conjugate", "prox"):
        with pytest.raises(OptionError, match=what):
            check_datafit(Broken(what), y)


def test_bad_data_are_refused_before_any_work():
    A, y = Dense(torch.randn(3, 4)), torch.ones(2, 4)
    for datafit, data, message in [
        (Logistic(), 0 * y, "labels 1 and -1"),
        (SquaredHingeLoss(), 2 * y, "labels 1 and -1"),
        (Poisson(), -y, "counts y ≥ 0"),
    ]:
        with pytest.raises(OptionError, match=message):
            solve(Problem(A, NonNegative(), data, datafit=datafit), FISTA())
    with pytest.raises(CapabilityError, match="datafit"):
        solve(Problem(A, NonNegative(), y, datafit="logistic"), FISTA())
    for make, least in ((lambda: Huber(0.0), "> 0"), (lambda: Poisson(-1.0), "≥ 0")):
        with pytest.raises(OptionError, match=f"must be a finite number {least}"):
            make()


@dataclasses.dataclass(frozen=True)
class LogCosh(Datafit):
    """A user's own, with a tensor that its methods capture unseen."""

    held: dict[str, Tensor] = dataclasses.field(default_factory=dict, compare=False)

    def values(self, t: Tensor, y: Tensor) -> Tensor:
        return self._scale() * (t - y).cosh().log()

    def gradient(self, t: Tensor, y: Tensor) -> Tensor:
        return self._scale() * (t - y).tanh()

    def curvature(self, y: Tensor) -> float:
        return 1.0

    def _scale(self) -> Tensor | float:
        return self.held.get("scale", 1.0)


@pytest.mark.parametrize("solver", [None, Spectral(300), Spectral(300, polish=4), WorkingSet(), FISTA(3000)], ids=str)
def test_a_users_own_is_solved_as_a_constant_unless_it_captures_a_gradient(solver, generator):
    A = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    y = torch.randn(1, 8, generator=generator, dtype=torch.float64)
    problem = Problem(Dense(A), L1(0.1), y, datafit=LogCosh())
    found = solve(problem, solver, tol=1e-9)
    assert found.converged
    assert not found.x.requires_grad
    scale = torch.ones((), dtype=A.dtype, requires_grad=True)
    captured = dataclasses.replace(problem, datafit=LogCosh({"scale": scale}))
    if solver is not None and not solver.unrolls:
        with pytest.raises(CapabilityError, match=r"cannot be differentiated; use adjoint=Implicit"):
            solve(captured, solver, tol=1e-9)
    else:
        assert solve(captured, solver, tol=1e-9).x.requires_grad
    torch.testing.assert_close(
        solve(captured, solver, tol=1e-9, adjoint=Implicit()).x.detach(), found.x, atol=1e-4, rtol=0
    )

"""Laws: gradients are right, and the four ways to get them agree where they must."""

import dataclasses

import pytest
import torch

from minimand.adjoints import Checkpoint, Implicit, JacobianFree, Unroll
from minimand.errors import CapabilityError
from minimand.functions import L1, GroupL2, NonNegative, Simplex, SquaredHinge, from_activation
from minimand.nn.explain import held_bytes
from minimand.norms.kernel import Bounds
from minimand.operators import Conv2d, Dense
from minimand.solvers import ADMM, FISTA, RCD, Problem, ProxGD, solve

from .cases import problems, solvers

SMOOTH = from_activation("softplus")


def _differentiable(problem):
    """The problem as a function of its leaves: weight, y and bias."""
    leaves = [t.clone().requires_grad_() for t in (problem.operator.weight, problem.y, problem.bias)]

    def build(weight, y, bias):
        operator = Dense(weight) if weight.dim() == 2 else Conv2d(weight, problem.y.shape[-2:], stride=2, padding=1)
        # The automatic step is a constant of the backward pass; it must be one of finite differences, too.
        return dataclasses.replace(problem, operator=operator.with_bounds(bounds), y=y, bias=bias)

    op = problem.operator
    bounds = Bounds(op.norm_sq(), op.input_norms_sq(), op.output_norms_sq())
    return build, leaves


def _gradients(build, leaves, solver, adjoint, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = solve(build(*leaves), solver, adjoint=adjoint, generator=generator).x
    return x.detach(), torch.autograd.grad((x * torch.cos(torch.arange(x.numel()).reshape(x.shape))).sum(), leaves)


@pytest.mark.parametrize("make", [problems.dense, problems.conv], ids=["dense", "conv"])
@pytest.mark.parametrize("adjoint", [Unroll(), Checkpoint(), Checkpoint(every=4)], ids=str)
@pytest.mark.parametrize("case", solvers.ALL, ids=solvers.ids(solvers.ALL))
def test_gradcheck_of_every_solver(case, adjoint, make):
    build, leaves = _differentiable(make(SMOOTH))
    if "gradients" in case.id:
        # The probabilities depend on the point and are constants of the backward pass: not a function to difference.
        return

    def run(*leaves):
        return solve(build(*leaves), case.solver, adjoint=adjoint, generator=torch.Generator().manual_seed(0)).x

    assert torch.autograd.gradcheck(run, leaves, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("make", [problems.dense, problems.conv], ids=["dense", "conv"])
@pytest.mark.parametrize(
    "function", [SMOOTH, SquaredHinge(2.0), from_activation("tanh")], ids=["softplus", "leaky", "tanh"]
)
@pytest.mark.parametrize("method", ["cg", "neumann"])
def test_gradcheck_of_the_implicit_adjoint(function, make, method):
    build, leaves = _differentiable(make(function, ridge=0.5))
    adjoint = Implicit(iters=2000, method=method)

    def run(*leaves):
        return solve(build(*leaves), FISTA(iters=1500), adjoint=adjoint).x

    assert torch.autograd.gradcheck(run, leaves, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize(
    "function", [NonNegative(), L1(0.2), SMOOTH, Simplex(), GroupL2(0.3)], ids=lambda f: type(f).__name__
)
def test_implicit_equals_unrolled_at_convergence(function):
    build, leaves = _differentiable(problems.dense(function))
    x, exact = _gradients(build, leaves, ProxGD(iters=1500), Unroll())
    y, implicit = _gradients(build, leaves, ProxGD(iters=1500), Implicit())
    torch.testing.assert_close(x, y, atol=0, rtol=0)
    torch.testing.assert_close(implicit, exact, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("own_generator", [True, False])
@pytest.mark.parametrize("case", solvers.ALL, ids=solvers.ids(solvers.ALL))
def test_checkpointed_equals_unrolled_and_replays_the_samples(case, own_generator):
    build, leaves = _differentiable(problems.dense(NonNegative()))

    def run(adjoint):
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(5) if own_generator else None
        x = solve(build(*leaves), case.solver, adjoint=adjoint, generator=generator).x
        # Draws between the forward and the backward pass must not change the replay.
        torch.rand(7, generator=generator)
        after = torch.rand(3, generator=generator)
        return x, torch.autograd.grad(x.square().sum(), leaves), after, torch.rand(3, generator=generator)

    plain, checkpointed = run(Unroll()), run(Checkpoint(every=2))
    torch.testing.assert_close(plain, checkpointed, atol=1e-13, rtol=1e-12)


def test_checkpoint_holds_fewer_bytes():
    problem = problems.dense(NonNegative(), outputs=16, inputs=16, rows=256)
    weight = problem.operator.weight.clone().requires_grad_()
    bounds = Bounds(problem.operator.norm_sq())
    problem = dataclasses.replace(problem, operator=Dense(weight).with_bounds(bounds))

    def held(adjoint):
        return held_bytes(lambda y: solve(dataclasses.replace(problem, y=y), ProxGD(36), adjoint=adjoint).x, problem.y)

    assert held(Checkpoint()) < held(Unroll()) / 3
    assert held(Implicit()) < held(Unroll()) / 5


@pytest.mark.parametrize("solver", [case.of(80) for case in solvers.ALL], ids=str)
def test_jacobian_free_has_the_forward_value_and_a_gradient_that_points_the_same_way(solver):
    build, leaves = _differentiable(problems.dense(NonNegative(), ridge=0.5))
    x, exact = _gradients(build, leaves, solver, Unroll())
    y, free = _gradients(build, leaves, solver, JacobianFree())
    assert torch.equal(x, y)
    for a, b in zip(exact, free, strict=True):
        assert torch.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.5


def test_implicit_refuses_resampled_solvers_and_says_why():
    problem = problems.dense(NonNegative())
    for case in solvers.STOCHASTIC:
        with pytest.raises(CapabilityError, match="draws new samples"):
            solve(problem, case.solver, adjoint=Implicit())


def test_the_step_is_a_constant_of_the_backward_pass():
    """Differentiating through a norm bound would be noise; the gradient equals that at the same number as a step."""
    problem = problems.dense(SMOOTH)
    weight = problem.operator.weight.clone().requires_grad_()
    auto = dataclasses.replace(problem, operator=Dense(weight))
    step = 1 / float(auto.smoothness())
    (a,) = torch.autograd.grad(solve(auto, ProxGD(iters=5)).x.sum(), weight)
    (b,) = torch.autograd.grad(solve(auto, ProxGD(iters=5, step=step)).x.sum(), weight)
    torch.testing.assert_close(a, b)


def test_nothing_of_the_callers_is_changed():
    problem = problems.dense(NonNegative())
    tensors = [problem.operator.weight, problem.y, problem.bias]
    before = [t.clone() for t in tensors]
    for case in solvers.ALL:
        for adjoint in (Unroll(), Checkpoint(), JacobianFree()):
            solve(problem, case.solver, adjoint=adjoint)
    for old, new in zip(before, tensors, strict=True):
        assert torch.equal(old, new)
        assert not new.requires_grad
    assert Problem is type(problem)


def test_second_derivatives_of_the_unrolled_solve():
    build, leaves = _differentiable(problems.dense(SMOOTH, ridge=0.5, outputs=3, inputs=3, rows=1))
    assert torch.autograd.gradgradcheck(lambda *leaves: solve(build(*leaves), ProxGD(iters=3)).x, leaves, atol=1e-5)


@pytest.mark.parametrize("every", [2, 4, 7, 8])
def test_a_checkpointed_run_stops_at_its_tolerance(every):
    problem = problems.dense(NonNegative(), ridge=0.5)
    plain = solve(problem, FISTA(iters=1000), tol=1e-6)
    checkpointed = solve(problem, FISTA(iters=1000), tol=1e-6, adjoint=Checkpoint(every=every))
    assert checkpointed.converged
    assert checkpointed.iterations <= plain.iterations + 2 * every


@pytest.mark.parametrize("adjoint", [Unroll(), Checkpoint(2)], ids=str)
@pytest.mark.parametrize(
    "make", [lambda r: ADMM(3, rho=r), lambda r: ADMM(3, relaxation=r), lambda r: RCD(3, relaxation=r)]
)
def test_gradients_reach_the_solvers_numbers_where_nothing_else_requires_one(make, adjoint):
    generator = torch.Generator().manual_seed(0)
    problem = Problem(
        Dense(torch.randn(4, 6, generator=generator).double()),
        NonNegative(),
        torch.randn(2, 6, generator=generator).double(),
    )

    def value(number):
        found = solve(problem, make(number), adjoint=adjoint, generator=torch.Generator().manual_seed(0))
        return found.x.square().sum()

    number = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(value(number), number)
    with torch.no_grad():
        slope = (value(number + 1e-6) - value(number - 1e-6)) / 2e-6
    assert abs(gradient - slope) <= 1e-6 * abs(slope)
    assert slope != 0

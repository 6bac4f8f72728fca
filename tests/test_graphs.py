"""Laws: fixed-iteration solves compile without a graph break, export, and work in every precision."""

import pytest
import torch

from minimand.adjoints import Checkpoint, Unroll
from minimand.functions import NonNegative, from_activation
from minimand.operators import Conv2d, Dense
from minimand.solvers import ADMM, Huber, Problem, ProxGD, ProxSG, Quadratic, solve

from .cases import solvers

SOLVERS = [case.brief for case in solvers.ALL] + [solvers.shared(case.brief) for case in solvers.STOCHASTIC]


class Layer(torch.nn.Module):
    """A minimal layer: weights and a solve."""

    def __init__(self, solver, adjoint=Unroll(), act="relu", conv=False):  # noqa: B008
        super().__init__()
        shape = (4, 3, 3, 3) if conv else (6, 8)
        self.weight = torch.nn.Parameter(torch.randn(shape) / 4)
        self.bias = torch.nn.Parameter(torch.zeros(shape[0]))
        self.solver, self.adjoint, self.function = solver, adjoint, from_activation(act)

    def operator(self):
        return Dense(self.weight) if self.weight.dim() == 2 else Conv2d(self.weight, (6, 6), padding=1)

    def forward(self, y):
        problem = Problem(self.operator(), self.function, y, self.bias, 1e-3)
        return solve(problem, self.solver, adjoint=self.adjoint).x


def _input(conv=False):
    return torch.randn(2, 3, 6, 6) if conv else torch.randn(4, 8)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_compiles_without_a_graph_break(solver):
    torch._dynamo.reset()
    layer, y = Layer(solver), _input()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(y).sum().backward()
    assert torch.isfinite(layer.weight.grad).all()
    if not solver.stochastic:
        torch.testing.assert_close(compiled(y), layer(y))


@pytest.mark.parametrize(("act", "adjoint"), [("relu", Unroll()), ("relu", Checkpoint()), ("tanh", Unroll())], ids=str)
def test_convolutions_compile_with_gradients(act, adjoint):
    torch._dynamo.reset()
    layer, y = Layer(ProxGD(iters=3 if act == "relu" else 1), adjoint, act, conv=True), _input(conv=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    (expected,) = torch.autograd.grad(layer(y).square().sum(), layer.weight)
    (got,) = torch.autograd.grad(compiled(y).square().sum(), layer.weight)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_inner_systems_compile_with_their_gradients():
    """Solved ones, whose iterations have no derivative, and others, in one graph."""
    torch._dynamo.reset()
    layer, y = Layer(ADMM(iters=2, cg_iters=4), conv=True), _input(conv=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for scale in (0.01, 100.0, 10.0):
        with torch.no_grad():
            layer.weight.mul_(scale)
        (expected,) = torch.autograd.grad(layer(y).square().sum(), layer.weight)
        (got,) = torch.autograd.grad(compiled(y).square().sum(), layer.weight)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("datafit", [Quadratic(), Huber(0.5)], ids=str)
def test_graphs_report_the_objective_and_no_gap(datafit):
    torch._dynamo.reset()
    weight, bias, y = torch.randn(6, 8), torch.randn(6), _input()

    def measures(weight, bias, y):
        solution = solve(Problem(Dense(weight), NonNegative(), y, bias, 1e-2, datafit), ProxGD(iters=3))
        return solution.objective, solution.optimality, solution.gap

    *expected, gap = measures(weight, bias, y)
    *got, none = torch.compile(measures, fullgraph=True, backend="aot_eager")(weight, bias, y)
    torch.testing.assert_close(got, expected)
    assert gap.isfinite()
    assert none.isposinf()


@pytest.mark.parametrize("conv", [False, True], ids=["dense", "conv"])
@pytest.mark.parametrize("solver", [case.brief for case in solvers.DETERMINISTIC], ids=str)
def test_exports(solver, conv):
    layer, y = Layer(solver, conv=conv).eval(), _input(conv)
    program = torch.export.export(layer, (y,))
    torch.testing.assert_close(program.module()(y), layer(y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_dtype_follows_the_input(solver, dtype):
    layer = Layer(solver).to(dtype)
    x = layer(_input().to(dtype))
    assert x.dtype == dtype
    x.sum().backward()
    assert layer.weight.grad.dtype == dtype


@pytest.mark.parametrize("conv", [False, True], ids=["dense", "conv"])
@pytest.mark.parametrize("solver", [s for s in SOLVERS if not s.stochastic], ids=str)
def test_bfloat16_autocast_stays_close(solver, conv):
    layer, y = Layer(solver, conv=conv), _input(conv)
    exact = layer(y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = layer(y)
        x.float().sum().backward()
    assert torch.isfinite(layer.weight.grad).all()
    torch.testing.assert_close(x.float(), exact, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("solver", [s for s in SOLVERS if s.stochastic], ids=str)
def test_bfloat16_autocast_of_stochastic_solvers_is_finite(solver):
    layer, y = Layer(solver), _input()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(y).float().sum().backward()
    assert torch.isfinite(layer.weight.grad).all()


def test_any_leading_dimensions():
    weight, y = torch.randn(6, 8, dtype=torch.float64), torch.randn(2, 3, 8, dtype=torch.float64)
    for solver in SOLVERS:
        whole = solve(Problem(Dense(weight), NonNegative(), y), solver)
        single = solve(Problem(Dense(weight), NonNegative(), y[0, 0]), solver)
        assert whole.x.shape == (2, 3, 6)
        assert single.x.shape == (6,)
        if not solver.stochastic:
            torch.testing.assert_close(whole.x[0, 0], single.x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_half_precision_problems_solve_and_their_objective_does_not_overflow(solver, dtype):
    y = torch.full((4, 8), -200.0, dtype=dtype)
    solution = solve(Problem(Dense(torch.eye(6, 8, dtype=dtype)), NonNegative(), y), solver)
    assert solution.x.dtype == dtype
    assert solution.objective.item() == pytest.approx(0.5 * 32 * 200**2, rel=1e-2)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_empty_batches(solver):
    for operator, shape in (
        (Dense(torch.randn(6, 8)), (0, 8)),
        (Conv2d(torch.randn(4, 3, 3, 3), (6, 6)), (0, 3, 6, 6)),
    ):
        solution = solve(Problem(operator, NonNegative(), torch.zeros(shape)), solver)
        assert solution.x.shape[0] == 0
        assert solution.objective == 0


@pytest.mark.parametrize("sampling", ["nice", "bernoulli", "importance"])
@pytest.mark.parametrize("shared", [False, True])
def test_single_samples_keep_their_shape(sampling, shared):
    solver = ProxSG(iters=2, sampling=sampling, shared_sample=shared)
    assert solve(Problem(Dense(torch.randn(4, 6)), NonNegative(), torch.randn(6)), solver).x.shape == (4,)
    operator = Conv2d(torch.randn(4, 3, 3, 3), (6, 6))
    assert solve(Problem(operator, NonNegative(), torch.randn(3, 6, 6)), solver).x.shape == (4, 4, 4)

"""Laws: layers and ``solve`` are finite and right in every type, at every scale, and say where they cannot be."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from minimand.errors import NonFiniteError
from minimand.functions import Function, NonNegative, Zero
from minimand.functions.separable import NonPositive
from minimand.nn import SolverLinear, convert
from minimand.operators import Dense, operator
from minimand.solvers import FISTA, Importance, Problem, ProxGD, ProxSG, solve, trace
from minimand.solvers.adjoints import Adjoint
from minimand.solvers.sampling import Request

from .cases import precision
from .cases.precision import ADJOINTS, FUNCTIONS, LAYERS, SOLVERS, PrecisionCase, check_layer, pairwise

HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("case", pairwise(), ids=str)
def test_a_layer_is_its_float64_layer_up_to_rounding(case):
    """Every pair of layer, solver, adjoint, function, precision, scale, data and entry (tests/cases/precision.py)."""
    check_layer(case)


# Scales --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("power", [-20, 20])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_scaling_the_weight_scales_the_solution(solver, layer, power, dtype):
    """For cones x(cA, cb, c²λ) = x(A, b, λ)/c, and the gradient in A is divided by c². Powers of two are exact."""
    for function, name in ((NonNegative(), "unroll"), (NonPositive(), "implicit"), (Zero(), "free")):
        if name == "implicit" and SOLVERS[solver].stochastic:
            continue
        x, gradient = _cone_layer(layer, SOLVERS[solver], ADJOINTS[name], function, 0, dtype)
        scaled, scaled_gradient = _cone_layer(layer, SOLVERS[solver], ADJOINTS[name], function, power, dtype)
        for exact, found in ((x, scaled * 2.0**power), (gradient, scaled_gradient * 4.0**power)):
            assert (exact - found).norm() <= 1e-4 * exact.norm(), (function, name)


def _cone_layer(
    name: str, solver: object, adjoint: Adjoint, function: Function, power: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    make, shape = LAYERS[name]
    scale = 2.0**power
    if hasattr(solver, "rho"):
        solver = dataclasses.replace(solver, rho=scale**2)
    torch.manual_seed(3)
    layer = make(activation=function, solver=solver, adjoint=adjoint, ridge=0.5 * scale**2).to(dtype)
    y = torch.randn(shape).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(scale)
    x = layer(y)
    (gradient,) = torch.autograd.grad(x.float().square().sum() * scale, layer.weight)
    # The gradient 2cx of the loss in x does not depend on c.
    return x.detach().double(), gradient.double()


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("step", [1e-12, 1e-8, 1e-4, 0.3, 1.0, 1e4, 1e12])
def test_a_prox_is_that_of_float64_at_every_step(function, step):
    """Points are of the size of steps along gradients of size 1 and 1,000."""
    shape = next(each for each in ((5, 5, 5), (5, 2, 5), (5, 3, 5), (5, 4, 5)) if precision.fits(function, each))
    for scale in (step, 1000 * step):
        point = scale * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        point = point.float().double()
        exact = function.prox(point, step)
        noise = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        near = [function.prox(point * (1 + each * 2.0**-23), step) for each in noise]
        room = max((each - exact).norm() for each in near) + 2.0**-23 * exact.norm()
        assert (function.prox(point.float(), step) - exact).norm() <= 20 * room


# Types ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_types_are_those_of_a_plain_layer(layer, dtype):
    make, shape = LAYERS[layer]
    module, y = make(), torch.randn(shape)
    plain = nn.Linear(shape[1], 4)
    with torch.autocast("cpu", dtype=dtype):
        assert module(y).dtype == plain(y if y.dim() == 2 else y.movedim(1, -1)).dtype == dtype
        assert module(y.to(dtype)).dtype == dtype
        assert copy.deepcopy(module).double()(y.double()).dtype == torch.float64
    half = module.to(dtype).eval()
    for mode in ("stochastic", "mean", "deterministic"):
        half.solver, half.eval_mode = ProxSG(3), mode
        x = half(y.to(dtype))
        x.sum().backward()
        assert x.dtype == half.weight.grad.dtype == half.bias.grad.dtype == dtype
    assert half.tracker.bound().dtype == torch.float32


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_squared_norm_may_overflow_half_precision(dtype):
    """‖A‖² = 9e8 is out of float16's range, the weights are not."""
    layer = SolverLinear(4, 4, bias=False, ridge=0.0, solver=FISTA(50)).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.diag(torch.tensor([30000.0, 10000.0, 20000.0, 5000.0])))
    y = torch.tensor([[3.0, 2.0, -1.0, 1.0]], dtype=dtype)
    expected = torch.relu(y.double() / layer.weight.double().diagonal())
    torch.testing.assert_close(layer(y).double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("sampled", [False, True])
def test_an_operator_of_callables_keeps_its_type(dtype, sampled):
    """Callables that capture half precision are called with it; everything else is float32."""
    weight = (torch.randn(4, 6) / 2).to(dtype)
    norms = {"input_norms_sq": 4.0} if sampled else {}
    given = operator(lambda y: y @ weight.mT, lambda x: x @ weight, (6,), (4,), 12.0, dtype=dtype, **norms)
    y = torch.randn(5, 6).to(dtype).requires_grad_()
    solver = ProxSG(8) if sampled else FISTA(60)
    torch.manual_seed(0)
    solution = solve(Problem(given, NonNegative(), y, ridge=0.1), solver)
    solution.x.sum().backward()
    assert solution.x.dtype == y.grad.dtype == dtype
    assert solution.objective.dtype == torch.float32
    exact = operator(lambda y: y @ weight.double().mT, lambda x: x @ weight.double(), (6,), (4,), 12.0, **norms)
    torch.manual_seed(0)
    x = solve(Problem(exact, NonNegative(), y.detach().double(), ridge=0.1), solver).x
    torch.testing.assert_close(solution.x.double(), x, rtol=0, atol=20 * torch.finfo(dtype).eps)


def test_solve_ignores_autocast_and_measures_in_full_precision():
    weight, y = torch.randn(6, 8) / 2, torch.randn(3, 8)
    problem = Problem(Dense(weight), NonNegative(), y, ridge=0.5)
    expected = solve(problem, FISTA(200), tol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, steps = solve(problem, FISTA(200), tol=1e-4), trace(problem, FISTA(5))
    assert found.converged
    assert torch.equal(found.x, expected.x)
    assert torch.equal(steps.optimality, trace(problem, FISTA(5)).optimality)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(self.conv(x)) + x)


@pytest.mark.parametrize("kind", ["pure", "autocast"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_converted_blocks_with_batch_normalisation_and_skip(dtype, kind):
    torch.manual_seed(1)
    net, x = convert(_Residual(), {"conv": ProxGD(5)}), torch.randn(2, 4, 6, 6).to(dtype)
    exact = copy.deepcopy(net).to(dtype).double() if kind == "pure" else copy.deepcopy(net).double()
    expected = exact(x.double())
    gradient = torch.autograd.grad(expected.sum(), exact.conv.weight)[0]
    if kind == "pure":
        found = net.to(dtype)(x)
    else:
        with torch.autocast("cpu", dtype=dtype):
            found = net(x)
    assert found.dtype == dtype
    tolerance = 20 * torch.finfo(dtype).eps
    assert (found - expected).norm() <= tolerance * expected.norm()
    found = torch.autograd.grad(found.float().sum(), net.conv.weight)[0]
    assert (found - gradient).norm() <= tolerance * gradient.norm()


# What is not finite --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("layer", ["linear", "conv2d"])
def test_layers_pass_on_what_is_not_finite(layer, solver):
    """As torch's layers do; a GradScaler sees it in the gradient and skips the step. Other rows keep their output."""
    make, shape = LAYERS[layer]
    for name, function in FUNCTIONS.items():
        case = PrecisionCase(layer, solver, function=name)
        if solver != "ProxGD" and name not in (
            "NonNegative()",
            "Monotone(tanh)",
            "Simplex()",
            "NuclearNorm(weight=0.7)",
        ):
            continue
        if not precision.applies(case) or not (function.separable or layer == "conv2d"):
            continue
        torch.manual_seed(0)
        module, y = make(activation=function, solver=SOLVERS[solver]), torch.randn(shape)
        bad = y.clone()
        bad[0].view(-1)[0] = float("nan")
        torch.manual_seed(1)
        expected = module(y)
        torch.manual_seed(1)
        found = module(bad)
        assert not found[0].isfinite().all(), name
        torch.testing.assert_close(found[1:], expected[1:])


def test_a_grad_scaler_skips_a_step_that_overflows():
    torch.manual_seed(0)
    layer = SolverLinear(6, 4, solver=ProxSG(3))
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = layer.weight.detach().clone()
    for value, moved in ((float("inf"), False), (1.0, True)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = layer(torch.full((3, 6), value)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert bool((layer.weight != before).any()) == moved
    assert layer.weight.isfinite().all()


def test_importance_sampling_of_rows_that_are_not_finite_is_uniform():
    scores = torch.tensor([[1.0, 3.0], [float("nan"), 1.0], [float("inf"), 1.0], [0.0, 0.0]])
    sample = Importance().draw(Request(1, 2, 4, torch.zeros(4, 2), None, scores))
    assert torch.equal(sample.weight[1:].sum(-1), torch.full((3,), 2.0))
    huge = Importance().draw(
        Request(1, 2, 1, torch.zeros(1, 2), None, torch.tensor([[1e300, 3e300]], dtype=torch.float64))
    )
    assert huge.weight.sum().item() == pytest.approx(4.0) or huge.weight.sum().item() == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("problem", "solver", "message"),
    [
        ((1e-4, 100.0, torch.float16), FISTA(50), r"the solution in torch.float16 holds \d+ NaN or Inf"),
        ((1e3, 1.0, torch.float32), ProxGD(40, step=1.0), "the solution in torch.float32 .*step='auto'"),
        ((1.0, float("nan"), torch.float32), ProxGD(), "y holds"),
        ((float("inf"), 1.0, torch.float32), ProxGD(), "weight holds"),
    ],
)
def test_solve_refuses_what_is_not_finite_in_a_sentence(problem, solver, message):
    scale, size, dtype = problem
    weight = torch.diag(torch.tensor([1.0, 2.0, 3.0])).mul(scale).nan_to_num(0.0, posinf=float("inf"))
    y = torch.full((2, 3), size)
    with pytest.raises(NonFiniteError, match=message) as caught:
        solve(Problem(Dense(weight.to(dtype)), Zero(), y.to(dtype)), solver)
    assert "\n" not in str(caught.value)


def test_a_smoothness_that_is_not_a_number_is_refused():
    """τ = 1 of an infinite bound is 0 · ∞; the step was 1 then."""
    layer = SolverLinear(4, 3, solver=ProxSG(3, tau=1))
    with torch.no_grad():
        layer.weight.fill_(1e19).neg_()
    with pytest.raises(NonFiniteError, match="SolverLinear: the bound"):
        layer(torch.randn(2, 4))

"""RidgeNet's objective is a problem of the grammar; the network in half precision, under autocast and in graphs."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimand.errors import CapabilityError
from minimand.functions import Charbonnier
from minimand.nn import RidgeNet
from minimand.nn.unrolled.ridgeproblem import Potentials
from minimand.operators import BlockSensing, Inpainting, LinearOperator, gaussian_blur, orthonormal_gaussian
from minimand.solvers import FISTA, Huber, ProxGD, Solver, check_datafit, solve, trace

SIDE = 10


def _operator(name: str) -> LinearOperator:
    generator = torch.Generator().manual_seed(0)
    if name == "blocks":
        return BlockSensing(orthonormal_gaussian(10, 25, generator=generator, dtype=torch.float64), (5, 5))
    if name == "holes":
        return Inpainting((torch.rand(2, SIDE, SIDE, generator=generator) < 0.6).double())
    blur = gaussian_blur((SIDE, SIDE), 1.0)
    return blur.with_weight(blur.weight.double())


def _net(name: str, noise: float | None, **options: object) -> tuple[RidgeNet, Tensor]:
    operator = _operator(name)
    net = RidgeNet(operator, 2, 8, 3, "convex", noise=noise, **options).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        net.log_scale.copy_(-3 + torch.randn(8, generator=generator))
        net.exponent = 0.5 * torch.rand(8, generator=generator).double()
    sides = (2, 1, SIDE, SIDE) if name == "blocks" else (2, *operator.input_shape)
    x = torch.rand(sides, generator=generator, dtype=torch.float64)
    if isinstance(operator, BlockSensing):
        operator = BlockSensing(operator.weight, (SIDE, SIDE))
    return net, operator.apply(x)


# The grammar


@pytest.mark.parametrize("solver", [FISTA(4000), None], ids=["FISTA", "chosen"])
@pytest.mark.parametrize(
    ("name", "noise"), [("blocks", None), ("blocks", 0.05), ("holes", 0.05), ("blur", 0.05), ("blur", 1e-3)]
)
def test_solve_finds_the_minimum_of_the_network(name: str, noise: float | None, solver: Solver | None) -> None:
    net, y = _net(name, noise)
    if noise == 1e-3:
        with torch.no_grad():
            net.log_temperature.fill_(math.log(1e-4))  # a stiff data term
    problem = net.problem(y)
    ours = net.solve(y, tol=1e-9, iterations=8000)
    with torch.no_grad():
        assert float(problem.objective(ours.x)) == pytest.approx(float(ours.objective), rel=1e-9)
        found = solve(problem, solver, tol=1e-5)
    assert found.converged
    assert float(found.objective) == pytest.approx(float(ours.objective), rel=1e-5)


@pytest.mark.parametrize("solver", [FISTA(2000), None], ids=["FISTA", "chosen"])
@pytest.mark.parametrize(("name", "noise"), [("blocks", None), ("blocks", 0.05), ("blur", 0.05)])
def test_solve_finds_the_minimum_in_single_precision(name: str, noise: float | None, solver: Solver | None) -> None:
    torch.manual_seed(0)
    operator = orthonormal_gaussian(10, 25) if name == "blocks" else gaussian_blur((SIDE, SIDE), 1.0)
    net = RidgeNet(operator, 2, 8, 3, "convex", noise=noise).eval()
    y = torch.rand(3, 10) if name == "blocks" else torch.rand(3, 1, SIDE, SIDE)
    found, ours = solve(net.problem(y), solver, tol=1e-4), net.solve(y, tol=1e-6, iterations=4000)
    assert float(found.objective) == pytest.approx(float(ours.objective), rel=1e-3)


def test_the_step_of_the_problem_is_certified() -> None:
    """The automatic step is one over a bound on ‖W‖², with which plain steps descend."""
    net, y = _net("holes", 0.05)
    problem = net.problem(y)
    assert float(problem.smoothness()) == pytest.approx(net.smoothness(net.fidelity(y).operator), rel=1e-2)
    objectives = trace(problem, ProxGD(60)).objective
    assert bool((objectives.diff() <= 0).all())


def test_the_potentials_are_a_datafit() -> None:
    for exponent in (0.0, 0.3, 0.5):
        check_datafit(Potentials(Charbonnier(0.3, exponent)), torch.randn(40, dtype=torch.float64))


def test_a_problem_is_convex_and_has_a_prox() -> None:
    net = RidgeNet(orthonormal_gaussian(8, 25), 2, 8, 3)
    with pytest.raises(CapabilityError, match='guarantee=\\"convex\\"'):
        net.problem(torch.rand(1, 8))
    net, y = _net("blur", 0.1, datafit=Huber(0.1))
    with pytest.raises(CapabilityError, match="prox of its data term"):
        net.problem(y)


# Types


@pytest.mark.parametrize("noise", [None, 0.05], ids=["exact", "noisy"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_computes_in_float32(dtype: torch.dtype, noise: float | None) -> None:
    torch.manual_seed(0)
    phi, x = orthonormal_gaussian(20, 36), F.avg_pool2d(torch.rand(2, 1, 18, 18), 3, 1, 1)
    net = RidgeNet(phi, 3, 8, 3, noise=noise).eval()
    y = BlockSensing(phi, (18, 18)).apply(x)
    whole = net(y)
    half = net.to(dtype)
    answer, solution = half(y.to(dtype)), half.solve(y.to(dtype), iterations=30)
    assert answer.dtype == solution.x.dtype == dtype
    torch.testing.assert_close(answer.float(), whole, atol=0.05, rtol=0)
    history = torch.tensor(half.descended(y.to(dtype)).history)
    assert bool((history.diff() <= 0).all())
    half.train().loss(y.to(dtype), x.to(dtype)).backward()
    assert bool(half.filters.grad.isfinite().all())


def test_autocast_changes_nothing() -> None:
    torch.manual_seed(0)
    net, y, x = RidgeNet(orthonormal_gaussian(8, 25), 2, 8, 3), torch.rand(2, 8), torch.rand(2, 25)
    plain = net.loss(y, x), net.loss(y, x, tail=4), net.eval()(y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = net.loss(y, x), net.loss(y, x, tail=4), net(y)
        cast[0].backward()
    torch.testing.assert_close(cast, plain)


# Graphs


class Phases(nn.Module):
    def __init__(self, net: RidgeNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, y: Tensor) -> Tensor:
        return self.net.unrolled(y)


def test_the_phases_are_exported_and_batched_and_tolerances_refused() -> None:
    torch.manual_seed(0)
    net, y = RidgeNet(orthonormal_gaussian(8, 25), 2, 8, 3).eval(), torch.rand(3, 2, 8)
    graph = torch.export.export(Phases(net), (y[0],)).module()
    torch.testing.assert_close(graph(y[1]), net.unrolled(y[1]))
    batched = torch.func.vmap(net.unrolled)(y)
    torch.testing.assert_close(batched[2], net.unrolled(y[2]))
    with pytest.raises(CapabilityError, match="depends on values"):
        torch.func.vmap(net)(y)
    with pytest.raises(CapabilityError, match="depends on values"):
        torch.export.export(net, (y[0],))

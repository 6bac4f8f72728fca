"""Law: a layer may return the pre-activation of its solution, with the solution's value and gradient behind it."""

import pytest
import torch
from torch import nn

from minimand.adjoints import Checkpoint, Implicit, JacobianFree, Unroll
from minimand.errors import CapabilityError
from minimand.nn import SolverConv2d, SolverLinear, SolverOptions
from minimand.solvers import ADMM, FISTA, RCD, SVRG, HeavyBall, ProxGD, ProxSG

from .cases import functions

ACTIVATIONS = {
    "relu": nn.ReLU(),
    "leaky_relu": nn.LeakyReLU(0.2),
    "hardtanh": nn.Hardtanh(-0.3, 0.4),
    "softshrink": nn.Softshrink(0.1),
    "tanh": nn.Tanh(),
    "elu": nn.ELU(),
    "softsign": nn.Softsign(),
    "identity": nn.Identity(),
    "sigmoid": nn.Sigmoid(),
    "softplus": nn.Softplus(),
}
SOLVERS = [ProxGD(5), HeavyBall(5), FISTA(5), ADMM(5), ProxSG(5), SVRG(2, 3), RCD(5), RCD(5, tau=1)]
ADJOINTS = [Unroll(), Checkpoint(), JacobianFree(), Implicit()]


@functions.cases(functions.ALL)
@pytest.mark.parametrize("step", [1.0, 0.3, 2.5, 1e-3, torch.tensor(0.4, dtype=torch.float64)], ids=str)
def test_its_prox_at_step_one_is_the_prox(case, step):
    x = functions.draw(case).requires_grad_()
    z, expected = case.function.preactivation(x, step), case.function.prox(x, step)
    assert step != 1 or torch.equal(z, x)
    torch.testing.assert_close(case.function.prox(z), expected, rtol=1e-6, atol=1e-6)
    if case.function.separable:  # others have a prox with kinks, at which the formula may end
        weight = torch.randn_like(x)
        (ours,) = torch.autograd.grad(case.function.prox(z), x, weight)
        (theirs,) = torch.autograd.grad(expected, x, weight)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def _outputs(layer, act, y, returns):
    """The solution and its gradients, from one seed."""
    layer.returns = returns
    torch.manual_seed(1)
    x = layer(y)
    x = act(x) if returns == "preactivation" else x
    return x, *torch.autograd.grad(
        (x * torch.linspace(-1, 1, x.numel()).reshape(x.shape)).sum(), [y, *layer.parameters()]
    )


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=lambda adjoint: type(adjoint).__name__)
@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_activation_of_what_the_layer_returns_is_its_solution(name, solver, adjoint):
    """Adjoints that differentiate the minimiser agree where the solver has converged."""
    at_minimum = isinstance(adjoint, Implicit | JacobianFree)
    if (at_minimum and solver.stochastic) or (isinstance(solver, RCD) and name in ("sigmoid", "softplus")):
        return
    torch.manual_seed(0)
    solver = type(solver)(300) if at_minimum else solver
    layer = SolverLinear(7, 4, activation=ACTIVATIONS[name], solver=solver, adjoint=adjoint, ridge=0.3).double()
    y = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    expected = _outputs(layer, None, y, "solution")
    for one, other in zip(_outputs(layer, ACTIVATIONS[name], y, "preactivation"), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("solver", [ProxSG(4), RCD(4)], ids=repr)
@pytest.mark.parametrize("name", ["relu", "tanh", "leaky_relu", "hardtanh"])
def test_the_mean_in_evaluation_is_that_of_the_solutions(name, solver):
    torch.manual_seed(0)
    options = SolverOptions(solver, eval_mode="mean", mean_passes=5)
    layer = SolverConv2d.from_plain(nn.Conv2d(2, 3, 3), ACTIVATIONS[name], options).double().eval()
    y = torch.randn(4, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    expected = _outputs(layer, None, y, "solution")
    for one, other in zip(_outputs(layer, ACTIVATIONS[name], y, "preactivation"), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_coordinate_descent_refuses_an_activation_that_is_never_zero():
    layer = SolverLinear(3, 3, activation="sigmoid")
    layer.returns = "preactivation"
    with pytest.raises(CapabilityError, match="RCD leaves outputs at 0"):
        layer.solver = RCD()

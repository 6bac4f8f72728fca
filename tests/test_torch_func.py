"""Laws: the transforms of torch.func agree with finite differences, for every function of one entry, and networks
run inside of them."""

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from minimand.functions import L1
from minimand.nn import Architecture, ISTANet, OptimizationNet, RidgeNet, SolverLinear, SolverOptions, convert
from minimand.operators import orthonormal_gaussian
from minimand.solvers import RCD, ProxGD, ProxSG
from tests.cases.functions import SEPARABLE, FunctionCase, cases

STEP = 0.3


def _differences(f, x: torch.Tensor, width: float = 1e-6) -> torch.Tensor:
    """The derivative of an elementwise function by central differences."""
    return (f(x + width) - f(x - width)) / (2 * width)


def _points(case: FunctionCase) -> torch.Tensor:
    # Away from round numbers, where functions have kinks.
    return torch.linspace(-2.3, 2.4, 7, dtype=torch.float64) + 0.0137


@cases(SEPARABLE)
@pytest.mark.parametrize("tensor_step", [False, True])
def test_jacobians_of_the_prox(case: FunctionCase, tensor_step: bool) -> None:
    x = _points(case)
    step = torch.full_like(x, STEP) if tensor_step else STEP
    f = lambda x: case.function.prox(x, step)  # noqa: E731
    expected = torch.diag(_differences(f, x))
    torch.testing.assert_close(jacrev(f)(x), expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(jacfwd(f)(x), expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(jvp(f, (x,), (torch.ones_like(x),))[1], expected.diagonal(), rtol=1e-6, atol=1e-8)


@cases(SEPARABLE)
def test_derivatives_in_the_step(case: FunctionCase) -> None:
    x, step = _points(case), torch.tensor(STEP, dtype=torch.float64)
    f = lambda step: case.function.prox(x, step)  # noqa: E731
    expected = _differences(f, step)
    torch.testing.assert_close(jacfwd(f)(step), expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(jacrev(f)(step), expected, rtol=1e-6, atol=1e-8)


@cases(SEPARABLE)
def test_vmap_is_a_loop(case: FunctionCase) -> None:
    x = _points(case).reshape(7, 1) + torch.linspace(0, 0.5, 3, dtype=torch.float64)
    steps = torch.linspace(0.1, 2.0, 7, dtype=torch.float64)
    prox = case.function.prox
    torch.testing.assert_close(vmap(prox)(x), prox(x))
    torch.testing.assert_close(vmap(prox)(x, steps), torch.stack([prox(*pair) for pair in zip(x, steps, strict=True)]))
    torch.testing.assert_close(vmap(prox, (None, 0))(x[0], steps), torch.stack([prox(x[0], step) for step in steps]))


# torch's own hardsigmoid has no second derivative.
@cases([case for case in SEPARABLE if case.name != "hardsigmoid"])
def test_hessians_of_the_prox(case: FunctionCase) -> None:
    x = _points(case)
    f = lambda x: case.function.prox(x, STEP).sum()  # noqa: E731
    slope = lambda x: torch.autograd.functional.jacobian(f, x)  # noqa: E731
    expected = torch.diag(_differences(slope, x))
    torch.testing.assert_close(hessian(f)(x), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(jacfwd(jacfwd(f))(x), expected, rtol=1e-5, atol=1e-7)


def _learned() -> torch.nn.Module:
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    return convert(net, SolverOptions(ProxGD(2), learn_strength=True))


INSIDE = {
    "sampled": lambda: SolverLinear(4, 3, solver=ProxSG(2, tau=0.5)),
    "shared sample": lambda: SolverLinear(4, 3, solver=RCD(2, tau=0.5), shared_sample=True),
    "importance": lambda: SolverLinear(4, 3, solver=ProxSG(2, tau=1, sampling="importance")),
    "learned strength": _learned,
    "learned threshold": lambda: SolverLinear(4, 3, activation=L1(torch.nn.Parameter(torch.tensor(0.1)))),
    "learned coefficients": lambda: OptimizationNet([torch.nn.Linear(4, 4)], "nesterov", learnable=True),
    "ista": lambda: ISTANet(torch.eye(4), 1, architecture=Architecture(channels=2)),
    "ridge": lambda: RidgeNet(orthonormal_gaussian(4, 9), 1, 3, 3),
}


@pytest.mark.parametrize("name", INSIDE)
def test_networks_inside_of_a_transform_of_something_else(name: str) -> None:
    """The tensors of the network and its input are not wrapped, as where torch.func sees the last layer only."""
    torch.manual_seed(0)
    net, x, scale = INSIDE[name](), torch.randn(2, 4), torch.tensor(1.0)
    torch.manual_seed(1)
    expected = net(x).sum()
    f = lambda s: (s * net(x)).sum()  # noqa: E731
    for transform in (grad, lambda f: lambda s: jvp(f, (s,), (s,))[1], jacrev):
        torch.manual_seed(1)
        torch.testing.assert_close(transform(f)(scale), expected)
    values = vmap(f, randomness="different")(torch.ones(40))
    assert (len(values.unique()) > 1) == (name in ("sampled", "importance", "shared sample"))

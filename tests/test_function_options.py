"""Laws: values and proxes have derivatives in every number that a function is made of, against central differences."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from minimand import functions as mf
from minimand.errors import OptionError
from minimand.nn import SolverLinear
from minimand.operators import Dense
from minimand.solvers import FISTA, Problem, ProxGD, solve

#: Functions of one positive number; the last two differ in whether the root is found by secants.
MADE = {
    "l1": mf.L1,
    "ball": mf.Ball,
    "box from": lambda p: mf.Box(-p, 5.0),
    "box to": lambda p: mf.Box(-1.0, p),
    "charbonnier scale": lambda p: mf.Charbonnier(p, 0.4),
    "charbonnier exponent": lambda p: mf.Charbonnier(1.0, 0.5 * p),
    "elastic net": lambda p: mf.ElasticNet(p, 0.3),
    "elastic net curvature": lambda p: mf.ElasticNet(0.3, p),
    "group": mf.GroupL2,
    "groups": lambda p: mf.GroupL2(p, [0, 0, 1, 1, 2, 2]),
    "l1 ball": mf.L1Ball,
    "leaky": lambda p: mf.LeakyHinge(0.5 * p),
    "log barrier": mf.LogBarrier,
    "log box": mf.LogBox,
    "log unit": mf.LogUnit,
    "max norm": mf.MaxNorm,
    "maximum": mf.Maximum,
    "nuclear norm": lambda p: mf.NuclearNorm(p.expand(5)),
    "simplex": mf.Simplex,
    "spectral ball": mf.SpectralBall,
    "squared hinge": mf.SquaredHinge,
    "squared hinge shift": lambda p: mf.SquaredHinge(1.0, p),
    "total variation": mf.TotalVariation,
    "total variation of images": mf.TotalVariation2d,
    "activation": lambda p: mf.Monotone(lambda z: torch.tanh(p * z)),
    "activation with its derivative": lambda p: mf.Monotone(
        lambda z: torch.tanh(p * z), lambda z: p / torch.cosh(p * z) ** 2
    ),
}
QUANTITIES = {
    "prox": lambda g, x, at: g.prox(x).square().sum(),
    "prox at a step": lambda g, x, at: g.prox(x, 0.3).square().sum(),
    "preactivation": lambda g, x, at: g.preactivation(x, 0.3).square().sum(),
    "value": lambda g, x, at: g.value(at),
}


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")
@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("name", MADE)
def test_derivatives_in_options(name, quantity):
    if (name, quantity) == ("simplex", "value"):
        return  # zero on a set that moves
    make, measure, p = MADE[name], QUANTITIES[quantity], torch.tensor(0.7, dtype=torch.float64)
    x = 2 * torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    at = 0.9 * make(p).prox(x, 0.3)
    f = lambda p: measure(make(p), x, at)  # noqa: E731
    leaf, width = p.clone().requires_grad_(), 1e-6
    value = f(leaf)
    found = torch.autograd.grad(value, leaf)[0] if value.requires_grad else torch.zeros_like(p)
    expected = (f(p + width) - f(p - width)) / (2 * width)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


class Squash(nn.Module):
    """An activation with a learned slope."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.8, dtype=torch.float64))

    def forward(self, z: Tensor) -> Tensor:
        return torch.tanh(self.slope * z)


@pytest.mark.parametrize("learned", ["prelu", "own"])
def test_a_layer_trains_its_activation(learned):
    """The parameters of an activation are the layer's, and so are their gradients. Steps of a layer are rarely one,
    and there the prox of an activation of one's own is a root."""
    torch.manual_seed(0)
    activation = mf.Monotone(Squash()) if learned == "own" else nn.PReLU(init=0.4)
    layer = SolverLinear(4, 3, activation=activation, solver=ProxGD(8), dtype=torch.float64).double()
    (name,) = (name for name in layer.state_dict() if name.startswith("activation_"))
    y, slope = torch.randn(5, 4, dtype=torch.float64), dict(layer.named_parameters())[name]
    (found,) = torch.autograd.grad(layer(y).square().sum(), slope)
    ends = []
    for sign in (1, -1):
        moved = {name: slope.detach() + sign * 1e-6}
        ends.append(torch.func.functional_call(layer, moved, y).square().sum())
    torch.testing.assert_close(found.sum(), (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-8)
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        dict(copied.named_parameters())[name].fill_(0.1)
    assert not torch.allclose(copied(y), layer(y))


OWNED = {
    "l1": mf.L1,
    "box": lambda p: mf.Box(torch.full((3,), -0.3, dtype=torch.float64), p),
    "group": lambda p: mf.GroupL2(p, torch.tensor([0, 0, 1])),
    "charbonnier": lambda p: mf.Charbonnier(p, 0.4),
    "total variation": mf.TotalVariation,
}


@pytest.mark.parametrize("name", OWNED)
def test_a_layer_owns_the_tensors_of_its_activation(name):
    """Parameters are trained and saved, and all tensors follow ``to``; a replaced Parameter is the one that is used."""
    torch.manual_seed(0)
    make, p = OWNED[name], torch.tensor(0.3, dtype=torch.float64)
    layer = SolverLinear(4, 3, activation=make(nn.Parameter(p)), solver=ProxGD(8), dtype=torch.float64)
    (key,) = (key for key in layer.state_dict() if key.startswith("activation_"))
    y = torch.randn(5, 4, dtype=torch.float64)
    (found,) = torch.autograd.grad(layer(y).square().sum(), dict(layer.named_parameters())[key])
    ends = [torch.func.functional_call(layer, {key: p + h}, y).square().sum() for h in (1e-6, -1e-6)]
    torch.testing.assert_close(found, (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-7)
    state = layer.state_dict() | {key: 0.5 * p}
    expected = torch.func.functional_call(layer, {key: 0.5 * p}, y)
    layer.load_state_dict(state, assign=True)
    torch.testing.assert_close(layer(y), expected)
    assert all(each.device.type == "meta" for each in vars(layer.to("meta").function).values() if torch.is_tensor(each))


def test_a_layer_refuses_what_its_activation_has_become():
    """An optimizer may bring a weight below zero, where no convex function has it."""
    layer = SolverLinear(4, 3, activation=mf.L1(nn.Parameter(torch.tensor(0.1))))
    with torch.no_grad():
        layer.activation_weight.fill_(-0.1)
    with pytest.raises(OptionError, match="weight must be a finite number ≥ 0"):
        layer(torch.ones(2, 4))


def test_gaps_of_tiny_weights():
    """A cone has no finite conjugate near the origin, and a norm of any weight has."""
    torch.manual_seed(0)
    problem = Problem(Dense(1e-4 * torch.randn(6, 4).double()), mf.L1(1e-9), 1e-4 * torch.randn(3, 4).double())
    gap = solve(problem, FISTA(300)).gap
    assert gap is not None
    assert bool((gap < 1e-9).all())


@pytest.mark.parametrize("weight", [[1.0, 2.0], np.ones(2)], ids=["list", "array"])
def test_weights_are_numbers_or_tensors(weight):
    with pytest.raises(OptionError, match=r"weight must be a number or a tensor, .* pass torch.as_tensor\(weight\)"):
        mf.L1(weight)
    with pytest.raises(OptionError, match=r"weight must be a number, got 'auto'$"):
        mf.L1("auto")

"""Laws of PReLU: it is solved with its present slopes while they lie in [0, 1], and they are trained."""

import copy

import pytest
import torch
from torch import nn

from minimand.adjoints import Checkpoint, Implicit, Unroll
from minimand.errors import ConversionError, NotProximal
from minimand.nn import Rule, SolverLinear, SolverOptions, convert, plan, revert
from minimand.solvers import RCD, ProxGD, ProxSG

from .cases.conversion import ONE, solver_layers


def images(slopes=4):
    torch.manual_seed(0)
    act = nn.PReLU(slopes)
    act.weight.data.uniform_(0.1, 0.9)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), act, nn.Flatten(), nn.Linear(64, 3)).double()


def vectors(slopes=1):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.PReLU(slopes), nn.Linear(5, 3)).double()


X = torch.randn(3, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
NETS = {"vectors": (vectors, Y), "vector slopes": (lambda: vectors(5), Y), "images": (images, X)}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_unit_step_is_the_plain_network_with_its_gradients(name, inplace):
    make, x = NETS[name]
    model, control = make().eval(), make().eval()
    converted = convert(model, {"*": ONE}, inplace=inplace)
    assert len(solver_layers(converted)) == 2
    for net in (converted, control):
        net(x).square().sum().backward()
    assert torch.equal(converted(x), control(x))
    for mine, theirs in zip(model.parameters(), control.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert converted.state_dict().keys() == control.state_dict().keys()
    assert torch.equal(revert(converted)(x), control(x))


@pytest.mark.parametrize("slope", [0.0, 0.25, 1.0])
def test_one_slope_is_a_leaky_relu(slope):
    model = vectors()
    model[1].weight.data.fill_(slope)
    fixed = copy.deepcopy(model)
    fixed[1] = nn.LeakyReLU(slope)
    solver = SolverOptions(ProxGD(iters=7), ridge=0.1)
    torch.testing.assert_close(convert(model, solver)(Y), convert(fixed, solver)(Y))


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("adjoint", [Unroll(), Checkpoint(), Implicit()], ids=str)
def test_gradients_of_the_slopes_are_those_of_finite_differences(name, adjoint):
    make, x = NETS[name]
    iterations = 4000 if isinstance(adjoint, Implicit) else 4
    model = make().eval()[:3]
    converted = convert(model, {"0": SolverOptions(ProxGD(iters=iterations), adjoint, ridge=1.0)}, example=x)
    act = next(module for module in converted if isinstance(module, nn.PReLU))
    converted(x).square().sum().backward()
    for i in range(len(act.weight)):
        values = []
        for change in (1e-6, -1e-6):
            with torch.no_grad():
                act.weight[i] += change
                values.append(converted(x).square().sum())
                act.weight[i] -= change
        torch.testing.assert_close(act.weight.grad[i], (values[0] - values[1]) / 2e-6, rtol=1e-4, atol=1e-6)


def test_slopes_that_leave_the_interval_are_refused_in_words():
    model = vectors()
    model[1].weight.data.fill_(1.25)
    steps = plan(model, {"0": ProxGD()})
    assert "PReLU with slope 1.25 is steeper than 1 below zero" in steps.refused["0"]
    assert "clamp_(0, 1)" in steps.refused["0"]
    with pytest.raises(ConversionError, match=r"0: PReLU with slope 1\.25"):
        convert(model, {"*": ProxGD()})
    assert set(solver_layers(convert(model, {"*": Rule(ProxGD(), activation=None)}))) == {"0", "2"}
    model[1].weight.data.fill_(0.5)
    converted = convert(model, {"*": ProxGD()})
    converted(Y)
    model[1].weight.data.fill_(-0.125)
    with pytest.raises(NotProximal, match=r"^0: PReLU with slope -0\.125 decreases below zero.*clamp_"):
        converted(Y)
    model[1].weight.data.clamp_(0, 1)
    assert converted(Y).isfinite().all()


def test_the_slopes_are_those_of_the_network_that_is_run():
    converted = convert(vectors(5), {"0": SolverOptions(ProxSG(iters=3), eval_mode="mean")}).eval()
    copied = copy.deepcopy(converted)
    copied[1].weight.data.fill_(0.9)
    assert copied[0].function.source is copied[1]
    assert converted[0].function.source is converted[1]
    moved = {"1.weight": torch.full((5,), 0.9, dtype=torch.float64)}
    torch.manual_seed(0)
    expected = copied(Y)
    torch.manual_seed(0)
    torch.testing.assert_close(torch.func.functional_call(converted, moved, (Y,)), expected)
    compiled = torch.compile(convert(vectors(5), {"0": ProxGD(iters=3)}), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(Y), convert(vectors(5), {"0": ProxGD(iters=3)})(Y))


def test_two_modules_are_two_activations_and_slopes_per_channel_are_no_single_function():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.a, self.b = nn.Linear(4, 4), nn.PReLU(), nn.PReLU()

        def forward(self, x):
            return self.b(self.fc(self.a(self.fc(x))))

    with pytest.raises(ConversionError, match=r"fc: it is called 2 times with different activations"):
        convert(Twice(), {"fc": ProxGD()})
    with pytest.raises(ConversionError, match="0: RCD"):
        convert(vectors(5), {"0": RCD()})
    convert(vectors(), {"0": RCD()})(Y)
    assert SolverLinear(6, 5, activation=nn.PReLU()).function.separable

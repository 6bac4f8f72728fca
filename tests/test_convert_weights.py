"""Laws of layers whose weight is computed: by a parametrisation, or by a hook before each call."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from minimand.nn import SolverLayer, SolverOptions, convert, explain, plan, revert
from minimand.solvers import ProxGD, ProxSG

from .cases.conversion import ONE, solver_layers


def _quietly(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


class _Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def _own(layer):
    return nn.utils.parametrize.register_parametrization(layer, "weight", _Doubled())


WEIGHTS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "own": _own,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    "old weight_norm": lambda layer: _quietly(lambda: nn.utils.weight_norm(layer)),
    "old spectral_norm": nn.utils.spectral_norm,
}
every_weight = pytest.mark.parametrize("weight", WEIGHTS)


class Block(nn.Module):
    """A convolution, a residual block with batch normalisation, and a linear layer, all with computed weights."""

    def __init__(self, computed):
        super().__init__()
        self.conv = computed(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"))
        self.second, self.norm = computed(nn.Conv2d(4, 4, 3, padding=1, bias=False)), nn.BatchNorm2d(4)
        self.drop, self.fc = nn.Dropout(0.25), computed(nn.Linear(4, 3))

    def forward(self, x):
        x = torch.tanh(self.conv(x))
        x = torch.relu(self.norm(self.second(x)) + x)
        return F.relu(self.fc(self.drop(x.mean((2, 3)))))


X = torch.randn(3, 2, 5, 5, generator=torch.Generator().manual_seed(0))


def built(weight):
    """The same network at every call."""
    torch.manual_seed(3)
    return Block(WEIGHTS[weight]).eval()


@every_weight
@pytest.mark.parametrize("training", [False, True])
def test_one_unit_step_is_the_plain_network_and_gradients_reach_the_original_parameters(weight, training):
    model, control = built(weight).train(training), built(weight).train(training)
    model.drop.p = control.drop.p = 0.0
    before = copy.deepcopy(model.state_dict())
    converted = convert(model, {"*": ONE}, example=X)
    assert set(solver_layers(converted)) == {"conv", "second", "fc"}
    assert converted.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in converted.state_dict().items())
    assert {id(p) for p in converted.parameters()} == {id(p) for p in model.parameters()}
    # In training the residual block reads its weight twice, and a spectral normalisation refines itself each time.
    close = {"rtol": 1e-2, "atol": 1e-2} if training and "spectral" in weight else {"rtol": 1e-5, "atol": 1e-6}
    for net in (converted, control):
        net(X).square().sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), control.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, **close, msg=lambda m, name=name: f"{name}: {m}")
    for net in (converted, control):
        torch.optim.SGD(net.parameters(), 0.3).step()
    torch.testing.assert_close(converted.eval()(X), control.eval()(X), **close)


@every_weight
def test_a_plan_changes_no_state_and_revert_restores_the_layers(weight):
    model = built(weight).train()
    before, kinds = copy.deepcopy(model.state_dict()), {path: type(m) for path, m in model.named_modules()}
    lines = str(plan(model, {"*": ProxSG(iters=2)}, example=X))
    assert "Linear 4→3" in lines
    assert "Parametrized" not in lines
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    converted = convert(model, {"*": ProxSG(iters=2)}, example=X)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    converted(X).sum().backward()
    torch.optim.SGD(converted.parameters(), 0.1).step()
    converted.eval()(X)
    back = revert(converted)
    assert {path: type(m) for path, m in back.named_modules()} == kinds
    control = built(weight)
    control.load_state_dict(back.state_dict())
    with torch.no_grad():
        control(X)  # old hooks compute the weight when the layer is called
        assert torch.equal(back.eval()(X), control.eval()(X))


@every_weight
def test_bounds_follow_the_computed_weight(weight):
    model = built(weight)
    converted = convert(model, {"fc": SolverOptions(ProxGD(iters=3)), "conv": ProxGD(iters=3)}, example=X)
    for scale in (1.0, 3.0, 0.2):
        with torch.no_grad():
            for parameter in converted.fc.parameters():
                parameter.mul_(scale)
            converted(X)
            dense = converted.fc.weight.detach().double()
            bound = float(converted.fc.problem(torch.randn(2, 4)).operator.norm_sq())
        assert torch.linalg.matrix_norm(dense, 2) ** 2 <= bound <= 1.01 * torch.linalg.matrix_norm(dense, 2) ** 2


@pytest.mark.parametrize("weight", ["weight_norm", "spectral_norm", "orthogonal", "own"])
def test_converted_layers_are_solver_layers_that_torch_knows_as_parametrised(weight):
    converted = convert(built(weight), {"*": ProxGD(iters=2)}, example=X)
    for layer in solver_layers(converted).values():
        assert isinstance(layer, SolverLayer)
        assert nn.utils.parametrize.is_parametrized(layer, "weight")
        assert type(layer).__name__.startswith("Solver")
    copied = copy.deepcopy(converted)
    assert torch.equal(copied(X), converted(X))
    assert {id(p) for p in copied.parameters()}.isdisjoint({id(p) for p in converted.parameters()})
    report = explain(converted, X)
    assert [r.path for r in report.layers] == ["conv", "second", "fc"]
    again = built(weight)
    again.load_state_dict(converted.state_dict())
    expected = {name: p.clone() for name, p in again.named_parameters()}
    moved = {name: p + 0.1 for name, p in converted.named_parameters()}
    torch.func.functional_call(converted, moved, (X,))
    assert all(torch.equal(p, expected[name]) for name, p in converted.named_parameters())


def test_a_converted_parametrised_network_compiles():
    converted = convert(built("weight_norm"), {"*": ProxGD(iters=2)}, example=X)
    compiled = torch.compile(converted, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X), converted(X))

"""Laws: a conversion keeps the function at one unit step, trains the same parameters, and can be undone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minimand.errors import ConversionError
from minimand.functions import NonNegative, Zero
from minimand.nn import Rule, SolverConv2d, SolverLinear, SolverOptions, convert, revert
from minimand.solvers import SVRG, ProxGD, ProxSG
from minimand.solvers.sampling import Nice, Request

from .cases.conversion import ONE, evaluated, network, solver_layers
from .cases.networks import NETWORKS, VGG, ResNet


@pytest.fixture(params=NETWORKS)
def case(request):
    return network(request.param)


# Identity ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, False])
def test_one_unit_step_is_the_plain_network_to_the_bit(case, mode):
    model, x, rules = case
    model.train(mode)
    plain, converted = copy.deepcopy(model), convert(model, rules)
    assert solver_layers(converted)
    assert torch.equal(evaluated(plain, x), evaluated(converted, x))
    for key, value in plain.state_dict().items():
        assert torch.equal(value, converted.state_dict()[key]), key


def test_gradients_at_one_unit_step_are_those_of_the_plain_network(case):
    model, x, rules = case
    model.double()
    x, plain = x.double(), copy.deepcopy(model)
    converted = convert(model, rules)
    evaluated(plain, x).square().sum().backward()
    evaluated(converted, x).square().sum().backward()
    for one, other in zip(plain.parameters(), converted.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-11)


def test_one_sampled_step_is_dropout_linear_activation():
    model = nn.Sequential(nn.Dropout(0.25), nn.Linear(16, 7), nn.ReLU())
    y = torch.randn(5, 16)
    converted = convert(model, {"1": SolverOptions(ProxSG(iters=1, step=1.0), ridge=0.0)})
    assert converted[1].solver.tau == 0.75
    converted[1].generator = torch.Generator().manual_seed(3)
    mask = Nice().draw(Request(12, 16, 5, y, torch.Generator().manual_seed(3))).weight
    assert torch.equal(converted(y), torch.relu(model[1](y * mask)))


def test_batch_normalisation_is_folded_to_rounding_at_many_iterations():
    """The folded problem equals that of a layer whose weight is scaled explicitly."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()).double()
    with torch.no_grad():
        model[1].weight.uniform_(0.5, 2)
        model[1].bias.normal_()
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2)
    y = torch.randn(2, 3, 6, 6).double()
    solver = SolverOptions(ProxGD(iters=20, step=0.05), start="zero")
    converted = convert(model, {"0": solver}).eval()
    fused = nn.utils.fusion.fuse_conv_bn_eval(model[0].eval(), model[1].eval())
    expected = SolverConv2d.from_plain(fused, "relu", solver)
    torch.testing.assert_close(converted(y), expected(y), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["Conv2d", "Conv1d", "Linear"])
def test_the_folded_problem_is_that_of_the_block(name, bias, mode):
    layer, norm, y = {
        "Conv2d": (nn.Conv2d(3, 4, 3, bias=bias), nn.BatchNorm2d(4), torch.randn(3, 3, 5, 5)),
        "Conv1d": (nn.Conv1d(3, 4, 3, bias=bias), nn.BatchNorm1d(4), torch.randn(3, 3, 5)),
        "Linear": (nn.Linear(3, 4, bias=bias), nn.BatchNorm1d(4), torch.randn(5, 3)),
    }[name]
    model, y = nn.Sequential(layer, norm, nn.ReLU()).double(), y.double()
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean):
            tensor.normal_()
        norm.running_var.uniform_(0.5, 2)
    converted = convert(copy.deepcopy(model), {"0": ProxGD(iters=2)}).train(mode)
    problem = converted[0].problem(y)
    expected = model[:2].train(mode)(y)
    torch.testing.assert_close(problem.linear(), expected, rtol=0, atol=0)
    torch.testing.assert_close(problem.operator.apply(y, problem.bias), expected)
    if name == "Linear":
        assert problem.operator.norm_sq() >= torch.linalg.matrix_norm(problem.operator.weight, 2).square()
    assert torch.equal(norm.running_mean, converted[1].running_mean)


def test_a_residual_block_is_one_solve_with_the_skip_in_its_bias():
    model = ResNet()
    converted = convert(model, {"layer1.*.conv*": ProxGD(iters=3)})
    block, y = converted.layer1[0], torch.randn(2, 4, 8, 8)
    layers = solver_layers(converted)
    assert set(layers) == {f"layer1.{i}.conv{j}" for i in (0, 1) for j in (1, 2)}
    assert all(layer.function == NonNegative() for layer in layers.values())
    hidden = torch.relu(block.conv1(y))
    assert torch.equal(block(y), torch.relu(block.conv2(hidden, y)))


class _Sum(nn.Module):
    def __init__(self, spoil=False):
        super().__init__()
        self.a, self.b, self.spoil = nn.Linear(6, 6), nn.Linear(6, 6), spoil

    def forward(self, x):
        x = x + 1
        h = self.a(x)
        skip = x.mul_(2) if self.spoil else self.b(x)
        return torch.tanh(skip + h)


def test_of_two_layers_that_are_added_the_first_takes_the_sum_in():
    model, x = _Sum(), torch.randn(3, 6)
    converted = convert(model, {"*": ONE})
    assert converted.a.function == Zero()
    assert "tanh" in str(converted.b.function)
    assert torch.equal(converted(x), model(x))
    assert "tanh" in str(convert(model, {"a": ONE}).a.function)


def test_a_layer_does_not_wait_for_a_skip_that_changes_its_input():
    model, x = _Sum(spoil=True), torch.randn(3, 6)
    converted = convert(model, {"a": ONE})
    assert torch.equal(converted(x), model(x))
    assert converted.a.function == Zero()


# Training ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "solver", [ProxGD(iters=4), ProxSG(iters=3), SVRG(inner=3)], ids=lambda solver: type(solver).__name__
)
@pytest.mark.parametrize("name", ["functional", "vgg", "resnet", "shared"])
def test_an_optimizer_of_before_trains_the_converted_network(name, solver):
    make, shape = NETWORKS[name]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    before = [p.detach().clone() for p in model.parameters()]
    converted = convert(model, {"*": solver})
    assert [id(p) for p in converted.parameters()] == [id(p) for p in model.parameters()]
    x, target = torch.randn(16, *shape[1:]), torch.arange(16) % 5
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = F.cross_entropy(converted(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < sum(losses[:10])
    assert any(not torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


# The way back --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", [ProxGD(iters=3), ProxSG(iters=3)], ids=lambda solver: type(solver).__name__)
@pytest.mark.parametrize("inplace", [True, False])
def test_reverting_restores_the_network_to_the_bit(case, solver, inplace):
    model, x, rules = case
    original = copy.deepcopy(model)
    rules = {
        pattern: Rule(solver, rule.activation, rule.dropout) if isinstance(rule, Rule) else solver
        for pattern, rule in rules.items()
    }
    converted = convert(model, rules, inplace=inplace)
    reverted = revert(converted, inplace=inplace)
    assert (reverted is converted) == inplace
    assert str(reverted) == str(original)
    assert [type(m) for m in reverted.modules()] == [type(m) for m in original.modules()]
    for mode in (True, False):
        assert torch.equal(evaluated(reverted.train(mode), x), evaluated(original.train(mode), x))
    assert all("forward" not in vars(module) for module in reverted.modules())


def test_state_dicts_load_strictly_both_ways(case):
    model, _, rules = case
    converted = convert(copy.deepcopy(model), rules)
    assert list(converted.state_dict()) == list(model.state_dict())
    assert [name for name, _ in converted.named_parameters()] == [name for name, _ in model.named_parameters()]
    converted.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(converted.state_dict(), strict=True)


def test_reverting_uses_the_parameters_of_now():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    converted = convert(model, {"0": ProxGD()})
    fresh = {key: torch.ones_like(value) for key, value in model.state_dict().items()}
    converted.load_state_dict(fresh, assign=True)
    converted.double()
    reverted = revert(converted)
    assert torch.equal(reverted[0].weight, torch.ones(3, 3, dtype=torch.float64))


def test_reverting_what_was_never_converted_is_an_error():
    with pytest.raises(ConversionError, match="nothing to revert"):
        revert(VGG())


def test_a_part_of_a_converted_network_reverts_alone():
    converted = convert(VGG(), {"*": ProxGD(iters=2)})
    part = revert(converted.classifier)
    assert type(part[0]) is nn.Linear
    assert isinstance(converted.classifier[0], SolverLinear)

"""Laws: a conversion keeps the function at one unit step, the parameters, and everything else about a model."""

import copy
import dataclasses
import io
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import minimand
from minimand.errors import ConversionError
from minimand.functions import NonNegative, Zero
from minimand.nn import Rule, SolverConv2d, SolverLayer, SolverLinear, SolverOptions, convert, revert
from minimand.nn.conversion.change import Absorbed
from minimand.solvers import SVRG, ProxGD, ProxSG
from minimand.solvers.sampling import Nice, Request

from .cases.networks import NETWORKS, VGG, Attention, Branching, Functional, ResNet, Shared

ONE = SolverOptions(ProxGD(iters=1, step=1.0), ridge=0.0)
RULES = {name: {"*": ONE} for name in NETWORKS} | {
    "branching": {"body.*": ONE, "fc": Rule(ONE, activation="act", dropout=None)}
}


@pytest.fixture(params=NETWORKS)
def case(request):
    make, shape = NETWORKS[request.param]
    return make(), torch.randn(shape), RULES[request.param]


def _output(model, x, seed=1):
    torch.manual_seed(seed)
    return model(x)


def _layers(model):
    return {path: module for path, module in model.named_modules() if isinstance(module, SolverLayer)}


# Identity ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, False])
def test_one_unit_step_is_the_plain_network_to_the_bit(case, mode):
    model, x, rules = case
    model.train(mode)
    plain, converted = copy.deepcopy(model), convert(model, rules)
    assert _layers(converted)
    assert torch.equal(_output(plain, x), _output(converted, x))
    for key, value in plain.state_dict().items():
        assert torch.equal(value, converted.state_dict()[key]), key


def test_gradients_at_one_unit_step_are_those_of_the_plain_network(case):
    model, x, rules = case
    model.double()
    x, plain = x.double(), copy.deepcopy(model)
    converted = convert(model, rules)
    _output(plain, x).square().sum().backward()
    _output(converted, x).square().sum().backward()
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
    """The folded problem is that of a layer whose weight was scaled by hand."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()).double()
    with torch.no_grad():
        model[1].weight.uniform_(0.5, 2)
        model[1].bias.normal_()
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2)
    y = torch.randn(2, 3, 6, 6).double()
    solver = SolverOptions(ProxGD(iters=20, step=0.05))
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
    layers = _layers(converted)
    assert set(layers) == {f"layer1.{i}.conv{j}" for i in (0, 1) for j in (1, 2)}
    assert all(layer.function == NonNegative() for layer in layers.values())
    hidden = block.conv1(y)
    assert torch.equal(block(y), block.conv2(hidden, y))


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
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(converted(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < sum(losses[:5])
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
        assert torch.equal(_output(reverted.train(mode), x), _output(original.train(mode), x))
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


# What is taken in ----------------------------------------------------------------------------------------------------


class _Call(nn.Module):
    """A linear layer with a function before and after it."""

    def __init__(self, before, after):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.before, self.after = before, after

    def forward(self, x):
        return self.after(self.fc(self.before(x)))


ACTIVATIONS = {
    "F.relu": F.relu,
    "torch.relu": torch.relu,
    "method": lambda z: z.relu(),
    "in place": lambda z: z.relu_(),
    "F.relu_": F.relu_,
    "inplace=True": lambda z: F.relu(z, inplace=True),
    "unread in place": lambda z: (F.relu_(z), z)[1],
    "leaky": lambda z: F.leaky_relu(z, 0.2),
    "leaky by name": lambda z: F.leaky_relu(z, negative_slope=0.2, inplace=True),
    "tanh": lambda z: z.tanh(),
    "torch.tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": lambda z: F.softplus(z, 2.0),
    "elu": lambda z: F.elu(z, alpha=0.5),
    "hardtanh": lambda z: F.hardtanh(z, -0.5, 0.5),
    "clamp": lambda z: z.clamp(min=0),
    "clamp both": lambda z: torch.clamp(z, -0.2, 0.3),
    "module": nn.Softsign(),
    "identity then relu": nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_spelling_of_an_activation_is_taken_in(name):
    model = _Call(lambda x: x, ACTIVATIONS[name]).double()
    converted = convert(model, {"fc": ONE})
    assert converted.fc.function != Zero()
    x = torch.randn(4, 6).double()
    assert torch.equal(converted(x), model(x))
    # The layer alone does it now.
    assert torch.equal(converted.fc(x), model(x))


@pytest.mark.parametrize(
    ("before", "tau"),
    [
        (lambda x: F.dropout(x, 0.25), 0.75),
        (lambda x: F.dropout(x, p=0.25, inplace=True), 0.75),
        (lambda x: torch.dropout(x, 0.25, True), 0.75),
        (lambda x: F.dropout(x, 0.25).reshape(-1, 6), 0.75),
        (lambda x: F.dropout(x, 0.25).view(x.shape[0], 6), 0.75),
        (lambda x: F.dropout(x, 0.25, training=False), 1.0),
        (nn.Dropout(0.25), 0.75),
        (nn.Dropout(0.0), 1.0),
        (nn.Sequential(nn.Dropout(0.25), nn.Flatten(), nn.Identity()), 0.75),
        (nn.Dropout1d(0.25), None),
        (lambda x: F.dropout(x, 0.25).exp(), None),
        (lambda x: x, None),
    ],
)
def test_a_sampling_solver_keeps_what_the_dropout_kept(before, tau):
    converted = convert(_Call(before, F.relu), {"fc": ProxSG(iters=2)})
    assert converted.fc.solver.tau == tau
    assert converted(torch.rand(3, 6)).shape == (3, 6)


@pytest.mark.parametrize(
    ("layer", "norm", "shape"),
    [(nn.Linear, nn.BatchNorm1d, (64, 32)), (lambda i, o: nn.Conv2d(i, o, 3), nn.BatchNorm2d, (16, 32, 5, 5))],
    ids=["Linear", "Conv2d"],
)
def test_dropout_before_a_batch_normalised_layer_stays(layer, norm, shape):
    """The batch statistics are those of the dropped inputs, as in the plain block."""
    plain = nn.Sequential(nn.Dropout(0.5), layer(32, 8), norm(8), nn.ReLU())
    y = torch.randn(shape)
    sampled = SolverOptions(ProxSG(iters=1, step=1.0, sampling="bernoulli"), ridge=0.0)
    for options in (sampled, dataclasses.replace(sampled, solver=ProxSG(iters=1, step=1.0, tau=1.0))):
        model = copy.deepcopy(plain)
        converted = convert(copy.deepcopy(plain), {"1": options})
        assert type(converted[0]) is nn.Dropout
        assert converted[1].solver == options.solver
        expected, output = _output(model, y), _output(converted, y)
        assert torch.equal(converted[2].running_mean, model[2].running_mean)
        assert torch.equal(converted[2].running_var, model[2].running_var)
    # Nothing is left out of the last solver's samples: the block itself.
    torch.testing.assert_close(output, expected)
    # Without the normalisation inside, the layer takes the dropout in.
    outside = convert(plain, {"1": Rule(ProxSG(), activation=None)})
    assert isinstance(outside[0], Absorbed)
    assert outside[1].solver.tau == 0.5


def test_a_given_sample_size_wins_and_the_dropout_still_goes():
    converted = convert(VGG(), {"classifier.3": ProxSG(tau=5)})
    assert converted.classifier[3].solver.tau == 5
    assert isinstance(converted.classifier[2], Absorbed)


def test_dropout_before_a_deterministic_solver_stays():
    converted = convert(VGG(), {"classifier.*": ProxGD()})
    assert type(converted.classifier[2]) is nn.Dropout
    assert type(converted.classifier[5]) is nn.Dropout


def test_channel_dropout_before_a_convolution_is_taken_in_and_others_stay():
    for dropout, taken in [(nn.Dropout2d(0.25), True), (nn.Dropout(0.25), True), (nn.Dropout1d(0.25), False)]:
        converted = convert(nn.Sequential(dropout, nn.Conv2d(4, 4, 3), nn.ReLU()), {"1": ProxSG()})
        assert isinstance(converted[0], Absorbed) == taken
        assert converted[1].solver.tau == (0.75 if taken else None)
    flattened = nn.Sequential(nn.Dropout2d(0.25), nn.Flatten(), nn.Linear(4, 4))
    assert type(convert(flattened, {"2": ProxSG()})[0]) is nn.Dropout2d


class _Fork(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.query, self.key = nn.Dropout(0.25), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        x = self.drop(x)
        return self.query(x) * self.key(x)


def test_dropout_that_feeds_two_layers_goes_when_both_take_it_in():
    assert isinstance(convert(_Fork(), {"*": ProxSG()}).drop, Absorbed)
    half = convert(_Fork(), {"query": ProxSG()})
    assert type(half.drop) is nn.Dropout
    assert half.query.solver.tau is None
    normed = _Fork()
    normed.key = nn.Sequential(normed.key, nn.BatchNorm1d(6))
    both = convert(normed, {"*": ProxSG()})
    assert type(both.drop) is nn.Dropout
    assert both.query.solver.tau is None


def test_softmax_is_not_an_activation_of_the_layer():
    converted = convert(Functional(), {"fc3": ONE})
    assert converted.fc3.function == Zero()
    assert torch.allclose(converted(torch.randn(2, 1, 8, 8)).exp().sum(1), torch.ones(2))


def test_the_last_of_several_patterns_decides():
    converted = convert(VGG(), {"*": ProxGD(iters=3), "classifier.*": ProxSG(iters=5)})
    assert converted.features[0].solver == ProxGD(iters=3)
    assert converted.classifier[3].solver == ProxSG(iters=5, tau=1 - 0.4)
    assert convert(VGG(), {"classifier.*": ProxSG(), "*": ProxGD(iters=3)}).classifier[3].solver == ProxGD(iters=3)


# Forwards that are rewritten ------------------------------------------------------------------------------------------


def test_a_shared_module_disappears_only_where_it_is_taken_in():
    model = Shared()
    converted = convert(model, {"fc1": ProxSG(iters=2), "fc2": ONE})
    assert type(converted.act) is nn.Tanh
    assert type(converted.drop) is nn.Dropout
    assert converted.fc1.solver.tau == 0.7
    code = converted.forward.sources[1].text
    assert code.count("self.act(") == 1
    assert code.count("self.drop(") == 2


def test_functional_dropout_keeps_following_the_mode():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x):
            x = F.dropout(x, 0.5, training=self.training)  # stays: the solver is deterministic
            return F.dropout(F.relu(self.fc(x)), 0.5)  # always on

    model, x = Net(), torch.rand(4, 64)
    converted = convert(model, {"fc": ONE})
    for mode in (True, False, True):
        model.train(mode)
        converted.train(mode)
        assert torch.equal(_output(model, x), _output(converted, x))


def test_branches_on_the_mode_survive():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.head, self.aux = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x):
            if self.training:
                x = F.dropout(x, 0.25)
            x = F.relu(self.fc(x))
            return (self.head(x), self.aux(x)) if self.training else self.head(x)

    model, x = Net(), torch.randn(3, 6)
    converted = convert(model, {"*": ONE})
    assert torch.equal(_output(model.eval(), x), _output(converted.eval(), x))
    for one, other in zip(_output(model.train(), x), _output(converted.train(), x), strict=True):
        assert torch.equal(one, other)
    assert convert(model, {"fc": ProxSG()}).fc.solver.tau == 0.75


def test_a_layer_that_is_called_twice_needs_the_same_neighbours():
    class Twice(nn.Module):
        def __init__(self, second):
            super().__init__()
            self.fc, self.second = nn.Linear(6, 6), second

        def forward(self, x):
            return self.second(self.fc(F.relu(self.fc(x))))

    model, x = Twice(torch.relu), torch.randn(3, 6)
    converted = convert(model, {"fc": ONE})
    assert torch.equal(converted(x), model(x))
    with pytest.raises(ConversionError, match=r"fc: it is called 2 times with different activations.*ReLU and Tanh"):
        convert(Twice(torch.tanh), {"fc": ONE})


def test_a_block_that_runs_twice_is_rewritten_once():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x):
            return torch.tanh(self.fc(x))

    block = Block()
    model, x = nn.Sequential(block, block, nn.Linear(6, 2)), torch.randn(3, 6)
    converted = convert(model, {"*": ONE})
    assert torch.equal(converted(x), model(x))
    assert converted[0] is converted[1]


def test_a_shared_forward_must_lose_the_same_in_every_run():
    class Squash(nn.Module):
        def forward(self, x):
            return torch.tanh(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.squash = nn.Linear(6, 6), Squash()

        def forward(self, x):
            return self.squash(1 + self.squash(self.fc(x)))

    with pytest.raises(ConversionError, match=r"squash: its forward has to go on .* runs 2 times per pass"):
        convert(Net(), {"fc": ONE})


def test_activations_of_another_forward_are_found():
    """The layer ends a Sequential, its activation is in the parent's forward."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))

        def forward(self, x, scale=1.0):
            return scale * F.softplus(self.body(x))

    model, x = Net(), torch.randn(3, 6)
    converted = convert(model, {"body.2": ONE})
    assert torch.equal(converted(x), model(x))
    assert torch.equal(converted(x, scale=3.0), model(x, 3.0))
    assert "softplus" in str(converted.body[2].function).lower()


def test_code_that_asks_for_a_tensor_is_traced_as_it_runs():
    class Layer(nn.Module):
        """As in DenseNet."""

        def __init__(self, inputs):
            super().__init__()
            self.fc = nn.Linear(inputs, 4)

        def forward(self, features):
            if isinstance(features, torch.Tensor):
                features = [features]
            return torch.tanh(self.fc(torch.cat(features, 1)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Layer(4), Layer(8)
            self.register_buffer("mask", torch.ones(9, 4))

        def forward(self, x):
            return self.second([x, self.first(x)]) * self.mask[: x.shape[0]]

    model, x = Net(), torch.randn(3, 4)
    converted = convert(model, {"*": ONE})
    assert torch.equal(converted(x), model(x))
    assert all("tanh" in str(layer.function) for layer in _layers(converted).values())


def _owner(forward):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.p, self.count = nn.Linear(6, 6), 0.5, 0

    Net.forward = forward
    return Net()


def _counts(self, x):
    self.count = self.count + 1
    return F.relu(self.fc(x))


def _keeps(self, x):
    self.last = x
    return F.relu(self.fc(x))


def _noisy(self, x):
    return F.relu(self.fc(x)) + torch.randn(6)


def _without_gradients(self, x):
    with torch.no_grad():
        return F.relu(self.fc(x))


def _made(self, x):
    return F.relu(self.fc(x)) + torch.ones(6)


def _asks_a_child(self, x):
    return F.dropout(F.relu(self.fc(x)), 0.5, self.fc.training)


def _masked(self, x, mask=None):
    x = F.relu(self.fc(x))
    return x if mask is None else x * mask


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (_counts, "sets its attribute 'count'"),
        (_keeps, "sets its attribute 'last'"),
        (_noisy, "draws random numbers"),
        (_without_gradients, "computes inside a with statement"),
        (_made, "makes a tensor"),
        (_asks_a_child, "asks whether one of its submodules"),
        (_masked, "branches on its arguments .*mask"),
    ],
)
def test_a_forward_that_a_graph_would_not_repeat_is_refused(forward, reason):
    model = _owner(forward)
    with pytest.raises(ConversionError, match=f"Net: its forward has to go on .* but it {reason}"):
        convert(model, {"fc": ONE})
    # Nothing has to be rewritten when the activation stays.
    converted = convert(model, {"fc": Rule(ONE, activation=None)})
    x = torch.randn(2, 6)
    assert torch.equal(_output(model, x), _output(converted, x))
    assert model.count == (1 if forward is _counts else 0)


def test_an_attribute_that_became_a_constant_may_not_change():
    model = _owner(lambda self, x: F.dropout(F.relu(self.fc(x)), self.p, self.training))
    converted, x = convert(model, {"fc": ONE}), torch.randn(2, 6)
    assert torch.equal(_output(converted, x), _output(model, x))
    converted.p = 0.1
    with pytest.raises(ConversionError, match=r"Net\.p was 0\.5 .* revert the model"):
        converted(x)
    assert revert(converted)(x).shape == (2, 6)


def test_a_second_conversion_adds_to_the_first():
    model, x = Functional().eval(), torch.randn(2, 1, 8, 8)
    converted = convert(convert(model, {"fc1": ONE}), {"conv*": ONE}, inplace=True)
    assert set(_layers(converted)) == {"conv1", "conv2", "fc1"}
    assert torch.equal(converted(x), model(x))
    assert torch.equal(revert(converted)(x), model(x))


# Forwards that cannot be traced ---------------------------------------------------------------------------------------


def test_sequential_order_stands_in_for_a_trace():
    converted = convert(Branching(), {"body.*": ProxSG(iters=2)})
    assert isinstance(converted.body[0], Absorbed)
    assert converted.body[1].function == NonNegative()
    assert converted.body[3].function == Zero()
    assert converted(torch.randn(3, 8)).shape == (3, 5)


def test_neighbours_that_cannot_be_found_can_be_named():
    model = Branching()
    with pytest.raises(ConversionError, match=r"fc: the forward that calls it cannot be traced .*Rule\("):
        convert(model, {"fc": ProxSG()})
    converted = convert(model, {"fc": Rule(ProxSG(iters=2), activation="act", dropout="drop")})
    assert converted.fc.solver.tau == 0.7
    assert isinstance(converted.act, Absorbed)
    assert isinstance(converted.drop, Absorbed)
    with pytest.raises(ConversionError, match="names missing, but the model has no such module"):
        convert(model, {"fc": Rule(ProxGD(), activation="missing")})


def test_layers_inside_modules_of_torch_are_left_alone():
    model, x = Attention().eval(), torch.randn(2, 4, 8)
    converted = convert(model, {"*": ONE})
    assert set(_layers(converted)) == {"fc"}
    assert torch.equal(converted(x), model(x))
    with pytest.raises(ConversionError, match=r"encoder\.\*: picks only .*encoder\.linear1"):
        convert(model, {"encoder.*": ONE})


# Errors ---------------------------------------------------------------------------------------------------------------


def test_every_problem_is_listed_with_its_path_and_nothing_changes():
    model = nn.ModuleDict(
        {
            "a": nn.Sequential(nn.Linear(6, 6), nn.ReLU()),
            "b": nn.Sequential(nn.Linear(6, 6), nn.GELU()),
            "c": nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"), nn.ReLU()),
            "d": nn.Sequential(nn.Linear(6, 6), nn.SiLU()),
            "e": nn.Sequential(nn.Dropout(1.0), nn.Linear(6, 6)),
            "f": nn.Sequential(nn.AlphaDropout(), nn.Linear(6, 6)),
            "g": nn.Sequential(nn.Linear(6, 6), nn.ReLU()),
            "h": nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))),
            "i": nn.Sequential(nn.LazyLinear(6)),
            "j": nn.Linear(6, 6),
        }
    )
    convert(model["a"], {"0": ProxGD()}, inplace=True)
    before = {path: (module, type(module), dict(vars(module))) for path, module in model.named_modules()}
    rules = {"?.*": ProxSG(), "g.*": ProxSG(tau=7), "nothing.*": ProxGD(), "*.1": ProxGD(), "j": ProxGD()}
    with pytest.raises(ConversionError) as caught:
        convert(model, rules | {"g.0": ProxSG(tau=7), "e.1": ProxSG(), "f.1": ProxSG()}, inplace=True)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    expected = {
        "a.0": "already",
        "b.0": "GELU",
        "c.0": "circular",
        "d.0": "SiLU",
        "e.1": "p=1",
        "f.1": "AlphaDropout",
        "g.0": "6 features",
        "h.0": "parametrised",
        "i.0": "run the model once",
        "j": "no forward calls it",
        "nothing.*": "matches no module",
    }
    for path, reason in expected.items():
        assert any(line.startswith(f"{path}: ") and reason in line for line in lines), (path, lines)
    assert len(lines) == 1 + len(expected)
    for path, module in model.named_modules():
        known, kind, state = before[path]
        assert module is known
        assert type(module) is kind
        assert vars(module) == state


def test_a_layer_that_no_forward_calls_is_refused_with_the_remedy():
    model = VGG()
    model.extra = nn.Linear(4, 4)
    with pytest.raises(ConversionError, match=r"extra: no forward calls it.* remove it.* as the last rule, 'extra': "):
        convert(model, {"*": ProxGD(iters=2)})
    rule = Rule(ProxGD(iters=2), activation=None, dropout=None)
    assert convert(model, {"*": ProxGD(iters=2), "extra": rule}).extra.function == Zero()


def test_a_double_conversion_is_an_error():
    converted = convert(VGG(), {"classifier.0": ProxGD()})
    with pytest.raises(ConversionError, match=r"classifier\.0: is a solver layer already .* revert"):
        convert(converted, {"classifier.*": ProxGD()})


def test_an_output_that_is_needed_before_the_activation_is_an_error():
    model = _owner(lambda self, x: (z := self.fc(x)) * torch.sigmoid(z))
    with pytest.raises(ConversionError, match="fc: its output goes to sigmoid, but also to mul"):
        convert(model, {"fc": ONE})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), r"nn\.Sequential\(model\)"),
        (nn.DataParallel(VGG()), r"model\.module"),
        ("net", "takes an nn.Module"),
    ],
)
def test_what_has_no_layers_of_its_own_is_refused(model, message):
    with pytest.raises(ConversionError, match=message):
        convert(model, {"*": ProxGD()})


def test_a_compiled_model_is_refused():
    with pytest.raises(ConversionError, match="compiled"):
        convert(torch.compile(VGG(), backend="eager"), {"*": ProxGD()})


@pytest.mark.parametrize("rules", [{}, {"*": "relu"}, {"*": None}, [ProxGD()]])
def test_rules_are_checked(rules):
    with pytest.raises(ConversionError, match=r"pattern|rules is a dict"):
        convert(VGG(), rules)


# The model as an object -----------------------------------------------------------------------------------------------


def test_a_copy_shares_tensors_and_nothing_else():
    model = ResNet()
    converted = minimand.convert(model, {"*": ONE})
    assert type(converted) is ResNet
    assert not {id(m) for m in model.modules()} & {id(m) for m in converted.modules()}
    for tensors in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(converted, tensors)()), dict(getattr(model, tensors)())
        assert all(ours[name] is tensor for name, tensor in theirs.items())
    assert not _layers(model)


def test_in_place_the_modules_are_the_same_objects():
    model = VGG()
    modules = dict(model.named_modules())
    assert convert(model, {"*": ProxSG()}, inplace=True) is model
    assert all(model.get_submodule(path) is module for path, module in modules.items() if path)
    assert isinstance(modules["classifier.3"], SolverLinear)


def test_methods_attributes_and_hooks_survive():
    model = Functional()
    model.tag, model.fc1.tag = {"name": "ours"}, "first"
    seen = []

    class Recorder:
        def __init__(self):
            self.calls = 0

        def __call__(self, module, *rest):
            self.calls += 1

    recorder = Recorder()
    model.fc1.register_forward_hook(lambda module, args, output: seen.append(("fc1", output.shape)))
    model.fc3 = nn.Sequential(model.fc3)
    model.fc3.register_forward_hook(recorder)
    model.register_forward_pre_hook(lambda module, args: seen.append(("root", type(module))))
    model.fc2.register_forward_hook(recorder)
    model.fc2.register_full_backward_hook(recorder)
    converted = convert(model, {"*": ProxSG(iters=2)})
    assert not seen  # tracing runs no hooks
    assert recorder.calls == 0
    assert converted.classify(torch.randn(2, 1, 8, 8)).shape == (2,)
    assert seen == [("root", Functional), ("fc1", (2, 12))]
    converted(torch.randn(2, 1, 8, 8)).sum().backward()
    assert recorder.calls == 5
    assert converted.tag == {"name": "ours"}
    assert converted.tag is not model.tag
    assert converted.fc1.tag == "first"
    reverted = revert(converted)
    assert reverted.fc1.tag == "first"
    reverted.classify(torch.randn(2, 1, 8, 8))
    assert recorder.calls == 7


def test_hooks_that_are_methods_move_to_the_copy():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.calls = nn.Linear(3, 3), 0
            self.fc.register_forward_hook(self.note)

        def note(self, module, args, output):
            self.calls += 1

        def forward(self, x):
            return self.fc(x)

    model = Net()
    converted = convert(model, {"fc": ONE})
    converted(torch.randn(2, 3))
    assert (model.calls, converted.calls) == (0, 1)


def test_attributes_that_hold_tensors_hold_the_same_ones():
    model = VGG()
    model.decayed = [model.classifier[0].weight]
    model.cache = model.classifier[0].weight.sum()  # not a leaf
    converted = convert(model, {"*": ProxGD()})
    assert converted.decayed[0] is converted.classifier[0].weight
    assert converted.cache is model.cache
    assert converted.decayed is not model.decayed


def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    converted = convert(model, {"*": ProxGD(iters=2)})
    assert converted[0].weight is converted[2].weight is model[0].weight
    assert copy.deepcopy(converted)[0].weight is not model[0].weight


def test_modules_held_in_plain_lists_are_converted_too():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4)
            self.layers = [self.fc1, self.fc2]

        def forward(self, x):
            for layer in self.layers:
                x = F.relu(layer(x))
            return x

    converted = convert(Net(), {"*": ONE})
    assert converted.layers[0] is converted.fc1


@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_converted_networks_can_be_copied_and_stored(case, how):
    model, x, rules = case
    converted = convert(model, rules).eval()
    if how == "deepcopy":
        twin = copy.deepcopy(converted)
    else:
        file = io.BytesIO()
        torch.save(converted, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    expected = converted(x)
    assert torch.equal(twin(x), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    # The copy computes with its own parameters, and the original with its own.
    assert not torch.equal(twin(x), expected)
    assert torch.equal(converted(x), expected)
    assert not _layers(revert(twin))


@pytest.mark.parametrize(("name", "pattern"), [("functional", "*2"), ("resnet", "*")])
def test_converted_networks_compile_to_one_graph(name, pattern):
    make, shape = NETWORKS[name]
    converted, x = convert(make(), {pattern: ProxGD(iters=2)}).eval(), torch.randn(shape)
    expected = converted(x)
    compiled = torch.compile(converted, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    converted.train()
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["functional", "shared"])
def test_converted_networks_are_exported_after_one_pass(name):
    make, shape = NETWORKS[name]
    model, x = make(), torch.randn(shape)
    model.act = nn.ReLU()  # of the one that has it; the prox of tanh is long to trace
    converted = convert(model, {"fc2": ProxGD(iters=2)}).eval()
    assert "forward" in vars(converted)
    expected = converted(x)
    exported = torch.export.export(copy.deepcopy(converted), (), {"x": x}, dynamic_shapes={"x": {}})
    torch.testing.assert_close(exported.module()(x=x), expected)


def _draws(self, x):
    return self.fc(x) + torch.randn(6) * random.random()


def test_tracing_leaves_modes_and_random_numbers_alone():
    model = Functional()
    model.fc1.eval()
    drawing = _owner(_draws)
    state, python = torch.get_rng_state(), random.getstate()
    converted = convert(model, {"conv*": ProxGD(), "fc*": ProxSG()})
    convert(drawing, {"fc": ProxGD()})
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    for net in (model, converted):
        assert net.training
        assert not net.fc1.training
        assert net.fc2.training

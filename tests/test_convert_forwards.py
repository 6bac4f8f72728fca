"""Forwards that are rewritten, and those that cannot be traced."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minimand.errors import ConversionError
from minimand.functions import NonNegative, Zero
from minimand.nn import Rule, convert, revert
from minimand.nn.conversion.change import Absorbed
from minimand.solvers import ProxGD, ProxSG

from .cases.conversion import ONE, evaluated, forwarding, solver_layers
from .cases.networks import Attention, Branching, Functional, Shared

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
        assert torch.equal(evaluated(model, x), evaluated(converted, x))


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
    assert torch.equal(evaluated(model.eval(), x), evaluated(converted.eval(), x))
    for one, other in zip(evaluated(model.train(), x), evaluated(converted.train(), x), strict=True):
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

    with pytest.raises(ConversionError, match=r"squash: its forward must be rewritten .* runs 2 times per pass"):
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
    assert all("tanh" in str(layer.function) for layer in solver_layers(converted).values())


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
        (_made, "creates a tensor"),
        (_asks_a_child, "branches on the training flag of a submodule"),
        (_masked, "branches on its arguments .*mask"),
    ],
)
def test_a_forward_that_a_graph_would_not_repeat_is_refused(forward, reason):
    model = forwarding(forward)
    with pytest.raises(ConversionError, match=f"Net: its forward must be rewritten .* but it {reason}"):
        convert(model, {"fc": ONE})
    # Nothing has to be rewritten when the activation stays.
    converted = convert(model, {"fc": Rule(ONE, activation=None)})
    x = torch.randn(2, 6)
    assert torch.equal(evaluated(model, x), evaluated(converted, x))
    assert model.count == (1 if forward is _counts else 0)


def test_an_attribute_that_became_a_constant_may_not_change():
    model = forwarding(lambda self, x: F.dropout(F.relu(self.fc(x)), self.p, self.training))
    converted, x = convert(model, {"fc": ONE}), torch.randn(2, 6)
    assert torch.equal(evaluated(converted, x), evaluated(model, x))
    converted.p = 0.1
    with pytest.raises(ConversionError, match=r"Net\.p was 0\.5 .* revert the model"):
        converted(x)
    assert revert(converted)(x).shape == (2, 6)


def test_a_second_conversion_adds_to_the_first():
    model, x = Functional().eval(), torch.randn(2, 1, 8, 8)
    converted = convert(convert(model, {"fc1": ONE}), {"conv*": ONE}, inplace=True)
    assert set(solver_layers(converted)) == {"conv1", "conv2", "fc1"}
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
    assert set(solver_layers(converted)) == {"fc"}
    assert torch.equal(converted(x), model(x))
    with pytest.raises(ConversionError, match=r"encoder\.\*: matches only .*encoder\.linear1"):
        convert(model, {"encoder.*": ONE})

"""Forwards with functional dropout, which is edited out, and forwards that can be read in part only."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minimand.errors import ConversionError
from minimand.functions import NonNegative, Zero
from minimand.nn import Rule, SolverOptions, convert, plan, revert
from minimand.solvers import ProxGD, ProxSG

from .cases.conversion import ONE, evaluated, forwarding, is_taken_in, solver_layers
from .cases.networks import Attention, Branching, Functional, Shared

# Forwards that are edited, or stay as they are ------------------------------------------------------------------------


def test_a_shared_dropout_disappears_only_where_it_is_taken_in():
    model, x = Shared(), torch.randn(3, 8)
    converted = convert(model, {"fc1": SolverOptions(ProxSG(iters=1, tau=1.0, step=1.0), ridge=0.0), "fc2": ONE})
    assert type(converted.act) is nn.Tanh
    assert type(converted.drop) is nn.Dropout
    assert convert(model, {"fc1": ProxSG()}).fc1.solver.tau == 0.7
    inner = model.act(model.act(model.fc1(x)) + 1)  # without the first dropout
    expected = evaluated(lambda x: model.fc3(model.drop(model.act(model.fc2(model.drop(x))))), inner, seed=2)
    hidden = []
    converted.fc2.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    torch.testing.assert_close(expected.shape, evaluated(converted, x).shape)
    assert ((hidden[0] == 0) | torch.isclose(hidden[0], inner / 0.7)).all()
    assert (hidden[0] == 0).any()


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
    with pytest.raises(ConversionError, match=r"fc: it is called 2 times .* activations after it \(relu and tanh\)"):
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


def test_one_forward_may_be_the_activation_of_a_layer_and_of_something_else():
    class Squash(nn.Module):
        def forward(self, x):
            return torch.tanh(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.squash = nn.Linear(6, 6), Squash()

        def forward(self, x):
            return self.squash(1 + self.squash(self.fc(x)))

    model, x = Net(), torch.randn(3, 6)
    converted = convert(model, {"fc": ONE})
    assert "tanh" in str(converted.fc.function)
    assert torch.equal(converted(x), model(x))


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


def test_code_that_asks_for_a_tensor_is_read_as_it_runs():
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
    return F.relu(self.fc(F.dropout(x, self.p, self.training)))


def _keeps(self, x):
    self.last = x
    return F.relu(self.fc(F.dropout(x, self.p, self.training)))


def _noisy(self, x):
    return F.relu(self.fc(F.dropout(x, self.p, self.training))) + 0 * torch.randn(6)


def _without_gradients(self, x):
    with torch.no_grad():
        return F.relu(self.fc(F.dropout(x, self.p, self.training)))


def _made(self, x):
    x = F.dropout(input=x, p=self.p, training=self.training)
    return F.relu(self.fc(x)) + torch.ones(x.shape[0], 6)


def _asks_a_child(self, x):
    return F.relu(self.fc(F.dropout(x, 0.5, self.fc.training)))


def _masked(self, x, mask=None):
    """A docstring stays the first statement."""
    x = F.relu(self.fc(nn.functional.dropout(x, training=self.training)))
    return x if mask is None else x * mask


def _in_place(self, x):
    x = x.clone()
    F.dropout(x, 0.5, self.training, inplace=True)
    return F.relu(self.fc(x))


def _in_a_loop(self, x):
    for _ in range(2):
        x = F.relu(self.fc(F.dropout(x, 0.5, self.training)))
    return x


def _in_training(self, x):
    if self.training:
        x = torch.dropout(x, 0.5, True)
    return F.relu(self.fc(x.reshape(-1, 6)))


EDITED = [
    _counts, _keeps, _noisy, _without_gradients, _made, _asks_a_child, _masked, _in_place, _in_a_loop, _in_training,
]  # fmt: skip


@pytest.mark.parametrize("forward", EDITED)
def test_functional_dropout_is_edited_out_of_any_forward(forward):
    """In evaluation nothing changes; in training with a full sample nothing is dropped."""
    model, x = forwarding(forward), torch.randn(40, 6)
    converted = convert(model, {"fc": SolverOptions(ProxSG(iters=1, tau=1.0, step=1.0), ridge=0.0)})
    assert torch.equal(evaluated(model.eval(), x), evaluated(converted.eval(), x))
    torch.testing.assert_close(evaluated(converted.train(), x), evaluated(model, x))
    assert not torch.equal(evaluated(model.train(), x), evaluated(model.eval(), x))
    assert convert(model, {"fc": ProxSG()}).fc.solver.tau == 0.5
    assert model.count == (4 if forward is _counts else 0)
    for twin in (copy.deepcopy(converted), revert(converted)):
        assert torch.equal(evaluated(twin.eval(), x), evaluated(model.eval(), x))
    assert "forward" not in vars(revert(converted))


def _helper(x):
    return F.dropout(x, 0.5)


def _decorated(forward):
    @functools.wraps(forward)
    def around(*args):
        return forward(*args)

    return around


UNEDITABLE = {
    "helper": (lambda self, x: F.relu(self.fc(_helper(x))), "_helper in test_convert_forwards.py is not a method"),
    "decorated": (_decorated(_counts), r"_counts in .* is not a method of Net itself \(a decorator"),
    "no source": (
        eval("lambda self, x: F.relu(self.fc(F.dropout(x, 0.5)))"),
        "source text of <lambda> is not available",
    ),
}


@pytest.mark.parametrize("name", UNEDITABLE)
def test_functional_dropout_out_of_reach_is_refused_with_the_remedy(name):
    forward, reason = UNEDITABLE[name]
    model = forwarding(forward)
    remedy = r"; use Rule\(..., dropout=None\) to leave it in place"
    with pytest.raises(
        ConversionError, match=f"fc: the dropout before it cannot be taken in, because .*{reason}.*{remedy}"
    ):
        convert(model, {"fc": ProxSG()})
    assert convert(model, {"fc": Rule(ProxSG(), dropout=None)}).fc.solver.tau is None
    assert not plan(model, ProxSG()).converted


def test_a_line_that_also_drops_for_other_layers_is_not_edited():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = F.relu(layer(F.dropout(x, 0.5, self.training)))
            return x

    with pytest.raises(
        ConversionError, match=r"layers\.1: .* the same line of .*Net\.forward also makes calls that stay"
    ):
        convert(Net(), {"layers.1": ProxSG()})
    assert convert(Net(), {"*": ProxSG()}).layers[1].solver.tau == 0.5


def test_an_attribute_of_an_edited_forward_may_change():
    model = forwarding(_counts)
    converted, x = convert(model, {"fc": ProxSG(iters=1, tau=1.0)}), torch.randn(2, 6)
    converted.p = 0.1
    assert converted(x).shape == (2, 6)


def test_a_second_conversion_adds_to_the_first():
    model, x = Functional().eval(), torch.randn(2, 1, 8, 8)
    converted = convert(convert(model, {"fc1": ONE}), {"conv*": ONE}, inplace=True)
    assert set(solver_layers(converted)) == {"conv1", "conv2", "fc1"}
    assert torch.equal(converted(x), model(x))
    assert torch.equal(revert(converted)(x), model(x))


# Forwards that branch on data -----------------------------------------------------------------------------------------


def test_parts_of_a_branching_forward_are_converted():
    converted = convert(Branching(), {"body.*": ProxSG(iters=2)})
    assert is_taken_in(converted.body[0])
    assert converted.body[1].function == NonNegative()
    assert converted.body[3].function == Zero()
    assert converted(torch.randn(3, 8)).shape == (3, 5)


def test_dropout_in_a_branching_forward_is_named_or_left():
    model = Branching()
    with pytest.raises(ConversionError, match=r"fc: .*decides by data what it calls.* Rule\(\.\.\., dropout='drop'\)"):
        convert(model, {"fc": ProxSG()})
    converted = convert(model, {"fc": Rule(ProxSG(iters=2), dropout="drop")})
    assert converted.fc.solver.tau == 0.7
    assert is_taken_in(converted.drop)
    assert "sigmoid" in str(converted.fc.function)
    with pytest.raises(ConversionError, match="names missing, but the model has no such module"):
        convert(model, {"fc": Rule(ProxGD(), activation="missing")})
    with pytest.raises(ConversionError, match="fc: body is not a dropout directly before"):
        convert(model, {"fc": Rule(ProxSG(), dropout="body")})


class Keyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.fc, self.act = nn.Dropout(0.3), nn.Linear(8, 5), nn.Tanh()

    def forward(self, *, x):
        return self.act(self.fc(self.drop(x)))


def test_a_forward_that_needs_an_example_gets_one_or_has_its_neighbours_named():
    model, x = Keyword(), torch.randn(3, 8)
    with pytest.raises(ConversionError, match=r"fc: the model cannot be read: no made-up input runs .* pass example="):
        convert(model, {"fc": ProxSG()})
    with pytest.raises(ConversionError, match=r"does not run on the example: .*mat1 and mat2.*\(in fc, Linear\)"):
        convert(model, {"fc": ProxSG()}, example={"x": torch.randn(3, 7)})
    for converted in (
        convert(model, {"fc": ProxSG(iters=2)}, example={"x": x}),
        convert(model, {"fc": Rule(ProxSG(iters=2), activation="act", dropout="drop")}),
    ):
        assert converted.fc.solver.tau == 0.7
        assert "tanh" in str(converted.fc.function)
        assert is_taken_in(converted.drop)
        assert converted(x=x).shape == (3, 5)


def test_layers_inside_modules_of_torch_are_left_alone():
    model, x = Attention().eval(), torch.randn(2, 4, 8)
    converted = convert(model, {"*": ONE})
    assert set(solver_layers(converted)) == {"encoder.linear1", "encoder.linear2", "fc"}
    assert torch.equal(converted(x), model(x))
    with pytest.raises(ConversionError, match=r"encoder\.self_attn\.\*: matches only 'encoder\.self_attn\.out_proj'"):
        convert(model, {"encoder.self_attn.*": ONE})

"""The neighbours that a converted layer absorbs: activations, dropout, batch normalisation."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minimand.functions import Zero
from minimand.nn import Rule, SolverOptions, convert
from minimand.nn.conversion.change import Absorbed
from minimand.solvers import ProxGD, ProxSG

from .cases.conversion import ONE, evaluated
from .cases.networks import VGG, Functional


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
        expected, output = evaluated(model, y), evaluated(converted, y)
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

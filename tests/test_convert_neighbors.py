"""The neighbours that a converted layer absorbs: activations, dropout, batch normalisation."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minimand.errors import ConversionError
from minimand.functions import NonNegative, Zero
from minimand.nn import AdditiveDropout, ImportanceDropout, Rule, SolverOptions, convert, plan
from minimand.solvers import SVRG, ProxGD, ProxSG

from .cases.conversion import ONE, evaluated, is_taken_in
from .cases.networks import VGG, Functional


class _Call(nn.Module):
    """A linear layer with a function before and after it."""

    def __init__(self, before, after):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.before, self.after = before, after

    def forward(self, x):
        return self.after(self.fc(self.before(x)))


class _Written(nn.Module):
    """A linear layer with a dropout before it in the text of its forward."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)


class _Plain(_Written):
    def forward(self, x):
        return F.relu(self.fc(F.dropout(x, 0.25)))


class _InPlace(_Written):
    def forward(self, x):
        return F.relu(self.fc(F.dropout(x, p=0.25, inplace=True)))


class _Other(_Written):
    def forward(self, x):
        return F.relu(self.fc(torch.dropout(x, 0.25, True)))


class _Reshaped(_Written):
    def forward(self, x):
        x = F.dropout(x, 0.25).reshape(-1, 6)
        return F.relu(self.fc(x))


class _Viewed(_Written):
    def forward(self, x):
        return F.relu(self.fc(F.dropout(x, 0.25).view(x.shape[0], 6)))


class _Channels(_Written):
    def __init__(self):
        super().__init__()
        self.fc = nn.Conv1d(3, 6, 1)

    def forward(self, x):
        x = F.dropout1d(x.reshape(-1, 3, 2))  # always on
        return F.relu(self.fc(x)).flatten(1)[:, :6]


class _Off(_Written):
    def forward(self, x):
        return F.relu(self.fc(F.dropout(x, 0.25, training=False)))


class _Used(_Written):
    def forward(self, x):
        return F.relu(self.fc(F.dropout(x, 0.25).exp()))


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
    # The layer hands on the pre-activation.
    assert torch.equal(converted.fc(x), model.fc(x))


def _behind(before):
    return lambda: _Call(before, F.relu)


@pytest.mark.parametrize(
    ("make", "tau"),
    [
        (_Plain, 0.75),
        (_InPlace, 0.75),
        (_Other, 0.75),
        (_Reshaped, 0.75),
        (_Viewed, 0.75),
        (_Channels, 0.5),
        (_Off, 1.0),
        (_Used, None),
        (_behind(nn.Dropout(0.25)), 0.75),
        (_behind(nn.Dropout(0.0)), 1.0),
        (_behind(nn.Sequential(nn.Dropout(0.25), nn.Flatten(), nn.Identity())), 0.75),
        (_behind(nn.Dropout1d(0.25)), None),
        (_behind(lambda x: x), None),
    ],
)
def test_a_sampling_solver_keeps_what_the_dropout_kept(make, tau):
    converted = convert(make(), {"fc": ProxSG(iters=2)})
    assert converted.fc.solver.tau == tau
    assert converted(torch.rand(3, 6)).shape == (3, 6)


def test_the_dropouts_of_the_library_are_taken_in_by_their_solvers_and_refused_by_others():
    importance, linear = ProxSG(sampling="importance"), nn.Linear(6, 4)
    for dropout, taken, refused in [
        (ImportanceDropout(0.25), importance, ProxSG()),
        (AdditiveDropout(0.25, linear), SVRG(), importance),
    ]:
        model = nn.Sequential(dropout, linear, nn.ReLU())
        converted = convert(model, {"1": taken})
        assert converted[1].solver.tau == 0.75
        assert is_taken_in(converted[0])
        with pytest.raises(ConversionError, match=rf"1: {type(dropout).__name__} before it .* both sample; use"):
            convert(model, {"1": refused})
        left = convert(model, {"1": Rule(refused, dropout=None)})
        assert not is_taken_in(left[0])
        assert left[1].solver.tau is None
        assert not is_taken_in(convert(model, {"1": ProxGD()})[0])


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
    assert is_taken_in(outside[0])
    assert outside[1].solver.tau == 0.5


def test_a_given_sample_size_wins_and_the_dropout_still_goes():
    converted = convert(VGG(), {"classifier.3": ProxSG(tau=5)})
    assert converted.classifier[3].solver.tau == 5
    assert is_taken_in(converted.classifier[2])


def test_dropout_before_a_deterministic_solver_stays():
    converted = convert(VGG(), {"classifier.*": ProxGD()})
    assert type(converted.classifier[2]) is nn.Dropout
    assert type(converted.classifier[5]) is nn.Dropout


def test_channel_dropout_before_a_convolution_is_taken_in_and_others_stay():
    for dropout, taken in [(nn.Dropout2d(0.25), True), (nn.Dropout(0.25), True), (nn.Dropout3d(0.25), False)]:
        converted = convert(nn.Sequential(dropout, nn.Conv2d(4, 4, 3), nn.ReLU()), {"1": ProxSG()})
        assert is_taken_in(converted[0]) == taken
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
    assert is_taken_in(convert(_Fork(), {"*": ProxSG()}).drop)
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


class Normalised(nn.Module):
    """Normalisations that depend on the sample, after layers, before an addition, and before a layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.group, self.drop = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Dropout(0.25)
        self.second, self.instance = nn.Conv2d(4, 4, 1), nn.InstanceNorm2d(4)
        self.fc, self.layer = nn.Linear(4, 6), nn.LayerNorm(6)
        self.skip, self.rms, self.before, self.last = nn.Linear(6, 6), nn.RMSNorm(6), nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x):
        x = F.relu(self.group(self.conv(x)))
        x = torch.tanh(self.instance(self.second(self.drop(x)))).mean((2, 3))
        x = F.gelu(self.layer(self.fc(x)))
        x = F.relu(self.rms(self.skip(x)) + x)
        return F.relu(self.last(self.drop(F.layer_norm(self.before(x), (6,)))))


@pytest.mark.parametrize("training", [False, True])
def test_normalisations_of_each_sample_stay_outside(training):
    model, x = Normalised().train(training), torch.randn(3, 2, 5, 5)
    steps = plan(model, {"*": ONE}, example=x)
    outside = {"conv": "group (GroupNorm)", "second": "instance (InstanceNorm2d)", "fc": "layer (LayerNorm)",
               "skip": "rms (RMSNorm)"}  # fmt: skip
    assert not steps.refused
    for path, layer in steps.converted.items():
        assert isinstance(layer.function, Zero if path in outside else NonNegative)
        assert str(layer).endswith(f"; {outside[path]} stays after it" if path in outside else " with relu")
    converted = convert(model, steps)
    assert torch.equal(evaluated(converted, x), evaluated(model, x))
    assert not any(map(is_taken_in, (converted.group, converted.instance, converted.layer, converted.rms)))
    sampled = convert(model, {"*": ProxSG(iters=2)}, example=x)
    assert is_taken_in(sampled.drop)
    assert sampled(x).shape == (3, 5)

"""Laws of a plan: it says what becomes of every layer, changes nothing, and is what convert does."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

from minimand.errors import ConversionError, OptionError
from minimand.functions import NonNegative, Zero
from minimand.nn import Rule, SolverLinear, SolverOptions, convert, plan, revert
from minimand.solvers import ADMM, RCD, SVRG, ProxGD, ProxSG

from .cases.conversion import ONE, is_taken_in, network, solver_layers
from .cases.forwards.architectures import GPT
from .cases.networks import NETWORKS, VGG, Functional, ResNet, Shared


class Mixed(nn.Module):
    """One layer of every fate."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.up = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 2, 2, 2)
        self.drop, self.fc, self.gelu = nn.Dropout(0.25), nn.Linear(8, 8), nn.Linear(8, 8)
        self.pair = nn.Bilinear(8, 8, 8)
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        x = self.up(F.relu(self.norm(self.conv(x)))).mean(1)
        x = torch.tanh(self.fc(self.drop(x)))
        x = self.pair(x, F.gelu(self.gelu(x)))
        return self.head(self.attention(x, x, x)[0])


IMAGES = torch.randn(2, 1, 4, 4)


def test_a_plan_names_every_layer_with_its_fate():
    model = Mixed()
    steps = plan(model, {"*": ProxSG(iters=10), "conv": ProxGD(iters=4), "head": ADMM(iters=3)}, example=IMAGES)
    assert list(steps.converted) == ["conv", "up", "fc", "head"]
    assert list(steps.refused) == ["gelu"]
    assert "GELU is not monotone" in steps.refused["gelu"]
    assert "Rule(..., activation=None)" in steps.refused["gelu"]
    assert set(steps.left) == {"pair", "attention.out_proj"}
    lines = {line.split()[0]: line for line in str(steps).splitlines()}
    for path, words in {
        "conv": ["Conv2d 1→4", "7×", "ProxGD(4)", "norm (BatchNorm2d)", "relu"],
        "fc": ["Linear 8→8", "19×", "ProxSG(10)", "drop (Dropout) before it", "tanh"],
        "head": ["Linear 8→3", "3.25×", "converted: ADMM(3)"],
        "gelu": ["refused: GELU"],
        "up": ["ConvTranspose2d 4→2", "converted: ProxSG(10)"],
        "pair": ["Bilinear", "left: Bilinear has no solver form"],
        "attention.out_proj": ["left: the module of torch around it"],
    }.items():
        assert all(word in lines[path] for word in words), lines[path]
    assert "no rule matches" in str(plan(model, {"fc": ProxGD()}, example=IMAGES))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_plan_changes_nothing_and_convert_follows_it(name):
    model, x, rules = network(name)
    before = {path: (module, dict(vars(module))) for path, module in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    steps = plan(model, rules, example=x)
    for path, module in model.named_modules():
        assert module is before[path][0]
        assert vars(module) == before[path][1]
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    converted = convert(model, steps)
    assert set(solver_layers(converted)) == set(steps.converted)
    assert torch.equal(converted.eval()(x), model.eval()(x))


def test_a_plan_is_for_one_model_in_one_state():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    steps = plan(net, ProxGD(iters=3))
    net[1] = nn.Tanh()
    with pytest.raises(ConversionError, match=r"  1: the layer is another one than when the plan was made"):
        convert(net, steps)
    assert isinstance(net[0], nn.Linear)
    model = VGG()
    steps = plan(model, {"classifier.*": ProxGD()})
    with pytest.raises(ConversionError, match="VGG: the plan was made for another model"):
        convert(VGG(), steps)
    model.classifier[3] = nn.Linear(16, 12)
    with pytest.raises(ConversionError, match=r"classifier\.3: the layer is another one than when the plan was made"):
        convert(model, steps)


def test_layers_that_cannot_be_converted_are_errors_or_skipped():
    model = Mixed()
    with pytest.raises(ConversionError, match="unchanged:\n  gelu: GELU"):
        convert(model, {"*": ProxGD()}, example=IMAGES)
    with pytest.raises(ConversionError, match="gelu: GELU"):
        convert(model, plan(model, {"*": ProxGD()}, example=IMAGES))
    skipped = convert(model, {"*": ProxGD()}, example=IMAGES, unsupported="skip")
    for converted in (
        skipped,
        convert(model, ProxGD(), example=IMAGES),
        convert(model, Rule(ProxGD()), example=IMAGES),
    ):
        assert set(solver_layers(converted)) == {"conv", "up", "fc", "head"}
        assert type(converted.gelu) is nn.Linear
    only = nn.Sequential(nn.Linear(3, 3), nn.GELU())
    with pytest.raises(ConversionError, match="0: GELU"):
        convert(only, SolverOptions(ProxGD()))
    assert not solver_layers(convert(only, {"*": ProxGD()}, unsupported="skip"))
    with pytest.raises(OptionError, match=r'unsupported must be "error" or "skip"'):
        convert(model, ProxGD(), unsupported="ignore")


@pytest.mark.parametrize("unsupported", ["error", "skip"])
def test_a_pattern_without_a_match_names_the_nearest_paths(unsupported):
    with pytest.raises(ConversionError, match=r"clasifier\.3: no such layer; available: 'classifier\.3', "):
        convert(VGG(), {"clasifier.3": ProxGD(), "features.*": ProxGD()}, unsupported=unsupported)
    with pytest.raises(ConversionError, match=r"fc9: no such layer; available: 'fc[123]', "):
        plan(Functional(), {"fc9": ProxGD()})
    with pytest.raises(
        ConversionError, match=r"act: matches 'act', a torch\.nn\.modules\..*\.Tanh, which is not a linear layer"
    ):
        plan(Shared(), {"act": ProxGD()})
    wide = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))
    with pytest.raises(ConversionError, match=r"21: no such layer; the nearest: '2', '1', .* of 12 layers"):
        plan(wide, {"21": ProxGD()})


def test_a_layer_that_others_take_in_with_it_is_planned_again_without_them():
    """A dropout that feeds a layer that is refused stays for all."""

    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.a, self.b = nn.Dropout(0.25), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            x = self.drop(x)
            return torch.relu(self.a(x)) + F.gelu(self.b(x))

    converted = convert(Fork(), ProxSG())
    assert not is_taken_in(converted.drop)
    assert converted.a.solver.tau is None


# References, wrappers and copies -------------------------------------------------------------------------------------


def test_closures_that_hold_modules_hold_the_copies():
    """As in minGPT, whose blocks keep a lambda."""
    model, x = GPT().eval(), torch.randint(0, 11, (2, 5))
    converted = convert(model, ONE, example=x)
    assert "h.0.mlp.c_fc" in solver_layers(converted)
    assert torch.equal(converted(x)[0], model(x)[0])
    assert not solver_layers(model)


class Holder:
    def __init__(self, layer):
        self.layer = layer


class Holding(nn.Module):
    def __init__(self, holder):
        super().__init__()
        self.fc, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.holder = Holder(self.fc) if holder else [(self.fc, {"fc": [self.fc]})]

    def forward(self, x):
        layer = self.holder.layer if isinstance(self.holder, Holder) else self.holder[0][1]["fc"][0]
        return self.last(torch.relu(layer(x)))


@pytest.mark.parametrize("inplace", [True, False])
def test_references_are_followed_or_the_model_is_refused_unchanged(inplace):
    listed = convert(Holding(holder=False), {"*": ProxGD()}, inplace=inplace)
    assert listed.holder[0][0] is listed.holder[0][1]["fc"][0] is listed.fc
    assert isinstance(listed.fc, SolverLinear)
    reverted = revert(listed, inplace=inplace)
    assert reverted.holder[0][0] is reverted.fc
    model = Holding(holder=True)
    before = dict(model.named_modules())
    with pytest.raises(
        ConversionError, match=r"fc: the converted model calls it 0 times instead of 1, because code holds"
    ):
        convert(model, {"*": ProxGD()}, inplace=inplace)
    assert dict(model.named_modules()) == before
    assert set(solver_layers(convert(model, {"last": ProxGD()}, inplace=inplace))) == {"last"}


class Aside(nn.Module):
    """Code that a copy cannot follow calls a part that is not converted."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.holder = Holder(self.norm)

    def forward(self, x):
        return self.fc(self.holder.layer(x))


def test_a_copy_that_calls_any_module_of_the_original_is_refused():
    model = Aside()
    convert(model, {"fc": ProxGD()}, inplace=True)
    shared = Aside()
    shared.holder.__class__ = type("Fixed", (Holder,), {"__deepcopy__": lambda self, memo: self})
    with pytest.raises(ConversionError, match=r"norm: the converted model calls it 0 times instead of 1"):
        convert(shared, {"fc": ProxGD()})


def test_an_averaged_model_is_converted_like_any_other():
    model, x = AveragedModel(VGG()).eval(), torch.randn(2, 3, 8, 8)
    converted = convert(model, ONE)
    assert "module.classifier.3" in solver_layers(converted)
    assert torch.equal(converted(x), model(x))
    trained = convert(VGG(), ONE)
    AveragedModel(trained).update_parameters(trained)


def test_handles_of_hooks_work_after_the_conversion():
    model, seen = VGG(), []
    handle = model.classifier[0].register_forward_hook(lambda module, args, output: seen.append(type(module)))
    convert(model, {"classifier.0": ProxGD()}, inplace=True)
    seen.clear()
    model(torch.randn(2, 3, 8, 8))
    handle.remove()
    model(torch.randn(2, 3, 8, 8))
    assert seen == [SolverLinear]


def test_hooks_see_pre_activations():
    model, x, seen = ResNet().eval(), torch.randn(2, 3, 8, 8), []
    converted = convert(model, ONE)
    for net in (model, converted):
        net.layer1[0].conv1.register_forward_hook(lambda *_: None)
        net.layer1[0].conv2.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
        net.layer1[0].relu.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
        net(x)
    plain, solved = seen[:3], seen[3:]
    assert torch.equal(plain[0], solved[0])  # before the first ReLU
    assert torch.equal(plain[2], solved[1])  # the sum, which the layer returns
    assert torch.equal(plain[2], solved[2])


# Solvers that need care ----------------------------------------------------------------------------------------------


def test_every_solver_keeps_the_activation_in_the_network():
    x = torch.randn(5, 8)
    for solver, start in itertools.product((ProxSG(3), SVRG(1, 3), RCD(3), ADMM(3)), ("plain", "zero")):
        for mode in ("stochastic", "mean", "deterministic"):
            model = nn.Sequential(nn.Linear(8, 6), nn.Tanh())
            options = SolverOptions(solver, eval_mode=mode, mean_passes=2, start=start)
            converted = convert(model, options).eval()
            expected = SolverLinear.from_plain(model[0], "tanh", options).eval()
            torch.manual_seed(0)
            output = converted(x)
            torch.manual_seed(0)
            torch.testing.assert_close(output, expected(x), rtol=1e-4, atol=1e-5)


def test_coordinate_descent_is_refused_where_zero_is_out_of_range():
    model = nn.Sequential(nn.Linear(8, 6), nn.Sigmoid(), nn.Linear(6, 6), nn.ReLU())
    steps = plan(model, RCD())
    assert "RCD leaves outputs at 0" in steps.refused["0"]
    assert steps.converted["2"].function == NonNegative()


def test_an_activation_behind_a_reshape_belongs_to_the_layer():
    model, x = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 1, 4, 4)
    converted = convert(model, ONE, example=x)
    assert converted[0].function == NonNegative()
    assert torch.equal(converted(x), model(x))
    apart = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.ReLU())
    assert convert(apart, ONE, example=x)[0].function == Zero()

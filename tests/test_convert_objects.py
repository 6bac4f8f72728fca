"""A converted model as an object: copies, hooks, attributes, tied weights, storage, compilation, export."""

import copy
import io
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import minimand
from minimand.errors import ConversionError
from minimand.nn import SolverLinear, SolverOptions, convert, explain, revert, sample
from minimand.solvers import ProxGD, ProxSG

from .cases.conversion import ONE, forwarding, network, solver_layers
from .cases.forwards import FORWARDS
from .cases.networks import NETWORKS, VGG, Functional, ResNet


@pytest.fixture(params=NETWORKS)
def case(request):
    return network(request.param)


def test_a_copy_shares_tensors_and_nothing_else():
    model = ResNet()
    converted = minimand.convert(model, {"*": ONE})
    assert type(converted) is ResNet
    assert not {id(m) for m in model.modules()} & {id(m) for m in converted.modules()}
    for tensors in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(converted, tensors)()), dict(getattr(model, tensors)())
        assert all(ours[name] is tensor for name, tensor in theirs.items())
    assert not solver_layers(model)


def test_in_place_the_other_modules_are_the_same_objects():
    model = VGG()
    modules = dict(model.named_modules())
    assert convert(model, {"*": ProxSG()}, inplace=True) is model
    layers = solver_layers(model)
    assert isinstance(layers["classifier.3"], SolverLinear)
    for path, module in modules.items():
        assert path in layers or model.get_submodule(path) is module
    revert(model, inplace=True)
    assert all(model.get_submodule(path) is module for path, module in modules.items())


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
    seen.clear()  # reading runs the network, with its hooks
    recorder.calls = 0
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
    assert not solver_layers(revert(twin))


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
    sampled = SolverOptions(ProxSG(iters=2), eval_mode="deterministic")
    converted = convert(model, {"fc2": sampled}).eval()
    assert "forward" in vars(converted)  # without the dropout
    expected = converted(x)
    exported = torch.export.export(copy.deepcopy(converted), (), {"x": x}, dynamic_shapes={"x": {}})
    torch.testing.assert_close(exported.module()(x=x), expected)


def _draws(self, x):
    return self.fc(x) + torch.randn(6) * random.random()


def test_reading_leaves_modes_and_random_numbers_alone():
    model = Functional()
    model.fc1.eval()
    drawing = forwarding(_draws)
    state, python = torch.get_rng_state(), random.getstate()
    converted = convert(model, {"conv*": ProxGD(), "fc*": ProxSG()})
    convert(drawing, {"fc": ProxGD()})
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    for net in (model, converted):
        assert net.training
        assert not net.fc1.training
        assert net.fc2.training


def test_a_generated_forward_is_converted_and_copied_and_its_additions_are_refused_by_path():
    model = FORWARDS["generated forward"].make().eval()
    x = torch.randn(3, 4)
    with pytest.raises(ConversionError, match=r"b: the addition .* is generated anew for every copy; convert the mod"):
        convert(model, {"*": ProxGD(3)})
    net = convert(model, ProxGD(3), unsupported="skip")
    assert isinstance(net.a, SolverLinear)
    assert torch.equal(copy.deepcopy(net)(x), net(x))
    assert not torch.equal(net(x), model(x))
    assert torch.equal(revert(net)(x), model(x))


class _Clones(TorchDispatchMode):
    """The sizes of the tensors that are cloned."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.clone:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_a_conversion_copies_no_weight():
    """Trackers hold buffers as large as the weights; a run that is undone replaces them and does not write there."""
    net = nn.Sequential(nn.Linear(50, 60), nn.BatchNorm1d(60), nn.ReLU(), nn.Linear(60, 40))
    x = torch.randn(4, 50)
    with _Clones() as seen:
        converted = convert(net, ProxGD(3), example=x)
        sample(nn.Sequential(converted, nn.Dropout()), x, n=2)
    assert seen.sizes
    assert max(seen.sizes) < 40 * 50
    before = [layer.tracker.reference for layer in (converted[0], converted[3])]
    explain(converted, x)
    assert all(layer.tracker.reference is old for layer, old in zip((converted[0], converted[3]), before, strict=True))

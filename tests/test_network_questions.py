"""Law: questions to a record have the answers that the network's code shows."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minimand.network import read, role

from .cases.forwards import FORWARDS, architectures, limits
from .cases.networks import NETWORKS


def only(calls):
    (call,) = calls
    return call


def test_neighbours_of_a_residual_block():
    net = read(architectures.ResNet(), torch.randn(2, 3, 16, 16))
    first, second = net.neighbors(only(net.of("layer1.1.conv1"))), net.neighbors(only(net.of("layer1.1.conv2")))
    assert (first.norm.path, first.skip, first.activation.path) == ("layer1.1.bn1", None, "layer1.1.relu")
    assert (second.norm.path, second.skip.path, second.activation.path) == (
        "layer1.1.bn2", "layer1.1", "layer1.1.relu",
    )  # fmt: skip
    around = net.neighbors(only(net.of("layer1.1.downsample.0")))
    assert around.norm.path == "layer1.1.downsample.1"
    assert around.skip is second.skip


@pytest.mark.parametrize("training", [True, False])
def test_neighbours_do_not_depend_on_the_mode(training):
    net = read(NETWORKS["functional"][0]().train(training), torch.randn(NETWORKS["functional"][1]))
    found = {path: net.neighbors(only(net.of(path))) for path in ("conv1", "conv2", "fc1", "fc2", "fc3")}
    assert [n.dropout is not None for n in found.values()] == [False, False, True, True, False]
    assert [n.activation.name if n.activation else None for n in found.values()] == [
        "relu", "leaky_relu", "tanh", "relu", None,
    ]  # fmt: skip


def test_an_output_that_others_read_has_no_neighbours():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            h = self.fc(x)
            return torch.relu(h) + h

    net = read(Two())
    assert net.neighbors(only(net.of("fc"))).activation is None


def test_residual_blocks_with_and_without_downsampling():
    net = read(architectures.ResNet(), torch.randn(2, 3, 16, 16))
    plain, down = net.residuals()
    assert plain.shortcut == ()
    assert [call.path for call in plain.branch if role(call) == "conv"] == ["layer1.0.conv1", "layer1.0.conv2"]
    assert [call.path for call in down.shortcut] == ["layer1.1.downsample.0", "layer1.1.downsample.1"]
    assert [call.path for call in down.branch if role(call) == "conv"] == ["layer1.1.conv1", "layer1.1.conv2"]
    assert plain.add.path == "layer1.0"
    assert net.readers(plain.add)[0] is down.branch[0] or role(net.readers(plain.add)[0]) == "activation"


@pytest.mark.parametrize(("name", "count"), [("gpt", 4), ("vit", 2), ("mixer", 2), ("mobilenet", 1), ("u-net", 0)])
def test_residual_blocks_of_other_networks(name, count):
    case = FORWARDS[name]
    assert len(read(case.make(), case.example()).residuals()) == count


def test_skips_are_told_apart_in_evaluation():
    case = FORWARDS["two dropouts and a skip in evaluation"]
    net = read(case.make(), case.example())
    adds = [call for call in net.calls if role(call) == "add"]
    assert [add.inputs[0].source for add in adds] == ["input", "call"]
    assert all(net.neighbors(call).dropout is not None for call in net.calls if role(call) == "linear")
    assert [block.shortcut for block in net.residuals()] == [(), ()]


def test_tied_parameters_are_shared():
    net = read(architectures.GPT(), torch.randint(0, 11, (2, 5)))
    found = only(net.shared())
    assert found.names == ("wte.weight", "lm_head.weight")
    assert [call.name for call in found.calls] == ["embedding", "linear"]
    net = read(architectures.Siamese())
    assert {shared.names[0] for shared in net.shared()} == {
        f"encoder.{i}.{n}" for i in (0, 2) for n in ("weight", "bias")
    }
    net = read(architectures.TiedAutoencoder())
    assert [(s.names, [c.name for c in s.calls]) for s in net.shared()] == [(("encoder.weight",), ["linear", "t"])]


def test_frames_are_runs_of_modules():
    net = read(architectures.Siamese())
    assert [(f.path, f.kind, f.run) for f in net.frames if f.path == "encoder.2"] == [
        ("encoder.2", "Linear", 0), ("encoder.2", "Linear", 1),
    ]  # fmt: skip
    root = net.frames[0]
    assert (root.path, root.parent, root.inputs, root.outputs) == ("", None, net.inputs, net.outputs)
    assert all(net.frames[frame.parent].path in ("", "encoder") for frame in net.frames[1:])
    assert [value.name for value in net.inputs] == ["a", "b"]


def test_sites_are_lines_of_the_code():
    net = read(NETWORKS["functional"][0](), torch.randn(NETWORKS["functional"][1]))
    lines, start = inspect.getsourcelines(NETWORKS["functional"][0].forward)
    file = inspect.getsourcefile(NETWORKS["functional"][0])
    for call in net.calls:
        if call.path == "":
            assert call.site[0] == file
            assert call.name.rstrip("_") in lines[call.site[1] - start].replace(".dropout", " dropout")


def test_chain_of_steps():
    line = read(NETWORKS["vgg"][0](), torch.randn(NETWORKS["vgg"][1])).chain()
    assert line.broken is None
    assert [step.path for step in line.steps] == [
        *(f"features.{i}" for i in range(5)), "", *(f"classifier.{i}" for i in range(7)),
    ]  # fmt: skip
    assert line.steps[5].calls[0].name == "flatten"


class OwnActivation(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


def test_a_module_without_parts_is_one_step():
    net = read(nn.Sequential(nn.Linear(3, 3), OwnActivation(), nn.BatchNorm1d(3), nn.Identity(), nn.Linear(3, 2)))
    line = net.chain()
    assert line.broken is None
    assert [len(step.calls) for step in line.steps] == [1, 2, 1, 1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resnet", "layer1.0 does not take exactly the output of"),
        ("siamese", "does not take exactly one tensor as input (also b)"),
        ("vae", "returns more than one tensor"),
        ("raises", "cannot be read: the forward raises NotImplementedError"),
    ],
)
def test_a_broken_chain_is_explained(name, words):
    case = FORWARDS[name]
    assert words in read(case.make(), case.example()).chain().broken


def test_in_place_changes_are_new_values():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            h = self.fc(x)
            view = h.view(-1)
            torch.relu_(view)
            return h + 1, view

    net = read(Views())
    linear, view, relu, add = net.calls
    assert {before for before, _ in relu.mutates} == {*linear.outputs, *view.outputs}
    assert net.readers(linear) == (view,)
    assert set(net.readers(relu)) == {add}
    assert net.outputs[1] == relu.outputs[0]
    assert net.depends(add.inputs[0])
    assert linear.outputs[0] in net.ancestors(add.inputs[0])


def test_roles():
    class Roles(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            h = x @ self.weight.t()
            h = torch.addmm(self.weight[0], h, self.weight)
            h = F.conv1d(h.unsqueeze(1), h.new_ones(1, 1, 1)).squeeze(1)
            h = torch.cat([h.clamp(min=0), F.softmax(h, -1)], 1).contiguous()
            h = F.layer_norm(F.max_pool1d(F.gelu(h), 2), (4,))
            return F.dropout(h.T.mT, 0.5) + x + 1

    found = [(call.name, role(call)) for call in read(Roles(), torch.randn(2, 4)).calls]
    assert found == [
        ("t", "reshape"), ("matmul", "linear"), ("__getitem__", "other"), ("addmm", "linear"), ("unsqueeze", "reshape"),
        ("new_ones", "other"), ("conv1d", "conv"), ("squeeze", "reshape"), ("clamp", "activation"),
        ("softmax", "other"), ("cat", "cat"), ("contiguous", "identity"), ("gelu", "activation"),
        ("max_pool1d", "pool"), ("layer_norm", "norm"), ("T", "reshape"), ("mT", "reshape"), ("dropout", "dropout"),
        ("add", "add"), ("add", "other"),
    ]  # fmt: skip


def test_a_network_without_data_is_not_run():
    lazy = read(nn.Sequential(nn.LazyLinear(3)), torch.randn(2, 4))
    assert not lazy.complete
    assert "lazy" in lazy.reasons[0]
    meta = read(nn.Linear(3, 3, device="meta"))
    assert "meta device" in meta.reasons[0]
    with pytest.raises(TypeError, match=r"read takes an nn\.Module, got a builtin_function"):
        read(torch.relu)


def test_the_mode_can_be_chosen():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout()).eval()
    assert not read(model).training
    net = read(model, training=True)
    assert net.training
    assert net.verify(torch.randn(2, 3))
    assert not model.training


def test_recomputing_follows_the_weights():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    net = read(model)
    with torch.no_grad():
        model[0].weight.mul_(2)
    x = torch.randn(2, 3)
    assert torch.equal(net.recompute(x)[0], model(x))
    with pytest.raises(ValueError, match="1 input tensors, got 2"):
        net.recompute((x, x))


def test_a_record_of_another_branch_does_not_verify():
    torch.manual_seed(0)
    model = limits.Branching()
    x = torch.randn(2, 4)
    net = read(model, x)
    assert net.verify(x)
    outcomes = {net.verify(torch.randn(2, 4)) for _ in range(10)}
    assert outcomes == {True, False}


def test_reading_does_not_depend_on_the_surroundings():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.BatchNorm1d(3))
    with torch.inference_mode():
        net = read(model, torch.randn(2, 3))
        assert net.verify(torch.randn(2, 3))
    assert net.grad
    assert not net.opaque()


def test_a_forward_without_end_is_cut_off(monkeypatch):
    class Endless(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            while True:
                x = self.fc(x)

    monkeypatch.setattr("minimand.network.recorder._MOST_CALLS", 50)
    assert "the recorder stopped after 50 calls" in read(Endless()).reasons[0]

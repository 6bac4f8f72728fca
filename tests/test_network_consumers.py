"""Law: training and penalties read a network by its forward pass, however it is written."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minimand.errors import ChainError
from minimand.homogeneous.bound import NO_BOUND, polar_bound
from minimand.network import sequence
from minimand.train import LPOM, ProxProp

from .cases.forwards import FORWARDS


class Written(nn.Module):
    """A convolutional network whose forward is written with functions, on maps of any shape."""

    def __init__(self, features):
        super().__init__()
        self.fc2, self.fc1 = nn.Linear(7, 3), nn.Linear(features, 7)
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = x.view(x.size(0), -1)
        return self.fc2(torch.tanh(self.fc1(x)))

    def listed(self):
        return nn.Sequential(
            self.conv, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), self.fc1, nn.Tanh(), self.fc2
        )  # fmt: skip


@pytest.mark.parametrize(("height", "width"), [(8, 8), (28, 28), (40, 40), (12, 21), (7, 120)])
def test_a_written_network_is_the_same_chain_as_a_listed_one(height, width):
    net = Written(4 * ((height - 2) // 2) * ((width - 2) // 2))
    x, y = torch.randn(5, 1, height, width), torch.randint(3, (5,))
    assert [(type(a.module), vars(a.module).get("weight")) for a in sequence(net)] == [
        (type(b.module), vars(b.module).get("weight")) for b in sequence(net.listed())
    ]
    assert LPOM(net).energy(x, y) == LPOM(net.listed()).energy(x, y)


def test_lifted_training_names_what_it_cannot_take():
    class Periodic(Written):
        def forward(self, x):
            return super().forward(torch.sin(x))

    with pytest.raises(ChainError, match=r"the call of sin .* is neither linear nor a monotone activation"):
        LPOM(Periodic(36))
    with pytest.raises(ChainError, match="raises ZeroDivisionError"):
        LPOM(_Failing())
    with pytest.raises(ChainError, match="reads data that depends on the input"):
        LPOM(FORWARDS["branch on data"].make())


class _Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(x) / (1 // 0)


class Backwards(nn.Module):
    """The layers are registered in the order in which they are not called."""

    def __init__(self):
        super().__init__()
        self.head, self.middle, self.first = nn.Linear(4, 2), nn.Linear(4, 4), nn.Linear(3, 4)

    def forward(self, x):
        return self.head(torch.relu(self.middle(torch.relu(self.first(x)))))


class Keyword(Backwards):
    """No made-up input runs through it."""

    def forward(self, x, *, scale):
        return super().forward(x * scale)


def test_the_last_layer_is_the_last_one_called():
    prox = ProxProp(Backwards())
    assert prox.layers == ("middle", "first")
    assert prox.plain == {"head": "the last layer"}
    assert ProxProp(Backwards(), skip_last=False).layers == ("head", "middle", "first")


@pytest.mark.parametrize("fused", [False, True])
def test_an_unreadable_forward_shows_its_last_layer_in_the_first_pass(fused):
    """The gradients are those of a ProxProp that is told which layer to leave out."""
    torch.manual_seed(0)
    model, x = Keyword(), torch.randn(5, 3)
    told: tuple[dict, ...] = ({}, {"exclude": "head"}, {"skip_last": False, "exclude": "head"})
    found = []
    for net, options in zip((model, copy.deepcopy(model), copy.deepcopy(model)), told, strict=True):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        prox = ProxProp(net, fused=fused, **options).attach(optimizer)
        copy.deepcopy(net)(x, scale=2.0).sum().backward()  # is another network
        for _ in range(3):
            optimizer.zero_grad()
            net(x, scale=2.0).square().sum().backward()
            optimizer.step()
        assert prox.layers == ("middle", "first")
        assert "head" in prox.plain
        found.append([p.grad.clone() for p in net.parameters()])
        prox.detach()
        assert {"middle", "first"} <= set(prox.layers)
    assert not any(module._forward_pre_hooks for module in model.modules())
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=0)
    torch.testing.assert_close(found[1], found[2], rtol=0, atol=0)


def test_finding_the_layers_leaves_no_trace():
    torch.manual_seed(0)
    model = FORWARDS["resnet"].make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    ProxProp(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Pair(nn.Module):
    def __init__(self, doubled=False):
        super().__init__()
        self.b, self.a, self.doubled = nn.Linear(2, 2, bias=False), nn.Linear(3, 2, bias=False), doubled

    def forward(self, x):
        out = self.b(F.relu(self.a(x)))
        return out * 2 if self.doubled else out


def test_the_bound_of_a_written_chain_is_that_of_the_listed_one():
    net, x, residual = Pair(), torch.randn(6, 3), torch.randn(6, 2)
    assert polar_bound(net, x, residual) == polar_bound(nn.Sequential(net.a, nn.ReLU(), net.b), x, residual)
    assert polar_bound(net, x.double(), residual)[0] < float("inf")
    assert polar_bound(Pair(doubled=True), x, residual) == NO_BOUND

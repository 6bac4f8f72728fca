"""LPOM on graphs: its gradient tends to backpropagation's, its energy is the loss at a forward pass and never rises."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from minimand.errors import (
    CapabilityError,
    ChainError,
    MinimandError,
    NonFiniteError,
    NotProximal,
    OptionError,
    ShapeError,
)
from minimand.train.lifted import LPOM, MAC, BlockPenalty, LiftedReLU, SplitADMM
from minimand.train.lifted.blocks import GraphBlocks, _Segment
from minimand.train.lifted.changes import change_of, secant_change


class _Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class _ResNet(nn.Module):
    """The structure of ResNet-20, with fewer blocks."""

    def __init__(self, width=4, blocks=1, classes=3):
        super().__init__()
        layers, inputs = [nn.Conv2d(2, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()], width
        for stage in range(3):
            for block in range(blocks):
                outputs = width * 2**stage
                layers.append(_Residual(inputs, outputs, 2 if stage and block == 0 else 1))
                inputs = outputs
        self.layers, self.fc = nn.Sequential(*layers), nn.Linear(inputs, classes)

    def forward(self, x):
        return self.fc(F.adaptive_avg_pool2d(self.layers(x), 1).view(x.size(0), -1))


class _UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.up, self.norm = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.GroupNorm(2, 8)
        self.mix, self.out = nn.Conv2d(8, 4, 3, padding="same"), nn.Conv2d(4, 3, 1)

    def forward(self, x):
        first = torch.relu(self.down1(x))
        second = torch.relu(self.down2(F.max_pool2d(first, 2)))
        return self.out(torch.relu(self.mix(self.norm(torch.cat([self.up(second), first], 1)))))


class _Branches(nn.Module):
    """Two branches, a concatenation, a reused layer, two outputs."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.twice = nn.Linear(6, 4), nn.Linear(6, 3), nn.Linear(7, 7)
        self.one, self.two, self.scale = nn.Linear(7, 2), nn.Linear(7, 3), nn.Parameter(torch.rand(7))

    def forward(self, x):
        both = torch.cat([torch.tanh(self.left(x)), F.softplus(self.right(x))], dim=1)
        for _ in range(2):
            both = both + 0.5 * torch.sigmoid(self.twice(both))
        return self.one(both * self.scale), 2.0 - torch.relu(self.two(both)) / 3


class _Shuffled(nn.Module):
    """Channels in two groups that are shuffled by a transposition, with a normalisation of every image."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.second, self.out = nn.Conv2d(4, 4, 3, groups=2), nn.Linear(4, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        n, c, h, w = x.size()
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, -1, h, w)
        return self.out(F.leaky_relu(self.second(x)).mean([2, 3]))


class _Steep(nn.Module):
    def forward(self, x):
        return 3 * x + x.abs()


class _Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)) + x)


def _dense(*layers):
    return nn.Sequential(*layers, nn.Linear(6, 3))


IMAGE, VECTOR, SIGNAL = (5, 2, 8, 8), (5, 6), (5, 2, 8)
#: Networks with the shape of their inputs.
GRAPHS = {
    "skip": (_Skip, VECTOR),
    "branches": (_Branches, VECTOR),
    "resnet": (_ResNet, IMAGE),
    "unet": (_UNet, IMAGE),
    "shuffled": (_Shuffled, IMAGE),
    "ends in an activation": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3), nn.Sigmoid()), VECTOR),
    "dropout": (lambda: _dense(nn.Linear(6, 6), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.5)), VECTOR),
    "layer norm": (lambda: _dense(nn.Linear(6, 6), nn.LayerNorm(6), nn.ELU()), VECTOR),
    "own activation": (lambda: _dense(nn.Linear(6, 6), _Steep(), nn.Linear(6, 6), nn.Tanh()), VECTOR),
    "two activations": (lambda: _dense(nn.Linear(6, 6), nn.Tanh(), nn.ReLU()), VECTOR),
    "tokens": (lambda: _dense(nn.Embedding(7, 2), nn.Linear(2, 2), nn.Tanh(), nn.Flatten()), ()),
    "activation after pooling": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.AvgPool2d(2), nn.SELU(), nn.Flatten(), nn.Linear(27, 3)),
        IMAGE,
    ),
    "signals": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 4, padding="same", groups=2), nn.BatchNorm1d(4), nn.LeakyReLU(0.1), nn.MaxPool1d(2),
            nn.Conv1d(4, 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3),
        ),
        SIGNAL,
    ),
    "upsampling": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, stride=2), nn.Hardtanh(), nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.Conv2d(3, 3, 2), nn.ReLU(inplace=True), nn.AdaptiveMaxPool2d(2),
        ),
        IMAGE,
    ),
}  # fmt: skip


def _problem(name, loss="squared", dtype=torch.float64):
    torch.manual_seed(0)
    make, shape = GRAPHS[name]
    net = make().to(dtype)
    x = torch.randn(shape, dtype=dtype) if shape else torch.randint(0, 7, (5, 3))
    with torch.no_grad():
        outputs = net(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    labels = [torch.randint(0, out.shape[1], (out.shape[0], *out.shape[2:])) for out in outputs]
    targets = labels if loss == "cross_entropy" else [torch.rand_like(out) for out in outputs]
    return net, x, tuple(targets) if len(targets) > 1 else targets[0]


def _loss(net, x, y, loss="squared"):
    outputs, targets = net(x), y
    pairs = zip(outputs, targets, strict=True) if isinstance(outputs, tuple) else ((outputs, targets),)
    if loss == "squared":
        return sum(0.5 * (out - target).square().sum() for out, target in pairs)
    return sum(F.cross_entropy(out, target, reduction="sum") for out, target in pairs)


def _gradients(net):
    found = torch.cat([p.grad.flatten() for p in net.parameters()])
    net.zero_grad(set_to_none=True)
    return found


def _backpropagated(net, x, y, loss="squared", seed=1):
    net.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    value = _loss(net, x, y, loss)
    value.backward()
    return float(value.detach()), _gradients(net)


def _lifted(method, x, y, reduction="sum", seed=1):
    torch.manual_seed(seed)
    value = method.backward(x, y, reduction=reduction)
    return value, _gradients(method.model)


pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
@pytest.mark.parametrize("name", GRAPHS)
def test_gradients_tend_to_backpropagation(name, loss):
    """At μ = 1e10 everywhere, with the same masks of dropout, in float64."""
    if name == "ends in an activation" and loss == "cross_entropy":
        loss = "squared"
    net, x, y = _problem(name, loss)
    value, expected = _backpropagated(net, x, y, loss)
    ours, found = _lifted(LPOM(net, mu=1e10, loss=loss, example=x), x, y)
    assert ours == pytest.approx(value)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("mu", [0.3, 1.0, 5.0])
def test_squared_loss_needs_no_large_mu_at_the_output(mu):
    net, x, y = _problem("skip")
    _, expected = _backpropagated(net, x, y)
    _, found = _lifted(LPOM(net, mu=(1e10, mu)), x, y)
    torch.testing.assert_close((1 + mu) / mu * found, expected, rtol=1e-6, atol=1e-8)


def test_gradients_approach_backpropagation_with_the_ratio():
    net, x, y = _problem("branches")
    _, expected = _backpropagated(net, x, y)
    cosines = []
    for ratio in (1.0, 0.1, 0.01):
        units = len(LPOM(net).mu) - 2
        mu = [ratio ** -(units - k) for k in range(units)] + [1.0, 1.0]
        cosines.append(float(F.cosine_similarity(_lifted(LPOM(net, mu=mu), x, y)[1], expected, dim=0)))
    assert cosines == sorted(cosines)
    assert cosines[-1] > 0.999


def test_gradients_at_finite_mu_are_the_formula():
    """Layer by layer: X = φ(z + (μ⁺/μ)(X⁺ − φ(z⁺))W), and the gradient μ(φ(z) − X)ᵀX of the layer below."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    x, y = torch.randn(7, 4).double(), torch.randn(7, 2).double()
    mu, phi = (4.0, 2.0, 0.5), (torch.tanh, torch.relu, lambda z: z)
    with torch.no_grad():
        xs, zs = [x], []
        for layer, act in zip(net[::2], phi, strict=True):
            zs.append(layer(xs[-1]))
            xs.append(act(zs[-1]))
        moved = (mu[2] * zs[2] + y) / (1 + mu[2])
        expected = []
        for k in (2, 1, 0):
            error = mu[k] * (phi[k](zs[k]) - moved)
            expected = [error.mT @ xs[k], error.sum(0), *expected]
            if k:
                moved = phi[k - 1](zs[k - 1] - error @ net[2 * k].weight / mu[k - 1])
    LPOM(net, mu=mu).backward(x, y, reduction="sum")
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_twelve_sigmoid_layers_do_not_underflow():
    """In float32, at the default ratio 0.1, to 1e-4 of the values in float64."""
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(8, 8), nn.Sigmoid())]
    net = nn.Sequential(*layers, nn.Linear(8, 3))
    x, y = torch.randn(16, 8), torch.randint(0, 3, (16,))
    LPOM(net, loss="cross_entropy").backward(x, y)
    found = [parameter.grad.clone() for parameter in net.parameters()]
    net = net.double()
    net.zero_grad(set_to_none=True)
    LPOM(net, loss="cross_entropy").backward(x.double(), y)
    for single, parameter in zip(found, net.parameters(), strict=True):
        assert float(single.abs().max()) > 0
        torch.testing.assert_close(
            single.double(), parameter.grad, rtol=1e-3, atol=1e-4 * parameter.grad.abs().max().item()
        )


ACTIVATIONS = [
    nn.ReLU(), nn.LeakyReLU(0.2), nn.LeakyReLU(3.0), nn.ReLU6(), nn.Hardtanh(-1, 2), nn.Hardsigmoid(), nn.Sigmoid(),
    nn.Tanh(), nn.Softplus(), nn.Softplus(beta=3.0), nn.LogSigmoid(), nn.ELU(), nn.ELU(2.0), nn.CELU(0.5), nn.SELU(),
]  # fmt: skip


@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
def test_changes_are_differences_without_cancellation(act):
    """In float64 the difference itself for long steps, and for short ones the derivative, in float32 as well."""
    z = torch.linspace(-8, 8, 401, dtype=torch.float64) + 1e-3
    change = change_of(act)
    for t, size in ((1.0, 3.0), (0.1, 20.0), (1e-3, 1.0)):
        p = size * torch.sin(7 * z)
        expected = (act(z + t * p) - act(z)) / t
        torch.testing.assert_close(change(z, p, t), expected, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(secant_change(act, z, p, t), expected, rtol=1e-7, atol=1e-7)
    point, p = z.clone().requires_grad_(), torch.cos(5 * z)
    (slope,) = torch.autograd.grad(act(point).sum(), point)
    for t in (1e-9, 1e-18):
        torch.testing.assert_close(change(z.float(), p.float(), t), (slope * p).float(), rtol=2e-5, atol=1e-7)
        torch.testing.assert_close(
            change(z.float(), 1e-25 * p.float(), t), (slope * 1e-25 * p).float(), rtol=2e-5, atol=1e-33
        )


@pytest.mark.parametrize("name", ["resnet", "unet"])
def test_backward_trains_with_an_optimizer(name):
    torch.manual_seed(0)
    net, x, y = _problem(name, "cross_entropy", torch.float32)
    lpom = LPOM(net, loss="cross_entropy", example=x)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1 if name == "resnet" else 0.003, momentum=0.9)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        losses.append(lpom.backward(x, y))
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", ["resnet", "shuffled"])
def test_backward_adds_means_and_moves_nothing_but_statistics(name):
    net, x, y = _problem(name)
    lpom, kept = LPOM(net, example=x), [p.detach().clone() for p in net.parameters()]
    twin = _problem(name)[0]
    value, total = _lifted(lpom, x, y)
    mean, first = _lifted(lpom, x, y, "mean")
    assert mean == pytest.approx(value / 5)
    torch.testing.assert_close(first, total / 5)
    lpom.backward(x, y)
    lpom.backward(x, y)
    torch.testing.assert_close(_gradients(net), 2 * first)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), kept, strict=True))
    with torch.no_grad():
        for _ in range(4):
            twin(x)
    for ours, theirs in zip(net.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


class _Converted(_Skip):
    def forward(self, x):
        hidden = torch.relu(self.first(x.to(self.first.weight.dtype).mul(2).sub(1)))
        return self.second(hidden.to(torch.bfloat16).to(self.second.weight.dtype))


def test_conversions_of_type_are_computed():
    """Images in whole numbers become numbers of the weights' type, and a type of fewer digits rounds."""
    torch.manual_seed(0)
    net, x, y = _Converted(), torch.randint(0, 255, (8, 6), dtype=torch.uint8), torch.randn(8, 3)
    lpom = LPOM(net, example=x)
    expected = float(_loss(net, x, y).detach())
    assert lpom.energy(x, y) == pytest.approx(expected, rel=1e-6)
    assert lpom.backward(x, y, reduction="sum") == pytest.approx(expected, rel=1e-6)


def test_nothing_is_differentiated(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("autograd was called")

    for name in GRAPHS:
        net, x, y = _problem(name)
        for place, attribute in ((torch.autograd, "grad"), (torch.autograd, "backward"), (torch.Tensor, "backward")):
            monkeypatch.setattr(place, attribute, refuse)
        lpom = LPOM(net, example=x)
        lpom.backward(x, y)
        lpom.step(x, y)


@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
@pytest.mark.parametrize("name", GRAPHS)
def test_energy_is_the_loss_and_never_rises(name, loss):
    net, x, y = _problem(name, loss)
    lpom = LPOM(net, loss=loss, example=x)
    torch.manual_seed(1)
    with torch.no_grad():
        expected = float(_loss(net, x, y, loss)) if name != "resnet" else None
    torch.manual_seed(1)
    energies = [lpom.energy(x, y)]
    if expected is not None:
        assert energies[0] == pytest.approx(expected)
    torch.manual_seed(1)
    energies += [lpom.step(x, y) for _ in range(6)]
    assert all(after <= before + 1e-9 * abs(before) for before, after in itertools.pairwise(energies))
    assert energies[-1] < energies[0]
    assert lpom.energy(x, y) == energies[-1]


@pytest.mark.parametrize("scale", [1e-6, 1e3, 1e6])
def test_energy_never_rises_whatever_the_scale_of_the_weights(scale):
    """The gap of an output is a square, however large the numbers whose difference is squared."""
    torch.manual_seed(2)
    net, x, y = _Skip().double(), torch.randn(10, 6).double(), torch.arange(10) % 3
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(scale)
    lpom = LPOM(net, loss="cross_entropy", example=x)
    energies = [lpom.energy(x, y), *(lpom.step(x, y) for _ in range(12))]
    assert all(after <= before + 1e-12 * abs(before) for before, after in itertools.pairwise(energies))


class _Random(nn.Module):
    """A random acyclic graph: each node adds or concatenates linear maps of earlier nodes, then an activation."""

    def __init__(self, choices):
        super().__init__()
        widths, self.plan, self.maps = [4], [], nn.ModuleList()
        for first, second, join, act in choices:
            sources = (first % len(widths), second % len(widths))
            self.maps.append(nn.ModuleList([nn.Linear(widths[source], 3) for source in sources]))
            self.plan.append((sources, join, act))
            widths.append(6 if join else 3)
        self.out = nn.Linear(widths[-1], 2)

    def forward(self, x):
        nodes = [x]
        for maps, (sources, join, act) in zip(self.maps, self.plan, strict=True):
            parts = [layer(nodes[source]) for layer, source in zip(maps, sources, strict=True)]
            z = torch.cat(parts, 1) if join else parts[0] + parts[1]
            nodes.append((torch.relu, torch.tanh, torch.sigmoid, F.softplus)[act](z))
        return self.out(nodes[-1])


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans(), st.integers(0, 3)), min_size=1, max_size=4),
    st.integers(0, 99),
)
def test_theorem_4_on_random_graphs(choices, seed):
    """F is convex in each activation and each weight alone, and steps never raise it."""
    torch.manual_seed(seed)
    net = _Random(choices).double()
    x, y = torch.randn(6, 4).double(), torch.randn(6, 2).double()
    lpom = LPOM(net, example=x)
    energies = [lpom.energy(x, y)] + [lpom.step(x, y) for _ in range(3)]
    assert all(after <= before + 1e-10 * abs(before) for before, after in itertools.pairwise(energies))
    with torch.no_grad():
        for values in _blocks_of(lpom, x, y):
            low, middle, high = (_energy_along(lpom, x, y, values, t, seed) for t in (-1.0, 0.0, 1.0))
            assert middle <= 0.5 * (low + high) + 1e-9 * (1 + abs(middle))


def _blocks_of(lpom, x, y):
    blocks = lpom._graph_blocks(x, y)
    return [*range(len(blocks.program.units)), *blocks._modules()]


def _energy_along(lpom, x, y, block, t, seed):
    blocks: GraphBlocks = lpom._graph_blocks(x, y)
    g = torch.Generator().manual_seed(seed)
    if isinstance(block, int):
        unit = blocks.program.units[block]
        z = blocks.zs[unit] + 0.5 * torch.randn(blocks.zs[unit].shape, generator=g, dtype=torch.float64)
        ends = [unit.unit.phi(z - 0.7), unit.unit.phi(z + 0.7)]
        blocks.xs[unit] = ends[0] if t < 0 else ends[1] if t > 0 else 0.5 * (ends[0] + ends[1])
        blocks._place(unit, blocks.xs[unit])
        blocks.zs.update(blocks._run(_Segment(blocks, unit.outputs)))
    else:
        values = blocks._modules()[block]
        for value in values:
            now = blocks._value(value)
            blocks.sources[value.index] = now + t * torch.randn(now.shape, generator=g, dtype=torch.float64)
        blocks.zs.update(blocks._run(_Segment(blocks, values)))
    return blocks.energy()


# -- the family, optimizers, bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [MAC, BlockPenalty, SplitADMM, LiftedReLU])
def test_the_family_has_gradients(method):
    """The gradient of the energy at the swept variables; each layer's has backpropagation's direction."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    x, y = torch.randn(9, 5).double(), torch.randn(9, 3).double()
    _, expected = _backpropagated(net, x, y)
    made = method(net, mu=(1e6, 1e3, 1.0))
    value, found = _lifted(made, x, y)
    assert value == pytest.approx(float(_loss(net, x, y).detach()))
    if method is not LiftedReLU:
        sizes = [p.numel() for p in net.parameters()]
        for ours, theirs in zip(found.split(sizes), expected.split(sizes), strict=True):
            assert float(F.cosine_similarity(ours, theirs, dim=0)) > 0.99
    assert made.fit([(x, y)], 2, optimizer=torch.optim.SGD(net.parameters(), lr=1e-3))[-1].energy > 0


def test_fit_with_an_optimizer_is_backward_and_step():
    (net, x, y), (twin, _, _) = _problem("skip"), _problem("skip")
    history = LPOM(net).fit([(x, y)] * 3, 2, optimizer=torch.optim.Adam(net.parameters(), lr=0.01))
    lpom, optimizer = LPOM(twin), torch.optim.Adam(twin.parameters(), lr=0.01)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        losses.append(lpom.backward(x, y))
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), twin.parameters(), strict=True))
    assert [epoch.loss for epoch in history] == pytest.approx([sum(losses[:3]) / 3, sum(losses[3:]) / 3])


class _TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.out = nn.Linear(6, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, a, b):
        return self.out(torch.relu(self.one(a) + self.two(b)))


def test_several_inputs_train():
    torch.manual_seed(0)
    x, y = (torch.randn(8, 6), torch.randn(8, 3)), torch.randint(0, 2, (8,))
    net = _TwoInputs()
    lpom = LPOM(net, loss="cross_entropy", example=x)
    energies = [lpom.energy(x, y), lpom.step(x, y), lpom.step(x, y)]
    assert energies == sorted(energies, reverse=True)
    history = lpom.fit([(x, y)] * 3, 3, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    assert history[-1].loss < history[0].loss


class _TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.kind, self.size = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x):
        hidden = torch.relu(self.body(x))
        return self.kind(hidden), self.size(hidden)


def test_every_output_may_have_its_own_loss():
    torch.manual_seed(0)
    net, x = _TwoOutputs(), torch.randn(8, 6)
    y = torch.randint(0, 3, (8,)), torch.randn(8, 2)
    lpom = LPOM(net, loss=("cross_entropy", "squared"))
    kind, size = net(x)
    expected = F.cross_entropy(kind, y[0]) + 0.5 * (size - y[1]).square().sum() / 8
    assert lpom.backward(x, y) == pytest.approx(float(expected.detach()), rel=1e-5)
    energies = [lpom.energy(x, y), *(lpom.step(x, y) for _ in range(4))]
    assert energies == sorted(energies, reverse=True)
    with pytest.raises(OptionError, match="one of them for each output"):
        LPOM(net, loss=("cross_entropy", "mse"))
    with pytest.raises(OptionError, match="the network has one output"):
        LPOM(_dense(nn.Linear(6, 6), nn.ReLU()), loss=("squared", "squared"))


@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
@pytest.mark.parametrize("name", ["resnet", "unet"])
def test_graphs_fit_without_an_optimizer(name, loss):
    """Whatever the scale of the loss, which is summed over positions and features."""
    net, x, y = _problem(name, loss)
    if name == "unet":
        x, y = (F.interpolate(part.double(), scale_factor=4).to(part.dtype) for part in (x, y.reshape(5, -1, 8, 8)))
        y = y.squeeze(1)
    history = LPOM(net, loss=loss, example=x).fit([(x, y)] * 5, 6)
    assert history[-1].loss < history[0].loss


def test_refuses_optimizers_that_would_do_nothing():
    net, x, y = _problem("skip")
    with pytest.raises(OptionError, match="owns no trained parameter"):
        LPOM(net).fit([(x, y)], 1, optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(OptionError, match="takes no optimizer"):
        LPOM(net).fit([(x, y)], 1, "monotone", optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(OptionError, match="reduction"):
        LPOM(net).backward(x, y, reduction="none")


def test_frozen_parameters_have_no_gradient():
    net, x, y = _problem("branches")
    net.left.weight.requires_grad_(False)
    LPOM(net).backward(x, y)
    assert net.left.weight.grad is None
    assert net.left.bias.grad is not None
    net.requires_grad_(False)
    with pytest.raises(MinimandError, match=r"frozen|no parameter that is trained"):
        LPOM(net).backward(x, y)


class _Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.a(x) * torch.tanh(self.b(x))


class _Logarithm(_Product):
    def forward(self, x):
        return self.a(x).log_softmax(1)


class _Stairs(nn.Module):
    def forward(self, x):
        return torch.round(x)


class _Loop(_Product):
    def forward(self, x):
        while float(x.sum()) > 100:
            x = x / 2
        return self.a(x)


@pytest.mark.parametrize(
    ("net", "says"),
    [
        (_Product(), "mul.* multiplies two tensors that both depend on the input"),
        (_Logarithm(), "return the scores before it and use loss='cross_entropy'"),
        (nn.Sequential(nn.Linear(6, 6), nn.GELU(), _Product()), "1 .*not monotone"),
        (nn.Sequential(nn.Linear(6, 6), _Stairs(), nn.Linear(6, 3)), "1 ._Stairs.*slope is not bounded"),
        (nn.Sequential(nn.LSTM(6, 3)), "0"),
        (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), nn.ReLU()), "remove_parametrizations"),
        (nn.TransformerEncoderLayer(6, 2, 4, batch_first=True), "linear|softmax|attn"),
        (nn.ReLU(), "ReLU|trained"),
        (_Loop(), "__float__ reads data.*give every loop a fixed number of passes"),
    ],
    ids=str,
)
def test_names_what_is_neither_linear_nor_monotone(net, says):
    with pytest.raises((ChainError, NotProximal), match=says):
        LPOM(net)


def test_nan_is_named_and_leaves_gradients_and_weights():
    net, x, y = _problem("unet")
    lpom = LPOM(net, example=x)
    kept = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(NonFiniteError, match="input x"):
        lpom.backward(torch.full_like(x, math.nan), y)
    with pytest.raises(NonFiniteError, match="input x"):
        lpom.step(torch.full_like(x, math.nan), y)
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), kept, strict=True))
    with torch.no_grad():
        net.down2.weight.fill_(math.inf)
    with pytest.raises(NonFiniteError, match=r"down2\.weight"):
        lpom.backward(x, y)
    with torch.no_grad():
        net.down2.weight.fill_(1e200)
        net.down1.weight.fill_(1e200)
    with pytest.raises(NonFiniteError, match="forward pass of"):
        lpom.backward(x, y)


def test_batches_that_do_not_fit_are_named():
    net, x, y = _problem("branches")
    lpom = LPOM(net)
    with pytest.raises(ShapeError, match="one target for each"):
        lpom.backward(x, y[0])
    with pytest.raises(ShapeError, match="float32"):
        lpom.backward(x.float(), y)
    with pytest.raises(ShapeError, match=r"does not take x of shape \(5, 5\).*shapes cannot be multiplied"):
        lpom.backward(x[:, :-1], y)
    lpom.backward(x[:2], tuple(target[:2] for target in y))
    with pytest.raises(OptionError, match="jacobi"):
        LPOM(net, sweep="jacobi")


def test_an_interpolation_that_cannot_be_lifted_is_named() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 1, 3), nn.ReLU(), nn.Upsample(scale_factor=2, mode="bicubic"), nn.Conv2d(1, 1, 3)
    )
    x = torch.randn(2, 1, 6, 6)
    with pytest.raises(CapabilityError, match=r"^2.*mode='bicubic' cannot be lifted"):
        LPOM(model, example=x).backward(x, torch.randn(2, 1, 6, 6))

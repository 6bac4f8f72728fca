"""Laws of networks as algorithms as modules: constraints, graphs, copies, states and two ranks."""

import copy

import pytest
import torch
from torch import nn

from minimand.nn import HeavyBallUpdate, Learning, NesterovUpdate, OptimizationNet, coefficient_parameters
from minimand.nn.blocks import AcceleratedUpdate, ADMMUpdate, DenseUpdate, GradientUpdate, MergeUpdate, TwoStreamBlock
from minimand.nn.blocks.network import resolve

from .cases.ranks import on_ranks

UPDATES = [GradientUpdate(), HeavyBallUpdate(), NesterovUpdate(0.3), AcceleratedUpdate(), ADMMUpdate(), MergeUpdate()]
LEARNING = [False, "scalar", "channel", Learning("scalar", "sum"), Learning("channel", "sum")]


def _net(update, learnable=True, width=4, count=4):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]
    if update.streams == 2:
        blocks = [TwoStreamBlock(block, copy.deepcopy(block)) for block in blocks]
        for block in blocks:
            nn.init.normal_(block.second[0].weight, std=0.5)
    return OptimizationNet(blocks, update, learnable=learnable, channels=width)


# Coefficients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", UPDATES[1:], ids=str)
@pytest.mark.parametrize("kind", ["scalar", "channel"])
def test_sums_are_kept_while_coefficients_learn(update, kind):
    net = _net(update, Learning(kind, "sum"))
    before = [row.weight.sum(0).detach().clone() for row in net.coefficients]
    start = [row.weight.detach().clone() for row in net.coefficients]
    _train(net, 5)
    for row, total in zip(net.coefficients, before, strict=True):
        torch.testing.assert_close(row.weight.sum(0), total, atol=1e-5, rtol=1e-5)
    # The first update is at rest: its sum is all that matters, and that is fixed.
    assert not torch.equal(net.coefficients[-1].weight, start[-1])


class Affine(nn.Module):
    """A contraction T with the fixed point (1, …, 1), or T − I, which is zero there."""

    def __init__(self, residual):
        super().__init__()
        self.weight = 0.1 * torch.randn(4, 4, dtype=torch.float64)
        self.residual = residual

    def forward(self, x):
        return (x - 1) @ self.weight + (0 if self.residual else 1)


@pytest.mark.parametrize(
    ("update", "residual"),
    [
        (HeavyBallUpdate(), False),
        (HeavyBallUpdate(1.0, 0.0), True),
        (NesterovUpdate(), False),
        (AcceleratedUpdate(), False),
        (ADMMUpdate(), False),
        (MergeUpdate(0.5, 0.5), True),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["scalar", "channel"])
def test_kept_sums_keep_the_fixed_points(update, residual, kind):
    """A network that starts at a fixed point of its blocks stays there, for all values of the parameters."""
    block = Affine(residual)
    net = OptimizationNet([block] * 5, update, learnable=Learning(kind, "sum"), channels=4).double()
    for weight in coefficient_parameters(net):
        nn.init.normal_(weight)
    x = torch.ones(2, 4, dtype=torch.float64)
    for iterate in net.iterates(x):
        torch.testing.assert_close(iterate, x, atol=1e-10, rtol=0)
    assert (net(x + 0.1) - x).abs().max() > 1e-3


@pytest.mark.parametrize(
    "update",
    [*UPDATES[1:], "gd", "heavy_ball", "nesterov", "admm", HeavyBallUpdate(1.0, 0.0), MergeUpdate(memory=0.5)],
    ids=str,
)
def test_signs_are_kept_while_coefficients_learn(update):
    """A coefficient that starts at 0 has no sign, and stays 0."""
    net = _net(resolve(update), Learning("scalar", "positive"))
    rows = [row for row in net.coefficients if row.start]
    start = [row.weight.detach().clone() for row in rows]
    for row, old in zip(rows, start, strict=True):
        torch.testing.assert_close(old, torch.tensor(row.start))
    _train(net, 20, lr=2.0)
    for row, old in zip(rows, start, strict=True):
        assert torch.isfinite(row.weight).all()
        assert torch.equal(torch.sign(row.weight), torch.sign(old))
    assert not rows or not torch.equal(rows[-1].weight, start[-1])


def _train(net, steps, lr=0.1):
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("update", UPDATES, ids=str)
@pytest.mark.parametrize("learnable", LEARNING, ids=str)
def test_every_parameter_gets_a_gradient(update, learnable):
    """DistributedDataParallel requires it."""
    net = _net(update, learnable)
    net(torch.randn(3, 4)).square().sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    rows = sum(bool(row.start) for row in net.coefficients) if learnable else 0
    assert len(list(coefficient_parameters(net))) == rows


@pytest.mark.parametrize("update", UPDATES, ids=str)
def test_gradients_are_right(update):
    net = _net(update, "channel", count=3).double()
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    rows = [row.weight for row in net.coefficients if row.learned]
    assert torch.autograd.gradcheck(lambda x, *_: net(x), (x, *rows))


# Graphs, copies, states -----------------------------------------------------------------------------------------------


CASES = [(update, learnable) for update in UPDATES for learnable in (False, "channel")] + [
    (HeavyBallUpdate(), Learning("scalar", "sum")),
    (HeavyBallUpdate(), Learning("scalar", "positive")),
]


def _all(learnable):
    """Every update in one network, because compiling takes long."""
    signed = isinstance(learnable, Learning) and learnable.constraint == "positive"
    updates = [HeavyBallUpdate(), NesterovUpdate(0.3), ADMMUpdate()] if signed else UPDATES
    return nn.Sequential(*(_net(update, learnable, count=2) for update in updates))


GRAPHS = [False, "channel", Learning("scalar", "sum"), Learning("scalar", "positive")]


@pytest.mark.parametrize("learnable", GRAPHS, ids=str)
def test_compiles_without_a_graph_break(learnable):
    torch._dynamo.reset()
    net, x = _all(learnable), torch.randn(3, 4)
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    y = compiled(x)
    torch.testing.assert_close(y, net(x))
    y.sum().backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("learnable", GRAPHS, ids=str)
def test_exports(learnable):
    net, x = _all(learnable).eval(), torch.randn(3, 4)
    torch.testing.assert_close(torch.export.export(net, (x,)).module()(x), net(x))


@pytest.mark.parametrize(("update", "learnable"), CASES, ids=str)
def test_copies_and_states(update, learnable):
    net, x = _net(update, learnable), torch.randn(3, 4)
    _train(net, 2)
    twin = copy.deepcopy(net)
    torch.testing.assert_close(twin(x), net(x), atol=0, rtol=0)
    _train(twin, 2)
    assert not torch.equal(twin(x), net(x))
    fresh = _net(update, learnable)
    fresh.load_state_dict(net.state_dict())
    torch.testing.assert_close(fresh(x), net(x), atol=0, rtol=0)


@pytest.mark.parametrize("update", UPDATES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_follows_the_input(update, dtype):
    net = _net(update, "channel").to(dtype)
    assert net(torch.randn(3, 4, dtype=dtype)).dtype == dtype


def test_autocast_of_convolutions():
    net = OptimizationNet(
        [nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)], "heavy_ball", learnable="channel", channels=4
    )
    x = torch.randn(2, 4, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net(x)
        y.float().sum().backward()
    torch.testing.assert_close(y.float(), net(x), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("learnable", ["scalar", "channel"])
@pytest.mark.parametrize("update", [*UPDATES, DenseUpdate()], ids=str)
def test_iterates_stay_in_the_precision_of_autocast(update, learnable):
    """A coefficient per channel is a float32 tensor and does not promote the iterates."""
    widths = [4, 8, 12] if isinstance(update, DenseUpdate) else [4] * 3
    net = OptimizationNet([nn.Conv2d(w, 4, 1) for w in widths], update, learnable=learnable, channels=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert net(torch.randn(2, 4, 3, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def _worker(rank):
    module = _all(Learning("scalar", "sum")).double()
    return _two_steps(nn.parallel.DistributedDataParallel(module), module, slice(4 * rank, 4 * rank + 4))


def _two_steps(net, module, rows):
    x = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for batch in x:
        optimizer.zero_grad()
        net(batch[rows]).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in module.parameters()]


def test_two_ranks_equal_one_process():
    together, _ = on_ranks(_worker)
    module = _all(Learning("scalar", "sum")).double()
    alone = _two_steps(module, module, slice(0, 8))
    torch.testing.assert_close(together, alone, atol=1e-12, rtol=1e-10)


# Memory ---------------------------------------------------------------------------------------------------------------


def _saved(update, learnable, count):
    """Bytes of distinct tensors that the backward pass holds, without parameters."""
    net = OptimizationNet(
        [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(count)], update, learnable=learnable
    )
    own = {p.data_ptr() for p in net.parameters()}
    held = {}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            held[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = net(torch.randn(64, 32, requires_grad=True))
    assert output.requires_grad
    return sum(t.numel() * t.element_size() for t in held.values() if t.numel() > 2000)


@pytest.mark.parametrize("learnable", [False, True])
def test_momentum_holds_no_more_than_the_plain_residual_network(learnable):
    plain = _saved(HeavyBallUpdate(1.0, 0.0), False, 8)
    assert _saved(HeavyBallUpdate(), learnable, 8) <= plain * (1.2 if learnable else 1.0)


def test_the_algorithm_in_all_past_terms_needs_no_history():
    """With fixed coefficients memory per block is that of the heavy ball, and the live state does not grow."""
    grown = _saved(AcceleratedUpdate(), False, 16) - _saved(AcceleratedUpdate(), False, 8)
    assert grown <= _saved(HeavyBallUpdate(), False, 16) - _saved(HeavyBallUpdate(), False, 8)
    net = OptimizationNet([nn.Identity()] * 5, AcceleratedUpdate())
    state = net.update.start((torch.ones(1, 2),), False)
    for k in range(5):
        state = net._advance(state, k)
    assert state.values == state.points == ()


def test_the_sum_of_all_values_needs_no_history():
    """Fixed α = 1, β = 0: x⁺ = Σ T(x_j) with one running sum equals learned coefficients at these values."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double() for _ in range(5)]
    x = torch.randn(2, 3, dtype=torch.float64)
    net = OptimizationNet(blocks, AcceleratedUpdate("dense"), activation=nn.ReLU())
    y, total = x, torch.zeros_like(x)
    for block in blocks:
        total = total + block(y)
        y = torch.relu(total)
    torch.testing.assert_close(net(x), y, atol=0, rtol=0)
    full = OptimizationNet(blocks, AcceleratedUpdate("dense"), learnable=True, activation=nn.ReLU()).double()
    torch.testing.assert_close(full(x), y)
    state = net.update.start((x,), False)
    for k in range(5):
        state = net._advance(state, k)
    assert state.values == state.points == ()
    grown = _saved(AcceleratedUpdate("dense"), False, 16) - _saved(AcceleratedUpdate("dense"), False, 8)
    assert grown <= _saved(HeavyBallUpdate(), False, 16) - _saved(HeavyBallUpdate(), False, 8)

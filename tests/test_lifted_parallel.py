"""Laws: layers on two or three ranks train like one process; asynchronous ranks reach its accuracy."""

import itertools
import os
import statistics
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from minimand.errors import CapabilityError, MinimandError, NonFiniteError, OptionError, ReadOnlyError, ShapeError
from minimand.solvers.linear import ridge_factor
from minimand.train.lifted import LPOM, LayerParallel, layer_stages, sweeps
from minimand.train.lifted.chain import parse
from minimand.train.lifted.stages import cheapest_cuts, partition_layers

from .cases.ranks import on_ranks

EPOCHS = 5


def _net(seed=0):
    torch.manual_seed(seed)
    sizes = (64, 40, 30, 20, 10)
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _normalized():
    torch.manual_seed(0)
    parts = (nn.Linear(64, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 20), nn.BatchNorm1d(20), nn.ReLU())
    return nn.Sequential(*parts, nn.Linear(20, 10)).double()


def _data():
    """Ten noisy clusters; generated data keeps the workers' start fast."""
    g = torch.Generator().manual_seed(0)
    centers = torch.randn(10, 64, generator=g)
    labels = torch.randint(10, (1600,), generator=g)
    images = centers[labels] + 2.2 * torch.randn(1600, 64, generator=g)
    return (images[:1088], labels[:1088]), (images[1088:], labels[1088:])


def _batches(x, y):
    return list(zip(x.split(64), y.split(64), strict=True))


def _accuracy(net, x, y):
    with torch.no_grad():
        return 100 * float((net(x).argmax(1) == y).float().mean())


def _worker(rank):
    train, test = _data()
    together = _net().double()
    batches = [(x.double(), y) for x, y in _batches(*train)[:6]]
    LayerParallel(LPOM(together, sweep="jacobi")).fit(batches, 1)
    _alone(batches, together)
    normalized = _normalized()
    before = [buffer.clone() for buffer in normalized.buffers()]
    parallel = LayerParallel(LPOM(normalized, sweep="jacobi"))
    for loader, epochs in ((iter(batches), 2), ([], 1), (batches, -1)):
        with pytest.raises(OptionError):
            parallel.fit(loader, epochs)
    _refusals(parallel, batches)
    assert all(torch.equal(a, b) for a, b in zip(normalized.buffers(), before, strict=True))
    for _ in range(2):
        parallel.fit(batches, 1)
    accuracies = []
    for seed in range(3):
        alone = _net(seed)
        LayerParallel(LPOM(alone), asynchronous=True).fit(_batches(*train), EPOCHS)
        accuracies.append(_accuracy(alone, *test))
    tensors = [*together.parameters(), *normalized.state_dict().values()]
    return [tensor.detach() for tensor in tensors], accuracies


def _alone(batches, together):
    """A process that holds its own layers only trains the same; other shapes later on stop every process."""
    apart = _net().double()
    parallel = LayerParallel(LPOM(apart, sweep="jacobi"), gather=False)
    with pytest.raises(MinimandError):
        parallel.fit([(batches[0][0], batches[0][1] + 100)], 1)
    own = {f"{layer.path}.{part}" for layer in parallel.layers for part in ("weight", "bias")}
    assert {name for name, parameter in apart.named_parameters() if not parameter.is_meta} == own
    parallel.fit(batches, 1)
    assert {name for name, parameter in apart.named_parameters() if not parameter.is_meta} == own
    parallel.gather()
    assert all(torch.equal(p, q) for p, q in zip(apart.parameters(), together.parameters(), strict=True))
    x, y = batches[0]
    # Sums of equal batches are rounded differently by processes with other numbers of threads.
    LayerParallel(LPOM(_net().double())).fit([(x * (1 + 1e-13 * dist.get_rank()), y)], 1)
    with pytest.raises(ShapeError, match="those before had"):
        parallel.fit([(x, y), (x[:, 1:], y)], 1)


def _refusals(parallel, batches):
    """Bad batches, frozen layers and settings without effect stop every process, before it sends anything."""
    x, y = batches[0]
    for bad in ((x * float("nan"), y), (x, y + 100), (x, torch.full((len(x), 10), torch.nan)), (x.float(), y)):
        with pytest.raises(MinimandError):
            parallel.fit([bad], 1)
    rank = dist.get_rank()
    with pytest.raises(OptionError, match="rank 0 and rank 1 iterate different batches"):
        parallel.fit([(x.flip(0), y.flip(0)), (x, y)][:: 1 - 2 * (rank == 1)], 1)
    with pytest.raises(OptionError, match="rank 0 and rank 1 iterate different batches"):
        parallel.fit([(x, y)] * (1 + (rank > 0)), 1)
    model, last = parallel.method.model, parallel.method.chain.layers[-1]
    weight = float(last.weight[0, 0])
    last.weight.data[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=f"weight and bias of {last.path}"):
        parallel.fit([(x, y)], 1)
    last.weight.data[0, 0] = weight
    model.requires_grad_(False)
    with pytest.raises(OptionError, match="every layer is frozen"):
        parallel.fit([(x, y)], 1)
    model.requires_grad_(True)
    for name in ("staleness", "asynchronous", "group", "method", "parts", "misspelt"):
        with pytest.raises(ReadOnlyError, match=f"LayerParallel.{name} cannot be set"):
            setattr(parallel, name, 1)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_equal_one_process(world):
    found = on_ranks(_worker, world)
    train, test = _data()
    batches = [(x.double(), y) for x, y in _batches(*train)[:6]]
    single, normalized = _net().double(), _normalized()
    LPOM(single, sweep="jacobi").fit(batches, 1)
    method = LPOM(normalized, sweep="jacobi")
    for _ in range(2):
        method.fit(batches, 1)
    expected = [p.detach() for p in (*single.parameters(), *normalized.state_dict().values())]
    for tensors, _ in found:
        torch.testing.assert_close(tensors, expected, atol=1e-6, rtol=1e-6)
    accuracies = []
    for seed in range(3):
        net = _net(seed)
        LPOM(net, sweep="jacobi").fit(_batches(*train), EPOCHS)
        accuracies.append(_accuracy(net, *test))
    late = found[0][1]
    assert all(seen == late for _, seen in found)
    # In the mean over the seeds, it loses no more than the seeds differ by.
    assert statistics.fmean(late) >= statistics.fmean(accuracies) - (max(accuracies) - min(accuracies))


def _left_alone(rank, meeting, asynchronous):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    train, _ = _data()
    net = _net()
    kept = [p.detach().clone() for p in net.parameters()]

    def batches():
        yield from _batches(*train)[:3]
        if rank == 1:
            os._exit(0)
        yield from _batches(*train)[3:]

    with pytest.raises(MinimandError, match="another process of the group has stopped"):
        LayerParallel(LPOM(net), asynchronous=asynchronous).fit(batches(), 1)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), kept, strict=True))
    os._exit(0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_process_that_is_left_alone_stops_with_its_weights(asynchronous, tmp_path):
    mp.spawn(_left_alone, args=((tmp_path / "meeting").as_uri(), asynchronous), nprocs=2)


def test_layers_are_spread_evenly():
    layers = parse(_net()).layers
    assert partition_layers(layers, 1) == [(0, 4)]
    assert partition_layers(layers, 2) == [(0, 1), (1, 4)]
    assert partition_layers(layers, 4) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    with pytest.raises(OptionError, match="5 processes"):
        partition_layers(layers, 5)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.data())
def test_cuts_are_the_best_of_all(costs, data):
    """Against all ways to cut."""
    parts = data.draw(st.integers(1, len(costs)))
    found = cheapest_cuts(costs, parts)
    assert [start for start, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == len(costs)
    assert all(start < end for start, end in found)
    worst = min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))
        for cuts in itertools.combinations(range(1, len(costs)), parts - 1)
    )
    assert max(sum(costs[a:b]) for a, b in found) == worst


def test_many_layers_are_cut_at_once():
    """48 layers on 8 ranks have 63 million ways."""
    found = cheapest_cuts([float(1 + k % 5) for k in range(48)], 8)
    assert len(found) == 8
    assert max(sum(1 + k % 5 for k in range(*part)) for part in found) <= 20


def test_stages_sum_to_one_process():
    (x, y), _ = _data()
    net = _net()
    kept = [p.detach().clone() for p in net.parameters()]
    one, two = (layer_stages(LPOM(net), x[:64], y[:64], ranks) for ranks in (1, 2))
    assert one.speedup == 1
    assert [stage.layers for stage in two.stages] == [("0",), ("2", "4", "6")]
    assert two.stages[0].up == two.stages[1].down == 64 * 40 * 4
    assert 0 < two.speedup <= 2
    assert "rank" in str(two)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), kept, strict=True))
    with pytest.raises(OptionError, match="5 processes for 4 layers"):
        layer_stages(LPOM(net), x[:64], y[:64], 5)
    graph = nn.Sequential(nn.Linear(64, 10), nn.LayerNorm(10), nn.ReLU(), nn.Linear(10, 10))
    with pytest.raises(CapabilityError, match="graph"):
        layer_stages(LPOM(graph), x[:64], y[:64], 1)


def test_the_cost_model_counts_inverses_as_often_as_training_renews_them(monkeypatch):
    spent, renewals = 0.02, []

    def slow(*args):
        renewals.append(begin := time.process_time())
        while time.process_time() < begin + spent:
            pass
        return ridge_factor(*args)

    (x, y), _ = _data()
    method = LPOM(_net())
    plain = layer_stages(method, x[:64], y[:64], 1).seconds
    monkeypatch.setattr(sweeps, "ridge_factor", slow)
    found = layer_stages(method, x[:64], y[:64], 1).seconds - plain
    renewals.clear()
    method.fit([(x[:64], y[:64])] * 16, 1)
    assert found == pytest.approx(spent * len(renewals) / 16, rel=0.5)


def test_needs_a_process_group():
    with pytest.raises(CapabilityError, match="process group"):
        LayerParallel(LPOM(_net()))

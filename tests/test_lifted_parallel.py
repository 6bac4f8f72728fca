"""Laws: layers on two or three ranks train like one process; asynchronous ranks reach its accuracy."""

import itertools
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from minimand.errors import CapabilityError, OptionError
from minimand.train.lifted import LPOM, LayerParallel
from minimand.train.lifted.chain import parse
from minimand.train.lifted.parallel import stretches

EPOCHS = 5


def _net(seed=0):
    torch.manual_seed(seed)
    sizes = (64, 40, 30, 20, 10)
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _data():
    """Ten noisy clusters: workers that start in no time."""
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(10, 64, generator=g)
    labels = torch.randint(10, (1600,), generator=g)
    images = centres[labels] + 2.2 * torch.randn(1600, 64, generator=g)
    return (images[:1088], labels[:1088]), (images[1088:], labels[1088:])


def _batches(x, y):
    return list(zip(x.split(64), y.split(64), strict=True))


def _accuracy(net, x, y):
    with torch.no_grad():
        return 100 * float((net(x).argmax(1) == y).float().mean())


def _worker(rank, world, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    train, test = _data()
    together = _net().double()
    batches = [(x.double(), y) for x, y in _batches(*train)[:6]]
    LayerParallel(LPOM(together, sweep="jacobi")).fit(batches, 1)
    alone = _net()
    history = LayerParallel(LPOM(alone), asynchronous=True).fit(_batches(*train), EPOCHS)
    results[rank] = ([p.detach().numpy() for p in together.parameters()], _accuracy(alone, *test), history[-1].energy)
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_equal_one_process(world):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_worker, args=(world, port, results), nprocs=world)
        found = [results[rank] for rank in range(world)]
    train, test = _data()
    single = _net().double()
    LPOM(single, sweep="jacobi").fit([(x.double(), y) for x, y in _batches(*train)[:6]], 1)
    for weights, _, _ in found:
        ours = [torch.from_numpy(w) for w in weights]
        torch.testing.assert_close(ours, [p.detach() for p in single.parameters()], atol=1e-6, rtol=1e-6)
    accuracies = []
    for seed in range(3):
        net = _net(seed)
        LPOM(net, sweep="jacobi").fit(_batches(*train), EPOCHS)
        accuracies.append(_accuracy(net, *test))
    assert found[0][1] == found[-1][1]
    assert found[0][1] >= min(accuracies) - 2


def test_layers_are_spread_evenly():
    layers = parse(_net()).layers
    assert stretches(layers, 1) == [(0, 4)]
    assert stretches(layers, 2) == [(0, 1), (1, 4)]
    assert stretches(layers, 4) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    with pytest.raises(OptionError, match="5 processes"):
        stretches(layers, 5)


def test_needs_a_process_group():
    with pytest.raises(CapabilityError, match="process group"):
        LayerParallel(LPOM(_net()))

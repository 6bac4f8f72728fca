"""Law: two ranks with half a batch each train a solver network like one process with the whole batch."""

import torch
from torch import nn

from minimand.nn import SolverConv2d, SolverLinear
from minimand.solvers import FISTA, ProxGD, ProxSG

from .cases.ranks import on_ranks

STEPS = 4


def _net(solver):
    torch.manual_seed(0)
    return nn.Sequential(
        SolverConv2d(2, 4, 3, padding=1, solver=ProxGD(3)),
        nn.Flatten(),
        SolverLinear(64, 8, solver=solver),
        nn.Linear(8, 3),
    ).double()


def _data():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, 8, 2, 4, 4, generator=g, dtype=torch.float64)
    return x, torch.randint(3, (STEPS, 8), generator=g)


def _train(net, x, y, module=None):
    optimizer = torch.optim.SGD((module or net).parameters(), lr=0.3, momentum=0.9)
    for inputs, labels in zip(x, y, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    return [p.detach() for p in (module or net).parameters()]


def _worker(rank):
    x, y = _data()
    half = slice(4 * rank, 4 * rank + 4)
    results = []
    for solver in (FISTA(5), ProxSG(5)):
        module = _net(solver)
        torch.manual_seed(rank)
        net = nn.parallel.DistributedDataParallel(module)
        results.append(_train(net, x[:, half], y[:, half], module))
    return results


def test_two_ranks_equal_one_process():
    (together, sampled), (_, other) = on_ranks(_worker)
    alone = _train(_net(FISTA(5)), *_data())
    torch.testing.assert_close(together, alone, atol=1e-10, rtol=1e-8)
    torch.testing.assert_close(sampled, other, atol=0, rtol=0)

"""Law: two ranks with half a batch each train a solver network like one process with the whole batch."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from minimand.nn import SolverConv2d, SolverLinear
from minimand.solvers import FISTA, ProxGD, ProxSG

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


def _worker(rank, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    x, y = _data()
    half = slice(4 * rank, 4 * rank + 4)
    for name, solver in (("fista", FISTA(5)), ("sampled", ProxSG(5))):
        module = _net(solver)
        torch.manual_seed(rank)
        net = nn.parallel.DistributedDataParallel(module)
        weights = _train(net, x[:, half], y[:, half], module)
        if rank == 0:
            results[name] = [w.numpy() for w in weights]
        elif name == "sampled":
            results["sampled on rank 1"] = [w.numpy() for w in weights]
    dist.destroy_process_group()


def test_two_ranks_equal_one_process():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_worker, args=(port, results), nprocs=2)
        together, sampled, other = (
            [torch.from_numpy(w) for w in results[name]] for name in ("fista", "sampled", "sampled on rank 1")
        )
    alone = _train(_net(FISTA(5)), *_data())
    torch.testing.assert_close(together, alone, atol=1e-10, rtol=1e-8)
    torch.testing.assert_close(sampled, other, atol=0, rtol=0)

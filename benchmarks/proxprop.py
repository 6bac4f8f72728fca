"""ProxProp against plain backpropagation: the same network, batch and optimizer; a whole training step, one thread.

Plain and preconditioned steps take turns, round after round, and processor time is counted: other work on the machine
disturbs the ratios little.
"""

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import Row, at_most
from minimand.train import CachedGram, ProxProp
from minimand.zoo.proxprop import ProxPropConvNet, ProxPropMLP

__all__ = ["run"]


def _step(model: nn.Module, x: Tensor, y: Tensor, options: dict[str, Any] | None) -> Callable[[], None]:
    """One training step of a copy of the model; ``options=None`` is plain backpropagation."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    if options is not None:
        ProxProp(model, **options).attach(optimizer)

    def call() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return call


def _times(calls: list[Callable[[], None]], rounds: int) -> list[list[float]]:
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, record in zip(calls, times, strict=True):
            begin = time.process_time()
            call()
            record.append(time.process_time() - begin)
    return times


def _median(record: list[float]) -> float:
    return sorted(record)[len(record) // 2]


def _group(
    model: nn.Module, x: Tensor, cases: list[tuple[str, dict[str, Any], float, float]], rounds: int
) -> list[Row]:
    y = torch.randint(10, (len(x),))
    base, *others = _times([_step(model, x, y, None), *(_step(model, x, y, case[1]) for case in cases)], rounds)
    rows = []
    for (name, _, target, stretch), record in zip(cases, others, strict=True):
        # A cached Gram matrix is paid for once in a while: its cost is the mean.
        cost = (
            sum(record) / len(record) / (sum(base) / len(base)) if "cached" in name else _median(record) / _median(base)
        )
        rows.append(at_most(name, cost, target, f"stretch {stretch:g}" if stretch else ""))
    return rows


def _perceptron() -> list[Row]:
    cases = [
        ("MLP, N = 500, exact, fused", {}, 1.3, 1.15),
        ("MLP, N = 500, exact, unfused", {"fused": False}, 1.7, 1.5),
        ("MLP, N = 500, CG3", {"method": "cg", "cg_iters": 3}, 1.8, 0),
    ]
    return _group(ProxPropMLP(), torch.randn(500, 3, 32, 32), cases, 5)


def _square() -> list[Row]:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return _group(model, torch.randn(1024, 1024), [("1024→1024, N = 1024, exact", {}, 2, 1.6)], 9)


def _convolutions() -> list[Row]:
    cases = [
        ("conv net, N = 500, exact", {}, 4.4, 2.5),
        ("conv net, N = 500, subsampled Gram 1/8", {"gram": "subsampled"}, 1.5, 1.2),
        ("conv net, N = 500, autocorrelation", {"gram": "autocorrelation"}, 4.4, 2.5),
        ("conv net, N = 500, cached, every 10 steps", {"gram": CachedGram()}, 1.5, 1.2),
        ("conv net, N = 500, CG3", {"method": "cg", "cg_iters": 3}, 2.8, 0),
    ]
    return _group(ProxPropConvNet(), torch.randn(500, 3, 32, 32), cases, 10)


def run() -> list[Row]:
    """Ratios of time, with the targets they were set."""
    torch.manual_seed(0)
    return [*_perceptron(), *_square(), *_convolutions()]

"""The growth of costs with the width, iterations and batch of a layer, and with the size of a matrix."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from sklearn.utils.extmath import randomized_svd
from torch import nn

from benchmarks import Row, along, ratios
from benchmarks.factor import parts, race
from benchmarks.layers import block, forward_and_backward
from minimand.factor import LowRank
from minimand.nn import SolverLinear
from minimand.solvers import ProxGD, ProxSG, Solver

__all__ = ["run"]

LAYER = "over dropout → linear → ReLU"


def _layers(title: str, sizes: Sequence[tuple[int, int, int, int]]) -> Iterator[Row]:
    """Points of a curve: the place on its axis, the width, the iterations and the batch."""
    for at, width, iters, batch in sizes:
        solvers: dict[str, Solver] = {"ProxGD": ProxGD(iters), "ProxSG, shared sample": ProxSG(iters, tau=0.5)}
        layers = [SolverLinear(width, width, solver=solver, shared_sample=True) for solver in solvers.values()]
        y = torch.randn(batch, width, requires_grad=True)
        upstream = torch.randn(batch, width)
        plain, *ours = (forward_and_backward(net, y, upstream) for net in (block(nn.Linear(width, width)), *layers))
        for name, ratio in zip(solvers, ratios(plain, ours, 5), strict=True):
            yield along(f"{title}: {name} {LAYER}", at, ratio)


def _matrices() -> Iterator[Row]:
    """Twenty components in matrices of growing size."""
    for n in (250, 500, 1000, 2000):
        Y = parts(n, n // 2, 20)
        low = LowRank(0.02 * float(np.linalg.norm(Y, 2)), random_state=0).fit(Y)
        (found,) = ratios(
            lambda Y=Y, k=low.n_components_: randomized_svd(Y, k, random_state=0), [lambda Y=Y, low=low: low.fit(Y)], 5
        )
        yield along("matrix n × n/2: LowRank, certified, over randomized_svd with the rank known", n, found)
        against = race(Y, 20, 0.01, 3)
        title = "matrix n × n/2: NMF over scikit-learn's, each stopped by its own rule"
        yield along(title, n, against.bare, against.note)
        yield along("matrix n × n/2: the same with the certificate", n, against.proved, against.note)


def run() -> list[Row]:
    """The points of all curves."""
    torch.manual_seed(0)
    return [
        *_layers("width", [(n, n, 10, 128) for n in (64, 128, 256, 512, 1024)]),
        *_layers("iterations", [(k, 512, k, 128) for k in (1, 3, 10, 30)]),
        *_layers("batch", [(b, 512, 10, b) for b in (16, 64, 256, 1024)]),
        *_matrices(),
    ]

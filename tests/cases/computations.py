"""Small computations of every part of the library, each a function of a dtype, to be compared between processes."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from minimand import LPOM, ProxProp, SolverConv2d, SolverLinear, lipschitz
from minimand.factor import NMF, LowRank, MatrixCompletion
from minimand.solvers import FISTA, ProxSG

__all__ = ["COMPUTATIONS", "compute"]


def _layer(layer: nn.Module, y: Tensor) -> Tensor:
    out = layer(y)
    out.square().sum().backward()
    return torch.cat([out.detach().reshape(-1), *(p.grad.reshape(-1) for p in layer.parameters())])


def _dense(dtype: torch.dtype) -> Tensor:
    return _layer(SolverLinear(300, 200, solver=FISTA(iters=10), dtype=dtype), torch.randn(128, 300, dtype=dtype))


def _sampled(dtype: torch.dtype) -> Tensor:
    return _layer(SolverLinear(300, 200, solver=ProxSG(iters=10), dtype=dtype), torch.randn(128, 300, dtype=dtype))


def _convolution(dtype: torch.dtype) -> Tensor:
    layer = SolverConv2d(16, 32, 3, padding=1, solver=FISTA(iters=6), dtype=dtype)
    return _layer(layer, torch.randn(8, 16, 16, 16, dtype=dtype))


def _bound(dtype: torch.dtype) -> Tensor:
    return lipschitz(nn.Conv2d(24, 24, 3, padding=1, dtype=dtype), (16, 16)).reshape(1)


def _mlp(dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(nn.Linear(100, 120), nn.Tanh(), nn.Linear(120, 80), nn.Tanh(), nn.Linear(80, 10)).to(dtype)


def _weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def _proxprop(dtype: torch.dtype) -> Tensor:
    net, x = _mlp(dtype), torch.randn(256, 100, dtype=dtype)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    ProxProp(net).attach(optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        net(x).square().sum(1).mean().backward()
        optimizer.step()
    return _weights(net)


def _lpom(dtype: torch.dtype) -> Tensor:
    net, x, y = _mlp(dtype), torch.randn(256, 100, dtype=dtype), torch.arange(256) % 10
    method = LPOM(net)
    for _ in range(3):
        method.step(x, y)
    return _weights(net)


def _product(estimator: object, rows: np.ndarray) -> Tensor:
    codes = estimator.fit_transform(rows)
    return torch.as_tensor(codes @ estimator.components_).reshape(-1)


def _rows(dtype: torch.dtype) -> np.ndarray:
    values = np.random.default_rng(0).uniform(size=(150, 12)) @ np.random.default_rng(1).uniform(size=(12, 90))
    return values.astype("float32" if dtype == torch.float32 else "float64")


COMPUTATIONS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "dense solver layer": _dense,
    "sampled solver layer": _sampled,
    "solver convolution": _convolution,
    "norm bound": _bound,
    "ProxProp": _proxprop,
    "LPOM": _lpom,
    "NMF": lambda dtype: _product(NMF(0.5, n_components=8, random_state=0, max_iter=30, effort=None), _rows(dtype)),
    "LowRank": lambda dtype: _product(LowRank(2.0, random_state=0), _rows(dtype)),
    "MatrixCompletion": lambda dtype: _product(MatrixCompletion(2.0, n_components=8, random_state=0), _rows(dtype)),
}


def compute(threads: int) -> dict[tuple[str, str], Tensor]:
    """The results of all computations in both precisions, by a number of torch's threads."""
    torch.set_num_threads(threads)
    found = {}
    for dtype in (torch.float32, torch.float64):
        for name, function in COMPUTATIONS.items():
            torch.manual_seed(0)
            found[name, str(dtype).removeprefix("torch.")] = function(dtype).double()
    return found

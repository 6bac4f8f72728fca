"""ProxProp against plain backpropagation: the same network, batch and optimizer; a whole training step, one thread.

Two more tables have no target: the memory between backward pass and step, and the angles between the exact directions
and those of cheaper Gram matrices.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks import Row, at_most, in_turn, peer, ratio, ratios, reported, skipped, training_step
from minimand.train import CachedGram, ExactGram, ProxProp
from minimand_papers.experiments.frerix2018.proxprop_peers import PACKAGES, PEERS, curved, optimizer_of
from minimand_papers.zoo.proxprop import ProxPropConvNet, ProxPropMLP

__all__ = ["run"]


def _step(model: nn.Module, x: Tensor, y: Tensor, options: dict[str, Any] | None) -> Callable[[], None]:
    """One training step of a copy of the model; ``options=None`` is plain backpropagation."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    if options is not None:
        ProxProp(model, **options).attach(optimizer)
    return training_step(model, optimizer, x, y)


def _group(model: nn.Module, x: Tensor, cases: list[tuple[str, dict[str, Any], float]], rounds: int) -> list[Row]:
    y = torch.randint(10, (len(x),))
    base, *others = in_turn([_step(model, x, y, None), *(_step(model, x, y, case[1]) for case in cases)], rounds)
    # A cached Gram matrix is computed in some rounds only, so the mean is its cost.
    return [
        at_most(name, ratio(record, base, mean="cached" in name), target)
        for (name, _, target), record in zip(cases, others, strict=True)
    ]


def _perceptron() -> list[Row]:
    cases: list[tuple[str, dict[str, Any], float]] = [
        ("MLP, N = 500, exact", {}, 1.45),
        ("MLP, N = 500, exact, fused", {"fused": True}, 1.2),
        ("MLP, N = 500, CG3, fused", {"method": "cg", "cg_iters": 3, "fused": True}, 1.55),
        ("MLP, N = 500, cached, every 10 steps, fused", {"gram": CachedGram(), "fused": True}, 1.1),
    ]
    return _group(ProxPropMLP(), torch.randn(500, 3, 32, 32), cases[:3], 5) + _group(
        ProxPropMLP(), torch.randn(500, 3, 32, 32), cases[3:], 10
    )


def _square() -> list[Row]:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    cases: list[tuple[str, dict[str, Any], float]] = [("1024→1024, N = 1024, exact, fused", {"fused": True}, 1.9)]
    return _group(model, torch.randn(1024, 1024), cases, 9)


def _convolutions() -> list[Row]:
    rows = []
    for count in (64, 128, 500):
        cases: list[tuple[str, dict[str, Any], float]] = [
            (f"conv net, N = {count}, exact", {}, 2.8),
            (f"conv net, N = {count}, CG3", {"method": "cg", "cg_iters": 3}, 2.4),
            (f"conv net, N = {count}, cached, every 10 steps", {"gram": CachedGram()}, 1.1),
        ]
        rows += _group(ProxPropConvNet(), torch.randn(count, 3, 32, 32), cases, 10)
    subsampled = [("conv net, N = 500, subsampled Gram 1/8", {"gram": "subsampled"}, 1.5)]
    return rows + _group(ProxPropConvNet(), torch.randn(500, 3, 32, 32), subsampled, 5)


def _peers() -> list[Row]:
    """Other optimizers on the same network and batch: the time of a step over one of SGD."""
    x, y = torch.randn(500, 3, 32, 32), torch.randint(10, (500,))
    plain = ProxPropMLP()
    methods = [method for method in PEERS if method != PEERS[0] and peer(PACKAGES.get(method, "torch"))]
    base, *calls = (_by(method, copy.deepcopy(plain), x, y) for method in (PEERS[0], *methods))
    costs = ratios(base, calls, 5)
    rows = [
        reported(f"MLP, N = 500: a step by {method} / {PEERS[0]}", cost)
        for method, cost in zip(methods, costs, strict=True)
    ]
    return rows + [skipped(f"MLP, N = 500: {name}", package) for name, package in PACKAGES.items() if not peer(package)]


def _by(method: str, model: ProxPropMLP, x: Tensor, y: Tensor) -> Callable[[], None]:
    if method == "isaac":
        curved(model)
    return training_step(model, optimizer_of(method, model, 1e-4, 0.05), x, y)


def _held(name: str, model: nn.Module, x: Tensor, options: dict[str, Any]) -> Row:
    """The memory of the records after a backward pass over that of the parameters."""
    prox = ProxProp(model, **options).attach(torch.optim.SGD(model.parameters(), lr=0.0))
    F.cross_entropy(model(x), torch.randint(10, (len(x),))).backward()
    parts: dict[int, int] = {}
    for rows in (layer.rows for layer in prox._units.values() if layer.rows is not None):
        factor = vars(rows.metric).get("_factor") if rows.metric is not None else None
        tensors = (rows.a, rows.delta, rows.gram, factor and factor.factor)
        for tensor in (t for t in tensors if t is not None):
            parts[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    prox.detach()
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    return reported(f"{name}: held until the step, by the parameters' memory", sum(parts.values()) / own)


def _memory() -> list[Row]:
    images = torch.randn(500, 3, 32, 32)
    return [
        _held("MLP, N = 500", ProxPropMLP(), images, {}),
        _held("conv net, N = 500", ProxPropConvNet(), images, {}),
    ]


_RULES: dict[str, dict[str, Any]] = {
    "exact": {},
    "subsampled": {"gram": "subsampled"},
    "cached": {"gram": "cached"},
    "cached exact": {"gram": CachedGram(of=ExactGram())},
    "CG3": {"method": "cg", "cg_iters": 3},
    "CG10": {"method": "cg", "cg_iters": 10},
}


def angles(steps: int = 12) -> list[Row]:
    """Median angles over the first steps of the paper's conv net under Adam, on enlarged digits, batch 128."""
    torch.manual_seed(0)
    source = load_digits()
    images = F.interpolate(torch.tensor(source.images, dtype=torch.float32)[:, None] / 16, (32, 32), mode="bilinear")
    labels = torch.tensor(source.target)
    leader = ProxPropConvNet(channels=1)
    adam = torch.optim.Adam(leader.parameters(), lr=1e-3)
    nets: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
    for name in ("plain", *_RULES):
        net = copy.deepcopy(leader)
        nets[name] = net, torch.optim.SGD(net.parameters(), lr=0.0)
        if name in _RULES:
            ProxProp(net, **_RULES[name]).attach(nets[name][1])
    found: dict[str, list[Tensor]] = {name: [] for name in nets if name != "exact"}
    for batch in torch.randperm(len(images))[: steps * 128].split(128):
        for net, still in nets.values():
            net.load_state_dict(leader.state_dict())
            still.zero_grad()
            F.cross_entropy(net(images[batch]), labels[batch]).backward()
            still.step()
        exact = _by_layer(nets["exact"][0])
        for name, angles in found.items():
            pairs = zip(_by_layer(nets[name][0]), exact, strict=True)
            angles.append(
                torch.stack([F.cosine_similarity(u, v, dim=0).clamp(-1, 1).acos().rad2deg() for u, v in pairs])
            )
        for mine, theirs in zip(leader.parameters(), nets["exact"][0].parameters(), strict=True):
            mine.grad = theirs.grad
        adam.step()
    return [
        reported(f"degrees to the exact direction, conv layer {layer + 1}: {name}", float(angle))
        for name, angles in found.items()
        for layer, angle in enumerate(torch.stack(angles).median(0).values)
    ]


def _by_layer(net: nn.Module) -> list[Tensor]:
    layers = [module for module in net.modules() if isinstance(module, nn.Conv2d)]
    return [
        torch.cat([p.grad.flatten() for p in layer.parameters() if p.grad is not None]).double() for layer in layers
    ]


def run() -> list[Row]:
    """Ratios of time with their targets, memory, angles."""
    torch.manual_seed(0)
    return [*_perceptron(), *_square(), *_convolutions(), *_peers(), *_memory(), *angles()]

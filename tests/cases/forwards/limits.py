"""Forwards that a record can follow in part only, or not at all; and those that need care."""

import random

import torch
import torch.nn.functional as F
from torch import nn

from .listing import listed, quietly


@listed("scripted part", (2, 4), opaque="torch.jit")
def scripted():
    middle = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return nn.Sequential(nn.Linear(4, 4), quietly(lambda: torch.jit.script(middle)), nn.Linear(4, 2))


@listed("scripted", (2, 4), opaque="torch.jit")
def all_scripted():
    return quietly(lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))))


def _affine(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


@listed("scripted function", (2, 4), opaque="does not see", exact=False)
class ScriptedFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.function = quietly(lambda: torch.jit.script(_affine))

    def forward(self, x):
        return self.b(self.function(self.a(x)))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x)
        return self.b(h) if h.sum() > 0 else self.b(-h) * 3


@listed("branch on data", (2, 4), opaque="into Python", exact=False)
def branching():
    return Branching()


@listed("number from data", (2, 4), opaque="into Python", exact=False)
class ReadingData(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x) / max(float(x.abs().max()), 1e-6)


@listed("mixture of experts", (6, 4), opaque="depends on the data", exact=False)
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 3), nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x):
        choice = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (choice == i).nonzero().squeeze(-1)
            if rows.numel() > 0:
                out.index_add_(0, rows, expert(x[rows]))
        return out


@listed("raises", (2, 4), opaque="raises NotImplementedError", exact=False, guessable=False)
class Raising(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        self.touched = self.fc(x)
        self.fc.weight.data.zero_()
        raise NotImplementedError("not yet")


@listed("catches what a part raises", (2, 4))
class Catching(nn.Module):
    def __init__(self):
        super().__init__()
        self.bad, self.fc = Raising(), nn.Linear(4, 2)

    def forward(self, x):
        try:
            x = self.bad(x)
        except NotImplementedError:
            x = x * 2
        return self.fc(x)


@listed("assigns data", (2, 4), opaque="assigns .data")
class AssigningData(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.a(x)
        h.data = h.data.clamp(min=0)
        return self.b(h)


@listed("out argument", (2, 4))
class OutArgument(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        result = torch.empty(x.shape[0], 4)
        torch.add(self.fc(x), 1.0, out=result)
        return result


@listed("drop path", (4, 4), opaque="in training only")
class DropPath(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def path(self, x):
        if not self.training:
            return x
        mask = x.new_empty(x.shape[0], 1).bernoulli_(0.8)
        return x * mask / 0.8

    def forward(self, x):
        x = x + self.path(F.relu(self.a(x)))
        return self.head(x + self.path(F.relu(self.b(x))))


@listed("layer drop", (2, 4), opaque="draws from random", exact=False)
class LayerDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(4, 4) for _ in range(8)]), nn.Linear(4, 2)

    def forward(self, x):
        for layer in self.layers:
            if random.random() < 0.5:
                x = layer(x)
        return self.head(x)


@listed("quantised", (2, 4))
def quantised():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    return quietly(lambda: torch.ao.quantization.quantize_dynamic(net, {nn.Linear}))


@listed("vmap inside", (2, 4), opaque="does not see", exact=False)
class Vmapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.b(torch.vmap(lambda row: row / row.norm())(self.a(x)))


@listed("layers inside vmap", (2, 4), opaque="inside a transform", exact=False)
class VmappedLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return torch.vmap(lambda row: self.b(torch.relu(self.a(row))))(x)


@listed("gradient of layers", (2, 4), opaque="inside a transform", exact=False)
class Score(VmappedLayers):
    def forward(self, x):
        return torch.vmap(torch.func.grad(lambda row: self.b(torch.tanh(self.a(row))).sum()))(x)

"""Shared cases of the conversion tests: networks, rules that keep the function, and helpers."""

import torch
from torch import nn

from minimand.nn import Rule, SolverLayer, SolverOptions
from minimand.nn.conversion.change import passed
from minimand.solvers import ProxGD

from .networks import NETWORKS

ONE = SolverOptions(ProxGD(iters=1, step=1.0), ridge=0.0)
RULES = {name: {"*": ONE} for name in NETWORKS} | {
    "branching": {"body.*": ONE, "fc": Rule(ONE, activation="act", dropout=None)}
}


def network(name):
    """A network, an input, and rules that replace all layers by single unit steps."""
    make, shape = NETWORKS[name]
    return make(), torch.randn(shape), RULES[name]


def evaluated(model, x, seed=1):
    torch.manual_seed(seed)
    return model(x)


def is_taken_in(module):
    """Whether a module passes its input on, because a solver layer does its work."""
    return vars(module).get("forward") is passed


def solver_layers(model):
    return {path: module for path, module in model.named_modules() if isinstance(module, SolverLayer)}


def forwarding(forward):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.p, self.count = nn.Linear(6, 6), 0.5, 0

    Net.forward = forward
    return Net()

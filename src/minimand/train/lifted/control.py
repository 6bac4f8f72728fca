"""The control that every lifted result has to beat: random features and a ridge regression."""

import copy

import torch
from torch import Tensor, nn

from .chain import parse
from .losses import encode_targets
from .maps import update_running_statistics
from .weights import regress

__all__ = ["ridge_control"]


@torch.no_grad()
def ridge_control(model: nn.Module, x: Tensor, y: Tensor, ridge: float = 1.0) -> nn.Module:
    r"""A copy of the network whose hidden layers stay as they are and whose last one is a ridge regression.

    .. math:: \min_W\; \tfrac12\|Y - H W^\top\|^2 + \tfrac\lambda2\|W\|^2

    with H the last hidden activations of the untrained network and a ones column. A method that trains hidden layers
    and does not beat this has trained nothing.

    >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> x, y = torch.randn(32, 2), torch.randint(2, (32,))
    >>> control = ridge_control(net, x, y)
    >>> torch.equal(control[0].weight, net[0].weight)
    True
    """
    model = copy.deepcopy(model)
    xs, _, maps = parse(model).forward(x)
    last = maps[-1].layer
    update_running_statistics(maps)
    direction = regress(maps[-1].rows(xs[-2]), encode_targets(y, xs[-1], "squared"), ridge, bias=last.bias is not None)
    last.assign(direction.dense())
    return model

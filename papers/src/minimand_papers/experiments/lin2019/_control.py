"""The control experiment of lifted training: random hidden layers with a ridge regression on top."""

import copy

import torch
from torch import Tensor, nn

from minimand.train.lifted.chain import parse
from minimand.train.lifted.losses import encode_targets
from minimand.train.lifted.maps import update_running_statistics
from minimand.train.lifted.weights import regress

__all__ = ["ridge_control"]


@torch.no_grad()
def ridge_control(model: nn.Module, x: Tensor, y: Tensor, ridge: float = 1.0) -> nn.Module:
    r"""A copy of the network with unchanged hidden layers and a ridge regression as last layer.

    .. math:: \min_W\; \tfrac12\|Y - H W^\top\|^2 + \tfrac\lambda2\|W\|^2

    H holds the last hidden activations of the untrained network and a column of ones. A training method whose accuracy
    does not exceed this control's gains nothing from its hidden layers.

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

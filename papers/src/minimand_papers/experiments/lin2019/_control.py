"""The control experiment of lifted training: random hidden layers with a ridge regression on top."""

import copy

import torch
from torch import Tensor, nn

from minimand.train.lifted.losses import encode_targets
from minimand.train.lifted.weights import regress

__all__ = ["ridge_control"]


@torch.no_grad()
def ridge_control(model: nn.Module, x: Tensor, y: Tensor, ridge: float = 1.0) -> nn.Module:
    r"""A copy of the network with unchanged hidden layers and a ridge regression as last layer.

    .. math:: \min_W\; \tfrac12\|Y - H W^\top\|^2 + \tfrac\lambda2\|W\|^2

    H holds the inputs of the last linear layer of the untrained network, in training mode, and a column of ones. A
    training method whose accuracy does not exceed this control's gains nothing from its hidden layers.

    >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> x, y = torch.randn(32, 2), torch.randint(2, (32,))
    >>> control = ridge_control(net, x, y)
    >>> torch.equal(control[0].weight, net[0].weight)
    True
    """
    model, features = copy.deepcopy(model), []
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    hook = last.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    output = model.train()(x)
    hook.remove()
    found = regress(features[0], encode_targets(y, output, "squared"), ridge, bias=last.bias is not None)
    last.weight.copy_(found.dense()[:, : last.in_features])
    if found.bias is not None:
        last.bias.copy_(found.bias)
    return model

"""The auxiliary variables of a batch, and what tells whether a tensor has changed."""

import dataclasses
from typing import Any

from torch import Tensor

from ...network.nested import tensors
from .losses import Loss
from .maps import AffineMap

__all__ = ["Variables", "batch_size", "plain_tensor", "stamp"]


@dataclasses.dataclass
class Variables:
    """The activations of a batch from input to output, the layers' maps on it, and its loss."""

    xs: list[Tensor]
    maps: list[AffineMap]
    loss: Loss

    @property
    def output(self) -> Tensor:
        """The last activation: the network's output as an auxiliary variable."""
        return self.xs[-1]


def batch_size(x: Any) -> int:
    """The number of samples of a tensor, or of the first tensor in a tuple."""
    return next(iter(tensors(x))).shape[0]


def plain_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, detached, or a copy if it was made in inference mode, where autograd could not use it."""
    if not isinstance(tensor, Tensor):
        return tensor
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def stamp(tensor: Tensor) -> int | Tensor:
    """What tells whether a tensor has changed since: its version; for a tensor of inference mode its values."""
    return tensor.clone() if tensor.is_inference() else tensor._version

"""The auxiliary variables of a batch, and what tells whether a tensor has changed."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ...linalg import without_autocast
from ...network.nested import tensors
from .losses import Loss
from .maps import AffineMap

__all__ = ["Variables", "batch_size", "plain_tensor", "plainly", "stamp", "without_autograd"]

P = ParamSpec("P")
R = TypeVar("R")


@contextlib.contextmanager
def without_autograd() -> Iterator[None]:
    """No autograd, no inference mode, and no autocast: what is computed has the type of the parameters."""
    with torch.inference_mode(False), torch.no_grad(), without_autocast():
        yield


def plainly(function: Callable[P, R]) -> Callable[P, R]:
    """A function that runs in :func:`without_autograd`."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with without_autograd():
            return function(*args, **kwargs)

    return run


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

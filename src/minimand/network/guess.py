"""Made-up inputs for a network, from the sizes of its first layers."""

import inspect
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["guesses"]

_MAPS = {1: (32, 64, 100, 16, 128, 256, 8), 2: (32, 28, 64, 8, 16, 224, 12, 20, 24, 48, 96, 128, 4), 3: (8, 16, 32)}
_LAYERS = 4
_ATTEMPTS = 60


def guesses(model: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Positional inputs that the network may take, the most likely first.

    A Linear layer with n inputs suggests tensors of shape (2, n), (2, 5, n) and square images of n entries;
    convolutions suggest maps of several sizes, embeddings suggest indices, recurrent and attention layers suggest
    sequences. The first layers in the order of registration are asked. A forward that requires several arguments gets
    the same kind of input for all, then those of its first layers in order.

    >>> [tuple(x.shape) for (x,) in itertools.islice(guesses(nn.Linear(784, 10)), 3)]
    [(2, 784), (2, 5, 784), (2, 1, 28, 28)]
    """
    like = next((p for p in model.parameters() if p.is_floating_point() or p.is_complex()), torch.empty(0))
    makers = _Makers(like)
    suggested = [found for module in model.modules() if (found := makers.of(module))]
    distinct = [found for i, found in enumerate(suggested) if found not in suggested[:i]][:_LAYERS]
    distinct = distinct or [[("normal", (2, 4)), ("normal", (2, 3, 32, 32))]]
    count = _required(model)
    if count == 0:
        yield ()
        return
    # One layer at a time, but every layer's likeliest input before the unlikely ones of the first.
    kinds = [kind for row in itertools.zip_longest(*distinct) for kind in row if kind is not None]
    ordered = list(dict.fromkeys((*distinct[0][:2], *kinds)))
    options: Iterator[tuple[Any, ...]] = ((kind,) * count for kind in ordered)
    if count > 1:
        mixed = itertools.product(*([*(found[0] for found in distinct), ("index", (2,), 2)] for _ in range(count)))
        options = itertools.chain(options, mixed)
    for option in itertools.islice(options, _ATTEMPTS):
        yield tuple(makers.make(kind) for kind in option)


def _required(model: nn.Module) -> int:
    """How many positional arguments the forward requires, but at least one where it takes any."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]
    return max(len(required), 1 if len(parameters) else 0)


class _Makers:
    """Descriptions of inputs by layer, and tensors of a description, in the model's type and on its device."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._generator = torch.Generator().manual_seed(0)

    def of(self, module: nn.Module) -> list[tuple[Any, ...]]:
        """The inputs that a layer suggests; nothing for modules that suggest none."""
        if isinstance(module, nn.Linear):
            return _features(module.in_features)
        if isinstance(module, nn.modules.conv._ConvNd):
            sizes = _MAPS[len(module.kernel_size)]
            return [("normal", (2, module.in_channels, *(size,) * len(module.kernel_size))) for size in sizes]
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return [("index", shape, module.num_embeddings) for shape in ((2, 5), (5,), (2, 32), (2,))]
        if isinstance(module, nn.RNNBase):
            return [("normal", (2, 5, module.input_size))]
        if isinstance(module, nn.RNNCellBase):
            return [("normal", (2, module.input_size)), ("normal", (2, 5, module.input_size))]
        if isinstance(module, nn.MultiheadAttention):
            return [("normal", (2, 5, module.embed_dim))]
        if isinstance(module, nn.Bilinear):
            return [("normal", (2, module.in1_features))]
        if isinstance(module, nn.LayerNorm):
            return [("normal", (2, *module.normalized_shape)), ("normal", (2, 5, *module.normalized_shape))]
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            spatial = {nn.BatchNorm2d: (8, 8), nn.BatchNorm3d: (4, 4, 4)}.get(type(module), ())
            return [("normal", (2, module.num_features, *spatial))]
        return []

    def make(self, kind: tuple[Any, ...]) -> Tensor:
        """A tensor with fixed pseudo-random entries."""
        what, shape, *limit = kind
        draw, device = self._generator, self._like.device
        if what == "index":
            return torch.randint(0, max(*limit, 1), shape, generator=draw, device=draw.device).to(device)
        made = torch.randn(shape, generator=draw, dtype=torch.float64, device=draw.device)
        return made.to(device=device, dtype=self._like.dtype)


def _features(count: int) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = [("normal", (2, count)), ("normal", (2, 5, count))]
    for channels in (1, 3):
        side = math.isqrt(count // channels)
        if side > 1 and channels * side * side == count:
            found.append(("normal", (2, channels, side, side)))
    return [*found, ("normal", (count,)), ("normal", (2, 4, 4, count))]

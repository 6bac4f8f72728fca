"""Made-up inputs for a network, from the sizes of its first layers."""

import inspect
import itertools
import math
import re
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["guesses"]

#: A description of an input: ``("normal", shape)`` or ``("index", shape, limit)``.
Kind = tuple[Any, ...]
Kinds = tuple[Kind, ...]
#: Yields a description of every argument. It is sent by how many entries they were too large; None: that is unknown.
Search = Generator[Kinds, int | None, None]

_SIDES = {1: (32, 100, 8), 2: (32, 28, 64, 8, 224), 3: (8, 16, 32)}
_MOST_PIXELS = 1024**2
_LAYERS = 4
_ATTEMPTS = 80
_MISFIT = re.compile(r"cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)")


def guesses(model: nn.Module) -> Generator[tuple[Tensor, ...], str, None]:
    """Positional inputs that the network may take, the most likely first; it is sent the error of the last one.

    A Linear layer with n inputs suggests tensors of shape (2, n), (2, 5, n) and square images of n entries;
    convolutions suggest maps of several sizes, embeddings suggest indices, recurrent and attention layers suggest
    sequences. The first layers in the order of registration are asked. If maps of one size arrive at a linear layer
    with too few or too many entries, a size with the right number is searched for by bisection. A forward that requires
    several arguments gets the same kind of input for all, then those of its first layers in order.

    >>> [tuple(x.shape) for (x,) in itertools.islice(guesses(nn.Linear(784, 10)), 3)]
    [(2, 784), (2, 5, 784), (2, 1, 28, 28)]
    """
    like = next((p for p in model.parameters() if p.is_floating_point() or p.is_complex()), torch.empty(0))
    generator = torch.Generator().manual_seed(0)
    count = _required(model)
    if count == 0:
        yield ()
        return
    search = _several(model, count)
    kinds = next(search)
    for _ in range(_ATTEMPTS):
        error = yield tuple(_made(kind, like, generator) for kind in kinds)
        try:
            kinds = search.send(_excess(error))
        except StopIteration:
            return


def _several(model: nn.Module, count: int) -> Search:
    """Descriptions of inputs for all required arguments."""
    suggested = [found for module in model.modules() if (found := _of(module))]
    distinct = [found for i, found in enumerate(suggested) if found not in suggested[:i]][:_LAYERS]
    distinct = distinct or [[("normal", (2, 4))]]
    # Every layer's likeliest input before the unlikely ones of the first.
    kinds = [kind for row in itertools.zip_longest(*distinct) for kind in row if kind is not None]
    for kind in dict.fromkeys((*distinct[0][:3], *kinds)):
        if kind[0] == "maps":
            _, channels, dims = kind
            yield from _maps(channels, dims, count)
        else:
            yield (kind,) * count
    if count > 1:
        first = [found[0] for found in distinct]
        plain = [("normal", (2, kind[1], *(32,) * kind[2])) if kind[0] == "maps" else kind for kind in first]
        yield from (row for row in itertools.product([*plain, ("index", (2,), 2)], repeat=count))  # it is sent errors


def _excess(error: str) -> int | None:
    """How many entries more than it takes a linear layer was given; None for any other error."""
    found = _MISFIT.search(error or "")
    return None if found is None else int(found[2]) - int(found[3])


def _required(model: nn.Module) -> int:
    """How many positional arguments the forward requires, but at least one where it takes any."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]
    return max(len(required), 1 if len(parameters) else 0)


def _of(module: nn.Module) -> list[Kind]:
    """The inputs that a layer suggests; nothing for modules that suggest none."""
    features, channels, kernel = (getattr(module, a, None) for a in ("in_features", "in_channels", "kernel_size"))
    if isinstance(features, int):
        return _features(features)
    if isinstance(channels, int) and isinstance(kernel, tuple):
        return [("maps", channels, len(kernel))]
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
    if isinstance(module, nn.BatchNorm2d | nn.BatchNorm3d):
        return [("maps", module.num_features, 2 if isinstance(module, nn.BatchNorm2d) else 3)]
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return [("normal", (2, module.num_features))]
    return []


def _features(count: int) -> list[Kind]:
    found: list[Kind] = [("normal", (2, count)), ("normal", (2, 5, count))]
    for channels in (1, 3):
        side = math.isqrt(count // channels)
        if side > 1 and channels * side * side == count:
            found.append(("normal", (2, channels, side, side)))
    return [*found, *(("normal", shape) for shape in ((count,), (2, 4, 4, count), (2, count, 5), (2, count, 8, 8))),
            ("maps", 1, 2)]  # fmt: skip


def _made(kind: Kind, like: Tensor, generator: torch.Generator) -> Tensor:
    """A tensor with fixed pseudo-random entries, in the model's type and on its device."""
    what, shape, *limit = kind
    device = generator.device
    if what == "index":
        return torch.randint(0, max(*limit, 1), shape, generator=generator, device=device).to(like.device)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=device).to(like)


def _maps(channels: int, dims: int, count: int) -> Search:
    """Square maps of several sizes; then, by bisection, square and oblong ones that fit the linear layer behind."""

    def shaped(*sides: int) -> Kinds:
        return (("normal", (2, channels, *sides)),) * count

    side, excess = 0, None
    for side in _SIDES[dims]:
        excess = yield shaped(*(side,) * dims)
        if excess is not None:
            break
    if excess is None:
        for side in (16, 4, 12, 20, 24, 48, 96, 128, 299, 256, 384):
            yield shaped(*(side,) * dims)
        return
    yield from _bisected(lambda n: shaped(*(n,) * dims), side, excess, math.isqrt(_MOST_PIXELS))
    if dims == 2:
        # Maps that arrive with width one reach every number of entries by their height.
        narrow = yield from _smallest(lambda n: shaped(n, n), side)
        for width in range(narrow, narrow + 3):
            column = partial(shaped, width)
            excess = yield column(narrow)
            yield from _bisected(column, narrow, excess, _MOST_PIXELS // width)


def _bisected(shaped: Callable[[int], Kinds], side: int, excess: int | None, longest: int) -> Search:
    """Sides between one that is too short and one that is too long, given the excess of one side."""
    low, high = (side, 2 * side) if excess is not None and excess < 0 else (0, side)
    while excess is not None and excess < 0:
        found = yield shaped(high)
        if found is None or found == excess or high > longest:
            return  # longer sides do not help
        low, high, excess = (high, 2 * high, found) if found < 0 else (low, high, found)
    while high - low > 1:
        middle = (low + high) // 2
        found = yield shaped(middle)
        low, high = (low, middle) if found is not None and found > 0 else (middle, high)


def _smallest(shaped: Callable[[int], Kinds], side: int) -> Generator[Kinds, int | None, int]:
    """The smallest side with which the map arrives at the linear layer at all."""
    low, high = 0, side
    while high - low > 1:
        middle = (low + high) // 2
        found = yield shaped(middle)
        low, high = (middle, high) if found is None else (low, middle)
    return high

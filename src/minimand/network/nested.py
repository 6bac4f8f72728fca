"""Tensors inside nested containers: finding them and replacing them."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["replace", "tensors"]


def tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors of a tree of lists, tuples, mappings, slices, dataclass instances and distributions, in order.

    >>> [t.item() for t in tensors({"a": torch.tensor(1), "b": [2, (torch.tensor(3),)]})]
    [1, 3]
    """
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors(item)
    elif isinstance(tree, slice):
        yield from tensors((tree.start, tree.stop, tree.step))
    elif isinstance(tree, torch.distributions.Distribution):
        yield from tensors(vars(tree))
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors(getattr(tree, field.name, None))


def replace(tree: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """A copy of a tree in which every object of class ``kind`` is replaced by ``function`` of it.

    Containers are copied; objects of other classes are kept.

    >>> replace([1, ("a", {"b": 2})], int, lambda number: number + 10)
    [11, ('a', {'b': 12})]
    """
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, list):
        return [replace(item, kind, function) for item in tree]
    if isinstance(tree, tuple) and not isinstance(tree, torch.Size):
        items = [replace(item, kind, function) for item in tree]
        # A named tuple's constructor takes its fields one by one.
        make: Callable[[list[Any]], Any] = getattr(type(tree), "_make", type(tree))
        return make(items)
    if isinstance(tree, dict):
        copied = copy.copy(tree)
        for key, item in tree.items():
            copied[key] = replace(item, kind, function)
        return copied
    if isinstance(tree, slice):
        return slice(*(replace(item, kind, function) for item in (tree.start, tree.stop, tree.step)))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        twin = copy.copy(tree)
        for field in dataclasses.fields(tree):
            if field.name in vars(tree):  # written past a frozen class's own __setattr__
                object.__setattr__(twin, field.name, replace(vars(tree)[field.name], kind, function))
        return twin
    return tree

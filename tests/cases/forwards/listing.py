"""The list of networks that are read, and what is expected of each."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class ForwardCase:
    """A network and its inputs. ``opaque`` is a part of the reason why a record cannot tell all; None if it can.

    ``guessable``: inputs made up from the first layers run. ``exact``: recomputing is exact though a part is opaque.
    """

    make: Callable[[], nn.Module]
    example: Callable[[], Any]
    opaque: str | None = None
    guessable: bool = True
    exact: bool = True


FORWARDS: dict[str, ForwardCase] = {}


def listed(name, example, **options):
    """Add a class or function that makes a network to the cases; ``example`` is a shape or a function."""

    def add(make):
        made = example if callable(example) else lambda: torch.randn(example)
        FORWARDS[name] = ForwardCase(make, made, **options)
        return make

    return add


def quietly(function):
    """Call torch's older functions without the warnings that they are old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function()


def tokens(*shape):
    return lambda: torch.randint(0, 11, shape)

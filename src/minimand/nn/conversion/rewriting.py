"""A forward without the calls that solver layers take in."""

import dataclasses
from typing import Any

from torch import fx, nn

from .change import Source
from .shallow import Unfaithful, shallow
from .trace import Key

__all__ = ["Edit", "Rewrite", "rewritten"]

#: A call to remove, or a skip that a layer takes in: the calls from the layer on, the addition, the operand.
Edit = Key | tuple[tuple[Key, ...], Key, int]


@dataclasses.dataclass
class Rewrite:
    """A new forward for a module."""

    sources: tuple[Source, Source]
    constants: dict[str, Any]


def rewritten(owner: nn.Module, modes: tuple[list[set[Edit]], list[set[Edit]]], plain: set[frozenset[str]]) -> Rewrite:
    """Trace a forward of a scratch copy and edit it.

    ``modes`` has the edits of each of its runs in a pass, ``plain`` the arguments that were no tensors in them.
    """
    if len(plain) > 1:
        raise Unfaithful("is called with a tensor in one place and with something else in another")
    for mode in modes:
        if any(found != mode[0] for found in mode):
            raise Unfaithful(
                f"runs {len(mode)} times per pass, and not every time between layers that take the same in; "
                f"use a module of its own for each"
            )
    own = shallow(owner, *plain)
    for traced, mode in zip(own.modes, modes, strict=True):
        calls = traced.keys(traced.frames[0])
        # Skips first: they need the calls in between.
        for edit in sorted(mode[0] if mode else (), key=lambda edit: isinstance(edit[0], str)):
            try:
                _apply(edit, calls, traced.graph)
            except KeyError:
                raise Unfaithful("makes other calls when it is traced on its own") from None
        traced.graph.lint()
    return Rewrite((Source.of(own.modes[0].graph), Source.of(own.modes[1].graph)), own.constants)


def _apply(edit: Edit, calls: dict[Key, fx.Node], graph: fx.Graph) -> None:
    """Remove a call, or hand what is added to it to the layer."""
    if isinstance(edit[0], str):
        node = calls[edit]
        source: Any = node.args[0] if node.args else node.kwargs["input"]
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        return
    chain, key, operand = edit
    links, add = [calls[link] for link in chain], calls[key]
    # The skip may be computed after the layer was called.
    for link in links:
        add.prepend(link)
    links[0].args = (links[0].args[0], add.args[1 - operand])
    add.replace_all_uses_with(links[-1])
    graph.erase_node(add)

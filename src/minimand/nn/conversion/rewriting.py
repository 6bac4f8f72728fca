"""Forwards without the calls that solver layers absorb."""

import dataclasses
from typing import Any

from torch import fx, nn

from .change import Source
from .shallow import Shallow, Unfaithful, shallow
from .trace import Key

__all__ = ["Edit", "Rewrite", "rewritten"]

#: A call to remove, or a skip to absorb: the calls from the layer to the addition, the addition, the operand.
Edit = Key | tuple[tuple[Key, ...], Key, int]


@dataclasses.dataclass
class Rewrite:
    """A new forward for a module."""

    sources: tuple[Source, Source]
    constants: dict[str, Any]

    @classmethod
    def of(cls, own: Shallow) -> "Rewrite":
        """The forward that the graphs, as they are edited, describe."""
        for traced in own.modes:
            traced.graph.lint()
        evaluation, training = (Source.of(traced.graph) for traced in own.modes)
        return cls((evaluation, training), own.constants)


def rewritten(owner: nn.Module, modes: tuple[list[set[Edit]], list[set[Edit]]], plain: set[frozenset[str]]) -> Rewrite:
    """Trace a forward of a scratch copy and edit it.

    ``modes`` has the edits for each call of the forward in a pass, ``plain`` the names of non-tensor arguments.
    """
    if len(plain) > 1:
        raise Unfaithful("is called with a tensor and with a non-tensor for the same argument")
    for mode in modes:
        if any(found != mode[0] for found in mode):
            raise Unfaithful(
                f"runs {len(mode)} times per pass, and different calls in it are absorbed each time; "
                f"use a separate module for each run"
            )
    own = shallow(owner, *plain)
    for traced, mode in zip(own.modes, modes, strict=True):
        calls = traced.keys(traced.frames[0])
        # Skips first: they refer to calls that are removed later.
        for edit in sorted(mode[0] if mode else (), key=lambda edit: isinstance(edit[0], str)):
            try:
                _apply(edit, calls, traced.graph)
            except KeyError:
                raise Unfaithful("makes other calls when it is traced on its own") from None
    return Rewrite.of(own)


def _apply(edit: Edit, calls: dict[Key, fx.Node], graph: fx.Graph) -> None:
    """Remove a call, or pass the added tensor to the layer as its skip."""
    if isinstance(edit[0], str):
        node = calls[edit]
        source: Any = node.args[0] if node.args else node.kwargs["input"]
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        return
    chain, key, operand = edit
    links, add = [calls[link] for link in chain], calls[key]
    # Call the layer after its skip has been computed.
    for link in links:
        add.prepend(link)
    links[0].args = (links[0].args[0], add.args[1 - operand])
    add.replace_all_uses_with(links[-1])
    graph.erase_node(add)

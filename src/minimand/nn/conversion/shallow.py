"""The forward of a single module as a graph, or the reason why a graph cannot replace it."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from .clone import INTERNAL
from .trace import SIMPLE, Traced, Tracer, Untraceable, defaults, set_mode, undisturbed

__all__ = ["Shallow", "Unfaithful", "shallow"]


class Unfaithful(Exception):
    """A graph cannot replace the forward. The message completes a sentence that begins with "it"."""


@dataclasses.dataclass
class Shallow:
    """The graphs of a forward in evaluation and training, with children as single calls, and the attributes it read."""

    modes: tuple[Traced, Traced]
    constants: dict[str, Any]


def shallow(owner: nn.Module, plain: frozenset[str] = frozenset()) -> Shallow:
    """Trace one forward of a scratch copy; the arguments ``plain`` are not tensors.

    A graph records tensor operations only. These are detected and rejected: branches on arguments or on the mode of
    other modules, assignments to attributes, tensors that do not depend on the input, random draws, and ``with``
    statements.
    """
    before = _snapshot(owner)
    constants: dict[str, Any] = {}
    modes = []
    with undisturbed() as used:
        for mode in (False, True):
            set_mode(owner, mode)
            modes.append(_watched(owner, constants, lambda: _run(owner, {}, plain)))
    for name, value in _snapshot(owner).items():
        if name not in before or before[name] != value:
            if name.startswith("_tensor_constant") and not used:
                raise Unfaithful("creates a tensor that does not depend on its input; register it as a buffer")
            if not name.startswith("_tensor_constant"):
                raise Unfaithful(f"sets its attribute {name!r}")
    if used:
        raise Unfaithful(f"draws random numbers with {' and '.join(used)} outside of operations on its input")
    if any(traced.frames[0].in_context for traced in modes):
        raise Unfaithful("computes inside a with statement such as torch.no_grad() or autocast")
    for mode, traced in zip((False, True), modes, strict=True):
        _check_branches(owner, mode, traced, plain)
    return Shallow((modes[0], modes[1]), constants)


def _check_branches(owner: nn.Module, mode: bool, traced: Traced, plain: frozenset[str]) -> None:
    """Reject a forward whose graph depends on more than the module's own mode."""
    expected = list(_signature(traced, owner))
    set_mode(owner, mode)
    if list(_signature(_run(owner, defaults(owner), plain), owner)) != expected:
        raise Unfaithful(f"branches on its arguments (one of {', '.join(defaults(owner))})")
    set_mode(owner, not mode)
    set_mode(owner, mode, recurse=False)
    if list(_signature(_run(owner, {}, plain), owner)) != expected:
        raise Unfaithful("branches on the training flag of a submodule")


def _run(owner: nn.Module, concrete: dict[str, Any], plain: frozenset[str]) -> Traced:
    try:
        return Tracer({}, deep=False, plain=plain).run(owner, concrete)
    except Untraceable as failure:
        raise Unfaithful(f"cannot be traced ({failure.reason})") from failure


def _signature(traced: Traced, owner: nn.Module) -> Iterator[tuple[Any, ...]]:
    """The operations of a graph, with arguments that have a default as constants."""
    fixed = defaults(owner)
    checks = {f"{name}_1" for name in fixed}
    index: dict[fx.Node, Any] = {}
    skipped: set[fx.Node] = set()

    def place(node: fx.Node) -> Any:
        return index[node]

    for node in traced.graph.nodes:
        if node.op == "placeholder":
            index[node] = fixed.get(node.target, ("argument", node.target))
            if node.target in checks:
                skipped.add(node)
        elif skipped & set(node.all_input_nodes):
            skipped.add(node)
        else:
            index[node] = ("value", len(index))
            yield node.op, node.target, *(str(fx.map_arg(part, place)) for part in (node.args, node.kwargs))


def _snapshot(owner: nn.Module) -> dict[str, Any]:
    """The attributes of a module that a forward might change."""
    return {name: _frozen(value) for name, value in vars(owner).items() if name != "training"}


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return id(value), *((key, id(item)) for key, item in value.items())
    if isinstance(value, list | set):
        return id(value), *map(id, value)
    return value if type(value) in SIMPLE else id(value)


def _watched(owner: nn.Module, reads: dict[str, Any], run: Callable[[], Traced]) -> Traced:
    """Run, and record the plain attributes of ``owner`` that are read: they are constants of the graph."""
    kind = type(owner)
    ordinary = frozenset(dir(nn.Module)) | INTERNAL

    def look(self: nn.Module, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        if name not in ordinary and _is_plain(value):
            reads[name] = value.copy() if isinstance(value, list | dict) else value
        return value

    space = {"__getattribute__": look, "__module__": kind.__module__}
    owner.__class__ = type(kind.__name__, (kind,), space)
    try:
        return run()
    finally:
        owner.__class__ = kind


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(type(item) in SIMPLE for item in value)
    if isinstance(value, dict):
        return all(type(item) in SIMPLE for item in value.values())
    return type(value) in SIMPLE or isinstance(value, torch.dtype)

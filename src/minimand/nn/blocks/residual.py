"""Residual blocks of a network, and the stages that they form."""

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ...functions.activations import is_activation
from ..conversion.neighbors import operands_of
from ..conversion.shallow import Shallow, Unfaithful, shallow
from ..conversion.trace import Key, Traced, is_builtin, scratch
from ..layers import SolverLayer
from .coefficients import LearnedMomentum
from .network import OptimizationNet

__all__ = ["BlockSequence", "ForwardStructure", "ResidualAddition", "ResidualSearch", "ResidualStage", "find_stages"]

_POINTWISE = (
    nn.Identity,
    nn.modules.dropout._DropoutNd,
    nn.modules.batchnorm._BatchNorm,
    nn.LayerNorm,
    nn.GroupNorm,
)


@dataclasses.dataclass(frozen=True)
class ResidualAddition:
    """A residual addition: its call, the index of the skip operand, and the call or input that the skip comes from."""

    key: Key
    operand: int
    skip: Key | str


@dataclasses.dataclass(frozen=True)
class ForwardStructure:
    """The residual additions and the calls of children in a module's forward.

    Attributes:
        block: The only addition, if the module is a residual block: its input plus a function of its input.
        chains: Sequences of additions, each to the result of the previous one.
        calls: Sequences of calls of children, each with the result of the previous one.
        others: Calls of children with more or less than one positional argument.
    """

    block: ResidualAddition | None
    chains: tuple[tuple[ResidualAddition, ...], ...]
    calls: tuple[tuple[Key, ...], ...]
    others: tuple[Key, ...]


@dataclasses.dataclass(frozen=True)
class BlockSequence:
    """Blocks that a forward calls one after the other."""

    keys: tuple[Key, ...]
    blocks: tuple[nn.Module, ...]


@dataclasses.dataclass(frozen=True)
class ResidualStage:
    """Consecutive residual updates: the module whose forward has them, and either its blocks or its own additions."""

    path: str
    owner: nn.Module
    chain: BlockSequence | None = None
    additions: tuple[ResidualAddition, ...] = ()

    def __len__(self) -> int:
        return len(self.additions) if self.chain is None else len(self.chain.blocks)


@dataclasses.dataclass
class ResidualSearch:
    """The stages in a scratch copy of a network, and a note on every module that was examined."""

    model: nn.Module
    forwards: dict[nn.Module, Shallow]
    forms: dict[nn.Module, ForwardStructure]
    stages: list[ResidualStage]
    paths: dict[nn.Module, str]
    seen: list[str]


def find_stages(model: nn.Module) -> ResidualSearch:
    """Trace every forward of a scratch copy separately, and find the stages."""
    copied = scratch(model)
    paths = {module: path for path, module in copied.named_modules()}
    found = ResidualSearch(copied, {}, {}, [], paths, [])
    formed = {module: name for module in paths for name in _momenta(module)}
    inside = {part for module, name in formed.items() for part in module.get_submodule(name).modules()}
    for module, path in paths.items():
        if module in inside or is_builtin(module) or isinstance(module, SolverLayer | nn.ModuleList | nn.ModuleDict):
            continue
        where = f"{path or 'the model'} ({type(module).__name__})"
        if isinstance(module, OptimizationNet):
            found.seen.append(f"{where}: is an algorithm already; set it, or learnable=True, in its constructor")
            continue
        if module in formed:
            found.seen.append(f"{where}: already has its {formed[module]} form; revert the model first")
            continue
        try:
            found.forwards[module] = own = shallow(module)
            found.forms[module] = form = _form(own)
        except Unfaithful as reason:
            found.seen.append(f"{where}: {reason}")
            continue
        found.seen.append(f"{where}: {_words(form)}")
    found.seen += _left_out(found)
    found.stages = list(_stages(found))
    return found


def _left_out(found: ResidualSearch) -> Iterator[str]:
    """Residual blocks that are in no stage, because they are called with additional arguments."""
    for owner, form in found.forms.items():
        own = found.forwards[owner].modes[0]
        nodes = own.keys(own.frames[0])
        for block in dict.fromkeys(_called(nodes[key], own) for key in form.others):
            if (inner := found.forms.get(block)) is not None and inner.block is not None:
                caller = found.paths[owner] or "the model"
                yield f"{found.paths[block]}: {caller} calls it with additional arguments, so it is in no stage"


def _momenta(module: nn.Module) -> Iterator[str]:
    """The names of the coefficients that :func:`as_algorithm` added to a module."""
    for name, child in module.named_children():
        parts = child.children() if isinstance(child, nn.ModuleList) else [child]
        if any(isinstance(part, LearnedMomentum) for part in parts):
            yield name


def _words(form: ForwardStructure) -> str:
    if form.chains:
        return f"{sum(map(len, form.chains))} residual additions in its own forward"
    return "a residual block" if form.block is not None else "has no residual addition of its input"


def _stages(found: ResidualSearch) -> Iterator[ResidualStage]:
    """The sequences of at least two residual updates."""
    for owner, form in found.forms.items():
        for chain in form.chains:
            yield ResidualStage(found.paths[owner], owner, None, chain)
        own = found.forwards[owner].modes[0]
        nodes = own.keys(own.frames[0])
        for run in form.calls:
            for part in _residual_runs(run, found, own, nodes):
                blocks = tuple(_called(nodes[key], own) for key in part)
                yield ResidualStage(
                    _common([found.paths[block] for block in blocks]), owner, BlockSequence(part, blocks)
                )


def _residual_runs(
    run: tuple[Key, ...], found: ResidualSearch, own: Traced, nodes: dict[Key, fx.Node]
) -> Iterator[Any]:
    part: list[Key] = []
    for key in run:
        form = found.forms.get(_called(nodes[key], own))
        if form is not None and form.block is not None:
            part.append(key)
            continue
        if len(part) > 1:
            yield tuple(part)
        part = []
    if len(part) > 1:
        yield tuple(part)


def _called(node: fx.Node, own: Traced) -> nn.Module:
    module = own.module(node)
    assert module is not None
    return module


def _common(paths: list[str]) -> str:
    """The path of the module that contains the blocks."""
    parts = [path.split(".") for path in paths]
    shared = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)


# One forward ---------------------------------------------------------------------------------------------------------


def _form(own: Shallow) -> ForwardStructure:
    evaluation, training = (_mode(traced) for traced in own.modes)
    if evaluation != training:
        raise Unfaithful("makes different additions or calls in training than in evaluation")
    return evaluation


def _mode(traced: Traced) -> ForwardStructure:
    keys = {node: key for key, node in traced.keys(traced.frames[0]).items()}
    before = _ancestors(traced.graph)
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    additions: list[tuple[fx.Node, int, fx.Node]] = []
    for node in traced.graph.nodes:
        pair = operands_of(node) if node in keys else None
        if pair is None:
            continue
        for operand, (skip, branch) in enumerate((pair, pair[::-1])):
            if skip in before[branch] and _computes(before[branch] - before[skip] - {skip} | {branch}, traced):
                additions.append((node, operand, skip))
                break
    chains: list[list[tuple[fx.Node, int, fx.Node]]] = []
    for addition in additions:
        last = next((chain for chain in chains if _follows(addition[2], chain[-1][0], traced)), None)
        if last is None:
            chains.append([addition])
        else:
            last.append(addition)

    def record(addition: tuple[fx.Node, int, fx.Node]) -> ResidualAddition:
        node, operand, skip = addition
        return ResidualAddition(keys[node], operand, keys.get(skip, skip.name))

    block = None
    if len(additions) == 1 and inputs and additions[0][2] is inputs[0]:
        (returned,) = (node.args[0] for node in traced.graph.nodes if node.op == "output")
        if isinstance(returned, fx.Node) and _follows(returned, additions[0][0], traced):
            block = record(additions[0])
    longer = tuple(tuple(map(record, chain)) for chain in chains if len(chain) > 1)
    others = tuple(key for node, key in keys.items() if node.op == "call_module" and not _alone(node))
    return ForwardStructure(block, longer, tuple(_runs(traced, keys)), others)


def _ancestors(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """The nodes that each value is computed from."""
    before: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        before[node] = set(node.all_input_nodes).union(*(before[source] for source in node.all_input_nodes))
    return before


def _computes(nodes: set[fx.Node], traced: Traced) -> bool:
    """Whether the nodes use parameters: ``x + x.mean()`` is not a residual block."""
    for node in nodes:
        if (module := traced.module(node)) is not None and next(module.parameters(), None) is not None:
            return True
        if node.op == "get_attr" and isinstance(operator.attrgetter(str(node.target))(traced.root), nn.Parameter):
            return True
    return False


def _follows(value: fx.Node, add: fx.Node, traced: Traced) -> bool:
    """Whether a value is the result of an addition, possibly after entrywise operations."""
    while value is not add:
        sources = value.all_input_nodes
        if len(sources) != 1 or not _pointwise(value, traced):
            return False
        value = sources[0]
    return True


def _pointwise(node: fx.Node, traced: Traced) -> bool:
    """Whether a call keeps the shape: an activation, a normalisation, a dropout."""
    if (module := traced.module(node)) is not None:
        return is_activation(module) or isinstance(module, _POINTWISE)
    target: Any = node.target if node.op == "call_function" else getattr(torch.Tensor, str(node.target), None)
    return node.op in ("call_function", "call_method") and (is_activation(target) or target is F.dropout)


def _alone(node: fx.Node) -> bool:
    """Whether a call has exactly one argument, a positional one."""
    return len(node.args) == 1 and not node.kwargs


def _runs(traced: Traced, keys: dict[fx.Node, Key]) -> Iterator[tuple[Key, ...]]:
    """Maximal sequences of calls of modules, each with only the result of the previous one."""
    after: dict[fx.Node, fx.Node] = {}
    calls = [node for node in keys if node.op == "call_module" and _alone(node)]
    for node in calls:
        if isinstance(source := node.args[0], fx.Node):
            after.setdefault(source, node)
    starts = [node for node in calls if node.args[0] not in calls or after[node.args[0]] is not node]  # type: ignore[index]
    for node in starts:
        run = [node]
        while (following := after.get(run[-1])) is not None:
            run.append(following)
        if len(run) > 1:
            yield tuple(keys[node] for node in run)

"""Residual blocks of a network, and the stages that they form."""

import dataclasses
import itertools
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

__all__ = ["ResidualAddition", "ResidualSearch", "ResidualStage", "additions", "find_stages"]

_POINTWISE = (nn.Identity, nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)


@dataclasses.dataclass(frozen=True)
class ResidualAddition:
    """A residual addition: its index among the additions in a forward, and the index of its skip operand."""

    index: int
    operand: int


@dataclasses.dataclass(frozen=True)
class ForwardStructure:
    """The residual additions in a module's forward.

    Attributes:
        chains: Sequences of residual additions, each to the result of the previous one.
        is_block: Whether the module is a residual block: its input plus a function of its input.
    """

    chains: tuple[tuple[ResidualAddition, ...], ...]
    is_block: bool

    def __str__(self) -> str:
        if inline := [len(chain) for chain in self.chains if len(chain) > 1]:
            return f"{sum(inline)} residual additions in its own forward"
        return "a residual block" if self.is_block else "has no residual addition of its input"


@dataclasses.dataclass(frozen=True)
class ResidualStage:
    """Consecutive residual updates in the forward of a module: calls of residual blocks, or additions."""

    path: str
    owner: nn.Module
    calls: tuple[tuple[Key, nn.Module], ...] = ()
    additions: tuple[ResidualAddition, ...] = ()

    def __len__(self) -> int:
        return len(self.calls) or len(self.additions)


@dataclasses.dataclass
class ResidualSearch:
    """The stages in a scratch copy of a network, and a note on every module that was examined."""

    paths: dict[nn.Module, str]
    forwards: dict[nn.Module, Shallow] = dataclasses.field(default_factory=dict)
    forms: dict[nn.Module, ForwardStructure] = dataclasses.field(default_factory=dict)
    stages: list[ResidualStage] = dataclasses.field(default_factory=list)
    seen: list[str] = dataclasses.field(default_factory=list)


def find_stages(model: nn.Module) -> ResidualSearch:
    """Trace every forward of a scratch copy separately, and find the stages."""
    found = ResidualSearch({module: path for path, module in scratch(model).named_modules()})
    formed = {module: name for module in found.paths for name in _momenta(module)}
    inside = {part for module, name in formed.items() for part in module.get_submodule(name).modules()}
    for module, path in found.paths.items():
        if module in inside or is_builtin(module) or isinstance(module, SolverLayer | nn.ModuleList | nn.ModuleDict):
            continue
        where = f"{path or 'the model'} ({type(module).__name__})"
        if isinstance(module, OptimizationNet):
            found.seen.append(f"{where}: is an algorithm already; set it, or learnable=True, in its constructor")
        elif module in formed:
            found.seen.append(f"{where}: already has its {formed[module]} form; revert the model first")
        else:
            try:
                found.forwards[module] = own = shallow(module)
                found.forms[module] = form = _form(own)
                found.seen.append(f"{where}: {form}")
            except Unfaithful as reason:
                found.seen.append(f"{where}: {reason}")
    for owner, form in found.forms.items():
        inline = [chain for chain in form.chains if len(chain) > 1]
        found.stages += [ResidualStage(found.paths[owner], owner, additions=chain) for chain in inline]
        for run in _runs(owner, found):
            parts = zip(*(found.paths[block].split(".") for _, block in run), strict=False)
            common = [names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, parts)]
            found.stages.append(ResidualStage(".".join(common), owner, tuple(run)))
    return found


def _momenta(module: nn.Module) -> Iterator[str]:
    """The names of the coefficients that :func:`as_algorithm` added to a module."""
    for name, child in module.named_children():
        parts = child.children() if isinstance(child, nn.ModuleList) else [child]
        if any(isinstance(part, LearnedMomentum) for part in parts):
            yield name


def _runs(owner: nn.Module, found: ResidualSearch) -> Iterator[list[tuple[Key, nn.Module]]]:
    """Sequences of two or more calls of residual blocks, each with only the result of the previous one."""
    evaluation, training = (traced.keys(traced.frames[0]) for traced in found.forwards[owner].modes)
    blocks: dict[Any, nn.Module] = {id(module): module for module, form in found.forms.items() if form.is_block}
    runs: list[list[tuple[Key, nn.Module]]] = []
    notes = []
    for key in evaluation:
        block = blocks.get(key[1])
        if block is None or key not in training:
            continue
        if any(len(node.args) != 1 or node.kwargs for node in (evaluation[key], training[key])):
            caller = found.paths[owner] or "the model"
            notes.append(f"{found.paths[block]}: {caller} calls it with additional arguments, so it is in no stage")
            continue
        for run in runs:
            if all(calls[key].args[0] is calls[run[-1][0]] for calls in (evaluation, training)):
                run.append((key, block))
                break
        else:
            runs.append([(key, block)])
    found.seen += dict.fromkeys(notes)
    return (run for run in runs if len(run) > 1)


# One forward ---------------------------------------------------------------------------------------------------------


def _form(own: Shallow) -> ForwardStructure:
    evaluation, training = map(_structure, own.modes)
    if evaluation != training:
        raise Unfaithful("makes different additions in training than in evaluation")
    return evaluation


def _structure(traced: Traced) -> ForwardStructure:
    before = _ancestors(traced.graph)
    adds = additions(traced)
    chains: list[list[ResidualAddition]] = []
    for index, (_, operands) in enumerate(adds):
        for operand, (skip, branch) in enumerate((operands, operands[::-1])):
            if skip in before[branch] and _computes(before[branch] - before[skip] - {skip} | {branch}, traced):
                chain = next((c for c in chains if _follows(skip, adds[c[-1].index][0], traced)), None)
                if chain is None:
                    chains.append(chain := [])
                chain.append(ResidualAddition(index, operand))
                break
    return ForwardStructure(tuple(map(tuple, chains)), _is_block(chains, traced))


def _is_block(chains: list[list[ResidualAddition]], traced: Traced) -> bool:
    """Whether a forward returns its only residual addition, which adds its input."""
    if len(chains) != 1 or len(chains[0]) != 1:
        return False
    add, operands = additions(traced)[chains[0][0].index]
    first, *_, output = traced.graph.nodes
    returned = output.args[0]
    return operands[chains[0][0].operand] is first and isinstance(returned, fx.Node) and _follows(returned, add, traced)


def additions(traced: Traced) -> list[tuple[fx.Node, tuple[fx.Node, fx.Node]]]:
    """The calls in a forward that add two tensors, with these tensors."""
    return [(node, pair) for node in traced.frames[0].calls if (pair := operands_of(node)) is not None]


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
    """Whether a value is the result of an addition, possibly after activations, normalisations and dropouts."""
    while value is not add:
        sources = value.all_input_nodes
        if len(sources) != 1 or not _pointwise(value, traced):
            return False
        value = sources[0]
    return True


def _pointwise(node: fx.Node, traced: Traced) -> bool:
    if (module := traced.module(node)) is not None:
        return is_activation(module) or isinstance(module, _POINTWISE)
    target: Any = node.target if node.op == "call_function" else getattr(torch.Tensor, str(node.target), None)
    return node.op in ("call_function", "call_method") and (is_activation(target) or target is F.dropout)

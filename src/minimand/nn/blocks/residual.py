"""Residual blocks of a network, and the stages that they form."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from ...network import Network, role
from ...network.graph import ResidualBlock, operand
from ...network.record import Call, CallSite, ModuleFrame, Value
from ..conversion.planner import readings
from ..layers import SolverLayer
from .coefficients import LearnedMomentum
from .network import OptimizationNet

__all__ = ["ResidualAddition", "ResidualSearch", "ResidualStage", "find_stages"]

_POINTWISE = ("activation", "norm", "dropout", "identity")
#: A module that a forward calls, and where.
Called = tuple[nn.Module, CallSite]


class ResidualAddition(NamedTuple):
    """A residual addition in a run of a forward, the index of its skip, and the skip, from which the branch comes."""

    network: Network
    add: Call
    operand: int
    skip: Value


@dataclasses.dataclass(frozen=True)
class ForwardStructure:
    """Sequences of residual additions in a run of a forward, each to the result of the previous one; whether it is a
    residual block; and sequences of modules that it calls, each with the result of the previous one."""

    chains: tuple[tuple[ResidualAddition, ...], ...]
    is_block: bool
    runs: tuple[tuple[Called, ...], ...]

    def __str__(self) -> str:
        if inline := [len(chain) for chain in self.chains if len(chain) > 1]:
            return f"{sum(inline)} residual additions in its own forward"
        return "a residual block" if self.is_block else "has no residual addition of its input"

    def alike(self, other: "ForwardStructure") -> bool:
        """Whether another run of the forward makes the same additions and calls the same modules."""
        ours, theirs = ([[(p.add.place, p.operand) for p in chain] for chain in s.chains] for s in (self, other))
        return (ours, self.is_block, self.runs) == (theirs, other.is_block, other.runs)


@dataclasses.dataclass(frozen=True)
class ResidualStage:
    """Consecutive residual updates in the forward of a module: calls of residual blocks, or additions."""

    path: str
    owner: nn.Module
    blocks: tuple[Called, ...] = ()
    additions: tuple[ResidualAddition, ...] = ()

    def __len__(self) -> int:
        return len(self.blocks) or len(self.additions)


@dataclasses.dataclass
class ResidualSearch:
    """The records of a network, its forwards and stages, and a note on every module that was examined."""

    paths: dict[nn.Module, str]
    residuals: dict[Network, tuple[ResidualBlock, ...]] = dataclasses.field(default_factory=dict)
    forms: dict[nn.Module, ForwardStructure] = dataclasses.field(default_factory=dict)
    stages: list[ResidualStage] = dataclasses.field(default_factory=list)
    seen: list[str] = dataclasses.field(default_factory=list)


def find_stages(model: nn.Module, example: Any = None) -> ResidualSearch:
    """Read a network, examine every forward of its own, and find the stages."""
    found, pairs = ResidualSearch({module: path for path, module in model.named_modules()}), readings(model, example)
    found.residuals = {network: network.residuals() for pair in pairs for network in pair if network.complete}
    found.seen += [pair[1].reasons[0] for pair in pairs if not any(network.complete for network in pair)]
    formed = {module: name for module in found.paths for name in _momenta(module)}
    inside = {part for module, name in formed.items() for part in module.get_submodule(name).modules()}
    for module, path in found.paths.items():
        where = f"{path or 'the model'} ({type(module).__name__})"
        if module in inside or _is_single(module):
            continue
        if isinstance(module, OptimizationNet):
            found.seen.append(f"{where}: is an algorithm already; set it, or learnable=True, in its constructor")
        elif module in formed:
            found.seen.append(f"{where}: already has its {formed[module]} form; revert the model first")
        else:
            found.seen.append(f"{where}: {_examined(module, found)}")
    for owner, form in found.forms.items():
        found.stages += _stages(owner, form, found)
    return found


def _is_single(module: nn.Module) -> bool:
    """Whether a module is a layer, or has no forward."""
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    own = type(module).__module__.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(module, containers)
    # Scripted modules have no forward of their class.
    return own or isinstance(module, SolverLayer) or getattr(type(module), "forward", None) in (None, nn.Module.forward)


def _momenta(module: nn.Module) -> Iterator[str]:
    """The names of the coefficients that :func:`as_algorithm` added to a module."""
    for name, child in module.named_children():
        parts = child.children() if isinstance(child, nn.ModuleList) else [child]
        if any(isinstance(part, LearnedMomentum) for part in parts):
            yield name


def _examined(module: nn.Module, found: ResidualSearch) -> ForwardStructure | str:
    """The structure of a forward, the same in all of its runs, or the reason why there is none."""
    runs = ((n, frame) for n in found.residuals for frame in n.frames if n.module(frame.path) is module)
    forms = [_structure(network, frame, found.residuals[network]) for network, frame in runs]
    if not forms:
        return "no forward calls it on this input"
    if not all(map(forms[0].alike, forms)):
        return "makes other additions, or calls other blocks, in training than in evaluation or in another run"
    found.forms[module] = forms[0]
    return forms[0]


def _structure(network: Network, frame: ModuleFrame, residuals: tuple[ResidualBlock, ...]) -> ForwardStructure:
    chains: list[list[ResidualAddition]] = []
    for block in residuals:
        if block.add.frame == frame.index and not block.shortcut and block.start in block.add.args:
            part = ResidualAddition(network, block.add, block.add.args.index(block.start), block.start)
            chain = next((c for c in chains if _follows(network, part.skip, c[-1].add)), None)
            if chain is None:
                chains.append(chain := [])
            chain.append(part)
    runs: list[list[ModuleFrame]] = []
    for inner in network.frames:
        if inner.parent == frame.index and len(inner.inputs) == 1:
            run = next((run for run in runs if run[-1].outputs == inner.inputs), None)
            if run is None:
                runs.append(run := [])
            run.append(inner)
    lone = len(chains) == 1 and len(chains[0]) == 1 and chains[0][0].skip is frame.inputs[0]
    is_block = lone and len(frame.outputs) == 1 and _follows(network, frame.outputs[0], chains[0][0].add)
    called = (tuple((network.module(inner.path), inner.place) for inner in run) for run in runs)
    return ForwardStructure(tuple(map(tuple, chains)), is_block, tuple(called))


def _follows(network: Network, value: Value, add: Call) -> bool:
    """Whether a value is the result of an addition, possibly after activations, normalisations and dropouts."""
    while (call := network.producer(value)) is not None and call is not add:
        source = operand(network, call)
        if role(call) not in _POINTWISE or source is None:
            return False
        value = source
    return call is add


def _stages(owner: nn.Module, form: ForwardStructure, found: ResidualSearch) -> Iterator[ResidualStage]:
    for chain in form.chains:
        if len(chain) > 1:
            yield ResidualStage(found.paths[owner], owner, additions=chain)
    blocks = {module for module, other in found.forms.items() if other.is_block}
    for run in form.runs:
        for is_block, group in itertools.groupby(run, lambda called: called[0] in blocks):
            if is_block and len(called := tuple(group)) > 1:
                parts = zip(*(found.paths[block].split(".") for block, _ in called), strict=False)
                common = [names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, parts)]
                yield ResidualStage(".".join(common), owner, called)

"""The previous iterate in the forwards of a residual network: what edited forwards call, and the edits."""

from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from ...errors import ConversionError
from ...network.graph import live_readers
from ...network.record import Call, CallSite, ModuleFrame
from ..conversion.change import Places, adopt, install_edits
from ..conversion.edit import Edits, Operand, Uneditable, add_edit, method_at
from ..conversion.neighbors import may_branch
from .coefficients import LearnedMomentum
from .residual import ResidualAddition, ResidualSearch, ResidualStage

__all__ = ["AlgorithmEdits", "BlockTrail", "SkipTrail"]

Algorithm = Literal["heavy_ball", "nesterov"]


class BlockTrail:
    """Calls the blocks of a forward, each with the input of the block before it, if it takes what that one returned."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.input: Tensor | None = None
        self.output: Tensor | None = None

    def __call__(self, block: nn.Module, x: Tensor) -> Tensor:
        """Call a block, or a module that is not a block."""
        momentum = getattr(block, self.algorithm, None)
        if not isinstance(momentum, LearnedMomentum):
            self.output = None
            other: Tensor = block(x)
            return other
        previous = self.input if momentum.follows and x is self.output else None
        ball = self.algorithm == "heavy_ball"
        output: Tensor = block(x, previous_iterate=previous) if ball else block(momentum(x, previous))
        self.input, self.output = x, output
        return output


class SkipTrail:
    """Mixes the skips of the additions in a forward, in order, each with the skip before it in its stage.

    For each addition ``schedule`` has the index of its coefficients, and whether it begins a stage; None: it stays.
    """

    def __init__(self, momenta: nn.ModuleList, schedule: tuple[tuple[int, bool] | None, ...]) -> None:
        self.momenta, self.schedule, self.done = momenta, schedule, 0
        self.previous: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The combination of a skip with the one before it."""
        if self.done == len(self.schedule):
            raise ConversionError("the forward makes more additions than when it was converted; revert the model first")
        entry, previous = self.schedule[self.done], self.previous
        self.done, self.previous = self.done + 1, x
        if entry is None:
            return x
        mixed: Tensor = self.momenta[entry[0]](x, None if entry[1] else previous)
        return mixed


class AlgorithmEdits:
    """The edits and coefficients of the stages of a network."""

    def __init__(self, found: ResidualSearch, algorithm: Algorithm, constraint: Literal["sum"] | None) -> None:
        self.found, self.algorithm, self.constraint = found, algorithm, constraint
        self.edits: dict[tuple[nn.Module, str], Edits] = {}
        #: Blocks, and whether they continue a stage; forwards with additions, and the order of their coefficients.
        self.blocks: dict[nn.Module, bool] = {}
        self.chains: dict[nn.Module, list[tuple[ResidualAddition, ...]]] = {}
        self.trails: dict[tuple[nn.Module, str], Any] = {}

    def with_stage(self, stage: ResidualStage) -> "AlgorithmEdits":
        """The same with the edits of a stage."""
        made = AlgorithmEdits(self.found, self.algorithm, self.constraint)
        made.edits, made.blocks, made.trails = dict(self.edits), dict(self.blocks), dict(self.trails)
        made.chains = {owner: list(chains) for owner, chains in self.chains.items()}
        for owner in [block for block, _ in stage.blocks if block not in made.blocks] or [stage.owner]:
            if hasattr(owner, self.algorithm) and (stage.additions or owner is not stage.owner):
                where = self.found.paths[owner] or type(owner).__name__
                raise ConversionError(f"{where} already has an attribute {self.algorithm!r}; rename it first")
        if stage.additions:
            made.chains.setdefault(stage.owner, []).append(stage.additions)
            made._add_additions(stage.owner)
        for k, (block, place) in enumerate(stage.blocks):
            made._add_block(block, place, k > 0)
        return made

    def _edit(self, place: CallSite, operand: Operand | None, text: str, prelude: str, keyword: str = "") -> None:
        edits = Edits((((place.span, operand), text),), (prelude,) if prelude else (), (keyword,) if keyword else ())
        add_edit(self.edits, place, edits)

    def _add_block(self, block: nn.Module, place: CallSite, follows: bool) -> None:
        """Call a block with the previous iterate, with which the heavy ball's form mixes the skip inside."""
        trail = f"_minimand_{self.algorithm}_trail"
        if block not in self.blocks and self.algorithm == "heavy_ball":
            ((part,),) = self.found.forms[block].chains
            mixed = "__s.heavy_ball(__0, previous_iterate)"
            self._edit(part.add.place, (part.operand, 2), mixed, "", "previous_iterate")
        self.blocks[block] = self.blocks.get(block, False) or follows
        self._edit(place, None, f"{trail}(__f, __0)", f"{trail} = __s.{trail}()")
        self.trails[method_at(place)[0], trail] = partial(BlockTrail, self.algorithm)

    def _add_additions(self, owner: nn.Module) -> None:
        """Mix the skips of the additions in a forward, in the order in which it makes them: in the additions, or, for
        Nesterov's form, where the forward computes them, so that the branches read them mixed."""
        entries: dict[Call | ModuleFrame, tuple[int, bool]] = {}
        trail, ball = f"_minimand_{self.algorithm}_skips", self.algorithm == "heavy_ball"
        start = f"{trail} = __s.{trail}(__s.{self.algorithm})"
        for chain in self.chains[owner]:
            for k, part in enumerate(chain):
                if may_branch(part.network, part.add, part.add):
                    raise Uneditable(f"{type(owner).__name__} decides by data what it adds")
                where, name = part.add if ball else _producer(part), part.add.place.code.co_varnames[1]
                if where is part.network.frames[part.add.frame]:  # an argument
                    add_edit(self.edits, part.add.place, Edits((), (start, f"{name} = {trail}({name})")))
                else:
                    text = f"{trail}(__0)" if ball else f"{trail}(__e)"
                    self._edit(where.place, (part.operand, 2) if ball else None, text, start)
                entries[where] = len(entries), k == 0
        network, frame, places = chain[0].network, chain[0].add.frame, {part.place for part in entries}
        made: list[Any] = [call for call in network.calls if call.frame == frame and call.outputs]
        made += [run for run in network.frames if run.parent == frame and run.outputs]
        made = sorted((part for part in made if part.place in places), key=lambda part: part.outputs[0].index)
        first = [network.frames[frame]] if network.frames[frame] in entries else []
        self.trails[owner, trail] = partial(SkipTrail, schedule=tuple(map(entries.get, (*first, *made))))

    def apply(self, result: nn.Module, place: Places) -> None:
        """Add the coefficients and put the edited forwards in place."""
        for block, follows in self.blocks.items():
            self._attach(place[block], momentum := LearnedMomentum(self.constraint))
            momentum.follows = follows
        for owner, chains in self.chains.items():
            count = sum(map(len, chains))
            self._attach(place[owner], nn.ModuleList(LearnedMomentum(self.constraint) for _ in range(count)))
        install_edits(self.edits, place)
        for (owner, name), trail in self.trails.items():
            vars(place[owner])[name] = trail
            adopt(place[owner], name)

    def _attach(self, owner: nn.Module, child: nn.Module) -> None:
        """Add coefficients on the device of a module's parameters."""
        like = next(owner.parameters())
        owner._modules[self.algorithm] = child.to(like.device, like.dtype)
        adopt(owner, self.algorithm)


def _producer(part: ResidualAddition) -> Call | ModuleFrame:
    """The call of a forward, or the run of a module in it, that computes a skip; its own run for an argument."""
    network, skip, code = part.network, part.skip, part.add.place.code
    inside, made = network.ancestors(part.add.outputs[0]), network.producer(skip)
    uses = (part.add, *(call for call in network.calls if any(value in inside for value in call.produces)))
    if skip in network.outputs or not set(live_readers(network, skip)) <= set(uses):
        raise Uneditable(f"{code.co_qualname} reads its iterate elsewhere, too")
    frame = network.frames[part.add.frame]
    where = frame if skip in frame.inputs[:1] else None if made is None else _in_frame(part, made)
    if where is None or (where is not frame and where.outputs != (skip,)):
        raise Uneditable(f"{code.co_qualname} does not compute its iterate in one expression")
    return where


def _in_frame(part: ResidualAddition, call: Call) -> Call | ModuleFrame | None:
    """The call that a forward makes itself, or the run of a module in it, in which another call is made."""
    if call.frame == part.add.frame:
        return call
    frame = part.network.frames[call.frame]
    while frame.parent is not None and frame.parent != part.add.frame:
        frame = part.network.frames[frame.parent]
    return frame if frame.parent == part.add.frame else None

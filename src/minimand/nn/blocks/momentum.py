"""The previous iterate in the forwards of a residual network: what edited forwards call, and the edits."""

from functools import partial
from operator import itemgetter
from typing import Any, Literal

from torch import Tensor, nn

from ...errors import ConversionError
from ...network import Network
from ...network.record import Call, CallSite, ModuleFrame
from ..conversion.change import Places, adopt, install_edits
from ..conversion.edit import Edits, Operand, Uneditable, add_edit, method_at, names_at
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
        """Mix the skips of the additions in a forward, in the order in which it makes them."""
        entries: dict[Call | ModuleFrame, tuple[int, bool]] = {}
        trail = f"_minimand_{self.algorithm}_skips"
        for chain in self.chains[owner]:
            for k, part in enumerate(chain):
                if may_branch(part.network, part.add, part.add):
                    raise Uneditable(f"{type(owner).__name__} decides by data what it adds")
                where, operand, text = part.add, (part.operand, 2), f"{trail}(__0)"
                if self.algorithm == "nesterov":
                    where, operand, text = *_first_reader(part), f"(__n := {trail}(__0))"
                self._edit(where.place, operand, text, f"{trail} = __s.{trail}(__s.{self.algorithm})")
                entries[where] = len(entries), k == 0
        network, frame, places = chain[0].network, chain[0].add.frame, {part.place for part in entries}
        made: list[tuple[int, Any]] = [(call.index, call) for call in network.calls if call.frame == frame]
        made += [(_start(network, run), run) for run in network.frames if run.parent == frame]
        schedule = (entries.get(part) for _, part in sorted(made, key=itemgetter(0)) if part.place in places)
        self.trails[owner, trail] = partial(SkipTrail, schedule=tuple(schedule))

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


def _start(network: Network, frame: ModuleFrame) -> int:
    """The index of the first call in a run of a module."""
    return next((call.index for call in network.calls if call.frame >= frame.index), len(network.calls))


def _first_reader(part: ResidualAddition) -> tuple[Any, Operand]:
    """The first expression of a forward that reads an iterate, and the operand that is it.

    All expressions that read it must do so by one variable, which is mixed there for all of them.
    """
    found = [(_in_frame(part, call), call) for call in part.network.readers(part.skip)]
    names = [names_at(where.place) for where, _ in found if where is not None]
    variable = names_at(part.add.place, part.operand)
    if len(names) < len(found) or not variable or not all(variable[0] in read for read in names):
        raise Uneditable(f"{part.add.place.code.co_qualname} does not read its iterate by one variable")
    first, call = found[0]
    assert first is not None
    # The left operand of the addition is read before the calls in its right operand.
    if part.operand == 0 and _holds(part.add.place, first.place):
        return part.add, (0, 2)
    return first, (0, 1) if isinstance(first, ModuleFrame) else (call.args.index(part.skip), len(call.args))


def _holds(outer: CallSite, inner: CallSite) -> bool:
    (first, last, left, right), (a, b, c, d) = outer.span, inner.span
    return (first, left) <= (a, c) and (b, d) <= (last, right)


def _in_frame(part: ResidualAddition, call: Call) -> Call | ModuleFrame | None:
    """The call that a forward makes itself, or the run of a module in it, in which another call is made."""
    if call.frame == part.add.frame:
        return call
    frame = part.network.frames[call.frame]
    while frame.parent is not None and frame.parent != part.add.frame:
        frame = part.network.frames[frame.parent]
    return frame if frame.parent == part.add.frame else None

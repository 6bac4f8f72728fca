"""Making a plan: reading the model, finding the neighbours of every layer, and resolving what layers take in."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from ...errors import ConversionError, MinimandError
from ...functions import Zero, from_activation
from ...network import Network, role
from ...network.reading import read_modes
from ...network.record import Call, CallSite, ModuleFrame, Value
from ...solvers import SVRG, ProxSG, Solver
from ...solvers.sampling import Importance, resolve_sampling
from ..options import SolverOptions
from .edit import Edits, Uneditable, add_edit
from .neighbors import After, Dropout, Join, Obstacle, after, describe, dropout_before, is_alone, may_branch
from .plan import LINEAR, LayerPlan, Plan, Rule, check_plain, solver_layer

__all__ = ["Planner", "readings"]


def readings(model: nn.Module, example: Any) -> list[tuple[Network, Network]]:
    """The records of training and evaluation; those of the children, for a model without a forward of its own."""
    if example is None and getattr(type(model), "forward", None) is nn.Module.forward:
        parts = (child for child in model.children() if not isinstance(child, LINEAR))
        return [pair for child in parts for pair in readings(child, None)]
    pair = read_modes(model, example)
    if example is not None and not any(network.complete for network in pair):
        raise ConversionError(f"the model does not run on the example: {pair[1].reasons[0]}; the model is unchanged")
    return [pair]


class _Taken(NamedTuple):
    """A call that a layer takes in: the record, the layer's path, and the dropout or the addition."""

    network: Network
    path: str
    what: Dropout | Join


class Planner:
    """Plans the conversion of the layers that rules match, given the records of a model."""

    def __init__(self, plan: Plan, rules: dict[str, Rule], records: list[tuple[Network, Network]]) -> None:
        self.plan, self.records = plan, records
        self.paths = {module: path for path, module in plan.model.named_modules()}
        self.rules = {plan.model.get_submodule(path): rule for path, rule in rules.items()}
        self.networks = [network for pair in records for network in pair if network.complete]
        self.calls: dict[nn.Module, list[tuple[Network, Call]]] = {}
        for network in self.networks:
            for call in network.calls:
                if call.place.owner in self.rules and role(call) in ("linear", "conv"):
                    self.calls.setdefault(call.place.owner, []).append((network, call))
        plan.records = tuple(evaluation for _, evaluation in records if evaluation.complete)

    def run(self) -> None:
        """Fill the plan. Where layers turn out not to be convertible, the others are planned again without them."""
        count = -1
        while count != len(self.rules):
            count = len(self.rules)
            self.plan.converted, self.plan.passed, self.plan.edits, self.taken = {}, {}, {}, list[_Taken]()
            for module, rule in list(self.rules.items()):
                try:
                    self.plan.converted[self.paths[module]] = self._layer(module, rule)
                except (Obstacle, MinimandError) as error:
                    self._refuse(self.paths[module], str(error))
            if count == len(self.rules):
                self._resolve()
        plain = [layer for layer in self.plan.converted.values() if layer.options.begins("plain") == "plain"]
        reach = sum(layer.options.solver.reach * self._rounds(layer.module) for layer in plain)
        for layer in self.plan.converted.values():
            layer.options = layer.options.filled("plain", "deterministic", reach)

    def _rounds(self, module: nn.Module) -> int:
        """The largest number of calls of a layer of which each depends on the one before."""
        most, calls = 1, Counter(network for network, _ in self.calls.get(module, ()))
        for network in self.plan.records:
            made: dict[Value, int] = {}
            for call in network.calls if calls[network] > 1 else ():
                before = max((made.get(value, 0) for value in call.reads), default=0)
                here = call.place.owner is module and role(call) in ("linear", "conv")
                made.update(dict.fromkeys(call.produces, before + here))
            most = max((most, *made.values()))
        return most

    def _refuse(self, path: str, why: str) -> None:
        self.plan.refused[path] = why
        self.rules.pop(self.plan.model.get_submodule(path), None)

    def _layer(self, module: nn.Module, rule: Rule) -> LayerPlan:
        check_plain(module)
        path, options, takes = self.paths[module], rule.resolved(), list[str]()
        calls = self.calls.get(module, [])
        if not calls and (rule.activation == "auto" or (rule.dropout == "auto" and options.solver.stochastic)):
            raise Obstacle(self._uncalled(module))
        if any(network.frames[call.frame].keywords for network, call in calls):
            raise Obstacle("it is called with a keyword argument; call it with its input alone")
        found = [self._after(network, call) for network, call in calls]
        function, names = found[0].function if found else Zero(), {around.name: None for around in found}
        if rule.activation not in (None, "auto"):
            function, names = from_activation(self._module(str(rule.activation))), {str(rule.activation): None}
        elif len({(repr(around.function), id(getattr(around.function, "source", None))) for around in found}) > 1:
            kinds = " and ".join(name or "none" for name in names)
            raise Obstacle(f"it is called {_times(calls)} with different activations after it ({kinds})")
        p = self._dropouts(module, rule, calls, takes)
        layer = LayerPlan(module, function, _with_tau(options, p), self._norm(calls, found))
        for (network, _), around in zip(calls, found, strict=True):
            if around.join is not None:
                layer.joined = True
                self.taken.append(_Taken(network, path, around.join))
                takes.append(f"the addition in {around.join.add.path or 'the model'}")
        if layer.norm is not None:
            self.plan.passed[layer.norm] = path
            takes.append(f"{self.paths[layer.norm]} ({type(layer.norm).__name__})")
        layer.takes = tuple(dict.fromkeys((*takes, *filter(None, names))))
        layer.stays = tuple(dict.fromkeys(around.stays for around in found if around.stays))
        filled = dataclasses.replace(layer, options=layer.options.filled("plain", "deterministic"))
        solver_layer(filled, module, layer.norm)  # raises for options that do not fit
        return layer

    def _uncalled(self, module: nn.Module) -> str:
        """Why a layer was not seen, and what to do."""
        path = self.paths[module]
        rule = f"add, as the last rule, {path!r}: Rule(solver, activation=path or None, dropout=path or None)"
        for pair in self.records:
            if module in pair[0].model.modules() and not any(network.complete for network in pair):
                why = pair[1].reasons[0].partition("; pass an example")[0]
                return f"the model cannot be read: {why}; pass example=…, or {rule}"
        for network in self.networks:
            for call in network.calls:
                if any(value.source == "parameter" and value.name.rpartition(".")[0] == path for value in call.inputs):
                    return f"{call.name} uses its weight without calling the layer; call the layer itself"
            if any(frame.path == path for frame in network.frames):
                return f"it is called inside a transform of torch.func, which cannot be read; {rule}"
        return f"no forward calls it on this input; remove it, pass an example that reaches it, or {rule}"

    def _after(self, network: Network, call: Call) -> After:
        auto = self.rules[call.place.owner].activation == "auto"  # type: ignore[index]
        return after(network, call, lambda other: other.place.owner in self.rules) if auto else After()

    def _norm(self, calls: list[tuple[Network, Call]], found: list[After]) -> nn.Module | None:
        """The normalisation that follows every call of a layer and no other call."""
        norms = {around.norm for around in found}
        if norms <= {None}:
            return None
        norm = norms.pop()
        runs = sum(network.module(f.path) is norm for network in self.networks for f in network.frames)
        if norms or runs != len(calls):
            raise Obstacle("its batch normalisation does not follow all of its calls, or also follows other layers")
        return norm

    def _dropouts(
        self, module: nn.Module, rule: Rule, calls: list[tuple[Network, Call]], takes: list[str]
    ) -> float | None:
        """The probability of the dropout that a layer takes in, the same before all of its calls in training."""
        found, given = list[float | None](), rule.dropout not in (None, "auto")
        for network, call in calls:
            dropout = self._dropout(network, call, module) if self._samples(network, call) else None
            path = None if dropout is None or dropout.frame is None else dropout.frame.path
            if given and network.training and path != rule.dropout:
                raise Obstacle(f"{rule.dropout} is not a dropout directly before all of its calls")
            if network.training:
                found.append(None if dropout is None else dropout.p)
            if dropout is not None:
                self.taken.append(_Taken(network, self.paths[module], dropout))
                takes.append(f"{describe(network, dropout.call)} before it")
        if given and not calls:
            named: Any = self._module(str(rule.dropout))
            if type(named) is not nn.Dropout or named in self.plan.passed:
                raise Obstacle(f"{rule.dropout} is not an nn.Dropout that no other layer takes in")
            self.plan.passed[named] = self.paths[module]
            return float(named.p)
        if len(set(found)) > 1:
            raise Obstacle(f"it is called {_times(calls)} with different dropouts before it ({found})")
        if calls and not found and rule.dropout == "auto" and rule.resolved().solver.stochastic:
            raise Obstacle(
                "the model could be read in evaluation only, so the dropout before it is unknown; pass an example that "
                "runs in training, or Rule(..., dropout=None)"
            )
        return found[0] if found else None

    def _module(self, path: str) -> nn.Module:
        found = dict(self.plan.model.named_modules()).get(path)
        if found is None:
            raise Obstacle(f"the rule names {path}, but the model has no such module")
        return found

    def _samples(self, network: Network, call: Call) -> bool:
        """Whether a call is that of a layer that takes in dropout.

        A layer with a batch normalisation does not: the statistics in training are those of ``A y``, and without the
        dropout they would lack the variance that dropout adds.
        """
        rule = self.rules.get(call.place.owner)  # type: ignore[arg-type]
        if rule is None or rule.dropout is None or not rule.resolved().solver.stochastic:
            return False
        try:
            return self._after(network, call).norm is None
        except Obstacle:  # reported for the layer that has it
            return False

    def _dropout(self, network: Network, call: Call, module: nn.Module) -> Dropout | None:
        """The dropout to take in: its output goes only to layers that take it in."""
        found = dropout_before(network, call, module)
        if found is None or not is_alone(network, found, functools.partial(self._samples, network)):
            return None
        rule = self.rules[module]
        _check_dropout(found, rule.resolved().solver)
        if rule.dropout == "auto" and may_branch(network, found.call, call):
            path = None if found.frame is None else found.frame.path
            raise Obstacle(
                f"the forward around {describe(network, found.call)} before it decides by data what it calls, so the "
                f"dropout may have other uses; use Rule(..., dropout={path!r}) to "
                + ("leave it in place" if path is None else "take it in, or None to leave it in place")
            )
        return found

    def _resolve(self) -> None:
        """Dropout modules without remaining calls become the identity; other calls that are taken in are edited."""
        frames = [(id(t.network), t.what.frame.index) for t in self.taken if t.what.frame is not None]
        places: dict[CallSite, list[_Edited]] = {}
        for taken in self.taken:
            if (module := self._passes(taken, frames)) is not None:
                self.plan.passed[module] = taken.path
                continue
            for edited in _edited(taken):
                places.setdefault(edited.part.place, []).append(edited)
        for place, found in places.items():
            try:
                self._edit(place, found)
            except Uneditable as reason:
                joins = isinstance(found[0].taken.what, Join)
                what, leave = ("addition after", "activation") if joins else ("dropout before", "dropout")
                for path in dict.fromkeys(edited.taken.path for edited in found):
                    why = f"the {what} it cannot be taken in, because {reason}"
                    self._refuse(path, f"{why}; use Rule(..., {leave}=None) to leave it in place")

    def _passes(self, taken: _Taken, frames: list[tuple[int, int]]) -> nn.Module | None:
        """The module of a dropout all of whose calls are taken in."""
        if isinstance(taken.what, Join) or taken.what.frame is None:
            return None
        module = taken.network.module(taken.what.frame.path)
        active = ((n, f) for n in self.networks for f in n.frames if f.outputs != f.inputs)
        runs = [(id(n), f.index) for n, f in active if n.module(f.path) is module]
        return module if set(runs) <= set(frames) and "forward" not in vars(module) else None

    def _edit(self, place: CallSite, found: list["_Edited"]) -> None:
        # Calls without consequences do not count, such as dropout in place in evaluation.
        made: Iterator[Any] = (part for network in self.networks for part in (*network.live, *network.frames))
        stays = sum(part.place == place for part in made) - len({edited.part for edited in found})
        if stays or len({edited.text for edited in found}) > 1:
            raise Uneditable(f"the same line of {place.code.co_qualname} also makes calls that stay")
        add_edit(self.plan.edits, place, Edits((((place.span, None), found[0].text),)))


class _Edited(NamedTuple):
    """A call, or a run of a module, whose expression is replaced by a text."""

    taken: _Taken
    part: Call | ModuleFrame
    text: str


def _edited(taken: _Taken) -> Iterator[_Edited]:
    what = taken.what
    if isinstance(what, Join):
        name, side = f"_minimand_{what.frame.place.instruction}", what.operand
        yield _Edited(taken, what.frame, f"({name}_layer := __f).affine({name}_input := __0)")
        # Both operands first: one of them calls the layer.
        result = f"{name}_layer({name}_input, {name}_{1 - side}, {name}_{side})"
        yield _Edited(taken, what.add, f"({name}_0 := __0, {name}_1 := __1) and {result}")
    else:
        yield _Edited(taken, what.call if what.frame is None else what.frame, "__0")


def _check_dropout(dropout: Dropout, solver: Solver) -> None:
    """Reject a dropout in whose place the solver cannot sample."""
    importance = isinstance(solver, ProxSG) and isinstance(resolve_sampling(solver.sampling), Importance)
    additive = isinstance(solver, SVRG) and dropout.frame is not None and len(dropout.frame.inputs) == 1
    alpha = "AlphaDropout before it replaces entries by a constant, so it is not a sampling of the inputs; use Dropout"
    twice = "before it and the solver would both sample; use"
    for wrong, why in (
        (dropout.unit == "alpha", alpha),
        (dropout.p >= 1, "the dropout before it drops everything (p=1); use p < 1"),
        (dropout.unit == "importance" and not importance, f'ImportanceDropout {twice} ProxSG(sampling="importance")'),
        (dropout.unit == "additive" and not additive, f"AdditiveDropout {twice} SVRG"),
    ):
        if wrong:
            raise Obstacle(f"{why}, or Rule(..., dropout=None) to leave it in place")


def _times(calls: list[tuple[Network, Call]]) -> str:
    return f"{max(sum(n is network for n, _ in calls) for network, _ in calls)} times"


def _with_tau(options: SolverOptions, p: float | None) -> SolverOptions:
    """A solver with ``tau=None`` samples the share 1 − p that the dropout keeps."""
    solver: Any = options.solver
    if p is None or getattr(solver, "tau", p) is not None:
        return options
    return dataclasses.replace(options, solver=dataclasses.replace(solver, tau=1.0 - p))

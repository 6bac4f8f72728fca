"""The plan of a conversion, made before the model is changed."""

import dataclasses
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from ...errors import ConversionError, MinimandError
from ...solvers import Solver
from ..layers import SolverConv1d, SolverConv2d, SolverLayer, SolverLinear, SolverOptions
from .block import BlockConv1d, BlockConv2d, BlockLinear, Reference
from .change import is_converted
from .neighbors import (
    IDENTITY,
    Activation,
    After,
    Dropout,
    Obstacle,
    activation_of,
    after,
    dropout_before,
    dropout_of,
    readers_of,
    shares_input,
)
from .rewriting import Edit, Rewrite, rewritten
from .shallow import Unfaithful
from .trace import CallFrame, Traced, is_builtin, scratch, survey

__all__ = ["LayerPlan", "Plan", "Rule", "plan", "solver_layer"]

_LAYERS: Mapping[type[nn.Module], Any] = {
    nn.Linear: (SolverLinear, BlockLinear),
    nn.Conv1d: (SolverConv1d, BlockConv1d),
    nn.Conv2d: (SolverConv2d, BlockConv2d),
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """How to convert the layers that a pattern matches, if a solver alone is not enough.

    Args:
        options: A solver, or a full :class:`~minimand.nn.SolverOptions`.
        activation: ``"auto"`` absorbs the activation directly after the layer. None absorbs none and leaves the
            activation in place. A path names the activation module, for a ``forward`` that cannot be traced.
        dropout: The same for the dropout directly before the layer.

    >>> from minimand.solvers import ProxGD
    >>> Rule(ProxGD(iters=5), activation=None).activation is None
    True
    """

    options: Solver | SolverOptions
    activation: str | None = "auto"
    dropout: str | None = "auto"

    def resolved(self) -> SolverOptions:
        """The options in full."""
        return self.options if isinstance(self.options, SolverOptions) else SolverOptions(solver=self.options)


@dataclasses.dataclass
class LayerPlan:
    """The plan for one layer: the calls that it absorbs, and its options."""

    activation: Activation
    options: SolverOptions
    norm: str | None = None
    skip: bool = False


@dataclasses.dataclass
class Plan:
    """The changes to a model, by the path of the module that changes."""

    layers: dict[str, LayerPlan] = dataclasses.field(default_factory=dict)
    absorbed: list[str] = dataclasses.field(default_factory=list)
    rewrites: dict[str, Rewrite] = dataclasses.field(default_factory=dict)


def solver_layer(plain: nn.Module, layer: LayerPlan, norm: nn.Module | None) -> SolverLayer:
    """The solver form of a plain layer."""
    block = norm is not None or layer.skip
    kind = next(kinds for base, kinds in _LAYERS.items() if isinstance(plain, base))[block]
    result: SolverLayer = kind.from_plain(plain, layer.activation.function, layer.options)
    if block:
        vars(result)["norm"] = Reference(norm)
    return result


def plan(model: nn.Module, rules: Mapping[str, Solver | SolverOptions | Rule]) -> Plan:
    """Plan all changes, or raise one :class:`~minimand.errors.ConversionError` that lists all problems."""
    return _Planner(model).plan(rules)


class _Planner:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.problems: list[str] = []
        self.result = Plan()
        #: The calls to remove, per trace; the value holds the neighbours if the call adds a skip.
        self.dropped: dict[int, dict[fx.Node, After | None]] = {}

    def problem(self, path: str, what: str) -> None:
        self.problems.append(f"{path}: {what}")

    def plan(self, rules: Mapping[str, Solver | SolverOptions | Rule]) -> Plan:
        targets = self._targets(_checked(rules))
        copied = scratch(self.model)
        self.survey = survey(copied)
        self.targets = {copied.get_submodule(path): rule for path, rule in targets.items()}
        self.dropped = {id(traced): {} for traced in self._traces()}
        for module, (path, rule) in zip(self.targets, targets.items(), strict=True):
            try:
                self._layer(path, module, rule)
            except (Obstacle, MinimandError) as error:
                self.problem(path, str(error))
        self._remove()
        if self.problems:
            lines = "\n".join(f"  {line}" for line in self.problems)
            raise ConversionError(f"the model was not converted and is unchanged:\n{lines}")
        return self.result

    def _traces(self) -> Iterator[Traced]:
        for region in self.survey.regions:
            yield from region.modes

    # Layers that the rules match -------------------------------------------------------------------------------

    def _targets(self, rules: dict[str, Rule]) -> dict[str, Rule]:
        """The layers to convert; if several patterns match a layer, the last one applies."""
        places = list(self.model.named_modules(remove_duplicate=False))
        first = {module: path for path, module in self.model.named_modules()}
        hidden = set(_hidden(self.model))
        targets: dict[str, Rule] = {}
        for pattern, rule in rules.items():
            matched = {m: first[m] for path, m in places if path and fnmatch.fnmatchcase(path, pattern)}
            done = [path for m, path in matched.items() if is_converted(m) and isinstance(m, SolverLayer)]
            picked = [path for m, path in matched.items() if isinstance(m, tuple(_LAYERS)) and m not in hidden]
            for path in done:
                self.problem(path, f"is a solver layer already (pattern {pattern!r}); revert the model first")
            targets.update(dict.fromkeys(picked, rule))
            if not picked and not done:
                self.problem(pattern, self._nothing(matched, hidden))
            named = [name for name in (rule.activation, rule.dropout) if name not in (None, "auto")]
            if named and len(picked) > 1:
                self.problem(pattern, f"names {' and '.join(map(str, named))}, but matches {len(picked)} layers")
        return {path: targets[path] for path in first.values() if path in targets}

    def _nothing(self, matched: dict[nn.Module, str], hidden: set[nn.Module]) -> str:
        """Why a pattern matches no layer that can be converted."""
        inside = [path for module, path in matched.items() if module in hidden and isinstance(module, tuple(_LAYERS))]
        if inside:
            return f"matches only {', '.join(map(repr, inside))}, inside a torch module that does not call its layers"
        known = [path for path, module in self.model.named_modules() if isinstance(module, tuple(_LAYERS))]
        listed = ", ".join(map(repr, known[:8])) + (", …" if len(known) > 8 else "")
        available = f"available: {listed}" if known else "the model has no Linear, Conv1d or Conv2d"
        if not matched:
            return f"no such layer; {available}"
        module, path = next(iter(matched.items()))
        return f"matches {path!r} ({type(module).__name__}), which is not a Linear, Conv1d or Conv2d; {available}"

    # One layer -------------------------------------------------------------------------------------------------

    def _layer(self, path: str, module: nn.Module, rule: Rule) -> None:
        _check_plain(module)
        options = rule.resolved()
        calls = [
            (mode, traced, node)
            for region in self.survey.regions
            for mode, traced in enumerate(region.modes)
            for node in traced.frame
            if traced.module(node) is module
        ]
        if calls:
            layer, p = self._seen(calls, module, rule, options)
        else:
            layer, p = self._named(path, rule, options)
        layer.options = _with_tau(options, p)
        norm = None if layer.norm is None else self._module(layer.norm)
        solver = solver_layer(module, layer, norm)
        layer.options.solver.check(solver.operator(), solver.function)
        self.result.layers[path] = layer

    def _seen(
        self, calls: list[tuple[int, Traced, fx.Node]], module: nn.Module, rule: Rule, options: SolverOptions
    ) -> tuple[LayerPlan, float | None]:
        """The neighbours of a layer, which must be the same in all of its calls."""
        for name in ("activation", "dropout"):
            if getattr(rule, name) not in (None, "auto"):
                raise Obstacle(f"its forward can be traced; use {name}='auto' to absorb the {name}, or None")
        found: list[After] = []
        probabilities: list[float | None] = []
        for mode, traced, node in calls:
            if len(node.args) != 1 or node.kwargs:
                raise Obstacle("it is called with more than its input; call it with its input alone")
            around = After(IDENTITY) if rule.activation is None else after(node, traced, self._is_target(traced))
            dropout = self._dropout(traced, node, module) if self._samples(traced, node) else None
            found.append(around)
            if mode:
                probabilities.append(None if dropout is None else dropout.p)
            dropped = self.dropped[id(traced)]
            if dropout is not None and dropout.node is not None:
                dropped[dropout.node] = None
            if around.node is not None:
                dropped[around.node] = None
            if around.skip is not None:
                dropped[around.skip.add] = around
        names = {around.activation.name for around in found}
        if len(names) > 1:
            kinds = " and ".join(sorted(name[0].__name__ for name in names))
            raise Obstacle(f"it is called {_times(calls)} with different activations after it ({kinds})")
        if len(set(probabilities)) > 1:
            raise Obstacle(f"it is called {_times(calls)} with different dropouts before it ({probabilities})")
        skip = any(around.skip is not None for around in found)
        layer = LayerPlan(found[0].activation, options, self._norm(calls, found), skip)
        return layer, probabilities[0] if probabilities else None

    def _is_target(self, traced: Traced) -> Callable[[fx.Node], bool]:
        return lambda node: traced.module(node) in self.targets

    def _norm(self, calls: list[tuple[int, Traced, fx.Node]], found: list[After]) -> str | None:
        """The path of the normalisation that follows every call of a layer and no other call."""
        nodes = [around.norm for around in found]
        norms = {None if n is None else traced.module(n) for (_, traced, _), n in zip(calls, nodes, strict=True)}
        if norms == {None}:
            return None
        norm = norms.pop()
        uses = [node for traced in self._traces() for node in traced.frame if traced.module(node) is norm]
        if norms or norm is None or set(uses) != set(nodes) or not self._is_enclosed(norm):
            raise Obstacle("its batch normalisation does not follow all of its calls, or also follows other layers")
        return self.survey.paths[norm]

    def _dropout(self, traced: Traced, node: fx.Node, module: nn.Module) -> Dropout | None:
        """The dropout to absorb: its output goes only to layers that absorb it."""
        found = dropout_before(node, traced, module)
        if found is None or found.node is None:
            return None
        if found.unit == "alpha":
            raise Obstacle(
                "AlphaDropout before it replaces entries by a constant, so it is not a sampling of the inputs; "
                "use Dropout, or Rule(..., dropout=None) to leave it in place"
            )
        if found.p >= 1:
            raise Obstacle("the dropout before it drops everything (p=1); use p < 1")
        readers = readers_of(found.node)
        alone = len(readers) == 1 or all(self._samples(traced, reader) for reader in readers)
        return found if alone and not shares_input(found) else None

    def _samples(self, traced: Traced, node: fx.Node) -> bool:
        """Whether a node calls a layer that absorbs dropout.

        A layer with a batch normalisation does not: the statistics in training are those of ``A y``, and without the
        dropout they would lack the variance that dropout adds.
        """
        module = traced.module(node)
        rule = None if module is None else self.targets.get(module)
        if rule is None or rule.dropout is None or not rule.resolved().solver.stochastic:
            return False
        try:
            return rule.activation is None or after(node, traced, self._is_target(traced)).norm is None
        except Obstacle:  # reported for the layer that has it
            return False

    def _named(self, path: str, rule: Rule, options: SolverOptions) -> tuple[LayerPlan, float | None]:
        """The neighbours that a rule names, for a layer whose calls were not traced."""
        if rule.activation == "auto" or (rule.dropout == "auto" and options.solver.stochastic):
            parent = self.survey.model.get_submodule(path.rpartition(".")[0])
            reasons = [why for module, why in self.survey.opaque.items() if parent in list(module.modules())]
            if not reasons:
                raise Obstacle(
                    f"no forward calls it, so its neighbours are unknown; remove it, match the other layers only, or "
                    f"add, as the last rule, {path!r}: Rule(solver, activation=None, dropout=None)"
                )
            raise Obstacle(
                f"the forward that calls it cannot be traced ({reasons[-1]}), so its neighbours are unknown; use an "
                f"nn.Sequential, or name them: Rule(solver, activation=path or None, dropout=path or None)"
            )
        activation, p = IDENTITY, None
        if rule.activation is not None:
            activation = activation_of(self._module(rule.activation))
            self._absorb_named(rule.activation)
        if rule.dropout not in (None, "auto"):
            dropout = dropout_of(self._module(str(rule.dropout)))
            if dropout is None or dropout.unit == "alpha":
                raise Obstacle(f"{rule.dropout} is not a dropout that a layer can absorb; use nn.Dropout")
            p = dropout.p
            self._absorb_named(str(rule.dropout))
        return LayerPlan(activation, options), p

    def _module(self, path: str) -> nn.Module:
        try:
            return self.survey.model.get_submodule(path)
        except AttributeError:
            raise Obstacle(f"the rule names {path}, but the model has no such module") from None

    def _absorb_named(self, path: str) -> None:
        module = self._module(path)
        if path in self.result.absorbed or any(t.module(node) is module for t in self._traces() for node in t.frame):
            raise Obstacle(f"{path} is also called elsewhere, so this layer cannot absorb it; use a separate module")
        self.result.absorbed.append(path)

    # Removed calls ---------------------------------------------------------------------------------------------

    def _remove(self) -> None:
        """Modules without remaining calls become the identity; forwards that make other removed calls are rewritten."""
        calls: dict[nn.Module, set[bool]] = {}
        for traced in self._traces():
            for node in traced.frame:
                if (module := traced.module(node)) is not None:
                    calls.setdefault(module, set()).add(node in self.dropped[id(traced)])
        whole = {module for module, dropped in calls.items() if dropped == {True} and self._is_enclosed(module)}
        paths = self.survey.paths
        self.result.absorbed += sorted(paths[module] for module in whole)
        edits: dict[nn.Module, tuple[list[set[Edit]], list[set[Edit]]]] = {}
        plain: dict[nn.Module, set[frozenset[str]]] = {}
        for region in self.survey.regions:
            for mode, traced in enumerate(region.modes):
                for frame in traced.frames:
                    found = self._edits(traced, frame, whole)
                    edits.setdefault(frame.owner, ([], []))[mode].append(found)
                    plain.setdefault(frame.owner, set()).add(frame.plain)
        for owner, modes in edits.items():
            if any(found for mode in modes for found in mode):
                try:
                    self.result.rewrites[paths[owner]] = rewritten(owner, modes, plain[owner])
                except (Unfaithful, Obstacle) as reason:
                    where = paths[owner] or type(owner).__name__
                    self.problem(where, f"its forward must be rewritten without the absorbed calls, but it {reason}")

    def _edits(self, traced: Traced, frame: CallFrame, whole: set[nn.Module]) -> set[Edit]:
        """The edits of one call of a forward."""
        dropped, result = self.dropped[id(traced)], set[Edit]()
        if not any(node in dropped for node in frame.calls):
            return result
        keys = {node: key for key, node in traced.keys(frame).items()}
        for node, key in keys.items():
            if node not in dropped or traced.module(node) in whole:
                continue
            around = dropped[node]
            if around is None or around.skip is None:
                result.add(key)
            else:
                result.add((tuple(keys[link] for link in around.skip.chain), key, around.skip.operand))
        return result

    def _is_enclosed(self, module: nn.Module) -> bool:
        """Whether no module with an untraceable forward is the parent of the module."""
        return not any(module in opaque.children() for opaque in self.survey.opaque)


def _times(calls: list[tuple[int, Traced, fx.Node]]) -> str:
    return f"{sum(mode for mode, _, _ in calls)} times"


def _hidden(model: nn.Module) -> Iterator[nn.Module]:
    """The modules inside modules of torch's own, which do not call their children as modules."""
    for module in model.modules():
        if is_builtin(module) and not isinstance(module, tuple(_LAYERS)):
            yield from (part for part in module.modules() if part is not module)


def _checked(rules: Mapping[str, Solver | SolverOptions | Rule]) -> dict[str, Rule]:
    if not isinstance(rules, Mapping) or not rules:
        raise ConversionError(f'rules is a dict such as {{"classifier.*": ProxSG(iters=10)}}, got {rules!r}')
    for pattern, rule in rules.items():
        options = rule.options if isinstance(rule, Rule) else rule
        if not isinstance(pattern, str) or not isinstance(options, Solver | SolverOptions):
            raise ConversionError(
                f"a rule maps a pattern to a solver such as ProxGD(iters=10), to SolverOptions or to a Rule, "
                f"got {pattern!r}: {rule!r}"
            )
    return {pattern: rule if isinstance(rule, Rule) else Rule(rule) for pattern, rule in rules.items()}


def _check_plain(module: nn.Module) -> None:
    """Reject layers with another forward, a computed weight, no size, or integer weights."""
    plain = next(kind for kind in _LAYERS if isinstance(module, kind))
    if type(module).forward is not plain.forward:
        raise Obstacle(f"{type(module).__name__} overrides forward; only a plain {plain.__name__} can be converted")
    if "weight" not in module._parameters:
        raise Obstacle("its weight is computed (parametrised, normalised or pruned); make it a plain Parameter first")
    if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        raise Obstacle("its parameters are not initialised; run the model once on an input first")
    if not torch.is_floating_point(module._parameters["weight"]):  # type: ignore[arg-type]
        raise Obstacle(f"its weight is {module._parameters['weight'].dtype}; use a floating-point weight")  # type: ignore[union-attr]


def _with_tau(options: SolverOptions, p: float | None) -> SolverOptions:
    """A solver with ``tau=None`` samples the share 1 − p that the dropout keeps."""
    solver: Any = options.solver
    open_ = any(field.name == "tau" for field in dataclasses.fields(solver)) and solver.tau is None
    if p is None or not open_:
        return options
    return dataclasses.replace(options, solver=dataclasses.replace(solver, tau=1.0 - p))

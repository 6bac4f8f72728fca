"""What a conversion will do, decided before anything is done."""

import dataclasses
import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from ...errors import ConversionError, MinimandError
from ...solvers import Problem, Solver
from ..layers import SolverConv1d, SolverConv2d, SolverLayer, SolverLinear, SolverOptions
from .change import Source, is_converted
from .neighbours import Activation, Dropout, Obstacle, activation_after, activation_of, dropout_before, dropout_of
from .neighbours import shares_input as _shares_input
from .shallow import Unfaithful, shallow
from .trace import Frame, Key, Survey, Traced, is_builtin, scratch, survey

__all__ = ["Plan", "Rewrite", "Rule", "plan"]

_LAYERS: Mapping[type[nn.Module], Any] = {
    nn.Linear: SolverLinear,
    nn.Conv1d: SolverConv1d,
    nn.Conv2d: SolverConv2d,
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """What to make of the layers that a pattern picks, where a solver alone does not say it.

    Args:
        options: A solver, or a full :class:`~minimand.nn.SolverOptions`.
        activation: ``"auto"`` takes in the activation directly after; None takes in none, and whatever follows stays;
            a path names the activation module, for a ``forward`` that cannot be traced.
        dropout: The same for the dropout directly before.

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
class Rewrite:
    """A new forward for a module."""

    sources: tuple[Source, Source]
    constants: dict[str, Any]


@dataclasses.dataclass
class Plan:
    """What to do, by the path of the module that it is done to."""

    layers: dict[str, tuple[Activation, SolverOptions]] = dataclasses.field(default_factory=dict)
    absorbed: list[str] = dataclasses.field(default_factory=list)
    rewrites: dict[str, Rewrite] = dataclasses.field(default_factory=dict)


def solver_layer(module: nn.Module, activation: Activation, options: SolverOptions) -> SolverLayer:
    """The solver form of a plain layer."""
    kind = next(solver for plain, solver in _LAYERS.items() if isinstance(module, plain))
    return kind.from_plain(module, activation.function, options)


def plan(model: nn.Module, rules: Mapping[str, Solver | SolverOptions | Rule]) -> Plan:
    """Decide everything, or raise one :class:`~minimand.errors.ConversionError` that lists all problems."""
    return _Planner(model).plan(rules)


class _Planner:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.problems: list[str] = []
        self.result = Plan()
        #: Calls to drop, per trace.
        self.dropped: dict[int, set[fx.Node]] = {}

    def problem(self, path: str, what: str) -> None:
        self.problems.append(f"{path}: {what}")

    def plan(self, rules: Mapping[str, Solver | SolverOptions | Rule]) -> Plan:
        targets = self._targets(_checked(rules))
        twin = scratch(self.model)
        self.survey = survey(twin)
        self.dropped = {id(traced): set() for traced in self._traces()}
        for path, rule in targets.items():
            try:
                self._layer(path, twin.get_submodule(path), rule)
            except (Obstacle, MinimandError) as error:
                self.problem(path, str(error))
        self._remove()
        if self.problems:
            lines = "\n".join(f"  {line}" for line in self.problems)
            raise ConversionError(f"the model was not converted, and nothing was changed:\n{lines}")
        return self.result

    def _traces(self) -> Iterator[Traced]:
        for region in self.survey.regions:
            yield from region.modes

    # What the rules pick ---------------------------------------------------------------------------------------

    def _targets(self, rules: dict[str, Rule]) -> dict[str, Rule]:
        """The layers to convert; of several patterns that pick a layer the last one decides."""
        hidden = set(_hidden(self.model))
        targets: dict[str, Rule] = {}
        for pattern, rule in rules.items():
            matched = [
                (path, module)
                for path, module in self.model.named_modules()
                if path and fnmatch.fnmatchcase(path, pattern)
            ]
            done = [path for path, module in matched if is_converted(module) and isinstance(module, SolverLayer)]
            picked = [path for path, module in matched if isinstance(module, tuple(_LAYERS)) and path not in hidden]
            for path in done:
                self.problem(path, f"is a solver layer already (pattern {pattern!r}); revert the model first")
            for path in picked:
                targets.pop(path, None)
                targets[path] = rule
            if not picked and not done:
                self.problem(pattern, self._nothing(matched, hidden))
            named = [name for name in (rule.activation, rule.dropout) if name not in (None, "auto")]
            if named and len(picked) > 1:
                self.problem(pattern, f"names {' and '.join(map(str, named))} but picks {len(picked)} layers, not one")
        order = {path: i for i, (path, _) in enumerate(self.model.named_modules())}
        return dict(sorted(targets.items(), key=lambda item: order[item[0]]))

    def _nothing(self, matched: list[tuple[str, nn.Module]], hidden: set[str]) -> str:
        inside = [path for path, module in matched if path in hidden and isinstance(module, tuple(_LAYERS))]
        if inside:
            return f"picks only layers inside torch's own modules ({', '.join(inside)}), which compute with them directly"
        known = [path for path, module in self.model.named_modules() if isinstance(module, tuple(_LAYERS))]
        have = f"there are {', '.join(known[:8])}{' …' if len(known) > 8 else ''}" if known else "the model has none"
        what = f"matches {matched[0][0]} ({type(matched[0][1]).__name__}), but" if matched else "matches no module:"
        return f"{what} no Linear, Conv1d or Conv2d; {have}"

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
            activation, p = self._seen(calls, module, rule, options)
        else:
            activation, p = self._named(path, rule, options)
        options = _with_tau(options, p)
        layer = solver_layer(module, activation, options)
        options.solver.check(Problem(layer.operator(), layer.function, layer.weight.detach()))
        self.result.layers[path] = (activation, options)

    def _seen(
        self, calls: list[tuple[int, Traced, fx.Node]], module: nn.Module, rule: Rule, options: SolverOptions
    ) -> tuple[Activation, float | None]:
        """The neighbours of all calls of a layer, which must agree."""
        for name in ("activation", "dropout"):
            if getattr(rule, name) not in (None, "auto"):
                raise Obstacle(f"the forward that calls it can be traced, so {name}='auto' finds it, or None leaves it")
        activations, dropouts = [], []
        for mode, traced, node in calls:
            if len(node.args) != 1 or node.kwargs:
                raise Obstacle("it is called with keywords; call it with its input alone")
            if rule.activation is None:
                activation = activation_of(nn.Identity())
            else:
                activation = activation_after(node, traced)
            activations.append(activation)
            dropout = self._dropout(traced, node, module) if options.solver.stochastic and rule.dropout else None
            if mode:
                dropouts.append(None if dropout is None else dropout.p)
            for found in (activation, dropout):
                if found is not None and found.node is not None:
                    self.dropped[id(traced)].add(found.node)
        names = {activation.name for activation in activations}
        if len(names) > 1:
            kinds = " and ".join(sorted(name[0].__name__ for name in names))
            raise Obstacle(f"it is called {_times(calls)} with different activations ({kinds})")
        if len(set(dropouts)) > 1:
            raise Obstacle(f"it is called {_times(calls)} with different dropouts before it ({dropouts})")
        return activations[0], dropouts[0] if dropouts else None

    def _dropout(self, traced: Traced, node: fx.Node, module: nn.Module) -> Dropout | None:
        found = dropout_before(node, traced, module)
        if found is None:
            return None
        if found.unit == "alpha":
            raise Obstacle(
                "AlphaDropout before it replaces entries by a constant, which is no sampling of the inputs; "
                "use Dropout, or Rule(..., dropout=None) to leave it in place"
            )
        if found.p >= 1:
            raise Obstacle("the dropout before it drops everything (p=1); use p < 1")
        assert found.node is not None
        stays = len([user for user in found.node.users if user.op != "output"]) != 1 or _shares_input(found)
        return None if stays and not self._all_converted(found.node, traced) else found

    def _all_converted(self, node: fx.Node, traced: Traced) -> bool:
        return False

    def _named(self, path: str, rule: Rule, options: SolverOptions) -> tuple[Activation, float | None]:
        """The neighbours that a rule names, for a layer whose calls were not seen."""
        if rule.activation == "auto" or (rule.dropout == "auto" and options.solver.stochastic):
            parent = self.survey.model.get_submodule(path.rpartition(".")[0])
            reasons = [why for module, why in self.survey.opaque.items() if parent in list(module.modules())]
            why = f"the forward that calls it cannot be traced ({reasons[-1]})" if reasons else "no forward calls it"
            raise Obstacle(
                f"{why}, so its neighbours are unknown; put them into an nn.Sequential, or name them: "
                f"Rule(solver, activation=path or None, dropout=path or None)"
            )
        activation, p = activation_of(nn.Identity()), None
        if rule.activation is not None:
            activation = activation_of(self._module(rule.activation))
            self._absorb_named(rule.activation)
        if rule.dropout not in (None, "auto"):
            dropout = dropout_of(self._module(str(rule.dropout)))
            if dropout is None or dropout.unit == "alpha":
                raise Obstacle(f"{rule.dropout} is not a dropout that can be taken in")
            p = dropout.p
            self._absorb_named(str(rule.dropout))
        return activation, p

    def _module(self, path: str) -> nn.Module:
        try:
            return self.survey.model.get_submodule(path)
        except AttributeError:
            raise Obstacle(f"the rule names {path}, but the model has no such module") from None

    def _absorb_named(self, path: str) -> None:
        module = self._module(path)
        if path in self.result.absorbed or any(t.module(node) is module for t in self._traces() for node in t.frame):
            raise Obstacle(f"{path} is called elsewhere, too, so it cannot become a part of this layer")
        self.result.absorbed.append(path)

    # What disappears -------------------------------------------------------------------------------------------

    def _remove(self) -> None:
        """Turn modules all of whose calls are dropped into the identity; rewrite the forwards of the others."""
        calls: dict[nn.Module, set[bool]] = {}
        for traced in self._traces():
            for node in traced.frame:
                if (module := traced.module(node)) is not None:
                    calls.setdefault(module, set()).add(node in self.dropped[id(traced)])
        whole = {module for module, dropped in calls.items() if dropped == {True} and self._is_enclosed(module)}
        paths = self.survey.paths
        self.result.absorbed += sorted(paths[module] for module in whole)
        edits: dict[nn.Module, tuple[list[set[Key]], list[set[Key]]]] = {}
        for region in self.survey.regions:
            for mode, traced in enumerate(region.modes):
                for frame in traced.frames:
                    keys = self._keys(traced, frame, whole)
                    edits.setdefault(frame.owner, ([], []))[mode].append(keys)
        for owner, modes in edits.items():
            if any(keys for mode in modes for keys in mode):
                try:
                    self.result.rewrites[paths[owner]] = _rewritten(owner, modes)
                except (Unfaithful, Obstacle) as reason:
                    where = paths[owner] or "the model"
                    self.problem(where, f"its forward has to be rewritten without what its layers take in, but {reason}")

    def _keys(self, traced: Traced, frame: Frame, whole: set[nn.Module]) -> set[Key]:
        dropped = self.dropped[id(traced)]
        return {traced.key(n) for n in frame.calls if n in dropped and traced.module(n) not in whole}

    def _is_enclosed(self, module: nn.Module) -> bool:
        """Whether no forward that could not be traced holds the module as its own."""
        return not any(module in opaque.children() for opaque in self.survey.opaque)


def _times(calls: list[tuple[int, Traced, fx.Node]]) -> str:
    return f"{sum(mode for mode, _, _ in calls)} times"


def _rewritten(owner: nn.Module, modes: tuple[list[set[Key]], list[set[Key]]]) -> Rewrite:
    for mode in modes:
        if any(keys != mode[0] for keys in mode):
            raise Obstacle(
                f"it runs {len(mode)} times per pass, and not every time before and after layers that take the same "
                f"in; use a module of its own for each"
            )
    own = shallow(owner)
    sources = []
    for traced, mode in zip(own.modes, modes, strict=True):
        calls = traced.keys(traced.frames[0])
        for key in mode[0] if mode else set():
            if key not in calls:
                raise Obstacle(f"the call of {key[1]} in it was not found again")
            node = calls[key]
            node.replace_all_uses_with(node.args[0] if node.args else node.kwargs["input"])  # type: ignore[arg-type]
            traced.graph.erase_node(node)
        traced.graph.lint()
        sources.append(Source.of(traced.graph))
    return Rewrite((sources[0], sources[1]), own.constants)


def _hidden(model: nn.Module) -> Iterator[str]:
    """The paths inside modules of torch's own, which do not call their children as modules."""
    for path, module in model.named_modules():
        if is_builtin(module) and not isinstance(module, tuple(_LAYERS)):
            yield from (f"{path}.{name}" for name, _ in module.named_modules() if name)


def _checked(rules: Mapping[str, Solver | SolverOptions | Rule]) -> dict[str, Rule]:
    if not isinstance(rules, Mapping) or not rules:
        raise ConversionError(f'rules is a dict such as {{"classifier.*": ProxSG(iters=10)}}, got {rules!r}')
    for pattern, rule in rules.items():
        options = rule.options if isinstance(rule, Rule) else rule
        if not isinstance(pattern, str) or not isinstance(options, Solver | SolverOptions):
            raise ConversionError(
                f"a rule maps a pattern to a solver such as ProxGD(iters=10), a SolverOptions or a Rule, "
                f"got {pattern!r}: {rule!r}"
            )
    return {pattern: rule if isinstance(rule, Rule) else Rule(rule) for pattern, rule in rules.items()}


def _check_plain(module: nn.Module) -> None:
    """Refuse what only looks like a plain layer."""
    plain = next(kind for kind in _LAYERS if isinstance(module, kind))
    if type(module).forward is not plain.forward:  # type: ignore[attr-defined]
        raise Obstacle(f"{type(module).__name__} has a forward of its own; only plain {plain.__name__} layers convert")
    if "weight" not in module._parameters:
        raise Obstacle("its weight is computed (parametrised, normalised or pruned); make it a plain Parameter first")
    if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        raise Obstacle("its parameters have no size yet; run the model once on some input first")
    if not torch.is_floating_point(module._parameters["weight"]):  # type: ignore[arg-type]
        raise Obstacle(f"its weight is {module._parameters['weight'].dtype}; only real floats are solved for")  # type: ignore[union-attr]


def _with_tau(options: SolverOptions, p: float | None) -> SolverOptions:
    """A solver that leaves its sample size open takes what the dropout kept."""
    solver: Any = options.solver
    open_ = any(field.name == "tau" for field in dataclasses.fields(solver)) and solver.tau is None
    if p is None or not open_:
        return options
    return dataclasses.replace(options, solver=dataclasses.replace(solver, tau=1.0 - p))

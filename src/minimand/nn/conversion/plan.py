"""The plan of a conversion, made before the model is changed."""

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from ...errors import ConversionError
from ...functions import Function
from ...network import Network
from ...network.graph import is_layer
from ...solvers import ADMM, RCD, Solver
from ..layers import SolverLayer
from ..options import SolverOptions
from ..table import table_lines
from .block import BLOCKS
from .edit import Edits
from .neighbors import Obstacle

__all__ = ["LayerPlan", "Plan", "Rule", "Rules", "as_rules", "solver_layer", "targets"]

_LAYERS = tuple(BLOCKS)
#: Modules of torch that call their children as modules.
_CALLING = (
    nn.Transformer, nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder, nn.TransformerDecoderLayer
)  # fmt: skip
LINEAR = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)
_QUANTIZED = "is quantised, and a solver needs the floating-point weight; convert the model before it is quantised"
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclasses.dataclass(frozen=True)
class Rule:
    """How to convert the layers that a pattern matches, if a solver alone is not enough.

    Args:
        options: A solver, or a full :class:`~minimand.nn.SolverOptions`.
        activation: ``"auto"`` takes the activation directly after the layer. None converts the layer without an
            activation. A path names the activation module, for a ``forward`` that cannot be read.
        dropout: ``"auto"`` takes in the dropout directly before the layer, None leaves it in place. A path names the
            dropout module, for a ``forward`` that cannot be read or that branches on data.

    >>> from minimand.solvers import ProxGD
    >>> Rule(ProxGD(iters=5), activation=None).activation is None
    True
    """

    options: Solver | SolverOptions
    activation: str | None = "auto"
    dropout: str | None = "auto"

    def resolved(self) -> SolverOptions:
        """The options as a record."""
        return self.options if isinstance(self.options, SolverOptions) else SolverOptions(solver=self.options)


Rules = Mapping[str, Solver | SolverOptions | Rule] | Solver | SolverOptions | Rule


@dataclasses.dataclass
class LayerPlan:
    """The plan for one layer: the module, its function, options and normalisation, and in words what it takes in and
    which normalisation it leaves outside."""

    module: nn.Module
    function: Function
    options: SolverOptions
    norm: nn.Module | None = None
    joined: bool = False
    takes: tuple[str, ...] = ()
    stays: tuple[str, ...] = ()

    def __str__(self) -> str:
        solver = self.options.solver
        name = f"{type(solver).__name__}({solver.iterations})"
        taken = f" with {', '.join(self.takes)}" if self.takes else ""
        return f"converted: {name}{taken}" + (f"; {', '.join(self.stays)} stays after it" if self.stays else "")


@dataclasses.dataclass(eq=False)
class Plan:
    """The changes that a conversion would make to a model. It prints as a table of its linear layers and convolutions.

    Attributes:
        converted: The plan for each layer that will be converted, by path.
        refused: Why a layer that a rule matches cannot be converted and what to do, by path.
        left: Why a layer is left as it is, by path.
        lenient: Whether one rule was given for every layer that can be converted, so that refusals are no errors.
    """

    model: nn.Module
    converted: dict[str, LayerPlan] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    left: dict[str, str] = dataclasses.field(default_factory=dict)
    lenient: bool = False
    #: All modules by path when the plan was made.
    modules: dict[str, nn.Module] = dataclasses.field(init=False, repr=False)
    #: Modules that become the identity, with the path of the layer that takes them in.
    passed: dict[nn.Module, str] = dataclasses.field(default_factory=dict, repr=False)
    #: Edits by module and method.
    edits: dict[tuple[nn.Module, str], Edits] = dataclasses.field(default_factory=dict, repr=False)
    #: The records of evaluation.
    records: tuple[Network, ...] = dataclasses.field(default=(), repr=False)
    #: What a suggestion says about a layer, by path, and about the whole.
    remarks: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)
    summary: str = ""

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules())

    def __str__(self) -> str:
        words = {path: f"left: {why}" for path, why in self.left.items()}
        words |= {path: f"refused: {why}" for path, why in self.refused.items()}
        words |= {path: str(layer) for path, layer in self.converted.items()}
        words |= {path: f"{words[path]}; {remark}" for path, remark in self.remarks.items()}
        columns = {
            "path": lambda path: path,
            "layer": lambda path: _described(self.model.get_submodule(path)),
            "cost": lambda path: f"{_cost(self.converted[path]):.3g}×" if path in self.converted else "",
            "plan": words.__getitem__,
        }
        lines = table_lines(columns, [path for path, _ in self.model.named_modules() if path in words])
        return "\n".join([*lines, self.summary] if self.summary else lines)


def _described(module: Any) -> str:
    kind = "features" if hasattr(module, "in_features") else "channels"
    name = parametrize.type_before_parametrizations(module).__name__
    return f"{name} {getattr(module, f'in_{kind}', '?')}→{getattr(module, f'out_{kind}', '?')}"


def _cost(layer: LayerPlan) -> float:
    """The multiply-adds of the solver relative to the plain layer, without the savings of a Gram matrix."""
    solver, count = layer.options.solver, layer.options.solver.iterations
    if isinstance(solver, ADMM):
        dense = layer.module if isinstance(layer.module, nn.Linear) else None
        return 1 + 2 * count * (solver.cg_iters if dense is None else min(dense.out_features / dense.in_features, 1))
    tau = getattr(solver, "tau", None)
    share = (0.5 if tau is None else tau) if layer.options.shared_sample and isinstance(tau, float | None) else 1.0
    return share * 2 * count if isinstance(solver, RCD) else share * (2 * count - 1)


def solver_layer(layer: LayerPlan, plain: nn.Module, norm: nn.Module | None) -> SolverLayer:
    """The solver form of a plain layer, which leaves the activation to the network."""
    block = norm is not None or layer.joined
    kinds = next(kinds for base, kinds in BLOCKS.items() if isinstance(plain, base))
    result = (kinds[1] if block else kinds[0]).from_plain(plain, layer.function, layer.options, "preactivation")
    if block:
        vars(result)["norm"] = (norm,)
    return result


def as_rules(rules: Any) -> dict[str, Rule]:
    """The rules in full; a single one is that of the pattern ``"*"``."""
    given = rules if isinstance(rules, Mapping) else {"*": rules}
    for pattern, rule in given.items():
        options = rule.options if isinstance(rule, Rule) else rule
        if not isinstance(pattern, str) or not isinstance(options, Solver | SolverOptions):
            raise ConversionError(
                f"a rule is a solver such as ProxGD(iters=10), SolverOptions or a Rule, and rules is one of them or a "
                f'dict that maps patterns to them, such as {{"classifier.*": ProxSG(iters=10)}}; got {rules!r}'
            )
    if not given:
        raise ConversionError('rules is empty; use a dict such as {"classifier.*": ProxSG(iters=10)}')
    return {pattern: rule if isinstance(rule, Rule) else Rule(rule) for pattern, rule in given.items()}


def targets(plan: Plan, rules: Mapping[str, Rule]) -> tuple[dict[str, Rule], dict[str, str]]:
    """The layers that the rules match, of which the last decides, and what is wrong with rules.

    It also notes in the plan why other layers are left or refused.
    """
    places = list(plan.model.named_modules(remove_duplicate=False))
    first = {module: path for path, module in plan.model.named_modules()}
    # Modules of torch need not call their children as modules.
    layers = (module for module in plan.model.modules() if is_layer(module) and not isinstance(module, _CALLING))
    hidden = {part for layer in layers for part in layer.modules() if part is not layer}
    found, wrong = dict[str, Rule](), dict[str, str]()
    for pattern, rule in rules.items():
        matched = {m: first[m] for path, m in places if path and fnmatch.fnmatchcase(path, pattern)}
        picked = [path for m, path in matched.items() if isinstance(m, _LAYERS) and m not in hidden]
        done = [path for m, path in matched.items() if isinstance(m, SolverLayer)]
        found.update(dict.fromkeys(picked, rule))
        again = plan.left if plan.lenient else plan.refused
        again.update(dict.fromkeys(done, f"is a solver layer already (pattern {pattern!r}); revert the model first"))
        if not picked and not done:
            wrong[pattern] = _nothing(plan.model, pattern, matched, hidden)
        named = [name for name in (rule.activation, rule.dropout) if name not in (None, "auto")]
        if named and len(picked) > 1:
            wrong[pattern] = f"names {' and '.join(map(str, named))}, but matches {len(picked)} layers"
    for module, path in first.items():
        if (isinstance(module, LINEAR) or _quantized(module)) and path not in found:
            plan.left[path] = _left(module, hidden)
    return {path: found[path] for path in first.values() if path in found}, wrong


def _quantized(module: nn.Module) -> bool:
    """Whether a layer, or its weight, is of a class that stands for one with few bits, by its name."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    kinds = type(module), type(module._parameters.get("weight"))
    sized = hasattr(module, "in_features") or hasattr(module, "in_channels")
    return sized and any(
        re.search("quant(?!izable)", f"{kind.__module__}.{kind.__qualname__}".lower()) for kind in kinds
    )


def _left(module: nn.Module, hidden: set[nn.Module]) -> str:
    if _quantized(module):
        return _QUANTIZED
    if module in hidden:
        return "the module of torch around it uses its weight without calling it"
    return "no rule matches" if isinstance(module, _LAYERS) else f"{type(module).__name__} has no solver form"


def _nothing(model: nn.Module, pattern: str, matched: dict[nn.Module, str], hidden: set[nn.Module]) -> str:
    """Why a pattern matches no layer that can be converted."""
    inside = [path for module, path in matched.items() if module in hidden and isinstance(module, _LAYERS)]
    if inside:
        listed = ", ".join(map(repr, inside[:5])) + (", …" if len(inside) > 5 else "")
        return f"matches only {listed}, inside a torch module that does not call its layers"
    known = [path for path, m in model.named_modules() if isinstance(m, _LAYERS) and m not in hidden]
    listed = ", ".join(map(repr, difflib.get_close_matches(pattern, known, 5, 0.0)))
    some = f"the nearest: {listed} of {len(known)} layers" if len(known) > 5 else f"available: {listed}"
    available = some if known else "the model has no linear layer or convolution of torch"
    if not matched:
        return f"no such layer; {available}"
    module, path = next(((m, path) for m, path in matched.items() if _quantized(m)), next(iter(matched.items())))
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    if _quantized(module):
        return f"matches {path!r}, a {kind}, which {_QUANTIZED}"
    return f"matches {path!r}, a {kind}, which is not a linear layer or convolution with a solver form; {available}"


def check_plain(module: nn.Module) -> None:
    """Reject layers with another forward, a computed weight, no size, or integer weights."""
    plain = next(kind for kind in _LAYERS if isinstance(module, kind))
    if type(module).forward is not plain.forward or "forward" in vars(module):
        name, torchs = f"{type(module).__module__}.{type(module).__qualname__}", f"torch.nn.{plain.__name__}"
        raise Obstacle(f"{name} overrides the forward of {torchs}, so it may be another map; use {torchs}")
    if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        raise Obstacle("its parameters are not initialised; run the model once on an input first")
    if _quantized(module):
        raise Obstacle(f"it {_QUANTIZED}")
    if (wrong := next((p for p in module.parameters() if p.dtype not in _TYPES), None)) is not None:
        raise Obstacle(f"its weight is {wrong.dtype}; use a floating-point weight of 16 bits or more")

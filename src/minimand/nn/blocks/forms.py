"""Heavy-ball and Nesterov forms of existing residual networks."""

import fnmatch
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar

from torch import fx, nn

from ...errors import ConversionError, OptionError
from ..conversion.change import adopt, rewrite
from ..conversion.clone import clone
from ..conversion.rewriting import Rewrite
from ..conversion.trace import Traced
from ..convert import check_unwrapped
from .coefficients import Coefficients, LearnedMomentum
from .residual import ResidualAddition, ResidualSearch, ResidualStage, additions, find_stages

__all__ = ["as_algorithm", "coefficient_parameters"]

M = TypeVar("M", bound=nn.Module)
_ALGORITHMS = ("heavy_ball", "nesterov")
_PREVIOUS = "previous_iterate"


def coefficient_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The learned coefficients of a network, for a parameter group without weight decay, which would shrink skip
    connections.

    >>> from minimand.nn import OptimizationNet
    >>> net = OptimizationNet([nn.Linear(2, 2)] * 3, "heavy_ball", learnable=True)
    >>> len(list(coefficient_parameters(net)))
    3
    """
    for module in model.modules():
        if isinstance(module, Coefficients):
            yield from module.parameters()


def as_algorithm(
    model: M,
    algorithm: Literal["heavy_ball", "nesterov"],
    *,
    stages: str | Sequence[str] | None = None,
    constraint: Literal["sum"] | None = None,
    inplace: bool = False,
) -> M:
    r"""Turn a residual network into its heavy-ball or Nesterov form, which initially computes the same function.

    A residual block computes :math:`x^+ = \sigma(F(x) + x)`. Its heavy-ball form is
    :math:`\sigma(F(x) + \beta_1 x + \beta_2 x_-)`, where :math:`x_-` is the input of the previous block. Nesterov's
    form evaluates the block at :math:`\beta_1 x + \beta_2 x_-`. Both start at :math:`\beta_1 = 1,\ \beta_2 = 0`, so the
    network's function changes only through training.

    A stage is a run of two or more residual updates of one shape: blocks that a forward calls one after the other, or
    additions in one forward. Momentum restarts in each stage. Forwards are rewritten as by
    :func:`~minimand.nn.convert`: the result is an instance of the same class with the same paths, Parameters and hooks,
    and :func:`~minimand.nn.revert` removes the coefficients. The coefficients are the child ``heavy_ball`` or
    ``nesterov`` of each block, or of the module whose forward makes the additions.

    Args:
        model: A network with residual blocks. Skips must be identities; a projection begins a new stage.
        algorithm: ``"heavy_ball"`` or ``"nesterov"``.
        stages: Patterns (fnmatch) on the paths of the stages, such as ``"layer[12]"``; None: all stages.
        constraint: ``"sum"`` keeps :math:`\beta_1 + \beta_2 = 1`. ``"positive"`` is not available, because
            :math:`\beta_2` starts at 0 and has no sign to keep.
        inplace: Change ``model`` itself and return it. Otherwise modules are copied and Parameters are shared.

    Raises:
        OptionError: For an unknown algorithm or constraint. The model is unchanged.
        ConversionError: If no stage is found; it lists the modules that were examined. The model is unchanged.

    Source: [Lin2019], eq. (16) and Nesterov's relaxation.

    >>> import torch
    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.linear = nn.Linear(4, 4)
    ...     def forward(self, x):
    ...         return torch.relu(self.linear(x) + x)
    >>> model, x = nn.Sequential(*(Block() for _ in range(3))), torch.randn(2, 4)
    >>> tuned = as_algorithm(model, "heavy_ball")
    >>> torch.equal(tuned(x), model(x)), tuned[0].linear.weight is model[0].linear.weight
    (True, True)
    >>> [name for name, _ in tuned.named_parameters() if "heavy" in name][0]
    '0.heavy_ball.coefficients.weight'
    """
    if algorithm not in _ALGORITHMS:
        raise OptionError(f'algorithm must be "heavy_ball" or "nesterov", got {algorithm!r}')
    if constraint not in (None, "sum"):
        raise OptionError(
            f'constraint must be "sum" or None (not "positive": the coefficients start at (1, 0), and 0 has no sign), '
            f"got {constraint!r}"
        )
    if not isinstance(model, nn.Module):
        raise ConversionError(f"as_algorithm takes an nn.Module, got {type(model).__name__}")
    _check_patterns(stages)
    check_unwrapped(model)
    found = find_stages(model)
    picked = _picked(found, stages)
    _check_names(found, picked, algorithm)
    edits = _Edits(found, algorithm)
    for stage in picked:
        edits.stage(stage)
    touched = [owner for owner in found.paths if owner in edits.touched]
    rewrites = {found.paths[owner]: Rewrite.of(found.forwards[owner]) for owner in touched}
    result = model if inplace else clone(model)
    for path, forward in rewrites.items():
        rewrite(result.get_submodule(path), forward.sources, forward.constants)
    for path, count in edits.added.items():
        _attach(result.get_submodule(path), algorithm, count, constraint)
    return result


def _check_patterns(stages: object) -> None:
    """Check that ``stages`` is a pattern or a list of patterns that is not empty."""
    many = list(stages) if isinstance(stages, list | tuple | set | frozenset) else [stages]
    if stages is not None and not (many and all(isinstance(pattern, str) for pattern in many)):
        raise OptionError(f"stages must be a pattern such as 'layer[12]', a list of them, or None, got {stages!r}")


def _picked(found: ResidualSearch, stages: str | Sequence[str] | None) -> list[ResidualStage]:
    """The stages that match the patterns; a pattern without a match is an error."""
    if not found.stages:
        seen = "\n".join(f"  {line}" for line in found.seen) or "  only modules of torch"
        raise ConversionError(
            f"no residual stage was found: two or more consecutive residual updates x + F(x) with an identity skip and "
            f"an F that has parameters. The model is unchanged. Examined modules:\n{seen}"
        )
    if stages is None:
        return found.stages
    patterns = [stages] if isinstance(stages, str) else stages
    there = ", ".join(f"{stage.path or 'the model itself'} ({len(stage)} updates)" for stage in found.stages)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(stage.path, pattern) for stage in found.stages):
            raise ConversionError(f"{pattern!r} matches no residual stage; available: {there}. The model is unchanged")
    return [stage for stage in found.stages if any(fnmatch.fnmatchcase(stage.path, p) for p in patterns)]


def _check_names(found: ResidualSearch, picked: list[ResidualStage], algorithm: str) -> None:
    """Reject blocks that already have an attribute with the name of the coefficients."""
    for stage in picked:
        for owner in [block for _, block in stage.calls] or [stage.owner]:
            where = found.paths[owner] or type(owner).__name__
            if hasattr(owner, algorithm):
                raise ConversionError(f"{where} already has an attribute {algorithm!r}; rename it first")


def _attach(owner: nn.Module, name: str, count: int | None, constraint: Literal["sum"] | None) -> None:
    """Add coefficients for a block, or for each addition of a forward, on the device of its parameters."""
    made = [LearnedMomentum(constraint) for _ in range(count or 1)]
    child: nn.Module = made[0] if count is None else nn.ModuleList(made)
    like = next(owner.parameters())
    adopt(owner, name, child.to(like.device, like.dtype))


class _Edits:
    """The edits of the traced forwards of a scratch copy."""

    def __init__(self, found: ResidualSearch, algorithm: str) -> None:
        self.found = found
        self.algorithm = algorithm
        self.touched: set[nn.Module] = set()
        #: The number of coefficients that a module gets, by its path; None for a block.
        self.added: dict[str, int | None] = {}

    def stage(self, stage: ResidualStage) -> None:
        """Pass the previous iterate to every update."""
        self.touched.add(stage.owner)
        if stage.additions:
            path = self.found.paths[stage.owner]
            first = self.added.get(path) or 0
            self.added[path] = first + len(stage)
            for traced in self.found.forwards[stage.owner].modes:
                self._additions(traced, stage.additions, first)
        for _, block in stage.calls:
            if self.found.paths[block] not in self.added:
                self._block(block)
        for traced in self.found.forwards[stage.owner].modes:
            calls = traced.keys(traced.frames[0])
            for (before, _), (key, _) in itertools.pairwise(stage.calls):
                # By name, because the block's own arguments with defaults come first.
                calls[key].kwargs = {_PREVIOUS: calls[before].args[0]}

    def _block(self, block: nn.Module) -> None:
        """Give a block the previous iterate as an additional argument."""
        path = self.found.paths[block]
        self.touched.add(block)
        self.added[path] = None
        ((addition,),) = self.found.forms[block].chains
        for traced in self.found.forwards[block].modes:
            inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
            if any(str(node.target).startswith("*") or node.target == _PREVIOUS for node in inputs):
                raise ConversionError(f"{path}: its forward takes *args or **kwargs; give it named arguments")
            with traced.graph.inserting_after(inputs[-1]):
                previous = traced.graph.placeholder(_PREVIOUS, default_value=None)
            add, _ = additions(traced)[addition.index]
            self._update(traced.graph, add, inputs[0], previous, self.algorithm)

    def _additions(self, traced: Traced, chain: tuple[ResidualAddition, ...], first: int) -> None:
        previous = None
        found = additions(traced)
        for k, addition in enumerate(chain, first):
            add, operands = found[addition.index]
            self._update(traced.graph, add, operands[addition.operand], previous, f"{self.algorithm}.{k}")
            previous = operands[addition.operand]

    def _update(self, graph: fx.Graph, add: fx.Node, x: fx.Node, previous: fx.Node | None, target: str) -> None:
        """Replace x by β₁x + β₂x₋, in the skip (heavy ball) or in the whole block (Nesterov)."""
        args = (x,) if previous is None else (x, previous)
        if self.algorithm == "heavy_ball":
            with graph.inserting_before(add):
                mixed = graph.call_module(target, args)
            add.args = tuple(mixed if arg is x else arg for arg in add.args)
            return
        inside = _between(x, add)
        with graph.inserting_after(x if previous is None or x.op != "placeholder" else previous):
            mixed = graph.call_module(target, args)
        for user in list(x.users):
            if user in inside and user is not mixed:
                user.replace_input_with(x, mixed)


def _between(x: fx.Node, add: fx.Node) -> set[fx.Node]:
    """The calls between a skip and its addition."""
    inside, pending = {add}, [add]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source is not x and source not in inside:
                inside.add(source)
                pending.append(source)
    return inside

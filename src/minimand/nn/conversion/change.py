"""Changes to modules in place, and their reversal. Objects, hooks, attributes and ``state_dict`` keys stay."""

import importlib
import inspect
import types
from typing import Any, NamedTuple

import torch.fx
from torch import Tensor, nn

from ...errors import ConversionError
from ..layers import SolverLayer
from .clone import INTERNAL

__all__ = ["Absorbed", "RewrittenForward", "absorb", "adopt", "is_converted", "rewrite", "undo"]

_ORIGINAL = "_minimand_original"


class OriginalState(NamedTuple):
    """The original state of a module: class, overwritten attributes, and names of added attributes and children."""

    kind: type[nn.Module]
    replaced: dict[str, Any]
    added: tuple[str, ...]
    children: tuple[str, ...]


class Absorbed(nn.Identity):
    """An activation or a dropout that a solver layer has absorbed."""

    def extra_repr(self) -> str:
        """The original class."""
        return vars(self)[_ORIGINAL].kind.__name__


def is_converted(module: nn.Module) -> bool:
    """Whether the module was changed by a conversion."""
    return _ORIGINAL in vars(module) or isinstance(vars(module).get("forward"), RewrittenForward)


def become(module: nn.Module, layer: SolverLayer) -> None:
    """Turn a plain layer into a solver layer, in place."""
    state = {name: value for name, value in vars(layer).items() if name not in INTERNAL}
    replaced = {name: vars(module)[name] for name in state if name in vars(module)}
    origin = OriginalState(type(module), replaced, tuple(state), tuple(layer._modules))
    vars(module).update(state)
    vars(module)[_ORIGINAL] = origin
    module._modules.update(layer._modules)
    module.__class__ = type(layer)


def absorb(module: nn.Module) -> None:
    """Turn an activation or a dropout into the identity, in place."""
    vars(module)[_ORIGINAL] = OriginalState(type(module), {}, (), ())
    module.__class__ = Absorbed


def adopt(module: nn.Module, name: str, child: nn.Module) -> None:
    """Add a child to a module, in place; :func:`undo` removes it."""
    vars(module)[_ORIGINAL] = OriginalState(type(module), {}, (), (name,))
    module._modules[name] = child


def undo(module: nn.Module) -> None:
    """Restore the original module."""
    if (origin := vars(module).pop(_ORIGINAL, None)) is not None:
        for name in origin.added:
            del vars(module)[name]
        for name in origin.children:
            del module._modules[name]
        vars(module).update(origin.replaced)
        module.__class__ = origin.kind
    forward = vars(module).get("forward")
    if isinstance(forward, RewrittenForward):
        del vars(module)["forward"]
        vars(module).update(forward.previous)
    elif forward is passed:
        del vars(module)["forward"]


class Source(NamedTuple):
    """The source text of a function with the names it uses. Unlike the function it can be pickled."""

    text: str
    names: dict[str, Any]
    modules: dict[str, str]

    @classmethod
    def of(cls, graph: torch.fx.Graph) -> "Source":
        """The ``forward`` of a graph."""
        code = graph.python_code("self")
        modules = {name: value.__name__ for name, value in code.globals.items() if _is_namespace(value)}
        names = {name: value for name, value in code.globals.items() if name not in modules}
        return cls(code.src, names, modules)

    def compile(self) -> types.FunctionType:
        """The function."""
        space: dict[str, Any] = {name: importlib.import_module(module) for name, module in self.modules.items()}
        space.update(self.names)
        exec(compile(self.text, "<minimand: the rewritten forward>", "exec"), space)
        return space["forward"]


def _is_namespace(value: object) -> bool:
    return type(value).__name__ == "module"


class RewrittenForward:
    """A module's ``forward`` without the calls that its solver layers have absorbed.

    There is one version for training and one for evaluation, since the user's code may branch on ``self.training``.
    Attributes that the code read during tracing are constants. Changing one later raises an error.

    Args:
        module: The owner of the forward.
        sources: For evaluation and for training.
        constants: The attributes that were read, with their values.
        previous: The ``forward`` attribute that the instance had before, if any.
    """

    def __init__(
        self,
        module: nn.Module,
        sources: tuple[Source, Source],
        constants: dict[str, Any],
        previous: dict[str, Any],
    ) -> None:
        self.module = module
        self.sources = sources
        self.constants = constants
        self.previous = previous
        self._compile()

    def _compile(self) -> None:
        evaluation, training = (source.compile() for source in self.sources)
        self.evaluation, self.training = evaluation, training
        # torch.export reads the code and the signature of a forward.
        self.__code__ = evaluation.__code__
        self.__signature__ = inspect.signature(types.MethodType(evaluation, self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the current mode."""
        module = self.module
        for name, value in self.constants.items():
            if getattr(module, name) != value:
                raise ConversionError(
                    f"{type(module).__name__}.{name} was {value!r} when its forward was converted and is now "
                    f"{getattr(module, name)!r}; revert the model, set it, and convert again"
                )
        if module.training:
            return self.training(module, *args, **kwargs)
        return self.evaluation(module, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        compiled = ("evaluation", "training", "__code__", "__signature__")
        return {name: value for name, value in vars(self).items() if name not in compiled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._compile()


def rewrite(module: nn.Module, sources: tuple[Source, Source], constants: dict[str, Any]) -> None:
    """Give a module a rewritten forward, in place."""
    before = vars(module).get("forward")
    if isinstance(before, RewrittenForward):
        previous, constants = before.previous, before.constants | constants
    else:
        previous = {} if before is None else {"forward": before}
    vars(module)["forward"] = RewrittenForward(module, sources, constants, previous)


def pass_through(module: nn.Module) -> None:
    """Make a normalisation the identity, in place; its class, parameters and statistics stay."""
    vars(module)["forward"] = passed


def passed(input: Tensor) -> Tensor:
    """The forward of a normalisation that a solver layer computes itself."""
    return input

"""Existing networks with solvers for layers, and back."""

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

from ..errors import ConversionError
from ..solvers import Solver
from .conversion.change import absorb, become, rewrite, undo
from .conversion.clone import clone
from .conversion.plan import Rule, plan, solver_layer
from .layers import SolverOptions

__all__ = ["Rule", "convert", "revert"]

M = TypeVar("M", bound=nn.Module)


def convert(model: M, rules: Mapping[str, Solver | SolverOptions | Rule], *, inplace: bool = False) -> M:
    """Replace blocks dropout → linear or convolution → activation by solvers, with the same parameters."""
    _check_model(model)
    steps = plan(model, rules)
    result = model if inplace else clone(model)
    for path, (activation, options) in steps.layers.items():
        module = result.get_submodule(path)
        become(module, solver_layer(module, activation, options))
    for path in steps.absorbed:
        absorb(result.get_submodule(path))
    for path, forward in steps.rewrites.items():
        rewrite(result.get_submodule(path), forward.sources, forward.constants)
    return result


def revert(model: M, *, inplace: bool = False) -> M:
    """Undo :func:`convert`."""
    result = model if inplace else clone(model)
    if not any([undo(module) for module in list(result.modules())]):
        raise ConversionError("no layer of this model was converted, so there is nothing to revert")
    return result


def _check_model(model: nn.Module) -> None:
    pass

"""Existing networks with solvers for layers, and back."""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import nn

from ..errors import ConversionError
from ..solvers import Solver
from .conversion.change import absorb, become, is_converted, pass_through, rewrite, undo
from .conversion.clone import clone
from .conversion.plan import Rule, plan, solver_layer
from .layers import SolverOptions

__all__ = ["Rule", "convert", "revert"]

M = TypeVar("M", bound=nn.Module)


def convert(model: M, rules: Mapping[str, Solver | SolverOptions | Rule], *, inplace: bool = False) -> M:
    """Replace blocks dropout → linear or convolution → activation by solvers, with the same parameters.

    The result computes what ``model`` did, with several iterations of a solver where there was one. It is an instance
    of the same class; paths, Parameters, ``state_dict`` keys, hooks, attributes and methods stay, so optimizers and
    checkpoints of before keep working.

    Args:
        model: Any network. Its forward is traced with :mod:`torch.fx`; where that fails, only what stands in an
            ``nn.Sequential`` is found, and the rest has to be named by a :class:`Rule`.
        rules: Patterns (:mod:`fnmatch`, on module paths) to solvers, to :class:`~minimand.nn.SolverOptions`, or to
            a :class:`Rule`. They pick Linear, Conv1d and Conv2d layers and nothing else; of several patterns that
            pick a layer the last one decides.
        inplace: Change ``model`` itself and return it. Otherwise modules are copied, and Parameters and buffers are
            shared with the original.

    A layer takes in

    - the activation directly after it, as a module, a function or a method; none: the identity. Softmax acts on
      whole vectors and stays;
    - a batch normalisation in between, folded into the operator with the statistics of the present mode;
    - a tensor added in between (a residual block), as a part of the bias, where the same forward adds it and an
      activation follows;
    - if its solver is stochastic, the dropout directly before it: of entries (a reshape may stand in between;
      a convolution samples whole channels instead), or of channels before a convolution of that dimension. A solver
      with ``tau=None`` then samples a share of 1 − p of the inputs. Dropout that also feeds other things stays, and
      so does any dropout before a deterministic solver, or before a layer that takes a batch normalisation in: its
      statistics are those of the dropped inputs.

    A converted layer is a :class:`~minimand.nn.SolverLayer` and no longer an instance of its plain class.

    Calls that are taken in disappear from the forward that makes them: a module that is called nowhere else becomes
    the identity; otherwise that forward is replaced by its graph, if the graph does all that it does.

    Raises:
        ConversionError: With every problem and its path. Nothing was changed.

    Source: 000, §3.4, §4 and appendix J.

    >>> import torch
    >>> from minimand.solvers import ProxGD, ProxSG
    >>> model = nn.Sequential(nn.Dropout(0.25), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> converted = convert(model, {"1": ProxSG(iters=10), "3": ProxGD(iters=30)})
    >>> converted[1].solver.tau, converted[1].function, converted[3].function
    (0.75, NonNegative(), Zero())
    >>> converted[1].weight is model[1].weight
    True
    >>> one = SolverOptions(ProxGD(iters=1, step=1.0), ridge=0.0)
    >>> x = torch.randn(5, 8)
    >>> torch.equal(convert(model.eval(), {"*": one})(x), model(x))
    True
    >>> convert(nn.Sequential(nn.Linear(8, 4), nn.GELU()), {"0": one, "head": one})
    Traceback (most recent call last):
    minimand.errors.ConversionError: the model was not converted, and nothing was changed:
      head: matches no module: no Linear, Conv1d or Conv2d; there are 0
      0: GELU is not monotone ...
    """
    _check_model(model)
    steps = plan(model, rules)
    result = model if inplace else clone(model)
    for path, layer in steps.layers.items():
        module = result.get_submodule(path)
        norm = None if layer.norm is None else result.get_submodule(layer.norm)
        solver = solver_layer(module, layer, norm)
        solver.path = path
        become(module, solver)
        if norm is not None:
            pass_through(norm)
    for path in steps.absorbed:
        absorb(result.get_submodule(path))
    for path, forward in steps.rewrites.items():
        rewrite(result.get_submodule(path), forward.sources, forward.constants)
    return result


def revert(model: M, *, inplace: bool = False) -> M:
    """Undo every :func:`convert`: plain layers with the trained weights, their dropout and activations back.

    Args:
        model: A converted network, or a part of one.
        inplace: Change ``model`` itself and return it; otherwise copy the modules and share their Parameters.

    Raises:
        ConversionError: If nothing in ``model`` was converted.

    >>> from minimand.solvers import ProxSG
    >>> model = nn.Sequential(nn.Dropout(0.25), nn.Linear(8, 4), nn.ReLU())
    >>> revert(convert(model, {"1": ProxSG()}))
    Sequential(
      (0): Dropout(p=0.25, inplace=False)
      (1): Linear(in_features=8, out_features=4, bias=True)
      (2): ReLU()
    )
    """
    if not any(is_converted(module) for module in model.modules()):
        raise ConversionError("no layer of this model was converted, so there is nothing to revert")
    result = model if inplace else clone(model)
    for module in list(result.modules()):
        undo(module)
    return result


def _check_model(model: nn.Module) -> None:
    """Refuse wrappers, which hold the model by its path, and what is no network of modules."""
    if not isinstance(model, nn.Module):
        raise ConversionError(f"convert takes an nn.Module, got {type(model).__name__}")
    name = type(model).__name__
    if isinstance(model, nn.Linear | nn.Conv1d | nn.Conv2d):
        raise ConversionError(
            f"the model is itself a {name} and has no path that a pattern could pick; "
            f"wrap it as nn.Sequential(model), or use Solver{name}.from_plain"
        )
    check_unwrapped(model)


def check_unwrapped(model: nn.Module) -> None:
    """Refuse a network inside a wrapper that holds it by its path, or that runs a copy of it."""
    name = type(model).__name__
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ConversionError(f"the model is wrapped in {name}; convert model.module, then wrap the result")
    if isinstance(model, torch.jit.ScriptModule):
        raise ConversionError("a scripted model cannot be changed; convert the original, then script the result")
    if name == "OptimizedModule" or any(module._compiled_call_impl is not None for module in model.modules()):
        raise ConversionError("the model is compiled; convert the original (model._orig_mod), then compile the result")

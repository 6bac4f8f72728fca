"""Converting the layers of a network to solver layers, and reverting them."""

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

    A plain block is one iteration of a solver; the converted block makes several. The result is an instance of the
    model's class. Paths, Parameters, ``state_dict`` keys, hooks, attributes and methods stay, so existing optimizers
    and checkpoints keep working.

    Args:
        model: Any network. Its forward is traced with :mod:`torch.fx`. Where tracing fails, neighbours are found only
            inside an ``nn.Sequential``; a :class:`Rule` has to name the others.
        rules: Maps patterns (:mod:`fnmatch`, on module paths) to solvers, to :class:`~minimand.nn.SolverOptions`, or to
            a :class:`Rule`. Patterns select Linear, Conv1d and Conv2d layers only. If several patterns match a layer,
            the last one applies.
        inplace: Change ``model`` itself and return it. Otherwise modules are copied, and Parameters and buffers are
            shared with the original.

    A converted layer absorbs

    - the activation directly after it: a module, a function or a method. Without one the activation is the identity.
      Softmax acts on whole vectors and is not absorbed;
    - a batch normalisation between layer and activation, which is folded into the operator with the statistics of the
      current mode;
    - a tensor added between layer and activation (a residual block), as a part of the bias, if the same forward calls
      the layer and adds the tensor;
    - if its solver is stochastic, the dropout directly before it. Elementwise dropout may be followed by a reshape; a
      convolution samples whole channels in its place. Channel dropout must have the dimension of the convolution. A
      solver with ``tau=None`` then samples a share of 1 − p of the inputs. Dropout stays if its output has other uses,
      if the solver is deterministic, or if the layer absorbs a batch normalisation, whose statistics are those of the
      dropped inputs.

    A converted layer is a :class:`~minimand.nn.SolverLayer` and no longer an instance of its plain class.

    Absorbed calls are removed from the forward that makes them. A module without other calls becomes the identity.
    Otherwise the forward is replaced by its traced graph, provided that the graph reproduces it completely.

    Raises:
        ConversionError: Lists every problem with its path. The model is unchanged.

    Source: [Bibi2019], §3.4, §4 and appendix J.

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
    minimand.errors.ConversionError: the model was not converted and is unchanged:
      head: no such layer; available: '0'
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
    """Undo every :func:`convert`: restore the plain layers with the trained weights, their dropout and activations.

    Args:
        model: A converted network, or a part of one.
        inplace: Change ``model`` itself and return it. Otherwise modules are copied and Parameters are shared.

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
    """Reject objects that are not modules, single layers, and wrappers."""
    if not isinstance(model, nn.Module):
        raise ConversionError(f"convert takes an nn.Module, got {type(model).__name__}")
    name = type(model).__name__
    if isinstance(model, nn.Linear | nn.Conv1d | nn.Conv2d):
        raise ConversionError(
            f"the model is itself a {name}, so it has no path for a pattern to match; "
            f"wrap it as nn.Sequential(model), or use Solver{name}.from_plain"
        )
    check_unwrapped(model)


def check_unwrapped(model: nn.Module) -> None:
    """Reject wrapped, scripted and compiled models."""
    name = type(model).__name__
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ConversionError(f"the model is wrapped in {name}; convert model.module, then wrap the result")
    if isinstance(model, torch.jit.ScriptModule):
        raise ConversionError("a scripted model cannot be changed; convert the original, then script the result")
    if name == "OptimizedModule" or any(module._compiled_call_impl is not None for module in model.modules()):
        raise ConversionError("the model is compiled; convert the original (model._orig_mod), then compile the result")

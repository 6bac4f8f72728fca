"""Planning and making the conversion of a network's layers to solver layers, and reverting it."""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from ..arguments import checked
from ..errors import ConversionError, OptionError
from ..network.state import is_dtensor
from .conversion.block import BLOCKS
from .conversion.change import apply, is_converted, undo
from .conversion.clone import clone
from .conversion.plan import Plan, Rule, Rules, as_rules, targets
from .conversion.planner import Planner, readings

__all__ = ["Plan", "Rule", "convert", "plan", "revert"]

M = TypeVar("M", bound=nn.Module)


@checked
def plan(model: nn.Module, rules: Rules, *, example: Any = None) -> Plan:
    """What :func:`convert` would do with a model, layer by layer; the model stays as it is.

    ``str(plan)`` is a table of every linear layer and convolution: converted, with the dropout, normalisation and
    activation that it takes in and its multiply-adds relative to the plain layer; left, and why; or refused, why, and
    what to do. ``convert(model, plan)`` makes it so. The arguments are those of :func:`convert`.

    Raises:
        ConversionError: If a pattern matches no layer, or the model does not run on the example.

    >>> from minimand.solvers import ProxSG
    >>> model = nn.Sequential(nn.Dropout(0.25), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    >>> steps = plan(model, {"[13]": ProxSG(iters=10)})
    >>> list(steps.converted), list(steps.refused), steps.left
    (['1'], ['3'], {'5': 'no rule matches'})
    >>> print(steps)  # doctest: +ELLIPSIS
    path  layer       cost  plan
    ────  ──────────  ────  ────...
    1     Linear 8→4  19×   converted: ProxSG(10) with 0 (Dropout) before it, 2 (ReLU)
    3     Linear 4→4        refused: GELU is not monotone ...
    5     Linear 4→2        left: no rule matches
    """
    made, wrong = _planned(model, rules, example)
    if wrong:
        raise _failure(wrong)
    return made


@checked
def convert(
    model: M,
    rules: Rules | Plan,
    *,
    example: Any = None,
    inplace: bool = False,
    unsupported: Literal["error", "skip"] = "error",
) -> M:
    """Replace blocks dropout → linear or convolution → activation by solvers, with the same parameters.

    A plain block is one iteration of a solver; the converted block makes several. The result is an instance of the
    model's class. Paths, Parameters, ``state_dict`` keys, hooks, attributes and methods stay, so existing optimizers
    and checkpoints keep working.

    Args:
        model: Any network. It is run in training and in evaluation, by :func:`~minimand.network.read`, to find the
            neighbours of its layers.
        rules: Maps patterns (:mod:`fnmatch`, on module paths) to solvers, to :class:`~minimand.nn.SolverOptions`, or to
            a :class:`Rule`. Patterns select Linear, Conv1d to Conv3d, ConvTranspose1d and ConvTranspose2d layers only.
            If several patterns match a layer, the last one applies. A solver, SolverOptions or a Rule alone applies to
            every layer that can be converted. Or a plan, made by :func:`plan` for this model.
        example: An input: a tensor, a tuple of positional or a dictionary of keyword arguments. None: inputs are made
            up from the sizes of the first layers. It decides which branches of a forward are read.
        inplace: Change ``model`` itself and return it. Otherwise modules are copied, and Parameters and buffers are
            shared with the original.
        unsupported: ``"error"`` refuses the conversion if a matched layer cannot be converted, ``"skip"`` leaves such
            layers as they are.

    A converted layer is a :class:`~minimand.nn.SolverLayer` at the path of the layer that it replaces. It returns a
    pre-activation whose activation is the solution, so the forward and its activations stay as they are. Its problem
    contains the activation directly after it, a batch normalisation before that, and a tensor added between (a residual
    block). A stochastic solver also samples in place of the dropout directly before it: with ``tau=None`` it samples a
    share of 1 − p of the inputs. Modules that are taken in pass their input on; functional dropout and additions are
    edited out of the forward, from its source text, on this instance. The documentation lists what stays.

    Raises:
        ConversionError: Lists every problem with its path. The model is unchanged.

    Source: [Bibi2019], §3.4, §4 and appendix J.

    >>> import torch
    >>> from minimand.nn import SolverOptions
    >>> from minimand.solvers import ProxGD, ProxSG
    >>> model = nn.Sequential(nn.Dropout(0.25), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> converted = convert(model, {"1": ProxSG(iters=10), "3": ProxGD(iters=30)})
    >>> converted[1].solver.tau, converted[1].function, converted[3].function, converted[1].weight is model[1].weight
    (0.75, NonNegative(), Zero(), True)
    >>> one, x = SolverOptions(ProxGD(iters=1, step=1.0), ridge=0.0), torch.randn(5, 8)
    >>> torch.equal(convert(model.eval(), one)(x), model(x))
    True
    >>> convert(nn.Sequential(nn.Linear(8, 4), nn.GELU()), {"0": one, "head": one})
    Traceback (most recent call last):
    minimand.errors.ConversionError: the model was not converted and is unchanged:
      head: no such layer; available: '0'
      0: GELU is not monotone ...
    """
    if unsupported not in ("error", "skip"):
        raise OptionError(f'unsupported must be "error" or "skip", got {unsupported!r}')
    if isinstance(rules, Plan):
        check_convertible(model)
        steps, wrong = rules, _outdated(rules, model)
    else:
        steps, wrong = _planned(model, rules, example)
    # A suggestion may be to convert nothing.
    if unsupported == "error" and not (steps.lenient and (steps.converted or steps.summary)):
        wrong |= steps.left | steps.refused if steps.lenient else steps.refused
    if wrong:
        raise _failure(wrong)
    result: M = apply(steps, inplace)  # type: ignore[assignment]
    return result


def _planned(model: nn.Module, rules: Rules, example: Any) -> tuple[Plan, dict[str, str]]:
    """A plan, and what is wrong with the rules."""
    check_convertible(model)
    made = Plan(model, lenient=not isinstance(rules, Mapping))
    found, wrong = targets(made, as_rules(rules))
    Planner(made, found, readings(model, example) if found else []).run()
    return made, wrong


def _outdated(steps: Plan, model: nn.Module) -> dict[str, str]:
    if steps.model is not model:
        return {type(model).__name__: "the plan was made for another model; make one with plan(model, rules)"}
    # Neighbours count, too: an activation that was replaced has another function.
    then, now = steps.modules, dict(model.named_modules())
    changed = [path for path in {**then, **now} if now.get(path) is not then.get(path)]
    return dict.fromkeys(changed, "the layer is another one than when the plan was made; make a new plan")


def _failure(problems: Mapping[str, str]) -> ConversionError:
    lines = "\n".join(f"  {path}: {why}" for path, why in problems.items())
    return ConversionError(f"the model was not converted and is unchanged:\n{lines}")


@checked
def revert(model: M, *, inplace: bool = False) -> M:
    """Undo every :func:`convert`: restore the plain layers with the trained weights, and their dropout.

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
    result: M = undo(model if inplace else clone(model))  # type: ignore[assignment]
    return result


def check_convertible(model: nn.Module) -> None:
    """Reject objects that are not modules, single layers, and wrappers."""
    name = type(model).__name__
    if isinstance(model, tuple(BLOCKS)):
        raise ConversionError(
            f"the model is itself a {name}, so it has no path for a pattern to match; "
            f"wrap it as nn.Sequential(model), or use Solver{name}.from_plain"
        )
    check_unwrapped(model, "convert")


def check_unwrapped(model: nn.Module, caller: str) -> None:
    """Reject what is not a module, and wrapped, scripted and compiled models."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise ConversionError(f"{caller} takes an nn.Module, got {name}")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ConversionError(f"the model is wrapped in {name}; convert model.module, then wrap the result")
    if isinstance(model, torch.jit.ScriptModule):
        raise ConversionError("a scripted model cannot be changed; convert the original, then script the result")
    for path, module in model.named_modules():
        where = path or "the model"
        if type(module).__name__ == "OptimizedModule":
            raise ConversionError(f"{where} is compiled; convert the original (._orig_mod), then compile the result")
        if module._compiled_call_impl is not None:
            raise ConversionError(f"{where} is compiled in place; convert it first, then call compile() of the result")
        if any(map(is_dtensor, module.parameters(recurse=False))):
            raise ConversionError(f"{where} is sharded; convert the model first, then shard the result")

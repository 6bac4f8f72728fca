"""Running a network: its inputs, its wrappers and its mode."""

import contextlib
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .nested import replace, tensors

__all__ = ["Inputs", "bound", "copied", "eager", "named", "raised", "set_mode", "unwrapped"]

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def bound(example: Any) -> Inputs:
    """Positional and keyword arguments from a tensor, a tuple of positional or a mapping of keyword arguments."""
    if isinstance(example, Mapping):
        return (), dict(example)
    # A named tuple, such as a packed sequence, is one argument.
    return (example if type(example) is tuple else (example,)), {}


def copied(inputs: Inputs) -> Inputs:
    """The same inputs with copies of the tensors, which a forward may then change in place."""
    made: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return made[id(tensor)]

    args, kwargs = replace(inputs, Tensor, copy)
    return args, kwargs


def named(root: nn.Module, inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
    """The input tensors with the names of the forward's arguments."""
    args, kwargs = inputs
    try:
        names = list(inspect.signature(root.forward).parameters)
    except (TypeError, ValueError):
        names = []
    names += [str(i) for i in range(len(names), len(args))]
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        found = list(tensors(value))
        for i, tensor in enumerate(found):
            yield name if value is tensor else f"{name}.{i}", tensor


def raised(error: BaseException, model: nn.Module) -> str:
    """What a forward raised, in a line, and the module in whose forward it did."""
    first = (str(error).strip().splitlines() or [""])[0]
    paths, where = {module: path for path, module in model.named_modules()}, model
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        where = owner if isinstance(owner, nn.Module) and owner in paths else where
    what = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return f"{what} (in {paths[where] or 'the model'}, {type(where).__name__})"


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside wrappers for data parallelism and compilation."""
    wrappers: list[type] = [nn.parallel.DistributedDataParallel, nn.DataParallel]
    # Importing the compiler takes seconds, and nothing is compiled where nobody has imported it.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    while True:
        if type(model) in wrappers:
            model = model.module  # type: ignore[assignment]
        elif compiler is not None and isinstance(model, compiler.OptimizedModule):
            model = model._orig_mod
        else:
            return model


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """A context in which compiled modules and functions run as plain Python, and transformers call their layers."""
    compiler, fused = "torch._dynamo.eval_frame" in sys.modules, torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.compiler.set_stance("force_eager") if compiler else contextlib.nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def set_mode(model: nn.Module, training: bool | Mapping[str, bool]) -> None:
    """Set the training flags of all modules, alike or by path; ``train`` is not called, since networks override it."""
    for path, module in model.named_modules():
        mode = training if isinstance(training, bool) else training[path]
        if module.training != mode:
            module.training = mode

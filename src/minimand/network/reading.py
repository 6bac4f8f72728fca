"""Reading a network: recording runs of it, and making one record of them."""

import random
import re
import sys
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..arguments import checked
from ..errors import CapabilityError
from .assemble import RecordedRun, assemble
from .guess import guesses
from .nested import tensors
from .network import Network
from .record import Source
from .recorder import Recorder
from .running import Inputs, bound, copied, eager, named, raised, set_mode, unwrapped
from .state import preserved

__all__ = ["read", "read_modes"]

_ASK = "pass an example input, read(model, example)"
#: Errors that switching gradients off avoids: functions with out=, and in-place changes of views and leaves.
_GRADIENT_ERRORS = re.compile(r"out=|in-?place|requires grad|a view", re.IGNORECASE)


@checked
def read(model: nn.Module, example: Any = None, *, training: bool | None = None) -> Network:
    """Record a run of a network: which functions of torch it calls, on which tensors, and in which modules.

    The forward runs on the original modules, in training and in evaluation. Afterwards parameters, buffers, hooks,
    attributes, gradients, modes and random states are as they were before. Objects that are neither modules nor
    attributes of modules are not restored, so a forward that writes a file or appends to a global list has done so.

    Reading never fails because of what a network does. What the record cannot follow is marked as opaque, with the
    reason: data that Python reads, scripted modules, tensors that were computed elsewhere, calls that are made in one
    mode only, a forward that raises.

    Args:
        model: The network. Wrappers for data parallelism and compilation are looked through.
        example: An input: a tensor, a tuple of positional arguments, or a dictionary of keyword arguments. None: inputs
            are made up from the sizes of the first layers, until one runs; ``Network.guessed`` says so.
        training: The mode to record; None: the mode in which the network is. The network runs in the other mode, too,
            and calls that it makes in one mode only are marked.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> network = read(net)
    >>> [(call.path, call.name) for call in network.calls], network.guessed
    ([('0', 'linear'), ('1', 'relu'), ('2', 'linear')], True)
    >>> network.verify(torch.randn(2, 3))
    True
    """
    if not isinstance(model, nn.Module):
        raise CapabilityError(f"read takes an nn.Module, got a {type(model).__name__}")
    return _both(model, example, training)[0]


def read_modes(model: nn.Module, example: Any = None) -> tuple[Network, Network]:
    """The records of a run in training and of one in evaluation, of which one may be incomplete; see :func:`read`."""
    training, evaluation = _both(model, example, True)
    if not training.complete:
        evaluation = _both(model, example, False)[0]
    return training, evaluation


def _both(model: nn.Module, example: Any, training: bool | None) -> tuple[Network, Network]:
    """The records of a mode and of the other one, which is empty where the first run failed."""
    mode, guessed = model.training if training is None else training, example is None
    inputs, run, reason = None, None, _without_data(model)
    if reason is None and not guessed:
        inputs, run = bound(example), _run(model, bound(example), training)
    elif reason is None:
        inputs, run = _first_that_runs(model, training)
        reason = f"no made-up input runs through the network (the last: {run.error}); {_ASK}"
    if inputs is None or run is None:
        empty = Network(model, (), (), (), (), (), mode, guessed, False, (str(reason),))
        return empty, empty
    return assemble(model, run, _run(model, inputs, not mode) if run.error is None else None, guessed)


def _without_data(model: nn.Module) -> str | None:
    """Why a network cannot run at all."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            return f"{name} is lazy and has no shape yet; send a batch through the network first"
        if tensor.is_meta:
            return f"{name} is on the meta device and has no data; load or initialise it first"
    return None


def _first_that_runs(model: nn.Module, training: bool | None) -> tuple[Inputs | None, RecordedRun]:
    search = guesses(unwrapped(model))
    args = next(search)
    while True:
        run = _run(model, (args, {}), training)
        if run.error is None:
            return (args, {}), run
        try:
            args = search.send(run.error)
        except StopIteration:
            return None, run


def _run(model: nn.Module, inputs: Inputs, training: bool | None) -> RecordedRun:
    run = _record(model, inputs, training, grad=True)
    if run.error is not None and _GRADIENT_ERRORS.search(run.error):
        again = _record(model, inputs, training, grad=False)
        return run if again.error is not None else again
    return run


def _record(model: nn.Module, inputs: Inputs, training: bool | None, grad: bool) -> RecordedRun:
    root = unwrapped(model)
    with preserved(model) as saved, torch.inference_mode(False), eager(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if training is not None:
            set_mode(model, training)
        paths = {module: path for path, module in model.named_modules()}
        modes = {path: module.training for module, path in paths.items()}
        args, kwargs = copied(inputs)
        device = next((tensor.device.type for tensor in model.parameters()), "cpu")
        recorder = Recorder(paths, _registered(model), saved, device)
        given = tuple(recorder.add_input(tensor, name) for name, tensor in named(root, (args, kwargs)))
        run = RecordedRun(recorder, modes, grad, inputs, given)
        recorder.attach()
        before = _generators()
        try:
            with recorder, torch.set_grad_enabled(grad):
                output = root(*args, **kwargs)
            run.outputs = tuple(recorder.value(tensor) for tensor in tensors(output))
        except (Exception, SystemExit, GeneratorExit) as error:  # a forward may end the program; reading it must not
            run.error = f"the forward raises {raised(error, root)}"
        after = _generators()
        run.drew = tuple(name for name, state in before.items() if state != after[name])
    return run


def _registered(model: nn.Module) -> dict[int, tuple[Source, str]]:
    """Source and name of all parameters, buffers and tensors that are attributes of modules."""
    known: dict[int, tuple[Source, str]] = {}
    for name, parameter in model.named_parameters():
        known.setdefault(id(parameter), ("parameter", name))
    for name, buffer in model.named_buffers():
        known.setdefault(id(buffer), ("buffer", name))
    for path, module in model.named_modules():
        for name, attribute in vars(module).items():
            for tensor in tensors(attribute):
                known.setdefault(id(tensor), ("constant", f"{path}.{name}" if path else name))
    return known


def _generators() -> dict[str, Any]:
    """The states of the generators of Python and numpy, whose numbers cannot be recorded."""
    states: dict[str, Any] = {"random": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        _, keys, *rest = numpy.random.get_state()
        states["numpy"] = keys.tobytes(), rest
    return states

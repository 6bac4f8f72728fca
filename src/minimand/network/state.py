"""Running a network without leaving a trace: its state is saved before and restored afterwards."""

import collections
import contextlib
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..norms import LipschitzTracker

__all__ = ["Saved", "is_dtensor", "preserved", "snapshot", "version"]

#: One run at a time: a run changes training flags and hooks of the modules.
_LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):  # The thread that holds the lock does not exist in a forked worker.
    os.register_at_fork(after_in_child=_LOCK._at_fork_reinit)  # type: ignore[attr-defined]
_CONTAINERS = (dict, list, set, collections.deque)


class Saved:
    """Tensors and random generators whose contents are restored after a run."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor, int | None]] = {}
        self._generators: dict[torch.Generator, Tensor] = {}

    def add_generator(self, generator: torch.Generator) -> None:
        """Save a generator's state, unless that has been done before."""
        if generator not in self._generators:
            self._generators[generator] = generator.get_state()

    def add(self, tensor: Tensor) -> None:
        """Save a tensor's contents, unless that has been done before."""
        if id(tensor) not in self._tensors and not tensor.is_meta and not _freed(tensor):
            with torch.no_grad():
                self._tensors[id(tensor)] = tensor, tensor.detach().clone(), version(tensor)

    def restore(self) -> None:
        """Write the contents back where they changed, and reset the version counters that autograd checks."""
        for generator, state in self._generators.items():
            generator.set_state(state)
        for tensor, content, count in self._tensors.values():
            if _freed(tensor):
                continue
            comparable = tensor.layout is torch.strided
            if count == version(tensor) and (not comparable or torch.equal(tensor.detach(), content)):
                continue
            tensor.data.copy_(content)
            if count is not None:
                torch._C._autograd._unsafe_set_version_counter((tensor,), (count,))


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor. The module that defines them is slow to import and loaded only where there are some."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _freed(tensor: Tensor) -> bool:
    """Whether the memory of a tensor is gone, as that of weights which FSDP has gathered; reading it would end the
    process."""
    try:
        return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
    except (NotImplementedError, RuntimeError):  # layouts without a storage
        return False


def version(tensor: Tensor) -> int | None:
    """The number of in-place changes of a tensor; None for inference tensors, which do not count them."""
    return None if tensor.is_inference() else tensor._version


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[Saved]:
    """Restore, after the block, all that a forward pass may change.

    These are the contents of buffers and of tensors added to the yielded :class:`Saved`; the attributes of all modules,
    including their hooks, training flags and registered parameters, and the items of attributes that are lists,
    dictionaries, sets or deques; ``requires_grad`` and ``.grad`` of the parameters; and the random states of Python,
    numpy, torch and of generators that are attributes or were added. Other objects that a forward changes stay changed.
    """
    with _LOCK:
        with torch._C.DisableTorchFunction():
            saved = Saved()
            undo = [*map(_attributes, model.modules()), *map(_gradient, model.parameters())]
            undo += [_random_states(), saved.restore]
            # A tracker replaces its buffer, which is as large as the weight, and never writes to it.
            for module in (module for module in model.modules() if not isinstance(module, LipschitzTracker)):
                for buffer in module.buffers(recurse=False):
                    saved.add(buffer)
            for generator in (value for module in model.modules() for value in vars(module).values()):
                if isinstance(generator, torch.Generator):
                    saved.add_generator(generator)
        try:
            yield saved
        finally:
            with torch._C.DisableTorchFunction():
                for restore in undo:
                    restore()


def snapshot(model: nn.Module) -> list[Callable[[], None]]:
    """Functions that give every module of a network the attributes, children and hooks that it has now."""
    return [_attributes(module) for module in model.modules()]


def _attributes(module: nn.Module) -> Callable[[], None]:
    attributes = dict(vars(module))
    containers = [value for value in attributes.values() if isinstance(value, _CONTAINERS)]
    contents = [dict(value) if isinstance(value, dict) else list(value) for value in containers]
    training = module.training  # not an attribute of scripted modules

    def restore() -> None:
        _set_items(vars(module), attributes)
        for container, content in zip(containers, contents, strict=True):
            _refill(container, content)
        if module.training != training:
            module.training = training

    return restore


def _set_items(live: dict[Any, Any], items: dict[Any, Any]) -> None:
    """Give a dictionary the former items, without touching those that are the same: other threads may use them."""
    for name in live.keys() - items.keys():
        del live[name]
    for name, value in items.items():
        if name not in live or live[name] is not value:
            live[name] = value


def _refill(container: Any, content: Any) -> None:
    """Give a container its former content, in the former order, if it has changed."""
    if isinstance(container, dict):
        _set_items(container, content)
        changed = list(container) != list(content)
    else:
        now = list(container)
        changed = len(now) != len(content) or any(a is not b for a, b in zip(now, content, strict=True))
    if changed:
        container.clear()
        (container.update if isinstance(container, dict | set) else container.extend)(content)


def _gradient(parameter: Tensor) -> Callable[[], None]:
    """Put a parameter's gradient aside, so that a backward pass in the forward accumulates elsewhere."""
    requires_grad, gradient = parameter.requires_grad, parameter.grad
    if gradient is not None:
        parameter.grad = None

    def restore() -> None:
        if parameter.requires_grad != requires_grad:
            parameter.requires_grad_(requires_grad)
        if parameter.grad is not gradient:
            parameter.grad = gradient

    return restore


def _random_states() -> Callable[[], None]:
    states: list[tuple[Callable[[Any], Any], Any]] = [
        (random.setstate, random.getstate()),
        (torch.set_rng_state, torch.get_rng_state()),
    ]
    if (numpy := sys.modules.get("numpy")) is not None:
        states.append((numpy.random.set_state, numpy.random.get_state()))
    if torch.cuda.is_initialized():
        states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if torch.backends.mps.is_available():
        states.append((torch.mps.set_rng_state, torch.mps.get_rng_state()))
    if torch.xpu.is_initialized():
        states.append((torch.xpu.set_rng_state_all, torch.xpu.get_rng_state_all()))

    def restore() -> None:
        for put, state in states:
            put(state)

    return restore

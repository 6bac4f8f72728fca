"""Runs over mini-batches: a regression with momentum, or an optimizer of torch, with the last good weights kept."""

import math
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from ...errors import MinimandError, NonFiniteError, OptionError, require_finite
from ...network.nested import tensors
from .maps import update_running_statistics
from .variables import batch_size, plainly, without_autograd
from .weights import MomentumUpdate

if TYPE_CHECKING:
    from .base import Lifted

__all__ = ["MiniBatchRun", "MonotoneRun", "OptimizerRun", "Run", "cause", "check_optimizer"]

#: Steps that are tried with growing μ before a batch is left as it is.
_TRIES = 40


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, mode: str) -> None:
    """Raise if the optimizer is none, or owns nothing of the model, or if the mode has steps of its own."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(f"optimizer must be a torch.optim.Optimizer, got a {type(optimizer).__name__}")
    if mode != "fast":
        raise OptionError(f"mode={mode!r} has steps of its own and takes no optimizer; use mode='fast'")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptionError(
            "LBFGS evaluates the loss several times in a step, which fit does not; call optimizer.step(closure) with a "
            "closure that calls optimizer.zero_grad() and returns backward(x, y)"
        )
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not any(id(parameter) in owned for parameter in trained):
        raise OptionError(
            "the optimizer owns no trained parameter of the model, so nothing would move; build it on "
            "model.parameters() after the model is on its device"
        )


def cause(method: "Lifted[Any]", v: Any, error: Exception) -> Exception:
    """The error of the first layer whose activation is not finite, from which other errors follow."""
    try:
        method._require_finite(v)
    except NonFiniteError as earlier:
        return earlier
    return error


class MonotoneRun:
    """Steps on batches; one that raises the network's loss is taken back and tried again with larger μ."""

    def __init__(self, method: "Lifted[Any]") -> None:
        self.method = method

    def batch(self, x: Tensor, y: Tensor, share: float) -> tuple[float, float]:
        """Step, and return the energy and the network's loss afterwards; μ grows until the loss has not risen."""
        method, growth = self.method, self.method.recipe.continuation
        if growth == 1:
            return method.step(x, y), method._network_loss(x, y)
        before = method._network_loss(x, y)
        for _ in range(_TRIES):
            kept = [parameter.detach().clone() for parameter in method.model.parameters()]
            energy = method.step(x, y)
            loss = method._network_loss(x, y)
            if loss <= before:
                return energy, loss
            for parameter, old in zip(method.model.parameters(), kept, strict=True):
                parameter.data.copy_(old)
            method._multiply_mu(growth)
        return before, before

    def check(self, x: Tensor, y: Tensor) -> None:
        """Steps check themselves."""


class OptimizerRun:
    """An optimizer of torch that takes the steps, with gradients of :meth:`Lifted.backward`.

    Args:
        method: The lifted method.
        optimizer: The optimizer.
        decay: Whether the learning rates decay along half a cosine.
    """

    @plainly
    def __init__(self, method: "Lifted[Any]", optimizer: torch.optim.Optimizer, *, decay: bool = False) -> None:
        self.method = method
        self.optimizer = optimizer
        self.rates = [group["lr"] for group in optimizer.param_groups] if decay else None
        self.parameters = [parameter.data for group in optimizer.param_groups for parameter in group["params"]]
        self.kept = [parameter.clone() for parameter in self.parameters]
        self.updated = False

    def batch(self, x: Tensor, y: Tensor, share: float) -> tuple[float, float]:
        """Take a step on one batch and return the loss before it, summed over the batch, as energy and loss."""
        self.optimizer.zero_grad()
        mean = self._guarded(x, y)
        if self.rates is not None:
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * share))
        with without_autograd():
            torch._foreach_copy_(self.kept, self.parameters)
        self.optimizer.step()
        self.updated = True
        total = mean * batch_size(x)
        return total, total

    def check(self, x: Tensor, y: Tensor) -> None:
        """Check that the weights are finite after the last update."""
        if not all(bool(torch.isfinite(parameter).all()) for parameter in self.parameters):
            self._restore(NonFiniteError("a weight is NaN or Inf after the optimizer's step"))

    def _guarded(self, x: Tensor, y: Tensor) -> float:
        try:
            return self.method.backward(x, y)
        except NonFiniteError as error:
            for tensor in tensors(x):
                require_finite("the input x", tensor)
            self._restore(error)

    def _restore(self, error: Exception) -> NoReturn:
        if self.updated:
            with without_autograd():
                torch._foreach_copy_(self.parameters, self.kept)
        raise NonFiniteError(
            f"fit stopped and kept the last good weights: {error}; lower the optimizer's learning rate"
        ) from None


class MiniBatchRun:
    """A run of the mini-batch mode: a direction from each batch, momentum, a decaying rate."""

    @plainly
    def __init__(self, method: "Lifted[Any]") -> None:
        self.method = method
        self.layers = method.chain.layers
        self.momentum = MomentumUpdate(self.layers, method.recipe.momentum)
        self.updated = False

    def batch(self, x: Tensor, y: Tensor, share: float) -> tuple[float, float]:
        """Update the weights from one batch and return the loss before the update, as energy and loss."""
        method = self.method
        kept, method._mu = method.mu, method._minibatch_mu()
        try:
            value = self._update(x, y, method.recipe.rate_at(share))
            return value, value
        finally:
            method._mu = kept

    @plainly
    def _update(self, x: Tensor, y: Tensor, rate: float) -> float:
        method = self.method
        v, value = self._forward(x, y)
        try:
            directions = method._minibatch(v, method._damping())
            self.momentum.apply(directions, [rate / layer.unit.slope for layer in self.layers])
        except (MinimandError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            self._stop(error, v)
        self.updated = True
        update_running_statistics(v.maps)
        return value

    @plainly
    def check(self, x: Tensor, y: Tensor) -> None:
        """Check that the loss is finite after the last update."""
        self._forward(x, y)

    def _forward(self, x: Tensor, y: Tensor) -> tuple[Any, float]:
        """The variables of a batch and its loss; an update after which the loss overflows is undone."""
        v = self.method._forward_variables(x, y, check=False)
        value = float(v.loss.value(v.output))
        if not math.isfinite(value):
            require_finite("the input x", x)
            after = "the weight update" if self.updated else "the forward pass"
            held = after if self.updated else "the weight or bias"
            try:
                for layer in self.layers:
                    require_finite(f"{held} of {layer.path}", layer.parameters())
                for layer, activation in zip(self.layers, v.xs[1:], strict=True):
                    require_finite(f"{after} of {layer.path} overflows: its activation", activation)
                raise NonFiniteError(f"{after} of {self.layers[-1].path} makes the loss {value}")
            except NonFiniteError as error:
                self.momentum.undo()
                self._stop(error)
        return v, value

    def _stop(self, error: Exception, v: Any = None) -> NoReturn:
        reason = error if v is None else cause(self.method, v, error)
        raise NonFiniteError(
            f"fit stopped and kept the last good weights: {reason}; lower Recipe.rate or raise Recipe.damping"
        ) from None


Run = MonotoneRun | OptimizerRun | MiniBatchRun

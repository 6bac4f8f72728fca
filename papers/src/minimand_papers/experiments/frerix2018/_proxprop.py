"""Shared code of the ProxProp experiments: images, methods, training with the full-batch loss."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minimand.errors import OptionError
from minimand.train import ProxProp

from ...clock import Stopwatch
from ...comparing import Difference, difference
from ...context import Lab
from ...data import Batches
from ...drawing import curves
from ...experiment import Plot, Results
from ...training import Loaders, accuracy, loaders
from ...zoo import ProxPropMLP
from .._solvers import ImageOptions

__all__ = [
    "BACKPROP",
    "METHODS",
    "PUBLISHED",
    "UNIT",
    "ProxPropImageOptions",
    "Stepper",
    "TrainingClock",
    "best_validation",
    "equal_loss",
    "figures",
    "fitted",
    "lower",
    "mlp",
    "nesterov",
    "precondition",
    "scaled",
]

BACKPROP = "BackProp"
# The end of the names of parts with inputs pixels/255; the others have standardised inputs.
UNIT = ", pixels/255"
PUBLISHED = "the authors' CG, 3 iterations"
METHODS: Mapping[str, Mapping[str, Any]] = {
    "ProxProp (exact)": {"method": "exact"},
    "ProxProp (cg1)": {"method": "cg", "cg_iters": 1},
    "ProxProp (cg3)": {"method": "cg", "cg_iters": 3},
    "ProxProp (cg5)": {"method": "cg", "cg_iters": 5},
    "ProxProp (cg10)": {"method": "cg", "cg_iters": 10},
    "ProxProp (subsampled)": {"method": "exact", "gram": "subsampled"},
}


@dataclasses.dataclass(frozen=True)
class ProxPropImageOptions(ImageOptions):
    """The images and their batches.

    Args:
        batch: Images in a batch. The paper has 500, and its values of τθ depend on it.
        inputs: "unit": pixels/255, which the authors' code feeds and their values of τθ are for; "standardised": each
            channel with mean 0 and standard deviation 1; "both": one column of the tables each.
    """

    batch: int = 500
    inputs: Literal["unit", "standardised", "both"] = "both"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inputs not in ("unit", "standardised", "both"):
            raise OptionError(f"inputs must be unit, standardised or both, got {self.inputs!r}")

    def kinds(self) -> tuple[str, ...]:
        """The ends of the names of parts, one for each kind of inputs to run."""
        return {"both": ("", UNIT), "unit": (UNIT,), "standardised": ("",)}[self.inputs]

    def loaders_for(self, lab: Lab, part: str) -> Loaders:
        """Batches of the three splits with the inputs of a part."""
        limit = self.limit or None
        return loaders(lab, self.dataset, self.batch, limit=limit, enlarge=self.enlarge, unit=part.endswith(UNIT))


class Stepper(Protocol):
    """The methods of an optimizer that training uses."""

    def zero_grad(self) -> None:
        """Forget the gradients."""
        ...

    def step(self) -> Any:
        """Update the parameters."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state from which to continue."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a saved state."""
        ...


class TrainingClock:
    """Seconds spent in training steps, without evaluations, kept over interruptions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        """The seconds so far."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from saved seconds."""
        self.seconds = float(state_dict["seconds"])


def mlp(data: Loaders, width: float) -> ProxPropMLP:
    """The paper's fully connected network for these images, its hidden widths times ``width``."""
    return ProxPropMLP(data.classes, math.prod(data.shape), width=width)


def nesterov(model: nn.Module, rate: float) -> Optimizer:
    """The optimizer of Figure 2 and Table 1."""
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.95, nesterov=True)


class PublishedCG:
    """The conjugate gradients of the authors' public code, on the hidden linear layers of a Sequential.

    In the first iteration residual and search direction share their memory there, so that the second direction is
    (1 + β) times the residual, without the part of the first that makes directions conjugate; and 1e-6 is added to all
    denominators. It is no conjugate gradient method: after three iterations it is far from the solution.
    """

    def __init__(self, model: nn.Sequential, optimizer: Optimizer, tau_theta: float, iters: int) -> None:
        self._shift, self._iters, self._inputs = 1 / tau_theta, iters, dict[nn.Linear, Tensor]()
        for layer in [layer for layer in model if isinstance(layer, nn.Linear)][:-1]:
            layer.register_forward_pre_hook(self._keep)
        optimizer.register_step_pre_hook(self._precondition)

    def _keep(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled() and isinstance(layer, nn.Linear):
            self._inputs[layer] = inputs[0].detach()

    @torch.no_grad()
    def _precondition(self, *_: Any) -> None:
        for layer, x in self._inputs.items():
            a = torch.cat([x, x.new_ones(len(x), 1)], 1)
            assert layer.weight.grad is not None
            assert layer.bias.grad is not None
            gradient = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
            made = published_cg(lambda v, a=a: v @ a.mT @ a + self._shift * v, gradient, self._iters)  # type: ignore[misc]
            layer.weight.grad.copy_(made[:, :-1])
            layer.bias.grad.copy_(made[:, -1])


def published_cg(apply: Callable[[Tensor], Tensor], target: Tensor, iters: int, eps: float = 1e-6) -> Tensor:
    """The iterate from zero of the authors' recurrence for each row; see :class:`PublishedCG`."""
    found, residual, direction = torch.zeros_like(target), target, target
    for step in range(iters):
        image, size = apply(direction), residual.square().sum(1, keepdim=True)
        length = size / ((direction * image).sum(1, keepdim=True) + eps)
        found = found + length * direction
        residual = residual - length * image
        before = residual if step == 0 else direction
        direction = residual + residual.square().sum(1, keepdim=True) / (size + eps) * before
    return found


def precondition(model: nn.Module, optimizer: Optimizer, method: str, tau_theta: float) -> None:
    """Attach ProxProp to the optimizer, except for BackProp."""
    if method == PUBLISHED:
        assert isinstance(model, nn.Sequential)
        PublishedCG(model, optimizer, tau_theta, 3)
    elif method != BACKPROP:
        ProxProp(model, tau_theta=tau_theta, **METHODS[method]).attach(optimizer)


def fitted(lab: Lab, model: nn.Module, optimizer: Stepper, data: Loaders, epochs: int) -> Iterator[dict[str, Any]]:
    """Train on the cross-entropy; yields a record per epoch, then one with the test accuracy.

    ``loss`` is the loss of the whole training set after the epoch, ``training`` the seconds of the training steps. A
    run whose loss or gradient is not finite has diverged; it ends with NaN for all values.
    """
    net = lab.distribute(model)
    everything = lab.batches(data.train.split, 500, train=False, normalize=data.train.normalize)
    clock = TrainingClock()
    states: dict[str, Any] = {"model": model, "optimizer": optimizer, "batches": data.train, "clock": clock}
    for epoch in lab.epochs(epochs, **states):
        watch = Stopwatch()
        finite = _pass(lab, net, optimizer, data.train)
        clock.seconds += watch.seconds
        loss = _loss(lab, model, everything) if finite else math.nan
        record = {"epoch": epoch + 1, "loss": loss, "training": round(clock.seconds, 3)}
        if not math.isfinite(loss):
            yield {
                **record,
                "loss": math.nan,
                "log_loss": math.nan,
                "validation": math.nan,
                "test": math.nan,
                "diverged": 1,
            }
            return
        # Losses differ by factors, so they are compared by their logarithms.
        logarithm = math.log10(max(loss, 1e-30))
        yield {**record, "log_loss": logarithm, "validation": accuracy(lab, model, data.validation)}
    yield {"test": accuracy(lab, model, data.test), "diverged": 0}


def _pass(lab: Lab, net: nn.Module, optimizer: Stepper, batches: Batches) -> bool:
    """One pass over the batches; returns False at the first loss or gradient that is not finite."""
    net.train()
    with warnings.catch_warnings():
        # ProxProp would skip such steps for ever; here the first one ends the run.
        warnings.filterwarnings("error", message="ProxProp skips this step", category=RuntimeWarning)
        for images, labels in lab.track(batches):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images), labels)
            if not math.isfinite(float(lab.total(loss.detach().clone()))):
                return False
            loss.backward()
            try:
                optimizer.step()
            except RuntimeWarning:
                return False
    return True


@torch.no_grad()
def _loss(lab: Lab, model: nn.Module, batches: Batches) -> float:
    """The mean cross-entropy in evaluation mode, over all processes."""
    model.eval()
    sums = torch.zeros(2, device=lab.device, dtype=torch.float64)
    for images, labels in batches:
        if len(labels):
            loss = nn.functional.cross_entropy(model(images), labels, reduction="sum")
            sums += torch.stack([loss.double(), loss.new_tensor(len(labels)).double()])
    total, count = lab.total(sums).tolist()
    return float(total / count)


def figures(results: Results[Any], parts: list[str]) -> list[Plot]:
    """The three panels of Figures 2 and 3, and the accuracy over time."""
    seconds = "seconds of training"
    loss, right = "full-batch loss", "accuracy, %"
    return [
        curves(results, parts, key="loss", title="Training loss per epoch", y=loss, log=True),
        curves(
            results, parts, key="loss", over="training", title="Training loss over time", y=loss, x=seconds, log=True
        ),
        curves(results, parts, key="validation", title="Validation accuracy per epoch", y=right),
        curves(
            results, parts, key="validation", over="training", title="Validation accuracy over time", y=right, x=seconds
        ),
    ]


def best_validation(results: Results[Any], part: str) -> list[float]:
    """The best validation accuracy of every seed."""
    return [max(values) for values in results.curve(part, "validation").values() if values]


def equal_loss(results: Results[Any], part: str, other: str) -> list[float]:
    """For each seed the validation accuracy at the first epoch whose loss is at most the final loss of ``other``."""
    losses, reached, bounds = (
        results.curve(part, "loss"),
        results.curve(part, "validation"),
        results.curve(other, "loss"),
    )
    found = []
    for seed in (seed for seed in losses if bounds.get(seed)):
        first = next((at for at, loss in enumerate(losses[seed]) if loss <= bounds[seed][-1]), None)
        found += [] if first is None else [float(reached[seed][first])]
    return found


def lower(results: Results[Any], ours: str, other: str) -> Difference:
    """The difference of the full-batch losses of two parts, by their logarithms."""
    return difference(results, ours, other, "log_loss", unit="", higher=False, quantity="log₁₀ of the full-batch loss")


def scaled(results: Results[Any], epochs: int, width: float = 1.0) -> str:
    """A note on how the run differs from the paper's 50 epochs on 45,000 images at full width."""
    options = results.options
    if options.dataset != "cifar10":
        return ""
    changes = [f"{epochs} epochs"] if epochs != 50 else []
    changes += [f"widths × {width:g}"] if width != 1 else []
    changes += [f"{options.limit} images"] if options.limit else []
    return f"source: 50 epochs, full width, all images; ours: {', '.join(changes)}" if changes else ""

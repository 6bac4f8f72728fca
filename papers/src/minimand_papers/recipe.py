"""A fast training recipe for convolutional networks on small images, for strong baselines on one core."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minimand.errors import OptionError

from .context import Lab
from .data import CropFlip
from .training import Loaders, accuracy

__all__ = ["FastRecipe", "augmentation", "bfloat16_products", "fast_train"]


def bfloat16_products(device: torch.device) -> bool:
    """Whether a device has instructions for products in bfloat16; a processor without them takes ten times as long."""
    if device.type != "cpu":
        return True
    return any(has is True for name, has in torch.cpu.get_capabilities().items() if "bf16" in name)


@dataclasses.dataclass(frozen=True)
class FastRecipe:
    """Nesterov SGD with a triangular schedule, label smoothing, lookahead and bfloat16 products.

    Learning rates and weight decays are per group: convolutions, norms (biases, and scales where they are trained), and
    everything else, the head. The recipe follows the speed runs on CIFAR-10; see :class:`~minimand_papers.zoo.FastNet`.

    Args:
        epochs: Epochs of the first cycle.
        restart: Epochs of a second cycle with the same schedule, its rates times ``restart_rate``; 0: none.
        restart_rate: The factor of the second cycle.
        convolutions: Peak learning rate and weight decay of convolutions.
        norms: Those of batch norms.
        head: Those of the other parameters.
        momentum: Nesterov's momentum.
        smoothing: Label smoothing.
        rise: The share of the steps in which the rate rises from ``first`` times its peak; then it falls to ``last``.
        first: The first factor.
        last: The last factor.
        lookahead: Steps between two averages of the weights; 0: none.
        bfloat16: Compute products in bfloat16, on devices with instructions for it.
    """

    epochs: int = 10
    restart: int = 0
    restart_rate: float = 0.5
    convolutions: tuple[float, float] = (0.73, 1e-3)
    norms: tuple[float, float] = (5.84, 1.25e-4)
    head: tuple[float, float] = (0.05, 5e-4)
    momentum: float = 0.85
    smoothing: float = 0.2
    rise: float = 0.23
    first: float = 0.2
    last: float = 0.05
    lookahead: int = 5
    bfloat16: bool = True

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.restart < 0 or self.lookahead < 0:
            raise OptionError("a recipe needs at least one epoch, and no negative numbers of epochs or steps")
        if not 0 < self.rise < 1:
            raise OptionError(f"rise is a share of the steps between 0 and 1, got {self.rise}")

    def factor(self, step: int, steps: int) -> float:
        """The learning rate at a step of a cycle, relative to its peak.

        >>> recipe = FastRecipe(rise=0.5)
        >>> recipe.factor(0, 100), recipe.factor(50, 100), round(recipe.factor(100, 100), 3)
        (0.2, 1.0, 0.05)
        """
        done, peak = step / max(steps, 1), self.rise
        if done <= peak:
            return self.first + (1 - self.first) * done / peak
        return 1 + (self.last - 1) * (done - peak) / (1 - peak)

    def groups(self, model: nn.Module, undecayed: Iterable[nn.Parameter] = ()) -> list[dict[str, Any]]:
        """The parameters that are trained, with their peak rates and decays; ``undecayed`` have the head's rate."""
        free = list(undecayed)
        kinds: dict[str, list[nn.Parameter]] = {"convolutions": [], "norms": [], "head": [], "undecayed": free}
        seen = set(free)
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad and parameter not in seen:
                    seen.add(parameter)
                    norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
                    kinds["norms" if norm else "convolutions" if parameter.dim() == 4 else "head"].append(parameter)
        rates = {"convolutions": self.convolutions, "norms": self.norms, "head": self.head}
        rates["undecayed"] = (self.head[0], 0.0)
        return [
            {"params": found, "lr": rates[kind][0], "weight_decay": rates[kind][1]}
            for kind, found in kinds.items()
            if found
        ]


def augmentation() -> CropFlip:
    """Crops by up to two reflected pixels, and mirror images that alternate."""
    return CropFlip(2, reflect=True, alternate=True)


class Lookahead:
    """An average of weights and buffers to which the network returns every few steps.

    The decay rises with the cube of the share of training that is done, up to 0.95 per step.
    """

    def __init__(self, model: nn.Module, every: int) -> None:
        self.every = every
        self.model = model
        self.average = {name: tensor.detach().clone() for name, tensor in self._tensors()}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        every = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return ((name, tensor) for name, tensor in every.items() if tensor.is_floating_point())

    @torch.no_grad()
    def after(self, step: int, steps: int) -> None:
        """Average after a step that is a multiple of ``every``."""
        if not self.every or (step % self.every and step != steps):
            return
        decay = 0.95**self.every * (step / steps) ** 3
        for name, tensor in self._tensors():
            average = self.average[name]
            average.lerp_(tensor.to(average), 1 - decay)
            tensor.copy_(average)

    def state_dict(self) -> dict[str, Any]:
        """The average."""
        return dict(self.average)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the average."""
        for name, tensor in self.average.items():
            tensor.copy_(state[name])


def fast_train(
    lab: Lab, model: nn.Module, data: Loaders, recipe: FastRecipe, undecayed: Iterable[nn.Parameter] = ()
) -> Iterator[dict[str, Any]]:
    """Train by the recipe; yields a record per epoch, then one with the test accuracy, also with mirror images."""
    model.to(lab.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    net = lab.distribute(model)
    optimizer = torch.optim.SGD(recipe.groups(model, undecayed), lr=0.1, momentum=recipe.momentum, nesterov=True)
    cycles = [steps * len(data.train) for steps in (recipe.epochs, recipe.restart) if steps]

    def factor(step: int) -> float:
        if step < cycles[0] or len(cycles) == 1:
            return recipe.factor(min(step, cycles[0]), cycles[0])
        return recipe.restart_rate * recipe.factor(min(step - cycles[0], cycles[1]), cycles[1])

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    average = Lookahead(model, recipe.lookahead)
    epochs = recipe.epochs + recipe.restart
    bfloat16 = recipe.bfloat16 and bfloat16_products(lab.device)
    states: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    for epoch in lab.epochs(epochs, **states, batches=data.train, average=average):
        sums = torch.zeros(3, device=lab.device, dtype=torch.float64)
        model.train()
        for number, (images, labels) in enumerate(lab.track(data.train)):
            optimizer.zero_grad()
            with torch.autocast(lab.device.type, torch.bfloat16, enabled=bfloat16):
                logits = net(images.contiguous(memory_format=torch.channels_last))
            loss = nn.functional.cross_entropy(logits.float(), labels, label_smoothing=recipe.smoothing)
            loss.backward()
            optimizer.step()
            schedule.step()
            average.after(epoch * len(data.train) + number + 1, sum(cycles))
            right, count = (logits.detach().argmax(-1) == labels).sum(), labels.new_tensor(len(labels))
            sums += torch.stack([loss.detach().double() * count, right.double(), count.double()])
        loss_sum, right_sum, count_sum = lab.total(sums).tolist()
        yield {
            "epoch": epoch + 1,
            "loss": loss_sum / count_sum,
            "train": 100 * right_sum / count_sum,
            "validation": accuracy(lab, model, data.validation),
        }
    mirrored = accuracy(lab, Mirrored(model), data.test)
    yield {"epoch": epochs, "test": accuracy(lab, model, data.test), "mirrored test": mirrored}


class Mirrored(nn.Module):
    """A network's mean output for an image and its mirror image."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        """The sum of the two log-probabilities."""
        both = [self.net(images), self.net(images.flip(-1))]
        return torch.stack([logits.log_softmax(-1) for logits in both]).sum(0)

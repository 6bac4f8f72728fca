"""Shared code of the experiments on network structure: networks by name and their training."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

from minimand.errors import OptionError
from minimand.nn import NesterovUpdate, coefficient_parameters

from ...context import Lab
from ...experiment import Comparison, Metrics, Results
from ...recipe import FastRecipe, augmentation, fast_train
from ...training import Loaders, loaders, train
from ...zoo import AGDNet, DenseNet, DMRNet, HBNet, ResNet
from .._solvers import ImageOptions

__all__ = ["StructureOptions", "error_row", "network", "one_cycle", "trained"]


def one_cycle(peak: float, epochs: int) -> tuple[float, ...]:
    """A learning rate for each epoch: up to the peak in the first third, down to a hundredth of it in the rest.

    >>> [round(rate, 3) for rate in one_cycle(0.3, 6)]
    [0.15, 0.3, 0.226, 0.151, 0.077, 0.003]
    """
    up = max(1, epochs // 3)
    down = max(1, epochs - up)
    rising = [peak * (k + 1) / up for k in range(up)]
    return (*rising, *(peak * (1 - 0.99 * (k + 1) / down) for k in range(epochs - up)))


@dataclasses.dataclass(frozen=True)
class StructureOptions(ImageOptions):
    """Networks of the same blocks under several algorithms.

    Args:
        width: A factor on the widths of the residual networks.
        epochs: Epochs of every network.
        peak: The largest learning rate.
        schedule: "one-cycle"; "paper": the rate drops to a tenth after 1/2 and after 3/4 of the epochs; "fast": the
            recipe of ``minimand_papers.recipe`` with this peak and decay, in bfloat16.
        decay: Weight decay of all parameters except the coefficients.
    """

    width: float = 1.0
    epochs: int = 8
    peak: float = 0.1
    schedule: str = "one-cycle"
    decay: float = 5e-4

    def rates(self) -> tuple[float, ...]:
        """One learning rate per epoch."""
        if self.schedule == "one-cycle":
            return one_cycle(self.peak, self.epochs)
        if self.schedule != "paper":
            raise OptionError(f'schedule is "one-cycle", "paper" or "fast", got {self.schedule!r}')
        falls = (self.epochs // 2, 3 * self.epochs // 4)
        return tuple(self.peak * 0.1 ** sum(epoch >= fall for fall in falls) for epoch in range(self.epochs))

    def loaders(self, lab: Lab) -> Loaders:
        """Batches of the three splits, with the recipe's augmentation if the schedule is "fast"."""
        if self.schedule != "fast" or not self.augment:
            return super().loaders(lab)
        limit = self.limit or None
        return loaders(lab, self.dataset, self.batch, augment=augmentation(), limit=limit, enlarge=self.enlarge)

    @property
    def recipe(self) -> FastRecipe:
        """The fast recipe with these options; batch norms have scales here, and no decay."""
        same = self.peak, self.decay
        return FastRecipe(
            self.epochs, convolutions=same, norms=(self.peak, 0.0), head=same, momentum=0.9, smoothing=0.1
        )


def network(family: str, size: tuple[int, ...], data: Loaders, width: float = 1.0, dropout: float = 0.0) -> nn.Module:
    """A network by its family and size: n of the residual ones (with a factor on their widths), growth and depth of
    the dense ones (with a dropout)."""
    classes, channels = data.classes, data.shape[0]
    match family:
        case "ResNet":
            return ResNet(size[0], classes, channels, width=width)
        case "HB-Net":
            return HBNet(size[0], classes, channels, width=width)
        case "Nesterov":
            update = NesterovUpdate(0.0)
            return ResNet(size[0], classes, channels, width=width, update=update, learnable=True)
        case "DMRNet":
            # Two streams of 1/√2 of the width have the parameters of one.
            return DMRNet(size[0], classes, channels, width=0.71 * width)
        case "DenseNet":
            return DenseNet(size[0], size[1], classes, channels, dropout=dropout)
        case "AGD-Net":
            return AGDNet(size[0], size[1], classes, channels, dropout=dropout)
    raise OptionError(f"there is no family of networks named {family!r}")


def trained(options: StructureOptions, lab: Lab, data: Loaders, model: nn.Module) -> Iterator[Metrics]:
    """Train a network; the last record has its error, its number of parameters and its coefficients."""
    free = list(coefficient_parameters(model))
    last: dict[str, object] = {}
    if options.schedule == "fast":
        records = fast_train(lab, model, data, options.recipe, free)
    else:
        rates, decay = options.rates(), options.decay
        records = train(lab, model, data, epochs=options.epochs, rates=rates, weight_decay=decay, undecayed=free)
    for record in records:
        if "test" in record:
            last = record
        else:
            yield record
    extra: dict[str, object] = {"parameters": sum(p.numel() for p in model.parameters())}
    if free:
        extra["coefficients"] = [round(float(value), 4) for p in free for value in p.detach().flatten()]
    yield {**last, "error": 100 - float(str(last["test"])), **extra}


def error_row(results: Results[Any], part: str, label: str, paper: float | None, key: str = "error") -> Comparison:
    """A row with a network's error, the paper's error and the number of parameters."""
    sizes = results.final(part, "parameters")
    note = f"{sizes[0]:,.0f} parameters" if sizes else ""
    return Comparison(label, paper, results.final(part, key), "%", note=note)

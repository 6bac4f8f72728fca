"""Supervised training for the experiments: staged learning rates, repeated evaluation of stochastic networks."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .context import Lab
from .data import Augmentation, Batches, DataSplit, Normalization

__all__ = ["Loaders", "accuracy", "evaluate", "loaders", "train"]


@dataclasses.dataclass(frozen=True)
class Loaders:
    """Normalised batches of the three splits, the number of classes and the image shape."""

    train: Batches
    validation: Batches
    test: Batches
    classes: int
    shape: tuple[int, ...]


def loaders(
    lab: Lab,
    dataset: str,
    batch: int,
    *,
    augment: Augmentation | None = None,
    limit: int | None = None,
    enlarge: int = 1,
    unit: bool = False,
) -> Loaders:
    """Load a dataset and hold out a tenth for validation, as in the papers.

    ``limit`` keeps the first images of each split; ``enlarge`` repeats pixels, for networks of larger images. Channels
    are standardised; with ``unit`` the inputs are pixels/255.
    """
    data = lab.load(dataset)
    # The split does not depend on the run's seed, so that all seeds are evaluated on the same images.
    train, validation = data.train.split(0.1, seed=0)
    test = data.test
    if limit is not None:
        train, validation, test = (
            part.subset(torch.arange(min(limit, len(part)))) for part in (train, validation, test)
        )
    train, validation, test = (_enlarged(part, enlarge) for part in (train, validation, test))
    normalize = Normalization.unit(train.images.shape[1]) if unit else Normalization.of(train)
    return Loaders(
        lab.batches(train, batch, normalize=normalize, augment=augment),
        lab.batches(validation, 500, train=False, normalize=normalize),
        lab.batches(test, 500, train=False, normalize=normalize),
        len(data.classes),
        tuple(train.images.shape[1:]),
    )


def _enlarged(split: DataSplit, factor: int) -> DataSplit:
    if factor == 1:
        return split
    images = split.images.repeat_interleave(factor, -1).repeat_interleave(factor, -2)
    return dataclasses.replace(split, images=images)


@torch.no_grad()
def accuracy(lab: Lab, model: nn.Module, batches: Batches) -> float:
    """The accuracy in per cent, in evaluation mode, over all processes."""
    was = model.training
    model.eval()
    counts = torch.zeros(2, device=lab.device, dtype=torch.float64)
    for images, labels in batches:
        if len(labels):
            right = (model(images).argmax(-1) == labels).sum()
            counts += torch.stack([right, right.new_tensor(len(labels))]).double()
    model.train(was)
    right, count = lab.total(counts).tolist()
    return 100 * right / count


def evaluate(lab: Lab, model: nn.Module, batches: Batches, trials: int = 1) -> dict[str, float]:
    """Mean accuracy over the trials, and its standard deviation if there are several."""
    values = torch.tensor([accuracy(lab, model, batches) for _ in range(trials)], dtype=torch.float64)
    found = {"test": float(values.mean())}
    return found if trials == 1 else {**found, "trials_std": float(values.std())}


def stages(optimizer: torch.optim.Optimizer, rates: tuple[float, ...], epochs: int) -> Any:
    """A schedule with equally long stages at the learning rates ``rates``; the optimizer has the first."""
    last = len(rates) - 1
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: rates[min(last, epoch * len(rates) // max(epochs, 1))] / rates[0]
    )


def train(
    lab: Lab,
    model: nn.Module,
    data: Loaders,
    *,
    epochs: int,
    rates: tuple[float, ...] = (1e-2, 1e-3, 1e-4),
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    trials: int = 1,
    undecayed: Iterable[nn.Parameter] = (),
    each: Callable[[float], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Train with SGD and momentum on the cross-entropy; yields a record per epoch, then one with the test accuracy.

    The parameters in ``undecayed`` get no weight decay. ``each`` is called before every step with the share of the
    training that is done.
    """
    net = lab.distribute(model)
    free = list(undecayed)
    taken = set(free)
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in model.parameters() if parameter not in taken]}
    ]
    if free:
        groups.append({"params": free, "weight_decay": 0.0})
    optimizer = torch.optim.SGD(groups, lr=rates[0], momentum=momentum, weight_decay=weight_decay)
    schedule = stages(optimizer, rates, epochs)
    states: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "batches": data.train}
    for epoch in lab.epochs(epochs, **states):
        sums = torch.zeros(3, device=lab.device, dtype=torch.float64)
        model.train()
        for number, (images, labels) in enumerate(lab.track(data.train)):
            if each is not None:
                each((epoch + number / len(data.train)) / epochs)
            sums += _step(net, optimizer, images, labels)
        schedule.step()
        loss, right, count = lab.total(sums).tolist()
        yield {
            "epoch": epoch + 1,
            "loss": loss / count,
            "train": 100 * right / count,
            "validation": accuracy(lab, model, data.validation),
        }
    yield {"epoch": epochs, **evaluate(lab, model, data.test, trials)}


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> Tensor:
    """One training step; returns the summed loss, the number of right answers and the number of images."""
    optimizer.zero_grad()
    logits = net(images)
    loss = nn.functional.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    count = labels.new_tensor(len(labels))
    right = (logits.detach().argmax(-1) == labels).sum()
    return torch.stack([loss.detach() * count, right, count]).double()

"""Shared code of the experiments on regularised digit classifiers: flat images, plain networks, errors."""

import dataclasses
import itertools

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from ...context import Lab
from ...data import DataSplit, Normalization

__all__ = ["Candidates", "DigitsOptions", "FlatSplits", "accuracy_of", "descent", "named", "perceptron"]

# The weights of a method that validation chooses from; None where it has none.
Candidates = tuple[float | None, ...]


@dataclasses.dataclass(frozen=True)
class DigitsOptions:
    """The dataset of digits.

    Args:
        dataset: A name from ``minimand_papers.data.registry``: mnist, mnist5k, digits, …
        samples: Training images; 0: all but the validation tenth.
        batch: Images in a batch.
    """

    dataset: str = "mnist"
    samples: int = 0
    batch: int = 64

    def draw(self, lab: Lab, samples: int | None = None) -> "FlatSplits":
        """The three splits; each seed draws its own subset of the training images."""
        data = lab.load(self.dataset)
        train, validation = data.train.split(0.1, seed=0)
        count = self.samples if samples is None else samples
        if count:
            train = train.subset(torch.randperm(len(train), generator=lab.generator())[:count])
        normalize = Normalization.of(train)
        splits = [rows(split, normalize, lab) for split in (train, validation, data.test)]
        return FlatSplits(splits[0], splits[1], splits[2], len(data.classes))


@dataclasses.dataclass(frozen=True, eq=False)
class FlatSplits:
    """Images as rows, with labels, and the number of classes."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int


def rows(split: DataSplit, normalize: Normalization, lab: Lab) -> tuple[Tensor, Tensor]:
    """Normalised images as rows, and their labels."""
    images, labels = next(iter(lab.batches(split, len(split), train=False, normalize=normalize)))
    return images.flatten(1), labels


def perceptron(sizes: tuple[int, ...], dropout: tuple[float, float] = (0.0, 0.0)) -> nn.Sequential:
    """Linear layers with ReLUs; ``dropout`` has the rates of the input and of the hidden units."""
    layers: list[nn.Module] = [nn.Dropout(dropout[0])] if dropout[0] else []
    for place, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers.append(nn.Linear(a, b))
        if place < len(sizes) - 2:
            layers.append(nn.ReLU())
            if dropout[1]:
                layers.append(nn.Dropout(dropout[1]))
    return nn.Sequential(*layers)


@torch.no_grad()
def accuracy_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """The percentage of right answers in evaluation mode."""
    was = model.training
    model.eval()
    right = sum(
        int((model(x).argmax(1) == y).sum()) for x, y in zip(data[0].split(2000), data[1].split(2000), strict=True)
    )
    model.train(was)
    return 100 * right / len(data[1])


def descent(model: nn.Module, rate: float, epochs: int, decay: float) -> tuple[torch.optim.SGD, StepLR]:
    """SGD with momentum 0.9, whose rate falls to a tenth for the last third."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=decay)
    return optimizer, StepLR(optimizer, max(2 * epochs // 3, 1), 0.1)


def named(method: str, weight: float | None) -> str:
    """The part of a candidate."""
    return method if weight is None else f"{method} = {weight:g}"

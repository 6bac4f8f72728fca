"""Datasets in memory: two splits of byte images with their labels, and the division of a split."""

import dataclasses
from typing import Self

import torch
from torch import Tensor

from minimand.errors import OptionError, ShapeError

__all__ = ["DataSplit", "Dataset"]


@dataclasses.dataclass(frozen=True, eq=False)
class DataSplit:
    """Images as bytes (N × C × H × W, uint8) and their labels (N, int64).

    >>> from minimand_papers.data import load
    >>> train = load("digits").train
    >>> len(train), train.images.shape, train.images.dtype
    (1438, torch.Size([1438, 1, 8, 8]), torch.uint8)
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != torch.uint8:
            raise ShapeError(
                f"images must be N × C × H × W bytes (torch.uint8), "
                f"got {tuple(self.images.shape)} of {self.images.dtype}"
            )
        if self.labels.shape != self.images.shape[:1] or self.labels.dtype != torch.int64:
            raise ShapeError(
                f"labels must be {len(self.images)} integers (torch.int64), one for each image, "
                f"got {tuple(self.labels.shape)} of {self.labels.dtype}"
            )

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        return f"DataSplit({len(self)} images of {' × '.join(map(str, self.images.shape[1:]))})"

    def subset(self, index: Tensor) -> Self:
        """The images at these positions, in this order."""
        index = index.to(self.images.device)
        # index_select copies whole images, eight times as fast as images[index].
        images, labels = self.images.index_select(0, index), self.labels.index_select(0, index)
        return dataclasses.replace(self, images=images, labels=labels)

    def to(self, device: torch.device | str) -> Self:
        """The split on another device; CIFAR-10's training images are 150 MB as bytes."""
        return dataclasses.replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def split(self, fraction: float = 0.1, *, seed: int = 0, stratified: bool = True) -> tuple[Self, Self]:
        """Divide into (rest, held out), where the second holds ``fraction`` of the images, rounded.

        Which images are held out depends on the seed alone; both parts keep the order of the images.
        ``stratified``: every class gives its share, to one image; otherwise the draw ignores the labels.
        The default, a tenth, is the validation share of [Bibi2019], §4.

        >>> from minimand_papers.data import load
        >>> rest, held = load("digits").train.split(0.1, seed=0)
        >>> len(rest), len(held), held.labels.bincount().tolist()
        (1294, 144, [14, 15, 14, 15, 15, 15, 14, 14, 14, 14])
        """
        if not 0 < fraction < 1:
            raise OptionError(f"fraction must lie strictly between 0 and 1, got {fraction}")
        total = round(fraction * len(self))
        if not 0 < total < len(self):
            raise OptionError(f"a fraction of {fraction} of {len(self)} images leaves one of the two parts empty")
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        held = torch.zeros(len(self), dtype=torch.bool)
        held[_stratified(order, self.labels.cpu(), total) if stratified else order[:total]] = True
        return self.subset((~held).nonzero().flatten()), self.subset(held.nonzero().flatten())


def _stratified(order: Tensor, labels: Tensor, total: int) -> Tensor:
    """The first of ``order`` in every class, ``total`` in all, shared out by largest remainders."""
    _, labels, counts = labels.unique(return_inverse=True, return_counts=True)
    share = counts.double() * total / len(labels)
    quota = share.floor().long()
    missing = total - int(quota.sum())
    quota[(share - quota).argsort(descending=True, stable=True)[:missing]] += 1
    by_class = order[labels[order].argsort(stable=True)]
    rank = torch.arange(len(labels)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return by_class[rank < quota.repeat_interleave(counts)]


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset in memory: the publisher's training and test images, and the names of the classes.

    ``complete`` is False where the files hold fewer or more images than the publisher's, as a test's own files do.

    >>> from minimand_papers.data import load
    >>> load("digits")
    Dataset(digits: 1438 training and 359 test images of 1 × 8 × 8, 10 classes)
    """

    name: str
    train: DataSplit
    test: DataSplit
    classes: tuple[str, ...]
    complete: bool = True

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    def __repr__(self) -> str:
        return (
            f"Dataset({self.name}: {len(self.train)} training and {len(self.test)} test images of "
            f"{' × '.join(map(str, self.shape))}, {len(self.classes)} classes)"
        )

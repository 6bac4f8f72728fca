"""Batches: shuffled, augmented and normalised on the fly, resumable, and sharded over processes."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from minimand.errors import OptionError

from .dataset import DataSplit
from .transforms import Augmentation, Normalization

__all__ = ["Batches", "batches"]


def batches(
    split: DataSplit,
    size: int,
    *,
    generator: torch.Generator | None = None,
    normalize: Normalization | None = None,
    augment: Augmentation | None = None,
    device: torch.device | str | None = None,
    drop_last: bool = False,
    shard: tuple[int, int] = (0, 1),
) -> "Batches":
    """An iterable of (images, labels); every ``for`` over it is an epoch.

    >>> from minimand_papers.data import Normalization, batches, load
    >>> train = load("digits").train
    >>> loader = batches(train, 128, generator=torch.Generator().manual_seed(0), normalize=Normalization.of(train))
    >>> len(loader), [len(labels) for _, labels in loader][-2:]
    (12, [128, 30])
    >>> images, labels = next(iter(loader))
    >>> images.shape, images.dtype, labels.dtype
    (torch.Size([128, 1, 8, 8]), torch.float32, torch.int64)

    Args:
        split: The images and labels; batches are gathered on its device.
        size: Images in a batch, over all processes together.
        generator: Shuffles and augments. An epoch takes one number from it, so other users of the generator do
            not change the batches. None: the split's own order, for evaluation.
        normalize: Bytes to floats; None is division by 255.
        augment: Applied to the bytes, on ``device``; needs a generator.
        device: Where the batches go, as bytes before they become floats; None: where the split is.
        drop_last: Leave out the last batch of an epoch if it is not full.
        shard: (rank, world): this process's part of every batch. The ranks' parts, one after the other, are the
            batch that one process sees, given a generator of the same seed on every rank. With a generator the
            parts have to be of one size, so that the mean of the ranks' gradients is the batch's; without one they
            may differ by an image, and the last be empty.
    """
    if size < 1:
        raise OptionError(f"a batch needs at least one image, got size={size}")
    rank, world = shard
    if not 0 <= rank < world:
        raise OptionError(f"shard is (rank, world) with 0 ≤ rank < world, got {shard}")
    if augment is not None and generator is None:
        raise OptionError("augmentation draws random numbers: give batches a generator")
    last = 0 if drop_last else len(split) % size
    if generator is not None and (size % world or last % world):
        what = f"batches of {size}" if size % world else f"a last batch of {last}"
        remedy = f"a multiple of {world} as size" if size % world else "drop_last=True"
        raise OptionError(f"{what} cannot be shared equally by {world} processes: give {remedy}")
    target = torch.device(device) if device is not None else split.images.device
    normalize = normalize or Normalization.unit(split.images.shape[1])
    return Batches(split, size, generator, normalize, augment, target, drop_last, shard)


@dataclasses.dataclass
class _Epoch:
    """The seed of all random numbers of an epoch; ``position`` is the next batch, ``number`` counts epochs from 0."""

    seed: int
    position: int = 0
    number: int = 0


class Batches:
    """What :func:`batches` returns.

    ``state_dict()``, taken between two batches or two epochs and given to ``load_state_dict`` of an equal loader, lets
    its next iteration continue with the following batch, with the same numbers. It includes the generator's state.
    """

    def __init__(
        self,
        split: DataSplit,
        size: int,
        generator: torch.Generator | None,
        normalize: Normalization,
        augment: Augmentation | None,
        device: torch.device,
        drop_last: bool,
        shard: tuple[int, int],
    ) -> None:
        self.split, self.size, self.generator = split, size, generator
        self.normalize, self.augment, self.device = normalize, augment, device
        self.drop_last, self.shard = drop_last, shard
        self._epoch: _Epoch | None = None
        self._begun = 0
        self._resume = False

    def __len__(self) -> int:
        full, rest = divmod(len(self.split), self.size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._epoch is None or not self._resume:
            self._epoch = _Epoch(self._seed(), number=self._begun)
            self._begun += 1
        self._resume = False
        return self._batches(self._epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: in which epoch, at which batch, and its generator's state."""
        epoch = None if self._epoch is None else dataclasses.asdict(self._epoch)
        state = None if self.generator is None else self.generator.get_state()
        return {"images": len(self.split), "size": self.size, "epoch": epoch, "begun": self._begun, "generator": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where another loader of the same split and size was."""
        here = {"images": len(self.split), "size": self.size}
        there = {key: state.get(key) for key in here}
        if here != there or (state.get("generator") is None) != (self.generator is None):
            raise OptionError(
                f"the saved position is that of another loader: it has {there['images']} images in batches of "
                f"{there['size']}, this one {here['images']} in batches of {here['size']}, or only one of them shuffles"
            )
        if self.generator is not None:
            self.generator.set_state(state["generator"].cpu())
        self._epoch = None if state["epoch"] is None else _Epoch(**state["epoch"])
        self._begun = int(state["begun"])
        self._resume = self._epoch is not None

    def _seed(self) -> int:
        if self.generator is None:
            return 0
        device = self.generator.device
        return int(torch.randint(2**63 - 1, (), generator=self.generator, device=device))

    def _batches(self, epoch: _Epoch) -> Iterator[tuple[Tensor, Tensor]]:
        count, here = len(self.split), self.split.images.device
        chance = torch.Generator().manual_seed(epoch.seed)
        order = torch.arange(count) if self.generator is None else torch.randperm(count, generator=chance)
        order = order.to(here)
        labels = self.split.labels.index_select(0, order).to(self.device)
        draw = None if self.augment is None else self.augment.draw(order, epoch.number, chance)
        while epoch.position < len(self):
            rows = self._rows(epoch.position)
            epoch.position += 1
            images = self.split.images.index_select(0, order[rows]).to(self.device)
            if self.augment is not None and draw is not None:
                images = self.augment.apply(images, draw[rows])
            yield self.normalize(images), labels[rows]
        if self._epoch is epoch:
            self._epoch = None

    def _rows(self, position: int) -> slice:
        """This process's part of the batch: as equal as can be, the first ranks one more."""
        begin = position * self.size
        length = min(self.size, len(self.split) - begin)
        (rank, world) = self.shard
        share, more = divmod(length, world)
        start = begin + rank * share + min(rank, more)
        return slice(start, start + share + (rank < more))

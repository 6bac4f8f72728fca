"""From bytes to network inputs: normalisation, random crops and flips, for whole batches."""

import dataclasses
import functools
import math
from typing import Protocol

import torch
from torch import Tensor

from minimand.errors import OptionError, ShapeError

from .dataset import DataSplit

__all__ = ["Augmentation", "CropFlip", "Normalization"]


@dataclasses.dataclass(frozen=True)
class Normalization:
    """Bytes to floats, (x / 255 − mean) / std in each channel.

    >>> from minimand_papers.data import Normalization, load
    >>> data = load("digits")
    >>> normalize = Normalization.of(data.train)
    >>> x = normalize(data.train.images)
    >>> x.dtype, bool(x.mean().abs() < 1e-5), bool((x.std() - 1).abs() < 1e-4)
    (torch.float32, True, True)
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise ShapeError(f"{len(self.mean)} means do not fit {len(self.std)} standard deviations")
        if not all(0 < std < math.inf for std in self.std):
            raise OptionError(f"standard deviations must be finite and > 0, got {self.std}")

    @classmethod
    def of(cls, split: DataSplit) -> "Normalization":
        """Mean and standard deviation of each channel, exact: from the counts of the 256 values.

        Take them of the training part, after the validation images were held out. A constant channel keeps unit scale.
        """
        if not len(split):
            raise ShapeError("a split without images has no mean; give at least one image")
        mean, std = [], []
        values = torch.arange(256, dtype=torch.float64, device=split.images.device) / 255
        for channel in split.images.unbind(1):
            weight = torch.bincount(channel.flatten(), minlength=256) / channel.numel()
            center = (weight * values).sum()
            mean.append(float(center))
            std.append(math.sqrt(float((weight * (values - center).square()).sum())) or 1.0)
        return cls(tuple(mean), tuple(std))

    @classmethod
    def unit(cls, channels: int) -> "Normalization":
        """Only x / 255."""
        return cls((0.0,) * channels, (1.0,) * channels)

    def __call__(self, images: Tensor) -> Tensor:
        """Byte images (N × C × H × W) as float32."""
        if images.ndim != 4 or images.shape[1] != len(self.mean):
            raise ShapeError(
                f"a normalisation of {len(self.mean)} channels does not fit images of {tuple(images.shape)}"
            )
        scale, shift = _affine(self, images.device)
        return images.to(torch.float32).mul_(scale).add_(shift)

    def inverse(self, x: Tensor) -> Tensor:
        """Network inputs as images with values in 0 … 1, to be looked at."""
        scale, shift = _affine(self, x.device)
        return ((x - shift) / scale / 255).clamp(0, 1)


@functools.lru_cache(maxsize=16)
def _affine(normalize: Normalization, device: torch.device) -> tuple[Tensor, Tensor]:
    """Scale and shift of each channel; remembered, because making them takes as long as applying them to a batch."""
    scale = [1 / (255 * std) for std in normalize.std]
    shift = [-mean / std for mean, std in zip(normalize.mean, normalize.std, strict=True)]
    both = torch.tensor([scale, shift], dtype=torch.float32, device=device).view(2, 1, -1, 1, 1)
    return both[0], both[1]


class Augmentation(Protocol):
    """A random change of images, in two parts, so that a draw can be made for many and applied to some.

    Rows of the draw belong to images: a slice of it, applied to that slice of the images, gives that slice of the
    result.
    """

    def draw(self, order: Tensor, epoch: int, generator: torch.Generator) -> Tensor:
        """The random numbers for the images at the positions ``order`` of a split, one row each.

        ``epoch`` counts from 0, for changes that alternate.
        """
        ...

    def apply(self, images: Tensor, draw: Tensor) -> Tensor:
        """The changed byte images; the given ones stay as they are."""
        ...


@dataclasses.dataclass(frozen=True)
class CropFlip:
    """Pad, crop to size at a random place, and mirror with probability ½: what CIFAR nets are trained with.

    Not for digits, which a mirror changes: ``CropFlip(padding=2, flip=False)``.

    >>> images = torch.arange(18, dtype=torch.uint8).view(2, 1, 3, 3)
    >>> CropFlip(padding=1).apply(images, torch.tensor([[1, 1, 0], [0, 1, 1]])).tolist()
    [[[[0, 1, 2], [3, 4, 5], [6, 7, 8]]], [[[0, 0, 0], [11, 10, 9], [14, 13, 12]]]]

    Args:
        padding: Pixels on each side.
        flip: Whether images are mirrored.
        reflect: Pad by reflection instead of zeros.
        alternate: Mirror a fixed random half of the images in even epochs and the other half in odd ones, so that two
            epochs show every image both ways.
    """

    padding: int = 4
    flip: bool = True
    reflect: bool = False
    alternate: bool = False

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise OptionError(f"padding must be ≥ 0, got {self.padding}")

    def draw(self, order: Tensor, epoch: int, generator: torch.Generator) -> Tensor:
        """Top and left of the crop in the padded image, and whether it is mirrored."""
        count = len(order)
        places = torch.randint(2 * self.padding + 1, (count, 2), generator=generator)
        mirror = torch.randint(2, (count, 1), generator=generator)
        if self.alternate:
            halves = torch.randint(
                2, (int(order.max()) + 1 if count else 0,), generator=torch.Generator().manual_seed(0)
            )
            mirror = (halves[order.cpu()] + epoch).remainder(2).unsqueeze(1)
        return torch.cat([places, mirror if self.flip else torch.zeros_like(mirror)], dim=1)

    def apply(self, images: Tensor, draw: Tensor) -> Tensor:
        """Mirror, pad and crop N images by the N rows of the draw."""
        count, channels, height, width = images.shape
        if draw.shape != (count, 3):
            raise ShapeError(f"a draw of {tuple(draw.shape)} does not fit {count} images; it needs a row of 3 for each")
        if self.reflect and self.padding >= min(height, width):
            raise ShapeError(f"a reflection by {self.padding} pixels needs larger images than {height} × {width}")
        pad, line, lines = self.padding, width + 2 * self.padding, height + 2 * self.padding
        padded = images.new_zeros(1 + self.flip, count, channels, lines, line)
        inner = padded[..., pad : pad + height, pad : pad + width]
        inner[0] = images
        if self.flip:
            inner[1] = images.flip(-1)
        if self.reflect and pad:
            padded[..., :pad] = padded[..., pad + 1 : 2 * pad + 1].flip(-1)
            padded[..., -pad:] = padded[..., -2 * pad - 1 : -pad - 1].flip(-1)
            padded[..., :pad, :] = padded[..., pad + 1 : 2 * pad + 1, :].flip(-2)
            padded[..., -pad:, :] = padded[..., -2 * pad - 1 : -pad - 1, :].flip(-2)
        # A row of a crop is a run of the padded bytes. All runs are one overlapping view, and runs are copied whole.
        runs = padded.as_strided((max(padded.numel() - width + 1, 0), width), (1, 1))
        strides, origin = _places(count, channels, height, lines, line, images.device)
        start = origin + (draw.to(images.device) * strides).sum(1).view(count, 1, 1)
        return runs.index_select(0, start.flatten()).view(count, channels, height, width)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Draw and apply."""
        return self.apply(images, self.draw(torch.arange(len(images)), 0, generator))


@functools.lru_cache(maxsize=16)
def _places(
    count: int, channels: int, height: int, lines: int, line: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """By how many bytes a step in (top, left, mirror) moves, and where each row of a crop at (0, 0) begins."""
    plane = lines * line
    strides = torch.tensor([line, 1, count * channels * plane], device=device)
    planes = torch.arange(count * channels, device=device).view(count, channels, 1) * plane
    return strides, planes + torch.arange(height, device=device) * line

"""Random crops of training images, and pixels as numbers in [0, 1]."""

from collections.abc import Sequence

import torch
from torch import Tensor

from minimand.errors import OptionError, ShapeError, require_finite

__all__ = ["random_crops", "unit_interval"]


def unit_interval(image: Tensor) -> Tensor:
    """Bytes (uint8) as numbers in [0, 1] of the default type; others must lie there already.

    >>> unit_interval(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([0., 1.])
    """
    if image.dtype == torch.uint8:
        return image.to(torch.get_default_dtype()) / 255
    if not image.is_floating_point():
        raise OptionError(f"pixels are bytes (torch.uint8) or real numbers in [0, 1], got {image.dtype}; convert them")
    require_finite("the image", image)
    low, high = (float(end) for end in torch.aminmax(image)) if image.numel() else (0.0, 0.0)
    if low < 0 or high > 1:
        raise OptionError(
            f"pixels lie in [0, 1], got {low:.4g} … {high:.4g}; divide by the largest value, or give torch.uint8"
        )
    return image


def random_crops(
    images: Sequence[Tensor], count: int, side: int, *, generator: torch.Generator | None = None
) -> Tensor:
    """``count`` random squares ``(count, C, side, side)``, flipped and turned at random, in [0, 1].

    >>> images = [torch.zeros(1, 40, 50, dtype=torch.uint8), torch.zeros(1, 20, 20, dtype=torch.uint8)]
    >>> random_crops(images, 3, 33, generator=torch.Generator().manual_seed(0)).shape
    torch.Size([3, 1, 33, 33])
    """
    large = [image for image in images if min(image.shape[-2:]) >= side]
    if not large:
        raise ShapeError(f"none of the {len(images)} images has room for a crop of {side} × {side}")
    if len({(image.dtype, *image.shape[:-2]) for image in large}) > 1:
        kinds = sorted({f"{tuple(image.shape[:-2])} of {image.dtype}" for image in large})
        raise ShapeError(f"crops of one batch come from images of one kind, got {' and '.join(kinds)}; convert them")

    def draw(bound: int) -> int:
        return int(torch.randint(bound, (), generator=generator))

    crops = []
    for _ in range(count):
        image = large[draw(len(large))]
        top, left, pose = draw(image.shape[-2] - side + 1), draw(image.shape[-1] - side + 1), draw(8)
        crop = image[..., top : top + side, left : left + side]
        crop = crop.flip(-1) if pose & 1 else crop
        crop = crop.flip(-2) if pose & 2 else crop
        crops.append(crop.mT if pose & 4 else crop)
    return unit_interval(torch.stack(crops))

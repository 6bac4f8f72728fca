"""Images as blocks: padding, cutting, assembling, and random crops to train on."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import OptionError, ShapeError, require_finite

__all__ = ["from_blocks", "pad_to_blocks", "random_crops", "to_blocks", "unit_interval"]


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


def pad_to_blocks(image: Tensor, block: int = 33) -> Tensor:
    """The image continued by zeros, below and to the right, to whole blocks; ``x[..., :H, :W]`` takes them off again.

    >>> pad_to_blocks(torch.ones(1, 40, 33)).shape
    torch.Size([1, 66, 33])
    """
    height, width = image.shape[-2:]
    if min(height, width) < block:
        raise ShapeError(
            f"an image of {height} × {width} is smaller than a block of {block} × {block}; "
            f"use smaller blocks, or enlarge the image"
        )
    return F.pad(image, (0, -width % block, 0, -height % block))


def to_blocks(image: Tensor, block: int = 33) -> Tensor:
    """Cut ``(..., H, W)`` of whole blocks into rows ``(N, block²)``, in reading order.

    >>> to_blocks(torch.arange(8.0).reshape(2, 4), 2)
    tensor([[0., 1., 4., 5.],
            [2., 3., 6., 7.]])
    """
    height, width = image.shape[-2:]
    if height % block or width % block or not image.numel():
        raise ShapeError(
            f"an image of {height} × {width} is not made of blocks of {block} × {block}; pad it with pad_to_blocks"
        )
    cut = image.reshape(-1, height // block, block, width // block, block)
    return cut.transpose(2, 3).reshape(-1, block * block)


def from_blocks(rows: Tensor, size: tuple[int, int]) -> Tensor:
    """Assemble rows of :func:`to_blocks` to images ``(B, 1, H, W)``; borders that were padded are cut off.

    >>> x = torch.rand(1, 1, 5, 7)
    >>> torch.equal(from_blocks(to_blocks(pad_to_blocks(x, 3), 3), (5, 7)), x)
    True
    """
    block = round(rows.shape[-1] ** 0.5)
    height, width = size
    down, across = -(-height // block), -(-width // block)
    if rows.dim() != 2 or block * block != rows.shape[-1] or len(rows) % (down * across):
        raise ShapeError(
            f"rows of shape {tuple(rows.shape)} do not assemble to images of {height} × {width}: they are N blocks "
            f"of b² pixels, N a multiple of the blocks of one image"
        )
    cut = rows.reshape(-1, down, across, block, block).transpose(2, 3)
    return cut.reshape(-1, 1, down * block, across * block)[..., :height, :width]


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

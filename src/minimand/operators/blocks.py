"""Images as rows of square blocks: padding, cutting and assembling."""

import torch.nn.functional as F
from torch import Tensor

from ..arguments import checked
from ..errors import ShapeError

__all__ = ["from_blocks", "pad_to_blocks", "to_blocks"]


@checked
def pad_to_blocks(image: Tensor, block: int = 33) -> Tensor:
    """The image continued by zeros, below and to the right, to whole blocks; ``x[..., :H, :W]`` takes them off again.

    >>> import torch
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


@checked
def to_blocks(image: Tensor, block: int = 33) -> Tensor:
    """Cut ``(..., H, W)`` of whole blocks into rows ``(N, block²)``, in reading order.

    >>> import torch
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


@checked
def from_blocks(rows: Tensor, size: tuple[int, int]) -> Tensor:
    """Assemble rows of :func:`to_blocks` to images ``(B, 1, H, W)``; borders that were padded are cut off.

    >>> import torch
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

r"""Gram matrices of rows and of the patches of a convolution's input.

Two patches that lie one step apart in the first spatial dimension share all their lines but one. So at stride 1 the
blocks :math:`\sum_{r=i}^{i+H_o-1} U_r^\top U_{r+d}` of the Gram matrix, for the kernel lines i and i + d, are one
product for all i, up to a few lines at the edges (:math:`U_r` holds the patches' entries in line r of the map).
Long sums of positive products lose digits in float32. Products are therefore short and are summed in float64.
"""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..geometry import ConvGeometry
from ..linalg import gram
from .patches import padded_groups, patches, windows

__all__ = ["patch_gram", "row_gram"]

# Entries unfolded at a time.
_BLOCK = 1 << 22
# Rows per product. Longer float32 products lose digits, shorter ones cost time.
_SHORT = 1024


def row_gram(rows: Tensor, ones: bool, wide: bool) -> Tensor:
    """The Gram matrix of the rows, with a column of ones appended if ``ones``; ``wide``: all products in float64."""
    n, parts = rows.shape[1], rows.split(_SHORT)
    sums = rows.dtype if len(parts) == 1 and not wide else torch.float64
    total = rows.new_zeros((n + ones, n + ones), dtype=sums)
    for part in (part.double() if wide else part for part in parts):
        total[:n, :n] += gram(part.mT)
        if ones:
            _border(total, part.sum(0), len(part))
    return total


def patch_gram(x: Tensor, geometry: ConvGeometry, ones: bool, wide: bool = False) -> Tensor:
    """The Gram matrix of all patches, groups × n × n. Patches are unfolded for one block of samples at a time."""
    output = geometry.with_size(tuple(x.shape[2:])).output()
    columns = x.shape[1] // geometry.groups * math.prod(geometry.kernel)
    total = x.new_zeros((geometry.groups, columns + ones, columns + ones), dtype=torch.float64)
    if geometry.stride[0] == 1:
        height = x.shape[2] + sum(geometry.padding[0])
        per_sample = x.shape[1] * height * math.prod(output[1:]) * math.prod(geometry.kernel[1:])
        for block in x.split(max(1, _BLOCK // max(1, per_sample))):
            total += _by_lines(block.double() if wide else block, geometry, ones)
        return total
    for block in x.split(max(1, _BLOCK // max(1, columns * geometry.groups * math.prod(output)))):
        total += torch.stack([row_gram(part, ones, wide) for part in patches(block, geometry)])
    return total


def _border(total: Tensor, sums: Tensor, count: int) -> None:
    """Add the entries of the column of ones: the rows' sums and their number."""
    total[..., :-1, -1] += sums
    total[..., -1, :-1] += sums
    total[..., -1, -1] += count


def _by_lines(x: Tensor, geometry: ConvGeometry, ones: bool) -> Tensor:
    """The Gram matrix of one block of samples from products of lines; stride 1 in the first dimension."""
    output = geometry.with_size(tuple(x.shape[2:])).output()
    x = padded_groups(x, geometry)
    d = len(geometry.kernel)
    view = windows(x, geometry, output, range(1, d))
    order = (1, 3, 0, *range(4, 3 + d), 2, *range(3 + d, 2 + 2 * d))
    channels, rest = x.shape[2], math.prod(geometry.kernel[1:])
    lines = view.permute(order).reshape(geometry.groups, x.shape[3], -1, channels * rest)
    k, step, height = geometry.kernel[0], geometry.dilation[0], output[0]
    columns = channels * k * rest
    before, after = geometry.padding[0]
    live = range(before, x.shape[3] - after)
    out = x.new_zeros((geometry.groups, columns + ones, columns + ones), dtype=torch.float64)
    blocks = out.new_zeros(geometry.groups, channels, k, rest, channels, k, rest)
    for offset in range(k):
        for i, product in enumerate(_line_products(lines, k - offset, step, height, offset * step, live)):
            part = product.reshape(-1, channels, rest, channels, rest)
            blocks[:, :, i, :, :, i + offset, :] = part
            blocks[:, :, i + offset, :, :, i, :] = part.permute(0, 3, 4, 1, 2)
    out[:, :columns, :columns] = blocks.reshape(-1, columns, columns)
    if ones:
        heads = lines.sum(2).double()
        sums = torch.stack([heads[:, i * step : i * step + height].sum(1) for i in range(k)], 1)
        sums = sums.reshape(-1, k, channels, rest).transpose(1, 2).reshape(-1, columns)
        _border(out, sums, height * lines.shape[2])
    return out


def _line_products(lines: Tensor, count: int, step: int, height: int, offset: int, live: range) -> Iterator[Tensor]:
    """For every i < ``count`` the sum of Uᵣᵀ U₍ᵣ₊offset₎ over the ``height`` lines r that start at i·step.

    Lines outside of ``live`` are zero. Lines between two ends of sums are multiplied once for all sums.
    """

    def product(start: int, end: int) -> Tensor:
        left, right = lines[:, start:end].split(some, 1), lines[:, start + offset : end + offset].split(some, 1)
        parts = [(a.mT @ b).sum(1, dtype=torch.float64) for a, b in zip(left, right, strict=True)]
        return sum(parts[1:], parts[0])

    some = max(1, _BLOCK // (lines.shape[0] * lines.shape[-1] ** 2))
    ends = sorted({i * step + add for i in range(count) for add in (0, height)})
    pieces = []
    for start, end in itertools.pairwise(ends):
        first, last = max(start, live.start), min(end, live.stop - offset)
        if first < last:
            pieces.append((start, end, product(first, last)))
    for i in range(count):
        zero = lines.new_zeros(len(lines), lines.shape[-1], lines.shape[-1], dtype=torch.float64)
        yield sum((part for start, end, part in pieces if i * step <= start and end <= i * step + height), zero)

r"""Gram matrices of rows and of the patches of a convolution's input.

Two patches that lie one step apart in the first spatial dimension share all their lines but one. So at stride 1 the
blocks :math:`\sum_{r=i}^{i+H_o-1} U_r^\top U_{r+d}` of the Gram matrix, for the kernel lines i and i + d, are one
product for all i, up to a few lines at the edges (:math:`U_r` holds the patches' entries in line r of the map). Within
these products patches that lie one step apart in the last dimension share their columns likewise. A 5 × 5 kernel takes
5 · 9 instead of 625 products of pairs of entries, and some for the edges.
Long sums of positive products lose digits in float32. Products are therefore short and are summed in float64.
"""

import math
from typing import NamedTuple

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
            _add_lines(total, block.double() if wide else block, geometry, ones)
        return total
    for block in x.split(max(1, _BLOCK // max(1, columns * geometry.groups * math.prod(output)))):
        total += torch.stack([row_gram(part, ones, wide) for part in patches(block, geometry)])
    return total


def _border(total: Tensor, sums: Tensor, count: int) -> None:
    """Add the entries of the column of ones: the rows' sums and their number."""
    total[..., :-1, -1] += sums
    total[..., -1, :-1] += sums
    total[..., -1, -1] += count


class _Axis(NamedTuple):
    """A dimension with stride 1: tap i of the kernel reads the ``output`` entries from i · ``step`` on."""

    taps: int = 1
    step: int = 1
    output: int = 1
    #: The entries that are not padding.
    live: range = range(1)

    @property
    def reach(self) -> int:
        """The distance between the first and the last tap."""
        return (self.taps - 1) * self.step

    def inside(self, taps: int) -> Tensor:
        """Which entries each of the first ``taps`` taps reads, taps × entries."""
        first, entries = self.step * torch.arange(taps)[:, None], torch.arange(self.output + self.reach)
        return (entries >= first) & (entries < first + self.output)


def _axis(geometry: ConvGeometry, output: tuple[int, ...], dim: int) -> _Axis:
    taps, step, (before, after) = geometry.kernel[dim], geometry.dilation[dim], geometry.padding[dim]
    return _Axis(taps, step, output[dim], range(before, output[dim] + (taps - 1) * step - after))


def _add_lines(total: Tensor, x: Tensor, geometry: ConvGeometry, ones: bool) -> None:
    """Add the Gram matrix of one block of samples, from products of lines; stride 1 in the first dimension."""
    output, d = geometry.with_size(tuple(x.shape[2:])).output(), len(geometry.kernel)
    x = padded_groups(x, geometry)
    down, across = _axis(geometry, output, 0), _axis(geometry, output, d - 1)
    shifts = d > 1 and geometry.stride[-1] == 1 and across.output > across.reach
    across, unfolded = across if shifts else _Axis(), range(1, d - shifts)
    view = windows(x, geometry, output, unfolded)
    order = (1, 3, *(2 + d,) * shifts, 0, *(3 + dim for dim in unfolded), 2, *range(3 + d, view.dim()))
    channels, rest = x.shape[2], math.prod(geometry.kernel[1 : d - shifts])
    width = across.output + across.reach
    pixels = view.permute(order).reshape(geometry.groups, x.shape[3], width, -1, channels * rest)
    k, w = down.taps, across.taps
    # Blocks for pairs of taps: line, line, column, column, then groups and pairs of channels.
    blocks = x.new_empty(k, k, w, w, geometry.groups, *pixels.shape[-1:] * 2, dtype=torch.float64)
    first, second = torch.meshgrid(torch.arange(w), torch.arange(w), indexing="ij")
    start, shift = torch.minimum(first, second), torch.where(second >= first, second - first, w - 1 + first - second)
    columns = _Columns(pixels, across)
    for offset in range(k):
        at = torch.arange(k - offset)
        found = columns.products(down, offset)[:, start, shift]
        blocks[at, at + offset] = found
        blocks[at + offset, at] = found.transpose(1, 2).mT
    blocks = blocks.reshape(k, k, w, w, -1, channels, rest, channels, rest).permute(4, 5, 0, 6, 2, 7, 1, 8, 3)
    n = channels * k * rest * w
    total[:, :n, :n].unflatten(2, (channels, k, rest, w)).unflatten(1, (channels, k, rest, w)).add_(blocks)
    if ones:
        heads, masks = pixels.sum(3).double(), [axis.inside(axis.taps).to(total) for axis in (down, across)]
        sums = torch.einsum("ghwc,ih,kw->gcik", heads, *masks).reshape(-1, channels, rest, k, w).transpose(2, 3)
        _border(total, sums.reshape(-1, n), down.output * across.output * pixels.shape[3])


class _Columns:
    """The entries of lines beside their neighbours to the right, one neighbour for each tap of the kernel.

    Windows that are one step apart share all their columns but one, too. All windows contain the columns of ``middle``;
    those of ``edges`` are multiplied one by one.
    """

    def __init__(self, pixels: Tensor, across: _Axis) -> None:
        self.count, self.taps = pixels.shape[-1], across.taps
        lines = pixels.unsqueeze(-2)
        if self.taps > 1:
            lines = pixels.new_zeros(*pixels.shape[:-1], self.taps, self.count)
            for tap in range(self.taps):
                shift = tap * across.step
                lines[:, :, : pixels.shape[2] - shift, :, tap] = pixels[:, :, shift:]
        lines = lines.flatten(-2)
        outer = (*range(across.reach), *range(across.output, across.output + across.reach))
        single = [column for column in outer if column in across.live]
        middle = lines[:, :, across.reach : across.output].flatten(2, 3).unsqueeze(2)
        self.parts = [middle, *([lines[:, :, single]] if single else [])]
        masks = across.inside(across.taps)[:, single].to(pixels.device, torch.float64)
        self.masks = torch.cat([masks.new_ones(len(masks), 1), masks], 1)

    def products(self, down: _Axis, offset: int) -> Tensor:
        """The sums of products of lines a distance of ``offset`` taps apart, for all pairs of taps of two lines.

        Sums over the windows of each tap; then for each tap across, for shifts to the right of the second line (the
        first entry is no shift) and of the first line; then groups and pairs of channels.
        """
        inside, apart = down.inside(down.taps - offset), offset * down.step
        whole = range((down.taps - offset - 1) * down.step, down.output)
        lines = range(down.live.start, max(down.live.start, down.live.stop - apart))
        groups, c, width = len(self.parts[0]), self.count, (2 * self.taps - 1) * self.count
        some = max(1, _BLOCK // (groups * len(self.masks[0]) * c * width))
        total = self.masks.new_zeros(len(inside), len(self.masks[0]) * groups * c * width)
        for start in range(lines.start, lines.stop, some):
            end = min(start + some, lines.stop)
            pairs = [(part[:, start:end], part[:, start + apart : end + apart]) for part in self.parts]
            made = torch.cat([self._pair(u, v, offset == 0) for u, v in pairs], 2).permute(1, 2, 0, 3, 4).flatten(1)
            low = min(max(whole.start, start), end)
            high = min(max(whole.stop, low), end)
            total += made[low - start : high - start].sum(0, dtype=torch.float64)
            for line in (*range(start, low), *range(high, end)):
                total[inside[:, line]] += made[line - start]
        total = (self.masks @ total.reshape(len(inside), self.masks.shape[1], -1)).unflatten(-1, (groups, c, -1, c))
        right, left = total.movedim(-2, 2).split([self.taps, self.taps - 1], 2)
        return torch.cat([right, left.mT], 2)

    def _pair(self, u: Tensor, v: Tensor, same: bool) -> Tensor:
        right = u[..., : self.count].mT @ v
        left = right[..., self.count :] if same else v[..., : self.count].mT @ u[..., self.count :]
        return torch.cat([right, left], -1)

r"""The rows that a convolution's weight meets: patches, and their Gram matrices without the patches.

A convolution multiplies its weight with patches of the padded input. Two patches that lie one step apart in the first
spatial dimension share all their lines but one, so at stride 1 the block of the Gram matrix for the kernel lines i and
i + d,

.. math:: G_{i,i+d} = \sum_{r=i}^{i+H_o-1} U_r^\top U_{r+d},

is one product for all i up to a few lines at the edges (:math:`U_r` holds the patches' parts in line r of the map).

Long sums of positive products lose digits in float32: products are short, and summed in float64.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...linalg import gram

__all__ = ["Geometry", "autocorrelation_gram", "patch_gram", "patches", "row_gram"]

# Entries of one block: what is unfolded at a time.
_BLOCK = 1 << 22

# Rows of one product: in float32 longer ones lose digits, while shorter ones cost time.
_SHORT = 1024


@dataclass(frozen=True)
class Geometry:
    """Where a convolution puts its kernel: one entry per spatial dimension, zero padding on both sides."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def padded(self, x: Tensor) -> Tensor:
        """Channels split by groups, zeros around the map: batch × groups × channels × map."""
        pads = [pad for both in reversed(self.padding) for pad in (both, both)]
        x = F.pad(x, pads) if any(pads) else x
        return x.reshape(len(x), self.groups, -1, *x.shape[2:])

    def outputs(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The output's map for an input map that is already padded."""
        ways = zip(sizes, self.kernel, self.stride, self.dilation, strict=True)
        return tuple((size - d * (k - 1) - 1) // s + 1 for size, k, s, d in ways)

    def positions(self, sizes: tuple[int, ...]) -> int:
        """How many patches a map of these sizes, not padded, has."""
        return math.prod(self.outputs(tuple(size + 2 * p for size, p in zip(sizes, self.padding, strict=True))))


def _windows(x: Tensor, geometry: Geometry, dims: range) -> Tensor:
    """A view with the kernel's offsets in the spatial ``dims`` as last dimensions, windows in place of those dims."""
    out = geometry.outputs(tuple(x.shape[3:]))
    shape, stride = list(x.shape), list(x.stride())
    offsets, steps = [], []
    for dim in dims:
        offsets.append(geometry.kernel[dim])
        steps.append(stride[3 + dim] * geometry.dilation[dim])
        shape[3 + dim] = out[dim]
        stride[3 + dim] *= geometry.stride[dim]
    return x.as_strided((*shape, *offsets), (*stride, *steps), x.storage_offset())


def _blocks(x: Tensor, per_sample: int) -> Iterator[Tensor]:
    return iter(x.split(max(1, _BLOCK // max(1, per_sample))))


def patches(x: Tensor, geometry: Geometry) -> Tensor:
    """All patches as rows, groups × (batch · positions) × columns; columns as a weight's row is laid out.

    >>> x = torch.arange(4.0).reshape(1, 1, 4)
    >>> patches(x, Geometry((2,), (1,), (0,), (1,), 1))
    tensor([[[0., 1.],
             [1., 2.],
             [2., 3.]]])
    """
    x = geometry.padded(x)
    d = len(geometry.kernel)
    view = _windows(x, geometry, range(d))
    order = (1, 0, *range(3, 3 + d), 2, *range(3 + d, 3 + 2 * d))
    return view.permute(order).reshape(geometry.groups, -1, x.shape[2] * math.prod(geometry.kernel))


def row_gram(rows: Tensor, ones: bool, wide: bool) -> Tensor:
    """The Gram matrix of the rows (and a column of ones), n × n; ``wide``: every product in float64.

    >>> row_gram(torch.tensor([[1.0, 2.0]]), True, False)
    tensor([[1., 2., 1.],
            [2., 4., 2.],
            [1., 2., 1.]])
    """
    n = rows.shape[1]
    parts = rows.split(_SHORT)
    sums = rows.dtype if len(parts) == 1 and not wide else torch.float64
    total = rows.new_zeros((n + ones, n + ones), dtype=sums)
    for part in (part.double() if wide else part for part in parts):
        total[:n, :n] += gram(part.mT)
        if ones:
            _border(total, part.sum(0), len(part))
    return total


def patch_gram(x: Tensor, geometry: Geometry, ones: bool, wide: bool = False) -> Tensor:
    """The Gram matrix of all patches (and a column of ones), groups × n × n, a block of the batch at a time.

    ``wide``: every product in float64; without it only their sum is.
    """
    sizes = tuple(x.shape[2:])
    columns = x.shape[1] // geometry.groups * math.prod(geometry.kernel)
    n = columns + ones
    total = x.new_zeros((geometry.groups, n, n), dtype=torch.float64)
    if geometry.stride[0] == 1:
        rest = math.prod(geometry.outputs(tuple(s + 2 * p for s, p in zip(sizes, geometry.padding, strict=True)))[1:])
        per_sample = x.shape[1] * (sizes[0] + 2 * geometry.padding[0]) * rest * math.prod(geometry.kernel[1:])
        for block in _blocks(x, per_sample):
            total += _by_lines(block.double() if wide else block, geometry, ones)
        return total
    for block in _blocks(x, columns * geometry.groups * geometry.positions(sizes)):
        total += torch.stack([row_gram(part, ones, wide) for part in patches(block, geometry)])
    return total


def _border(total: Tensor, sums: Tensor, count: int) -> None:
    """Add what the column of ones contributes."""
    total[..., :-1, -1] += sums
    total[..., -1, :-1] += sums
    total[..., -1, -1] += count


def _by_lines(x: Tensor, geometry: Geometry, ones: bool) -> Tensor:
    """One block of the batch at stride 1 in the first dimension: products of lines, not of patches."""
    x = geometry.padded(x)
    d = len(geometry.kernel)
    view = _windows(x, geometry, range(1, d))
    order = (1, 3, 0, *range(4, 3 + d), 2, *range(3 + d, 2 + 2 * d))
    channels, rest = x.shape[2], math.prod(geometry.kernel[1:])
    lines = view.permute(order).reshape(geometry.groups, x.shape[3], -1, channels * rest)
    k, step, height = geometry.kernel[0], geometry.dilation[0], geometry.outputs(tuple(x.shape[3:]))[0]
    columns = channels * k * rest
    out = x.new_zeros((geometry.groups, columns + ones, columns + ones), dtype=torch.float64)
    blocks = out.new_zeros(geometry.groups, channels, k, rest, channels, k, rest)
    for offset in range(k):
        for i, product in enumerate(_line_products(lines, k - offset, step, height, offset * step)):
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


def _line_products(lines: Tensor, count: int, step: int, height: int, offset: int) -> Iterator[Tensor]:
    """For i < ``count``: Σ over the lines r from i·step on, ``height`` of them, of Uᵣᵀ U₍ᵣ₊offset₎.

    The lines that all sums share are multiplied once; each sum adds its own at the edges, so nothing is subtracted.
    """

    def product(start: int, end: int) -> Tensor:
        left, right = lines[:, start:end].split(some, 1), lines[:, start + offset : end + offset].split(some, 1)
        parts = [(a.mT @ b).sum(1, dtype=torch.float64) for a, b in zip(left, right, strict=True)]
        return sum(parts[1:], parts[0])

    some = max(1, _BLOCK // (lines.shape[0] * lines.shape[-1] ** 2))

    low, high = (count - 1) * step, height
    if low >= high:
        yield from (product(i * step, i * step + height) for i in range(count))
        return
    core = product(low, high)
    for i in range(count):
        edges = [(i * step, low), (high, i * step + height)]
        yield sum((product(*edge) for edge in edges if edge[0] < edge[1]), core)


def autocorrelation_gram(x: Tensor, geometry: Geometry, ones: bool, wide: bool = False) -> Tensor:
    """The Gram matrix of all patches that touch the map, from the autocorrelation of its channels by FFT."""
    d = len(geometry.kernel)
    reach = tuple(step * (k - 1) for step, k in zip(geometry.dilation, geometry.kernel, strict=True))
    x = x.reshape(len(x), geometry.groups, -1, *x.shape[2:])
    sizes = tuple(x.shape[3:])
    # Room for the largest shift on one side keeps the circular correlation from wrapping.
    grid = tuple(size + r for size, r in zip(sizes, reach, strict=True))
    dims = tuple(range(3, 3 + d))
    spectrum: Tensor | float = 0.0
    for block in _blocks(x, 2 * x.shape[1] * x.shape[2] * math.prod(grid)):
        block = block.double() if wide else block
        freq = torch.fft.rfftn(block, s=grid, dim=dims).flatten(3).permute(1, 3, 2, 0)
        spectrum = spectrum + freq.conj() @ freq.mT
    assert isinstance(spectrum, Tensor)
    channels = x.shape[2]
    half = (*grid[:-1], grid[-1] // 2 + 1)
    spectrum = spectrum.permute(0, 2, 3, 1).reshape(geometry.groups, channels, channels, *half)
    correlation = torch.fft.irfftn(spectrum, s=grid, dim=dims)
    table = correlation
    for dim, (k, step, size) in enumerate(zip(geometry.kernel, geometry.dilation, grid, strict=True)):
        shift = _shifts(k, step, x.device)
        table = table.index_select(3 + 2 * dim, shift.flatten() % size).unflatten(3 + 2 * dim, tuple(shift.shape))
    columns = channels * math.prod(geometry.kernel)
    order = (0, 1, *range(3, 3 + 2 * d, 2), 2, *range(4, 4 + 2 * d, 2))
    out = table.new_zeros(geometry.groups, columns + ones, columns + ones)
    out[:, :columns, :columns] = table.permute(order).reshape(-1, columns, columns)
    if ones:
        sums = x.sum((0, *dims)).repeat_interleave(math.prod(geometry.kernel), dim=1)
        _border(out, sums, len(x) * math.prod(grid))
    return out


def _shifts(kernel: int, step: int, device: torch.device) -> Tensor:
    """How far kernel offset j lies ahead of offset i, as a table."""
    place = torch.arange(kernel, device=device) * step
    return place[None, :] - place[:, None]

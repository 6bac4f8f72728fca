r"""Convolutions as matrix products: the patches of a map as rows, and a map's positions as rows.

A convolution multiplies each patch of its padded input with its weight. With the patches as rows of a matrix R and the
weight flattened to W (outputs × columns), the output at every position is a row of :math:`RW^\top`.
"""

import math

from torch import Tensor

from ..geometry import ConvGeometry

__all__ = ["padded_groups", "patches", "positions_as_rows", "windows"]


def padded_groups(x: Tensor, geometry: ConvGeometry) -> Tensor:
    """The padded maps with channels split by groups: batch × groups × channels × map."""
    x = geometry.pad(x) if any(geometry.pads) else x
    return x.unflatten(1, (geometry.groups, -1))


def windows(x: Tensor, geometry: ConvGeometry, output: tuple[int, ...], dims: range) -> Tensor:
    """A view of padded maps in which the spatial ``dims`` index windows, and new last dimensions kernel offsets."""
    shape, stride = list(x.shape), list(x.stride())
    offsets, steps = [], []
    for dim in dims:
        offsets.append(geometry.kernel[dim])
        steps.append(stride[3 + dim] * geometry.dilation[dim])
        shape[3 + dim] = output[dim]
        stride[3 + dim] *= geometry.stride[dim]
    return x.as_strided((*shape, *offsets), (*stride, *steps), x.storage_offset())


def patches(x: Tensor, geometry: ConvGeometry) -> Tensor:
    """All patches as rows: groups × (batch · positions) × columns, columns in the order of ``weight.flatten(1)``.

    >>> import torch
    >>> x = torch.arange(4.0).reshape(1, 1, 4)
    >>> patches(x, ConvGeometry.build((2,)))
    tensor([[[0., 1.],
             [1., 2.],
             [2., 3.]]])
    """
    output = geometry.with_size(tuple(x.shape[2:])).output()
    x = padded_groups(x, geometry)
    d = len(geometry.kernel)
    view = windows(x, geometry, output, range(d))
    order = (1, 0, *range(3, 3 + d), 2, *range(3 + d, 3 + 2 * d))
    return view.permute(order).reshape(geometry.groups, -1, x.shape[2] * math.prod(geometry.kernel))


def positions_as_rows(x: Tensor) -> Tensor:
    """The channels at every position as rows, (batch · positions) × channels, in the order of :func:`patches`."""
    return x.movedim(1, -1).flatten(0, -2)

r"""Winograd's minimal filtering: convolutions of 3 × 3 with a quarter of the multiplications.

A solver applies :math:`AA^\top` of the same weight in every iteration. A tile of 4 × 4 outputs is computed from 6 × 6
inputs d and the kernel w as

.. math:: P^\top \bigl[(G w G^\top) \odot (D^\top d\, D)\bigr] P ,

with 36 multiplications for each pair of channels, where the definition has 144. The cost of transforming the maps does
not grow with the number of channels on the other side; the kernels are transformed once.

Source: Lavin, Gray, *Fast algorithms for convolutional neural networks*, CVPR 2016.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry import ConvGeometry
from ..tracing import is_traced

__all__ = ["Winograd", "winograd"]

_TILE, _KERNEL = 4, 3
_WINDOW = _TILE + _KERNEL - 1

# The points, besides infinity, at which polynomials are evaluated. They are symmetric and of size about one: in float32
# the rounding error is two to four times that of torch's convolution, depending on the machine; with Lavin and Gray's
# 0, ±1, ±2 it is twice as large.
_POINTS = (0.0, 0.75, -0.75, 1.5, -1.5)

# The batch is processed in groups whose windows have about this many numbers, so that they stay in the cache.
_GROUP = 300_000

# Measured: a multiplication in a transform costs as much as _TRANSFORM multiplications with the kernels, and reading
# the kernels costs as much as multiplying _READ windows.
_TRANSFORM, _READ = 2, 22


class Winograd(NamedTuple):
    r"""The transformed kernels of :math:`AA^\top`: those of A, and those of the adjoint, which is the convolution with
    the mirrored weight."""

    forward: Tensor
    backward: Tensor
    padding: tuple[int, int]
    size: tuple[int, int]

    @classmethod
    def of(cls, weight: Tensor, geometry: ConvGeometry) -> "Winograd":
        """Transform a weight."""
        vertical, horizontal = (pair[0] for pair in geometry.padding)
        height, width = geometry.known_size()
        mirrored = weight.flip(2, 3).transpose(0, 1)
        return cls(_kernels(weight), _kernels(mirrored), (vertical, horizontal), (height, width))

    def onto(
        self,
        total: Tensor | None,
        keep: float,
        x: Tensor,
        scale: float,
        weight: Tensor,
        definition: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        r""":math:`t + \kappa x + \sigma AA^\top x`, differentiable in t, x and the weight; second derivatives are those
        of the ``definition`` of :math:`AA^\top x` as a function of x and the weight."""
        return _Onto.apply(x, weight, total, self, keep, scale, definition)

    def product(self, x: Tensor, onto: Tensor, scale: float) -> Tensor:
        r"""Add :math:`\sigma AA^\top x` onto a map with channels last, and return :math:`A^\top x`."""
        y, work = _maps(x, self.backward.shape[-1], self.size), _Workspace(x)
        for part in self._groups(x):
            work.filter(work.windows(x[part], self._around, self.size), self.backward, y[part])
            work.filter(work.windows(y[part], self.padding, x.shape[2:]), self.forward, onto[part], scale)
        return y

    def gradients(self, x: Tensor, y: Tensor, grad: Tensor, onto: Tensor, scale: float) -> Tensor:
        r"""Call :meth:`product` with ``grad``, and return :math:`\sigma(x\,(A^\top g)^\top + g\,y^\top)` in the shape
        of the weight, where :math:`y = A^\top x`."""
        spread, work = _maps(y, y.shape[1], self.size), _Workspace(x)
        fresh = torch.empty_like if len(x) else torch.zeros_like
        straight, mirrored = fresh(self.forward), fresh(self.backward)
        for part in self._groups(x):
            beta = float(part.start > 0)
            windows = work.windows(grad[part], self._around, self.size)
            work.filter(windows, self.backward, spread[part])
            mirrored.baddbmm_(windows.mT, work.tiles(y[part]), beta=beta)
            windows = work.windows(spread[part], self.padding, x.shape[2:])
            work.filter(windows, self.forward, onto[part], scale)
            straight.baddbmm_(windows.mT, work.tiles(x[part]), beta=beta)
        return scale * (_weight(straight) + _weight(mirrored).transpose(0, 1).flip(2, 3))

    @property
    def _around(self) -> tuple[int, int]:
        """The adjoint's padding."""
        return _KERNEL - 1 - self.padding[0], _KERNEL - 1 - self.padding[1]

    def _groups(self, x: Tensor) -> Iterator[slice]:
        windows = _count(max(x.shape[2], self.size[0])) * _count(max(x.shape[3], self.size[1]))
        length = max(1, _GROUP // (_WINDOW**2 * windows * max(self.forward.shape[1:])))
        return (slice(start, start + length) for start in range(0, len(x), length))


def winograd(weight: Tensor, geometry: ConvGeometry, rows: int) -> Winograd | None:
    r"""The transformed kernels of a convolution, where products of :math:`AA^\top` and ``rows`` samples are cheaper.

    They exist for 3 × 3 kernels with stride 1 on a CPU in single or double precision; the libraries of other devices
    choose their algorithms themselves. In narrow layers the transforms cost more than they save, and small maps leave
    tiles partly empty. None is returned where the definition is cheaper.
    """
    g = geometry
    fits = g.kernel == (_KERNEL, _KERNEL) and set(g.stride) == set(g.dilation) == {g.groups} == {1}
    fits = fits and g.mode == "zeros"
    small = all(before == after < _KERNEL for before, after in g.padding)
    usual = weight.dtype in (torch.float32, torch.float64) and weight.device.type == "cpu" and not is_traced(weight)
    if not (fits and small and usual) or g.size is None or torch.is_autocast_enabled("cpu"):
        return None
    outputs, inputs = weight.shape[:2]
    windows, pairs = rows * _count(g.size[0]) * _count(g.size[1]), inputs * outputs
    transforms = (_WINDOW**2 + _TILE**2) * (inputs + outputs) / 2
    ours = _WINDOW**2 * ((windows + _READ) * pairs + _TRANSFORM * windows * transforms)
    definition = _KERNEL**2 * rows * g.size[0] * g.size[1] * pairs
    return Winograd.of(weight.detach(), g) if ours < definition else None


class _Onto(torch.autograd.Function):
    r""":math:`t + \kappa x + \sigma AA^\top x` by transformed kernels, with its gradients in the same way:

    .. math:: \bar t = g, \qquad \bar x = \kappa g + \sigma AA^\top g, \qquad
        \bar A = \sigma\bigl(x\,(A^\top g)^\top + g\,(A^\top x)^\top\bigr) .

    All maps and gradients have their channels last, because mixed layouts are read and written several times slower.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        total: Tensor | None,
        kernels: Winograd,
        keep: float,
        scale: float,
        definition: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        out = _maps(x, x.shape[1], x.shape[2:])
        if total is None:
            torch.mul(x, keep, out=out)
        else:
            torch.add(total, x, alpha=keep, out=out)
        y = kernels.product(x, out, scale)
        ctx.kernels, ctx.keep, ctx.scale, ctx.definition = kernels, keep, scale, definition
        # Only the weight's gradient needs Aᵀx.
        ctx.save_for_backward(x, weight, y if ctx.needs_input_grad[1] else None)
        ctx.save_for_forward(x, weight)
        return out

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, weight: Tensor | None, total: Tensor | None, *others: None) -> Tensor:
        at_x, at_weight = ctx.saved_tensors
        change = torch.zeros_like(at_x) if total is None else total
        if x is not None:
            change = change + ctx.keep * x + ctx.scale * ctx.definition(x, at_weight)
        if weight is None:
            return change
        # Quadratic in the weight: a central difference is exact.
        difference = ctx.definition(at_x, at_weight + weight) - ctx.definition(at_x, at_weight - weight)
        return change + ctx.scale / 2 * difference

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y = ctx.saved_tensors
        at_total = grad if ctx.needs_input_grad[2] else None
        if torch.is_grad_enabled() or is_traced(grad):
            # For second derivatives, and for several gradients at once (is_grads_batched).
            at_x, at_weight = _by_definition(ctx, x, weight, grad)
            return at_x, at_weight, at_total, None, None, None, None
        grad = grad.contiguous(memory_format=torch.channels_last)
        at_x, at_weight = ctx.keep * grad, None
        if ctx.needs_input_grad[1]:
            at_weight = ctx.kernels.gradients(x, y, grad, at_x, ctx.scale)
        elif ctx.needs_input_grad[0]:
            ctx.kernels.product(grad, at_x, ctx.scale)
        return at_x, at_weight, grad if at_total is not None else None, None, None, None, None


def _by_definition(ctx: Any, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of :class:`_Onto` in x and the weight by automatic differentiation, differentiable themselves."""
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, because x may depend on the weight through earlier steps, which are not differentiated here.
        x, weight = x.view_as(x), weight.view_as(weight)
        wanted = [each if needed else None for each, needed in zip((x, weight), ctx.needs_input_grad, strict=False)]
        sources = [each for each in wanted if each is not None]
        moved = ctx.keep * x + ctx.scale * ctx.definition(x, weight)
        found = iter(torch.autograd.grad(moved, sources, grad, create_graph=further) if sources else ())
    at_x, at_weight = (None if each is None else next(found) for each in wanted)
    return at_x, at_weight


# Transforms. Maps are (batch, channels, height, width); their transforms are 36 × places × channels.


class _Transforms(NamedTuple):
    """The matrices that transform windows (36 × 36), kernels (36 × 9) and tiles (36 × 16), both dimensions at once."""

    windows: Tensor
    kernels: Tensor
    tiles: Tensor


@functools.cache
def _transforms(dtype: torch.dtype, device: torch.device) -> _Transforms:
    """The transforms of the Toom–Cook product of polynomials, transposed into a filter."""
    points = torch.tensor(_POINTS, dtype=torch.float64, device=device)

    def values(length: int) -> Tensor:
        infinity = torch.eye(length, dtype=torch.float64, device=device)[-1:]
        return torch.cat([points[:, None] ** torch.arange(length, device=device), infinity])

    sides = torch.linalg.inv(values(_WINDOW)).mT, values(_KERNEL), values(_TILE)
    return _Transforms(*(torch.kron(side, side).to(dtype) for side in sides))


def _count(length: int) -> int:
    """The number of tiles that cover a length."""
    return -(-length // _TILE)


def _maps(like: Tensor, channels: int, size: tuple[int, ...]) -> Tensor:
    shape = len(like), channels, *size
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _kernels(weight: Tensor) -> Tensor:
    """36 matrices, inputs × outputs."""
    flat = weight.permute(2, 3, 1, 0).reshape(_KERNEL**2, -1)
    return (_transforms(weight.dtype, weight.device).kernels @ flat).view(_WINDOW**2, weight.shape[1], weight.shape[0])


def _weight(products: Tensor) -> Tensor:
    """The transpose of :func:`_kernels`."""
    flat = _transforms(products.dtype, products.device).kernels.mT @ products.view(_WINDOW**2, -1)
    return flat.view(_KERNEL, _KERNEL, *products.shape[1:]).permute(3, 2, 0, 1)


class _Workspace:
    """Transforms of maps and back, for one group after another in the same memory, because new memory costs about as
    much as writing to it. A method's result is valid until a method that uses the same buffer is called."""

    def __init__(self, like: Tensor) -> None:
        self._like, self._transforms = like, _transforms(like.dtype, like.device)
        self._buffers: dict[str, Tensor] = {}
        self._frames: dict[tuple[int, ...], Tensor] = {}

    def windows(self, x: Tensor, padding: tuple[int, int], size: tuple[int, ...]) -> Tensor:
        """The windows whose tiles cover an output of this size."""
        batch, channels = x.shape[:2]
        rows, columns = _count(size[0]), _count(size[1])
        framed = self._frame(x, padding, rows * _TILE + _KERNEL - 1, columns * _TILE + _KERNEL - 1)
        image, down, right, _ = framed.stride()
        overlapping = framed.as_strided(
            (_WINDOW, _WINDOW, batch, rows, columns, channels),
            (down, right, image, _TILE * down, _TILE * right, 1),
        )
        return self._transformed("windows", self._transforms.windows, overlapping)

    def tiles(self, x: Tensor) -> Tensor:
        """The transformed tiles of a map: the transpose of the last step of :meth:`filter`."""
        batch, channels, height, width = x.shape
        rows, columns = _count(height), _count(width)
        framed = x.permute(0, 2, 3, 1)
        if height % _TILE or width % _TILE:
            framed = F.pad(framed, (0, 0, 0, columns * _TILE - width, 0, rows * _TILE - height))
        pieces = framed.reshape(batch, rows, _TILE, columns, _TILE, channels).permute(2, 4, 0, 1, 3, 5)
        return self._transformed("products", self._transforms.tiles, pieces)

    def filter(self, windows: Tensor, kernels: Tensor, out: Tensor, scale: float | None = None) -> None:
        """Write the map of the windows' products with the kernels into ``out``, or add ``scale`` times it."""
        batch, channels, height, width = out.shape
        rows, columns = _count(height), _count(width)
        products = torch.bmm(windows, kernels, out=self._take("products", *windows.shape[:2], channels))
        flat = self._take("pieces", _TILE**2, batch * rows * columns * channels)
        torch.mm(self._transforms.tiles.mT, products.view(_WINDOW**2, -1), out=flat)
        image = flat.view(_TILE, _TILE, batch, rows, columns, channels).permute(2, 3, 0, 4, 1, 5)
        target = out.permute(0, 2, 3, 1)
        if height % _TILE == width % _TILE == 0:
            target = target.view(image.shape)
        else:
            image = image.reshape(batch, rows * _TILE, columns * _TILE, channels)[:, :height, :width]
        if scale is None:
            target.copy_(image)
        else:
            target.add_(image, alpha=scale)

    def _transformed(self, name: str, transform: Tensor, pieces: Tensor) -> Tensor:
        gathered = self._take("pieces", *pieces.shape).copy_(pieces).view(transform.shape[1], -1)
        out = self._take(name, len(transform), gathered.shape[1])
        return torch.mm(transform, gathered, out=out).view(len(transform), -1, pieces.shape[-1])

    def _frame(self, x: Tensor, padding: tuple[int, int], tall: int, wide: int) -> Tensor:
        """Images with zeros around them, channels last; the zeros are written once."""
        batch, channels, height, width = x.shape
        key = (*padding, tall, wide, *x.shape[1:])
        if key not in self._frames or len(self._frames[key]) < batch:
            self._frames[key] = x.new_zeros(batch, tall, wide, channels)
        framed = self._frames[key][:batch]
        top, left = padding
        framed[:, top : top + height, left : left + width] = x.permute(0, 2, 3, 1)
        return framed

    def _take(self, name: str, *shape: int) -> Tensor:
        size, held = math.prod(shape), self._buffers.get(name)
        if held is None or len(held) < size:
            held = self._buffers[name] = self._like.new_empty(size)
        return held[:size].view(shape)

"""The rules of poolings and interpolations; max pooling keeps the positions of a batch's maxima."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import CapabilityError
from .normalization import RULES
from .rules import Applied, fixed, rearranged

__all__ = ["RULES"]

aten = torch.ops.aten


def _many(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value)


def _average(dims: int) -> Callable[..., Applied]:
    def rule(
        input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Applied:  # fmt: skip
        kernel, around = _many(kernel_size, dims), _many(padding, dims)
        step = kernel if stride is None or stride == [] else _many(stride, dims)
        x = input
        if dims == 1:  # torch has no adjoint of its own in one dimension
            kernel, step, around, x = [1, *kernel], [1, *step], [0, *around], input.unsqueeze(-2)
        options = (kernel, step, around, ceil_mode, count_include_pad, divisor_override)
        pool, adjoint = (
            (aten.avg_pool3d, aten.avg_pool3d_backward) if dims == 3 else (aten.avg_pool2d, aten.avg_pool2d_backward)
        )
        shape, wide = input.shape, x.shape
        out = pool(x, *options)
        return fixed(
            out.squeeze(-2) if dims == 1 else out,
            lambda g: adjoint(
                (g.unsqueeze(-2) if dims == 1 else g).contiguous(), g.new_empty(()).expand(wide).contiguous(), *options
            ).reshape(shape),
        )

    return rule


def _adaptive_average(dims: int) -> Callable[..., Applied]:
    def rule(input: Tensor, output_size: Any) -> Applied:
        given = _many(output_size, dims)
        sizes = [old if new is None else new for new, old in zip(given, input.shape[-dims:], strict=True)]
        shape = input.shape
        if all(size == 1 for size in sizes):
            area, ends = math.prod(shape[-dims:]), tuple(range(-dims, 0))
            return fixed(input.mean(ends, keepdim=True), lambda g: (g / area).expand(shape))
        x = input.unsqueeze(-2) if dims == 1 else input
        adjoint = aten._adaptive_avg_pool3d_backward if dims == 3 else aten._adaptive_avg_pool2d_backward
        out = (
            aten.adaptive_avg_pool3d(x, sizes)
            if dims == 3
            else aten.adaptive_avg_pool2d(x, [1, *sizes] if dims == 1 else sizes)
        )
        wide = x.shape
        return fixed(
            out.squeeze(-2) if dims == 1 else out,
            lambda g: adjoint(g.unsqueeze(-2) if dims == 1 else g, g.new_empty(wide)).reshape(shape),
        )

    return rule


def selected(places: Tensor, dims: int, input: Tensor) -> Applied:
    """The entries at given places of the last ``dims`` dimensions, taken as one."""
    shape, flat = input.shape, places.flatten(-dims)
    out = input.flatten(-dims).gather(-1, flat).reshape(places.shape)

    def adjoint(g: Tensor) -> Tensor:
        zeros = g.new_zeros((*shape[:-dims], math.prod(shape[-dims:])))
        return zeros.scatter_add_(-1, flat, g.flatten(-dims)).reshape(shape)

    return fixed(out, adjoint, lambda input, **options: selected(places, dims, input))


def _maximum(dims: int) -> Callable[..., Applied]:
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dims - 1]

    def rule(
        input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False, return_indices: bool = False,
    ) -> Applied:  # fmt: skip
        _, places = pool(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices=True)
        return selected(places, dims, input)

    return rule


def _adaptive_maximum(dims: int) -> Callable[..., Applied]:
    pool = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[dims - 1]

    def rule(input: Tensor, output_size: Any, return_indices: bool = False) -> Applied:
        _, places = pool(input, output_size, return_indices=True)
        return selected(places, dims, input)

    return rule


def _interpolate(
    input: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> Applied:  # fmt: skip
    def call(x: Tensor) -> Tensor:
        return F.interpolate(x, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)

    if mode in ("nearest", "nearest-exact"):
        return rearranged(call, input)
    if mode != "bilinear" or antialias:
        kind = f"mode={mode!r}" + (" and antialias" if antialias else "")
        raise CapabilityError(f'interpolation with {kind} cannot be lifted; use mode="nearest" or "bilinear"')
    out, before = call(input), list(input.shape)
    known = scale_factor is not None and not recompute_scale_factor
    scales = _many_or_float(scale_factor) if known else [None, None]
    after = list(out.shape[2:])
    return fixed(
        out,
        lambda g: aten.upsample_bilinear2d_backward(g.contiguous(), after, before, bool(align_corners), *scales),
    )


def _many_or_float(value: Any) -> list[float]:
    return [float(value)] * 2 if isinstance(value, int | float) else [float(entry) for entry in value]


for _dims in (1, 2, 3):
    RULES[f"avg_pool{_dims}d"] = _average(_dims)
    RULES[f"adaptive_avg_pool{_dims}d"] = _adaptive_average(_dims)
    RULES[f"max_pool{_dims}d"] = RULES[f"max_pool{_dims}d_with_indices"] = _maximum(_dims)
    RULES[f"adaptive_max_pool{_dims}d"] = RULES[f"adaptive_max_pool{_dims}d_with_indices"] = _adaptive_maximum(_dims)
RULES["interpolate"] = RULES["upsample"] = _interpolate

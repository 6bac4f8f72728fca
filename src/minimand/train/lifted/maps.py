"""A layer of a chain, and its affine map on one mini-batch: value, adjoint, norm bound, and rows for regressions."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ShapeError
from ...operators import Conv2d, Dense, LinearOperator
from ...operators.batchnorm import BatchStatistics, fold_batch_norm
from ...operators.patches import patches, positions_as_rows
from .units import Unit

__all__ = ["AffineMap", "FixedMap", "LiftedLayer", "update_running_statistics"]


@dataclasses.dataclass(frozen=True)
class FixedMap:
    """A linear map P without parameters that precedes a layer's weight: a flattening or a pooling.

    All entries of P are non-negative. ``like`` has the shape and dtype of the inputs.
    """

    apply: Callable[[Tensor], Tensor]
    adjoint: Callable[[Tensor], Tensor]
    like: Tensor

    def norm_sq(self) -> float:
        r"""The bound :math:`\|P\|_2^2 \le \|P\|_1\|P\|_\infty`, from P's column sums and row sums."""
        sums = self.apply(torch.ones(self.like.shape, dtype=self.like.dtype, device=self.like.device))
        return float(self.adjoint(torch.ones_like(sums)).max() * sums.max())


@dataclasses.dataclass(frozen=True)
class AffineMap:
    r"""The map :math:`z = s \odot (A x + b) + t` of one layer on one mini-batch.

    ``A`` is the weight composed with the flattenings and poolings before it. A max pooling selects the entries that
    were largest in the forward pass. ``s`` and ``t`` are the batch normalisation at the statistics of the forward pass,
    and None without batch normalisation. ``statistics`` are the batch's, or None if the running ones are used.
    """

    layer: "LiftedLayer"
    before: tuple[FixedMap, ...]
    operator: LinearOperator
    bias: Tensor | None
    scale: Tensor | None = None
    shift: Tensor | None = None
    statistics: BatchStatistics | None = None

    @property
    def matrix(self) -> Tensor | None:
        """The weight if it is the whole linear part, otherwise None."""
        plain = not self.before and self.scale is None
        return self.operator.weight if plain and isinstance(self.operator, Dense) else None

    def inputs(self, x: Tensor) -> Tensor:
        """The input of the weight: ``x`` after flattenings and poolings."""
        for fixed in self.before:
            x = fixed.apply(x)
        return x

    def apply(self, x: Tensor) -> Tensor:
        """``z`` at ``x``."""
        z = self.operator.affine(self.inputs(x), self.bias)
        if self.scale is None or self.shift is None:
            return z
        return z * self.operator.per_feature(self.scale) + self.operator.per_feature(self.shift)

    def linear(self, x: Tensor) -> Tensor:
        """The linear part alone, without bias and shift."""
        z = self.operator.apply(self.inputs(x))
        return z if self.scale is None else z * self.operator.per_feature(self.scale)

    def adjoint(self, e: Tensor) -> Tensor:
        """The transpose of the linear part, applied to a tensor of z's shape."""
        if self.scale is not None:
            e = e * self.operator.per_feature(self.scale)
        e = self.operator.adjoint(e)
        for fixed in reversed(self.before):
            e = fixed.adjoint(e)
        return e

    def add_adjoint(self, x: Tensor, e: Tensor, weight: float) -> Tensor:
        """``x + weight · adjoint(e)`` in new memory."""
        matrix = self.matrix
        if matrix is None:
            return torch.add(x, self.adjoint(e), alpha=weight)
        return torch.addmm(x, e, matrix, alpha=weight)

    def norm_sq(self) -> float:
        """An upper bound on the squared norm of the linear part."""
        bound = float(self.operator.norm_sq())
        for fixed in self.before:
            bound *= fixed.norm_sq()
        return bound if self.scale is None else bound * float(self.scale.abs().max()) ** 2

    def rows(self, x: Tensor) -> Tensor:
        """The regressors: samples × inputs, or for a convolution patches × (channels · kernel)."""
        x = self.inputs(x)
        return patches(x, self.operator.geometry).squeeze(0) if isinstance(self.operator, Conv2d) else x

    def gradient(self, x: Tensor, e: Tensor) -> Tensor:
        """The gradient of the parameters, in the layout of :meth:`LiftedLayer.parameters`, from that of z."""
        if self.scale is not None:
            e = e * self.operator.per_feature(self.scale)
        columns = self.columns(e)
        weight = columns.mT @ self.rows(x)
        return weight if self.bias is None else torch.cat([weight, columns.sum(0).unsqueeze(1)], 1)

    def norm_direction(self, x: Tensor, e: Tensor, damping: float) -> tuple[Tensor, Tensor] | None:
        r"""The changes of scale and shift of the batch normalisation that move z at ``x`` by ``e``; None without one.

        For every feature the ridge regression of e on (u, 1), where u is the standardised output of the weight. The
        ridge is relative to the mean diagonal entry of the Gram matrix, as that of the weights.
        """
        if not self.layer.norm_parameters():
            return None
        mean, rate = (self.operator.per_feature(part) for part in self._standardization())
        u = (self.operator.affine(self.inputs(x), self.bias) - mean) * rate
        dims = [dim for dim in range(e.dim()) if dim != 1]
        count = e.numel() / e.shape[1]
        squares, sums = u.square().sum(dims), u.sum(dims)
        ridge = 0.5 * damping * (squares + count)
        squares, ones = squares + ridge, count + ridge
        along, whole = (u * e).sum(dims), e.sum(dims)
        determinant = squares * ones - sums.square()
        return (ones * along - sums * whole) / determinant, (squares * whole - sums * along) / determinant

    def renormalized(self) -> "AffineMap":
        """The map with the present scale and shift of the batch normalisation, at the same statistics."""
        mean, rate = self._standardization()
        gamma, beta = self.layer.norm_parameters()
        return dataclasses.replace(self, scale=rate * gamma, shift=beta - mean * rate * gamma)

    def _standardization(self) -> tuple[Tensor, Tensor]:
        """The mean of the normalisation, and one over its standard deviation."""
        norm: Any = self.layer.norm
        if self.statistics is not None:
            return self.statistics.mean, torch.rsqrt(self.statistics.variance + norm.eps)
        return norm.running_mean, torch.rsqrt(norm.running_var + norm.eps)

    def columns(self, e: Tensor) -> Tensor:
        """A tensor of z's shape as rows × outputs, in the order of :meth:`rows`."""
        return positions_as_rows(e) if isinstance(self.operator, Conv2d) else e


@dataclasses.dataclass(frozen=True, eq=False)
class LiftedLayer:
    """A linear layer of the chain with the modules before it, its batch normalisation and its activation."""

    path: str
    module: nn.Linear | nn.Conv2d
    before: tuple[nn.Module, ...]
    norm: nn.BatchNorm1d | nn.BatchNorm2d | None
    unit: Unit

    @property
    def weight(self) -> Tensor:
        """The weight, detached."""
        return self.module.weight.detach()

    @property
    def bias(self) -> Tensor | None:
        """The bias, detached."""
        bias = self.module.bias
        return None if bias is None else bias.detach()

    @property
    def frozen(self) -> bool:
        """Whether the user has set ``requires_grad=False``; the parameters then do not move."""
        return not self.module.weight.requires_grad

    def norm_parameters(self) -> tuple[Tensor, ...]:
        """Scale and shift of the batch normalisation, detached; empty if it has none or they are frozen."""
        found = () if self.norm is None else (self.norm.weight, self.norm.bias)
        trained = all(part is not None and part.requires_grad for part in found)
        return tuple(part.detach() for part in found) if trained else ()

    def affine_map(self, x: Tensor) -> AffineMap:
        """The layer's map on a batch whose forward pass enters the layer with ``x``."""
        before = []
        for module in self.before:
            fixed = _fixed_map(module, x)
            before.append(fixed)
            x = fixed.apply(x)
        self._check(x)
        if isinstance(self.module, nn.Linear):
            operator: LinearOperator = Dense(self.weight)
        else:
            m: Any = self.module
            operator = Conv2d(self.weight, tuple(x.shape[2:]), m.stride, m.padding, m.dilation)
        bias = self.bias
        if self.norm is None:
            return AffineMap(self, tuple(before), operator, bias)
        with torch.no_grad():
            return AffineMap(self, tuple(before), operator, bias, *fold_batch_norm(self.norm, operator.affine(x, bias)))

    def parameters(self) -> Tensor:
        """The weight as outputs × inputs, with the bias as last column."""
        flat = self.weight.flatten(1)
        return flat.clone() if self.bias is None else torch.cat([flat, self.bias.unsqueeze(1)], 1)

    def assign(self, parameters: Tensor) -> None:
        """Set weight and bias from a matrix in the layout of :meth:`parameters`."""
        width = self.weight[0].numel()
        self.weight.copy_(parameters[:, :width].reshape(self.weight.shape))
        if self.bias is not None:
            self.bias.copy_(parameters[:, width])

    def add_gradient(self, change: Tensor) -> None:
        """Add a gradient in the layout of :meth:`parameters` to ``.grad`` of weight and bias."""
        width = self.weight[0].numel()
        for parameter, part in ((self.module.weight, change[:, :width]), (self.module.bias, change[:, width:])):
            if parameter is not None:
                part = part.reshape(parameter.shape)
                parameter.grad = part.clone() if parameter.grad is None else parameter.grad.add_(part)

    def _check(self, x: Tensor) -> None:
        if isinstance(self.module, nn.Linear):
            if x.dim() != 2 or x.shape[1] != self.module.in_features:
                raise ShapeError(
                    f"{self.path} (Linear) takes batches of shape (samples, {self.module.in_features}), got "
                    f"{tuple(x.shape)}; flatten the input or put nn.Flatten() before it"
                )
        elif x.dim() != 4 or x.shape[1] != self.module.in_channels:
            raise ShapeError(
                f"{self.path} (Conv2d) takes batches of shape (samples, {self.module.in_channels}, height, width), "
                f"got {tuple(x.shape)}"
            )


def update_running_statistics(maps: Iterable[AffineMap]) -> None:
    """Update the running statistics of every batch normalisation from its batch's; a forward pass alone does not."""
    for affine in maps:
        if affine.statistics is not None and affine.layer.norm is not None:
            affine.statistics.update_running(affine.layer.norm)


def _fixed_map(module: nn.Module, x: Tensor) -> FixedMap:
    # Shape and dtype without memory.
    like = x.new_empty(()).expand(x.shape)
    if isinstance(module, nn.AvgPool2d):
        return _average(module, like)
    if isinstance(module, nn.MaxPool2d):
        return _maximum(module, x, like)
    return FixedMap(lambda v: v.flatten(1), lambda e: e.reshape(-1, *like.shape[1:]), like)


def _average(module: nn.AvgPool2d, like: Tensor) -> FixedMap:
    options: Any = (_pair(module.kernel_size), _pair(module.stride), _pair(module.padding))
    options = (*options, module.ceil_mode, module.count_include_pad)

    def adjoint(e: Tensor) -> Tensor:
        empty = e.new_empty((e.shape[0], *like.shape[1:]))
        return torch.ops.aten.avg_pool2d_backward(e.contiguous(), empty, *options, None)

    return FixedMap(lambda v: F.avg_pool2d(v, *options), adjoint, like)


def _maximum(module: nn.MaxPool2d, x: Tensor, like: Tensor) -> FixedMap:
    """The max pooling that selects, for every input, the entries that are largest in ``x``."""
    options: Any = (module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)
    pooled, indices = F.max_pool2d(x, *options, return_indices=True)
    flat, shape = indices.flatten(2), pooled.shape

    def apply(v: Tensor) -> Tensor:
        return v.flatten(2).gather(2, flat).reshape(shape)

    def adjoint(e: Tensor) -> Tensor:
        zeros = e.new_zeros((*like.shape[:2], like.shape[2] * like.shape[3]))
        return zeros.scatter_add_(2, flat, e.flatten(2)).reshape(like.shape)

    return FixedMap(apply, adjoint, like)


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])

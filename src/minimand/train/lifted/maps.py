"""The affine maps between activations, as one mini-batch sees them: apply, adjoint, norm, and rows for regressions."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ShapeError
from ...operators import Conv2d, Dense, LinearOperator
from .units import Unit

__all__ = ["AffineMap", "Layer", "Stage", "record"]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A linear map without parameters before a layer's weight: a reshaping or a pooling of inputs ``like`` this.

    Its entries are never negative.
    """

    apply: Callable[[Tensor], Tensor]
    adjoint: Callable[[Tensor], Tensor]
    like: Tensor

    def norm_sq(self) -> float:
        r"""The bound :math:`\|P\|_2^2 \le \|P\|_1\|P\|_\infty`, from the sums of P's columns and rows."""
        sums = self.apply(torch.ones(self.like.shape, dtype=self.like.dtype, device=self.like.device))
        return float(self.adjoint(torch.ones_like(sums)).max() * sums.max())


@dataclasses.dataclass(frozen=True)
class Moments:
    """The statistics with which a batch was normalised, and by which the running ones follow."""

    norm: nn.BatchNorm1d | nn.BatchNorm2d
    mean: Tensor
    variance: Tensor
    count: int

    def record(self) -> None:
        """Move the running statistics, as a forward pass in training does."""
        norm = self.norm
        if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked is None:
            return
        norm.num_batches_tracked += 1
        rate = norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked)
        norm.running_mean.lerp_(self.mean, rate)
        norm.running_var.lerp_(self.variance * (self.count / max(self.count - 1, 1)), rate)


@dataclasses.dataclass(frozen=True)
class AffineMap:
    r"""The map :math:`z = s \odot (A x + b) + t` of one layer on one mini-batch.

    ``A`` is the weight after reshapings, average poolings and max poolings, these with the switches of the forward
    pass. ``s`` and ``t`` are batch normalisation with the statistics of the forward pass; without it they are missing.
    ``moments`` are these statistics where they are the batch's own.
    """

    layer: "Layer"
    stages: tuple[Stage, ...]
    operator: LinearOperator
    bias: Tensor | None
    scale: Tensor | None = None
    shift: Tensor | None = None
    moments: Moments | None = None

    @property
    def matrix(self) -> Tensor | None:
        """The weight, where it is all there is to the linear part."""
        plain = not self.stages and self.scale is None
        return self.operator.weight if plain and isinstance(self.operator, Dense) else None

    def inputs(self, x: Tensor) -> Tensor:
        """What the weight multiplies."""
        for stage in self.stages:
            x = stage.apply(x)
        return x

    def apply(self, x: Tensor) -> Tensor:
        """``z`` at ``x``."""
        z = self.operator.affine(self.inputs(x), self.bias)
        if self.scale is None or self.shift is None:
            return z
        return z * self.operator.per_feature(self.scale) + self.operator.per_feature(self.shift)

    def linear(self, x: Tensor) -> Tensor:
        """The linear part alone."""
        z = self.operator.apply(self.inputs(x))
        return z if self.scale is None else z * self.operator.per_feature(self.scale)

    def adjoint(self, e: Tensor) -> Tensor:
        """The transpose of the linear part, applied to something of z's shape."""
        if self.scale is not None:
            e = e * self.operator.per_feature(self.scale)
        e = self.operator.adjoint(e)
        for stage in reversed(self.stages):
            e = stage.adjoint(e)
        return e

    def pull(self, x: Tensor, e: Tensor, weight: float) -> Tensor:
        """``x`` plus ``weight`` times the transpose of ``e``, in new memory."""
        matrix = self.matrix
        if matrix is None:
            return torch.add(x, self.adjoint(e), alpha=weight)
        return torch.addmm(x, e, matrix, alpha=weight)

    def norm_sq(self) -> float:
        """A bound on the squared norm of the linear part, never below the truth."""
        bound = float(self.operator.norm_sq())
        for stage in self.stages:
            bound *= stage.norm_sq()
        return bound if self.scale is None else bound * float(self.scale.abs().max()) ** 2

    def rows(self, x: Tensor) -> Tensor:
        """The regressors: samples × inputs, or patches × (channels · kernel)."""
        x = self.inputs(x)
        if isinstance(self.operator, Conv2d):
            module = self.layer.module
            assert isinstance(module, nn.Conv2d)
            sizes: Any = (module.kernel_size, module.dilation, module.padding, module.stride)
            x = F.unfold(x, *sizes).mT.flatten(0, 1)
        return x

    def columns(self, e: Tensor) -> Tensor:
        """Something of z's shape as rows × outputs, in the order of :meth:`rows`."""
        return e.flatten(2).mT.flatten(0, 1) if isinstance(self.operator, Conv2d) else e


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """A linear layer of the chain with what comes before and after it."""

    path: str
    module: nn.Linear | nn.Conv2d
    before: tuple[nn.Module, ...]
    norm: nn.BatchNorm1d | nn.BatchNorm2d | None
    unit: Unit

    @property
    def weight(self) -> Tensor:
        """The weight, outside of autograd."""
        return self.module.weight.detach()

    @property
    def bias(self) -> Tensor | None:
        """The bias, outside of autograd."""
        bias = self.module.bias
        return None if bias is None else bias.detach()

    @property
    def frozen(self) -> bool:
        """Whether the user keeps the parameters as they are (``requires_grad=False``)."""
        return not self.module.weight.requires_grad

    def freeze(self, x: Tensor) -> AffineMap:
        """The layer's map for a batch whose forward pass arrives here with ``x``."""
        stages = []
        for module in self.before:
            stage = _stage(module, x)
            stages.append(stage)
            x = stage.apply(x)
        self._check(x)
        if isinstance(self.module, nn.Linear):
            operator: LinearOperator = Dense(self.weight)
        else:
            m: Any = self.module
            operator = Conv2d(self.weight, tuple(x.shape[2:]), m.stride, m.padding, m.dilation)
        bias = self.bias
        if self.norm is None:
            return AffineMap(self, tuple(stages), operator, bias)
        return AffineMap(self, tuple(stages), operator, bias, *_normalise(self.norm, operator.affine(x, bias)))

    def parameters(self) -> Tensor:
        """The weight as outputs × inputs, with the bias as its last column."""
        flat = self.weight.flatten(1)
        return flat.clone() if self.bias is None else torch.cat([flat, self.bias.unsqueeze(1)], 1)

    def assign(self, parameters: Tensor) -> None:
        """Write what :meth:`parameters` reads."""
        width = self.weight[0].numel()
        self.weight.copy_(parameters[:, :width].reshape(self.weight.shape))
        if self.bias is not None:
            self.bias.copy_(parameters[:, width])

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


def record(maps: Iterable[AffineMap]) -> None:
    """Move the running statistics of the batch's normalisations, which a forward pass alone leaves as they are."""
    for affine in maps:
        if affine.moments is not None:
            affine.moments.record()


def _stage(module: nn.Module, x: Tensor) -> Stage:
    # A shape and a type without the memory.
    like = x.new_empty(()).expand(x.shape)
    if isinstance(module, nn.AvgPool2d):
        return _average(module, like)
    if isinstance(module, nn.MaxPool2d):
        return _maximum(module, x, like)
    return Stage(lambda v: v.flatten(1), lambda e: e.reshape(-1, *like.shape[1:]), like)


def _average(module: nn.AvgPool2d, like: Tensor) -> Stage:
    options: Any = (_pair(module.kernel_size), _pair(module.stride), _pair(module.padding))
    options = (*options, module.ceil_mode, module.count_include_pad)

    def adjoint(e: Tensor) -> Tensor:
        empty = e.new_empty((e.shape[0], *like.shape[1:]))
        return torch.ops.aten.avg_pool2d_backward(e.contiguous(), empty, *options, None)

    return Stage(lambda v: F.avg_pool2d(v, *options), adjoint, like)


def _maximum(module: nn.MaxPool2d, x: Tensor, like: Tensor) -> Stage:
    options: Any = (module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)
    pooled, switches = F.max_pool2d(x, *options, return_indices=True)
    flat, shape = switches.flatten(2), pooled.shape

    def apply(v: Tensor) -> Tensor:
        return v.flatten(2).gather(2, flat).reshape(shape)

    def adjoint(e: Tensor) -> Tensor:
        zeros = e.new_zeros((*like.shape[:2], like.shape[2] * like.shape[3]))
        return zeros.scatter_add_(2, flat, e.flatten(2)).reshape(like.shape)

    return Stage(apply, adjoint, like)


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _normalise(norm: nn.BatchNorm1d | nn.BatchNorm2d, z: Tensor) -> tuple[Tensor, Tensor, Moments | None]:
    """Scale and shift of a batch normalisation for this batch, and the batch's statistics where they are used."""
    moments = None
    if norm.training or norm.running_mean is None or norm.running_var is None:
        dims = [d for d in range(z.dim()) if d != 1]
        mean, variance = z.mean(dims), z.var(dims, unbiased=False)
        moments = Moments(norm, mean, variance, z.numel() // z.shape[1])
    else:
        mean, variance = norm.running_mean, norm.running_var
    scale = torch.rsqrt(variance + norm.eps)
    if norm.affine:
        scale = scale * norm.weight.detach()
    return scale, -mean * scale + (norm.bias.detach() if norm.affine else 0.0), moments

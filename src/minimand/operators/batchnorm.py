"""Batch normalisation at fixed statistics: an affine map per feature."""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["BatchStatistics", "FoldedBatchNorm", "fold_batch_norm"]

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


@dataclasses.dataclass(frozen=True)
class BatchStatistics:
    """Mean and (biased) variance of one batch per feature, over ``count`` entries each."""

    mean: Tensor
    variance: Tensor
    count: int

    def update_running(self, norm: BatchNorm) -> None:
        """Update the layer's running statistics as its forward pass in training mode does."""
        if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked is None:
            return
        norm.num_batches_tracked += 1
        rate = norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked)
        norm.running_mean.lerp_(self.mean, rate)
        norm.running_var.lerp_(self.variance * (self.count / max(self.count - 1, 1)), rate)


class FoldedBatchNorm(NamedTuple):
    r"""The map :math:`z \mapsto sz + t` with one scale and one shift per feature.

    ``statistics`` are those of the batch, or None if the running statistics were used.
    """

    scale: Tensor
    shift: Tensor
    statistics: BatchStatistics | None


def fold_batch_norm(norm: BatchNorm, z: Tensor) -> FoldedBatchNorm:
    r"""The affine map that a batch normalisation layer applies to ``z``, features in dimension 1.

    .. math:: s = \gamma/\sqrt{\sigma^2 + \varepsilon}, \qquad t = \beta - s\mu

    In training mode, or without running statistics, :math:`\mu` and :math:`\sigma^2` are the mean and variance of
    ``z``; otherwise they are the running ones. The layer itself does not change.

    >>> norm, z = nn.BatchNorm1d(2), torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    >>> scale, shift, _ = fold_batch_norm(norm, z)
    >>> torch.allclose(scale * z + shift, norm(z))
    True
    """
    statistics = None
    if norm.training or norm.running_mean is None or norm.running_var is None:
        dims = [dim for dim in range(z.dim()) if dim != 1]
        mean, variance = z.mean(dims), z.var(dims, unbiased=False)
        statistics = BatchStatistics(mean, variance, z.numel() // z.shape[1])
    else:
        mean, variance = norm.running_mean, norm.running_var
    scale = torch.rsqrt(variance + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -mean * scale
    return FoldedBatchNorm(scale, shift if norm.bias is None else shift + norm.bias, statistics)

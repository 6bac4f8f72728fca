"""The rules of batch, layer, group and instance normalisation: at the statistics of a batch, and at fixed ones."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...operators.batchnorm import BatchStatistics
from .rules import RULES, Applied, Cotangents, Rule, rule, unbroadcast

__all__ = ["RULES"]

aten = torch.ops.aten


def _features(dims: int) -> Callable[[Tensor], Tensor]:
    """The shape of one number per feature, for features in dimension 1 of ``dims``."""
    return lambda tensor: tensor.reshape(-1, *(1,) * (dims - 2))


def _frozen(mean: Tensor, rate: Tensor, per_feature: Callable[[Tensor], Tensor]) -> Rule:
    """A normalisation at fixed statistics: an affine map of the input, and linear in scale and shift."""

    def apply(input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, **options: Any) -> Applied:
        out = (input - mean) * rate
        out = out if weight is None else out * per_feature(weight)
        out = out if bias is None else out + per_feature(bias)

        def pull(g: Tensor, wanted: Collection[str], given: Mapping[str, Any]) -> Cotangents:
            scale, found = given["weight"] if weight is not None else None, {}
            if "input" in wanted:
                found["input"] = g * rate if scale is None else g * rate * per_feature(scale)
            if "weight" in wanted and scale is not None:
                change = g * (given["input"] - mean) * rate
                found["weight"] = unbroadcast(change, per_feature(scale)).reshape(scale.shape)
            if "bias" in wanted:
                found["bias"] = unbroadcast(g, per_feature(given["bias"])).reshape(given["bias"].shape)
            return found

        return Applied(out, pull, apply)

    return apply


@rule("batch_norm")
def _batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Applied:  # fmt: skip
    per_feature = _features(input.dim())
    if not training and running_mean is not None and running_var is not None:
        rate = torch.rsqrt(running_var + eps)
        return _frozen(per_feature(running_mean), per_feature(rate), per_feature)(input, weight, bias)
    out, mean, rate = torch.native_batch_norm(input, weight, bias, None, None, True, momentum, eps)

    def pull(g: Tensor, wanted: Collection[str], given: Mapping[str, Any]) -> Cotangents:
        names = ("input", "weight", "bias")
        found = aten.native_batch_norm_backward(
            g,
            given["input"],
            given.get("weight"),
            None,
            None,
            mean,
            rate,
            True,
            eps,
            [name in wanted for name in names],
        )
        return {name: part for name, part in zip(names, found, strict=True) if name in wanted}

    again = _frozen(per_feature(mean), per_feature(rate), per_feature)
    statistics = BatchStatistics(mean, rate.double().pow(-2).sub(eps).to(mean), input.numel() // input.shape[1])
    return Applied(out, pull, again, statistics)


@rule("layer_norm")
def _layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Applied:  # fmt: skip
    shape = list(normalized_shape)
    out, mean, rate = torch.native_layer_norm(input, shape, weight, bias, eps)

    def pull(g: Tensor, wanted: Collection[str], given: Mapping[str, Any]) -> Cotangents:
        names = ("input", "weight", "bias")
        asked = [name in wanted for name in names]
        parts = (given.get("weight"), given.get("bias"), asked)
        found = aten.native_layer_norm_backward(g.contiguous(), given["input"], shape, mean, rate, *parts)
        return {name: part for name, part in zip(names, found, strict=True) if name in wanted}

    return Applied(out, pull, _frozen(mean, rate, lambda tensor: tensor))


@rule("group_norm")
def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Applied:
    sizes = (input.shape[0], input.shape[1], math.prod(input.shape[2:]), num_groups)
    out, mean, rate = torch.native_group_norm(input.contiguous(), weight, bias, *sizes, eps)

    def pull(g: Tensor, wanted: Collection[str], given: Mapping[str, Any]) -> Cotangents:
        names = ("input", "weight", "bias")
        parts = (mean, rate, given.get("weight"), *sizes, [name in wanted for name in names])
        found = aten.native_group_norm_backward(g.contiguous(), given["input"].contiguous(), *parts)
        return {name: part for name, part in zip(names, found, strict=True) if name in wanted}

    def spread(tensor: Tensor) -> Tensor:
        wide = tensor.repeat_interleave(sizes[1] // num_groups, 1)
        return wide.reshape(*wide.shape, *(1,) * (out.dim() - 2))

    return Applied(out, pull, _frozen(spread(mean), spread(rate), _features(input.dim())))


@rule("instance_norm")
def _instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Applied:  # fmt: skip
    """A group normalisation with one channel a group; with running statistics, the batch normalisation at them."""
    if not use_input_stats:
        return _batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    found = _group_norm(input, input.shape[1], weight, bias, eps)
    if running_mean is None:
        return found
    places = tuple(range(2, input.dim()))
    mean, variance = (part.mean(0) for part in (input.mean(places), input.var(places, unbiased=False)))
    return dataclasses.replace(found, statistics=BatchStatistics(mean, variance, math.prod(input.shape[2:])))

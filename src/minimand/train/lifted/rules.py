"""The linear calls of a recorded network: value, adjoint, and the same map again with what it froze.

Adjoints are written by hand or are kernels of torch; automatic differentiation is never called.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...operators.batchnorm import BatchStatistics

__all__ = ["RULES", "Applied", "Cotangents", "Rule", "fixed", "rearranged", "rule", "unbroadcast"]

aten = torch.ops.aten

#: The cotangents of the tensors among a call's arguments, by the argument's name; a list for a list of tensors.
Cotangents = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Applied:
    """A linear call on one batch.

    Attributes:
        out: Its value; a tuple if the call returns several tensors.
        pull: The adjoint: from the cotangent of the value and the names of the arguments that are asked for to their
            cotangents. It is given the arguments again, so that nothing has to be kept.
        again: The call on other arguments with the masks, positions and statistics of this batch, as a linear map.
            None: the call itself.
        statistics: What a normalisation has measured in training.
    """

    out: Any
    pull: Callable[[Any, Collection[str], Mapping[str, Any]], Cotangents]
    again: "Callable[..., Applied] | None" = None
    statistics: BatchStatistics | None = None


Rule = Callable[..., Applied]
#: The rules by the name of the function, without underscores at its ends.
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for functions of these names."""

    def add(made: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, made))
        return made

    return add


def unbroadcast(g: Tensor, tensor: Tensor) -> Tensor:
    """The cotangent of an argument that was broadcast."""
    if g.shape == tensor.shape:
        return g
    if g.dim() > tensor.dim():
        g = g.sum(tuple(range(g.dim() - tensor.dim())))
    wide = tuple(dim for dim, size in enumerate(tensor.shape) if size == 1 and g.shape[dim] != 1)
    return g.sum(wide, keepdim=True) if wide else g


# -- weights ------------------------------------------------------------------------------------------------------


@rule("linear")
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Applied:
    def pull(g: Tensor, wanted: Collection[str], given: Mapping[str, Any]) -> Cotangents:
        found: dict[str, Any] = {}
        if "input" in wanted:
            found["input"] = g @ given["weight"]
        if "weight" in wanted:
            found["weight"] = g.flatten(0, -2).mT @ given["input"].flatten(0, -2)
        if "bias" in wanted:
            found["bias"] = g.flatten(0, -2).sum(0)
        return found

    return Applied(F.linear(input, weight, bias), pull)


@rule("matmul", "mm", "bmm")
def _matmul(input: Tensor, other: Tensor) -> Applied:
    def pull(g: Tensor, wanted: Collection[str], given: Mapping[str, Any]) -> Cotangents:
        one, two = given["input"], given["other"]
        if two.dim() == 1:
            g, two = g.unsqueeze(-1), two.unsqueeze(-1)
        found: dict[str, Any] = {}
        if "input" in wanted:
            found["input"] = unbroadcast(g @ two.mT, one)
        if "other" in wanted:
            shared = two.dim() == 2 and one.dim() > 2
            change = g.flatten(0, -2).mT @ one.flatten(0, -2) if shared else g.mT @ one
            found["other"] = unbroadcast(change.mT, two).reshape(given["other"].shape)
        return found

    return Applied(torch.matmul(input, other), pull)


@rule("addmm")
def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Applied:
    def pull(g: Tensor, wanted: Collection[str], given: Mapping[str, Any]) -> Cotangents:
        whole = {
            "input": lambda: beta * unbroadcast(g, given["input"]),
            "mat1": lambda: alpha * g @ given["mat2"].mT,
            "mat2": lambda: alpha * given["mat1"].mT @ g,
        }
        return {name: whole[name]() for name in wanted}

    return Applied(torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha), pull)


def _many(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value) * (dims if len(value) == 1 else 1)


def _convolved(input: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...]) -> Applied:
    """A convolution with options (stride, padding, dilation, transposed, output_padding, groups)."""

    def pull(g: Tensor, wanted: Collection[str], given: Mapping[str, Any]) -> Cotangents:
        names = ("input", "weight", "bias")
        found = aten.convolution_backward(
            g.contiguous(), given["input"], given["weight"], [g.shape[1]], *options, [name in wanted for name in names]
        )  # fmt: skip
        return {name: part for name, part in zip(names, found, strict=True) if name in wanted}

    return Applied(aten.convolution(input, weight, bias, *options), pull)


@rule("conv1d", "conv2d", "conv3d")
def _conv(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Applied:  # fmt: skip
    dims = weight.dim() - 2
    stride, dilation, before = _many(stride, dims), _many(dilation, dims), [0] * dims
    extra: list[int] = []
    if isinstance(padding, str):
        total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, weight.shape[2:], strict=True)]
        before = [size // 2 for size in total]
        extra = [size % 2 for size in total]
    else:
        before = _many(padding, dims)
    options = (stride, before, dilation, False, [0] * dims, groups)
    if not any(extra):
        return _convolved(input, weight, bias, options)
    # An even kernel with padding "same" needs one more entry at the end of each such dimension.
    widths = [width for size in reversed(extra) for width in (0, size)]
    inner = _convolved(F.pad(input, widths), weight, bias, options)
    ends = tuple(slice(0, size) for size in input.shape)

    def pull(g: Tensor, wanted: Collection[str], given: Mapping[str, Any]) -> Cotangents:
        found = dict(inner.pull(g, wanted, {**given, "input": F.pad(given["input"], widths)}))
        return found if "input" not in found else {**found, "input": found["input"][ends]}

    return Applied(inner.out, pull)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Applied:  # fmt: skip
    dims = weight.dim() - 2
    around, extra = _many(padding, dims), _many(output_padding, dims)
    options = (_many(stride, dims), around, _many(dilation, dims), True, extra, groups)
    return _convolved(input, weight, bias, options)


@rule("embedding")
def _embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: None = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Applied:  # fmt: skip
    def pull(g: Tensor, wanted: Collection[str], given: Mapping[str, Any]) -> Cotangents:
        index = -1 if padding_idx is None else padding_idx
        return {"weight": aten.embedding_dense_backward(g.contiguous(), input, weight.shape[0], index, False)}

    return Applied(F.embedding(input, weight, padding_idx), pull)


# -- maps without weights -----------------------------------------------------------------------------------------


def fixed(out: Any, adjoint: Callable[[Any], Tensor], again: Rule | None = None) -> Applied:
    """A linear map of one argument, ``input``, with this adjoint."""
    return Applied(out, lambda g, wanted, given: {"input": adjoint(g)}, again)


def rearranged(call: Callable[[Tensor], Any], input: Tensor) -> Applied:
    """A call that copies entries of its input to places of its output; other places are constant.

    Where each entry goes is found by sending the numbers of the entries through the call.
    """
    out, shape, count = call(input), input.shape, input.numel()
    outs = out if isinstance(out, tuple | list) else (out,)
    whole = outs[0].numel() == count and outs[0].data_ptr() == input.data_ptr()
    if whole and outs[0].is_contiguous() and input.is_contiguous():
        return fixed(out, lambda g: (g[0] if isinstance(g, list) else g).reshape(shape))
    numbers = torch.arange(1, count + 1, dtype=torch.float64, device=input.device).reshape(shape)
    sent = call(numbers)
    places = [part.flatten().long() for part in (sent if isinstance(sent, tuple | list) else (sent,))]

    def adjoint(g: Any) -> Tensor:
        parts = g if isinstance(g, list) else [g]
        total = next(part for part in parts if part is not None).new_zeros(count + 1)
        for place, part in zip(places, parts, strict=True):
            if part is not None:
                total.index_add_(0, place, part.flatten())
        return total[1:].reshape(shape)

    return fixed(out, adjoint)


@rule("flatten", "view", "reshape", "unflatten", "squeeze", "unsqueeze", "ravel")
def _reshape(input: Tensor, *sizes: Any, call: Callable[..., Any], **options: Any) -> Applied:
    shape = input.shape
    return fixed(call(input, *sizes, **options), lambda g: g.reshape(shape))


@rule("clone", "alias")
def _copy(input: Tensor, *args: Any, **options: Any) -> Applied:
    return fixed(input, lambda g: g)


@rule("contiguous", "to", "type_as", "float", "double")
def _converted(input: Tensor, *args: Any, call: Callable[..., Tensor], **options: Any) -> Applied:
    """Another type or layout of the same entries; their cotangent has the input's type."""
    return fixed(call(input, *args, **options), lambda g: g.to(input.dtype))


@rule("detach")
def _detach(input: Tensor) -> Applied:
    return Applied(input, lambda g, wanted, given: {})


@rule("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout")
def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, call: Callable[..., Tensor]
) -> Applied:
    if not training or p == 0:
        return _copy(input)
    return masked(call(torch.ones_like(input), p, True), input)


def masked(mask: Tensor, input: Tensor) -> Applied:
    """The product with a mask."""
    return fixed(input * mask, lambda g: g * mask, lambda input, **options: masked(mask, input))


@rule("cat", "concat", "concatenate")
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Applied:
    sizes = [tensor.shape[dim] for tensor in tensors]
    return Applied(torch.cat(list(tensors), dim), lambda g, wanted, given: {"tensors": list(g.split(sizes, dim))})


@rule("stack")
def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Applied:
    return Applied(torch.stack(list(tensors), dim), lambda g, wanted, given: {"tensors": list(g.unbind(dim))})


@rule("add", "radd", "iadd")
def _add(input: Any, other: Any, *, alpha: float = 1) -> Applied:
    def pull(g: Tensor, wanted: Collection[str], given: Mapping[str, Any]) -> Cotangents:
        return {name: unbroadcast(g if name == "input" else alpha * g, given[name]) for name in wanted}

    return Applied(torch.add(input, other, alpha=alpha), pull)


@rule("sub", "subtract")
def _sub(input: Any, other: Any, *, alpha: float = 1) -> Applied:
    return _add(input, other, alpha=-alpha)


@rule("rsub")
def _rsub(input: Any, other: Any) -> Applied:
    def pull(g: Tensor, wanted: Collection[str], given: Mapping[str, Any]) -> Cotangents:
        return {name: unbroadcast(-g if name == "input" else g, given[name]) for name in wanted}

    return Applied(other - input, pull)


@rule("mul", "multiply", "rmul")
def _mul(input: Any, other: Any) -> Applied:
    def pull(g: Tensor, wanted: Collection[str], given: Mapping[str, Any]) -> Cotangents:
        return {name: unbroadcast(g * given["other" if name == "input" else "input"], given[name]) for name in wanted}

    return Applied(input * other, pull)


@rule("div", "divide", "true_divide")
def _div(input: Tensor, other: Any) -> Applied:
    return Applied(input / other, lambda g, wanted, given: {"input": unbroadcast(g / given["other"], given["input"])})


@rule("neg", "negative")
def _neg(input: Tensor) -> Applied:
    return fixed(-input, lambda g: -g)


@rule("sum", "mean")
def _sum(input: Tensor, dim: Any = None, keepdim: bool = False, *, call: Callable[..., Tensor]) -> Applied:
    dims = tuple(range(input.dim())) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    out, shape = call(input, dims, keepdim), input.shape
    kept = [1 if i in {d % len(shape) for d in dims} else size for i, size in enumerate(shape)]
    share = 1.0 if call.__name__ == "sum" else 1.0 / math.prod(shape[d] for d in dims)
    return fixed(out, lambda g: (g * share).reshape(kept).expand(shape))

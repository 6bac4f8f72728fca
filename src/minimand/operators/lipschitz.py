"""The smoothness constant of a layer's problem: the squared norm of its linear map."""

from functools import singledispatch
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import CapabilityError, OptionError, ShapeError, require_finite
from .base import LinearOperator
from .bounds import convolution_norm_sq
from .conv import Conv1d, Conv2d, Convolution, Size
from .dense import Dense
from .spectral import (
    certified_norm_sq,
    lanczos,
    power_of_two,
    round_up,
    start_vector,
    to_float64,
)

__all__ = ["lipschitz", "majorant"]

METHODS = ("auto", "exact", "lanczos", "grid")
LANCZOS_STEPS = 30
LANCZOS_SAFETY = 1.05


def lipschitz(target: Any, input_size: Size | None = None, *, method: str = "auto") -> Tensor:
    r"""An upper bound on :math:`L = \|A\|^2 = \lambda_{\max}(AA^\top)`, a layer's smoothness constant.

    ``target`` is a :class:`torch.nn.Linear`, :class:`~torch.nn.Conv1d` or :class:`~torch.nn.Conv2d`, or an
    operator. A convolution without ``input_size`` is bounded for every size. The result is a constant of
    the weight's type, rounded up, without any ridge.

    - ``"auto"``: the cheaper of the next two, dimension by dimension;
    - ``"exact"``: the maximum over the frequencies of the circular convolution that contains the
      zero-padded one (Lemma 2 of Bibi, Ghanem, Koltun, Ranftl, *Deep Layers as Stochastic Solvers*, ICLR
      2019, whose circular grid without room for the padding is not an upper bound); for dense weights the
      spectrum itself;
    - ``"grid"``: a small grid of frequencies times the factor of Ehlich and Zeller, for every map size and
      padding; within 16% of the supremum over all frequencies (1.077 per dimension);
    - ``"lanczos"``: 30 Lanczos steps on the operator and its adjoint, times a safety factor of 1.05. The
      only method that **may lie below the truth**: Lanczos approaches it from below, and the factor is an
      experience, not a proof.

    Padding by reflection, replication or wrapping is bounded by the number of copies of an input times the
    bound of the padded map.

    >>> layer = torch.nn.Linear(2, 2)
    >>> _ = layer.weight.data.copy_(torch.diag(torch.tensor([1.0, 3.0])))
    >>> bool(9 <= lipschitz(layer) < 9.01)
    True
    >>> mean = torch.nn.Conv2d(1, 1, 3, padding=1)
    >>> _ = mean.weight.data.fill_(1 / 9)
    >>> bool(1 <= lipschitz(mean) < 1.17)  # the symbol of a mean is largest at frequency zero, where it is 1
    True
    """
    if method not in METHODS:
        raise OptionError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    operator, copies = majorant(target, input_size)
    require_finite("the weight", operator.weight)
    with torch.no_grad(), torch.autocast(operator.weight.device.type, enabled=False):
        return round_up(copies * _norm_sq(operator, method), operator.weight.dtype)


@singledispatch
def majorant(target: Any, input_size: Size | None) -> tuple[LinearOperator, float]:
    r"""An operator :math:`B` and a factor :math:`m` with :math:`\|A\|^2 \le m \|B\|^2` for a layer :math:`A`.

    A layer class joins :func:`lipschitz` by registering itself here: ``majorant.register(MyLayer,
    function)``.
    """
    raise CapabilityError(
        f"lipschitz knows no linear map of {type(target).__name__}; pass a torch.nn.Linear, Conv1d or "
        f"Conv2d, an operator, or register the class with minimand.operators.majorant.register"
    )


@majorant.register
def _(target: LinearOperator, input_size: Size | None) -> tuple[LinearOperator, float]:
    return target, 1.0


@majorant.register
def _(target: Convolution, input_size: Size | None) -> tuple[LinearOperator, float]:
    return (target if input_size is None else target.with_size(input_size)), 1.0


@majorant.register
def _(target: nn.Linear, input_size: Size | None) -> tuple[LinearOperator, float]:
    return Dense(target.weight), 1.0


@majorant.register
def _(target: nn.Conv1d, input_size: Size | None) -> tuple[LinearOperator, float]:
    return _of_module(target, Conv1d, input_size)


@majorant.register
def _(target: nn.Conv2d, input_size: Size | None) -> tuple[LinearOperator, float]:
    return _of_module(target, Conv2d, input_size)


def _of_module(
    module: nn.Conv1d | nn.Conv2d, kind: type[Conv1d | Conv2d], input_size: Size | None
) -> tuple[LinearOperator, float]:
    options = (module.stride, module.padding, module.dilation, module.groups)
    operator = kind(module.weight, input_size, *options)
    if module.padding_mode == "zeros":
        return operator, 1.0
    g = operator.geometry
    copies = 1
    for axis, pair in enumerate(g.padding):
        copies *= _copies(module.padding_mode, pair, None if g.size is None else g.size[axis])
    padded = None if g.size is None else tuple(n + sum(p) for n, p in zip(g.size, g.padding, strict=True))
    return kind(module.weight, padded, module.stride, 0, module.dilation, module.groups), float(copies)


def _copies(mode: str, padding: tuple[int, int], size: int | None) -> int:
    """How often one input occurs in its padded line at most: the squared norm of the padding map."""
    if max(padding) == 0:
        return 1
    if size is None:
        # A pad is no longer than its map, so each side copies an input once at most.
        return 1 + sum(padding) if mode == "replicate" else 1 + sum(p > 0 for p in padding)
    least = {"reflect": max(padding) + 1, "circular": max(padding)}.get(mode, 1)
    if size < least:
        raise ShapeError(
            f"padding_mode={mode!r} with a padding of {max(padding)} needs a map of {least} or more, got {size}; "
            f"enlarge the map or pad less"
        )
    line = torch.arange(float(size)).reshape(1, 1, size)
    return int(torch.bincount(F.pad(line, padding, mode=mode).flatten().long()).max())


def _norm_sq(operator: LinearOperator, method: str) -> Tensor:
    if method == "lanczos":
        return _lanczos_norm_sq(operator)
    if isinstance(operator, Dense):
        return certified_norm_sq(operator.weight, rtol=0.0 if method == "exact" else 1e-3)
    if isinstance(operator, Convolution):
        return convolution_norm_sq(operator.weight, operator.geometry, method)
    return to_float64(operator._norm_sq())


def _lanczos_norm_sq(operator: LinearOperator) -> Tensor:
    weight = to_float64(operator.weight)
    scale = power_of_two(weight)
    double = operator.with_weight(weight / scale)
    shape = double.output_shape
    start = start_vector((torch.Size(shape).numel(),), weight)

    def normal(vector: Tensor) -> Tensor:
        return double.normal(vector.reshape(1, *shape)).reshape(-1)

    return lanczos(normal, start, LANCZOS_STEPS)[0].clamp_min(0) * LANCZOS_SAFETY * scale * scale

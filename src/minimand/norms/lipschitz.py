"""The smoothness constant of a layer's problem: the squared norm of its linear map."""

from functools import singledispatch
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from ..arguments import checked
from ..errors import CapabilityError, OptionError, require_finite
from ..geometry import ConvGeometry, Size
from .kernel import Kernel
from .spectral import lanczos, power_of_two, product_of_bounds, round_up, start_vector, to_float64

__all__ = ["Bounded", "lipschitz", "majorant"]

METHODS = ("auto", "exact", "lanczos", "grid")
LANCZOS_STEPS = 30
LANCZOS_SAFETY = 1.05


#: A linear map with a bound. Without a weight, ``kernel`` is None, and ``weight`` and ``with_weight`` raise.
if TYPE_CHECKING:
    from ..operators.base import LinearOperator

    Bounded: TypeAlias = Kernel | LinearOperator
else:
    Bounded = Any


@checked
def lipschitz(target: Any, input_size: Size | None = None, *, method: str = "auto") -> Tensor:
    r"""An upper bound on :math:`L = \|A\|^2 = \lambda_{\max}(AA^\top)`, the smoothness constant of a layer.

    ``target`` is a :class:`torch.nn.Linear`, a convolution or transposed convolution of torch, or an operator. The
    bound of a convolution without ``input_size`` holds for every size. The result has the weight's type, is rounded up,
    contains no ridge and is a constant for autograd.

    - ``"auto"``: the cheaper of the next two, dimension by dimension;
    - ``"exact"``: the maximum over the frequencies of a circular convolution that contains the zero-padded one
      ([Bibi2019], Lemma 2, whose circular grid without room for the padding gives no upper bound), or less where
      another bound is smaller; for dense weights, and on tiny maps, the largest eigenvalue of the Gram matrix;
    - ``"grid"``: a small grid of frequencies times the factor of Ehlich and Zeller, for every map size and
      padding; within 16% of the supremum over all frequencies (1.077 per dimension);
    - ``"lanczos"``: 30 Lanczos steps on :math:`AA^\top`, times a safety factor of 1.05. This method **may lie below the
      truth**: Lanczos approaches it from below, and the factor is empirical.

    An operator that is neither a matrix nor a convolution has one bound, its ``norm_sq()``, for all methods but
    ``"lanczos"``. Circular padding is exact, up to rounding, with ``"auto"`` and ``"exact"`` where Lemma 2 is: where
    the kernel and the padding leave as many windows as the map has places, and the stride divides the map. Otherwise,
    and for padding by reflection or replication, the bound on the padded map is multiplied by the largest number of
    copies of an input.

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
    bounded, copies = majorant(target, input_size)
    if bounded.has_weight:
        require_finite("the weight", bounded.weight)
    with torch.no_grad(), torch.autocast(bounded.device.type, enabled=False):
        if method == "lanczos":
            bound = _safe_lanczos(bounded)
        elif bounded.kernel is not None:
            bound = bounded.kernel.certified("total", method)
        else:
            bound = to_float64(bounded.norm_sq())
        return round_up(copies * bound, bounded.dtype)


@singledispatch
def majorant(target: Any, input_size: Size | None) -> tuple[Bounded, float]:
    r"""A map :math:`B` and a factor :math:`m` with :math:`\|A\|^2 \le m \|B\|^2` for a layer :math:`A`.

    :func:`lipschitz` takes a layer class that is registered here: ``majorant.register(MyLayer, function)``.
    """
    raise CapabilityError(
        f"lipschitz has no linear map for {type(target).__name__}; pass a torch.nn.Linear or a "
        f"convolution, an operator, or register the class with minimand.norms.majorant.register"
    )


@majorant.register(nn.Linear)
def _(target: nn.Linear, input_size: Size | None) -> tuple[Bounded, float]:
    return Kernel(target.weight), 1.0


@majorant.register(nn.Conv1d)
@majorant.register(nn.Conv2d)
@majorant.register(nn.Conv3d)
def _(target: nn.Module, input_size: Size | None) -> tuple[Bounded, float]:
    return Kernel(target.weight, ConvGeometry.of(target, input_size).fitting()), 1.0  # type: ignore[arg-type]


def _safe_lanczos(bounded: Bounded) -> Tensor:
    scale, like = 1.0, torch.empty(0, dtype=bounded.dtype, device=bounded.device)
    if bounded.has_weight:
        like = to_float64(bounded.weight)
        scale = power_of_two(like)
        bounded = bounded.with_weight(like / scale)
    found = to_float64(lanczos_norm_sq(bounded, like)).clamp_min(0) * LANCZOS_SAFETY
    return product_of_bounds(found, scale, scale)


def lanczos_norm_sq(bounded: Bounded, like: Tensor) -> Tensor:
    """A lower estimate of the squared norm by Lanczos, from a start of the type of ``like``."""
    shape = bounded.output_shape

    def normal(vector: Tensor) -> Tensor:
        return bounded.normal(vector.reshape(1, *shape)).reshape(-1)

    return lanczos(normal, start_vector((prod(shape),), like), LANCZOS_STEPS)[0]

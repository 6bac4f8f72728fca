"""The base classes of functions."""

import abc
import dataclasses
import math
from collections.abc import Callable
from numbers import Real
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..arguments import check_methods
from ..errors import CapabilityError, OptionError, ShapeError, require_positive, require_real
from ..tracing import is_traced

__all__ = ["Function", "Separable", "Step"]

#: A step size: a number, or a tensor that broadcasts against the point.
Step = float | Tensor

R = TypeVar("R")


class Function(abc.ABC):
    r"""A closed convex function :math:`g : \mathbb{R}^n \to \mathbb{R} \cup \{+\infty\}`.

    A function has a value and a prox:

    .. math::

        \operatorname{value}(x) = g(x), \qquad
        \operatorname{prox}(x, \eta) = \arg\min_z\; \eta\, g(z) + \tfrac12 \|z - x\|^2 .

    Indicators tolerate rounding errors, so that ``value(prox(x))`` is finite in every precision. The value of a
    point in half precision is computed and returned in float32, where sums do not overflow.

    Attributes:
        separable: Whether :math:`g(x) = \sum_i g_i(x_i)`, so that the prox acts entry by entry.
        coupled: The number of last dimensions whose entries g couples: 1 for functions of vectors, 2 of matrices.
    """

    separable: ClassVar[bool] = False
    coupled: ClassVar[int] = 1

    def __init_subclass__(cls) -> None:
        check_methods(cls, "__init__", "value", "prox")

    @abc.abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """g(x), summed over all entries (and over the batch); +inf outside the domain."""

    def sums(self, x: Tensor, dims: int) -> Tensor:
        """g of each sample; the last ``dims`` dimensions belong to one sample."""
        lead = x.shape[: x.dim() - dims]
        flat = x.reshape(math.prod(lead), *x.shape[x.dim() - dims :])
        if not len(flat):
            return flat.new_zeros(lead)
        try:
            return torch.vmap(self.value)(flat).reshape(lead)
        except RuntimeError:  # a value that branches on its data
            return torch.stack([self.value(sample) for sample in flat]).reshape(lead)

    def reach(self, x: Tensor, dims: int) -> Tensor | None:
        """The largest number by which each sample can be multiplied and stay in the domain, which contains zero; None
        where it has no closed form."""
        return None

    def check_shape(self, shape: tuple[int, ...]) -> None:  # noqa: B027 -- most functions take every shape
        """Raise for points of a shape that options with one number per entry or row do not fit."""

    def of_outputs(self, index: Tensor, outputs: int) -> "Function":
        """The function of some entries of a sample, where options hold one number per entry."""
        return changed(self, lambda w: w[..., index] if w.dim() and w.shape[-1] == outputs > 1 else w)

    def of_samples(self, keep: Tensor, shape: tuple[int, ...]) -> "Function":
        """The function of some samples of points of ``shape``, where options hold one number per sample."""
        return of_samples(self, keep, shape)

    @abc.abstractmethod
    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The minimiser of ``step * g(z) + ½‖z − x‖²``; differentiable in ``x`` and ``step``."""

    def preactivation(self, x: Tensor, step: Step = 1.0) -> Tensor:
        r"""A point z with :math:`\operatorname{prox}_g(z) = \operatorname{prox}_{\eta g}(x)`; ``x`` itself at step 1.

        At :math:`p = \operatorname{prox}_{\eta g}(x)` the quotient :math:`(x - p)/\eta` is a subgradient of g, so
        :math:`z = p + (x - p)/\eta` is such a point: the input of an activation whose output is p. Functions for which
        the quotient loses digits at small steps have formulas of their own.
        """
        eta = scaled(step, 1.0, x)
        if not isinstance(eta, Tensor) and eta == 1:
            return x
        p = self.prox(x, step)
        return p + (x - p) / eta

    def current(self, dimensions: int) -> "Function":
        """The function with the tensors that it depends on now, for points with this number of dimensions."""
        return self

    def conjugate(self) -> "Function":
        r"""The conjugate :math:`g^*(s) = \sup_x \langle s, x\rangle - g(x)`, where it has a closed form."""
        raise CapabilityError(f"{self!r} has no conjugate in closed form")


class Separable(Function):
    r"""A function that is a sum over the entries, :math:`g(x) = \sum_i g_1(x_i)`.

    Its prox at step 1 is an activation :math:`\varphi`. The activation is the derivative of a convex function,
    :meth:`primitive`, which lifted training methods use as an energy.
    """

    separable: ClassVar[bool] = True
    coupled: ClassVar[int] = 0

    @abc.abstractmethod
    def values(self, x: Tensor) -> Tensor:
        """g at each entry; +inf outside the domain."""

    def value(self, x: Tensor) -> Tensor:
        """g(x), summed over all entries (and over the batch); +inf outside the domain."""
        wide = widened(x)
        values = self.values(wide)
        if wide is not x:
            # A point rounded to half precision may violate a constraint by more than the tolerance of float32.
            values = torch.where(torch.isinf(values), self.values(x).float(), values)
        return values.sum()

    def sums(self, x: Tensor, dims: int) -> Tensor:
        """g of each sample; the last ``dims`` dimensions belong to one sample."""
        values = self.values(widened(x))
        return values.flatten(values.dim() - dims).sum(-1) if dims else values

    def primitive(self, z: Tensor) -> Tensor:
        r"""The integral :math:`\tilde g(z) = \int_0^z \varphi(s)\,ds` of the activation
        :math:`\varphi = \operatorname{prox}_g`, entry by entry.

        With :math:`\tilde f(x) = g(x) + \tfrac12 x^2`, which is the conjugate of :math:`\tilde g` up to a
        constant, the Fenchel–Young equality :math:`\tilde f(\varphi(z)) + \tilde g(z) = z\,\varphi(z)` holds
        at every ``z`` ([Lin2019], Table 1). The integral is computed from this equality.
        """
        z = widened(z)
        x, origin = self.prox(z), self.prox(torch.zeros_like(z))
        return z * x - self._lifted(x) + self._lifted(origin)

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        r"""The Fenchel–Young gap :math:`\tilde f(x) + \tilde g(z) - xz \ge 0`, entry by entry.

        It vanishes exactly where :math:`x = \varphi(z)`. The equality holds at :math:`p = \varphi(z)`, so the gap is
        :math:`\tilde f(x) - \tilde f(p) - z(x - p) = g(x) - g(p) + (x - p)(p - z) + \tfrac12(x - p)^2`. The last form
        is exactly zero at ``p``, even in floating point, and subtracts no squares of large numbers.

        >>> from minimand.functions import NonNegative
        >>> NonNegative().gap(torch.tensor([0.0, 3.0, 3.0]), torch.tensor([-1.0, 3.0, 1.0]))
        tensor([0., 0., 2.])
        """
        x, z = widened(x), widened(z)
        p = self.prox(z)
        away = x - p
        return self.values(x) - self.values(p) + away * (p - z + 0.5 * away)

    def _lifted(self, x: Tensor) -> Tensor:
        return self.values(x) + 0.5 * x * x


def widened(x: Tensor) -> Tensor:
    """``x`` itself, or a float32 copy if ``x`` is in half precision."""
    if getattr(x, "dtype", None) is torch.float32:
        return x
    require_real("x", x)
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def slack(x: Tensor, scale: float = 1.0) -> float:
    """The tolerance of indicators: the rounding error of a point of ``x``'s precision and size ``scale``."""
    return 4 * torch.finfo(x.dtype).eps * max(1.0, abs(scale))


def indicator(inside: Tensor, x: Tensor) -> Tensor:
    """Zero where ``inside``, +inf elsewhere, in ``x``'s precision."""
    return torch.zeros_like(x).masked_fill(~inside, float("inf"))


def indicator_of_all(inside: Tensor, x: Tensor) -> Tensor:
    """Zero if all of ``inside`` holds, +inf otherwise, in ``x``'s precision."""
    return torch.where(inside.all(), 0.0, float("inf")).to(x.dtype)


def require_weight(name: str, weight: float | Tensor) -> None:
    """Raise unless a weight is a number ≥ 0, or a tensor of them."""
    if isinstance(weight, list | tuple | np.ndarray):
        raise OptionError(f"{name} must be a number or a tensor, got {weight!r:.60}; pass torch.as_tensor({name})")
    if not isinstance(weight, Tensor) or weight.numel() == 1:
        require_positive(name, weight, zero=True)  # type: ignore[arg-type]
    elif not is_traced(weight) and not bool(((weight.detach() >= 0) & weight.detach().isfinite()).all()):
        raise OptionError(f"{name} must be finite and ≥ 0 in every entry of its tensor")


def require_broadcast(name: str, weight: float | Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless a weight is one number, or broadcasts to points of ``shape``."""
    if isinstance(weight, Tensor) and weight.numel() != 1 and not broadcasts_to(weight.shape, shape):
        raise ShapeError(
            f"{name} of shape {tuple(weight.shape)} does not broadcast to x of shape {tuple(shape)}; give one number, "
            f"one per entry of the last dimension, or one per row as (rows, 1)"
        )


def changed(record: R, change: Callable[[Tensor], Tensor]) -> R:
    """The record, if it is a frozen dataclass, with other tensors in its fields."""
    fields = dataclasses.fields(record) if dataclasses.is_dataclass(record) else ()
    given = {field.name: getattr(record, field.name) for field in fields}
    new = {name: change(each) for name, each in given.items() if isinstance(each, Tensor)}
    new = {name: each for name, each in new.items() if each is not given[name]}
    return dataclasses.replace(record, **new) if new else record  # type: ignore[type-var]


def of_samples(record: R, keep: Tensor, shape: tuple[int, ...]) -> R:
    """The record of some samples, given by a mask of the first dimension of ``shape``. A tensor with fewer dimensions,
    such as a number per channel, is the same for all samples."""
    return changed(record, lambda w: w[keep] if w.dim() == len(shape) and len(w) == shape[0] else w)


def scaled(step: Step, weight: float | Tensor, x: Tensor) -> Step:
    """``step * weight``; a tensor step is cast to the precision of ``x``."""
    checked = check_step(step, x)
    if isinstance(weight, Tensor) and weight.numel() != 1:
        require_broadcast("weight", weight, x.shape)
        weight = weight.to(x.dtype)
    if isinstance(checked, Tensor):
        return checked.to(x.dtype) * weight
    return checked * weight


def check_step(step: Step, x: Tensor | None = None) -> Step:
    """Check that a step is positive, finite, and broadcasts to ``x``.

    The entries of a tensor step are checked on the CPU only, where reading them needs no synchronisation.
    """
    if x is not None:
        require_real("x", x)
    if isinstance(step, Tensor):
        if x is not None and step.dim() and not broadcasts_to(step.shape, x.shape):
            raise ShapeError(
                f"a step of shape {tuple(step.shape)} does not broadcast to x of shape {tuple(x.shape)}; "
                f"give one number, or one per entry or row of x"
            )
        readable = step.device.type == "cpu" and not is_traced(step)
        if readable and not _all_positive(step.detach()):
            raise OptionError("step must be positive and finite in every entry of its tensor")
    elif isinstance(step, bool) or not isinstance(step, Real) or not 0 < step < float("inf"):
        raise OptionError(f"step must be a finite number > 0 or a tensor of them, got {step!r}")
    return step


def _all_positive(step: Tensor) -> bool:
    if step.numel() == 1:
        return 0 < float(step) < float("inf")
    return bool(((step > 0) & (step < float("inf"))).all())


def broadcasts_to(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether a tensor of ``shape`` broadcasts to ``target`` without enlarging it."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, full) for size, full in pairs)

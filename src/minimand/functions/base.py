"""The function's contract: a value and a prox."""

import abc
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import CapabilityError, OptionError, is_traced

__all__ = ["Function", "Separable", "Step"]

#: A step size: a number, or a tensor that broadcasts against the point.
Step = float | Tensor


class Function(abc.ABC):
    r"""A closed convex function :math:`g : \mathbb{R}^n \to \mathbb{R} \cup \{+\infty\}`.

    A function knows two things, and everything else in the library asks for nothing more:

    .. math::

        \operatorname{value}(x) = g(x), \qquad
        \operatorname{prox}(x, \eta) = \arg\min_z\; \eta\, g(z) + \tfrac12 \|z - x\|^2 .

    Indicators allow for rounding, so that ``value(prox(x))`` is finite in every precision. Points in half
    precision have their value computed and returned in float32, where sums cannot overflow.

    Attributes:
        separable: Whether :math:`g(x) = \sum_i g_i(x_i)`, so that the prox acts entry by entry.
    """

    separable: ClassVar[bool] = False

    @abc.abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """g(x), summed over all entries (and over the batch); +inf outside the domain."""

    @abc.abstractmethod
    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The minimiser of ``step * g(z) + ½‖z − x‖²``; differentiable in ``x`` and ``step``."""

    def conjugate(self) -> "Function":
        r"""The conjugate :math:`g^*(s) = \sup_x \langle s, x\rangle - g(x)`, where it has a closed form."""
        raise CapabilityError(f"{self!r} has no conjugate in closed form")


class Separable(Function):
    r"""A function that is a sum over the entries, :math:`g(x) = \sum_i g_1(x_i)`.

    Its prox at step 1 acts like an activation :math:`\varphi`, which is the derivative of a convex function:
    :meth:`primitive` is that function, the energy that lifted training methods sum.
    """

    separable: ClassVar[bool] = True

    @abc.abstractmethod
    def values(self, x: Tensor) -> Tensor:
        """g at each entry; +inf outside the domain."""

    def value(self, x: Tensor) -> Tensor:
        """g(x), summed over all entries (and over the batch); +inf outside the domain."""
        wide = widened(x)
        values = self.values(wide)
        if wide is not x:
            # A point that was rounded to half precision may have left the set by more than float32's rounding.
            values = torch.where(torch.isinf(values), self.values(x).float(), values)
        return values.sum()

    def primitive(self, z: Tensor) -> Tensor:
        r"""The integral :math:`\tilde g(z) = \int_0^z \varphi(s)\,ds` of the activation
        :math:`\varphi = \operatorname{prox}_g`, entry by entry.

        With :math:`\tilde f(x) = g(x) + \tfrac12 x^2`, which is the conjugate of :math:`\tilde g` up to a
        constant, the Fenchel–Young equality :math:`\tilde f(\varphi(z)) + \tilde g(z) = z\,\varphi(z)` holds
        at every ``z`` (Lin 2019, Table 1), and gives the integral without integrating.
        """
        z = widened(z)
        x, origin = self.prox(z), self.prox(torch.zeros_like(z))
        return z * x - self._lifted(x) + self._lifted(origin)

    def _lifted(self, x: Tensor) -> Tensor:
        return self.values(x) + 0.5 * x * x


def widened(x: Tensor) -> Tensor:
    """``x`` itself, or its float32 copy where its precision is too low for sums and iterations."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def slack(x: Tensor, scale: float = 1.0) -> float:
    """How far rounding may carry a point of ``x``'s precision out of a set of size ``scale``."""
    return 4 * torch.finfo(x.dtype).eps * max(1.0, abs(scale))


def barrier(inside: Tensor, x: Tensor) -> Tensor:
    """Zero where ``inside``, +inf elsewhere, in ``x``'s precision."""
    return torch.zeros_like(x).masked_fill(~inside, float("inf"))


def scaled(step: Step, weight: float, x: Tensor) -> Step:
    """``step * weight``, a tensor step taken to the precision of ``x``."""
    checked = check_step(step)
    if isinstance(checked, Tensor):
        return checked.to(x.dtype) * weight
    return checked * weight


def check_step(step: Step) -> Step:
    """Refuse a step that is not positive; of tensors only where a look costs nothing."""
    if isinstance(step, Tensor):
        look = step.device.type == "cpu" and not is_traced(step)
        if look and not bool((step.detach() > 0).all()):
            raise OptionError("step must be positive in every entry")
    elif not 0 < step < float("inf"):
        raise OptionError(f"step must be a finite number > 0, got {step}")
    return step

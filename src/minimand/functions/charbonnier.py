"""The generalised Charbonnier potential, from a square to a bounded function."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import NotProximal, OptionError, require_real
from ..tracing import is_traced, varies
from .base import Separable, Step, check_step, require_broadcast, widened
from .scalar import Increasing, precise, root

__all__ = ["Charbonnier"]

# Beyond this ratio of the point to the scale, 1 + r² and r² are equal in double precision.
_FAR = 1e9
# Below this argument (eᶻ − 1)/z is computed by its series.
_NEAR = 0.05


@dataclass(frozen=True, eq=False)
class Charbonnier(Separable):
    r"""The generalised Charbonnier potential with scale s and exponent p,

    .. math::

        \psi(t) = \frac{s^2}{2}\,\frac{(1 + t^2/s^2)^{1-p} - 1}{1 - p}, \qquad
        \psi'(t) = \frac{t}{(1 + t^2/s^2)^p}, \qquad -c_p \le \psi''(t) \le 1 ,

    and :math:`\psi(t) = \tfrac{s^2}{2}\log(1 + t^2/s^2)` at p = 1. It is a square for :math:`|t| \ll s` and grows like
    :math:`|t|^{2-2p}` far away.

    ==================  ==================================================================
    exponent            properties
    ==================  ==================================================================
    0 ≤ p ≤ ½           convex; ½ is the Charbonnier or pseudo-Huber function, 0 a square
    ½ < p < 1           nonconvex, and grows without bound (coercive)
    p = 1               the logarithm of Geman and McClure's and Lorentz's robust losses
    p > 1               bounded
    ==================  ==================================================================

    The largest slope of ψ′ is one for every scale and exponent, so that :math:`\sum_c\psi_c((Wx)_c)` is smooth with
    constant :math:`\|W\|^2`. For p > ½ the most negative one is :math:`-c_p = -2\bigl(\tfrac{2p-1}{2p+2}\bigr)^{p+1}`,
    at :math:`t^2 = 3s^2/(2p - 1)`. Only convex potentials have a prox.

    Args:
        scale: s > 0, a number or a tensor that broadcasts against the point, such as one per channel.
        exponent: p ≥ 0, likewise.

    Source: Charbonnier, Blanc-Féraud, Aubert & Barlaud, 1994; Barron, *A general and adaptive robust loss function*,
    CVPR 2019, eq. (8), with :math:`\alpha = 2 - 2p`, up to scaling.

    >>> x = torch.tensor([0.0, 3.0], dtype=torch.float64)
    >>> Charbonnier(1.0, 0.5).values(x)  # √(1 + t²) − 1
    tensor([0.0000, 2.1623], dtype=torch.float64)
    >>> Charbonnier(1.0, 0.0).prox(x)  # a square
    tensor([0.0000, 1.5000], dtype=torch.float64)
    """

    scale: float | Tensor = 1.0
    exponent: float | Tensor = 0.5

    def __post_init__(self) -> None:
        for name, value, low in (("scale", self.scale, "> 0"), ("exponent", self.exponent, "≥ 0")):
            given = value if isinstance(value, Tensor) else torch.tensor(_number(name, value), dtype=torch.float64)
            require_real(name, given)
            if is_traced(given) or given.is_meta:
                continue
            inside = (given > 0 if low == "> 0" else given >= 0) & torch.isfinite(given)
            if not bool(inside.all()):
                worst = float(given.detach()[~inside].flatten()[0])
                raise OptionError(f"the {name} of a Charbonnier potential must be finite and {low}, got {worst:g}")

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise unless scale and exponent broadcast to ``shape``."""
        require_broadcast("scale", self.scale, shape)
        require_broadcast("exponent", self.exponent, shape)

    @property
    def separable(self) -> bool:  # type: ignore[override]
        """Whether all entries have the same scale and exponent."""
        return all(not isinstance(value, Tensor) or value.numel() == 1 for value in (self.scale, self.exponent))

    @property
    def convex(self) -> bool:
        """Whether every exponent is at most ½."""
        return self._below(0.5, strictly=False)

    @property
    def coercive(self) -> bool:
        """Whether every exponent is below 1, so that the potential grows without bound."""
        return self._below(1.0, strictly=True)

    def _below(self, bound: float, *, strictly: bool) -> bool:
        most = float(torch.as_tensor(self.exponent).detach().max())
        return most < bound or (not strictly and most == bound)

    def values(self, x: Tensor) -> Tensor:
        """ψ at each entry."""
        scale, exponent, logarithm = self._parts(x)
        return 0.5 * scale * scale * logarithm * _relative((1 - exponent) * logarithm)

    def gradient(self, x: Tensor) -> Tensor:
        """ψ′ at each entry."""
        _, exponent, logarithm = self._parts(x)
        return x * torch.exp(-exponent * logarithm)

    def curvature(self, x: Tensor) -> Tensor:
        """ψ″ at each entry, at most 1."""
        _, exponent, logarithm = self._parts(x)
        # 1 − e^(−l) is t²/(s² + t²) without overflow.
        return torch.exp(-exponent * logarithm) * (1 + 2 * exponent * torch.expm1(-logarithm))

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The root of ``z + step ψ′(z) = x``; refused for nonconvex potentials."""
        check_step(step, x)
        if not is_traced(x) and not self.convex:
            raise NotProximal(
                f"{self!r} is not convex, so it has no prox; keep its exponents at most ½, or take gradient steps"
            )
        work = precise(x, step)
        step = step.to(work.dtype) if isinstance(step, Tensor) else step
        return root(_ProxRoot(self), work, step).to(x.dtype)

    def _parts(self, x: Tensor) -> tuple[Any, Any, Tensor]:
        """Scale and exponent in the type of the point, and log(1 + t²/s²) without overflow."""
        scale, exponent = (v.to(x.dtype) if isinstance(v, Tensor) else v for v in (self.scale, self.exponent))
        ratio = (widened(x) / scale).abs()
        near = torch.log1p(ratio.clamp(max=_FAR).square())
        return scale, exponent, torch.where(ratio > _FAR, 2 * torch.log(ratio.clamp(min=_FAR)), near)


@dataclass(frozen=True, eq=False)
class _ProxRoot(Increasing):
    r"""The equation :math:`z + \eta\psi'(z) = a` of a convex potential."""

    potential: Charbonnier

    def left(self, z: Tensor, step: Step) -> Tensor:
        return z + step * self.potential.gradient(z)

    def slope(self, z: Tensor, step: Step) -> Tensor:
        return 1 + step * self.potential.curvature(z)

    def sensitivity(self, z: Tensor, step: Step) -> Tensor:
        return self.potential.gradient(z)

    def varies(self, like: Tensor) -> bool:
        return any(isinstance(v, Tensor) and varies(v) for v in (self.potential.scale, self.potential.exponent))

    def slopes(self, step: Step) -> tuple[Step, Step]:
        return 1.0, 1 + step

    def bracket(self, target: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        near = target / (1 + step)  # ψ′ is at most the identity
        # One step of the fixed point z = a/(1 + ηψ′(z)/z) from the target, which is exact far away and near zero.
        _, exponent, logarithm = self.potential._parts(target)
        start = target / (1 + step * torch.exp(-exponent * logarithm))
        return torch.minimum(near, target), start, torch.maximum(near, target)


def _relative(z: Tensor) -> Tensor:
    """(eᶻ − 1)/z, with its derivatives near zero."""
    near = z.abs() < _NEAR
    inside = torch.where(near, z, 0.0)
    series = 1 + inside / 2 * (1 + inside / 3 * (1 + inside / 4 * (1 + inside / 5 * (1 + inside / 6))))
    outside = torch.where(near, 1.0, z)
    return torch.where(near, series, torch.expm1(outside) / outside)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OptionError(f"the {name} of a Charbonnier potential must be a number or a tensor, got {value!r:.60}")
    return float(value)

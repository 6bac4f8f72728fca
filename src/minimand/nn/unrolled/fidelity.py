"""The data term of a reconstruction: exact measurements, or measurements with Gaussian noise."""

import dataclasses
import math

import torch
from torch import Tensor

from ...operators import LinearOperator
from ...solvers import Datafit, Quadratic
from ...solvers.linear import conjugate_gradient

__all__ = ["Fidelity", "in_full", "tight_constant", "tightness"]

# Conjugate gradient iterations of a proximal step if it has no closed form, and the most of an accurate one.
_ROUNDS, _MOST = 8, 300
# The largest relative error of ΦᵀΦΦᵀ = Φᵀ of an operator that is taken for a partial isometry.
_TIGHT = 1e-3


@dataclasses.dataclass(frozen=True)
class Fidelity:
    r"""The data term of measurements y and its proximal step, for one of two models.

    Exact measurements (``weight`` None): the indicator of :math:`\Phi x = y`, whose prox is the projection
    :math:`v + \tfrac1c\Phi^\top(y - \Phi v)` if :math:`\Phi^\top\Phi` is c times a projection. Gaussian noise:
    :math:`\tfrac\mu2\|\Phi x - y\|^2`, whose prox at the step η is :math:`v + \kappa\Phi^\top(y - \Phi v)`,
    :math:`\kappa = \eta\mu/(1 + \eta\mu c)`, under the same condition, and otherwise a linear system, solved by
    conjugate gradients. Other losses, :math:`\mu\sum_i f((\Phi x)_i; y_i)` with a
    :class:`~minimand.solvers.Datafit`, take gradient steps.

    Attributes:
        operator: Φ.
        y: The measurements.
        weight: μ, or None.
        tight: c if :math:`\Phi^\top\Phi` is c times a projection, else None.
        norm_sq: A bound on :math:`\|\Phi\|^2`.
        datafit: The loss of one measurement.
        accurate: Whether proximal steps are solved up to rounding.
    """

    operator: LinearOperator
    y: Tensor
    weight: Tensor | None
    tight: float | None
    norm_sq: float
    datafit: Datafit = Quadratic()  # noqa: RUF009 -- frozen
    accurate: bool = False

    @property
    def quadratic(self) -> bool:
        """Whether the loss is a square, with a prox of its own."""
        return isinstance(self.datafit, Quadratic)

    def step(self, v: Tensor, size: float | Tensor, x0: Tensor | None = None) -> Tensor:
        """The prox at this step, from ``x0`` where it is iterative; for losses other than the square, the step of its
        linearisation."""
        if not self.quadratic:
            assert self.weight is not None
            scaled = self.weight * size
            return v - scaled / (1 + scaled * self.curvature) * self.slope(v)
        if self.tight is not None:
            correction = self.operator.adjoint(self.y - self.operator.apply(v))
            if self.weight is None:
                return v + correction / self.tight
            scaled = self.weight * size
            return v + scaled / (1 + scaled * self.tight) * correction
        assert self.weight is not None
        scaled = self.weight * size

        def system(x: Tensor) -> Tensor:
            return x + scaled * self.operator.adjoint(self.operator.apply(x))

        target = v + scaled * self.operator.adjoint(self.y)
        start = v if x0 is None else x0
        if self.accurate:
            rounding = 10 * torch.finfo(target.dtype).eps
            return conjugate_gradient(system, target, _MOST, x0=start, sample_dims=3, tol=rounding)
        return conjugate_gradient(system, target, _ROUNDS, x0=start, sample_dims=3)

    def gradient_step(self, x: Tensor, slope: Tensor, smoothness: float) -> tuple[Tensor, float]:
        """A step from x, given the gradient of the regulariser, that lowers the objective by at least the returned
        factor times the squared distance."""
        if self.tight is not None and self.quadratic:
            return self.step(x - slope / smoothness, 1 / smoothness), smoothness / 2
        assert self.weight is not None
        total = smoothness + float(self.weight.detach()) * self.curvature
        return x - (slope + self.weight * self.slope(x)) / total, total / 2

    def forward_step(self, v: Tensor, slope: Tensor, smoothness: float) -> Tensor:
        """The step of an accelerated method from v, given the gradient of the regulariser there.

        Without a closed form, conjugate gradients begin at v, where their residual is the gradient g of the objective
        over −L. Their first iteration lowers the quadratic by at least ‖g‖²/(2L²‖H‖), H the matrix of the system, and
        the others do not raise it. So a step of length d has ‖g‖ ≤ 2L‖H‖d: where the steps vanish, the gradient does.
        """
        if self.quadratic:
            return self.step(v - slope / smoothness, 1 / smoothness, v)
        return self.gradient_step(v, slope, smoothness)[0]

    def slope(self, x: Tensor) -> Tensor:
        """The gradient of the sum of losses, without its weight."""
        return self.operator.adjoint(self.datafit.gradient(self.operator.apply(x), self.y))

    @property
    def curvature(self) -> float:
        """A bound on the curvature of the sum of losses, without its weight."""
        return float(self.datafit._constant_curvature(self.y)) * self.norm_sq

    def value(self, x: Tensor) -> Tensor:
        """The data term of each sample in float64; zero for exact measurements, which every iterate satisfies."""
        if self.weight is None:
            return torch.zeros(len(x), dtype=torch.float64, device=x.device)
        losses = self.datafit.values(self.operator.apply(x).double(), self.y.double())
        return self.weight.double() * losses.flatten(1).sum(1)

    def rows(self, index: Tensor) -> "Fidelity":
        """The data term of some samples."""
        return dataclasses.replace(self, y=self.y[index])


@torch.no_grad()
def tightness(operator: LinearOperator) -> tuple[float, float]:
    r"""The c for which :math:`\Phi^\top\Phi\Phi^\top w` is nearest to :math:`c\,\Phi^\top w` for a random w, and the
    relative error, which is zero if :math:`\Phi^\top\Phi` is c times a projection: c = 1 for orthonormal rows and
    masks."""
    generator, operator = torch.Generator().manual_seed(0), in_full(operator)
    w = torch.randn(1, *operator.output_shape, generator=generator).to(operator.device, operator.dtype)
    back = operator.adjoint(w).double()
    size = float(back.norm())
    if not 0 < size < math.inf:
        return 0.0, math.inf
    again = operator.adjoint(operator.apply(back.to(operator.dtype))).double()
    factor = float((again * back).sum()) / size**2
    if not factor > 0:
        return 0.0, math.inf
    return factor, float((again - factor * back).norm()) / (factor * size)


def tight_constant(operator: LinearOperator) -> float | None:
    """The c for which ΦᵀΦ is c times a projection up to rounding, or None."""
    factor, error = tightness(operator)
    half = operator.has_weight and operator.dtype in (torch.bfloat16, torch.float16)
    # Rows that were rounded to half precision are orthonormal up to that; the projection then contracts.
    return factor if error <= (max(_TIGHT, 4 * torch.finfo(operator.dtype).eps) if half else _TIGHT) else None


def in_full(operator: LinearOperator) -> LinearOperator:
    """The operator with a weight in half precision widened to float32."""
    if operator.has_weight and operator.dtype in (torch.bfloat16, torch.float16):
        return operator.with_weight(operator.weight.float())
    return operator

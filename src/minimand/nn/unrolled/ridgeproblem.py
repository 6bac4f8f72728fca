r"""The objective of a convex RidgeNet as a problem of the grammar, for :func:`~minimand.solvers.solve`."""

import dataclasses

from torch import Tensor

from ...errors import CapabilityError
from ...functions import Charbonnier, Function
from ...functions.base import Step, check_step, indicator, slack
from ...operators import Conv2d, Transposed
from ...solvers import Datafit, Problem
from .fidelity import Fidelity
from .regularizer import RidgeRegularizer

__all__ = ["DataTerm", "Potentials", "problem_of"]


@dataclasses.dataclass(frozen=True)
class Potentials(Datafit):
    r"""Charbonnier potentials as the loss of features, :math:`f(t; y) = \psi(t - y)`."""

    potential: Charbonnier

    def values(self, t: Tensor, y: Tensor) -> Tensor:
        """ψ of each feature."""
        return self.potential.values(t - y)

    def gradient(self, t: Tensor, y: Tensor) -> Tensor:
        """ψ′ of each feature."""
        return self.potential.gradient(t - y)

    def second(self, t: Tensor, y: Tensor) -> Tensor:
        """ψ″ of each feature."""
        return self.potential.curvature(t - y)

    def curvature(self, y: Tensor) -> float:
        """One, the largest ψ″."""
        return 1.0


class DataTerm(Function):
    """The data term of measurements as a function of images, with its prox; batches are those of the measurements."""

    coupled = 3

    def __init__(self, fidelity: Fidelity) -> None:
        self.fidelity = dataclasses.replace(fidelity, accurate=True)

    def value(self, x: Tensor) -> Tensor:
        """The data term, summed over the batch."""
        return self.sums(x, 3).sum()

    def sums(self, x: Tensor, dims: int) -> Tensor:
        """The data term of each sample; +inf where exact measurements are violated beyond rounding."""
        y, x = self.fidelity.y, x.to(self.fidelity.y.dtype)
        if self.fidelity.weight is not None:
            return self.fidelity.value(x)
        tolerated = slack(x, float(y.abs().max()) if y.numel() else 0.0) * max(1.0, self.fidelity.norm_sq)
        wrong = (self.fidelity.operator.apply(x) - y).abs().flatten(1).amax(1)
        return indicator(wrong <= 100 * tolerated, wrong)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The projection onto exact measurements, or the solution of a linear system."""
        size = check_step(step, x)
        kind = self.fidelity.y.dtype
        return self.fidelity.step(x.to(kind), size.to(kind) if isinstance(size, Tensor) else size).to(x.dtype)

    def of_samples(self, keep: Tensor, shape: tuple[int, ...]) -> "DataTerm":
        """The data term of some samples."""
        return DataTerm(self.fidelity.rows(keep))


def problem_of(regularizer: RidgeRegularizer, fidelity: Fidelity) -> Problem:
    r"""The problem :math:`\min_x \sum\psi((Wx)) + f(x)`, with :math:`A = W^\top` and f in the place of g. What is
    learned is a constant of it; the measurements may have gradients."""
    if not fidelity.quadratic:
        raise CapabilityError(
            f"a problem takes the prox of its data term, which {fidelity.datafit!r} after an operator lacks; "
            f"use net.solve(y)"
        )
    regularizer = RidgeRegularizer(*(each.detach() for each in regularizer))
    if fidelity.weight is not None:
        fidelity = dataclasses.replace(fidelity, weight=fidelity.weight.detach())
    channels, height, width = fidelity.operator.input_shape
    count, inputs, size, _ = regularizer.weight.shape
    apart = channels // inputs
    bank = Conv2d(
        regularizer.weight.repeat(apart, 1, 1, 1), (height, width), padding=size // 2, groups=apart
    )  # channels apart are groups
    potential = Charbonnier(
        regularizer.scale.repeat(apart)[:, None, None], regularizer.exponent.repeat(apart)[:, None, None]
    )
    features = fidelity.y.new_zeros(len(fidelity.y), count * apart, height, width)
    return Problem(Transposed(bank), DataTerm(fidelity), features, datafit=Potentials(potential))

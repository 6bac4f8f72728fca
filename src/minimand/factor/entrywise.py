"""Smooth losses that are sums of a datafit over the entries of a data matrix, such as the logistic loss."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import OptionError
from ..solvers.datafits import Datafit
from .losses import DenseLoss, DualValue, Loss, summed
from .matrices import DualMatrix, RowSharding, summation_error
from .residual import DenseDual

__all__ = ["Entrywise", "LossMaker", "loss_from"]

MULTIPLES = 8


@dataclass(frozen=True)
class Entrywise(DenseLoss):
    r"""The loss :math:`\sum_{ij} f(X_{ij}; Y_{ij})` of a datafit of :mod:`minimand.solvers`.

    ``loss=Logistic()`` is short for it, and takes a matrix of labels :math:`\pm 1`; X holds log-odds. With the negative
    gradient Z,

    .. math:: F^* \ge -\sum_{ij} f^*(-cZ_{ij}; Y_{ij}), \qquad 0 \le c \le \min(1, \lambda/\hat p) ,

    and the best of a few c is used.

    >>> import math
    >>> from minimand.solvers import Logistic
    >>> loss = Entrywise(torch.tensor([[1.0, -1.0]]), Logistic())
    >>> round(loss.value(torch.zeros(1, 1), torch.zeros(2, 1)) / math.log(2), 9)
    2.0
    """

    Y: Tensor
    datafit: Datafit
    rows: RowSharding = RowSharding()  # noqa: RUF009 -- frozen

    def __post_init__(self) -> None:
        if not isinstance(self.datafit, Datafit):
            raise OptionError(f"Entrywise takes a datafit such as Logistic(), got {self.datafit!r:.60}")
        self.datafit.check(self.Y)
        # The smallest value of f is −f*(0).
        if bool((self.datafit.conjugate(torch.zeros_like(self.Y), self.Y) > 1e-6).any()):
            raise OptionError(
                f"a loss of factors must never be negative, but {self.datafit!r} is for some of these data"
            )
        if not self.datafit._has_bound(self.Y):
            raise OptionError(f"a loss of factors needs a bound on its curvature, which {self.datafit!r} lacks")

    @property
    def curvature(self) -> float:
        """That of the datafit."""
        return float(self.datafit.curvature(self.Y))

    def value(self, U: Tensor, V: Tensor) -> float:
        """The sum in float64, by blocks of rows."""
        terms = DenseDual(self.Y, U, V, rows=self.rows, entries=lambda r, y: self.datafit.values(y - r, y))
        return summed(terms, torch.sum)

    def dual(self, U: Tensor, V: Tensor) -> DenseDual:
        """The negative gradient."""
        return DenseDual(self.Y, U, V, rows=self.rows, entries=lambda r, y: self.datafit.residual(y - r, y))

    def lower(self, matrix: DualMatrix, largest: float) -> DualValue:
        """The best of −Σ f*(−cZ) over a few c."""
        assert isinstance(matrix, DenseDual)
        top = min(1.0, largest)
        multiples = [top * k / MULTIPLES for k in range(MULTIPLES + 1)]
        totals = torch.zeros(2, len(multiples), dtype=torch.float64, device=self.Y.device)
        for part, block in matrix.blocks():
            data = self.Y[part].to(torch.float64)
            terms = [self.datafit.conjugate(-c * block, data) for c in multiples]
            totals += torch.stack([torch.stack([t.sum(), t.abs().sum()]) for t in terms], dim=1)
        charged, sizes = self.rows.sum(totals).tolist()
        best = min(range(len(multiples)), key=lambda k: charged[k])
        at_zero = self.value(*self._empty())
        return DualValue(-charged[best], summation_error(self.entries()) * (sizes[best] + at_zero))


LossMaker = Datafit | Callable[[Tensor], Loss]
"""A loss without its data: a datafit, or a function from the data to a loss."""


def loss_from(make: LossMaker, data: Tensor) -> Loss:
    """The loss that ``make`` builds from the data; the sum of a datafit over the entries."""
    loss = Entrywise(data, make) if isinstance(make, Datafit) else make(data) if callable(make) else None
    if not isinstance(loss, Loss):
        raise OptionError(
            f"loss must be a datafit such as Logistic(), or a function from the data to a Loss, got {make!r}"
        )
    return loss

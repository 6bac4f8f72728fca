"""Smooth losses that are sums over the entries of a data matrix, such as the logistic loss."""

import abc
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import OptionError
from .losses import DenseLoss, DualValue, summed
from .matrices import DualMatrix, RowSharding, summation_error
from .residual import DenseDual

__all__ = ["Entrywise", "Logistic"]

MULTIPLES = 8


@dataclass(frozen=True)
class Entrywise(DenseLoss):
    r"""A loss :math:`\sum_{ij}\varphi(X_{ij}, Y_{ij})`, convex, smooth and non-negative.

    For a loss of your own, derive from this class, set :attr:`curvature`, a Lipschitz constant of
    :math:`\varphi'`, and write :meth:`values`, :meth:`gradient` and :meth:`conjugate`. With the negative gradient Z,

    .. math:: F^* \ge -\sum_{ij}\varphi^*(-cZ_{ij}, Y_{ij}), \qquad 0 \le c \le \min(1, \lambda/\hat p) ,

    and the best of a few c is used.
    """

    Y: Tensor
    rows: RowSharding = RowSharding()  # noqa: RUF009 -- frozen

    @abc.abstractmethod
    def values(self, X: Tensor, Y: Tensor) -> Tensor:
        """φ of each entry."""

    @abc.abstractmethod
    def gradient(self, X: Tensor, Y: Tensor) -> Tensor:
        """φ′ of each entry."""

    @abc.abstractmethod
    def conjugate(self, S: Tensor, Y: Tensor) -> Tensor:
        """sup over x of s x − φ(x, y) for each entry; +inf outside its domain."""

    def value(self, U: Tensor, V: Tensor) -> float:
        """The sum in float64, by blocks of rows."""
        terms = DenseDual(self.Y, U, V, rows=self.rows, entries=lambda r, y: self.values(y - r, y))
        return summed(terms, torch.sum)

    def dual(self, U: Tensor, V: Tensor) -> DenseDual:
        """The negative gradient."""
        return DenseDual(self.Y, U, V, rows=self.rows, entries=lambda r, y: -self.gradient(y - r, y))

    def lower(self, matrix: DualMatrix, largest: float) -> DualValue:
        """The best of −Σ φ*(−cZ) over a few c."""
        assert isinstance(matrix, DenseDual)
        top = min(1.0, largest)
        multiples = [top * k / MULTIPLES for k in range(MULTIPLES + 1)]
        totals = torch.zeros(2, len(multiples), dtype=torch.float64, device=self.Y.device)
        for part, block in matrix.blocks():
            data = self.Y[part].to(torch.float64)
            terms = [self.conjugate(-c * block, data) for c in multiples]
            totals += torch.stack([torch.stack([t.sum(), t.abs().sum()]) for t in terms], dim=1)
        charged, sizes = self.rows.sum(totals).tolist()
        best = min(range(len(multiples)), key=lambda k: charged[k])
        at_zero = self.value(*self._empty())
        return DualValue(-charged[best], summation_error(self.entries()) * (sizes[best] + at_zero))


@dataclass(frozen=True)
class Logistic(Entrywise):
    r"""The logistic loss :math:`\sum\log(1 + e^{X_{ij}}) - Y_{ij}X_{ij}` of a matrix Y of zeros and ones, or of
    probabilities; X holds log-odds.

    With :math:`t = y + s` its conjugate is :math:`t\log t + (1-t)\log(1-t)` on :math:`0 \le t \le 1`.

    >>> loss = Logistic(torch.tensor([[1.0, 0.0]]))
    >>> round(loss.value(torch.zeros(1, 1), torch.zeros(2, 1)) / math.log(2), 9)
    2.0
    """

    curvature = 0.25

    def __post_init__(self) -> None:
        if bool((self.Y < 0).any()) or bool((self.Y > 1).any()):
            raise OptionError("Y must lie between 0 and 1 for the logistic loss: code the two classes as 0 and 1")

    def values(self, X: Tensor, Y: Tensor) -> Tensor:
        """log(1 + eˣ) − yx."""
        return torch.nn.functional.softplus(X) - Y * X

    def gradient(self, X: Tensor, Y: Tensor) -> Tensor:
        """σ(x) − y."""
        return torch.sigmoid(X) - Y

    def conjugate(self, S: Tensor, Y: Tensor) -> Tensor:
        """t log t + (1 − t) log(1 − t) with t = y + s."""
        t = Y + S
        inside = (t - 0.5).abs() <= 0.5 + 4 * torch.finfo(t.dtype).eps
        t = t.clamp(0, 1)
        return torch.where(inside, torch.xlogy(t, t) + torch.xlogy(1 - t, 1 - t), math.inf)

r"""Convex losses :math:`\ell(UV^\top)` of a data matrix: squares and Huber; sums over entries are in ``entrywise``.

A certificate needs a loss's value, a dual point, and the value of the dual. For a dual point :math:`Z` with polar at
most :math:`p`, every :math:`cZ` with :math:`0 \le c \le \lambda/p` in the domain of the conjugate is feasible, and

.. math:: F^* \ge -\ell^*(-cZ) = c\,\langle Y, Z\rangle - \tfrac{c^2}{2\kappa}\|Z\|^2 ,

with the curvature :math:`\kappa` of the loss (1 for squares, :math:`\gamma` for a smoothed norm, :math:`\infty` for the
norm itself). The best c of the interval is used.
"""

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..errors import CapabilityError, OptionError, require_positive
from ..functions import L1
from ..norms.spectral import EPS
from .inputs import Units, comparable, middle, raised, shifted
from .matrices import DualMatrix, DualMoments, RowSharding, row_blocks, summation_error
from .residual import DenseDual
from .sparse import SparseData

__all__ = ["DualValue", "HuberLoss", "Loss", "Squared", "best_multiple", "rounding", "summed"]


class DualValue(NamedTuple):
    """A lower bound on the minimum, and a bound on the rounding error in it."""

    value: float
    margin: float


class Loss(abc.ABC):
    """A convex, non-negative loss of X = UVᵀ.

    Both factors have vectors as columns. U holds the rows of this process.
    """

    rows: RowSharding
    #: The loss of cX for data cY is c^degree times that of X for Y; zero if it is no such multiple.
    degree: int = 0

    @property
    @abc.abstractmethod
    def curvature(self) -> float:
        """κ: the gradient's Lipschitz constant; infinite for a loss without a gradient."""

    @abc.abstractmethod
    def value(self, U: Tensor, V: Tensor) -> float:
        """ℓ(UVᵀ) in float64, over all processes."""

    @abc.abstractmethod
    def dual(self, U: Tensor, V: Tensor) -> DualMatrix:
        """A dual point: the negative gradient, or the negative of a subgradient."""

    @abc.abstractmethod
    def lower(self, matrix: DualMatrix, largest: float) -> DualValue:
        """The dual's best value over cZ, 0 ≤ c ≤ ``largest``."""

    @abc.abstractmethod
    def zero(self) -> DualMatrix:
        """The dual point at X = 0."""

    @abc.abstractmethod
    def size(self) -> float:
        """The norm of the data: the scale of rounding errors."""

    @abc.abstractmethod
    def entries(self) -> int:
        """The number of terms in the loss's sum, over all processes."""

    def slope(self, U: Tensor, V: Tensor, dual: DualMatrix) -> DualMatrix | None:
        """The negative gradient, which gives the polar that a direction attains; ``dual`` is the dual point there.

        None for a loss without a gradient: no direction is then known to lower it.
        """
        return dual

    def search(self, U: Tensor, V: Tensor, dual: DualMatrix | None = None) -> DualMatrix:
        """The negative gradient, or a subgradient's, for a search: it may be in the precision of the data. ``dual`` is
        the dual point there, if it is known."""
        return self.dual(U, V) if dual is None else dual

    def start(self) -> DualMatrix:
        """As :meth:`search`, at X = 0."""
        return self.zero()

    def chunked(self, U: Tensor, V: Tensor) -> DualMatrix:
        """The dual point with cheaper products, whose rounding errors its ``product_error`` bounds."""
        return self.dual(U, V)

    def value_at(self, U: Tensor, V: Tensor, dual: DualMatrix) -> float:
        """As :meth:`value`, where the dual point there is known."""
        return self.value(U, V)

    def steepness(self, value: float) -> float:
        """A bound on the gradient's norm at a point of loss ``value``: √(2κℓ), because the loss is non-negative."""
        return math.sqrt(2 * self.curvature * value)

    def largest(self) -> float:
        """The largest absolute value of the data."""
        return 0.0

    def scaled(self, exponent: int) -> Self:
        """The loss of the data times 2^exponent; a loss with a degree implements it."""
        raise CapabilityError(
            f"{type(self).__name__} has a degree, so it must also have scaled(exponent), the loss of its data times "
            f"2^exponent; or leave the degree out"
        )

    def weighted(self, roots: Tensor) -> Self:
        """The loss of X whose rows are those of the data times ``roots``, the roots of the rows' weights, in float64:
        the term of such a row is that of the row of X itself times its weight."""
        raise CapabilityError(f"{type(self).__name__} takes no weights of rows: leave sample_weight out")

    def normalized(self, *factors: Tensor, largest: float | None = None) -> tuple[Self, Units]:
        """The loss of data in the middle of the floating-point range, where given factors (vectors as columns) fit too,
        and its units there; the data of a loss without a degree are left as they are, and refused far from one."""
        largest = self.largest() if largest is None else largest
        exponent = middle(largest, *factors) if self.degree else 0
        if not self.degree and abs(middle(largest)) > 256:
            raise OptionError(f"{type(self).__name__} has no degree, and entries up to {largest:g}: scale the data")
        return self.scaled(-exponent) if exponent else self, Units(exponent * (self.degree - 1), exponent * self.degree)


def best_multiple(moments: DualMoments, curvature: float, largest: float) -> DualValue:
    """The maximum of c⟨Y,Z⟩ − c²‖Z‖²/(2κ) over 0 ≤ c ≤ ``largest``."""
    if moments.inner <= 0 or moments.square <= 0:
        return DualValue(0.0, 0.0)
    c = min(moments.inner * curvature / moments.square, largest)
    bend = 0.0 if math.isinf(curvature) else 0.5 * c * c / curvature
    error = summation_error(moments.entries)
    margin = c * (error * math.sqrt(moments.data * moments.square)) + bend * (error * moments.square)
    # Half of the slack is that of the loss's value.
    margin += (c + bend + 0.5) * moments.slack
    return DualValue(c * moments.inner - bend * moments.square, margin)


class DenseLoss(Loss):
    """A loss of a matrix Y without missing entries; only :class:`Squared` takes sparse ones."""

    Y: Any

    def largest(self) -> float:
        """The largest absolute value of Y, over all processes."""
        return self.rows.largest(self.Y.values if isinstance(self.Y, SparseData) else self.Y)

    def scaled(self, exponent: int) -> Self:
        """The loss of Y times 2^exponent."""
        return replace(self, Y=shifted(self.Y, exponent))  # type: ignore[type-var]

    def size(self) -> float:
        """‖Y‖."""
        if isinstance(self.Y, SparseData):
            return float(self.rows.sum(self.Y.values.to(torch.float64).square().sum())) ** 0.5
        total = torch.zeros((), dtype=torch.float64, device=self.Y.device)
        for part in row_blocks(self.Y.shape[0], self.Y.shape[1], cached=True):
            total = total + self.Y[part].to(torch.float64).square().sum()
        return float(self.rows.sum(total)) ** 0.5

    def entries(self) -> int:
        """The size of Y."""
        return self.rows.count(self.Y.numel())

    def zero(self) -> DualMatrix:
        """The dual point of factors without columns."""
        return self.dual(*self._empty())

    def _empty(self) -> tuple[Tensor, Tensor]:
        """Factors without columns: X = 0."""
        left, right = (torch.zeros(size, 0, dtype=self.Y.dtype, device=self.Y.device) for size in self.Y.shape)
        return left, right


@dataclass(frozen=True)
class Squared(DenseLoss):
    r""":math:`\tfrac12\|Y - UV^\top\|_F^2`; the dual point is the residual.

    >>> loss = Squared(torch.eye(2))
    >>> loss.value(torch.ones(2, 1), torch.ones(2, 1))
    1.0
    """

    Y: Any
    rows: RowSharding = RowSharding()  # noqa: RUF009 -- frozen
    roots: Tensor | None = None  # of the rows' weights, by which the rows are multiplied
    curvature = 1.0
    degree = 2

    def __post_init__(self) -> None:
        if isinstance(self.Y, SparseData) and self.rows.group is not None:
            raise OptionError("sparse data run in one process: leave process_group out, or pass the rows densely")

    def weighted(self, roots: Tensor) -> "Squared":
        """The loss of the rows of Y times ``roots``."""
        Y = self.Y.to(torch.float64)
        if isinstance(Y, SparseData):
            return replace(self, Y=Y.scaled_rows(roots), roots=roots)
        roots = roots.to(Y)
        return replace(self, Y=Y * roots.unsqueeze(1), roots=roots)

    def times(self, V: Tensor) -> Tensor:
        """The products Yv of vectors v, the rows of V: vectors as rows."""
        return (self.Y @ V.mT).mT.contiguous() if isinstance(self.Y, SparseData) else V @ self.Y.mT

    def adjoint(self, U: Tensor) -> Tensor:
        """The products Yᵀu of vectors u, the rows of U: vectors as rows, summed over the processes."""
        return (self.Y.mT @ U.mT).mT.contiguous() if isinstance(self.Y, SparseData) else self.rows.sum(U @ self.Y)

    def value(self, U: Tensor, V: Tensor) -> float:
        """Half the squared residual, by blocks of rows; of sparse data from thin products."""
        if isinstance(self.Y, SparseData):
            return 0.5 * self.dual(U, V).moments().square
        return 0.5 * summed(self.dual(U, V), lambda block: block.square().sum())

    def value_at(self, U: Tensor, V: Tensor, dual: DualMatrix) -> float:
        """Half the squared norm of the dual point."""
        assert isinstance(dual, DenseDual)
        return 0.5 * dual.moments().square

    def search(self, U: Tensor, V: Tensor, dual: DualMatrix | None = None) -> DenseDual:
        """The residual in the precision of the data."""
        return DenseDual(self.Y, U, V, rows=self.rows, dtype=self.Y.dtype)

    def chunked(self, U: Tensor, V: Tensor) -> DenseDual:
        """The residual; products with Y in the precision of Y."""
        return DenseDual(self.Y, U, V, rows=self.rows, chunked=True)

    def start(self) -> DenseDual:
        """The data, in their own precision."""
        return DenseDual(self.Y, rows=self.rows, dtype=self.Y.dtype)

    def size(self) -> float:
        """‖Y‖, computed once."""
        return self._norm

    @cached_property
    def _norm(self) -> float:
        return super().size()

    def dual(self, U: Tensor, V: Tensor) -> DenseDual:
        """The residual."""
        return DenseDual(self.Y, U, V, rows=self.rows)

    def lower(self, matrix: DualMatrix, largest: float) -> DualValue:
        """c⟨Y,R⟩ − ½c²‖R‖²."""
        assert isinstance(matrix, DenseDual)
        return best_multiple(matrix.moments(), 1.0, largest)


@dataclass(frozen=True)
class HuberLoss(DenseLoss):
    r""":math:`\min_E \|E\|_1 + \tfrac\gamma2\|Y - X - E\|^2`, the Huber loss; ``gamma=None`` is :math:`\|Y - X\|_1`.

    Residuals up to :math:`1/\gamma` are penalised by their squares, larger ones by their absolute values. The loss is
    the Moreau envelope of the l1 norm: :math:`E = \operatorname{ST}_{1/\gamma}(Y - X)`, and the negative gradient is
    :math:`\gamma(Y - X - E) = \operatorname{clip}(\gamma(Y - X), -1, 1)`.

    >>> loss = HuberLoss(torch.tensor([[0.5, 3.0]]), gamma=1.0)   # ½ · 0.5² + 3 − ½
    >>> loss.value(torch.zeros(1, 1), torch.zeros(2, 1))
    2.625
    """

    Y: Tensor
    gamma: float | None
    rows: RowSharding = RowSharding()  # noqa: RUF009 -- frozen
    #: A dual point from a solver. Without smoothing, the signs of the residual are a poor dual point.
    found: Tensor | None = None
    degree = 1

    def __post_init__(self) -> None:
        if self.gamma is not None:
            require_positive("gamma", self.gamma)

    def scaled(self, exponent: int) -> Self:
        """The loss of Y times 2^exponent, whose gamma is that much smaller."""
        scaled = super().scaled(exponent)
        if self.gamma is None:
            return scaled
        return replace(scaled, gamma=comparable(f"gamma={self.gamma:g}", raised(self.gamma, -exponent), self.largest()))

    @property
    def curvature(self) -> float:
        """γ."""
        return math.inf if self.gamma is None else self.gamma

    def sparse(self, residual: Tensor) -> Tensor:
        """The minimising E for a residual Y − X."""
        return residual if self.gamma is None else L1(1.0).prox(residual, 1 / self.gamma)

    def of(self, residual: Tensor) -> Tensor:
        """The loss of a residual, summed."""
        sparse = self.sparse(residual)
        value = L1(1.0).value(sparse)
        return value if self.gamma is None else value + 0.5 * self.gamma * (residual - sparse).square().sum()

    def prox_residual(self, residual: Tensor, step: float) -> Tensor:
        r"""The minimiser d of :math:`\eta h(d) + \tfrac12\|d - s\|^2` for a residual s, with the loss h.

        It is the prox of a Moreau envelope: with :math:`\mu = 1/\gamma`

        .. math:: s + \tfrac{\eta}{\mu + \eta}(\operatorname{prox}_{(\mu+\eta)\|\cdot\|_1}(s) - s) .
        """
        mu = 0.0 if self.gamma is None else 1 / self.gamma
        return residual + step / (mu + step) * (L1(1.0).prox(residual, mu + step) - residual)

    def value(self, U: Tensor, V: Tensor) -> float:
        """The loss in float64, by blocks of rows."""
        return summed(DenseDual(self.Y, U, V, rows=self.rows), self.of)

    def dual(self, U: Tensor, V: Tensor) -> DenseDual:
        """clip(γ(Y − X), −1, 1), or the dual point ``found``."""
        if self.found is not None:
            return DenseDual(self.found.to(torch.float64).clamp(-1, 1), rows=self.rows)
        return DenseDual(self.Y, U, V, rows=self.rows, entries=self._clipped)

    def _clipped(self, residual: Tensor, data: Tensor) -> Tensor:
        return torch.sign(residual) if self.gamma is None else (self.gamma * residual).clamp(-1, 1)

    def slope(self, U: Tensor, V: Tensor, dual: DualMatrix) -> DualMatrix | None:
        """clip(γ(Y − X), −1, 1), also if a dual point was given; None without smoothing."""
        if self.gamma is None:
            return None
        return dual if self.found is None else replace(self, found=None).dual(U, V)

    def steepness(self, value: float) -> float:
        """As for every loss; without smoothing no entry of a subgradient exceeds one."""
        return math.sqrt(self.entries()) if self.gamma is None else super().steepness(value)

    def lower(self, matrix: DualMatrix, largest: float) -> DualValue:
        """c⟨Y,Z⟩ − c²‖Z‖²/(2γ) with |cZ| ≤ 1."""
        assert isinstance(matrix, DenseDual)
        parts = [torch.stack(torch.aminmax(b)) for _, b in matrix.blocks() if b.numel()]
        top = self.rows.largest(torch.cat(parts))
        room = 1 / top if top > 0 else math.inf
        return best_multiple(matrix.moments(self.Y), self.curvature, min(largest, room))

    def zero(self) -> DenseDual:
        """clip(γY, −1, 1), also if a dual point was given."""
        return replace(self, found=None).dual(*self._empty())


def summed(matrix: DenseDual, total: Callable[[Tensor], Tensor]) -> float:
    """The sum of ``total(block)`` over the blocks of all processes."""
    sums = sum((total(block) for _, block in matrix.blocks(cached=True)), torch.zeros((), dtype=torch.float64))
    return float(matrix.rows.sum(torch.as_tensor(sums)))


def rounding(U: Tensor, V: Tensor, data: float, rows: RowSharding) -> float:
    r"""A bound on the norm of the rounding error of :math:`Y - UV^\top`; ``data`` is :math:`\|Y\|`."""
    left = rows.sum(U.to(torch.float64).square().sum(0)).sqrt()
    pairs = float((left * V.to(torch.float64).norm(dim=0)).sum())
    return 2 * (U.shape[1] + 4) * EPS * (pairs + data)

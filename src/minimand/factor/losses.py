r"""Losses :math:`\ell(UV^\top)` with what a certificate needs of them: a value, a dual point, and the dual's value.

For a dual point :math:`Z` with polar at most :math:`p`, every :math:`cZ` with :math:`0 \le c \le \lambda/p` in the
domain of the conjugate is feasible, and

.. math:: F^* \ge -\ell^*(-cZ) = c\,\langle Y, Z\rangle - \tfrac{c^2}{2\kappa}\|Z\|^2 ,

with the curvature :math:`\kappa` of the loss (1 for squares, :math:`\gamma` for a smoothed norm, :math:`\infty` for the
norm itself). The best c of the interval is taken.
"""

import abc
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import require_positive
from ..functions import L1
from ..norms.spectral import EPS
from .duals import Dense, DualMatrix, Moments, Sparse
from .rows import Rows, row_blocks

__all__ = ["DualValue", "Huber", "Loss", "Observed", "Squared", "norm", "rounding"]


class DualValue(NamedTuple):
    """A lower bound on the minimum, and what rounding may have added to it."""

    value: float
    margin: float


class Loss(abc.ABC):
    """A convex loss of X = UVᵀ that is nowhere negative.

    U holds the rows of this process; both factors are given with vectors as columns.
    """

    rows: Rows

    @property
    @abc.abstractmethod
    def curvature(self) -> float:
        """κ: the gradient's Lipschitz constant; infinite where there is no gradient."""

    @abc.abstractmethod
    def value(self, U: Tensor, V: Tensor) -> float:
        """ℓ(UVᵀ) in float64, over all ranks."""

    @abc.abstractmethod
    def dual(self, U: Tensor, V: Tensor) -> DualMatrix:
        """A dual point: the negative gradient, or a subgradient's representative."""

    @abc.abstractmethod
    def lower(self, matrix: DualMatrix, largest: float) -> DualValue:
        """The dual's best value over cZ, 0 ≤ c ≤ ``largest``."""

    @abc.abstractmethod
    def zero(self) -> DualMatrix:
        """The dual point at X = 0."""

    @abc.abstractmethod
    def size(self) -> float:
        """The norm of the data: the scale of rounding."""

    @abc.abstractmethod
    def entries(self) -> int:
        """How many terms the loss sums, over all ranks."""

    def slope(self, U: Tensor, V: Tensor, dual: DualMatrix) -> DualMatrix | None:
        """The negative gradient, which tells what a direction attains; ``dual`` is the dual point there.

        None where the loss has no gradient: no direction is known to lower it then.
        """
        return dual

    def steepness(self, value: float) -> float:
        """A bound on the norm of the gradient where the loss is ``value``: √(2κℓ), because no loss is negative."""
        return math.sqrt(2 * self.curvature * value)


def _best_multiple(moments: Moments, curvature: float, largest: float) -> DualValue:
    if moments.inner <= 0 or moments.square <= 0:
        return DualValue(0.0, 0.0)
    c = min(moments.inner * curvature / moments.square, largest)
    bend = 0.0 if math.isinf(curvature) else 0.5 * c * c / curvature
    return DualValue(c * moments.inner - bend * moments.square, c * moments.inner_margin + bend * moments.square_margin)


@dataclass(frozen=True)
class Squared(Loss):
    r""":math:`\tfrac12\|Y - UV^\top\|_F^2`; the dual point is the residual.

    >>> loss = Squared(torch.eye(2))
    >>> loss.value(torch.ones(2, 1), torch.ones(2, 1))
    1.0
    """

    Y: Tensor
    rows: Rows = Rows()  # noqa: RUF009 -- frozen
    curvature = 1.0

    def value(self, U: Tensor, V: Tensor) -> float:
        """Half the squared residual, by blocks of rows."""
        Z = self.dual(U, V)
        total = sum((block.square().sum() for _, block in Z.blocks()), torch.zeros((), dtype=torch.float64))
        return 0.5 * float(self.rows.sum(torch.as_tensor(total)))

    def dual(self, U: Tensor, V: Tensor) -> Dense:
        """The residual."""
        return Dense(self.Y, U, V, rows=self.rows)

    def lower(self, matrix: DualMatrix, largest: float) -> DualValue:
        """c⟨Y,R⟩ − ½c²‖R‖²."""
        assert isinstance(matrix, Dense)
        return _best_multiple(matrix.moments(), 1.0, largest)

    def zero(self) -> Dense:
        """The data."""
        return Dense(self.Y, rows=self.rows)

    def size(self) -> float:
        """‖Y‖."""
        return norm(self.Y, self.rows)

    def entries(self) -> int:
        """The size of Y."""
        return self.rows.count(self.Y.numel())


@dataclass(frozen=True)
class Observed(Loss):
    r""":math:`\tfrac12\sum_{(i,j)\in\Omega}(Y_{ij} - (UV^\top)_{ij})^2`; the dual point lives on the observed entries.

    ``index`` holds the rows and columns of ``values``, sorted by row. With ``compact`` nothing dense of the matrix's
    size is formed, not even to bound its norm.
    """

    values: Tensor
    index: tuple[Tensor, Tensor]
    shape: tuple[int, int]
    rows: Rows = Rows()  # noqa: RUF009 -- frozen
    compact: bool = True
    curvature = 1.0

    def residual(self, U: Tensor, V: Tensor) -> Tensor:
        """Y − UVᵀ on the observed entries, in the factors' precision."""
        return self.values.to(U.dtype) - products(U, V, self.index)

    def value(self, U: Tensor, V: Tensor) -> float:
        """Half the squared residual of what was observed."""
        residual = self.residual(U.to(torch.float64), V.to(torch.float64))
        return 0.5 * float(self.rows.sum(residual.square().sum()))

    def dual(self, U: Tensor, V: Tensor) -> Sparse:
        """The residual on the observed entries."""
        residual = self.residual(U.to(torch.float64), V.to(torch.float64))
        return Sparse(residual, self.index, self.shape, self.rows, compact=self.compact)

    def lower(self, matrix: DualMatrix, largest: float) -> DualValue:
        """c⟨Y,R⟩ − ½c²‖R‖²."""
        assert isinstance(matrix, Sparse)
        return _best_multiple(matrix.moments(self.values), 1.0, largest)

    def zero(self) -> Sparse:
        """The data."""
        return Sparse(self.values, self.index, self.shape, self.rows, compact=self.compact)

    def size(self) -> float:
        """‖P_Ω(Y)‖."""
        return float(self.rows.sum(self.values.to(torch.float64).square().sum())) ** 0.5

    def entries(self) -> int:
        """The number of observed entries."""
        return self.rows.count(len(self.values))


@dataclass(frozen=True)
class Huber(Loss):
    r""":math:`\min_E \|E\|_1 + \tfrac\gamma2\|Y - X - E\|^2`, the Huber loss; ``gamma=None`` is :math:`\|Y - X\|_1`
    itself.

    Residuals up to :math:`1/\gamma` count by their squares, larger ones by their sizes. It is the Moreau envelope of
    the l1 norm, so that the prox of that norm is all it needs: :math:`E = \operatorname{ST}_{1/\gamma}(Y - X)`, and the
    negative gradient is :math:`\gamma(Y - X - E) = \operatorname{clip}(\gamma(Y - X), -1, 1)`.

    >>> loss = Huber(torch.tensor([[0.5, 3.0]]), gamma=1.0)   # ½ · 0.5² + 3 − ½
    >>> loss.value(torch.zeros(1, 1), torch.zeros(2, 1))
    2.625
    """

    Y: Tensor
    gamma: float | None
    rows: Rows = Rows()  # noqa: RUF009 -- frozen
    #: A dual point found by the solver; without smoothing the residual's signs alone are a poor one.
    found: Tensor | None = None

    def __post_init__(self) -> None:
        if self.gamma is not None:
            require_positive("gamma", self.gamma)

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
        r"""The residual d with the least :math:`\eta h(d) + \tfrac12\|d - s\|^2`, h the loss.

        It is the prox of an envelope, with :math:`\mu = 1/\gamma`

        .. math:: s + \tfrac{\eta}{\mu + \eta}(\operatorname{prox}_{(\mu+\eta)\|\cdot\|_1}(s) - s) .
        """
        mu = 0.0 if self.gamma is None else 1 / self.gamma
        return residual + step / (mu + step) * (L1(1.0).prox(residual, mu + step) - residual)

    def value(self, U: Tensor, V: Tensor) -> float:
        """The loss in float64, by blocks of rows."""
        Z = Dense(self.Y, U, V, rows=self.rows)
        total = sum((self.of(block) for _, block in Z.blocks()), torch.zeros((), dtype=torch.float64))
        return float(self.rows.sum(torch.as_tensor(total)))

    def dual(self, U: Tensor, V: Tensor) -> Dense:
        """clip(γ(Y − X), −1, 1), or the dual point that a solver found."""
        if self.found is not None:
            return _WithData(self.found.to(torch.float64).clamp(-1, 1), self.Y, self.rows)
        return Dense(self.Y, U, V, rows=self.rows, entries=self._clipped)

    def _clipped(self, residual: Tensor, data: Tensor) -> Tensor:
        return torch.sign(residual) if self.gamma is None else (self.gamma * residual).clamp(-1, 1)

    def slope(self, U: Tensor, V: Tensor, dual: DualMatrix) -> DualMatrix | None:
        """clip(γ(Y − X), −1, 1), whatever dual point a solver found; the norm itself has no gradient."""
        if self.gamma is None:
            return None
        return dual if self.found is None else replace(self, found=None).dual(U, V)

    def steepness(self, value: float) -> float:
        """As for every loss; no subgradient of the norm itself has an entry above one."""
        return math.sqrt(self.entries()) if self.gamma is None else super().steepness(value)

    def lower(self, matrix: DualMatrix, largest: float) -> DualValue:
        """c⟨Y,Z⟩ − c²‖Z‖²/(2γ) with |cZ| ≤ 1."""
        assert isinstance(matrix, Dense)
        largest_entry = torch.stack([b.abs().max() for _, b in matrix.blocks() if b.numel()]).max()
        top = float(self.rows.max(largest_entry))
        room = 1 / top if top > 0 else math.inf
        return _best_multiple(matrix.moments(), self.curvature, min(largest, room))

    def zero(self) -> Dense:
        """clip(γY, −1, 1)."""
        empty = self.Y[:, :0], self.Y[:0].mT
        return replace(self, found=None).dual(*empty)

    def size(self) -> float:
        """‖Y‖."""
        return norm(self.Y, self.rows)

    def entries(self) -> int:
        """The size of Y."""
        return self.rows.count(self.Y.numel())


class _WithData(Dense):
    """A dual point that is given, not a residual: its inner product is with the data all the same."""

    def __init__(self, found: Tensor, data: Tensor, rows: Rows) -> None:
        super().__init__(found, rows=rows)
        self.data = data

    def moments(self) -> Moments:
        """⟨Y, Z⟩ and ‖Z‖², over all ranks."""
        return self._moments_with(self.data)


def products(U: Tensor, V: Tensor, index: tuple[Tensor, Tensor]) -> Tensor:
    """(UVᵀ)ᵢⱼ at the given entries only, in blocks that fit into memory."""
    row, column = index
    out = torch.empty(len(row), dtype=U.dtype, device=U.device)
    for part in row_blocks(len(row), max(U.shape[1], 1)):
        out[part] = (U[row[part]] * V[column[part]]).sum(-1)
    return out


def rounding(U: Tensor, V: Tensor, data: float, rows: Rows) -> float:
    r"""The norm of what rounding may hide of :math:`Y - UV^\top`; ``data`` is :math:`\|Y\|`."""
    left = rows.sum(U.to(torch.float64).square().sum(0)).sqrt()
    pairs = float((left * V.to(torch.float64).norm(dim=0)).sum())
    return 2 * (U.shape[1] + 4) * EPS * (pairs + data)


def norm(Y: Tensor, rows: Rows) -> float:
    """‖Y‖ over all ranks, by blocks of rows."""
    total = torch.zeros((), dtype=torch.float64, device=Y.device)
    for part in row_blocks(Y.shape[0], Y.shape[1]):
        total = total + Y[part].to(torch.float64).square().sum()
    return float(rows.sum(total)) ** 0.5

"""All datafits, each listed once with data that it takes. A new one joins the laws by a line here."""

import dataclasses

import cvxpy as cp
import torch
from torch import Tensor

from minimand.functions import Function
from minimand.operators import Dense
from minimand.solvers import Datafit, Huber, Logistic, Poisson, Problem, Quadratic, SquaredHingeLoss


@dataclasses.dataclass(frozen=True)
class Pinball(Datafit):
    """A smoothed quantile loss, as a user would write it: no conjugate, no second derivative, no prox."""

    share: float = 0.7

    def values(self, t: Tensor, y: Tensor) -> Tensor:
        r = t - y
        return torch.nn.functional.softplus(r) - self.share * r

    def gradient(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(t - y) - self.share

    def curvature(self, y: Tensor) -> float:
        return 0.25


@dataclasses.dataclass(frozen=True)
class DatafitCase:
    """A datafit, the kind of its data, and the same loss in cvxpy."""

    datafit: Datafit
    kind: str = "real"
    conjugate: bool = True

    @property
    def id(self) -> str:
        name = type(self.datafit).__name__
        return name if self in ALL else f"{name}-without-a-bound"

    def data(self, *shape: int, seed: int = 0) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        y = torch.randn(shape, generator=g, dtype=torch.float64)
        return {"real": y, "signs": torch.where(y > 0, 1.0, -1.0).double(), "counts": (2 * y.abs()).round()}[self.kind]

    def convex(self, t: cp.Expression, y: object) -> cp.Expression:
        match self.datafit:
            case Quadratic():
                return 0.5 * cp.sum_squares(t - y)
            case Logistic():
                return cp.sum(cp.logistic(-cp.multiply(y, t)))
            case Huber():
                return 0.5 * cp.sum(cp.huber(t - y, self.datafit.delta))
            case Poisson():
                return cp.sum(t + self.datafit.background - cp.multiply(y, cp.log(t + self.datafit.background)))
            case SquaredHingeLoss():
                return 0.5 * cp.sum_squares(cp.pos(1 - cp.multiply(y, t)))
            case Pinball():
                return cp.sum(cp.logistic(t - y) - self.datafit.share * (t - y))
        raise NotImplementedError(self.datafit)

    def problem(self, function: Function, *, ridge: float = 0.1, seed: int = 0, bias: bool = True) -> Problem:
        """A small, well-conditioned problem, whose predictions are positive for non-negative x."""
        g = torch.Generator().manual_seed(seed)
        weight = torch.randn(5, 8, generator=g, dtype=torch.float64) / 8**0.5
        weight = weight.abs() if self.kind == "counts" else weight
        b = 0.3 * torch.randn(5, generator=g, dtype=torch.float64) if bias else None
        return Problem(Dense(weight), function, self.data(3, 8, seed=seed), b, ridge, self.datafit)


ALL = [
    DatafitCase(Quadratic()),
    DatafitCase(Logistic(), "signs"),
    DatafitCase(Huber(0.4)),
    DatafitCase(Poisson(2.0), "counts"),
    DatafitCase(SquaredHingeLoss(), "signs"),
    DatafitCase(Pinball(), conjugate=False),
]
IDS = [case.id for case in ALL]
# Solved by line searches and proxes only.
WITHOUT_BOUND = [DatafitCase(Poisson(0.0), "counts")]

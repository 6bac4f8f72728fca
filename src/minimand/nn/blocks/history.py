"""Updates that use all past iterates: Nesterov's method written out, and dense networks."""

import dataclasses
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ...errors import OptionError
from ...linalg import Weight, accumulate
from ...solvers.momentum import nesterov_schedule
from .updates import Place, Prox, Update, require_number

__all__ = ["AcceleratedUpdate", "DenseUpdate"]


class History(NamedTuple):
    """The iterate, and either a running sum or all there was."""

    x: Tensor
    sum: Tensor | None
    values: tuple[Tensor, ...]
    points: tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class AcceleratedUpdate(Update):
    r"""Nesterov's method in all past terms,

    .. math:: x_{k+1} = \sum_{j \le k} \alpha_{k+1}^j T(x_j) + \sum_{j \le k} \beta_{k+1}^j x_j .

    The algorithm has :math:`\alpha = h` and :math:`\beta_{k+1}^j = [j = k] - h_{k+1,j}` with

    .. math::

        h_{k+1,k} = 1 + \beta_{k+1}, \quad h_{k+1,k-1} = \beta_{k+1}(h_{k,k-1} - 1), \quad
        h_{k+1,j} = \beta_{k+1} h_{k,j} ,

    and its iterates are the points at which :class:`NesterovUpdate` evaluates its blocks. Fixed
    coefficients have sums that run along, and memory is that of two iterates; learned ones need the whole history, and
    memory grows linearly.

    Args:
        start_at: Where coefficients are, or learned ones start: at the algorithm (``"nesterov"``), or at α = 1, β = 0
            (``"dense"``).

    Source: 002, eq. (18).
    """

    start_at: Literal["nesterov", "dense"] = "nesterov"

    def __post_init__(self) -> None:
        if self.start_at not in ("nesterov", "dense"):
            raise OptionError(f'start_at is "nesterov" or "dense", got {self.start_at!r}')

    def coefficients(self, place: Place, learned: bool) -> tuple[float, ...]:
        """All α, then all β; where sums run along the momentum alone, or none for the plain sum of values."""
        momenta = nesterov_schedule(place.steps + 1)
        if not learned:
            return (momenta[place.step + 1],) if self.start_at == "nesterov" else ()
        if self.start_at == "dense":
            return (1.0,) * (place.step + 1) + (0.0,) * (place.step + 1)
        row: list[float] = []
        for k in range(place.step + 1):
            row = [momenta[k + 1] * (h - (j == k - 1)) for j, h in enumerate(row)] + [1 + momenta[k + 1]]
        return (*row, *((j == place.step) - h for j, h in enumerate(row)))

    def start(self, x: tuple[Tensor, ...], learned: bool) -> History:
        """No displacement yet."""
        return History(x[0], None, (), ())

    def points(self, state: History, weights: tuple[Weight, ...]) -> tuple[Tensor, ...]:
        """At the last iterate."""
        return (state.x,)

    def combine(self, state: History, values: tuple[Tensor, ...], weights: tuple[Weight, ...], prox: Prox) -> History:
        """The sums of (18), running or in full."""
        x, value = state.x, values[0]
        if not weights:
            total = value if state.sum is None else state.sum + value
            return state._replace(x=prox(total), sum=total)
        if len(weights) == 1:
            (momentum,) = weights
            if momentum == 0:
                return state._replace(x=prox(value), sum=None)
            # Σ h (T(x_j) − x_j) = T(x_k) − x_k + s with s⁺ = β (s + T(x_k) − x_k).
            move = value - x
            total = momentum * (move if state.sum is None else state.sum + move)
            return state._replace(x=prox(value + total), sum=total)
        images, points = (*state.values, value), (*state.points, x)
        # The newest terms first: they carry the most weight.
        count = len(images)
        result = accumulate(None, weights[count - 1], value)
        for weight, term in zip((*weights[: count - 1], *weights[count:]), (*images[:-1], *points), strict=True):
            result = accumulate(result, weight, term)
        return state._replace(x=prox(result), values=images, points=points)


class Dense(NamedTuple):
    """All iterates side by side, and how many channels the input has."""

    x: Tensor
    root: int


@dataclasses.dataclass(frozen=True)
class DenseUpdate(Update):
    r"""All past terms with a block of its own for every source,

    .. math:: x_{k+1} = \sum_{j \le k} T_{k,j}(x_j) + \sum_{1 \le j \le k} \beta_{k+1}^j x_j .

    A block maps the concatenation :math:`[x_0, \dots, x_k]` to :math:`x_{k+1}`: if it ends in a convolution, it is the
    first sum, and α would be a factor on its weights. β = 0, the default, is DenseNet. :math:`x_0` may have other
    channels than the rest and has no β. The network returns the concatenation of all iterates.

    Args:
        past: β.

    Source: 002, eq. (18); Huang et al., *Densely connected convolutional networks*, 2017.
    """

    skips: ClassVar[bool] = False
    past: float = 0.0

    def __post_init__(self) -> None:
        require_number("past", self.past)

    def coefficients(self, place: Place, learned: bool) -> tuple[float, ...]:
        """One for every iterate but the input."""
        return () if place.changes else (self.past,) * place.step

    def start(self, x: tuple[Tensor, ...], learned: bool) -> Dense:
        """The input alone."""
        return Dense(x[0], x[0].shape[1])

    def points(self, state: Dense, weights: tuple[Weight, ...]) -> tuple[Tensor, ...]:
        """At the concatenation."""
        return (state.x,)

    def combine(self, state: Dense, values: tuple[Tensor, ...], weights: tuple[Weight, ...], prox: Prox) -> Dense:
        """A new iterate beside the others."""
        value = values[0]
        if _enter(weights):
            terms = state.x[:, state.root :].unflatten(1, (len(weights), value.shape[1]))
            value = value + _combination(weights, terms)
        return Dense(torch.cat([state.x, prox(value)], 1), state.root)

    def check(self, value: Tensor, state: Dense, weights: tuple[Weight, ...]) -> str | None:
        """All sizes but the channels agree, and where iterates are added, those too."""
        x = state.x
        if value.dim() != x.dim() or value.shape[0] != x.shape[0] or value.shape[2:] != x.shape[2:]:
            return f"maps {tuple(x.shape)} to {tuple(value.shape)}"
        past = x.shape[1] - state.root
        if _enter(weights) and past != len(weights) * value.shape[1]:
            return f"returns {value.shape[1]} channels after iterates of {past // len(weights)}"
        return None


def _enter(weights: tuple[Weight, ...]) -> bool:
    """Whether past iterates are added."""
    return any(isinstance(weight, Tensor) or weight != 0 for weight in weights)


def _combination(weights: tuple[Weight, ...], terms: Tensor) -> Tensor:
    """The weighted sum over the second dimension."""
    stacked = torch.stack([torch.as_tensor(weight, dtype=terms.dtype, device=terms.device) for weight in weights])
    if stacked.dim() == 1:
        # One product with a row reads the terms once and stores none of their multiples.
        return torch.matmul(stacked, terms.flatten(2)).unflatten(1, terms.shape[2:])
    return (stacked * terms).sum(1)

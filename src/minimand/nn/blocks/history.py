"""Updates that use all past iterates: Nesterov's method in expanded form, and dense networks."""

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
    """The iterate, and either a running sum or all past values and points."""

    x: Tensor
    sum: Tensor | None
    values: tuple[Tensor, ...]
    points: tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class AcceleratedUpdate(Update):
    r"""Nesterov's method, expanded in all past terms,

    .. math:: x_{k+1} = \sum_{j \le k} \alpha_{k+1}^j T(x_j) + \sum_{j \le k} \beta_{k+1}^j x_j .

    The algorithm has :math:`\alpha = h` and :math:`\beta_{k+1}^j = [j = k] - h_{k+1,j}` with

    .. math::

        h_{k+1,k} = 1 + \beta_{k+1}, \quad h_{k+1,k-1} = \beta_{k+1}(h_{k,k-1} - 1), \quad
        h_{k+1,j} = \beta_{k+1} h_{k,j} ,

    and its iterates are the points at which :class:`NesterovUpdate` evaluates its blocks. With fixed coefficients
    running sums replace the history, and memory is that of two iterates. Learned coefficients need the whole history,
    so memory grows linearly with the number of blocks.

    Args:
        start_at: The fixed or initial coefficients: those of the algorithm (``"nesterov"``), or α = 1, β = 0
            (``"dense"``).

    Source: [Lin2019], eq. (18).
    """

    start_at: Literal["nesterov", "dense"] = "nesterov"

    def __post_init__(self) -> None:
        if self.start_at not in ("nesterov", "dense"):
            raise OptionError(f'start_at must be "nesterov" or "dense", got {self.start_at!r}')

    def coefficients(self, place: Place, learned: bool) -> tuple[float, ...]:
        """If learned, all α, then all β; otherwise the momentum of the running sum, or none for a plain sum."""
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
        """The input, with an empty history."""
        return History(x[0], None, (), ())

    def points(self, state: History, weights: tuple[Weight, ...]) -> tuple[Tensor, ...]:
        """The last iterate."""
        return (state.x,)

    def combine(self, state: History, values: tuple[Tensor, ...], weights: tuple[Weight, ...], prox: Prox) -> History:
        """The sums of eq. (18), as running sums or over the history."""
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
        # The newest term has the largest weight and comes first.
        count = len(images)
        result = accumulate(None, weights[count - 1], value)
        for weight, term in zip((*weights[: count - 1], *weights[count:]), (*images[:-1], *points), strict=True):
            result = accumulate(result, weight, term)
        return state._replace(x=prox(result), values=images, points=points)


class DenseState(NamedTuple):
    """All iterates, concatenated, and the number of channels of the input."""

    x: Tensor
    root: int


@dataclasses.dataclass(frozen=True)
class DenseUpdate(Update):
    r"""A sum over all past terms with a separate block for each,

    .. math:: x_{k+1} = \sum_{j \le k} T_{k,j}(x_j) + \sum_{1 \le j \le k} \beta_{k+1}^j x_j .

    A block maps the concatenation :math:`[x_0, \dots, x_k]` to :math:`x_{k+1}`. If it ends in a convolution it computes
    the first sum, and factors α could be absorbed into its weights. β = 0, the default, is DenseNet. :math:`x_0` may
    have a different number of channels and has no β. The network returns the concatenation of all iterates.

    Args:
        past: β.

    Source: [Lin2019], eq. (18); Huang et al., *Densely connected convolutional networks*, 2017.
    """

    skips: ClassVar[bool] = False
    past: float = 0.0

    def __post_init__(self) -> None:
        require_number("past", self.past)

    def coefficients(self, place: Place, learned: bool) -> tuple[float, ...]:
        """One coefficient for every iterate except the input."""
        return () if place.changes else (self.past,) * place.step

    def start(self, x: tuple[Tensor, ...], learned: bool) -> DenseState:
        """The input."""
        return DenseState(x[0], x[0].shape[1])

    def points(self, state: DenseState, weights: tuple[Weight, ...]) -> tuple[Tensor, ...]:
        """The concatenation of all iterates."""
        return (state.x,)

    def combine(
        self, state: DenseState, values: tuple[Tensor, ...], weights: tuple[Weight, ...], prox: Prox
    ) -> DenseState:
        """Append the new iterate."""
        value = values[0]
        if _enter(weights):
            terms = state.x[:, state.root :].unflatten(1, (len(weights), value.shape[1]))
            value = value + _combination(weights, terms)
        return DenseState(torch.cat([state.x, prox(value)], 1), state.root)

    def check(self, value: Tensor, state: DenseState, weights: tuple[Weight, ...]) -> str | None:
        """All sizes but the channels must agree; where iterates are added, also the channels."""
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
        # A matrix product reads the terms once and stores no scaled copies.
        return torch.matmul(stacked, terms.flatten(2)).unflatten(1, terms.shape[2:])
    return (stacked * terms).sum(1)

"""Updates with two streams: ADMM and its relaxation."""

import dataclasses
from typing import ClassVar, NamedTuple

from torch import Tensor

from ...linalg import Weight, accumulate
from .updates import Place, Prox, Update, require_number

__all__ = ["ADMMUpdate", "MergeUpdate"]


class Split(NamedTuple):
    """The second stream's iterate, the first's, and a running sum."""

    x: Tensor
    first: Tensor
    sum: Tensor | None


@dataclasses.dataclass(frozen=True)
class ADMMUpdate(Update):
    r"""Linearised ADMM for :math:`\min f(x') + f(x)`, :math:`x' = x`,

    .. math::

        x'^+ = \tfrac12\bigl(T(x') + x - S\bigr), \qquad x^+ = \tfrac12\bigl(T(x) + x'^+ + S\bigr), \qquad
        S^+ = S + x'^+ - x^+ .

    Learned, each of the six halves is a coefficient (the two of S are there from the second update on). The network
    returns :math:`\tfrac12(x' + x)`; at a solution both are equal.

    Source: 002, the ADMM update before its relaxation.
    """

    streams: ClassVar[int] = 2

    def coefficients(self, place: Place, learned: bool) -> tuple[float, ...]:
        """Halves."""
        return (0.5, 0.5, 0.5, 0.5) if place.step == 0 else (0.5, 0.5, 0.5, 0.5, -0.5, 0.5)

    def groups(self, place: Place, learned: bool) -> tuple[int, ...]:
        """One sum for each stream, and one for the multiplier: at a fixed point x' = x and S = 0."""
        return (2, 2) if place.step == 0 else (2, 2, 2)

    def start(self, x: tuple[Tensor, ...], learned: bool) -> Split:
        """Both at the input, no multiplier."""
        return Split(x[-1], x[0], None)

    def points(self, state: Split, weights: tuple[Weight, ...]) -> tuple[Tensor, ...]:
        """At both iterates."""
        return state.first, state.x

    def combine(self, state: Split, values: tuple[Tensor, ...], weights: tuple[Weight, ...], prox: Prox) -> Split:
        """Both iterates, then the multiplier."""
        gradient, other, second, merged = weights[:4]
        first = accumulate(gradient * values[0], other, state.x)
        if state.sum is not None:
            first = accumulate(first, weights[4], state.sum)
        first = prox(first)
        x = accumulate(second * values[1], merged, first)
        if state.sum is not None:
            x = accumulate(x, weights[5], state.sum)
        x = prox(x)
        gap = first - x
        return Split(x, first, gap if state.sum is None else state.sum + gap)

    def output(self, state: Split) -> Tensor:
        """The mean of both."""
        return 0.5 * (state.first + state.x)


@dataclasses.dataclass(frozen=True)
class MergeUpdate(Update):
    r"""The relaxed ADMM network,

    .. math:: x'^+ = T'(x') + A, \qquad x^+ = T(x) + A, \qquad A_k = \delta_k A_{k-1} + \alpha_k x'_k + \beta_k x_k .

    :math:`\delta = 1` is eq. (20) with its sums over all past iterates as one running sum; :math:`\delta = 0` and
    :math:`\alpha = \beta = \tfrac12` is DMRNet. The two streams start alike, so they need blocks of their own
    (:class:`~minimand.nn.blocks.Twin`) to differ. The network returns :math:`\tfrac12(x' + x)`.

    Args:
        first: α.
        second: β.
        memory: δ; it enters with the second update.

    Source: 002, eq. (20); Zhao et al., *Deep convolutional neural networks with merge-and-run mappings*, 2016.
    """

    streams: ClassVar[int] = 2
    first: float = 0.5
    second: float = 0.5
    memory: float = 0.0

    def __post_init__(self) -> None:
        require_number("first", self.first)
        require_number("second", self.second)
        require_number("memory", self.memory)

    def coefficients(self, place: Place, learned: bool) -> tuple[float, ...]:
        """The weights of both iterates, and of the sum."""
        return (self.first, self.second) if place.step == 0 else (self.first, self.second, self.memory)

    def start(self, x: tuple[Tensor, ...], learned: bool) -> Split:
        """Both at the input."""
        return Split(x[-1], x[0], None)

    def points(self, state: Split, weights: tuple[Weight, ...]) -> tuple[Tensor, ...]:
        """At both iterates."""
        return state.first, state.x

    def combine(self, state: Split, values: tuple[Tensor, ...], weights: tuple[Weight, ...], prox: Prox) -> Split:
        """Merge and run."""
        total = accumulate(weights[0] * state.first, weights[1], state.x)
        if state.sum is not None:
            total = accumulate(total, weights[2], state.sum)
        return Split(prox(values[1] + total), prox(values[0] + total), total)

    def output(self, state: Split) -> Tensor:
        """The mean of both."""
        return 0.5 * (state.first + state.x)

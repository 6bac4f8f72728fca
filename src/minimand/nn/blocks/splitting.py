"""Updates with two streams: ADMM and its relaxation."""

import dataclasses
from typing import ClassVar, NamedTuple

from torch import Tensor

from ...linalg import Weight, accumulate
from .updates import Place, Prox, Update, require_number

__all__ = ["ADMMUpdate", "MergeUpdate"]


class TwoStreamState(NamedTuple):
    """The iterates of the second and the first stream, and a running sum."""

    x: Tensor
    first: Tensor
    sum: Tensor | None


class _TwoStreamUpdate(Update):
    """An update with two streams that start at the same point; the network returns their mean."""

    streams: ClassVar[int] = 2

    def start(self, x: tuple[Tensor, ...], learned: bool) -> TwoStreamState:
        """Both streams at the input, without a sum."""
        return TwoStreamState(x[-1], x[0], None)

    def points(self, state: TwoStreamState, weights: tuple[Weight, ...]) -> tuple[Tensor, ...]:
        """Both iterates."""
        return state.first, state.x

    def output(self, state: TwoStreamState) -> Tensor:
        """The mean of both iterates."""
        return 0.5 * (state.first + state.x)


@dataclasses.dataclass(frozen=True)
class ADMMUpdate(_TwoStreamUpdate):
    r"""Linearised ADMM for :math:`\min f(x') + f(x)`, :math:`x' = x`,

    .. math::

        x'^+ = \tfrac12\bigl(T(x') + x - S\bigr), \qquad x^+ = \tfrac12\bigl(T(x) + x'^+ + S\bigr), \qquad
        S^+ = S + x'^+ - x^+ .

    Each of the six factors ½ is a coefficient that can be learned; the two of S occur from the second update on. The
    network returns :math:`\tfrac12(x' + x)`. At a solution both are equal.

    Source: [Lin2019], the ADMM update before its relaxation.
    """

    def coefficients(self, place: Place, learned: bool) -> tuple[float, ...]:
        """The six factors ±½."""
        return (0.5, 0.5, 0.5, 0.5) if place.step == 0 else (0.5, 0.5, 0.5, 0.5, -0.5, 0.5)

    def groups(self, place: Place, learned: bool) -> tuple[int, ...]:
        """A constant sum for each stream and for the multiplier: at a fixed point x' = x and S = 0."""
        return (2, 2) if place.step == 0 else (2, 2, 2)

    def combine(
        self, state: TwoStreamState, values: tuple[Tensor, ...], weights: tuple[Weight, ...], prox: Prox
    ) -> TwoStreamState:
        """Update both iterates, then the multiplier."""
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
        return TwoStreamState(x, first, gap if state.sum is None else state.sum + gap)


@dataclasses.dataclass(frozen=True)
class MergeUpdate(_TwoStreamUpdate):
    r"""The relaxed ADMM network,

    .. math:: x'^+ = T'(x') + A, \qquad x^+ = T(x) + A, \qquad A_k = \delta_k A_{k-1} + \alpha_k x'_k + \beta_k x_k .

    :math:`\delta = 1` is eq. (20), whose sums over all past iterates are one running sum. :math:`\delta = 0` and
    :math:`\alpha = \beta = \tfrac12` is DMRNet. Both streams start at the input, so they differ only if they have
    separate blocks (:class:`~minimand.nn.blocks.TwoStreamBlock`). The network returns :math:`\tfrac12(x' + x)`.

    Args:
        first: α.
        second: β.
        memory: δ, used from the second update on.

    Source: [Lin2019], eq. (20); Zhao et al., *Deep convolutional neural networks with merge-and-run mappings*, 2016.
    """

    first: float = 0.5
    second: float = 0.5
    memory: float = 0.0

    def __post_init__(self) -> None:
        require_number("first", self.first)
        require_number("second", self.second)
        require_number("memory", self.memory)

    def coefficients(self, place: Place, learned: bool) -> tuple[float, ...]:
        """The weights of both iterates and of the sum."""
        return (self.first, self.second) if place.step == 0 else (self.first, self.second, self.memory)

    def combine(
        self, state: TwoStreamState, values: tuple[Tensor, ...], weights: tuple[Weight, ...], prox: Prox
    ) -> TwoStreamState:
        """Merge and run."""
        total = accumulate(weights[0] * state.first, weights[1], state.x)
        if state.sum is not None:
            total = accumulate(total, weights[2], state.sum)
        return TwoStreamState(prox(values[1] + total), prox(values[0] + total), total)

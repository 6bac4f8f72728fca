r"""The updates of 002 as records: how a network goes on from what its block returns.

Every update answers four questions. Where are the blocks evaluated (``points``)? What follows from their values
(``combine``)? What does the iteration start from, and start anew from where the shape changes (``start``)? Which
coefficients has it (``coefficients``)? None of them loops; :func:`~minimand.solvers.iterate.iterate` does.
"""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from ...errors import OptionError
from ...linalg import Weight
from ...solvers.momentum import extrapolate, heavy_ball, nesterov_schedule

__all__ = [
    "GradientUpdate",
    "HeavyBallUpdate",
    "NesterovUpdate",
    "Place",
    "Prox",
    "Update",
    "require_number",
]

#: The activation after an update: the prox of a proximal algorithm.
Prox = Callable[[Tensor], Tensor]


def require_number(name: str, value: float, otherwise: str = "") -> None:
    """Refuse a coefficient that is no finite number; ``otherwise`` says what else it may be."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise OptionError(f"{name} is a finite number{otherwise}, got {value!r}")


class Place(NamedTuple):
    """Which update of a network: its number since the start or the last change of shape, how many blocks there are,
    and whether its block changes the shape."""

    step: int
    steps: int
    changes: bool = False


class Update(abc.ABC):
    """How iterates follow from the values of the blocks.

    Attributes:
        streams: How many iterates run side by side.
        skips: Whether the values are added to earlier iterates, so that a change of shape needs a shortcut.
    """

    streams: ClassVar[int] = 1
    skips: ClassVar[bool] = True

    @abc.abstractmethod
    def coefficients(self, place: Place, learned: bool) -> tuple[float, ...]:
        """The values of an update's coefficients in the algorithm."""

    @abc.abstractmethod
    def start(self, x: tuple[Tensor, ...], learned: bool) -> Any:
        """The state of an iteration that begins at ``x``."""

    @abc.abstractmethod
    def points(self, state: Any, weights: tuple[Weight, ...]) -> tuple[Tensor, ...]:
        """Where the block is evaluated, per stream."""

    @abc.abstractmethod
    def combine(self, state: Any, values: tuple[Tensor, ...], weights: tuple[Weight, ...], prox: Prox) -> Any:
        """The next state, from the values of the block."""

    def output(self, state: Any) -> Tensor:
        """What the network returns."""
        x: Tensor = state[0]
        return x

    def groups(self, place: Place, learned: bool) -> tuple[int, ...]:
        """How many coefficients, one after the other, have a sum that keeps the fixed points: all of them."""
        return (len(self.coefficients(place, learned)),)

    def check(self, value: Tensor, state: Any, weights: tuple[Weight, ...]) -> str | None:
        """What is wrong with the value of a block that meets the iterates of ``state``; None if nothing."""
        return differs(value, state[0]) if self.skips else None


def differs(value: Tensor, x: Tensor) -> str | None:
    """What a block does that does not keep the shape."""
    return None if value.shape == x.shape else f"maps {tuple(x.shape)} to {tuple(value.shape)}"


@dataclasses.dataclass(frozen=True)
class GradientUpdate(Update):
    r"""Gradient descent, :math:`x^+ = T(x)`: a plain feed-forward network.

    Source: 002, Lemma 4.
    """

    skips: ClassVar[bool] = False

    def coefficients(self, place: Place, learned: bool) -> tuple[float, ...]:
        """None."""
        return ()

    def start(self, x: tuple[Tensor, ...], learned: bool) -> tuple[Tensor]:
        """The point."""
        return (x[0],)

    def points(self, state: tuple[Tensor], weights: tuple[Weight, ...]) -> tuple[Tensor, ...]:
        """At the point."""
        return state

    def combine(
        self, state: tuple[Tensor], values: tuple[Tensor, ...], weights: tuple[Weight, ...], prox: Prox
    ) -> tuple[Tensor]:
        """The value itself."""
        return (prox(values[0]),)


def _split(current: Weight, past: Weight) -> tuple[Weight, Weight]:
    r""":math:`\mu = -\beta_2` and :math:`\kappa = \beta_1 + \beta_2`, which is 0 or 1 in the algorithms."""
    keep = current + past
    # Rounding of the sum would cost the exact fixed points.
    if not isinstance(keep, Tensor) and abs(keep - round(keep)) < 1e-14:
        keep = float(round(keep))
    return -past, keep


class Pair(NamedTuple):
    """The last two iterates."""

    x: Tensor
    previous: Tensor


@dataclasses.dataclass(frozen=True)
class HeavyBallUpdate(Update):
    r"""The heavy ball, :math:`x^+ = T(x) + \beta_1 x + \beta_2 x_-`, from :math:`x_- = x_0`.

    Args:
        current: :math:`\beta_1`.
        past: :math:`\beta_2`. The algorithm has :math:`\beta_1 = -\beta_2`, and ½ is what
            :class:`~minimand.solvers.HeavyBall` takes; :math:`(1, 0)` is ResNet.

    Source: 002, eq. (16).
    """

    current: float = 0.5
    past: float = -0.5

    def __post_init__(self) -> None:
        require_number("current", self.current)
        require_number("past", self.past)

    def coefficients(self, place: Place, learned: bool) -> tuple[float, ...]:
        """The same two everywhere."""
        return self.current, self.past

    def start(self, x: tuple[Tensor, ...], learned: bool) -> Pair:
        """At rest."""
        return Pair(x[0], x[0])

    def points(self, state: Pair, weights: tuple[Weight, ...]) -> tuple[Tensor, ...]:
        """At the last iterate."""
        return (state.x,)

    def combine(self, state: Pair, values: tuple[Tensor, ...], weights: tuple[Weight, ...], prox: Prox) -> Pair:
        """Polyak's update."""
        momentum, keep = _split(*weights)
        return Pair(prox(heavy_ball(values[0], state.x, state.previous, momentum, keep)), state.x)


@dataclasses.dataclass(frozen=True)
class NesterovUpdate(Update):
    r"""Nesterov's method in two terms, :math:`x^+ = T(\beta_1 x + \beta_2 x_-)`.

    Args:
        momentum: :math:`\beta` in :math:`\beta_1 = 1 + \beta,\ \beta_2 = -\beta`; automatic: Nesterov's growing
            :math:`\beta_k = (t_k - 1)/t_{k+1}`.

    Source: 002, Nesterov's update and its relaxation.
    """

    skips: ClassVar[bool] = False
    momentum: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.momentum != "auto":
            require_number("momentum", self.momentum, ' or "auto"')

    def coefficients(self, place: Place, learned: bool) -> tuple[float, ...]:
        """The weights of the last two iterates."""
        momentum = nesterov_schedule(place.steps)[place.step] if self.momentum == "auto" else self.momentum
        return 1 + momentum, -momentum

    def start(self, x: tuple[Tensor, ...], learned: bool) -> Pair:
        """At rest."""
        return Pair(x[0], x[0])

    def points(self, state: Pair, weights: tuple[Weight, ...]) -> tuple[Tensor, ...]:
        """Ahead of the last iterate."""
        return (extrapolate(state.x, state.previous, *_split(*weights)),)

    def combine(self, state: Pair, values: tuple[Tensor, ...], weights: tuple[Weight, ...], prox: Prox) -> Pair:
        """The value itself."""
        return Pair(prox(values[0]), state.x)

    def check(self, value: Tensor, state: Pair, weights: tuple[Weight, ...]) -> str | None:
        """Two iterates are added, so all have one shape."""
        return differs(value, state.x)

r"""The update rules of [Lin2019]: gradient descent, the heavy ball and Nesterov's method.

An update defines the points at which blocks are evaluated (``points``), the next state from their values
(``combine``), the state at the input and after a change of shape (``start``), and its ``coefficients``. The loop over
the blocks is :func:`~minimand.solvers.iterate.iterate`.
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

__all__ = ["GradientUpdate", "HeavyBallUpdate", "NesterovUpdate", "Place", "Prox", "Update", "require_number"]

#: The activation after an update, the prox of a proximal algorithm.
Prox = Callable[[Tensor], Tensor]


def require_number(name: str, value: float, otherwise: str = "") -> None:
    """Check that a coefficient is a finite number; ``otherwise`` names the other values that are allowed."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise OptionError(f"{name} must be a finite number{otherwise}, got {value!r}")


class Place(NamedTuple):
    """The position of an update: its index since the start or the last change of shape, the number of blocks, and
    whether its block changes the shape."""

    step: int
    steps: int
    changes: bool = False


class Update(abc.ABC):
    """The rule that computes the next iterate from the values of the blocks.

    Attributes:
        streams: The number of iterates that run in parallel.
        skips: Whether earlier iterates are added to the values, so that a change of shape needs a shortcut.
    """

    streams: ClassVar[int] = 1
    skips: ClassVar[bool] = True

    @abc.abstractmethod
    def coefficients(self, place: Place, learned: bool) -> tuple[float, ...]:
        """The coefficients of the algorithm, or the initial ones of learned coefficients."""

    @abc.abstractmethod
    def start(self, x: tuple[Tensor, ...], learned: bool) -> Any:
        """The state at the start of an iteration from ``x``."""

    @abc.abstractmethod
    def points(self, state: Any, weights: tuple[Weight, ...]) -> tuple[Tensor, ...]:
        """The point at which the block is evaluated, per stream."""

    @abc.abstractmethod
    def combine(self, state: Any, values: tuple[Tensor, ...], weights: tuple[Weight, ...], prox: Prox) -> Any:
        """The next state, computed from the values of the block."""

    def output(self, state: Any) -> Tensor:
        """The output of the network."""
        x: Tensor = state[0]
        return x

    def groups(self, place: Place, learned: bool) -> tuple[int, ...]:
        """The sizes of groups of coefficients whose constant sums keep the fixed points; default: one group."""
        return (len(self.coefficients(place, learned)),)

    def check(self, value: Tensor, state: Any, weights: tuple[Weight, ...]) -> str | None:
        """The reason why the value of a block does not fit the iterates of ``state``; None if it fits."""
        return shape_change(value, state[0]) if self.skips else None


def shape_change(value: Tensor, x: Tensor) -> str | None:
    """A description of a change of shape; None if the shape is kept."""
    return None if value.shape == x.shape else f"maps {tuple(x.shape)} to {tuple(value.shape)}"


@dataclasses.dataclass(frozen=True)
class GradientUpdate(Update):
    r"""Gradient descent, :math:`x^+ = T(x)`: a plain feed-forward network.

    Source: [Lin2019], Lemma 4.
    """

    skips: ClassVar[bool] = False

    def coefficients(self, place: Place, learned: bool) -> tuple[float, ...]:
        """No coefficients."""
        return ()

    def start(self, x: tuple[Tensor, ...], learned: bool) -> tuple[Tensor]:
        """The iterate."""
        return (x[0],)

    def points(self, state: tuple[Tensor], weights: tuple[Weight, ...]) -> tuple[Tensor, ...]:
        """The iterate."""
        return state

    def combine(
        self, state: tuple[Tensor], values: tuple[Tensor, ...], weights: tuple[Weight, ...], prox: Prox
    ) -> tuple[Tensor]:
        """The value itself."""
        return (prox(values[0]),)


def _split(current: Weight, past: Weight) -> tuple[Weight, Weight]:
    r""":math:`\mu = -\beta_2` and :math:`\kappa = \beta_1 + \beta_2`, which is 0 or 1 in the algorithms."""
    keep = current + past
    # A rounded sum would change the fixed points.
    if not isinstance(keep, Tensor) and abs(keep - round(keep)) < 1e-14:
        keep = float(round(keep))
    return -past, keep


class IteratePair(NamedTuple):
    """The last two iterates."""

    x: Tensor
    previous: Tensor


class _TwoIterateUpdate(Update):
    """An update that uses the last two iterates."""

    def start(self, x: tuple[Tensor, ...], learned: bool) -> IteratePair:
        """Both iterates at the start, so that there is no momentum."""
        return IteratePair(x[0], x[0])


@dataclasses.dataclass(frozen=True)
class HeavyBallUpdate(_TwoIterateUpdate):
    r"""The heavy ball, :math:`x^+ = T(x) + \beta_1 x + \beta_2 x_-`, from :math:`x_- = x_0`.

    Args:
        current: :math:`\beta_1`.
        past: :math:`\beta_2`. The algorithm has :math:`\beta_1 = -\beta_2`; ½ is the default of
            :class:`~minimand.solvers.HeavyBall`. :math:`(1, 0)` is ResNet.

    Source: [Lin2019], eq. (16).
    """

    current: float = 0.5
    past: float = -0.5

    def __post_init__(self) -> None:
        require_number("current", self.current)
        require_number("past", self.past)

    def coefficients(self, place: Place, learned: bool) -> tuple[float, ...]:
        """The same two for every update."""
        return self.current, self.past

    def points(self, state: IteratePair, weights: tuple[Weight, ...]) -> tuple[Tensor, ...]:
        """The last iterate."""
        return (state.x,)

    def combine(
        self, state: IteratePair, values: tuple[Tensor, ...], weights: tuple[Weight, ...], prox: Prox
    ) -> IteratePair:
        """Polyak's update."""
        momentum, keep = _split(*weights)
        return IteratePair(prox(heavy_ball(values[0], state.x, state.previous, momentum, keep)), state.x)


@dataclasses.dataclass(frozen=True)
class NesterovUpdate(_TwoIterateUpdate):
    r"""Nesterov's method in two terms, :math:`x^+ = T(\beta_1 x + \beta_2 x_-)`.

    Args:
        momentum: :math:`\beta` in :math:`\beta_1 = 1 + \beta,\ \beta_2 = -\beta`; ``"auto"``: Nesterov's growing
            :math:`\beta_k = (t_k - 1)/t_{k+1}`.

    Source: [Lin2019], Nesterov's update and its relaxation.
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

    def points(self, state: IteratePair, weights: tuple[Weight, ...]) -> tuple[Tensor, ...]:
        """The extrapolated iterate."""
        return (extrapolate(state.x, state.previous, *_split(*weights)),)

    def combine(
        self, state: IteratePair, values: tuple[Tensor, ...], weights: tuple[Weight, ...], prox: Prox
    ) -> IteratePair:
        """The value itself."""
        return IteratePair(prox(values[0]), state.x)

    def check(self, value: Tensor, state: IteratePair, weights: tuple[Weight, ...]) -> str | None:
        """Two iterates are added, so the block must keep the shape."""
        return shape_change(value, state.x)

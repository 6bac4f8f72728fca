"""Options of lifted training, the record of an epoch, and checks of arguments."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from numbers import Real
from typing import Any

from torch import Tensor

from ...arguments import checked
from ...errors import OptionError

__all__ = ["NO_BATCH", "Epoch", "Recipe", "batches", "check_loader", "weights_per_layer"]

NO_BATCH = "loader holds no batch; pass a list or a DataLoader of (x, y)"
_PAIRS = "loader must yield pairs (x, y) of tensors; wrap a single batch as [(x, y)]"


@dataclasses.dataclass(frozen=True)
class Epoch:
    """The record of one epoch of :meth:`Lifted.fit`.

    ``energy`` is the mean energy per sample over the epoch. In mode ``"fast"`` a batch's energy is measured before its
    update, where it is the loss of the forward pass; in mode ``"monotone"`` after the update. ``loss`` is the network's
    own loss per sample, measured at the same time.
    """

    number: int
    energy: float
    seconds: float
    loss: float = math.nan


@checked
@dataclasses.dataclass(frozen=True)
class Recipe:
    r"""Options of :meth:`Lifted.fit`.

    Args:
        ratio: The factor from one layer's :math:`\mu` to the next layer's; the output layer has :math:`\mu = 1`.
        damping: The ridge of the weight regression relative to the mean diagonal entry of the layer's Gram matrix, one
            number or one per layer. None: the method's default; for LPOM 5 for the squared loss, 3 for cross-entropy.
        momentum: The momentum of the heavy-ball update of the weights.
        rate: The initial learning rate; it decays to zero along half a cosine.
        sweeps: Sweeps over the auxiliary variables per batch. None: the method's default.
        block: The number of rows of a weight regression that are solved together; see
            :func:`~minimand.train.lifted.weights.regress`.
        continuation: The factor by which the mode ``"monotone"`` raises all :math:`\mu` when a step has raised the
            network's loss; the step is then taken back and tried again. 1: never.
    """

    ratio: float = 10.0
    damping: float | Sequence[float] | None = None
    momentum: float = 0.95
    rate: float = 1.0
    sweeps: int | None = None
    block: int = 64
    continuation: float = 2.0

    def __post_init__(self) -> None:
        for name in ("ratio", "rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise OptionError(f"Recipe.{name} must be a finite number > 0, got {getattr(self, name)}")
        given = self.damping
        values = () if given is None else (given,) if isinstance(given, int | float) else tuple(given)
        if not all(0 < value < math.inf for value in values):
            raise OptionError(f"Recipe.damping must be None or finite and > 0 in every layer, got {self.damping}")
        if not 1 <= self.continuation < math.inf:
            raise OptionError(f"Recipe.continuation must be a finite number ≥ 1, got {self.continuation}")
        if not 0 <= self.momentum < 1:
            raise OptionError(f"Recipe.momentum must lie in [0, 1), got {self.momentum}")
        if self.sweeps is not None and self.sweeps < 1:
            raise OptionError(f"Recipe.sweeps must be None or at least 1, got {self.sweeps}")
        if self.block < 1:
            raise OptionError(f"Recipe.block must be at least 1, got {self.block}")

    def rate_at(self, progress: float) -> float:
        """The learning rate after this fraction of the training."""
        return self.rate * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def check_loader(loader: Iterable[Any], epochs: int) -> None:
    """Raise OptionError if the loader cannot be iterated ``epochs`` times."""
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 0:
        raise OptionError(f"epochs must be a whole number ≥ 0, got {epochs!r}")
    if not isinstance(loader, Iterable) or isinstance(loader, Tensor | str):
        raise OptionError(f"{_PAIRS}, got a {type(loader).__name__}")
    if epochs > 1 and iter(loader) is loader:
        raise OptionError("loader is an iterator, which is exhausted after one epoch; pass a list or a DataLoader")
    if length(loader) == 0:
        raise OptionError(NO_BATCH)


def length(loader: Iterable[Any]) -> int | None:
    """The number of batches; None if it is not known before they are iterated."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader of a stream
        return None


def batches(loader: Iterable[Any], epoch: int, epochs: int) -> Iterator[tuple[Tensor, Tensor, float]]:
    """The batches of an epoch, each checked to be a pair, with the fraction of the training that has passed."""
    size = length(loader)
    for index, batch in enumerate(loader):
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            held = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
            raise OptionError(f"{_PAIRS}, got a {type(batch).__name__}{held}")
        x, y = batch
        yield x, y, (epoch - 1 + (index / size if size else 0.5)) / epochs


def weights_per_layer(mu: float | Sequence[float] | Tensor, layers: int) -> tuple[float, ...]:
    """The penalty weights of all layers, from one number or one number per layer.

    >>> weights_per_layer(2.0, 3)
    (2.0, 2.0, 2.0)
    """
    given: Any = mu.tolist() if isinstance(mu, Tensor) else mu
    entries = [given] * layers if isinstance(given, Real) else list(given)
    if any(isinstance(entry, bool) or not isinstance(entry, Real) for entry in entries):
        raise OptionError(f"mu must be a number or one number per layer, got {mu!r}")
    values = tuple(float(entry) for entry in entries)
    if len(values) != layers:
        raise OptionError(
            f"mu has {len(values)} entries, but the network has {layers} layers; give one number per layer"
        )
    bad = [m for m in values if not 0 < m < math.inf]
    if bad:
        raise OptionError(f"mu must be finite and > 0 in every layer, got {bad[0]}")
    return values

"""What every lifted training method has in common: a chain, auxiliary variables for a batch, ``step`` and ``fit``."""

import abc
import dataclasses
import math
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from ...errors import NonFiniteError, OptionError, ShapeError, require_finite
from .chain import parse
from .losses import LOSSES, Loss, encode_targets
from .maps import AffineMap
from .progress import track
from .weights import Direction, Momentum, toward

__all__ = ["Epoch", "Lifted", "Recipe", "Variables", "weights_per_layer"]

MODES = ("fast", "monotone")
#: The ridge of a full weight step, relative to the Gram's mean eigenvalue.
TINY = 1e-6


@dataclasses.dataclass
class Variables:
    """A batch's activations from the input to the output, its maps and its loss: what SGD would keep, too."""

    xs: list[Tensor]
    maps: list[AffineMap]
    loss: Loss

    @property
    def output(self) -> Tensor:
        """The last activation, the network's output as an auxiliary variable."""
        return self.xs[-1]


@dataclasses.dataclass(frozen=True)
class Epoch:
    """What an epoch of :meth:`Lifted.fit` reports.

    ``energy`` is the mean over its batches of the energy per sample: in mode ``"fast"`` before the batch's
    update, where it is the loss of the forward pass; in mode ``"monotone"`` after it.
    """

    number: int
    energy: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Recipe:
    r"""Options of the mini-batch mode.

    Args:
        ratio: Each layer's :math:`\mu` is that of the layer below times this, up to 1 at the output.
        damping: The weight step's ridge :math:`\varepsilon` per row; None is 5 for the squared loss, 20 for
            cross-entropy.
        momentum: Of the heavy ball on the weights.
        rate: The first learning rate; it falls to zero along half a cosine.
        sweeps: Sweeps over the auxiliary variables for each batch; None is the method's own default.
        block: Rows of a weight regression that are solved together, see :func:`~minimand.train.lifted.weights.regress`.
    """

    ratio: float = 10.0
    damping: float | None = None
    momentum: float = 0.95
    rate: float = 1.0
    sweeps: int | None = None
    block: int = 64

    def __post_init__(self) -> None:
        for name in ("ratio", "rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise OptionError(f"Recipe.{name} must be a finite number > 0, got {getattr(self, name)}")
        if self.damping is not None and not 0 < self.damping < math.inf:
            raise OptionError(f"Recipe.damping must be None or a finite number > 0, got {self.damping}")
        if not 0 <= self.momentum < 1:
            raise OptionError(f"Recipe.momentum must lie in [0, 1), got {self.momentum}")
        if self.sweeps is not None and self.sweeps < 1:
            raise OptionError(f"Recipe.sweeps must be None or at least 1, got {self.sweeps}")
        if self.block < 1:
            raise OptionError(f"Recipe.block must be at least 1, got {self.block}")

    def rate_at(self, progress: float) -> float:
        """The learning rate after a share of the training."""
        return self.rate * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


V = TypeVar("V", bound=Variables)


class Lifted(abc.ABC, Generic[V]):
    """Training without backpropagation: the activations are variables, and blocks of an energy are minimised.

    Concrete methods say how variables start, what the energy is, how one sweep moves the auxiliary variables,
    and in which direction each layer's weight moves.
    """

    #: Sweeps over the auxiliary variables per mini-batch.
    default_sweeps: ClassVar[int] = 1

    def __init__(
        self, model: nn.Module, *, mu: float | Sequence[float] | None, loss: str, recipe: Recipe | None
    ) -> None:
        self.model = model
        self.chain = parse(model)
        if loss not in LOSSES:
            raise OptionError(f"loss must be one of {', '.join(LOSSES)}, got {loss!r}")
        self.loss = loss
        self.recipe = Recipe() if recipe is None else recipe
        self._given_mu = None if mu is None else weights_per_layer(mu, len(self.chain))
        self.mu = self._given_mu or (1.0,) * len(self.chain)
        self._variables: V | None = None
        self._batch: tuple[weakref.ref[Tensor], int, weakref.ref[Tensor], int] | None = None

    @abc.abstractmethod
    def _start(self, xs: list[Tensor], zs: list[Tensor], maps: list[AffineMap], loss: Loss) -> V:
        """The variables of a batch at its forward pass."""

    @abc.abstractmethod
    def _energy(self, v: V) -> Tensor:
        """The energy of a batch."""

    @abc.abstractmethod
    def _sweep(self, v: V) -> None:
        """Move every block of auxiliary variables once, from the output to the input."""

    @abc.abstractmethod
    def _residuals(self, v: V) -> Iterator[tuple[Tensor, Tensor]]:
        """For each layer the x at which its map is regressed, and by what its z is to move."""

    def _directions(self, v: V, damping: float, block: int | None) -> list[Direction]:
        """In which direction the weights of each layer move; the damping as in :func:`~.weights.toward`."""
        pairs = zip(v.maps, self._residuals(v), strict=True)
        return [toward(affine, x, residual, damping, block=block) for affine, (x, residual) in pairs]

    def _move_weights(self, v: V) -> None:
        """Minimise the energy over the weights of every layer, or a majoriser of it."""
        for affine, direction in zip(v.maps, self._directions(v, TINY, None), strict=True):
            affine.layer.assign(affine.layer.parameters() + direction.dense())

    def _multipliers(self, v: V) -> None:
        """Ascend in the multipliers, where a method has them."""

    def _minibatch(self, v: V, damping: float) -> list[Direction]:
        """Directions for the weights from a batch that has just been through the forward pass."""
        for _ in range(self.recipe.sweeps or self.default_sweeps):
            self._sweep(v)
            self._multipliers(v)
        return self._directions(v, damping, self.recipe.block)

    def _after_epoch(self) -> None:
        """What a method does between epochs, such as raising its penalty."""

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor) -> float:
        """One sweep over all blocks, weights included; the energy after it.

        The auxiliary variables continue when ``x`` and ``y`` are the tensors of the call before, unchanged; otherwise
        they start from the forward pass.

        Raises:
            NonFiniteError: If the energy is no longer finite; the weights are those from before the step.
        """
        v = self._variables_of(x, y)
        kept = [layer.parameters() for layer in self.chain.layers]

        def restore() -> None:
            self._variables = self._batch = None
            for layer, parameters in zip(self.chain.layers, kept, strict=True):
                layer.assign(parameters)

        try:
            self._sweep(v)
            self._require_finite(v, "activation")
            self._move_weights(v)
            self._multipliers(v)
            energy = float(self._energy(v))
            if not math.isfinite(energy):
                self._require_finite(v, "activation")
                for layer in self.chain.layers:
                    require_finite(f"the weight update of {layer.path}", layer.parameters())
                raise NonFiniteError(f"the energy is {energy}; lower mu or scale the inputs")
        except (NonFiniteError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            restore()
            raise NonFiniteError(f"step stopped, the weights are those from before it: {error}") from None
        return energy

    @torch.no_grad()
    def energy(self, x: Tensor, y: Tensor) -> float:
        """The energy at the auxiliary variables of the batch, or at the forward pass of a new one."""
        if self._variables is not None and self._continues(x, y):
            return float(self._energy(self._variables))
        return float(self._energy(self._fresh(x, y)))

    def fit(
        self, loader: Iterable[tuple[Tensor, Tensor]], epochs: int, mode: str = "fast", *, progress: bool = False
    ) -> list[Epoch]:
        """Train for some epochs over any iterable of batches; it is iterated once an epoch.

        Args:
            loader: Batches (x, y).
            epochs: How often.
            mode: ``"fast"``: mini-batches with momentum; ``"monotone"``: :meth:`step` on each batch.
            progress: Show a progress bar, where rich is installed and the output is a terminal.
        """
        return list(track(self.training(loader, epochs, mode), epochs, show=progress))

    def training(self, loader: Iterable[tuple[Tensor, Tensor]], epochs: int, mode: str = "fast") -> Iterator[Epoch]:
        """:meth:`fit` as a generator that yields after each epoch, to evaluate or to stop in between."""
        if mode not in MODES:
            raise OptionError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 0:
            raise OptionError(f"epochs must be a whole number ≥ 0, got {epochs!r}")
        if epochs > 1 and iter(loader) is loader:
            raise OptionError("loader is an iterator, which ends after one epoch; pass a list or a DataLoader")
        run = _Fast(self) if mode == "fast" else None
        for number in range(1, epochs + 1):
            begin, total, samples = time.perf_counter(), 0.0, 0
            size = len(loader) if isinstance(loader, Sized) else None
            for index, (x, y) in enumerate(loader):
                share = (number - 1 + (index / size if size else 0.5)) / epochs
                total += self.step(x, y) if run is None else run.batch(x, y, share)
                samples += x.shape[0]
            if samples == 0:
                raise OptionError("loader holds no batch; pass a list or a DataLoader of (x, y)")
            self._after_epoch()
            yield Epoch(number, total / samples, time.perf_counter() - begin)

    def _mini_mu(self) -> tuple[float, ...]:
        """The penalty weights of the mini-batch mode: the given ones, or geometric towards the output."""
        top = len(self.chain) - 1
        return self._given_mu or tuple(self.recipe.ratio ** (k - top) for k in range(top + 1))

    def _damping(self) -> float:
        default = 5.0 if self.loss == "squared" else 20.0
        return default if self.recipe.damping is None else self.recipe.damping

    def _variables_of(self, x: Tensor, y: Tensor) -> V:
        if self._variables is None or not self._continues(x, y):
            self._variables = self._fresh(x, y)
            self._batch = (weakref.ref(x), x._version, weakref.ref(y), y._version)
        return self._variables

    def _continues(self, x: Tensor, y: Tensor) -> bool:
        if self._batch is None:
            return False
        first, first_version, second, second_version = self._batch
        same = first() is x and second() is y
        return same and (x._version, y._version) == (first_version, second_version)

    def _fresh(self, x: Tensor, y: Tensor, check: bool = True) -> V:
        first = self.chain.layers[0]
        if x.dtype != first.weight.dtype:
            raise ShapeError(
                f"x is {x.dtype}, but the weight of {first.path} is {first.weight.dtype}; convert one of them"
            )
        if check:
            require_finite("the input x", x)
            for layer in self.chain.layers:
                require_finite(f"the weight of {layer.path}", layer.weight)
        xs, zs, maps = self.chain.forward(x.detach())
        target = encode_targets(y, xs[-1])
        return self._start(xs, zs, maps, LOSSES[self.loss](target))

    def _require_finite(self, v: V, what: str) -> None:
        for layer, x in zip(self.chain.layers, v.xs[1:], strict=True):
            require_finite(f"the {what} update of {layer.path}", x)


class _Fast:
    """The mini-batch mode: directions from each batch, momentum, a falling rate."""

    def __init__(self, method: Lifted[V]) -> None:
        self.method = method
        self.layers = method.chain.layers
        self.momentum = Momentum(self.layers, method.recipe.momentum)

    @torch.no_grad()
    def batch(self, x: Tensor, y: Tensor, share: float) -> float:
        method = self.method
        kept, method.mu = method.mu, method._mini_mu()
        try:
            v = method._fresh(x, y, check=False)
            value = float(v.loss.value(v.output))
            if not math.isfinite(value):
                self._blame(x, v)
            rate = method.recipe.rate_at(share)
            rates = [rate / layer.unit.slope for layer in self.layers]
            self.momentum.apply(method._minibatch(v, method._damping()), rates)
        except (NonFiniteError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            raise NonFiniteError(
                f"fit stopped, the weights are the last good ones: {error}; lower Recipe.rate or raise Recipe.damping"
            ) from None
        finally:
            method.mu = kept
        return value

    def _blame(self, x: Tensor, v: Variables) -> None:
        """Name what is not finite; weights that gave it are taken back to those before the last update."""
        require_finite("the input x", x)
        for layer in self.layers:
            require_finite(f"the weight of {layer.path}", layer.weight)
        self.momentum.undo()
        for layer, value in zip(self.layers, v.xs[1:], strict=True):
            require_finite(f"the forward pass of {layer.path} after the last weight update", value)
        raise NonFiniteError("the loss is NaN or Inf after the last weight update")


def weights_per_layer(mu: float | Sequence[float], layers: int) -> tuple[float, ...]:
    """One penalty weight per layer, from one number or one per layer.

    >>> weights_per_layer(2.0, 3)
    (2.0, 2.0, 2.0)
    """
    values = (float(mu),) * layers if isinstance(mu, int | float) else tuple(float(m) for m in mu)
    if len(values) != layers:
        raise OptionError(f"mu has {len(values)} entries, but the network has {layers} layers; give one for each")
    bad = [m for m in values if not 0 < m < math.inf]
    if bad:
        raise OptionError(f"mu must be finite and > 0 in every layer, got {bad[0]}")
    return values

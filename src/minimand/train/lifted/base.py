"""The base class of lifted training methods: auxiliary variables of a batch, ``step``, ``energy`` and ``fit``."""

import abc
import dataclasses
import math
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from ...arguments import check_methods, checked
from ...errors import (
    CapabilityError,
    MinimandError,
    NonFiniteError,
    OptionError,
    Sealed,
    ShapeError,
    require_finite,
    require_values,
)
from .chain import parse
from .losses import LOSSES, Loss, encode_targets
from .maps import AffineMap, update_running_statistics
from .options import NO_BATCH, Epoch, Recipe, batches, check_loader, weights_per_layer
from .weights import Direction, MomentumUpdate, weight_directions

__all__ = ["Lifted", "Variables", "plain_tensor"]

MODES = ("fast", "monotone")
#: The ridge of a full weight step, relative to the mean eigenvalue of the Gram matrix.
RELATIVE_RIDGE = 1e-6


@dataclasses.dataclass
class Variables:
    """The activations of a batch from input to output, the layers' maps on it, and its loss."""

    xs: list[Tensor]
    maps: list[AffineMap]
    loss: Loss

    @property
    def output(self) -> Tensor:
        """The last activation: the network's output as an auxiliary variable."""
        return self.xs[-1]


V = TypeVar("V", bound=Variables)


def plain_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, detached, or a copy if it was made in inference mode, where autograd could not use it."""
    if not isinstance(tensor, Tensor):
        return tensor
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def _stamp(tensor: Tensor) -> int | Tensor:
    """What tells whether a tensor has changed since: its version; for a tensor of inference mode its values."""
    return tensor.clone() if tensor.is_inference() else tensor._version


class Lifted(Sealed, abc.ABC, Generic[V]):
    """Training by block-coordinate descent on an energy in which the activations are variables.

    A concrete method defines the start of the variables, the energy, one sweep over the auxiliary variables, and the
    direction in which each layer's weight moves. A sweep visits blocks in turn; it is not a solve in the grammar.
    """

    #: Sweeps over the auxiliary variables per mini-batch.
    default_sweeps: ClassVar[int] = 1

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_methods(cls, "__init__")

    @checked
    def __init__(
        self,
        model: nn.Module,
        *,
        mu: float | Sequence[float] | None = None,
        loss: str = "squared",
        recipe: Recipe | None = None,
    ) -> None:
        self.model = model
        self.chain = parse(model)
        if loss not in LOSSES:
            raise OptionError(f"loss must be one of {', '.join(LOSSES)}, got {loss!r}")
        self.loss = loss
        self.recipe = Recipe() if recipe is None else recipe
        self._given_mu = None if mu is None else weights_per_layer(mu, len(self.chain))
        self._mu = self._given_mu or (1.0,) * len(self.chain)
        self._variables: V | None = None
        self._batch: tuple[tuple[weakref.ref[Tensor], int | Tensor], ...] | None = None
        self._weights: list[tuple[int, int]] = []
        self._check_layers()

    @property
    def mu(self) -> tuple[float, ...]:
        """The penalty weights of the layers."""
        return self._mu

    @abc.abstractmethod
    def _start(self, xs: list[Tensor], zs: list[Tensor], maps: list[AffineMap], loss: Loss) -> V:
        """The variables of a batch at its forward pass."""

    @abc.abstractmethod
    def _terms(self, v: V) -> Iterator[Tensor]:
        """The terms of a batch's energy: the loss, then one for each layer."""

    @abc.abstractmethod
    def _sweep(self, v: V) -> None:
        """Move every block of auxiliary variables once, from the output to the input."""

    @abc.abstractmethod
    def _residuals(self, v: V) -> Iterator[tuple[Tensor, Tensor]]:
        """For each layer the regression's input x and the target change of z at x."""

    def _check_layers(self) -> None:
        """Raise for layers that the method does not take."""

    def _energy(self, v: V) -> float:
        """The energy of a batch, summed in double precision."""
        return sum(float(term) for term in self._terms(v))

    def _weight_steps(
        self, layers: Sequence[tuple[AffineMap, Tensor, Tensor]], damping: float, block: int | None
    ) -> list[Direction]:
        """The weight directions of several layers, each given as (map, x, residual).

        :func:`~.weights.ridge_shift` defines the damping.
        """
        return weight_directions(layers, damping, block=block)

    def _directions(self, v: V, damping: float, block: int | None) -> list[Direction | None]:
        """The direction of each layer; None for a frozen layer."""
        frozen = [affine.layer.frozen for affine in v.maps]
        layers = zip(v.maps, self._residuals(v), frozen, strict=True)
        moving = [(affine, *pair) for affine, pair, kept in layers if not kept]
        found = iter(self._weight_steps(moving, damping, block))
        return [None if kept else next(found) for kept in frozen]

    def _move_weights(self, v: V) -> None:
        """Minimise the energy, or its majoriser, over the weights of every layer."""
        for affine, direction in zip(v.maps, self._directions(v, RELATIVE_RIDGE, None), strict=True):
            if direction is not None:
                affine.layer.assign(affine.layer.parameters() + direction.dense())

    def _multipliers(self, v: V) -> None:
        """Ascend in the multipliers, if the method has any."""

    def _minibatch(self, v: V, damping: float) -> list[Direction | None]:
        """The weight directions of a batch whose variables are at the forward pass."""
        for _ in range(self.recipe.sweeps or self.default_sweeps):
            self._sweep(v)
            self._multipliers(v)
        return self._directions(v, damping, self.recipe.block)

    def _before_fit(self) -> None:
        """Reset the state of an earlier fit."""

    def _after_epoch(self) -> None:
        """Update between epochs, for example raise the penalty."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor) -> float:
        """Sweep once over all blocks, weights included, and return the energy afterwards.

        The auxiliary variables continue from the previous call if ``x`` and ``y`` are the same tensors and neither they
        nor the network's parameters have changed since. Otherwise they start from the forward pass.

        Raises:
            NonFiniteError: If the energy is not finite. The weights are then restored to those before the step.
        """
        self.chain.require_trained()
        fresh = not self._is_same_batch(x, y)
        v = self._forward_variables(x, y) if fresh or self._variables is None else self._variables
        self._variables = None
        kept = [layer.parameters() for layer in self.chain.layers]
        try:
            self._sweep(v)
            self._require_finite(v)
            self._move_weights(v)
            self._multipliers(v)
            energy = self._energy(v)
            if not math.isfinite(energy):
                self._raise_nonfinite(v, energy)
        except (MinimandError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            for layer, parameters in zip(self.chain.layers, kept, strict=True):
                layer.assign(parameters)
            raise NonFiniteError(f"step stopped and restored the weights from before it: {error}") from None
        if fresh:
            update_running_statistics(v.maps)
        self._variables = v
        self._batch = tuple((weakref.ref(tensor), _stamp(tensor)) for tensor in (x, y))
        self._weights = self._parameter_versions()
        return energy

    @torch.inference_mode(False)
    @torch.no_grad()
    def energy(self, x: Tensor, y: Tensor) -> float:
        """The energy at the auxiliary variables of the last step's batch; for any other batch, at its forward pass."""
        if self._variables is not None and self._is_same_batch(x, y):
            return self._energy(self._variables)
        return self._energy(self._forward_variables(x, y))

    def fit(self, loader: Iterable[tuple[Tensor, Tensor]], epochs: int, mode: str = "fast") -> list[Epoch]:
        """Train for some epochs.

        Args:
            loader: An iterable of batches (x, y); it is iterated once per epoch.
            epochs: The number of epochs.
            mode: ``"fast"``: mini-batches with momentum; ``"monotone"``: :meth:`step` on each batch.
        """
        return list(self.training(loader, epochs, mode))

    def training(self, loader: Iterable[tuple[Tensor, Tensor]], epochs: int, mode: str = "fast") -> Iterator[Epoch]:
        """:meth:`fit` as a generator that yields after each epoch, for evaluation or early stopping."""
        if mode not in MODES:
            raise OptionError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        check_loader(loader, epochs)
        self.chain.require_trained()
        self._before_fit()
        run = _MiniBatchRun(self) if mode == "fast" else None
        for number in range(1, epochs + 1):
            begin, total, samples = time.perf_counter(), 0.0, 0
            for x, y, share in batches(loader, number, epochs):
                total += self.step(x, y) if run is None else run.batch(x, y, share)
                samples += x.shape[0]
            if samples == 0:
                raise OptionError(NO_BATCH)
            if run is not None:
                run.check(x, y)
            self._after_epoch()
            yield Epoch(number, total / samples, time.perf_counter() - begin)

    def _minibatch_mu(self) -> tuple[float, ...]:
        """The penalty weights of the mini-batch mode: the given ones, or a geometric sequence that ends at 1."""
        top = len(self.chain) - 1
        return self._given_mu or tuple(self.recipe.ratio ** (k - top) for k in range(top + 1))

    def _damping(self) -> float:
        default = 5.0 if self.loss == "squared" else 20.0
        return default if self.recipe.damping is None else self.recipe.damping

    def _is_same_batch(self, x: Tensor, y: Tensor) -> bool:
        if self._variables is None or self._batch is None:
            return False
        for tensor, (known, stamp) in zip((x, y), self._batch, strict=True):
            if known() is not tensor:
                return False
            if not (torch.equal(tensor, stamp) if isinstance(stamp, Tensor) else tensor._version == stamp):
                return False
        return self._weights == self._parameter_versions()

    def _parameter_versions(self) -> list[tuple[int, int]]:
        """Memory address and version of every parameter; they change when a parameter changes."""
        return [(parameter.data_ptr(), parameter._version) for parameter in self.model.parameters()]

    def _check_batch(self, x: Tensor, check: bool = True) -> None:
        """Raise for an input of the wrong kind; with ``check`` also for NaN and Inf in it or in the weights."""
        if not isinstance(x, Tensor) or not x.numel():
            found = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}; convert it"
            raise ShapeError(f"x must be a tensor of at least one sample, got {found}")
        require_values("x", x)
        for layer in self.chain.layers:
            kind = layer.module.weight.dtype
            if kind not in (torch.float32, torch.float64):
                raise CapabilityError(
                    f"the weight of {layer.path} is {kind}, but lifted training solves linear systems, which needs "
                    f"float32 or float64; convert the network with .float()"
                )
            if x.device != layer.module.weight.device:
                raise CapabilityError(f"x is on {x.device}, but {layer.path} on {layer.module.weight.device}; move one")
            if x.dtype != kind:
                raise ShapeError(f"x is {x.dtype}, but the weight of {layer.path} is {kind}; convert x or the network")
        if check:
            require_finite("the input x", x)
            for layer in self.chain.layers:
                require_finite(f"the weight and bias of {layer.path}", layer.parameters())

    def _forward_variables(self, x: Tensor, y: Tensor, check: bool = True) -> V:
        """The variables at the forward pass; running statistics do not change here."""
        self._check_batch(x, check)
        xs, zs, maps = self.chain.forward(plain_tensor(x))
        return self._start(xs, zs, maps, LOSSES[self.loss](encode_targets(plain_tensor(y), xs[-1], self.loss)))

    def _require_finite(self, v: V) -> None:
        for layer, x in zip(self.chain.layers, v.xs[1:], strict=True):
            require_finite(f"the activation update of {layer.path}", x)

    def _raise_nonfinite(self, v: V, energy: float) -> None:
        """Raise an error that names the layer and the update that made the energy infinite or NaN."""
        for layer in self.chain.layers:
            require_finite(f"the weight update of {layer.path}", layer.parameters())
        sizes = [abs(float(term)) for term in self._terms(v)]
        worst = max(range(len(sizes)), key=lambda k: math.inf if math.isnan(sizes[k]) else sizes[k])
        where = "the loss" if worst == 0 else f"the term of {self.chain.layers[worst - 1].path}"
        raise NonFiniteError(f"the energy is {energy}, and {where} is the largest part; lower mu or scale the inputs")


class _MiniBatchRun:
    """A run of the mini-batch mode: a direction from each batch, momentum, a decaying rate."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, method: Lifted[Any]) -> None:
        self.method = method
        self.layers = method.chain.layers
        self.momentum = MomentumUpdate(self.layers, method.recipe.momentum)
        self.updated = False

    def batch(self, x: Tensor, y: Tensor, share: float) -> float:
        """Update the weights from one batch and return the loss before the update."""
        method = self.method
        kept, method._mu = method.mu, method._minibatch_mu()
        try:
            return self._update(x, y, method.recipe.rate_at(share))
        finally:
            method._mu = kept

    @torch.inference_mode(False)
    @torch.no_grad()
    def _update(self, x: Tensor, y: Tensor, rate: float) -> float:
        method = self.method
        v, value = self._forward(x, y)
        try:
            directions = method._minibatch(v, method._damping())
            self.momentum.apply(directions, [rate / layer.unit.slope for layer in self.layers])
        except (MinimandError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            self._stop(error, v)
        self.updated = True
        update_running_statistics(v.maps)
        return value

    @torch.inference_mode(False)
    @torch.no_grad()
    def check(self, x: Tensor, y: Tensor) -> None:
        """Check that the loss is finite after the last update."""
        self._forward(x, y)

    def _forward(self, x: Tensor, y: Tensor) -> tuple[Variables, float]:
        """The variables of a batch and its loss; an update after which the loss overflows is undone."""
        v = self.method._forward_variables(x, y, check=False)
        value = float(v.loss.value(v.output))
        if not math.isfinite(value):
            require_finite("the input x", x)
            after = "the weight update" if self.updated else "the forward pass"
            try:
                for layer in self.layers:
                    require_finite(f"{after} of {layer.path}", layer.parameters())
                for layer, activation in zip(self.layers, v.xs[1:], strict=True):
                    require_finite(f"{after} of {layer.path} overflows: its activation", activation)
                raise NonFiniteError(f"{after} of {self.layers[-1].path} makes the loss {value}")
            except NonFiniteError as error:
                self.momentum.undo()
                self._stop(error)
        return v, value

    def _stop(self, error: Exception, v: Variables | None = None) -> NoReturn:
        reason = error
        if v is not None:
            try:
                self.method._require_finite(v)
            except NonFiniteError as earlier:
                reason = earlier
        raise NonFiniteError(
            f"fit stopped and kept the last good weights: {reason}; lower Recipe.rate or raise Recipe.damping"
        ) from None

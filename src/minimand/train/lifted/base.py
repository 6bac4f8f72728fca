"""The base class of lifted training methods: auxiliary variables of a batch, ``step``, ``energy`` and ``fit``."""

import abc
import math
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

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
from ...network.nested import tensors
from .chain import LayerChain, parse
from .gradient import RATIO, REDUCTIONS
from .losses import LOSSES, Loss, encode_targets
from .maps import AffineMap, LiftedLayer, update_running_statistics
from .options import NO_BATCH, Epoch, Recipe, batches, check_loader, weights_per_layer
from .runs import MiniBatchRun, MonotoneRun, OptimizerRun, Run, cause, check_optimizer
from .variables import Variables, batch_size, plain_tensor, plainly, stamp
from .weights import Direction, weight_directions

__all__ = ["Lifted", "Variables", "plain_tensor"]

MODES = ("fast", "monotone")

V = TypeVar("V", bound=Variables)


class Lifted(Sealed, abc.ABC, Generic[V]):
    """Training by block-coordinate descent on an energy in which the activations are variables.

    A concrete method defines the start of the variables, the energy, one sweep over the auxiliary variables, and the
    direction in which each layer's weight moves. A sweep visits blocks in turn; it is not a solve in the grammar.
    """

    #: Sweeps over the auxiliary variables per mini-batch.
    default_sweeps: ClassVar[int] = 1
    #: The relative damping of the mini-batch mode for the squared loss and for cross-entropy.
    default_damping: ClassVar[tuple[float, float]] = (5.0, 3.0)
    #: μ of the output layer in :meth:`step`, the factor from one layer's μ to the next layer's, and the sweeps.
    step_output, step_ratio, step_sweeps = 1.0, 1.0, 1
    #: The ridge of the weight step in :meth:`step`, relative to the mean eigenvalue of the Gram matrix.
    step_ridge = 1e-6

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
        if loss not in LOSSES:
            raise OptionError(f"loss must be one of {', '.join(LOSSES)}, got {loss!r}")
        self.loss = loss
        self.recipe = Recipe() if recipe is None else recipe
        self.chain = self._read(model)
        self._modules = tuple(model.modules())
        self._given_mu = None if mu is None else weights_per_layer(mu, self._count())
        self._mu = self._first_mu()
        self._damping()
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

    def _read(self, model: nn.Module) -> LayerChain:
        """The network as a chain of layers."""
        return parse(model)

    def _count(self) -> int:
        """The number of terms of the energy that have a μ."""
        return len(self.chain)

    def _require_trained(self) -> None:
        """Raise if nothing may move, or if the layers are no longer those of the network."""
        if list(map(id, self.model.modules())) != list(map(id, self._modules)):
            kind = type(self).__name__
            raise OptionError(f"a module of the network was replaced since {kind} read it; make the {kind} again")
        self.chain.require_trained()

    def _check_layers(self) -> None:
        """Raise for layers that the method does not take."""

    def _energy(self, v: V) -> float:
        """The energy of a batch, summed in double precision."""
        return sum(float(term) for term in self._terms(v))

    def _slopes(self, v: V) -> Iterator[tuple[Tensor, Tensor]]:
        """For each layer its input x and the derivative of the energy with respect to z."""
        for k, (x, residual) in enumerate(self._residuals(v)):
            yield x, -self.mu[k] * residual

    def _weight_steps(
        self, layers: Sequence[tuple[AffineMap, Tensor, Tensor]], damping: Sequence[float], block: int | None
    ) -> list[Direction]:
        """The weight directions of several layers, each given as (map, x, residual), with a damping for each.

        :func:`~.weights.ridge_shift` defines the damping.
        """
        return weight_directions(layers, damping, block=block)

    def _directions(self, v: V, damping: Sequence[float], block: int | None) -> list[Direction | None]:
        """The direction of each layer; None for a frozen layer."""
        frozen = [affine.layer.frozen for affine in v.maps]
        layers = zip(v.maps, self._residuals(v), damping, frozen, strict=True)
        moving = [(affine, *pair, ridge) for affine, pair, ridge, kept in layers if not kept]
        found = iter(self._weight_steps([layer[:3] for layer in moving], [layer[3] for layer in moving], block))
        return [None if kept else next(found) for kept in frozen]

    def _move_weights(self, v: V) -> None:
        """Minimise the energy, or its majoriser, over the weights of every layer."""
        ridges = (self.step_ridge,) * len(v.maps)
        for affine, direction in zip(v.maps, self._directions(v, ridges, None), strict=True):
            if direction is not None:
                affine.layer.assign(affine.layer.parameters() + direction.dense())

    def _multipliers(self, v: V) -> None:
        """Ascend in the multipliers, if the method has any."""

    def _minibatch(self, v: V, damping: Sequence[float]) -> list[Direction | None]:
        """The weight directions of a batch whose variables are at the forward pass."""
        for _ in range(self.recipe.sweeps or self.default_sweeps):
            self._sweep(v)
            self._multipliers(v)
        return self._directions(v, damping, self.recipe.block)

    def _before_fit(self) -> None:
        """Reset the state of an earlier fit."""
        self._mu = self._first_mu()

    def _first_mu(self) -> tuple[float, ...]:
        """The given μ, or the defaults of :meth:`step`."""
        return self._given_mu or tuple(self.step_output * self.step_ratio**-k for k in reversed(range(self._count())))

    def _after_epoch(self) -> None:
        """Update between epochs, for example raise the penalty."""

    @plainly
    def step(self, x: Tensor, y: Tensor) -> float:
        """Sweep over all blocks, then move the weights, and return the energy afterwards.

        The auxiliary variables continue from the previous call if ``x`` and ``y`` are the same tensors and neither they
        nor the network's parameters have changed since. Otherwise they start from the forward pass.

        Raises:
            NonFiniteError: If the energy is not finite. The weights are then restored to those before the step.
        """
        self._require_trained()
        fresh = self._variables is None or not self._is_same_batch(x, y)
        v = self._forward_variables(x, y) if fresh or self._variables is None else self._variables
        self._variables = None
        kept = [parameter.detach().clone() for parameter in self.model.parameters()]
        try:
            for _ in range(self.step_sweeps):
                self._sweep(v)
            self._require_finite(v)
            self._move_weights(v)
            self._multipliers(v)
            energy = self._energy(v)
            if not math.isfinite(energy):
                self._raise_nonfinite(v, energy)
        except (MinimandError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            for parameter, old in zip(self.model.parameters(), kept, strict=True):
                parameter.data.copy_(old)
            reason = cause(self, v, error)
            raise NonFiniteError(f"step stopped and restored the weights from before it: {reason}") from None
        if fresh:
            update_running_statistics(v.maps)
        self._variables = v
        self._remember(x, y)
        return energy

    def _remember(self, x: Any, y: Any) -> None:
        """Remember the batch of the variables."""
        self._batch = tuple((weakref.ref(tensor), stamp(tensor)) for tensor in tensors((x, y)))
        self._weights = self._parameter_versions()

    @plainly
    def energy(self, x: Tensor, y: Tensor) -> float:
        """The energy at the auxiliary variables of the last step's batch; for any other batch, at its forward pass."""
        if self._variables is not None and self._is_same_batch(x, y):
            return self._energy(self._variables)
        return self._energy(self._forward_variables(x, y))

    @plainly
    def backward(self, x: Tensor, y: Tensor, *, reduction: str = "mean") -> float:
        r"""Add the gradient of the energy with respect to the weights to ``.grad``, and return the network's loss.

        The auxiliary variables start from the forward pass and are swept once. The gradient is then that of the energy
        at these variables, with :math:`\mu = 1` at the output and ten times as much in every layer further down, unless
        ``mu`` was given. The weights do not move; any optimizer of torch can take the step.

        Args:
            x: The inputs.
            y: The targets.
            reduction: ``"mean"``: loss and gradient are means over the batch; ``"sum"``: sums.
        """
        if reduction not in REDUCTIONS:
            raise OptionError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
        self._require_trained()
        kept, top = self._mu, len(self.chain) - 1
        self._mu = self._given_mu or tuple(RATIO ** (k - top) for k in range(top + 1))
        try:
            v = self._forward_variables(x, y)
            loss = float(v.loss.value(v.output))
            self._sweep(v)
            self._require_finite(v)
            found = [affine.gradient(*pair) for affine, pair in zip(v.maps, self._slopes(v), strict=True)]
        finally:
            self._mu = kept
        share = 1.0 / len(x) if reduction == "mean" else 1.0
        if not math.isfinite(loss):
            raise NonFiniteError(f"the loss is {loss}, and no gradient was changed; scale the inputs")
        for layer, change in zip(self.chain.layers, found, strict=True):
            require_finite(f"the gradient of {layer.path}", change)
        for layer, change in zip(self.chain.layers, found, strict=True):
            if not layer.frozen:
                layer.add_gradient(share * change)
        update_running_statistics(v.maps)
        return share * loss

    def fit(
        self,
        loader: Iterable[tuple[Tensor, Tensor]],
        epochs: int,
        mode: str = "fast",
        *,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> list[Epoch]:
        r"""Train for some epochs.

        Args:
            loader: An iterable of batches (x, y); it is iterated once per epoch.
            epochs: The number of epochs.
            mode: ``"fast"``: mini-batches with momentum; ``"monotone"``: :meth:`step` on each batch. A step that raises
                the network's loss on its batch is taken back and repeated with all :math:`\mu` multiplied by
                ``recipe.continuation``, so that the loss falls with the energy. Every fit starts from the given μ.
            optimizer: An optimizer of the network's parameters that takes the steps of the fast mode instead, with the
                gradients of :meth:`backward`.
        """
        return list(self.training(loader, epochs, mode, optimizer=optimizer))

    def training(
        self,
        loader: Iterable[tuple[Tensor, Tensor]],
        epochs: int,
        mode: str = "fast",
        *,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Iterator[Epoch]:
        """:meth:`fit` as a generator that yields after each epoch, for evaluation, schedules or early stopping."""
        if mode not in MODES:
            raise OptionError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        check_loader(loader, epochs)
        run = self._run(mode, optimizer)
        self._before_fit()
        for number in range(1, epochs + 1):
            begin, total, loss, samples = time.perf_counter(), 0.0, 0.0, 0
            for x, y, share in batches(loader, number, epochs):
                energy, value = run.batch(x, y, share)
                total, loss, samples = total + energy, loss + value, samples + batch_size(x)
            if samples == 0:
                raise OptionError(NO_BATCH)
            run.check(x, y)
            self._after_epoch()
            yield Epoch(number, total / samples, time.perf_counter() - begin, loss / samples)

    def _run(self, mode: str, optimizer: torch.optim.Optimizer | None) -> Run:
        """What updates the weights on a batch."""
        if optimizer is not None:
            check_optimizer(optimizer, self.model, mode)
            return OptimizerRun(self, optimizer)
        self._require_trained()
        return MiniBatchRun(self) if mode == "fast" else MonotoneRun(self)

    def _multiply_mu(self, factor: float) -> None:
        """Multiply all μ; the variables start anew."""
        self._batch = None
        self._mu = tuple(factor * mu for mu in self._mu)

    @plainly
    def _network_loss(self, x: Tensor, y: Tensor) -> float:
        """The network's loss on a batch, summed."""
        v = self._forward_variables(x, y, check=False)
        return float(v.loss.value(v.output))

    def _minibatch_mu(self) -> tuple[float, ...]:
        """The penalty weights of the mini-batch mode: the given ones, or a geometric sequence that ends at 1."""
        top = len(self.chain) - 1
        return self._given_mu or tuple(self.recipe.ratio ** (k - top) for k in range(top + 1))

    def _damping(self) -> tuple[float, ...]:
        """The relative damping of every layer."""
        given = self.recipe.damping
        if given is None:
            given = self.default_damping[self.loss != "squared"]
        values = (given,) * len(self.chain) if isinstance(given, int | float) else tuple(given)
        if len(values) != len(self.chain):
            raise OptionError(
                f"Recipe.damping has {len(values)} entries, but the network has {len(self.chain)} layers; give one "
                f"number, or one per layer"
            )
        return values

    def _is_same_batch(self, x: Any, y: Any) -> bool:
        given = list(tensors((x, y)))
        if self._batch is None or len(given) != len(self._batch):
            return False
        for tensor, (known, seen) in zip(given, self._batch, strict=True):
            if known() is not tensor:
                return False
            if not (torch.equal(tensor, seen) if isinstance(seen, Tensor) else tensor._version == seen):
                return False
        return self._weights == self._parameter_versions()

    def _parameter_versions(self) -> list[tuple[int, int]]:
        """Memory address and version of every parameter; they change when a parameter changes."""
        return [(parameter.data_ptr(), parameter._version) for parameter in self.model.parameters()]

    def _check_batch(self, x: Tensor, check: bool = True, layers: Sequence[LiftedLayer] = ()) -> None:
        """Raise for an input that does not suit the layers; with ``check`` also for NaN and Inf in it or in weights."""
        if not isinstance(x, Tensor) or not x.numel():
            found = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}; convert it"
            raise ShapeError(f"x must be a tensor of at least one sample, got {found}")
        require_values("x", x)
        for layer in layers or self.chain.layers:
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

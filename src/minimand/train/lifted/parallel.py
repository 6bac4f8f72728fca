"""LPOM with layers distributed over processes: synchronous Jacobi sweeps, or asynchronous batches."""

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import CapabilityError, MinimandError, NonFiniteError, OptionError, Sealed, ShapeError, require_finite
from .base import plain_tensor
from .chain import LayerChain
from .losses import LOSSES, SquaredError, encode_targets
from .lpom import LPOM
from .maps import LiftedLayer, update_running_statistics
from .options import NO_BATCH, Epoch, batches, check_loader, length
from .stages import partition_layers
from .sweeps import DualSweep, LPOMVariables
from .variables import without_autograd
from .weights import MomentumUpdate

__all__ = ["LayerParallel"]

_UP, _DOWN = 11, 12
#: Sums of equal batches differ by a smaller share of the sum of absolute values.
_ROUNDING = 1e-6
#: The dimensions of a sample of activations, at most.
_MOST_DIMS = 4


class LayerParallel(Sealed):
    r"""Mini-batch training of an :class:`LPOM` with one or more layers per process of a torch.distributed group.

    Each process holds a range of consecutive layers and exchanges only tensors at its ends: the activation :math:`X_k`
    upwards, the back-projected residual :math:`A_k^\top q` downwards. Weight steps need no exchange ([Lin2019],
    *Parallelizing LPOM*).

    Synchronous: the forward pass runs through the processes, then every process computes its part of the same Jacobi
    sweeps. The result equals that of one process with ``sweep="jacobi"``, up to the order of sums.

    Asynchronous: a process continues with the next batch while the residual of earlier batches is in transit, and uses
    it when it arrives. Up to ``staleness`` batches are in flight, so activations may be that many weight updates old. A
    residual needs two transfers for every process above, and as many batches in flight keep a process busy.

    Each process computes with its layers, and holds momentum and variables for them only. The function
    :func:`~minimand.train.lifted.layer_stages` estimates what a number of processes gains. Every process builds the
    same model and iterates the same batches, which is checked once an epoch. After :meth:`fit` each process holds all
    weights. With ``gather=False`` a process has the weights of its own ``layers`` only. Those of others are then
    tensors on the device "meta", without memory, from the first fit on, and may be so before it. :meth:`gather` brings
    all weights to every process.

    Args:
        method: The LPOM whose model is trained; its recipe and loss are used.
        asynchronous: Whether processes continue without waiting for residuals.
        staleness: The largest number of batches in flight. None: twice the number of processes above this one.
        group: The process group. None: the default group.
        gather: Whether each process holds all weights after :meth:`fit`.
    """

    def __init__(
        self,
        method: LPOM,
        *,
        asynchronous: bool = False,
        staleness: int | None = None,
        group: dist.ProcessGroup | None = None,
        gather: bool = True,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise CapabilityError(
                "LayerParallel needs a process group; call torch.distributed.init_process_group first"
            )
        if staleness is not None and staleness < 1:
            raise OptionError(f"staleness must be None or at least 1, got {staleness}")
        if not method.chain.layers:
            raise CapabilityError(
                "LayerParallel takes a chain of layers, and this network is a graph; train it in one process"
            )
        self.method = method
        self.asynchronous = asynchronous
        self.group = group
        self.rank, world = dist.get_rank(group), dist.get_world_size(group)
        self.staleness = max(1, 2 * (world - 1 - self.rank)) if staleness is None else staleness
        self.parts = partition_layers(method.chain.layers, world)
        self.first, self.end = self.parts[self.rank]
        self.layers = method.chain.layers[self.first : self.end]
        self.below = self._global(self.rank - 1) if self.rank > 0 else None
        self.above = self._global(self.rank + 1) if self.rank + 1 < world else None
        self.dual = DualSweep(method.chain.layers, offset=self.first)
        self._gathers = gather
        self._momentum: MomentumUpdate | None = None
        self._input: torch.Size | None = None
        self._shape: torch.Size | None = None

    def fit(self, loader: Iterable[tuple[Tensor, Tensor]], epochs: int) -> list[Epoch]:
        """Train; every process returns the same history.

        An error leaves the weights as they were before. If one process stops, the others notice when it ends, and stop.

        Raises:
            OptionError: If the loader holds no batch, is an iterator for several epochs, or differs between processes.
            MinimandError: If a number is not finite, or if another process has stopped.
        """
        check_loader(loader, epochs)
        self.method._require_trained()
        for layer in self.method.chain.layers:
            if not layer.weight.is_meta:
                require_finite(f"the weight and bias of {layer.path}", layer.parameters())
        self.dual.reset()
        self._momentum = MomentumUpdate(self.layers, self.method.recipe.momentum)
        self._input = self._shape = None
        if not self._gathers:
            self._release()
        with without_autograd():
            kept = [(tensor, tensor.clone()) for layer in self.layers for *_, tensor in _held(layer)]
            try:
                return self._train(loader, epochs)
            except Exception:
                for tensor, old in kept:
                    tensor.copy_(old)
                raise

    def _train(self, loader: Iterable[tuple[Tensor, Tensor]], epochs: int) -> list[Epoch]:
        history = []
        for number in range(1, epochs + 1):
            begin, total, samples = time.perf_counter(), 0.0, 0
            run = _InFlight(self) if self.asynchronous else None
            for x, y, share in batches(loader, number, epochs):
                rate = self.method.recipe.rate_at(share)
                encoded = self._targets(x, y)
                if samples == 0:
                    self._require_same(x, encoded, length(loader) or 0)
                v, value = self._forward(plain_tensor(x), encoded)
                total, samples = total + value, samples + len(x)
                if run is None:
                    self.dual.run(v, self.method._minibatch_mu(), "jacobi", self.method.recipe.sweeps, self)
                    self._move(v, rate)
                else:
                    run.push(v, rate)
            if run is not None:
                run.drain()
            if samples == 0:
                raise OptionError(NO_BATCH)
            mean = torch.tensor([total / samples], dtype=torch.float64)
            _transfer(dist.broadcast, mean, self._global(len(self.parts) - 1), group=self.group)
            if not math.isfinite(float(mean)):
                why = f"the loss of epoch {number} is {float(mean)}; lower the rate or raise the damping of the recipe"
                raise NonFiniteError(f"training diverged, and the weights are those from before: {why}")
            history.append(Epoch(number, float(mean), time.perf_counter() - begin))
        if self._gathers:
            self.gather()
        return history

    def _targets(self, x: Tensor, y: Tensor) -> Tensor:
        """The encoded targets; every process checks the whole batch, so that a bad one stops them all."""
        self.method._check_batch(x, check=False, layers=self.layers)
        require_finite("the input x", x)
        if self._input is not None and x.shape[1:] != self._input:
            raise ShapeError(f"x has samples of shape {tuple(x.shape[1:])}, those before had {tuple(self._input)}")
        outputs = x.new_empty((len(x), self.method.chain.layers[-1].weight.shape[0]))
        return encode_targets(plain_tensor(y), outputs, self.method.loss)

    def _require_same(self, x: Tensor, y: Tensor, count: int) -> None:
        """Raise in every process if the first batch of an epoch or the number of batches is not the same in all."""
        parts = [part.double() for part in (x, x[0], y, y[0])]
        sums, sizes = ([float(some.sum()) for some in each] for each in (parts, [part.abs() for part in parts]))
        mine = torch.tensor([[len(x), count, *sums], [0, 0, *sizes]], dtype=torch.float64).to(self._device())
        found = [torch.empty_like(mine) for _ in self.parts]
        _transfer(dist.all_gather, found, mine, group=self.group)
        for rank, numbers in enumerate(found):
            # The order of a sum depends on threads and devices.
            if bool(((numbers - found[0])[0].abs() > _ROUNDING * found[0][1]).any()):
                remedy = "shuffle with a generator of the same seed in every process"
                raise OptionError(
                    f"rank 0 and rank {rank} iterate different batches, so targets would be mixed; {remedy}"
                )

    def _forward(self, x: Tensor, y: Tensor) -> tuple[LPOMVariables, float]:
        """This process's part of the forward pass, and the loss (0 except in the process with the output)."""
        first, self._input = self._input is None, x.shape[1:]
        if self.below is not None:
            if first:
                self._shape = self._receive_shape()
            x = x.new_empty((len(x), *(self._shape or ())))
            _transfer(dist.recv, x, self.below, group=self.group, tag=_UP)
        xs, zs, maps = LayerChain(self.layers).forward(x)
        if self.above is not None:
            if first:
                self._send_shape(xs[-1].shape[1:])
            _transfer(dist.send, xs[-1].contiguous(), self.above, group=self.group, tag=_UP)
            return LPOMVariables(xs, maps, SquaredError(xs[-1]), zs), 0.0
        loss = LOSSES[self.method.loss](y)
        return LPOMVariables(xs, maps, loss, zs), float(loss.value(xs[-1]))

    def _move(self, v: LPOMVariables, rate: float) -> None:
        assert self._momentum is not None
        damping = self.method._damping()[self.first : self.end]
        directions = self.method._directions(v, damping, self.method.recipe.block)
        self._momentum.apply(directions, [rate / layer.unit.slope for layer in self.layers])
        update_running_statistics(v.maps)

    def exchange_residuals(self, down: Tensor | None, like: Tensor) -> Tensor | None:
        """Send the back-projected residual of the lowest activation down; receive the topmost's, None at the output."""
        return self._exchange(down, self.below, like, self.above, _DOWN)

    def exchange_activations(self, up: Tensor, like: Tensor) -> Tensor | None:
        """Send the topmost activation up; receive the lowest one, None at the input."""
        return self._exchange(up, self.above, like, self.below, _UP)

    def _exchange(
        self, message: Tensor | None, to: int | None, like: Tensor, source: int | None, tag: int
    ) -> Tensor | None:
        sent = None
        if to is not None and message is not None:
            sent = _transfer(dist.isend, message.contiguous(), to, group=self.group, tag=tag)
        received = None
        if source is not None:
            received = torch.empty_like(like)
            _transfer(dist.recv, received, source, group=self.group, tag=tag)
        if sent is not None:
            _transfer(sent.wait)
        return received

    def _send_shape(self, shape: torch.Size) -> None:
        """Tell the process above the shape of a sample of what it will receive."""
        assert self.above is not None
        padded = torch.tensor([len(shape), *shape, *[0] * (_MOST_DIMS - len(shape))], device=self._device())
        _transfer(dist.send, padded, self.above, group=self.group, tag=_UP)

    def _receive_shape(self) -> torch.Size:
        assert self.below is not None
        padded = torch.empty(_MOST_DIMS + 1, dtype=torch.long, device=self._device())
        _transfer(dist.recv, padded, self.below, group=self.group, tag=_UP)
        count, *sizes = padded.tolist()
        return torch.Size(sizes[:count])

    def gather(self) -> None:
        """Send the weights and normalisations of every layer to every process; all processes must call it."""
        device = self._device()
        with without_autograd():
            for rank, (first, end) in enumerate(self.parts):
                for layer in self.method.chain.layers[first:end]:
                    for table, name, tensor in _held(layer):
                        if tensor.is_meta:
                            tensor = table[name] = _like(tensor, device)
                        _transfer(dist.broadcast, tensor.detach(), self._global(rank), group=self.group)

    def _release(self) -> None:
        """Drop the weights and normalisations of the other processes' layers."""
        for k, layer in enumerate(self.method.chain.layers):
            if not self.first <= k < self.end:
                for table, name, tensor in _held(layer):
                    table[name] = _like(tensor, torch.device("meta"))

    def _device(self) -> torch.device:
        return self.layers[0].weight.device

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def _transfer(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A transfer to or from another process; it fails if that process has ended."""
    try:
        return call(*args, **options)
    except RuntimeError as error:
        why = f"its own error says why; this one stops with the weights from before ({str(error)[:200]})"
        raise MinimandError(f"another process of the group has stopped, and {why}") from None


def _held(layer: LiftedLayer) -> list[tuple[dict[str, Any], str, Tensor]]:
    """The parameters and buffers of a layer, each with the table of its module and its name there."""
    modules = (layer.module,) if layer.norm is None else (layer.module, layer.norm)
    tables: list[dict[str, Any]] = [table for module in modules for table in (module._parameters, module._buffers)]
    return [(table, name, tensor) for table in tables for name, tensor in table.items() if tensor is not None]


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    """An empty tensor on a device, a parameter if the given one is."""
    empty = torch.empty_like(tensor, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


class _InFlight:
    """Batches whose back-projected residual from above has not arrived yet."""

    def __init__(self, parallel: LayerParallel) -> None:
        self.parallel = parallel
        self.waiting: deque[tuple[LPOMVariables, float]] = deque()
        self.arrived: queue.Queue[Tensor | MinimandError] = queue.Queue()
        self.requests: queue.Queue[Tensor | None] = queue.Queue()
        self.thread: threading.Thread | None = None
        if parallel.above is not None:
            self.thread = threading.Thread(target=self._listen, daemon=True)
            self.thread.start()

    def push(self, v: LPOMVariables, rate: float) -> None:
        """Add a batch after its forward pass, and finish the batches whose residual has arrived."""
        if self.parallel.above is None:
            v.xs[-1] = v.loss.approximate_prox(v.zs[-1], 1.0 / self.parallel.method._minibatch_mu()[-1])
            self._finish(v, rate)
            return
        self.requests.put(torch.empty_like(v.xs[-1]))
        self.waiting.append((v, rate))
        while self.waiting and (len(self.waiting) > self.parallel.staleness or not self.arrived.empty()):
            self._next()

    def drain(self) -> None:
        """Wait for all batches in flight and finish them."""
        while self.waiting:
            self._next()
        if self.thread is not None:
            self.requests.put(None)
            self.thread.join()

    def _next(self) -> None:
        residual = self.arrived.get()
        if isinstance(residual, MinimandError):
            raise residual
        v, rate = self.waiting.popleft()
        v.xs[-1] = self.parallel.dual.moved_activation(v, self.parallel.method._minibatch_mu(), len(v.maps), residual)
        self._finish(v, rate)

    def _finish(self, v: LPOMVariables, rate: float) -> None:
        """Sweep downwards, send the back-projected residual of the lowest activation, update the weights."""
        parallel = self.parallel
        dual, mu = parallel.dual, parallel.method._minibatch_mu()
        dual.downwards(v, mu)
        if parallel.below is not None:
            residual = v.maps[0].adjoint(dual.estimate(v, mu, 0, None))
            _transfer(dist.send, residual.contiguous(), parallel.below, group=parallel.group, tag=_DOWN)
        parallel._move(v, rate)

    def _listen(self) -> None:
        assert self.parallel.above is not None
        while (buffer := self.requests.get()) is not None:
            try:
                _transfer(dist.recv, buffer, self.parallel.above, group=self.parallel.group, tag=_DOWN)
                self.arrived.put(buffer)
            except MinimandError as error:
                self.arrived.put(error)

"""Layers in stages, one per process: where to cut, and what a number of processes would gain."""

import dataclasses
import itertools
import time
from collections.abc import Sequence

from torch import Tensor

from ...arguments import checked
from ...errors import CapabilityError, OptionError
from .base import plain_tensor
from .lpom import LPOM
from .maps import LiftedLayer
from .sweeps import RENEW, DualSweep
from .variables import plainly

__all__ = ["LayerStages", "Stage", "cheapest_cuts", "layer_stages", "partition_layers"]

_REPEATS = 3


def cheapest_cuts(costs: Sequence[float], parts: int) -> list[tuple[int, int]]:
    """Consecutive ranges that minimise the largest sum of costs, by dynamic programming in O(parts · n²).

    Among equal ones the first range is the shortest.

    >>> cheapest_cuts([3.0, 1.0, 1.0, 1.0], 2)
    [(0, 1), (1, 4)]
    """
    count = len(costs)
    sums = [0.0, *itertools.accumulate(costs)]
    # best[i]: the least largest sum for the layers from i on; ends[p][i]: the end of the first of p ranges.
    best = [sums[count] - sums[i] for i in range(count + 1)]
    ends: list[list[int]] = []
    for used in range(2, parts + 1):
        now, cut = [0.0] * (count + 1), [0] * (count + 1)
        for i in range(count - used + 1):
            choices = ((max(sums[j] - sums[i], best[j]), j) for j in range(i + 1, count - used + 2))
            now[i], cut[i] = min(choices)
        best, ends = now, [cut, *ends]
    found, start = [], 0
    for cut in ends:
        found.append((start, cut[start]))
        start = cut[start]
    return [*found, (start, count)]


def partition_layers(layers: Sequence[LiftedLayer], parts: int) -> list[tuple[int, int]]:
    """Partition the layers into consecutive ranges that minimise the largest number of weights in a range.

    >>> from torch import nn
    >>> from minimand.train.lifted.chain import parse
    >>> chain = parse(nn.Sequential(nn.Linear(9, 2), nn.ReLU(), nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)))
    >>> partition_layers(chain.layers, 2)
    [(0, 1), (1, 3)]
    """
    if parts > len(layers):
        raise OptionError(f"{parts} processes for {len(layers)} layers; start at most one process per layer")
    return cheapest_cuts([float(layer.weight.numel()) for layer in layers], parts)


@dataclasses.dataclass(frozen=True)
class Stage:
    """The layers of one process: their paths, the processor seconds of a batch, and the bytes sent up and down."""

    layers: tuple[str, ...]
    seconds: float
    up: int
    down: int


@dataclasses.dataclass(frozen=True)
class LayerStages:
    """A cost model of asynchronous layer parallelism; ``print`` shows it as a table.

    A batch takes as long as the slowest stage and its transfers: ``seconds``. ``speedup`` is the time of one process
    over it.
    """

    stages: tuple[Stage, ...]
    bandwidth: float

    @property
    def seconds(self) -> float:
        """The estimated seconds of a batch."""
        return max(stage.seconds + (stage.up + stage.down) / self.bandwidth for stage in self.stages)

    @property
    def speedup(self) -> float:
        """The time of one process over :attr:`seconds`."""
        return sum(stage.seconds for stage in self.stages) / self.seconds

    def __str__(self) -> str:
        lines = [f"{'rank':>4}  {'layers':<24} {'ms a batch':>10} {'kB up':>8} {'kB down':>8}"]
        for rank, stage in enumerate(self.stages):
            name = stage.layers[0] if len(stage.layers) == 1 else f"{stage.layers[0]} … {stage.layers[-1]}"
            sizes = f"{stage.up / 1e3:>8.0f} {stage.down / 1e3:>8.0f}"
            lines.append(f"{rank:>4}  {name:<24} {1e3 * stage.seconds:>10.2f} {sizes}")
        lines.append(f"a batch: {1e3 * self.seconds:.2f} ms, {self.speedup:.2f} times as fast as one process")
        return "\n".join(lines)


@checked
@plainly
def layer_stages(method: LPOM, x: Tensor, y: Tensor, ranks: int, *, bandwidth: float = 1e9) -> LayerStages:
    """Estimate what asynchronous training on some processes costs, from the times of the layers in this one.

    Forward pass, sweep and weight step of every layer are timed on the batch, in processor seconds of this process. A
    preconditioner's inverse counts with the share of the batches in which training renews it. The layers are cut as
    :class:`LayerParallel` cuts them. The weights do not change.

    Args:
        method: The LPOM whose layers are distributed.
        x: The inputs of a batch.
        y: Its targets.
        ranks: The number of processes.
        bandwidth: Bytes that a process sends in a second.
    """
    if not method.chain.layers:
        raise CapabilityError("layer_stages takes a chain of layers, and this network is a graph")
    if ranks < 1 or not 0 < bandwidth < float("inf"):
        raise OptionError(f"ranks must be at least 1 and bandwidth positive, got {ranks} and {bandwidth}")
    parts = partition_layers(method.chain.layers, ranks)
    layers = method.chain.layers
    used = DualSweep(layers)
    fresh = _least([_layer_seconds(method, plain_tensor(x), y, DualSweep(layers)) for _ in range(_REPEATS)])
    # The first of these renews the inverses.
    kept = _least([_layer_seconds(method, plain_tensor(x), y, used) for _ in range(1 + _REPEATS)])
    seconds = [low + max(0.0, high - low) / RENEW for low, high in zip(kept, fresh, strict=True)]
    sizes = [value.numel() * value.element_size() for value in method.chain.forward(plain_tensor(x))[0]]
    stages = []
    for first, end in parts:
        names = tuple(layer.path for layer in method.chain.layers[first:end])
        up = sizes[end] if end < len(seconds) else 0
        stages.append(Stage(names, sum(seconds[first:end]), up, sizes[first] if first else 0))
    return LayerStages(tuple(stages), bandwidth)


def _least(runs: Sequence[Sequence[float]]) -> list[float]:
    return [min(times) for times in zip(*runs, strict=True)]


def _layer_seconds(method: LPOM, x: Tensor, y: Tensor, dual: DualSweep) -> list[float]:
    """The processor seconds of every layer in forward pass, sweep and weight step of one batch."""
    layers, mu = method.chain.layers, method._minibatch_mu()
    times, inner, zs, maps, xs = [0.0] * len(layers), x, [], [], [x]
    for k, layer in enumerate(layers):
        begin = time.process_time()
        maps.append(layer.affine_map(inner))
        zs.append(maps[k].apply(inner))
        inner = layer.unit.phi(zs[k])
        times[k] += time.process_time() - begin
        xs.append(inner)
    v = method._forward_variables(x, y)
    v.xs[-1] = v.loss.approximate_prox(v.zs[-1], 1.0 / mu[-1])
    for k in range(len(layers) - 1, 0, -1):
        begin = time.process_time()
        residual = maps[k].adjoint(dual.estimate(v, mu, k, None))
        v.xs[k] = dual.moved_activation(v, mu, k, residual)
        v.zs[k] = maps[k].apply(v.xs[k])
        times[k] += time.process_time() - begin
    pairs = zip(maps, method._residuals(v), method._damping(), strict=True)
    for k, (affine, pair, ridge) in enumerate(pairs):
        begin = time.process_time()
        if not affine.layer.frozen:
            method._weight_steps([(affine, *pair)], [ridge], method.recipe.block)[0].dense()
        times[k] += time.process_time() - begin
    return times

"""The context of a part: seed, device, data, resumable epochs and files."""

import contextlib
import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minimand.errors import DataError, OptionError
from minimand.norms.tracker import LipschitzTracker

from .clock import Stopwatch
from .data import Augmentation, Batches, Dataset, DataSplit, Normalization, batches, load
from .experiment import Metrics
from .store import Records, atomically, slug
from .untrusted import content, saved_tensors

__all__ = ["Lab", "Stateful", "load_module_state", "module_state"]

T = TypeVar("T")
_CHECKPOINT = "checkpoint.pt"
# The most bytes of the tensors that one part keeps for another.
_LARGEST = 1 << 32
# What torch's optimizers keep for a parameter in its shape.
_LIKE_A_PARAMETER = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class Stateful(Protocol):
    """An object whose state can be saved and restored, for example an optimizer, a scheduler or a loader."""

    def state_dict(self) -> dict[str, Any]:
        """The state from which to continue."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a saved state."""
        ...


def module_state(module: nn.Module) -> dict[str, Any]:
    """Parameters, *all* buffers, and the refresh count of each tracker, on which the next step depends."""
    trackers = {path: part.refreshes for path, part in module.named_modules() if isinstance(part, LipschitzTracker)}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {"tensors": {name: tensor.detach() for name, tensor in tensors.items()}, "trackers": trackers}


def _require_like(found: Mapping[str, Any], like: Mapping[str, Tensor]) -> None:
    """Refuse tensors with other names, shapes or types."""
    if found.keys() != like.keys() or any(
        not isinstance(found[name], Tensor) or (found[name].shape, found[name].dtype) != (tensor.shape, tensor.dtype)
        for name, tensor in like.items()
    ):
        raise ValueError("its tensors have other names, shapes or types than the network's")


def _require_fitting(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Refuse a state that the optimizer would accept and that its next step could not use."""
    for group, ours in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        if any(isinstance(value, int | float) != isinstance(group[key], int | float) for key, value in ours.items()):
            raise ValueError("the options of its optimizer have other types")
    shapes = [parameter.shape for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in saved["state"].items():
        if any(key in values and values[key].shape != shapes[number] for key in _LIKE_A_PARAMETER):
            raise ValueError("the tensors of its optimizer have other shapes")


@contextlib.contextmanager
def _restoring(path: Path) -> Iterator[None]:
    """Turn whatever a damaged checkpoint leads to into a sentence."""
    try:
        yield
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise DataError(
            f"{path} is damaged or belongs to another version of the experiment ({why}); delete its folder, or leave "
            f"out --resume, to start again"
        ) from error


@torch.no_grad()
def load_module_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Restore the state that :func:`module_state` returned."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    _require_like(state["tensors"], tensors)
    for name, tensor in tensors.items():
        tensor.copy_(state["tensors"][name])
    for path, part in module.named_modules():
        if isinstance(part, LipschitzTracker):
            part.refreshes = int(state["trackers"][path])


@dataclasses.dataclass
class Lab:
    """The context of one part for one seed; see :class:`~minimand_papers.experiment.Experiment`.

    Args:
        directory: The directory of this part's files.
        seed: The seed of this run. Torch's, numpy's and Python's default generators have been seeded with it.
        device: The device to compute on.
        data_dir: The directory of the datasets.
        download: Whether missing datasets may be downloaded.
        rank: The rank of this process among ``world`` processes that train together.
        world: The number of processes that train together.
        notify: Called with the epochs done (fractions included) and the number of epochs.
    """

    directory: Path
    seed: int
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    data_dir: Path | None = None
    download: bool = False
    rank: int = 0
    world: int = 1
    notify: Callable[[float, int], None] = lambda done, total: None

    def __post_init__(self) -> None:
        self._records = Records(self.directory / "metrics.jsonl")
        self._watch = Stopwatch()
        self._before = 0.0
        self._looped = False
        self._epoch, self._total = 0, 1
        self._generators: list[torch.Generator] = []

    # Data ----------------------------------------------------------------------------------------

    def load(self, dataset: str) -> Dataset:
        """Load a dataset by name from the data directory."""
        return load(dataset, self.data_dir, download=self.download, progress=self.rank == 0)

    def generator(self, stream: int = 0) -> torch.Generator:
        """A generator with the run's seed; different values of ``stream`` give independent generators.

        A generator that was made before the loop of epochs is restored when a run is resumed.
        """
        made = torch.Generator().manual_seed(self.seed + 1_000_003 * (stream + 1))
        self._generators.append(made)
        return made

    def batches(
        self,
        split: DataSplit,
        size: int,
        *,
        train: bool = True,
        normalize: Normalization | None = None,
        augment: Augmentation | None = None,
    ) -> Batches:
        """This process's share of shuffled full training batches, or of a split in its own order."""
        return batches(
            split,
            min(size, len(split)) if train else size,
            generator=self.generator() if train else None,
            normalize=normalize,
            augment=augment if train else None,
            device=self.device,
            drop_last=train,
            shard=(self.rank, self.world),
        )

    # Several processes ---------------------------------------------------------------------------

    def distribute(self, model: nn.Module) -> nn.Module:
        """The model on the device; with several processes, wrapped such that gradients are averaged.

        Call it after the weights are initialised. From then on each process draws its own random numbers.
        """
        model.to(self.device)
        if self.world == 1:
            return model
        torch.manual_seed(self.seed + 7_919 * (self.rank + 1))
        devices = None if self.device.type == "cpu" else [self.device]
        return nn.parallel.DistributedDataParallel(model, device_ids=devices)

    def total(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    # Epochs and records --------------------------------------------------------------------------

    def epochs(self, count: int, **states: nn.Module | Stateful) -> Iterator[int]:
        """Iterate over the epochs 0 … count − 1; a resumed run restores ``states`` and continues after its checkpoint.

        At the end of every epoch the states, all random generators and the number of records are saved. Code after the
        loop is repeated when a run is resumed there. Yield no record before the loop.
        """
        if self._looped:
            raise OptionError("a part may have one loop of epochs: make the second loop a part that needs the first")
        self._looped = True
        done = self._restore(count, states)
        self._total = count
        for epoch in range(done, count):
            self._epoch = epoch
            self.notify(epoch, count)
            yield epoch
            self._save(epoch + 1, states)
        self.notify(count, count)

    def track(self, batches: Iterable[T]) -> Iterator[T]:
        """Iterate over the batches and move the progress bar within the epoch."""
        count = len(batches) if isinstance(batches, Sized) else 0
        last = time.monotonic()
        for number, batch in enumerate(batches):
            yield batch
            now = time.monotonic()
            if count and now - last > 0.3:
                last = now
                self.notify(self._epoch + (number + 1) / count, self._total)

    @property
    def seconds(self) -> float:
        """The run time of this part by a :class:`Stopwatch`, without interruptions."""
        return self._before + self._watch.seconds

    @property
    def recorded(self) -> int:
        """The number of records in the part's file."""
        return len(self._records)

    def record(self, metrics: Metrics) -> dict[str, Any]:
        """Append a record with its time to the part's file; the runner calls it for every record of ``run``."""
        record = {**metrics, "seconds": round(self.seconds, 2)}
        if self.rank == 0:
            self._records.append(record)
        return record

    # Files ---------------------------------------------------------------------------------------

    def keep(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors, for example a ``state_dict``, for the parts that need this one."""
        from safetensors.torch import save

        if self.rank == 0:
            plain = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
            with atomically(self.directory / f"{name}.safetensors") as file:
                file.write(save(plain))

    def kept(self, part: str, name: str, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The tensors that another part of the same seed kept under ``name``.

        Tensors with other names, shapes or types than those of ``like``, for example a ``state_dict``, are refused.
        """
        from safetensors.torch import load as read

        path = self.directory.parent / slug(part) / f"{name}.safetensors"
        if not path.is_file():
            raise DataError(f"{path} is missing; the part {part!r} has to run first, or again")
        with _restoring(path):
            found = read(content(path, _LARGEST))
            if like is not None:
                _require_like(found, like)
            return {key: value.to(self.device) for key, value in found.items()}

    # Checkpoints ---------------------------------------------------------------------------------

    def _save(self, done: int, states: Mapping[str, nn.Module | Stateful]) -> None:
        own = {**_random_state(self.device), "generators": [made.get_state() for made in self._generators]}
        everyone: list[Any] = [own]
        if self.world > 1:
            everyone = [None] * self.world
            dist.all_gather_object(everyone, own)
        if self.rank:
            return
        checkpoint = {
            "epochs": done,
            "records": self.recorded,
            "seconds": self.seconds,
            "random": everyone,
            "states": {
                name: module_state(state) if isinstance(state, nn.Module) else state.state_dict()
                for name, state in states.items()
            },
        }
        with atomically(self.directory / _CHECKPOINT) as file:
            torch.save(checkpoint, file)

    def _restore(self, count: int, states: Mapping[str, nn.Module | Stateful]) -> int:
        path = self.directory / _CHECKPOINT
        if not path.is_file():
            if self.rank == 0:
                self._records.truncate(0)
            return 0
        with _restoring(path):
            checkpoint = saved_tensors(path, self.device)
            if set(checkpoint["states"]) != set(states):
                raise ValueError("its states have other names")
            for name, state in states.items():
                if isinstance(state, nn.Module):
                    load_module_state(state, checkpoint["states"][name])
                else:
                    if isinstance(state, torch.optim.Optimizer):
                        _require_fitting(state, checkpoint["states"][name])
                    state.load_state_dict(checkpoint["states"][name])
            if self.rank < len(checkpoint["random"]):
                drawn = checkpoint["random"][self.rank]
                _set_random_state(drawn, self.device)
                for made, position in zip(self._generators, drawn["generators"], strict=False):
                    made.set_state(position.cpu())
            done, records, self._before = (checkpoint[key] for key in ("epochs", "records", "seconds"))
            if not 0 < done <= count or not 0 <= records <= len(self._records) or not 0 <= self._before < math.inf:
                raise ValueError("its epochs, records or seconds do not fit the run")
        if self.rank == 0:
            self._records.truncate(records)
        self._watch = Stopwatch()
        return int(done)


def _random_state(device: torch.device) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, key, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(words), gauss),
        "numpy": (
            str(kind),
            torch.tensor(np.asarray(key, dtype=np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ),
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"].cpu())
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, key, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, key.cpu().numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"].cpu(), device)

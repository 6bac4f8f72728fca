"""What a part of an experiment works with: its seed, device and data, resumable epochs, and files of its own."""

import dataclasses
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
from .data import Augmentation, Batches, Dataset, Normalisation, Split, batches, load
from .experiment import Metrics
from .store import Records, atomically, slug

__all__ = ["Lab", "Stateful", "load_module_state", "module_state"]

T = TypeVar("T")
_CHECKPOINT = "checkpoint.pt"


class Stateful(Protocol):
    """An optimizer, a scheduler, a loader: what can be saved and put back."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on from here."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Go on from there."""
        ...


def module_state(module: nn.Module) -> dict[str, Any]:
    """Parameters and *all* buffers, and how often each tracker was renewed: the next step depends on them, too."""
    trackers = {path: part.refreshes for path, part in module.named_modules() if isinstance(part, LipschitzTracker)}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {"tensors": {name: tensor.detach() for name, tensor in tensors.items()}, "trackers": trackers}


@torch.no_grad()
def load_module_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Put back what :func:`module_state` returned."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if {name: t.shape for name, t in tensors.items()} != {name: t.shape for name, t in state["tensors"].items()}:
        raise DataError("the checkpoint is of another network; run without --resume to start anew")
    for name, tensor in tensors.items():
        tensor.copy_(state["tensors"][name])
    for path, part in module.named_modules():
        if isinstance(part, LipschitzTracker):
            part.refreshes = state["trackers"][path]


@dataclasses.dataclass
class Lab:
    """The surroundings of one part for one seed; see :class:`~minimand_papers.experiment.Experiment`.

    Args:
        directory: Where this part keeps its files.
        seed: Of this run. Torch's, numpy's and Python's default generators have been seeded with it.
        device: Where to compute.
        data_dir: Where datasets lie.
        download: Whether missing datasets may be downloaded.
        rank: This process's place among ``world`` that train together.
        world: How many processes train together.
        notify: Called with the epochs done, as a fraction, and their number.
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
        """A dataset by name, from the directory that the user gave."""
        return load(dataset, self.data_dir, download=self.download, progress=self.rank == 0)

    def generator(self, stream: int = 0) -> torch.Generator:
        """A generator of the run's seed; streams of different numbers are independent.

        One that is made before the loop of epochs goes on where it was when a run is resumed.
        """
        made = torch.Generator().manual_seed(self.seed + 1_000_003 * (stream + 1))
        self._generators.append(made)
        return made

    def batches(
        self,
        split: Split,
        size: int,
        *,
        train: bool = True,
        normalise: Normalisation | None = None,
        augment: Augmentation | None = None,
    ) -> Batches:
        """This process's share of shuffled training batches, all full, or of a split in its own order."""
        return batches(
            split,
            min(size, len(split)) if train else size,
            generator=self.generator() if train else None,
            normalise=normalise,
            augment=augment if train else None,
            device=self.device,
            drop_last=train,
            shard=(self.rank, self.world),
        )

    # Several processes ---------------------------------------------------------------------------

    def distribute(self, model: nn.Module) -> nn.Module:
        """The model on the device; with several processes, one whose gradients are averaged over them.

        Call it when the weights are initialised: from here on each process draws random numbers of its own.
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
        """0 … count − 1, or what an interrupted run has left of it, with everything in ``states`` put back.

        At the end of every epoch the states, all random generators and the number of records are saved. What comes
        after the loop is repeated when a run is resumed there; before it, yield nothing.
        """
        if self._looped:
            raise OptionError("a part has one loop of epochs: make the second a part that needs the first")
        self._looped = True
        done = self._restore(states)
        self._total = count
        for epoch in range(done, count):
            self._epoch = epoch
            self.notify(epoch, count)
            yield epoch
            self._save(epoch + 1, states)
        self.notify(count, count)

    def track(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches, while the progress bar moves within the epoch."""
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
        """How long this part has run by a :class:`Stopwatch`, interruptions left out."""
        return self._before + self._watch.seconds

    def record(self, metrics: Metrics) -> dict[str, Any]:
        """Append a record to the part's file, with its time; the runner does it for whatever ``run`` yields."""
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

    def kept(self, part: str, name: str) -> dict[str, Tensor]:
        """What another part of the same seed kept under ``name``."""
        from safetensors.torch import load as read

        path = self.directory.parent / slug(part) / f"{name}.safetensors"
        if not path.is_file():
            raise DataError(f"{path} is missing; the part {part!r} has to run first, or again")
        return {key: value.to(self.device) for key, value in read(path.read_bytes()).items()}

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
            "records": len(self._records),
            "seconds": self.seconds,
            "random": everyone,
            "states": {
                name: module_state(state) if isinstance(state, nn.Module) else state.state_dict()
                for name, state in states.items()
            },
        }
        with atomically(self.directory / _CHECKPOINT) as file:
            torch.save(checkpoint, file)

    def _restore(self, states: Mapping[str, nn.Module | Stateful]) -> int:
        path = self.directory / _CHECKPOINT
        if not path.is_file():
            if self.rank == 0:
                self._records.truncate(0)
            return 0
        try:
            checkpoint = torch.load(path, map_location=self.device, weights_only=True)
        except Exception as error:
            raise DataError(f"{path} is damaged ({error}); delete its folder and run again") from error
        if set(checkpoint["states"]) != set(states):
            raise DataError(f"{path} is of another version of the experiment; run without --resume to start anew")
        for name, state in states.items():
            if isinstance(state, nn.Module):
                load_module_state(state, checkpoint["states"][name])
            else:
                state.load_state_dict(checkpoint["states"][name])
        if self.rank == 0:
            self._records.truncate(checkpoint["records"])
        self._before = checkpoint["seconds"]
        self._watch = Stopwatch()
        if self.rank < len(checkpoint["random"]):
            drawn = checkpoint["random"][self.rank]
            _set_random_state(drawn, self.device)
            for made, position in zip(self._generators, drawn["generators"], strict=False):
                made.set_state(position.cpu())
        return int(checkpoint["epochs"])


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

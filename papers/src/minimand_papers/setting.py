"""The setting of a run, its jobs and their directories."""

import dataclasses
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minimand.errors import OptionError

from .experiment import Experiment, Part
from .store import slug

__all__ = [
    "Job",
    "RunSetting",
    "default_jobs",
    "device_of",
    "directory_of",
    "is_done",
    "options_of",
    "require_same_options",
]


@dataclasses.dataclass(frozen=True)
class RunSetting:
    """How an experiment is run.

    Args:
        name: The name of the experiment, or the path of its file.
        preset: The scale.
        options: The experiment's options; None: those of the preset.
        seeds: The seeds; None: those of the preset.
        out: The directory of all runs.
        data_dir: The directory of the datasets; None: ``MINIMAND_DATA`` or the user's cache directory.
        download: Whether missing datasets may be downloaded.
        resume: Whether to continue an earlier run; otherwise it is moved aside.
        continue_from: A result file of the same experiment and options, whose finished parts are taken; None: none.
        jobs: Number of parallel processes; None: one per core.
        threads: Threads of each process.
        tensorboard: Whether to write TensorBoard logs.
    """

    name: str
    preset: str = "laptop"
    options: Any = None
    seeds: tuple[int, ...] | None = None
    out: Path = Path("runs")
    data_dir: Path | None = None
    download: bool = False
    resume: bool = False
    continue_from: Path | None = None
    jobs: int | None = None
    threads: int = 1
    tensorboard: bool = False


class Job(NamedTuple):
    """One part for one seed; ``like`` is the seed whose records it takes, if the seed does not matter."""

    part: Part
    seed: int
    like: int | None = None

    @property
    def folder(self) -> Path:
        """The job's folder in the run's directory."""
        return Path(f"seed-{self.seed}") / slug(self.part.name)


def directory_of(out: Path, experiment: Experiment[Any], setting: RunSetting) -> Path:
    """The directory of an experiment at a preset; a dataset other than the preset's has its own directory."""
    usual = getattr(experiment.preset(setting.preset).options, "dataset", None)
    dataset = getattr(setting.options, "dataset", usual)
    return out / slug(experiment.name) / (setting.preset if dataset == usual else slug(f"{setting.preset}-{dataset}"))


def options_of(setting: RunSetting) -> dict[str, Any]:
    """The experiment's options as JSON values."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in dataclasses.asdict(setting.options).items()
    }


def require_same_options(where: Path, stored: dict[str, Any], options: dict[str, Any], remedy: str) -> None:
    """Refuse to continue a run of other options."""
    different = [
        f"{key}={stored.get(key)!r} there, {value!r} now" for key, value in options.items() if stored.get(key) != value
    ]
    if stored != options:
        raise OptionError(f"the run in {where} has other options ({'; '.join(different)}): {remedy}")


def is_done(directory: Path, job: Job) -> bool:
    """Whether a job is done."""
    return (directory / job.folder / "done.json").is_file()


def default_jobs(preset: str) -> int:
    """One process per accelerator if accelerators are used, else one per core."""
    return torch.accelerator.device_count() if device_of(preset).type != "cpu" else os.cpu_count() or 1


def device_of(preset: str) -> torch.device:
    """An accelerator for the preset ``paper``, if there is one; the other presets use the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True) if preset == "paper" else None
    if found is None:
        return torch.device("cpu")
    place = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    return torch.device(found.type, place)

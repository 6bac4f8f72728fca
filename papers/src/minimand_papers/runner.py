"""Running an experiment: all parts for every seed, in parallel processes, resumable, with one result file."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from minimand.errors import OptionError
from minimand.solvers.base import require_count

from .data.locks import locked
from .experiment import Experiment, Part
from .jobs import in_parallel, in_turn
from .progress import Display, Event
from .registry import find
from .results import RESULT, read_results, take_finished, write_result
from .setting import Job, RunSetting, default_jobs, directory_of, is_done, options_of, require_same_options
from .store import read_json, slug, sweep, write_json, writing

__all__ = ["RunSetting", "directory_of", "read_results", "run"]

# More processes or threads than this, or than there are cores, are taken for a mistake.
_MOST_PROCESSES = 64


def run(setting: RunSetting, display: Display | None = None) -> Path:
    """Run the jobs that are not done yet and return the path of the result file."""
    experiment = find(setting.name)
    preset = experiment.preset(setting.preset)
    setting = dataclasses.replace(
        setting,
        options=preset.options if setting.options is None else setting.options,
        seeds=tuple(dict.fromkeys(setting.seeds or preset.seeds)),
    )
    assert setting.seeds is not None
    _check(setting)
    display = display or Display(quiet=True)
    directory = directory_of(setting.out, experiment, setting)
    parts = list(experiment.parts(setting.options))
    _check_parts(experiment, parts)
    with _processes() as (rank, world), _locked(directory, rank), _swept(directory, world):
        if rank == 0:
            setting = _prepare(experiment, setting, directory)
        if world > 1:
            everyone = [setting.seeds]
            dist.broadcast_object_list(everyone)
            setting = dataclasses.replace(setting, seeds=everyone[0])
        assert setting.seeds is not None
        first = setting.seeds[0]
        jobs = [
            Job(part, seed, None if part.seeded or seed == first else first) for seed in setting.seeds for part in parts
        ]
        with display.of(experiment, len(jobs)):
            if rank == 0 and setting.continue_from is not None:
                take_finished(experiment, setting, directory, jobs)
            for job in _undone(jobs, directory, display):
                _forget_unresumable(directory / job.folder)
            waiting = [job for job in jobs if not is_done(directory, job)]
            workers = min(setting.jobs or default_jobs(setting.preset), len(waiting))
            if workers > 1 and world == 1:
                finished = in_parallel(setting, directory, waiting, workers, display)
            else:
                finished = in_turn(setting, directory, waiting, display)
            for _ in finished:
                if rank == 0:
                    write_result(experiment, setting, directory, jobs)
            if rank == 0:
                write_result(experiment, setting, directory, jobs)
    return directory / RESULT


def _check(setting: RunSetting) -> None:
    most = max(_MOST_PROCESSES, os.cpu_count() or 1)
    for name, count in (("threads", setting.threads), ("jobs", 1 if setting.jobs is None else setting.jobs)):
        require_count(name, count)
        if count > most:
            raise OptionError(f"{name} must be at most {most} on this machine, got {count}")
    for seed in setting.seeds or ():
        if type(seed) is not int or not 0 <= seed < 1 << 32:
            raise OptionError(f"a seed is a whole number from 0 to 2³² − 1, got {seed!r}")


def _check_parts(experiment: Experiment[Any], parts: list[Part]) -> None:
    names = [part.name for part in parts]
    if not names:
        raise OptionError(f"{experiment.name} has no parts with these options")
    if len({slug(name) for name in names}) < len(names):
        raise OptionError(f"{experiment.name} has two parts of the same name among {', '.join(names)}")
    missing = {need for part in parts for need in part.needs} - set(names)
    if missing:
        raise OptionError(f"{experiment.name} has no part {', '.join(sorted(missing))}, which others need")


def _prepare(experiment: Experiment[Any], setting: RunSetting, directory: Path) -> RunSetting:
    """Prepare the directory: on resuming, check that the protocol is the same; otherwise move an earlier run aside."""
    options = options_of(setting)
    path = directory / "protocol.json"
    assert setting.seeds is not None
    # A process that was killed before its protocol was complete has left nothing that is worth keeping.
    sweep(directory)
    if path.is_file() and setting.resume:
        stored = read_json(path, {"options": dict, "seeds": list})
        remedy = "give the same options, or leave out --resume to start again"
        require_same_options(directory, stored["options"], options, remedy)
        setting = dataclasses.replace(setting, seeds=(*stored["seeds"], *setting.seeds))
        _check(setting)
        setting = dataclasses.replace(setting, seeds=tuple(dict.fromkeys(setting.seeds or ())))
    elif any(file.is_file() and file != path for file in directory.rglob("*")):
        with writing(directory):
            directory.rename(_aside(directory))
    protocol = {"experiment": experiment.name, "preset": setting.preset, "options": options, "seeds": setting.seeds}
    write_json(path, protocol)
    return setting


def _aside(directory: Path) -> Path:
    number = 1
    while (path := directory.with_name(f"{directory.name}.old-{number}")).exists():
        number += 1
    return path


def _undone(jobs: Iterable[Job], directory: Path, display: Display) -> Iterator[Job]:
    for job in jobs:
        if is_done(directory, job):
            display(Event(job.part.name, job.seed, finished=True))
        else:
            yield job


def _forget_unresumable(folder: Path) -> None:
    """Delete the records of a part without a checkpoint, because the part starts again."""
    if not (folder / "checkpoint.pt").is_file():
        with writing(folder):
            (folder / "metrics.jsonl").unlink(missing_ok=True)


@contextlib.contextmanager
def _processes() -> Iterator[tuple[int, int]]:
    """Yield (rank, world); under ``torchrun`` the process group is created here."""
    if "TORCHELASTIC_RUN_ID" not in os.environ and not dist.is_initialized():
        yield 0, 1
        return
    own = not dist.is_initialized()
    if own:
        dist.init_process_group()
    try:
        yield dist.get_rank(), dist.get_world_size()
        if own:
            # A process that closes its connections while another still uses them can abort both.
            dist.barrier()
    finally:
        if own:
            dist.destroy_process_group()


@contextlib.contextmanager
def _swept(directory: Path, world: int) -> Iterator[None]:
    """Remove half-written files at the end; with several ranks other processes may still be writing."""
    try:
        yield
    finally:
        if world == 1:
            sweep(directory)


@contextlib.contextmanager
def _locked(directory: Path, rank: int) -> Iterator[None]:
    """Hold the lock of the directory, so that two runs do not overwrite each other."""
    from filelock import Timeout

    if rank:
        yield
        return
    # The lock is beside the directory, because the directory may be moved.
    held = locked(directory.with_name(f".{directory.name}.lock"), wait=False)
    with contextlib.ExitStack() as stack:
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(held)
        except Timeout:
            raise OptionError(
                f"another process is running in {directory}; wait for it, or give another --out"
            ) from None
        except OSError as error:
            raise OptionError(f"cannot write to {directory.parent}: {error.strerror}; give another --out") from None
        yield

"""Running jobs one after another in this process, or in parallel processes."""

import contextlib
import dataclasses
import os
import queue
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from threadpoolctl import threadpool_limits

from minimand.errors import MinimandError, MissingExtra, OptionError

from .context import Lab
from .experiment import Metrics
from .progress import Display, Event
from .registry import find
from .setting import Job, RunSetting, device_of, options_of
from .store import read_json, versions, write_json, writing

__all__ = ["execute", "in_parallel", "in_turn"]

# Seconds that a worker has to end before its unfinished files are removed.
_GRACE = 5.0


def execute(setting: RunSetting, directory: Path, job: Job, notify: Callable[[Event], None]) -> None:
    """Run one part for one seed in this process."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if job.like is None:
        _run(setting, directory, job, notify, rank, world)
    elif rank == 0:
        _copy(directory, job, job.like)
    if world > 1:
        dist.barrier()
    notify(Event(job.part.name, job.seed, finished=True))


def _run(
    setting: RunSetting, directory: Path, job: Job, notify: Callable[[Event], None], rank: int, world: int
) -> None:
    experiment = find(setting.name)
    torch.set_num_threads(setting.threads)
    random.seed(job.seed)
    np.random.seed(job.seed)  # noqa: NPY002
    torch.manual_seed(job.seed)
    lab = Lab(
        directory / job.folder,
        job.seed,
        device=device_of(setting.preset),
        data_dir=setting.data_dir,
        download=setting.download,
        rank=rank,
        world=world,
        notify=lambda done, total: notify(Event(job.part.name, job.seed, done, total)),
    )
    with threadpool_limits(setting.threads), _tensorboard(setting, lab) as log:
        for metrics in experiment.run(setting.options, job.part.name, lab):
            record = lab.record(metrics)
            log(record)
            notify(Event(job.part.name, job.seed, metrics=record))
    if rank == 0:
        ended = {"seconds": round(lab.seconds, 2), "records": lab.recorded, "versions": versions()}
        write_json(lab.directory / "done.json", ended)


def _copy(directory: Path, job: Job, seed: int) -> None:
    """Take the records and tensors of the seed that ran; they took no time here."""
    source, target = directory / Job(job.part, seed).folder, directory / job.folder
    with writing(target):
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("done.json"), dirs_exist_ok=True)
    write_json(target / "done.json", {**read_json(source / "done.json"), "seconds": 0.0})


def in_turn(setting: RunSetting, directory: Path, jobs: list[Job], display: Display) -> Iterator[Job]:
    """Run one job after another; yields each job when it is done."""
    for job in _ordered(jobs):
        with _named(job):
            execute(setting, directory, job, display)
        yield job


def _ordered(jobs: list[Job]) -> Iterator[Job]:
    """Order the jobs such that each comes after those it needs; needed jobs outside ``jobs`` are done already."""
    left = list(jobs)
    while left:
        ready = next((job for job in left if not _blocked(job, left)), None)
        if ready is None:
            raise OptionError(f"the parts need each other in a circle: {', '.join(job.part.name for job in left)}")
        left.remove(ready)
        yield ready


def _blocked(job: Job, pending: Iterable[Job]) -> bool:
    return any(
        (other.seed == job.seed and other.part.name in job.part.needs)
        or (other.seed == job.like and other.part.name == job.part.name)
        for other in pending
    )


def in_parallel(setting: RunSetting, directory: Path, jobs: list[Job], workers: int, display: Display) -> Iterator[Job]:
    """Run jobs in ``workers`` processes, each after those it needs; yields each job when it is done."""
    list(_ordered(jobs))
    # Plain values, because a worker may not be able to unpickle classes of a user's file.
    plain, options = dataclasses.replace(setting, options=None), options_of(setting)
    context = multiprocessing.get_context("spawn")
    events = context.Queue()
    started = context.Value("i", 0)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(events, started))
    waiting, running = list(jobs), dict[Future[None], Job]()
    try:
        while waiting or running:
            pending = [*waiting, *running.values()]
            ready = [job for job in waiting if not _blocked(job, pending)]
            # At most one job per worker, so that a job that becomes ready later can still come first.
            for job in ready[: workers - len(running)]:
                waiting.remove(job)
                with _deaf():
                    running[pool.submit(_work, plain, options, directory, job)] = job
            ended, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
            _drain(events, display)
            for future in ended:
                job = running.pop(future)
                with _named(job):
                    future.result()
                yield job
        _drain(events, display)
    except BrokenProcessPool as error:
        raise MinimandError("a worker process died (out of memory?); --resume continues from its checkpoint") from error
    finally:
        _stop(pool)


def _stop(pool: ProcessPoolExecutor) -> None:
    """Stop the workers without waiting for their jobs; their checkpoints are on disk."""
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(_GRACE)


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Processes that are started here never see Ctrl-C: this one does, and stops them. It is delivered afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_events: Any = None


def _start_worker(events: Any, started: Any) -> None:
    global _events
    _events = events
    with started.get_lock():
        # Each worker takes the next accelerator, if there are any.
        os.environ["LOCAL_RANK"] = str(started.value)
        started.value += 1
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    """Stop this worker when its parent was killed, because another process may have resumed the run."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _work(setting: RunSetting, options: dict[str, Any], directory: Path, job: Job) -> None:
    restored = find(setting.name).restore(setting.preset, options)
    execute(dataclasses.replace(setting, options=restored), directory, job, _events.put)


def _drain(events: Any, display: Display) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            display(events.get_nowait())


@contextlib.contextmanager
def _named(job: Job) -> Iterator[None]:
    """Add the part and the seed to an error."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the part {job.part.name!r}, seed {job.seed}")
        raise


@contextlib.contextmanager
def _tensorboard(setting: RunSetting, lab: Lab) -> Iterator[Callable[[Metrics], None]]:
    if not setting.tensorboard or lab.rank:
        yield lambda record: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtra('TensorBoard is not installed: pip install "minimand-papers[tensorboard]"') from error
    with SummaryWriter(str(lab.directory / "tensorboard")) as writer:

        def log(record: Metrics) -> None:
            for key, value in record.items():
                if isinstance(value, int | float):
                    writer.add_scalar(key, value, int(record.get("epoch", len(lab._records))))

        yield log

"""Work on several processes of one gloo group."""

import gc
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(work: Callable[[int], Any], count: int = 2) -> list[Any]:
    """What ``work(rank)``, a function of a module, returns on each of ``count`` processes of one thread."""
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_join, args=(work, count, Path(folder, "meeting").as_uri(), results), nprocs=count)
        return [torch.load(io.BytesIO(results[rank]), weights_only=False) for rank in range(count)]


def _join(rank: int, work: Callable[[int], Any], count: int, meeting: str, results: dict[int, bytes]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count)
    held = io.BytesIO()
    torch.save(work(rank), held)
    results[rank] = held.getvalue()
    # A group that one process leaves early, or that a forgotten network holds, may wait for ever.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()

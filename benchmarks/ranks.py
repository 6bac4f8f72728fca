"""Factorisations with rows sharded over one, two and four processes: processor time and bytes of a sweep.

The processor time is that of the slowest process, which more processes than cores do not distort. Bytes are the sizes
of the tensors that a process all-reduces, whatever the ring sends for them.
"""

import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import Ratio, Row, along
from minimand.factor import NMF, MatrixCompletion
from minimand.factor.matrices import RowSharding

__all__ = ["run"]

RANKS = (1, 2, 4)
SWEEPS = (3, 13)
K, COLUMNS = 15, 1000


def _dense(rank: int, count: int, rows: int = 64000) -> np.ndarray:
    """The process's rows of a matrix of k sparse parts and noise, in float32."""
    right, here = np.random.default_rng(0), np.random.default_rng([1, rank])
    U, V = (
        rng.random((size, K)) * (rng.random((size, K)) < 0.4) for rng, size in ((here, rows // count), (right, COLUMNS))
    )
    return (U @ V.T + 0.1 * here.random((rows // count, COLUMNS))).astype(np.float32)


def _holes(rank: int, count: int) -> sp.csr_array:
    """A twentieth of the entries."""
    Y = _dense(rank, count, 16000)
    return sp.csr_array(Y * (np.random.default_rng([2, rank]).random(Y.shape) < 0.05))


#: The process's rows, and an estimator whose fit makes as many sweeps as it is told.
TASKS: dict[str, tuple[Callable[[int, int], Any], Callable[[int], Any]]] = {
    "NMF 64000×1000, float32": (
        _dense,
        lambda sweeps: NMF(1.0, n_components=K, effort=None, tol=1e-15, max_iter=sweeps),
    ),
    "completion 16000×1000, 800,000 entries": (
        _holes,
        lambda sweeps: MatrixCompletion(1.0, n_components=K, effort=None, tol=1e-15, max_iter=sweeps),
    ),
}


def _measured(name: str, rank: int, count: int) -> tuple[float, float]:
    """Processor seconds and bytes of a sweep in this process: what the last sweeps of a longer fit add."""
    make, model = TASKS[name]
    Y = make(rank, count)
    group = dist.group.WORLD if count > 1 else None
    sent = [0]
    reduce = RowSharding._reduce

    def counted(self: RowSharding, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        sent[0] += tensor.numel() * tensor.element_size() if self.group is not None else 0
        return reduce(self, tensor, op)

    RowSharding._reduce = counted  # type: ignore[method-assign]
    found = []
    for sweeps in (SWEEPS[0], *SWEEPS):  # the first warms up
        sent[0], begin = 0, time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = model(sweeps).set_params(random_state=0).fit(Y, process_group=group).n_iter_
        found.append((time.process_time() - begin, sent[0], made))
    RowSharding._reduce = reduce  # type: ignore[method-assign]
    (low, few, first), (high, many, last) = found[1:]
    return (high - low) / (last - first), (many - few) / (last - first)


def _join(rank: int, count: int, meeting: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count)
    for name in TASKS:
        results[name, rank] = _measured(name, rank, count)
    dist.barrier()
    dist.destroy_process_group()


def _on(count: int) -> dict[str, tuple[float, float]]:
    """Seconds of the slowest process and bytes of a sweep, for each task."""
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_join, args=(count, Path(folder, "meeting").as_uri(), results), nprocs=count)
        return {
            name: tuple(map(max, zip(*(results[name, rank] for rank in range(count)), strict=True))) for name in TASKS
        }  # type: ignore[misc]


def run() -> list[Row]:
    """The processor time of a sweep over that of one process, by the number of processes."""
    measured = {count: _on(count) for count in RANKS}
    rows = []
    for name in TASKS:
        for count in RANKS:
            seconds, sent = measured[count][name]
            value = seconds / measured[1][name][0]
            note = f"{1e3 * seconds:.1f} ms and {sent / 1024:.0f} KiB all-reduced a sweep in each process"
            title = f"processes: a sweep of {name}, k = {K}, processor time over one process"
            rows.append(along(title, count, Ratio(value, value, value), note))
    return rows

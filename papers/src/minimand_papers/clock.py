"""A stopwatch that is robust to other load on the machine."""

import os
import time

import torch
import torch.distributed as dist

__all__ = ["Stopwatch"]


class Stopwatch:
    """Seconds since its creation.

    With one CPU thread it measures processor time, which other processes and pauses do not change. The time of a child
    process is included after the child has ended and been waited for. With several threads, an accelerator or a process
    group it measures wall-clock time.
    """

    def __init__(self) -> None:
        several = torch.get_num_threads() > 1 or torch.accelerator.is_available() or dist.is_initialized()
        self._alone = not several
        self._begin = self._now()

    @property
    def seconds(self) -> float:
        """The seconds since creation."""
        return self._now() - self._begin

    def _now(self) -> float:
        if not self._alone:
            return time.perf_counter()
        times = os.times()
        return time.process_time() + times.children_user + times.children_system

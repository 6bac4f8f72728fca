"""How long work takes, whatever else the machine does."""

import os
import time

import torch
import torch.distributed as dist

__all__ = ["Stopwatch"]


class Stopwatch:
    """Seconds of work since it was made.

    On one CPU thread they are the processor's, which neither a second run beside this one nor a pause makes longer; a
    process that was started counts as soon as it has ended and been waited for. On several threads, with an
    accelerator, or in a process group, where waiting is part of the work, they are the wall's.
    """

    def __init__(self) -> None:
        several = torch.get_num_threads() > 1 or torch.accelerator.is_available() or dist.is_initialized()
        self._alone = not several
        self._begin = self._now()

    @property
    def seconds(self) -> float:
        """So far."""
        return self._now() - self._begin

    def _now(self) -> float:
        if not self._alone:
            return time.perf_counter()
        times = os.times()
        return time.process_time() + times.children_user + times.children_system

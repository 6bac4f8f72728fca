"""How long work takes, whatever else the machine does."""

import os
import time

import torch

__all__ = ["Stopwatch"]


class Stopwatch:
    """Seconds since it was made.

    On one CPU thread they are the processor's, which neither a second run beside this one nor a pause makes longer;
    processes that were started and have ended count as well. On several threads or an accelerator they are the wall's.
    """

    def __init__(self) -> None:
        self._alone = torch.get_num_threads() == 1 and not torch.accelerator.is_available()
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

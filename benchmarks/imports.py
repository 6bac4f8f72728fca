"""The time that ``import minimand`` adds to ``import torch``, in fresh interpreters."""

import resource
import subprocess
import sys

from benchmarks import Row, at_most, ratio, reported

__all__ = ["run"]

ROUNDS = 9


def _seconds(code: str) -> float:
    """Processor seconds of an interpreter that runs the code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run() -> list[Row]:
    """The package alone, whose parts are loaded on first use, and two of the parts."""
    rows = []
    for part, base in (("minimand", "torch"), ("minimand.nn", "torch"), ("minimand.factor", "torch, sklearn.base")):
        _seconds(f"import {base}, {part}")
        pairs = [(_seconds(f"import {base}, {part}"), _seconds(f"import {base}")) for _ in range(ROUNDS)]
        name, found = f"import {part} besides {base}, over the latter", ratio(*zip(*pairs, strict=True))
        rows.append(at_most(name, found, 1.1) if part == "minimand" else reported(name, found))
    return rows

"""What ``import minimand`` adds to ``import torch``, in fresh interpreters."""

import resource
import subprocess
import sys

from benchmarks import Row, at_most, ratio

__all__ = ["run"]

ROUNDS = 9


def _seconds(code: str) -> float:
    """The processor's seconds of an interpreter that runs the code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run() -> list[Row]:
    """The whole of it, and what a user of the factorisations or of the command line adds."""
    codes = {
        "import minimand": "import torch, minimand",
        "import minimand.factor": "import torch, sklearn.base, minimand.factor",
    }
    bases = {"import minimand": "import torch", "import minimand.factor": "import torch, sklearn.base"}
    rows = []
    for name, code in codes.items():
        _seconds(code)
        pairs = [(_seconds(code), _seconds(bases[name])) for _ in range(ROUNDS)]
        found = ratio(*zip(*pairs, strict=True))
        rows.append(at_most(f"{name} / {bases[name]}", found, 1.1, "processor time of fresh interpreters"))
    return rows

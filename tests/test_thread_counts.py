"""Law: results with one and with two threads agree to rounding; docs/reliability.rst states to how much."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# The order of sums differs, and iterations amplify the difference a little.
LIMITS = {"float32": 1e-4, "float64": 1e-12}
PROGRAM = """
import sys, warnings, torch
from tests.cases.computations import compute
warnings.simplefilter("ignore")  # of fits that are cut short
torch.save(compute(int(sys.argv[1])), sys.argv[2])
"""


def _computed(threads: int, path: Path) -> dict[tuple[str, str], torch.Tensor]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", PROGRAM, str(threads), str(path)], check=True, env=environment, cwd=root)
    return torch.load(path)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], torch.Tensor]]:
    folder = tmp_path_factory.mktemp("threads")
    return [_computed(threads, folder / f"{threads}.pt") for threads in (1, 2)]


def test_one_and_two_threads_agree(results: list[dict[tuple[str, str], torch.Tensor]]) -> None:
    one, two = results
    for key, value in one.items():
        difference = float((value - two[key]).norm() / value.norm())
        assert difference <= LIMITS[key[1]], f"{key}: {difference:.1e}"

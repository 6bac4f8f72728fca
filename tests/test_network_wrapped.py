"""Law: compiled and distributed networks are read like plain ones, and threads do not disturb a reading."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("part", ["compiled", "distributed", "sharded", "threads"])
def test_wrapped_networks_are_read(part):
    root = Path(__file__).parent.parent
    command = [sys.executable, "-W", "ignore", "-m", "tests.cases.wrapped", part]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

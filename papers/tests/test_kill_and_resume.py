"""Law: a run that is killed at any moment and resumed ends in the numbers of a run that is not."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "kill_and_resume.py"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")


def test_a_few_kills() -> None:
    call = [sys.executable, str(SCRIPT), "--kills", "4", "--seed", "3", "--parallel", "0"]
    done = subprocess.run([*call, "dropout-digits", "layer-convergence", "cs-phases"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("4 kills, 0 runs ended in other numbers\n")

"""Law: a run that is killed at any moment and resumed ends in the numbers of a run that is not."""

import subprocess
import sys
from pathlib import Path

import pytest

from minimand_papers.registry import find
from minimand_papers.runner import RunSetting, run
from minimand_papers.setting import directory_of

SCRIPT = Path(__file__).parent / "kill_and_resume.py"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")


def test_a_few_kills() -> None:
    call = [sys.executable, str(SCRIPT), "--kills", "4", "--seed", "3", "--parallel", "0"]
    done = subprocess.run([*call, "dropout-digits", "layer-convergence", "cs-phases"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("4 kills, 0 runs ended in other numbers\n")


def test_a_run_without_a_protocol_yet_leaves_nothing_behind(tmp_path: Path) -> None:
    setting = RunSetting("layer-convergence", "smoke", seeds=(0,), out=tmp_path, jobs=1, resume=True)
    experiment = find(setting.name)
    directory = directory_of(
        tmp_path, experiment, RunSetting(setting.name, "smoke", experiment.presets["smoke"].options)
    )
    directory.mkdir(parents=True)
    (directory / ".a1b2c3d4.partial").write_bytes(b"{")
    run(setting)
    assert (directory / "result.json").is_file()
    assert not [path for path in tmp_path.rglob("*") if ".old" in path.name or path.name.endswith(".partial")]

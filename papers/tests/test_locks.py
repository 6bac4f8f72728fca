"""Law: a lock is held by one at a time, and leaves no file behind, however its holder ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from minimand_papers.data.locks import locked

# Takes the lock again and again, adds to a counter that is safe only under it, and says whether anyone else was there.
CONTENDER = """
import os, sys
from pathlib import Path
from minimand_papers.data.locks import locked
folder = Path(sys.argv[1])
for _ in range(60):
    with locked(folder / "lock"):
        os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
        count = int((folder / "count").read_text())
        (folder / "count").write_text(str(count + 1))
        os.unlink(folder / "inside")
"""


def test_processes_that_wait_never_hold_it_together(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    processes = [subprocess.Popen([sys.executable, "-c", CONTENDER, str(tmp_path)]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "180"
    assert os.listdir(tmp_path) == ["count"]


@pytest.mark.parametrize("wait", [True, False])
def test_a_lock_on_a_file_that_lost_its_name_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    """Opened before the holder removed it, locked after: the race of every lock file that is removed."""
    path, seen, same = tmp_path / "lock", [], os.path.samestat

    def replaced(one: os.stat_result, other: os.stat_result) -> bool:
        if not seen:
            path.rename(tmp_path / "removed")  # on a network, what is removed while it is open gets another name
            path.touch()
        seen.append(same(os.stat(tmp_path / "removed"), one))
        return same(one, path.stat())

    monkeypatch.setattr("minimand_papers.data.locks.os.path.samestat", replaced)
    with locked(path, wait=wait):
        assert seen == [True, False]
        with pytest.raises(Timeout):
            FileLock(path).acquire(timeout=0)
    assert os.listdir(tmp_path) == ["removed"]


def test_without_waiting_it_is_refused_at_once_and_stays_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path):
        with pytest.raises(Timeout), locked(path, wait=False):
            pass
        assert path.exists()
    with locked(path, wait=False):
        pass
    assert not path.exists()


def test_the_file_of_another_holder_is_not_removed(tmp_path: Path) -> None:
    """Somebody deletes the file by hand, and a second run takes a lock of the same name."""
    path = tmp_path / "lock"
    with locked(path):
        path.unlink()
        second = FileLock(path)
        second.acquire(timeout=0)
    with pytest.raises(Timeout), locked(path, wait=False):
        pass
    second.release()


def test_what_a_killed_holder_left_is_taken_and_removed(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    with pytest.raises(KeyboardInterrupt), locked(tmp_path / "lock", wait=False):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())

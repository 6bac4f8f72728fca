"""A lock file for one process at a time, removed afterwards."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["locked"]


class _Removed(Exception):
    """The lock is of a file that no longer has the name."""


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of this name, and leave no file behind; without ``wait`` raise ``filelock.Timeout`` at once.

    A file may be removed only by who holds its lock, and a lock counts only if its file still has the name: who
    opened the file before it was removed gets the lock of a file that nobody else would look at, and tries again.
    After SIGKILL the file stays, without its lock; the next one to take it removes it.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "lock"
    >>> with locked(path):
    ...     path.exists()
    True
    >>> path.exists()
    False
    """
    from filelock import FileLock

    mine: os.stat_result | None = None

    def has_name() -> bool:
        with contextlib.suppress(FileNotFoundError):
            return mine is not None and os.path.samestat(mine, path.stat())
        return False

    def require_name(descriptor: int) -> None:
        nonlocal mine
        mine = os.fstat(descriptor)
        if not has_name():
            raise _Removed

    lock = FileLock(path, on_acquired=require_name)
    while not lock.is_locked:
        with contextlib.suppress(_Removed):
            lock.acquire(timeout=-1 if wait else 0)
    try:
        yield
    finally:
        # Where an open file cannot be removed, on Windows, releasing does it. Whoever deleted ours by hand may have put
        # another in its place, whose lock is not ours.
        with contextlib.suppress(OSError):
            if has_name():
                path.unlink()
        lock.release()

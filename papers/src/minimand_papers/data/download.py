"""Downloads through pooch: checked, resumed where they stopped, and never visible before they are complete.

A file is written to ``NAME.part`` and takes its name only when its checksum is right. An interrupted download, even by
SIGKILL, continues at the next call where the server allows it and starts again where not. Processes that want the same
dataset at once wait for one another.
"""

import gzip
import os
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

from minimand.errors import DataError

from .formats import damaged
from .loading import missing
from .locks import locked
from .registry import DatasetRecord, Files, Remote

__all__ = ["fetch"]

# A broken connection loses at most one chunk.
_CHUNK = 1 << 16
_TRIES = 4
_EVERYTHING = 200
_NO_SUCH_RANGE = 416


class _RichBar:
    """pooch's progress bar, drawn by rich; ``done`` bytes were there before."""

    def __init__(self, progress: Any, name: str, done: int) -> None:
        self._progress, self._done = progress, done
        self._task = progress.add_task(name, total=None, completed=done)

    @property
    def total(self) -> int:
        """The bytes of this transfer."""
        return int(self._progress.tasks[self._task].total or 0) - self._done

    @total.setter
    def total(self, amount: int) -> None:
        self._progress.update(self._task, total=self._done + amount)

    def restart(self) -> None:
        """Forget what was there: the server sends everything."""
        self._done = 0
        self.reset()

    def update(self, amount: int) -> None:
        """So many bytes more."""
        self._progress.update(self._task, advance=amount)

    def reset(self) -> None:
        """Back to where this transfer began."""
        self._progress.update(self._task, completed=self._done)

    def close(self) -> None:
        """Nothing: the display closes with its context."""


def fetch(record: DatasetRecord, source: Files, directory: Path, *, progress: bool = True) -> None:
    """Download the missing files of a dataset into the data directory and unpack them."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory / f".{record.name}.lock"):
            absent = missing(source, directory)  # now: another process may have been faster
            if absent and source.archive:
                _fetch_archive(source, directory, progress)
            elif absent:
                _fetch_files(source, directory, absent, progress)
    except OSError as error:
        raise DataError(
            f"{record.title} could not be written to {directory} ({error.strerror or error}): make room or "
            f"permission there, or name another directory by data_dir= or MINIMAND_DATA"
        ) from error


def _fetch_files(source: Files, directory: Path, absent: list[str], progress: bool) -> None:
    folder = directory / source.folder
    folder.mkdir(exist_ok=True)
    wanted = {name + ending for name in absent for ending in source.variants}
    for remote in source.remotes:
        if remote.name in wanted:
            _download(remote, folder / remote.name, progress)


def _fetch_archive(source: Files, directory: Path, progress: bool) -> None:
    (remote,) = source.remotes
    archive = directory / remote.name
    ours = _download(remote, archive, progress)
    _unpack(archive, source, directory)
    if ours:
        archive.unlink()


def _download(remote: Remote, target: Path, progress: bool) -> bool:
    """Bring the file to its place unless it is there; whether it had to be transferred."""
    if target.is_file() and _md5(target) == remote.md5:
        return False
    part = target.with_name(f"{target.name}.part")
    reasons = []
    for address in remote.addresses:
        reason = _attempt(address, remote, part, progress)
        if reason is None:
            os.replace(part, target)
            return True
        reasons.append(f"{address}: {reason}")
    if not _size(part):
        part.unlink(missing_ok=True)
    kept = f"; {_size(part):,} of {remote.size:,} bytes arrived and are kept for the next try" if _size(part) else ""
    raise DataError(
        f"{remote.name} could not be downloaded ({'; '.join(reasons)}): try again, or get it by other means and "
        f"put it at {target}, then repeat the same call{kept}"
    )


def _attempt(address: str, remote: Remote, part: Path, progress: bool) -> str | None:
    """Complete ``part`` from one address; None when its checksum is right, else why not."""
    from requests.exceptions import ChunkedEncodingError, HTTPError, RequestException

    reason = ""
    for _ in range(_TRIES):
        begin = _size(part)
        try:
            _transfer(address, remote.name, part, progress)
        except HTTPError as error:
            status = None if error.response is None else error.response.status_code
            reason = f"the server answered {status}"
            if status != _NO_SUCH_RANGE or not begin:
                return reason
            part.unlink()
            continue
        except RequestException as error:
            broke = isinstance(error, ChunkedEncodingError) or _size(part) > begin
            reason = "the connection broke" if broke else f"no connection, {_root(error)}"
            if _size(part) <= begin:
                return reason
            continue
        found = _md5(part)
        if found == remote.md5:
            return None
        reason = f"the {_size(part):,} bytes it sent have the md5 {found}, not the published {remote.md5}"
        part.unlink()
        if not begin:
            return reason
    return reason


def _transfer(address: str, name: str, part: Path, progress: bool) -> None:
    """Append to ``part`` what it lacks, or replace it where the server sends everything."""
    from pooch import HTTPDownloader

    # Without "identity" a server may announce a .gz file as an encoding, and it would arrive unpacked.
    headers = {"Accept-Encoding": "identity"}
    with part.open("ab") as file, _display(progress) as display:
        if done := file.tell():
            headers["Range"] = f"bytes={done}-"
        bar = _RichBar(display, name, done)

        def answered(response: Any, *_: Any, **__: Any) -> None:
            if response.status_code == _EVERYTHING:
                file.truncate(0)
                bar.restart()

        download = HTTPDownloader(progressbar=bar, chunk_size=_CHUNK, headers=headers, hooks={"response": answered})
        download(address, file, None)
        os.fsync(file.fileno())


def _display(progress: bool) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), disable=not progress)


def _unpack(archive: Path, source: Files, directory: Path) -> None:
    """Take the dataset's files out of the archive; each appears in its folder complete or not at all."""
    scratch = directory / f".{source.folder}.unpack"
    wanted = {f"{source.folder}/{name}": name for name in (*source.train, *source.test)}
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        with tarfile.open(archive) as tar:
            for member in tar:
                _require_inside(archive, member, source.folder)
                if member.isfile() and str(PurePosixPath(member.name)) in wanted:
                    tar.extract(member, scratch, filter="data")
        if absent := [path for path in wanted if not (scratch / path).is_file()]:
            raise damaged(archive, f"lacks {', '.join(absent)}")
        folder = directory / source.folder
        folder.mkdir(exist_ok=True)
        for path, name in wanted.items():
            os.replace(scratch / path, folder / name)
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise damaged(archive, f"is no tar archive, or damaged ({error})") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _require_inside(archive: Path, member: tarfile.TarInfo, folder: str) -> None:
    """Refuse an archive that would write anything but files in its one folder."""
    path = PurePosixPath(member.name)
    inside = path.parts[:1] == (folder,) and ".." not in path.parts
    if not inside or not (member.isfile() or member.isdir()):
        raise DataError(
            f"{archive} was not unpacked: its member {member.name!r} is not a plain file in {folder}/, as the "
            f"publisher's are; delete the archive and get it from its publisher"
        )


def _md5(path: Path) -> str:
    from pooch import file_hash

    return str(file_hash(str(path), alg="md5"))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _root(error: BaseException) -> str:
    """The innermost cause, which names the trouble shortest."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    return str(error) or type(error).__name__

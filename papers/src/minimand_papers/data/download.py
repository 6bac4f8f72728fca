"""Downloads: checked, resumed where they stopped, and never visible before they are complete.

A file is written to ``NAME.part`` and takes its name only when its checksum is right. An interrupted download, even by
SIGKILL, continues at the next call where the server allows it and starts again where not. Processes that want the same
dataset at once wait for one another.
"""

import contextlib
import errno
import gzip
import hashlib
import os
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

from minimand.errors import DataError

from ..untrusted import BoundedStream, appending
from .formats import damaged
from .loading import missing
from .locks import locked
from .registry import DatasetRecord, Files, Remote
from .transfer import Everything, TransferError, received

__all__ = ["fetch"]

_TRIES = 4
# The most bytes that an archive may unpack to; the publishers' archives unpack to 185 MB.
_LARGEST = 1 << 30


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
    reason = ""
    if _size(part) > remote.size:
        part.unlink()
    for _ in range(_TRIES):
        begin = _size(part)
        try:
            if begin < remote.size or not begin:
                _transfer(address, remote, part, progress)
            if (found := _md5(part)) == remote.md5:
                return None
            reason = f"the {_size(part):,} bytes it sent have the md5 {found}, not the published {remote.md5}"
            part.unlink()
        except TransferError as error:
            reason = str(error)
            if error.useless:
                part.unlink()
            elif _size(part) > begin:
                continue
            else:
                return reason
        if not begin:
            return reason
    return reason


def _transfer(address: str, remote: Remote, part: Path, progress: bool) -> None:
    """Append to ``part`` what it lacks, or replace it where the server sends everything."""
    with (
        appending(part) as file,
        _display(progress) as display,
        contextlib.closing(received(address, file.tell(), remote.size)) as pieces,
    ):
        task = display.add_task(remote.name, total=remote.size, completed=file.tell())
        for piece in pieces:
            if isinstance(piece, Everything):
                file.truncate(file.seek(0))
            if file.write(piece) < len(piece):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            display.update(task, completed=file.tell())
        os.fsync(file.fileno())
        if file.tell() < remote.size:
            raise TransferError("the connection broke")


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
        _remove(scratch)
        scratch.mkdir()
        with gzip.open(archive) as packed:
            file: Any = BoundedStream(packed, _LARGEST)
            with tarfile.open(fileobj=file, mode="r|") as tar:
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
    except DataError:
        raise
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
        raise damaged(archive, f"is no tar archive, or damaged ({error})") from error
    finally:
        _remove(scratch)


def _remove(folder: Path) -> None:
    """Remove a folder with all it holds, or the link in its place."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


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
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0

"""Downloads, against a server on this machine: complete and checked, or not there at all."""

import dataclasses
import gzip
import hashlib
import io
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from minimand.errors import DataError
from minimand_papers.data import DatasetRecord, Remote, load, registry
from minimand_papers.data.transfer import CHUNK
from test_data import idx, pixels


class Server(ThreadingHTTPServer):
    """Serves ``files``; ``cut`` holds, for a path, after how many bytes each of the next answers breaks off."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.cut: dict[str, list[int]] = {}
        self.ranges = True
        self.lengths = True
        self.hold: threading.Event | None = None
        self.log: list[tuple[str, str | None]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.log.append((self.path, wanted))
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        begin = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.ranges else 0
        if begin >= len(content):
            self.send_error(416)
            return
        body = content[begin:]
        self.send_response(206 if begin else 200)
        if self.server.lengths:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        cuts = self.server.cut.get(self.path)
        self.wfile.write(body[: cuts.pop(0)] if cuts else body)
        if self.server.hold is not None:
            self.wfile.flush()
            self.server.hold.wait(30)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    served = Server()
    thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield served
    served.shutdown()
    thread.join()
    served.server_close()


def at(record: DatasetRecord, server: Server, contents: dict[str, bytes], *, md5: str | None = None) -> DatasetRecord:
    """The dataset as if its publisher were the server."""
    remotes = tuple(
        Remote(name, (f"{server.address}/{name}",), md5 or hashlib.md5(content).hexdigest(), len(content))
        for name, content in contents.items()
    )
    server.files |= {f"/{name}": content for name, content in contents.items()}
    return dataclasses.replace(record, source=dataclasses.replace(record.source, remotes=remotes))


def mnist(server: Server, **options: str) -> DatasetRecord:
    contents = {}
    for remote in registry["mnist"].source.remotes:
        array = pixels(400, 28, 28) if "images" in remote.name else np.zeros(400, np.uint8)
        contents[remote.name] = gzip.compress(idx(array))
    return at(registry["mnist"], server, contents, **options)


def archive(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def cifar_members() -> dict[str, bytes]:
    source = registry["cifar10"].source
    return {f"{source.folder}/{name}": b"\3" * 3073 * 2 for name in (*source.train, *source.test)}


def cifar(server: Server, members: dict[str, bytes]) -> DatasetRecord:
    return at(registry["cifar10"], server, {"cifar-10-binary.tar.gz": archive(members)})


def names(root: Path) -> set[str]:
    """Everything under the data directory, except locks."""
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.suffix != ".lock"}


FIRST = "train-images-idx3-ubyte.gz"


def test_a_good_file(server: Server, tmp_path: Path) -> None:
    record = mnist(server)
    data = load(record, tmp_path / "new" / "place", download=True, progress=False)
    assert len(data.train) == len(data.test) == 400
    assert names(tmp_path / "new" / "place") == {f"mnist/{remote.name}" for remote in record.source.remotes}
    server.log.clear()
    load(record, tmp_path / "new" / "place", download=True)
    assert server.log == []


def test_only_what_is_missing_is_downloaded(server: Server, tmp_path: Path) -> None:
    record = mnist(server)
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(idx(np.ones(400, np.uint8)))
    load(record, tmp_path, download=True, progress=False)
    assert "/t10k-labels-idx1-ubyte.gz" not in [path for path, _ in server.log]


def test_an_archive(server: Server, tmp_path: Path) -> None:
    data = load(cifar(server, cifar_members()), tmp_path, download=True, progress=False)
    assert (len(data.train), len(data.test)) == (10, 2)
    assert names(tmp_path) == set(cifar_members())


def test_an_archive_put_there_by_hand_is_used_and_kept(server: Server, tmp_path: Path) -> None:
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(archive(cifar_members()))
    load(cifar(server, cifar_members()), tmp_path, download=True)
    assert server.log == []
    assert (tmp_path / "cifar-10-binary.tar.gz").exists()


def test_the_progress_bar_shows_the_name(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    server.cut[f"/{FIRST}"] = [CHUNK + 10]
    load(mnist(server), tmp_path, download=True)
    shown = capsys.readouterr()
    assert FIRST in shown.err
    assert shown.out == ""


def test_a_connection_that_breaks_is_continued(server: Server, tmp_path: Path) -> None:
    server.cut[f"/{FIRST}"] = [CHUNK + 10, CHUNK + 10]
    load(mnist(server), tmp_path, download=True, progress=False)
    asked = [wanted for path, wanted in server.log if path == f"/{FIRST}"]
    assert asked[0] is None
    # A broken connection loses less than a chunk.
    assert [int(wanted.removeprefix("bytes=").rstrip("-")) // CHUNK for wanted in asked[1:]] == [1, 2]


def test_without_ranges_it_starts_again(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    server.cut[f"/{FIRST}"] = [CHUNK + 10, 2 * CHUNK + 10]
    load(mnist(server), tmp_path, download=True, progress=False)
    assert len(load("mnist", tmp_path).train) == 400


def test_a_truncated_file_never_looks_complete(server: Server, tmp_path: Path) -> None:
    server.cut[f"/{FIRST}"] = [CHUNK + 10, 0]
    record = mnist(server)
    with pytest.raises(DataError, match=r"the connection broke\).*65,5\d\d of .* kept for the next try") as caught:
        load(record, tmp_path, download=True, progress=False)
    assert str(tmp_path / "mnist" / FIRST) in str(caught.value)
    assert names(tmp_path) == {f"mnist/{FIRST}.part"}
    kept = (tmp_path / "mnist" / f"{FIRST}.part").stat().st_size
    server.cut.clear()
    load(record, tmp_path, download=True, progress=False)
    assert (f"/{FIRST}", f"bytes={kept}-") in server.log
    assert not any(name.endswith(".part") for name in names(tmp_path))


def test_a_truncated_file_without_a_length_is_continued(server: Server, tmp_path: Path) -> None:
    server.lengths = False
    server.cut[f"/{FIRST}"] = [100] * 9
    record = mnist(server)
    with pytest.raises(DataError, match=r"the connection broke\).*400 of .* kept"):
        load(record, tmp_path, download=True, progress=False)
    server.cut.clear()
    assert len(load(record, tmp_path, download=True, progress=False).train) == 400


def test_a_wrong_checksum(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not the published 0123") as caught:
        load(mnist(server, md5="0123" * 8), tmp_path, download=True, progress=False)
    assert f"{server.address}/{FIRST}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("stale", [b"something else", b"x" * 10_000_000])
def test_a_stale_part_is_replaced(server: Server, tmp_path: Path, stale: bytes) -> None:
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"{FIRST}.part").write_bytes(stale)
    assert len(load(mnist(server), tmp_path, download=True, progress=False).train) == 400


def test_a_part_that_was_complete_is_not_lost(server: Server, tmp_path: Path) -> None:
    record = mnist(server)
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"{FIRST}.part").write_bytes(server.files[f"/{FIRST}"])
    load(record, tmp_path, download=True, progress=False)


def test_a_mirror_takes_over(server: Server, tmp_path: Path) -> None:
    record = mnist(server)
    remotes = tuple(
        dataclasses.replace(remote, addresses=(f"{server.address}/gone/{remote.name}", *remote.addresses))
        for remote in record.source.remotes
    )
    record = dataclasses.replace(record, source=dataclasses.replace(record.source, remotes=remotes))
    load(record, tmp_path, download=True, progress=False)
    server.files.clear()
    with pytest.raises(DataError, match=r"gone/.*: the server answered 404; .*: the server answered 404"):
        load(record, tmp_path / "other", download=True, progress=False)


KILLED = """
import dataclasses, sys
from minimand_papers.data import Remote, load, registry
address, md5, root = sys.argv[1:]
record = registry["mnist"]
remote = Remote("train-images-idx3-ubyte.gz", (address,), md5, 3 << 16)
source = dataclasses.replace(record.source, remotes=(remote,))
load(dataclasses.replace(record, source=source), root, download=True)
"""


def test_a_killed_download_continues(server: Server, tmp_path: Path) -> None:
    record = mnist(server)
    server.hold, part = threading.Event(), tmp_path / "mnist" / f"{FIRST}.part"
    first = record.source.remotes[0]
    server.cut[f"/{FIRST}"] = [2 * CHUNK]
    server.files[f"/{FIRST}"] = content = np.random.default_rng(0).bytes(3 * CHUNK)
    md5 = hashlib.md5(content).hexdigest()
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, first.addresses[0], md5, str(tmp_path)], stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + 60
        while (not part.exists() or part.stat().st_size < 2 * CHUNK) and time.monotonic() < until:
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
        server.hold.set()
    assert names(tmp_path) == {f"mnist/{FIRST}.part"}
    server.hold = None
    whole = dataclasses.replace(first, md5=md5, size=len(content))
    remotes = (whole, *record.source.remotes[1:])
    record = dataclasses.replace(record, source=dataclasses.replace(record.source, remotes=remotes))
    with pytest.raises(DataError, match="no idx file"):  # random bytes, but all of them
        load(record, tmp_path, download=True, progress=False)
    assert (f"/{FIRST}", f"bytes={2 * CHUNK}-") in server.log
    assert (tmp_path / "mnist" / FIRST).read_bytes() == content


def test_two_at_once_download_once(server: Server, tmp_path: Path) -> None:
    record, sizes = mnist(server), []

    def job() -> None:
        sizes.append(len(load(record, tmp_path, download=True, progress=False).train))

    threads = [threading.Thread(target=job) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes == [400] * 3
    assert len(server.log) == 4


# Archives


EVIL = Path(tempfile.gettempdir()).absolute() / "minimand-evil.txt"


def bad_member(kind: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in cifar_members().items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        info = tarfile.TarInfo(
            {
                "outside": "../evil.txt",
                "absolute": str(EVIL),
                "through": "cifar-10-batches-bin/../../evil.txt",
                "beside": "evil.txt",
                "link": "cifar-10-batches-bin/link",
                "device": "cifar-10-batches-bin/pipe",
            }[kind]
        )
        if kind == "link":
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        if kind == "device":
            info.type = tarfile.FIFOTYPE
        tar.addfile(info)
    return out.getvalue()


@pytest.mark.parametrize("kind", ["outside", "absolute", "through", "beside", "link", "device"])
def test_a_member_outside_its_folder_is_refused(server: Server, tmp_path: Path, kind: str) -> None:
    root = tmp_path / "data"
    record = at(registry["cifar10"], server, {"cifar-10-binary.tar.gz": bad_member(kind)})
    with pytest.raises(
        DataError, match=r"was not unpacked: its member .* is not a plain file in cifar-10-batches-bin/"
    ):
        load(record, root, download=True, progress=False)
    assert names(tmp_path) == {"data/cifar-10-binary.tar.gz"}
    assert not EVIL.exists()


def test_damaged_archives(server: Server, tmp_path: Path) -> None:
    good = archive(cifar_members())
    members = cifar_members()
    del members["cifar-10-batches-bin/data_batch_2.bin"]
    for content, what in (
        (good[: len(good) // 2], "no tar archive, or damaged"),
        (b"<html>", "no tar archive, or damaged"),
        (archive(members), r"lacks cifar-10-batches-bin/data_batch_2\.bin"),
    ):
        (tmp_path / "cifar-10-binary.tar.gz").unlink(missing_ok=True)
        record = at(registry["cifar10"], server, {"cifar-10-binary.tar.gz": content})
        with pytest.raises(DataError, match=what):
            load(record, tmp_path, download=True, progress=False)
        assert not names(tmp_path) - {"cifar-10-binary.tar.gz"}


# No network, no room, no package


def test_offline_is_one_sentence_with_the_address_and_the_place(server: Server, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}/cifar-10-binary.tar.gz"
        record = registry["cifar10"]
        remote = dataclasses.replace(record.source.remotes[0], addresses=(address,))
        record = dataclasses.replace(record, source=dataclasses.replace(record.source, remotes=(remote,)))
        with pytest.raises(DataError, match="no connection") as caught:
            load(record, tmp_path, download=True, progress=False)
    message = str(caught.value)
    assert address in message
    assert f"put it at {tmp_path / 'cifar-10-binary.tar.gz'}" in message
    assert "\n" not in message
    assert len(message) < 400
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_directory_that_cannot_be_written(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"could not be written to .*file.*data_dir="):
        load(mnist(server), tmp_path / "file", download=True, progress=False)

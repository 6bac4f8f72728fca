"""Law: whatever a server answers, a download ends within its size and its deadline, in the file or in one sentence."""

import contextlib
import dataclasses
import gzip
import hashlib
import io
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minimand.errors import DataError
from minimand_papers.data import DatasetRecord, Remote, load, registry
from minimand_papers.data import transfer as transfer_module
from test_downloads import archive, cifar_members, names

SIZE = 5_000
CONTENT = bytes(range(250)) * 20
NAME = "train-images-idx3-ubyte.gz"
Answer = Callable[[socket.socket], None]


class Raw:
    """A server that answers every connection with the next of its answers, the last one again and again."""

    def __init__(self, *answers: Answer) -> None:
        self.answers, self.sent, self.asked = list(answers), 0, list[bytes]()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.listening.getsockname()[1]}/{NAME}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listening.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            self.asked.append(connection.recv(1 << 16))
            (self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])(connection)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Raw]]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(transfer_module, "_PATIENCE", 1.0)
    made: list[Raw] = []

    def start(*answers: Answer) -> Raw:
        made.append(Raw(*answers))
        return made[-1]

    yield start
    for server in made:
        server.listening.close()


def at(address: str, content: bytes = CONTENT) -> DatasetRecord:
    """MNIST with one remote file of these bytes."""
    record = registry["mnist"]
    remote = Remote(NAME, (address,), hashlib.md5(content).hexdigest(), len(content))
    return dataclasses.replace(record, source=dataclasses.replace(record.source, remotes=(remote,)))


def says(*lines: str, body: bytes = b"") -> Answer:
    head = "\r\n".join(lines).encode("latin1") + b"\r\n\r\n"
    return lambda connection: connection.sendall(head + body)


def endless(head: bytes, piece: bytes, pause: float = 0.0) -> Answer:
    """The head, then the same piece for ever, at most 200 MB of it."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(head)
        for _ in range(200_000_000 // len(piece)):
            connection.sendall(piece)
            time.sleep(pause)

    return answer


def reset(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + CONTENT[:100])
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


OK = "HTTP/1.1 200 OK"
BOMB = gzip.compress(bytes(10_000_000))
HOSTILE: dict[str, tuple[tuple[Answer, ...], str]] = {
    "more than its length": ((says(OK, "Content-Length: 5000", body=CONTENT * 9),), ""),
    "more than published": ((endless(b"HTTP/1.1 200 OK\r\n\r\n", bytes(1 << 16)),), "more than the published 5,000"),
    "a larger length": ((says(OK, "Content-Length: 197000000", body=bytes(20_000)),), "more than the published 5,000"),
    "endless chunks": (
        (endless(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"ffff\r\n" + bytes(0xFFFF) + b"\r\n"),),
        "more than the published",
    ),
    "bad chunks": ((says(OK, "Transfer-Encoding: chunked", body=b"zz\r\nabc"),), "the connection broke"),
    "a body that drips": ((endless(b"HTTP/1.1 200 OK\r\n\r\n", b"x", 0.1),), "too slow"),
    "headers that drip": ((endless(b"HTTP/1.1 200 OK\r\nX: ", b"x", 0.1),), "does not answer"),
    "headers without end": ((endless(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),), "no connection"),
    "silence": ((lambda connection: time.sleep(3),), "does not answer"),
    "gzip": ((says(OK, "Content-Encoding: gzip", f"Content-Length: {len(BOMB)}", body=BOMB),), "the encoding 'gzip'"),
    "brotli": ((says(OK, "Content-Encoding: br", body=CONTENT),), "the encoding 'br'"),
    "a length of letters": ((says(OK, "Content-Length: abc", body=CONTENT),), ""),
    "a negative length": ((says(OK, "Content-Length: -5", body=CONTENT),), ""),
    "two lengths": ((says(OK, "Content-Length: 5000", "Content-Length: 7", body=CONTENT),), "no connection|broke"),
    "no HTTP": ((says("SSH-2.0-OpenSSH"),), "no connection"),
    "a bad status": ((says("HTTP/1.1 abc OK"),), "no connection"),
    "an odd status": ((says("HTTP/1.1 999 Odd"),), "answered 999"),
    "nothing": ((lambda connection: None,), "no connection"),
    "a reset": ((reset,), "the connection broke"),
    "a part never asked for": ((says("HTTP/1.1 206 Part", body=CONTENT),), "answered 206"),
    "to a file": ((says("HTTP/1.1 302 Found", "Location: file:///etc/passwd"),), "not http or https"),
    "to ftp": ((says("HTTP/1.1 302 Found", "Location: ftp://127.0.0.1/x"),), "not http or https"),
    "to nowhere": ((says("HTTP/1.1 302 Found", "Location: http://[::bad/"),), "no connection"),
    "to itself": ((says("HTTP/1.1 302 Found", f"Location: /{NAME}", "Content-Length: 0"),), "redirects more than 5"),
    "an endless redirection": (
        (
            endless(f"HTTP/1.1 302 Found\r\nLocation: /{NAME}\r\n\r\n".encode(), bytes(1 << 16)),
            says(OK, "Content-Length: 5000", body=CONTENT),
        ),
        "",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_answer_is_bounded_and_named(serve: Callable[..., Raw], tmp_path: Path, case: str) -> None:
    answers, why = HOSTILE[case]
    server, begin = serve(*answers), time.monotonic()
    # The published bytes are no idx file, which is found out only after a good download.
    with pytest.raises(DataError, match=f"could not be downloaded .*({why})" if why else "is incomplete") as caught:
        load(at(server.address), tmp_path, download=True, progress=False)
    assert time.monotonic() - begin < 20
    assert "\n" not in str(caught.value)
    left = {path.name: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
    assert set(left) <= {NAME, f"{NAME}.part"}
    assert sum(left.values()) <= SIZE
    if not why:
        assert (tmp_path / "mnist" / NAME).read_bytes() == CONTENT


def test_https_is_never_left(monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Raw], tmp_path: Path) -> None:
    import requests

    plain = serve(says(OK, "Content-Length: 5000", body=CONTENT))

    def redirected(session: requests.Session, address: str, **_: object) -> requests.Response:
        response = requests.Response()
        response.status_code, response.headers["location"], response.raw = 302, plain.address, io.BytesIO()
        return response

    monkeypatch.setattr(requests.Session, "get", redirected)
    with pytest.raises(DataError, match="which is not https"):
        load(at(f"https://127.0.0.1/{NAME}"), tmp_path, download=True, progress=False)
    assert plain.asked == []


def test_a_file_that_its_server_calls_an_encoding_arrives(serve: Callable[..., Raw], tmp_path: Path) -> None:
    server = serve(says(OK, "Content-Encoding: x-gzip", "Content-Length: 5000", body=CONTENT))
    with pytest.raises(DataError, match="is incomplete"):
        load(at(server.address), tmp_path, download=True, progress=False)
    assert (tmp_path / "mnist" / NAME).read_bytes() == CONTENT


def test_nothing_is_written_through_a_link(serve: Callable[..., Raw], tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    (tmp_path / "data" / "mnist" / f"{NAME}.part").symlink_to(victim)
    with pytest.raises(DataError, match="could not be written"):
        load(at(serve(says(OK, body=CONTENT)).address), tmp_path / "data", download=True, progress=False)
    assert victim.read_bytes() == b"mine"


def test_a_pipe_does_not_block(serve: Callable[..., Raw], tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    os.mkfifo(tmp_path / "mnist" / f"{NAME}.part")
    with pytest.raises(DataError, match="could not be written"):
        load(at(serve(says(OK, body=CONTENT)).address), tmp_path, download=True, progress=False)


def test_a_scratch_folder_that_is_a_link_is_not_followed(serve: Callable[..., Raw], tmp_path: Path) -> None:
    packed, record = archive(cifar_members()), registry["cifar10"]
    server = serve(says(OK, f"Content-Length: {len(packed)}", body=packed))
    remote = Remote("a.tar.gz", (server.address,), hashlib.md5(packed).hexdigest(), len(packed))
    record = dataclasses.replace(record, source=dataclasses.replace(record.source, remotes=(remote,)))
    (tmp_path / "data").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data" / ".cifar-10-batches-bin.unpack").symlink_to(tmp_path / "elsewhere")
    assert len(load(record, tmp_path / "data", download=True, progress=False).train) == 10
    assert os.listdir(tmp_path / "elsewhere") == []


def test_an_archive_unpacks_up_to_its_bound(
    serve: Callable[..., Raw], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minimand_papers.data import download

    monkeypatch.setattr(download, "_LARGEST", 100_000)
    packed, record = archive({**cifar_members(), "cifar-10-batches-bin/zeros": bytes(10_000_000)}), registry["cifar10"]
    server = serve(says(OK, f"Content-Length: {len(packed)}", body=packed))
    remote = Remote("a.tar.gz", (server.address,), hashlib.md5(packed).hexdigest(), len(packed))
    record = dataclasses.replace(record, source=dataclasses.replace(record.source, remotes=(remote,)))
    with pytest.raises(DataError, match="holds more than 100,000 bytes"):
        load(record, tmp_path, download=True, progress=False)
    assert names(tmp_path) == {"a.tar.gz"}


FULL = """
import resource, sys
from minimand_papers.data import load
from test_hostile_servers import at
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
load(at(sys.argv[1]), sys.argv[2], download=True, progress=False)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
def test_a_full_disk_is_named_and_the_download_continues(serve: Callable[..., Raw], tmp_path: Path) -> None:
    """A limit on the size of files ends a write in the middle, as a full disk does."""
    server = serve(
        says(OK, "Content-Length: 5000", body=CONTENT),
        says("HTTP/1.1 206 Part", "Content-Length: 4000", body=CONTENT[1000:]),
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    call = [sys.executable, "-c", FULL, server.address, str(tmp_path)]
    done = subprocess.run(call, capture_output=True, text=True, env=environment)
    assert "DataError: MNIST could not be written to" in done.stderr
    assert names(tmp_path) == {f"mnist/{NAME}.part"}
    with pytest.raises(DataError, match="is incomplete"):
        load(at(server.address), tmp_path, download=True, progress=False)
    assert b"Range: bytes=1000-" in server.asked[-1]
    assert (tmp_path / "mnist" / NAME).read_bytes() == CONTENT

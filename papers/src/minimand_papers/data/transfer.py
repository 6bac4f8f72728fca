"""One transfer over HTTP, from a server that is not trusted.

It takes no more bytes than were published and no more time than a deadline, follows redirections within the scheme it
began with, and decodes nothing: what arrives has to be the published bytes.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Generator
from typing import Any
from urllib.parse import urljoin, urlsplit

__all__ = ["CHUNK", "Everything", "TransferError", "received"]

#: What is handed over at once, in bytes; a broken connection loses less than that.
CHUNK = 1 << 16
# A server has this many seconds for its answer and for every chunk, and needs this many bytes a second in all.
_PATIENCE = 60.0
_SLOWEST = 5_000
_REDIRECTIONS = 5
_WHOLE, _REST, _NO_SUCH_RANGE = 200, 206, 416


class TransferError(Exception):
    """Why a transfer failed; ``useless`` where what is there already has to be thrown away."""

    def __init__(self, reason: str, *, useless: bool = False) -> None:
        super().__init__(reason)
        self.useless = useless


class Everything(bytes):
    """The first piece of an answer that begins at the beginning, although only the rest was asked for."""


def received(address: str, begin: int, size: int) -> Generator[bytes, None, None]:
    """The bytes from ``begin`` on of a file of ``size`` bytes, or :class:`Everything` and then all of them.

    The server is read in a thread, so that one that sends a byte a minute, in its headers or later, cannot hold the
    caller beyond the deadline.
    """
    pieces: queue.Queue[Any] = queue.Queue(maxsize=4)
    gone = threading.Event()
    threading.Thread(target=_receive, args=(address, begin, size, pieces, gone), daemon=True).start()
    until = time.monotonic() + _PATIENCE + (size - begin) / _SLOWEST
    answered, left = False, size - begin
    try:
        while True:
            try:
                piece = pieces.get(timeout=max(0.0, min(_PATIENCE, until - time.monotonic())))
            except queue.Empty:
                what = "it is too slow" if answered else "it does not answer"
                raise TransferError(f"{what}, and was given up after its deadline") from None
            if isinstance(piece, TransferError):
                raise piece
            if isinstance(piece, Exception):
                raise TransferError("the connection broke" if answered else f"no connection, {_root(piece)}") from piece
            if piece is None:
                return
            if isinstance(piece, Everything):
                left = size
            left -= len(piece)
            if left < 0:
                raise TransferError(f"it sends more than the published {size:,} bytes", useless=True)
            answered = True
            yield piece
    finally:
        gone.set()


def _receive(address: str, begin: int, size: int, pieces: "queue.Queue[Any]", gone: threading.Event) -> None:
    """Put every piece into the queue, then None or the error that ended it, until the other side is gone."""
    last: Any = None
    try:
        with contextlib.closing(_opened(address, begin, size)) as response:
            piece: bytes = b"" if response.status_code == _REST else Everything()
            while _handed(piece, pieces, gone):
                if not (piece := response.raw.read(CHUNK, decode_content=False)):
                    break
    except Exception as error:
        last = error
    _handed(last, pieces, gone)


def _handed(piece: Any, pieces: "queue.Queue[Any]", gone: threading.Event) -> bool:
    while not gone.is_set():
        with contextlib.suppress(queue.Full):
            pieces.put(piece, timeout=0.2)
            return True
    return False


def _opened(address: str, begin: int, size: int) -> Any:
    """The answer of the server at the end of all redirections."""
    import requests

    # Without "identity" a server may announce a .gz file as an encoding and unpack it.
    headers = {"Accept-Encoding": "identity"}
    if begin:
        headers["Range"] = f"bytes={begin}-"
    schemes = ("https",) if urlsplit(address).scheme == "https" else ("http", "https")
    session: Any
    with requests.Session() as session:
        # requests reads the whole body of a redirection, so it must not see one.
        session.get_redirect_target = lambda response: None
        for _ in range(_REDIRECTIONS + 1):
            if urlsplit(address).scheme not in schemes:
                raise TransferError(f"it leads to {address[:100]!r}, which is not {' or '.join(schemes)}")
            response = session.get(address, headers=headers, stream=True, timeout=_PATIENCE)
            if "location" not in response.headers or not response.is_redirect:
                return _checked(response, begin, size)
            response.close()
            address = urljoin(address, response.headers["location"])
    raise TransferError(f"it redirects more than {_REDIRECTIONS} times")


def _checked(response: Any, begin: int, size: int) -> Any:
    status = response.status_code
    if status != _WHOLE and not (begin and status == _REST):
        response.close()
        raise TransferError(f"the server answered {status}", useless=bool(begin) and status == _NO_SUCH_RANGE)
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    # Some servers call a .gz file itself an encoding; its length is then the published one. Nothing is decoded anyway.
    whole = str(size - begin if status == _REST else size)
    if encoding not in ("", "identity") and response.headers.get("Content-Length") != whole:
        response.close()
        raise TransferError(f"it sends the encoding {encoding[:20]!r}, which was not asked for")
    return response


def _root(error: BaseException) -> str:
    """The innermost cause, which names the trouble shortest."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    return " ".join((str(error) or type(error).__name__).split())[:200]

"""An optional progress bar."""

import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TypeVar

__all__ = ["track"]

Item = TypeVar("Item")


def track(items: Iterable[Item], total: int, *, show: bool, label: str = "epochs") -> Iterator[Item]:
    """Yield the items, with a progress bar if ``show``, rich is installed and the output is a terminal.

    >>> list(track([1, 2], 2, show=False))
    [1, 2]
    """
    if not show or not sys.stderr.isatty() or find_spec("rich") is None:
        yield from items
        return
    from rich.console import Console
    from rich.progress import track as bar

    yield from bar(items, description=label, total=total, console=Console(stderr=True))

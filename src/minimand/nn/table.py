"""Reports as plain-text tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

__all__ = ["table_lines"]

T = TypeVar("T")


def table_lines(
    columns: Mapping[str, Callable[[T], str]], records: Sequence[T], align: Literal["left", "right"] = "left"
) -> list[str]:
    """The lines of a table: a header, a rule, and one line per record.

    >>> table_lines({"n": str, "square": lambda n: str(n * n)}, [3, 12])
    ['n   square', '──  ──────', '3   9', '12  144']
    """
    rows = [list(columns), *([cell(record) for cell in columns.values()] for record in records)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    justify = str.ljust if align == "left" else str.rjust
    lines = ["  ".join(map(justify, row, widths)).rstrip() for row in rows]
    lines.insert(1, "  ".join("─" * width for width in widths))
    return lines

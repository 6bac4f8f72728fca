"""A page as a list of blocks, written as Markdown or as reStructuredText."""

import dataclasses
import re
from collections.abc import Sequence

__all__ = [
    "Block",
    "Bullets",
    "Cell",
    "Code",
    "Drawing",
    "Heading",
    "PageLink",
    "Paragraph",
    "Table",
    "as_markdown",
    "as_rst",
]


@dataclasses.dataclass(frozen=True)
class PageLink:
    """A link to the heading with this anchor on the same page."""

    text: str
    anchor: str


Cell = str | PageLink


@dataclasses.dataclass(frozen=True)
class Heading:
    """A heading; sections of a page begin at level 2. In Markdown the text itself is the anchor."""

    text: str
    level: int = 2
    anchor: str = ""


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """Text, with inline code between backticks."""

    text: str


@dataclasses.dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    items: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Code:
    """Commands for a terminal."""

    text: str


@dataclasses.dataclass(frozen=True)
class Table:
    """A table with its head; ``widths`` are relative, for paper and narrow screens."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    widths: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A picture in a file of its own, with its caption and text alternative."""

    path: str
    title: str
    alt: str


Block = Heading | Paragraph | Bullets | Code | Table | Drawing

_UNDERLINES = {1: "=", 2: "-", 3: "~"}


def as_markdown(blocks: Sequence[Block]) -> str:
    """The page as GitHub's Markdown."""
    return "\n".join(line for block in blocks for line in [*_markdown(block), ""])


def _markdown(block: Block) -> list[str]:
    match block:
        case Heading(text, level):
            return [f"{'#' * level} {_escaped(text)}"]
        case Paragraph(text):
            return [_escaped(text)]
        case Bullets(items):
            return [f"- {_escaped(item)}" for item in items]
        case Code(text):
            return [f"    {line}" for line in text.splitlines()]
        case Table(head, rows):
            return [_row(head), _row(["---"] * len(head)), *(_row(row) for row in rows)]
        case Drawing(path, title, alt):
            words = _escaped(f"{title}: {alt}").replace("]", r"\]")
            return [f"![{words}]({path})"]


def _row(cells: Sequence[Cell]) -> str:
    texts = [
        f"[{_escaped(cell.text)}](#{cell.anchor})" if isinstance(cell, PageLink) else _escaped(cell) for cell in cells
    ]
    return " | ".join(["", *(text.replace("|", r"\|") for text in texts), ""]).strip()


def _escaped(text: str) -> str:
    r"""Text in one line, without HTML, links or emphasis, except for inline code between backticks.

    >>> print(_escaped("λ‖X‖* of `a < b`\n[x](y) <b>"), _escaped("` <b>"))
    λ‖X‖\* of `a < b` [x]\(y) \<b> \` \<b>
    """
    pieces = _pieces(text)
    pieces[::2] = [re.sub(r"[\\*<`]|(?<=\])[(\[]", r"\\\g<0>", piece) for piece in pieces[::2]]
    return "`".join(pieces)


def _pieces(text: str) -> list[str]:
    """The text in one line, divided at its backticks; one piece where they do not come in pairs."""
    line = " ".join(text.split())
    return [line] if "``" in line or line.count("`") % 2 else line.split("`")


def as_rst(blocks: Sequence[Block], prefix: str) -> str:
    """The page as reStructuredText; ``prefix`` makes its labels unique in a documentation."""
    return "\n".join(line for block in blocks for line in [*_rst(block, prefix), ""])


def _rst(block: Block, prefix: str) -> list[str]:
    match block:
        case Heading(text, level, anchor):
            label = [f".. _{prefix}{anchor}:", ""] if anchor else []
            return [*label, _plain(text), _UNDERLINES[level] * len(_plain(text))]
        case Paragraph(text):
            return [_plain(text)]
        case Bullets(items):
            return [f"- {_plain(item)}" for item in items]
        case Code(text):
            return [".. code-block:: console", "", *(f"    {line}" for line in text.splitlines())]
        case Table(head, rows, widths):
            lines = [".. list-table::", "    :header-rows: 1", f"    :widths: {' '.join(map(str, widths))}", ""]
            for row in [list(head), *rows]:
                lines += [f"    {'* -' if not k else '  -'} {_cell(cell, prefix)}" for k, cell in enumerate(row)]
            return lines
        case Drawing(path, title, alt):
            return [f".. figure:: {path}", f"    :alt: {_plain(alt)}", "", f"    {_plain(title)}"]


def _cell(cell: Cell, prefix: str) -> str:
    return f":ref:`{cell.text} <{prefix}{cell.anchor}>`" if isinstance(cell, PageLink) else _plain(cell)


def _plain(text: str) -> str:
    r"""Text without markup except for inline code between backticks.

    >>> print(_plain("λ‖X‖* of `minimand run`"), _plain("(1)"))
    λ‖X‖\* of ``minimand run`` \(1)
    """
    pieces = _pieces(text)
    pieces[::2] = [re.sub(r"([\\*|_`])", r"\\\1", piece) for piece in pieces[::2]]
    # An initial or a number at the beginning would number a list.
    return re.sub(r"^(?=\(?\w+[.)](?: |$))", r"\\", "``".join(pieces))

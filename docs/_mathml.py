"""Formulas as MathML: every browser shows them, without scripts and without a network."""

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.errors import ExtensionError

# Sizes of delimiters are left to the browser.
_SIZES = re.compile(r"\\(?:bigl|bigr|Bigl|Bigr|big|Big)(?![a-zA-Z])\s*")


def _mathml(latex: str, *, display: str) -> str:
    try:
        return convert(_SIZES.sub("", latex), display=display)
    except Exception as error:
        raise ExtensionError(f"latex2mathml cannot read {latex!r}: {type(error).__name__}") from error


def _inline(writer, node) -> None:
    writer.body.append(_mathml(node.astext(), display="inline"))
    raise nodes.SkipNode


def _block(writer, node) -> None:
    writer.body.append(writer.starttag(node, "div", CLASS="math"))
    for part in filter(None, map(str.strip, re.split(r"\n\s*\n", node.astext()))):
        rows = rf"\begin{{aligned}}{part}\end{{aligned}}" if r"\\" in part and r"\begin" not in part else part
        writer.body.append(_mathml(rows, display="block"))
    writer.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app) -> dict[str, bool]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}

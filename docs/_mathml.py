"""Formulas as MathML, which browsers show without scripts and without a network."""

import re
from xml.etree.ElementTree import tostring

from docutils import nodes
from latex2mathml.converter import convert_to_element
from sphinx.errors import ExtensionError

# Browsers choose the sizes of delimiters.
_SIZES = re.compile(r"\\(?:bigl|bigr|Bigl|Bigr|big|Big)(?![a-zA-Z])\s*")
# latex2mathml knows \argmin, but neither \arg nor \operatorname*.
_SPELLINGS = (
    (re.compile(r"\\arg\s*\\(min|max)(?![a-zA-Z])"), r"\\arg\1"),
    (re.compile(r"\\operatorname\*?\{arg(min|max)\}"), r"\\arg\1"),
    (re.compile(r"\\arg(?![a-zA-Z])"), r"\\operatorname{arg}"),
    (re.compile(r"\\operatorname\*"), r"\\operatorname"),
)
_LIMITS = {"min", "max", "inf", "sup", "arg&#x02009;min", "arg&#x02009;max"}


def mathml(latex: str, *, display: str) -> str:
    r"""Convert one formula; a command that latex2mathml does not know is an error.

    >>> mathml(r"\arg\min_x f", display="block") == mathml(r"\operatorname*{argmin}_x f", display="block")
    True
    """
    text = _SIZES.sub("", latex)
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    try:
        root = convert_to_element(text, display=display)
    except Exception as error:
        raise ExtensionError(f"latex2mathml cannot read {latex!r}: {type(error).__name__}") from error
    for element in root.iter("msub") if display == "block" else ():
        if element[0].tag == "mo" and element[0].text in _LIMITS:
            element.tag = "munder"
    # latex2mathml writes characters as references, which tostring would escape a second time.
    result = tostring(root, encoding="unicode").replace("&amp;#", "&#")
    if unknown := re.findall(r"\\[a-zA-Z]+", result):
        raise ExtensionError(f"latex2mathml does not know {', '.join(unknown)} in {latex!r}")
    return result


def _inline(writer, node) -> None:
    writer.body.append(mathml(node.astext(), display="inline"))
    raise nodes.SkipNode


def _block(writer, node) -> None:
    writer.body.append(writer.starttag(node, "div", CLASS="math"))
    for part in filter(None, map(str.strip, re.split(r"\n\s*\n", node.astext()))):
        rows = rf"\begin{{aligned}}{part}\end{{aligned}}" if r"\\" in part and r"\begin" not in part else part
        writer.body.append(mathml(rows, display="block"))
    writer.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app) -> dict[str, bool]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Plain keys such as ``[Bibi2019]`` become links to the bibliography, in pages and in docstrings alike."""

import re

from docutils import nodes
from sphinx import addnodes

KEY = re.compile(r"\[([A-Z][a-z]+[12]\d{3}[a-z]?)\]")
# Code stays as it is, links are links already, and a title with a link would put it into every table of contents.
_LEFT_ALONE = (nodes.literal, nodes.literal_block, nodes.doctest_block, nodes.reference, nodes.title)
_LEFT_ALONE += (nodes.math, nodes.math_block, addnodes.pending_xref, nodes.raw, nodes.comment)


def label(key: str) -> str:
    """The target of a key on the bibliography page."""
    return f"cite-{key.lower()}"


def _link(key: str, docname: str) -> addnodes.pending_xref:
    """A cross-reference that Sphinx resolves, or warns about if the bibliography lacks the key."""
    text = nodes.inline("", f"[{key}]", classes=["std", "std-ref", "citation-key"])
    options = {"refdomain": "std", "reftype": "ref", "reftarget": label(key), "refexplicit": True, "refwarn": True}
    return addnodes.pending_xref("", text, refdoc=docname, **options)


def link_keys(app, doctree) -> None:
    """Replace every key in running text."""
    for text in list(doctree.findall(nodes.Text)):
        is_entry = isinstance(text.parent, nodes.strong) and KEY.fullmatch(text)
        if not KEY.search(text) or is_entry or _inside(text):
            continue
        parts, end = [], 0
        for match in KEY.finditer(text):
            parts += [nodes.Text(text[end : match.start()]), _link(match[1], app.env.docname)]
            end = match.end()
        text.parent.replace(text, [*parts, nodes.Text(text[end:])])


def _inside(node: nodes.Node) -> bool:
    while (node := node.parent) is not None:
        if isinstance(node, _LEFT_ALONE):
            return True
    return False


def setup(app) -> dict[str, bool]:
    """Run after a page is read, docstrings included."""
    app.connect("doctree-read", link_keys)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

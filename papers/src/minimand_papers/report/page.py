"""The HTML page: one file that needs no network."""

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ..comparing import LEGEND
from ..experiment import PRESETS, Experiment
from ..store import atomically, encoded
from .sections import Section, sections

__all__ = ["page", "write_report"]


def page(found: list[Section], problems: list[str]) -> str:
    """The HTML page of these sections."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("minimand_papers.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    folder = resources.files("minimand_papers.report")
    script = (folder / "page.js").read_text(encoding="utf-8")
    return environment.get_template("page.html").render(
        presets=[preset for preset in PRESETS if any(section.preset == preset for section in found)],
        sections=found,
        problems=problems,
        legend=LEGEND,
        style=(folder / "page.css").read_text(encoding="utf-8"),
        script=script,
        # Browsers run this script and no other, should one ever get into the page.
        checksum=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def write_report(out: Path, path: Path | None = None, *, own: Sequence[Experiment[Any]] = ()) -> Path:
    """Write the page of all results below ``out``; the default path is ``out/report.html``."""
    path = path or out / "report.html"
    text = page(*sections(out, own=own))
    with atomically(path) as file:
        file.write(encoded(text))
    return path

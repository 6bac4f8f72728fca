"""Sphinx: `make docs`. Nothing is fetched while building, and every warning is an error."""

import os
import re
import sys
from importlib.metadata import version as installed
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import _experiments  # noqa: E402
import _league  # noqa: E402

os.environ["MPLBACKEND"] = "Agg"
os.environ.setdefault("OMP_NUM_THREADS", "1")

project = "minimand"
author = "The minimand developers"
copyright = f"2026, {author}"
version = release = installed("minimand")
language = "en_GB"

extensions = [
    "sphinx.ext.autodoc",
    "_mathml",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "_generated", "gallery/**/*.ipynb", "gallery/*.py", "gallery/*.zip"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
# State and options are named tuples and dataclasses: their fields are described in the class.
autodoc_default_options = {"exclude-members": "__init__, __new__"}
python_maximum_signature_line_length = 88
napoleon_use_ivar = True
# Docstrings write the absolute value of x plainly, which reST takes for a substitution.
sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"/plot_",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_memory": False,
    "capture_repr": (),
    "write_computation_times": False,
    "abort_on_example_error": True,
    "remove_config_comments": True,
}

html_math_renderer = "mathml"
html_theme = "furo"
html_title = "minimand"
html_static_path = ["_static"]
html_css_files = ["minimand.css"]


def _breakable(app, page, template, context, doctree) -> None:
    """Let the browser break long paths and test names at their joints, so that tables stay narrow."""
    if "body" in context:
        named = r'(?<=<span class="pre">)(?:src|tests)/[^<]*'
        context["body"] = re.sub(named, lambda m: re.sub(r"(?<=[/_:])(?=[a-zA-Z])", "<wbr>", m[0]), context["body"])


def setup(app) -> None:
    app.connect(
        "builder-inited", lambda app: _experiments.write(HERE.parent / "papers" / "results", HERE / "_generated")
    )
    app.connect(
        "builder-inited", lambda app: _league.write(HERE.parent / "benchmarks" / "results", HERE / "_generated")
    )
    app.connect("html-page-context", _breakable)

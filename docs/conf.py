"""Sphinx: `make docs`. Nothing is fetched while building, and every warning is an error."""

import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import _experiments  # noqa: E402
import _imports  # noqa: E402
import _league  # noqa: E402
import _reliability  # noqa: E402

from minimand import __version__  # noqa: E402

os.environ["MPLBACKEND"] = "Agg"
os.environ.setdefault("OMP_NUM_THREADS", "1")

project = "minimand"
author = "The minimand developers"
copyright = f"2026, {author}"
version = release = __version__
language = "en_GB"

extensions = [
    "sphinx.ext.autodoc",
    "_mathml",
    "_citations",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "_generated", "gallery/**/*.ipynb", "gallery/*.py", "gallery/*.zip"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
# State and options are named tuples and dataclasses: their fields are described in the class.
autodoc_default_options = {"exclude-members": "__init__, __new__"}
python_maximum_signature_line_length = 88
napoleon_use_ivar = True

# The copy button leaves out prompts and printed output.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

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
    "image_scrapers": ("_gallery.scraper",),
}

html_math_renderer = "mathml"
html_theme = "furo"
html_title = "minimand"
html_static_path = ["_static"]
html_css_files = ["minimand.css"]


def _breakable(app, page, template, context, doctree) -> None:
    """Let the browser break long paths and test names after a slash, an underscore or a colon."""
    if "body" in context:
        named = r'(?<=<span class="pre">)(?:src|tests|papers|examples)/[^<]*'
        context["body"] = re.sub(named, lambda m: re.sub(r"(?<=[/_:])(?=[a-zA-Z])", "<wbr>", m[0]), context["body"])


def _generate(app) -> None:
    """Write the pages that are made from code, committed results and measurements."""
    root, out = HERE.parent, HERE / "_generated"
    out.mkdir(exist_ok=True)
    _experiments.write(root / "papers" / "results", out)
    _imports.write(root / "src" / "minimand", out)
    _reliability.write(root / "tests" / "fuzz" / "record.json", out)
    _league.write(root / "benchmarks" / "results", out)


def setup(app) -> None:
    app.connect("builder-inited", _generate)
    app.connect("html-page-context", _breakable)

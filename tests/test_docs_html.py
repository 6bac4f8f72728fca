"""The built documentation is readable: no literal TeX, no unresolved key, a picture for every gallery example.

The pages are those of ``make docs`` if they are newer than their sources, else a build without the gallery's pictures.
"""

import hashlib
import importlib
import re
import shutil
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("furo", reason="needs the extra docs")

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BUILT = DOCS / "_build" / "html"
MADE = {"_build", "_generated", "gallery", "__pycache__"}


def _is_current(pages: Path) -> bool:
    """Whether the build is newer than the pages, the docstrings and the examples."""
    index = pages / "objects.inv"
    sources = [*DOCS.rglob("*.*"), *(ROOT / "src").rglob("*.py"), *(ROOT / "examples").glob("*.*")]
    ours = (path for path in sources if path.is_file() and not MADE & set(path.relative_to(ROOT).parts))
    return index.exists() and index.stat().st_mtime >= max(path.stat().st_mtime for path in ours)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if _is_current(BUILT):
        return BUILT
    tree = tmp_path_factory.mktemp("docs")
    for part in ("docs", "examples", "src", "papers", "benchmarks", "tests"):
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns(*MADE))
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-D", "sphinx_gallery_conf.plot_gallery=0"]
    subprocess.run([*command, "docs", "html"], cwd=tree, check=True, capture_output=True)
    return tree / "html"


class _Text(HTMLParser):
    """The text of a page outside code, scripts and the annotations of formulas."""

    CODE = frozenset({"script", "style", "code", "pre", "annotation", "title"})

    def __init__(self) -> None:
        super().__init__()
        self.inside = 0
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.inside += tag in self.CODE

    def handle_endtag(self, tag: str) -> None:
        self.inside -= tag in self.CODE

    def handle_data(self, data: str) -> None:
        if not self.inside:
            self.parts.append(data)


def _text(path: Path) -> str:
    reader = _Text()
    reader.feed(path.read_text())
    return "".join(reader.parts)


def _html(pages: Path) -> list[Path]:
    """Every page but the highlighted source code."""
    return [path for path in sorted(pages.rglob("*.html")) if "_modules" not in path.parts]


def test_no_page_shows_tex(pages: Path) -> None:
    found = [(path.name, command) for path in _html(pages) for command in re.findall(r"\\[a-zA-Z]+", _text(path))]
    assert not found


def test_the_scan_for_tex_finds_it(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(r"<p>y = <mi>\arg</mi> <code>\min</code></p>")
    assert re.findall(r"\\[a-zA-Z]+", _text(tmp_path / "page.html")) == [r"\arg"]


def test_keys_of_the_sources_are_links(pages: Path) -> None:
    """In pages and in docstrings; the bibliography holds the targets."""
    home = (pages / "bibliography.html").read_text()
    for key in ("Bibi2019", "Lin2019", "Vidal2018", "Frerix2018"):
        assert f'id="cite-{key.lower()}"' in home
    plain = re.compile(r"(?<!<strong>)\[[A-Z][a-z]+[12]\d{3}\](?!</span></a>)")
    assert not [(path.name, key) for path in _html(pages) for key in plain.findall(_without_code(path.read_text()))]
    assert "bibliography.html#cite-bibi2019" in (pages / "lineage.html").read_text()


def _without_code(html: str) -> str:
    """A page without code, titles and the tooltips of the gallery, in which keys stay plain."""
    return re.sub(r'<(pre|code|title|h\d)\b.*?</\1>|tooltip="[^"]*"', "", html, flags=re.DOTALL)


def test_every_public_name_has_a_reference(pages: Path) -> None:
    inventory = zlib.decompress((pages / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    documented = {line.split()[0].rsplit(".", 1)[-1] for line in inventory.splitlines() if " py:" in line}
    for init in sorted((ROOT / "src" / "minimand").glob("*/__init__.py")):
        names = importlib.import_module(f"minimand.{init.parent.name}").__all__
        assert set(names) <= documented, init.parent.name


def test_code_can_be_copied_without_prompts(pages: Path) -> None:
    script = (pages / "_static" / "copybutton.js").read_text()
    assert ">>> " in script
    assert "copybutton.js" in (pages / "start.html").read_text()


def test_every_example_of_the_gallery_has_a_picture(pages: Path) -> None:
    if pages != BUILT:
        pytest.skip("the gallery is not built, or older than its sources: run make docs")
    import sphinx_gallery

    blank = hashlib.sha256((Path(sphinx_gallery.__file__).parent / "_static" / "no_image.png").read_bytes()).digest()
    for example in sorted((ROOT / "examples").glob("plot_*.py")):
        thumbnail = pages / "_images" / f"sphx_glr_{example.stem}_thumb.png"
        assert thumbnail.exists(), example.name
        assert hashlib.sha256(thumbnail.read_bytes()).digest() != blank, example.name


def test_an_empty_panel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    from _gallery import empty_panels
    from matplotlib.figure import Figure

    figure = Figure()
    left, right = figure.subplots(1, 2)
    left.plot([0, 1])
    assert empty_panels(figure) == 1
    right.bar([0, 1], [1, 2])
    assert empty_panels(figure) == 0


def test_tables_do_not_break_words() -> None:
    """A table that is too wide for a phone scrolls in its frame; words and code are never cut."""
    style = (DOCS / "_static" / "minimand.css").read_text()
    assert "table-layout: fixed" not in style
    assert not re.search(r"(overflow-wrap|word-break):(?!\s*normal)", style)
    assert re.search(r"table-wrapper[^}]*overflow-x:\s*auto", style)

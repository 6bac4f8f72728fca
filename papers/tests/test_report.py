"""Law: the report is one page that a browser shows without a complaint, with its pictures, on a phone, too."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from minimand_papers.registry import find
from minimand_papers.report import write_pages, write_report
from minimand_papers.runner import RunSetting, run
from minimand_papers.store import read_json, write_json

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt install chromium)")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    run(RunSetting("layer-convergence", "smoke", out=out, jobs=1))
    run(RunSetting("dropout-digits", "smoke", out=out, jobs=1))
    # The same results as if of another preset: they must not be mixed.
    stored = read_json(out / "dropout-digits" / "smoke" / "result.json")
    write_json(out / "dropout-digits" / "laptop" / "result.json", {**stored, "preset": "laptop", "complete": False})
    write_report(out)
    return out


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_needs_no_network_and_names_everything(runs: Path) -> None:
    text = (runs / "report.html").read_text()
    page = _Page()
    page.feed(text)
    addresses = [attributes.get(key) or "" for _, attributes in page.tags for key in ("src", "href", "xlink:href")]
    assert [address for address in addresses if address and not address.startswith(("#", "data:"))] == []
    assert "@import" not in text
    assert "url(http" not in text
    images = [attributes for tag, attributes in page.tags if attributes.get("role") == "img"]
    assert len(images) == 5
    assert all(len(attributes["aria-label"]) > 20 for attributes in images)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert "Summary, smoke" in text
    assert "Summary, laptop" in text
    assert text.count("Incomplete") == 1


@in_a_browser
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_shows_it(runs: Path, tmp_path: Path, width: int) -> None:
    check = """
    <script>
    window.addEventListener("load", () => {
      const found = {};
      const table = document.querySelector("section[id] table.sortable");
      const column = () => [...table.tBodies[0].rows].map((row) => Number(row.cells[2].dataset.order));
      const button = table.tHead.rows[0].cells[2].querySelector("button");
      button.click();
      found.up = column();
      found.sort = table.tHead.rows[0].cells[2].getAttribute("aria-sort");
      button.click();
      found.down = column();
      found.pictures = [...document.querySelectorAll("figure svg")].map((svg) => svg.getBoundingClientRect().width);
      found.letters = Math.min(...[...document.querySelectorAll("figure svg text")]
        .map((text) => text.getBoundingClientRect().height).filter((height) => height > 0));
      found.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
      document.body.insertAdjacentHTML("beforeend", "<pre id=found>" + JSON.stringify(found) + "</pre>");
    });
    </script></body>"""
    # The page forbids every script but its own, hence this one, too.
    whole = re.sub(r"<meta http-equiv=[^>]*>", "", (runs / "report.html").read_text()).replace("</body>", check)
    # A window is never narrower than 500 pixels; a frame in it is.
    framed = f"""<!doctype html><iframe width="{width}" height="900" srcdoc="{html.escape(whole)}"></iframe><script>
    window.addEventListener("load", () => {{
      const inner = document.querySelector("iframe").contentDocument;
      document.body.append(inner.querySelector("#found"));
    }});
    </script>"""
    page = tmp_path / "page.html"
    page.write_text(framed)
    call = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    call += ["--enable-logging=stderr", f"--window-size={width + 60},1000", "--dump-dom", page.as_uri()]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120)
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert complaints == []
    found = json.loads(re.search(r'<pre id="found">(.*?)</pre>', done.stdout)[1])
    assert found["up"] == sorted(found["up"])
    assert found["down"] == sorted(found["up"], reverse=True)
    assert found["sort"] == "ascending"
    assert len(found["pictures"]) == 5
    assert min(found["pictures"]) > 250
    assert found["letters"] > 9
    assert found["wide"] <= 0


@in_a_browser
def test_the_pages_own_script_is_allowed(runs: Path, tmp_path: Path) -> None:
    call = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    call += ["--enable-logging=stderr", "--dump-dom", (runs / "report.html").as_uri()]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert '<button type="button">' in done.stdout


def test_contrast_of_text_in_both_schemes() -> None:
    """WCAG AA: at least 4.5 : 1 for all text colours on both backgrounds they appear on."""
    from importlib import resources

    css = (resources.files("minimand_papers.report") / "page.css").read_text()
    schemes = [dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", css)]
    assert len(schemes) == 2

    def light(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for scheme in schemes:
        for text in ("ink", "soft", "link", "alert"):
            for back in ("paper", "band"):
                high, low = sorted((light(scheme[text]), light(scheme[back])), reverse=True)
                assert (high + 0.05) / (low + 0.05) >= 4.5, (text, back)


def test_markdown_has_the_same_rows(runs: Path, tmp_path: Path) -> None:
    names = {path.name for path in write_pages(runs, tmp_path)}
    assert names == {"bibi2019.md", "README.md"}
    text = (tmp_path / "bibi2019.md").read_text()
    assert "\n## dropout-digits-smoke\n" in text
    assert "    minimand run dropout-digits --preset smoke\n" in text
    # What differs from the preset is said, and is part of how to run it again.
    options, usual = (find("dropout-digits").presets[name].options for name in ("smoke", "laptop"))
    assert options.epochs != usual.epochs
    assert re.search(rf"## dropout-digits-digits\n\n.* Scale: laptop, .*epochs = {options.epochs}", text)
    assert re.search(rf"minimand run dropout-digits --preset laptop .*--epochs {options.epochs}", text)
    assert "Incomplete. Not run, or not with every seed: " in text
    assert re.search(r"\| no dropout \| – \| [\d.]+% ± [\d.]+ \| 2 \| control \|", text)
    # A smoke run supports no verdict.
    assert re.search(r"\| §3: .* \| no result yet \(.*\) \| not run \|", text)


def test_a_damaged_result_is_named_and_the_rest_shown(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs, tmp_path / "runs")
    (tmp_path / "runs" / "layer-convergence" / "smoke" / "result.json").write_text('{"experiment": ')
    text = write_report(tmp_path / "runs").read_text()
    assert "is damaged" in text
    assert "A network that works at heavy dropout" in text

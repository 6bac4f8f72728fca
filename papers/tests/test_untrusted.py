"""Law: result folders of others are data. Reading them runs no code and ends in a page or a sentence."""

import copy
import dataclasses
import json
import os
import random
import tracemalloc
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from minimand.errors import DataError, OptionError
from minimand_papers import store
from minimand_papers.drawing import bars, curves
from minimand_papers.experiment import Claim, Comparison, Experiment, Part, Preset, Results
from minimand_papers.registry import experiments, find
from minimand_papers.report import write_pages, write_report
from minimand_papers.report.sections import sections
from minimand_papers.results import read_results
from minimand_papers.runner import RunSetting, run

COMMITTED = Path(__file__).parents[1] / "results"
RESULT = {
    "experiment": "x",
    "file": None,
    "preset": "smoke",
    "options": {},
    "seeds": [0],
    "complete": True,
    "seconds": 1.5,
    "threads": 1,
    "device": "cpu",
    "versions": {"torch": "2"},
    "records": {},
}


def _folder(root: Path, content: object, name: str = "evil/smoke") -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "result.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


def _is_named(root: Path) -> bool:
    """Whether both reports are written and say which file they could not show."""
    write_pages(root, root / "pages")
    pages = (write_report(root).read_text(), (root / "pages" / "README.md").read_text())
    return all("result.json cannot be shown" in page for page in pages)


@pytest.mark.parametrize("key", ["file", "experiment"])
@pytest.mark.parametrize("ending", [".py", ".py.py"])
def test_no_code_is_imported(tmp_path: Path, key: str, ending: str) -> None:
    code = tmp_path / f"evil{ending}"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    folder = _folder(tmp_path, RESULT | {key: str(code)})
    with pytest.raises(OptionError):
        read_results(folder)
    assert _is_named(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [[], {}, 3, "text", None, {"experiment": "solvers-lenet"}, [[[]]]])
def test_json_of_another_shape_is_a_sentence(tmp_path: Path, content: object) -> None:
    folder = _folder(tmp_path, content)
    with pytest.raises(DataError, match="run the experiment again"):
        read_results(folder)
    assert _is_named(tmp_path)


GOOD = json.dumps(RESULT | {"experiment": "layer-convergence"}).encode()
BYTES = {
    "nothing": b"",
    "no UTF-8": GOOD.replace(b"cpu", b"\xff\xfe"),
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "cut": GOOD[:-20],
    "two of a key": GOOD.replace(b'{"experiment"', b'{"preset": "laptop", "experiment"'),
    "20 levels": GOOD.replace(b'"2"', b"[" * 20 + b"]" * 20),
    "900 levels": GOOD.replace(b'"2"', b"[" * 900 + b"]" * 900),
    "endless levels": b"[" * 1_000_000,
    "a number of 5,000 digits": GOOD.replace(b"1.5", b"1" * 5_000),
    "a number that is no float": GOOD.replace(b"1.5", b"1" * 500),
    "a text for a number": GOOD.replace(b"1.5", b'"1.5"'),
    "seeds as a text": GOOD.replace(b"[0]", b'"0"'),
    "an unknown preset": GOOD.replace(b"smoke", b"..\\/..\\/x"),
    "unknown options": GOOD.replace(b'"options": {}', b'"options": {"__class__": 1}'),
    "a list of records": GOOD.replace(b'"records": {}', b'"records": {"a": [1]}'),
    "records of numbers": GOOD.replace(b'"records": {}', b'"records": {"a": {"0": [1]}}'),
    "a seed of letters": GOOD.replace(b'"records": {}', b'"records": {"a": {"x": []}}'),
}


@pytest.mark.parametrize("case", BYTES)
def test_hostile_bytes_are_a_sentence(tmp_path: Path, case: str) -> None:
    _folder(tmp_path, BYTES[case])
    assert _is_named(tmp_path)


def test_what_cannot_be_encoded_is_shown_as_in_json(tmp_path: Path) -> None:
    _folder(tmp_path, GOOD.replace(b"cpu", rb"\ud800"))
    assert r"\ud800" in write_report(tmp_path).read_text()
    write_pages(tmp_path, tmp_path / "pages")
    store.write_json(tmp_path / "a.json", {"\udc80": "\ud800"})
    assert store.read_json(tmp_path / "a.json") == {"\udc80": "\ud800"}


def test_files_that_never_end_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("device", "pipe", "folder"):
        (tmp_path / name / "smoke").mkdir(parents=True)
    (tmp_path / "device" / "smoke" / "result.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe" / "smoke" / "result.json")
    (tmp_path / "folder" / "smoke" / "result.json").mkdir()
    monkeypatch.setattr(store, "_LARGEST", 1000)
    _folder(tmp_path, GOOD + b" " * 1000, "large/smoke")
    found, problems = sections(tmp_path)
    assert not found
    assert len(problems) == 4
    assert "holds more than 1,000 bytes" in problems[2]


@pytest.mark.parametrize("atom", [b"[],", b"{},", b"1,", b"[[[[[]]]]],"])
def test_small_values_do_not_fill_the_memory(tmp_path: Path, atom: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'{"a": [' + atom * (1 << 22) + b"0]}")
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="more than 4,194,304 values"):
            store.read_json(path)
        assert tracemalloc.get_traced_memory()[1] < 2 * path.stat().st_size
    finally:
        tracemalloc.stop()
    path.write_bytes(b"{}\n" * (1 << 22))
    with pytest.raises(DataError, match="more than 4,194,304 values"):
        list(store.Records(path))


@pytest.mark.parametrize("experiment", experiments(), ids=lambda experiment: experiment.name)
def test_a_number_among_the_options_makes_no_endless_parts(experiment: Experiment[Any]) -> None:
    """A result file chooses the options, and its parts are listed when it is shown."""
    default = experiment.presets["smoke"].options
    for key in (key for key, value in dataclasses.asdict(default).items() if type(value) is int):
        try:
            options = dataclasses.replace(default, **{key: 10**12})
        except OptionError:
            continue
        assert len(experiment.parts(options)) < 10_000
        experiment.compare(Results(options, "smoke", {}))


# Injection: what a file says is text, wherever it appears

PAYLOADS = [
    "<script>alert(1)</script>",
    "--><script>alert(1)</script>",
    "]]></style></svg><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "` <img src=x onerror=alert(1)>",
    "` <img src=x onerror=alert(1)> ```",
    "\n\n<img src=x onerror=alert(1)>\n",
    "[click](javascript:alert(1)) ![x](http://evil.example/x.png)",
    "a | <b>b</b> | `|`",
    r"\<i>\`<i>",
    "{{ 7 * 7 }}{% raw %}",
]


def _echoing(payload: str) -> Experiment[Any]:
    """An experiment that shows texts from its records in every place there is."""

    def compare(results: Results[Any]) -> list[Comparison]:
        return [Comparison(part, 1.0, [1.0], payload, note=payload) for part in results.parts()]

    def plots(results: Results[Any]) -> list[Any]:
        drawn = curves(results, key="y", over="x", title=payload, y=payload)
        for axes in drawn.figure.axes:
            axes.text(0, 0, payload, gid=payload)
        return [drawn, bars(compare(results), title=payload, y=payload)]

    return Experiment(
        "echo",
        payload,
        payload,
        payload,
        {"smoke": Preset(Options()), "laptop": Preset(Options()), "paper": Preset(Options())},
        lambda options: [Part("x")],
        lambda options, part, lab: iter(()),
        compare,
        plots,
        lambda results: [payload],
        lambda results: [Claim(payload, payload, payload, payload, "not")],
    )


@dataclasses.dataclass(frozen=True)
class Options:
    dataset: str = "digits"


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def _require_harmless(page: str) -> None:
    parser = _Tags()
    parser.feed(page)
    tags = [tag for tag, _ in parser.found]
    assert tags.count("script") == 1
    assert not {"img", "i", "b", "iframe"} & set(tags)
    for _, attributes in parser.found:
        assert not [name for name in attributes if name.startswith("on")]
        addresses = [attributes[name] or "" for name in ("href", "xlink:href", "src") if name in attributes]
        assert all(address.startswith(("#", "data:")) for address in addresses), addresses


def _require_plain(markdown: str) -> None:
    """No HTML, no picture, and no link that leaves the pages, by a parser of CommonMark that allows all of them."""
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(markdown)
    every = [inner for token in tokens for inner in (token, *(token.children or ()))]
    assert not [token for token in every if token.type in ("html_block", "html_inline", "image")]
    links = [str(token.attrs["href"]) for token in every if token.type == "link_open"]
    assert all(link.startswith("#") or link.endswith(".md") for link in links), links


@pytest.mark.filterwarnings("ignore")  # of matplotlib, about texts that are too long for a figure
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_text_stays_a_text(tmp_path: Path, payload: str) -> None:
    words = {
        "experiment": "echo",
        "file": f"{payload}.py",
        "preset": "laptop",
        "device": payload,
        "versions": {payload: payload},
        "options": {"dataset": payload},
        "records": {payload: {"0": [{"x": 1.0, "y": 2.0}]}},
    }
    folder = f"{payload.replace('/', '-').strip()}/laptop-{payload.replace('/', '-')}"
    _folder(tmp_path, RESULT | words, folder)
    _folder(tmp_path, RESULT | {"experiment": payload, "file": payload}, "other/smoke")
    own = [_echoing(payload)]
    page = write_report(tmp_path, own=own).read_text()
    problems = sections(tmp_path, own=own)[1]
    assert len(problems) == 1, problems
    assert page.count("<svg") == 2
    _require_harmless(page)
    for path in write_pages(tmp_path, tmp_path / "pages", own=own):
        _require_plain(path.read_text())


@pytest.mark.filterwarnings("ignore")  # of matplotlib, about texts that are too long for a figure
def test_a_style_in_the_current_folder_runs_no_latex(tmp_path: Path) -> None:
    import matplotlib as mpl

    words = {"experiment": "echo", "file": "x.py", "preset": "laptop", "options": {"dataset": "x"}}
    _folder(tmp_path, RESULT | words | {"records": {"x": {"0": [{"x": 1.0, "y": 2.0}]}}}, "echo/laptop")
    with mpl.rc_context({"text.usetex": True}):
        page = write_report(tmp_path, own=[_echoing("text")]).read_text()
        assert mpl.rcParams["text.usetex"]
    assert page.count("<svg") == 2


def test_a_browser_is_told_to_run_one_script_only(tmp_path: Path) -> None:
    import base64
    import hashlib
    import re

    page = write_report(tmp_path).read_text()
    script = re.search(r"<script>(.*)</script>", page, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}';" in page


# Values: numbers, texts and shapes that no run would write

VALUES = [None, True, -1, 10**400, 1e308, "nan", "inf", "", "x", "<b>", [], [[]], {}, {"a": {}}, [None] * 3, "1" * 9999]


def _leaves(value: Any, path: tuple = ()) -> Iterator[tuple]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from _leaves(item, (*path, key))


def mutated(content: Any, rng: random.Random) -> Any:
    """The same content with one to three values replaced or removed."""
    content = json.loads(json.dumps(content))
    for _ in range(rng.randint(1, 3)):
        path = rng.choice(list(_leaves(content)))
        place = content
        for key in path[:-1]:
            place = place[key]
        if rng.random() < 0.2:
            del place[path[-1]]
        else:
            place[path[-1]] = copy.deepcopy(rng.choice(VALUES))
    return content


@pytest.mark.parametrize("name", ["layer-convergence", "degree-mismatch", "nmf-faces", "solvers-vgg", "lpom-parallel"])
def test_changed_values_end_in_a_page_or_a_sentence(tmp_path: Path, name: str) -> None:
    rng = random.Random(name)
    content = json.loads((COMMITTED / name / "laptop" / "result.json").read_text())
    for number in range(12):
        _folder(tmp_path, mutated(content, rng), f"{name}/laptop-{number}")
    found, problems = sections(tmp_path, pictures=False)
    assert len(found) + len(problems) == 12
    assert not [problem for problem in problems if "\n" in problem or len(problem) > 1000]


# Runs that go on in somebody's folder


@pytest.mark.parametrize("content", ["[]", "{}", "[" * 100_000, '{"options": [], "seeds": [0]}', "\x00"])
def test_a_protocol_of_another_shape_is_a_sentence(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "layer-convergence" / "smoke"
    folder.mkdir(parents=True)
    (folder / "protocol.json").write_text(content)
    with pytest.raises(DataError, match=r"protocol\.json"):
        run(RunSetting("layer-convergence", "smoke", out=tmp_path, jobs=1, resume=True))


@pytest.mark.parametrize("seed", ["0/../../../../outside", -1, 1 << 32, 1.5, True, None, [0]])
def test_a_protocol_chooses_no_folder(tmp_path: Path, seed: object) -> None:
    folder = tmp_path / "runs" / "layer-convergence" / "smoke"
    folder.mkdir(parents=True)
    options = dataclasses.asdict(find("layer-convergence").presets["smoke"].options)
    (folder / "protocol.json").write_text(json.dumps({"options": options, "seeds": [seed]}))
    with pytest.raises(OptionError, match="a seed is a whole number"):
        run(RunSetting("layer-convergence", "smoke", out=tmp_path / "runs", jobs=1, resume=True))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["protocol.json"]


def test_names_become_folders_without_a_way_out() -> None:
    for name in ("..", ".", "../x", "a/../b", "", "/", "...", ".hidden", "\\..\\x", "a\0b", "\u202e"):
        assert os.path.basename(store.slug(name)) == store.slug(name)
        assert not store.slug(name).startswith(".")

"""Law: the packages import downwards only, a name means one thing, and the library stays small.

The diagram of docs/architecture.rst is drawn from the same reading of the code (docs/_imports.py).
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "src" / "minimand"
sys.path.insert(0, str(ROOT / "docs"))
import _imports  # noqa: E402

# Which part may import which. A new arrow is a decision: it is added here, and the diagram shows it.
ALLOWED = {
    "tracing": set(),
    "errors": {"tracing"},
    "arguments": {"errors"},
    "functions": {"arguments", "errors", "tracing"},
    "geometry": {"errors", "tracing"},
    "linalg": {"tracing"},
    "norms": {"arguments", "errors", "geometry", "linalg", "tracing"},
    "operators": {"arguments", "errors", "geometry", "linalg", "norms", "tracing"},
    "solvers": {"arguments", "errors", "functions", "linalg", "norms", "operators", "tracing"},
    "adjoints": {"solvers"},
    "network": {"arguments", "errors", "functions", "norms"},
    "nn": {"arguments", "errors", "functions", "linalg", "network", "norms", "operators", "solvers", "tracing"},
    # Training methods and penalties recognise the layers and dropouts of nn.
    "train": {"arguments", "errors", "functions", "geometry", "linalg", "network", "nn", "operators", "solvers"},
    "factor": {"arguments", "errors", "functions", "linalg", "norms", "operators", "solvers", "tracing"},
    "homogeneous": {"arguments", "errors", "factor", "linalg", "network", "nn", "norms", "solvers"},
}


def _files(*folders: str, kinds: tuple[str, ...] = (".py",)) -> list[Path]:
    made = {"_build", "_generated", "gallery", "__pycache__", "runs"}
    found = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.*")))
    return [path for path in found if path.suffix in kinds and not made & set(path.relative_to(ROOT).parts)]


def test_no_arrow_is_new() -> None:
    new = {
        f"{module.importer} imports {module.imported}"
        for module in _imports.imports(LIBRARY)
        for a, b in [(_imports.package_of(module.importer), _imports.package_of(module.imported))]
        if a and a != b and b not in ALLOWED.get(a, set())
    }
    assert not new, f"imports that ALLOWED does not have: {sorted(new)}"


def test_no_arrow_is_idle() -> None:
    idle = {(a, b) for a, below in ALLOWED.items() for b in below} - set(_imports.arrows(LIBRARY))
    assert not idle, f"ALLOWED has arrows that no import makes: {sorted(idle)}"


def test_the_parts_are_those_of_the_folder() -> None:
    names = {path.stem for path in LIBRARY.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {name for name in names if not name.startswith("_")} == set(ALLOWED)


def test_no_parts_import_each_other_in_a_circle() -> None:
    assert _imports.cycle(set(_imports.arrows(LIBRARY))) == []


def test_the_reading_notices_every_kind_of_import(tmp_path: Path) -> None:
    """Function level counts, type checking does not, relative and absolute are the same; a circle is found."""
    (tmp_path / "a").mkdir()
    (tmp_path / "__init__.py").write_text('_HOMES = {"name": "a"}\nfrom . import b\n')
    (tmp_path / "a" / "__init__.py").write_text("from .inner import name\n")
    (tmp_path / "a" / "inner.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from ..d import x\n"
        "def f():\n    from ..b import y\n    import minimand.c\n    from .. import e\n"
    )
    for name, text in {"b": "", "c": "from minimand.a import name\n", "d": "", "e": "from .b import y\n"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    graph = set(_imports.arrows(tmp_path))
    assert graph == {("a", "b"), ("a", "c"), ("a", "e"), ("c", "a"), ("e", "b")}
    assert _imports.cycle(graph) == ["a", "c"]
    assert _imports.direct(graph - {("c", "a")}) == {("a", "c"), ("a", "e"), ("e", "b")}
    assert _imports.reexports(tmp_path) == {"": {"name": "a"}}


def test_the_diagram_shows_every_part_and_every_arrow() -> None:
    graph = set(_imports.arrows(LIBRARY))
    if _imports.cycle(graph):
        pytest.fail("no diagram of a circle")
    drawing, rows = _imports.svg(LIBRARY), "\n".join(_imports.table(LIBRARY))
    for part in ALLOWED:
        assert f">{part}</text>" in drawing
        (below,) = re.findall(rf"^    \* - ``{part}``\n      - (.*)$", rows, re.MULTILINE)
        assert set(re.findall(r"``(\w+)``", below)) == {b for a, b in graph if a == part}
    # Arrows that a longer path implies are in the table alone, which keeps the drawing readable.
    assert drawing.count("marker-end=") == len(_imports.direct(graph))


def test_no_class_name_means_two_things() -> None:
    homes = defaultdict(list)
    for path in _files("src/minimand"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path.relative_to(LIBRARY).as_posix())
    assert not {name: files for name, files in homes.items() if len(files) > 1}


def _exported(path: Path) -> set[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def test_the_public_names_are_few() -> None:
    """What the packages export; a name that several of them hand on is one name."""
    parts = {path.parent.name: _exported(path) for path in LIBRARY.glob("*/__init__.py")}
    parts["adjoints"] = _exported(LIBRARY / "adjoints.py")
    public = set().union(*parts.values())
    assert len(public) <= 200, {part: len(names) for part, names in parts.items()}
    helpers = re.compile(r"^(require_|_)|^(located|is_traced|Bounds|Run)$")
    assert not {name for names in parts.values() for name in names if helpers.search(name)}


def test_the_library_and_its_tests_do_not_use_the_papers() -> None:
    for path in _files("src/minimand", "tests"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("minimand_papers") for name in names), path


def test_the_wheel_is_small() -> None:
    # 0.2.0 had 27,000 lines. A capability that needs more raises this limit together with an entry in the changelog.
    assert sum(len(path.read_text().splitlines()) for path in _files("src/minimand")) < 44_000


def test_files_are_short() -> None:
    long = {path.name: n for path in _files("src", "papers/src") if (n := len(path.read_text().splitlines())) > 400}
    assert not long


def test_no_source_is_cited_by_a_number() -> None:
    number = re.compile(r"(^|[^0-9.,#A-Za-z_])00[0-4]([,:;)'’ ]|$)")
    folders = ("src", "papers", "docs", "tests", "examples", "benchmarks")
    files = [*_files(*folders, kinds=(".py", ".rst", ".md")), *ROOT.glob("*.md")]
    found = [
        f"{path.relative_to(ROOT)}:{n}: {line.strip()[:80]}"
        for path in files
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if number.search(line)
    ]
    assert not found, f"{len(found)} citations by number: {found[:20]}"

"""Law: parts load when they are used, every promised name exists, and versions agree wherever they are written."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import minimand

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "src" / "minimand"


def _version(file: Path) -> str:
    (found,) = re.findall(r'^__version__ = "(.+)"$', file.read_text(), re.MULTILINE)
    return found


def test_importing_the_package_loads_nothing_else():
    code = (
        "import sys, minimand; print([name for name in sys.modules if name.partition('.')[0] in ('torch', 'sklearn')])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_every_name_is_found_where_it_lives():
    for name in minimand.__all__:
        assert getattr(minimand, name).__name__ == name
    assert set(minimand.__all__) <= set(dir(minimand))
    parts = {path.stem for path in LIBRARY.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    for part in {*parts, *dir(minimand)} - {*minimand.__all__, "Any", "TYPE_CHECKING", "import_module"}:
        assert part.startswith("_") or getattr(minimand, part).__name__ == f"minimand.{part}"
    with pytest.raises(AttributeError, match="no attribute 'Solver'"):
        _ = minimand.Solver


@pytest.mark.parametrize("part", ["adjoints", "operators", "solvers", "train", "factor", "homogeneous", "nn"])
def test_every_part_may_be_imported_first(part):
    """In a process of its own: in this one others have been loaded before."""
    code = f"from minimand.{part} import *"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_only_factorisations_need_scikit_learn():
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "from minimand import *\n"
        "from minimand.nn import *; from minimand.train import *; from minimand.solvers import *"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_library_imports_only_what_it_declares():
    """Importing a module loads torch, numpy and scipy, and scikit-learn where factorisations need it."""
    allowed = {*sys.stdlib_module_names, "torch", "numpy", "scipy", "minimand"}
    for path in LIBRARY.rglob("*.py"):
        extra = {"sklearn"} if path.relative_to(LIBRARY).parts[0] in ("factor", "homogeneous") else set()
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert {name.partition(".")[0] for name in names} <= allowed | extra, path


def test_every_place_that_states_the_version_agrees():
    version = _version(LIBRARY / "__init__.py")
    assert _version(ROOT / "papers" / "src" / "minimand_papers" / "__init__.py") == version
    assert re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE) == [version]
    newest, date = re.findall(r"^## \[([\d.]+)\] - (\d{4}-\d\d-\d\d)$", _changelog(), re.MULTILINE)[0]
    assert newest == version
    assert f"date-released: {date}" in (ROOT / "CITATION.cff").read_text()
    for project in (ROOT / "pyproject.toml", ROOT / "papers" / "pyproject.toml"):
        assert 'dynamic = ["version"]' in project.read_text()
        assert not re.search(r'^version = "', project.read_text(), re.MULTILINE)


def _changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text()


def test_what_the_migration_table_recommends_can_be_imported():
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \|$", _changelog(), re.MULTILINE)
    ours = [new for _, new in rows if new.startswith("from minimand.")]
    assert ours
    for statement in ours:
        exec(compile(statement, "CHANGELOG.md", "exec"), {})


def test_pre_commit_uses_the_versions_of_the_constraints():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    hooks = dict(re.findall(r"repo: \S+/(\S+)\n +rev: v(\S+)", text))
    assert hooks == {"ruff-pre-commit": pins["ruff"], "mirrors-mypy": pins["mypy"]}
    needed = re.findall(r"- ([\w.-]+)==(\S+)", text)
    assert needed
    for name, version in needed:
        assert pins[name] == version, name

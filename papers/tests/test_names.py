"""Law: one class name, one class, among the papers and beside the library."""

import ast
from collections import defaultdict
from pathlib import Path

import minimand
import minimand_papers


def _classes(package: object) -> dict[str, list[str]]:
    """The module-level classes of a package, each with the files that define it."""
    root = Path(package.__file__).parent
    found = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(root.parent)))
    return found


def test_no_class_name_means_two_things() -> None:
    ours, library = _classes(minimand_papers), _classes(minimand)
    twice = {name: files for name, files in ours.items() if len(files) > 1}
    shared = {name: [*files, *library[name]] for name, files in ours.items() if name in library}
    clashes = [f"{name}: {', '.join(files)}" for name, files in sorted({**twice, **shared}.items())]
    assert not clashes, "rename the class of the papers:\n" + "\n".join(clashes)

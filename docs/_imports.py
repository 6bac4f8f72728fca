"""The packages of the library and their imports, read from the code, as a drawing and a table."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

Arrow = tuple[str, str]


class Import(NamedTuple):
    """One module that another imports, both as dotted paths below ``minimand``."""

    importer: str
    imported: str


def _modules(root: Path) -> dict[str, Path]:
    """Every module below the package ``root`` by its dotted path; the package itself is the empty path."""
    return {_dotted(path.relative_to(root)): path for path in sorted(root.rglob("*.py"))}


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_type_checking(node: ast.AST) -> bool:
    test = node.test if isinstance(node, ast.If) else None
    return getattr(test, "id", getattr(test, "attr", None)) == "TYPE_CHECKING"


def _statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements at module and function level; those for type checkers alone are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif _is_type_checking(child):
            for other in child.orelse:
                yield from _statements(other)
        else:
            yield from _statements(child)


def _base(statement: ast.ImportFrom, module: str, *, package: bool) -> str | None:
    """The dotted path below ``minimand`` that ``from X import …`` starts from; None outside the library."""
    name = statement.module or ""
    if not statement.level:
        return name.removeprefix("minimand").removeprefix(".") if name.partition(".")[0] == "minimand" else None
    parts = module.split(".") if module else []
    up = statement.level - package
    return ".".join([*parts[: len(parts) - up], *filter(None, [name])])


def imports(root: Path) -> list[Import]:
    """All imports of one module of the library by another."""
    modules = _modules(root)
    found = []
    for module, path in modules.items():
        for statement in _statements(ast.parse(path.read_text())):
            if isinstance(statement, ast.Import):
                names = [alias.name.partition(".") for alias in statement.names]
                found += [Import(module, rest) for first, _, rest in names if first == "minimand"]
                continue
            base = _base(statement, module, package=path.name == "__init__.py")
            for alias in statement.names if base is not None else ():
                whole = f"{base}.{alias.name}".strip(".")
                found.append(Import(module, whole if whole in modules else base))
    return found


def package_of(module: str) -> str:
    """The top-level part that a module belongs to."""
    return module.partition(".")[0]


def arrows(root: Path) -> Counter[Arrow]:
    """Which part imports which other, and how often; the re-exports of ``minimand`` itself are not arrows."""
    pairs = ((package_of(a), package_of(b)) for a, b in imports(root))
    return Counter((a, b) for a, b in pairs if a and a != b)


def reexports(root: Path) -> dict[str, dict[str, str]]:
    """The tables of names that ``__init__`` files load on first use: file → name → part that holds it."""
    found = {}
    for module, path in _modules(root).items():
        for node in ast.parse(path.read_text()).body if path.name == "__init__.py" else ():
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_HOMES":
                found[module] = {name: _home(module, home) for name, home in ast.literal_eval(node.value).items()}
    return found


def _home(module: str, home: str) -> str:
    return home[2:] if home.startswith("..") else ".".join(filter(None, [module, home]))


def cycle(graph: set[Arrow]) -> list[str]:
    """Parts between which imports run in a circle; empty if there is none."""
    nodes = {node for arrow in graph for node in arrow}

    def is_end(node: str, place: int) -> bool:
        """Whether no arrow between the nodes left starts (place 0) or ends (place 1) here."""
        return not any(arrow[place] == node and arrow[1 - place] in nodes for arrow in graph)

    while ends := {node for node in nodes if is_end(node, 0) or is_end(node, 1)}:
        nodes -= ends
    return sorted(nodes)


def levels(graph: set[Arrow]) -> list[list[str]]:
    """The parts of a graph without a circle, by the length of the longest chain of imports below them."""
    height: dict[str, int] = {}

    def measure(node: str) -> int:
        if node not in height:
            height[node] = max((measure(b) + 1 for a, b in graph if a == node), default=0)
        return height[node]

    for node in {node for arrow in graph for node in arrow}:
        measure(node)
    return [sorted(node for node in height if height[node] == k) for k in range(max(height.values(), default=-1) + 1)]


def direct(graph: set[Arrow]) -> set[Arrow]:
    """The arrows of a graph without a circle that no longer path implies."""

    def reaches(start: str, goal: str) -> bool:
        return any(a == start and (b == goal or reaches(b, goal)) for a, b in graph)

    return {(a, b) for a, b in graph if not any(x == a and c != b and reaches(c, b) for x, c in graph)}


def sizes(root: Path) -> dict[str, tuple[int, int]]:
    """Files and lines of every part."""
    found: dict[str, tuple[int, int]] = {}
    for module, path in _modules(root).items():
        files, lines = found.get(package_of(module), (0, 0))
        found[package_of(module)] = (files + 1, lines + len(path.read_text().splitlines()))
    return found


WIDTH, HEIGHT, GAP, PAGE = 142, 46, 40, 740
# A box of the drawing, or the place where an arrow passes a row of boxes: the arrow and the row.
Slot = str | tuple[Arrow, int]


def _below(slot: Slot, rows: list[list[str]], graph: set[Arrow]) -> list[Slot]:
    """Where the lines that leave a slot go in the next row."""
    height = {name: k for k, row in enumerate(rows) for name in row}
    if isinstance(slot, str):
        ends = [(arrow, height[slot] - 1) for arrow in sorted(graph) if arrow[0] == slot]
    else:
        ends = [(slot[0], slot[1] - 1)]
    return [arrow[1] if height[arrow[1]] == row else (arrow, row) for arrow, row in ends]


def _places(rows: list[list[str]], graph: set[Arrow]) -> dict[Slot, tuple[float, int]]:
    """The middle of every slot and its top; a row is ordered by what lies below it."""
    middle: dict[Slot, tuple[float, int]] = {}
    height = {name: k for k, row in enumerate(rows) for name in row}
    for k, row in enumerate(rows):
        slots: list[Slot] = [*row, *((arrow, k) for arrow in sorted(graph) if height[arrow[1]] < k < height[arrow[0]])]
        below = {slot: [middle[end][0] for end in _below(slot, rows, graph)] for slot in slots}
        slots.sort(key=lambda slot, below=below: sum(below[slot]) / max(1, len(below[slot])))
        share = PAGE / sum(2 if isinstance(slot, str) else 1 for slot in slots)
        left = 0.0
        for slot in slots:
            width = share * (2 if isinstance(slot, str) else 1)
            middle[slot] = (left + width / 2, (len(rows) - 1 - k) * (HEIGHT + GAP) + 2)
            left += width
    return middle


def _line(start: tuple[float, int], end: tuple[float, int], *, head: bool) -> str:
    """From the bottom of one slot to the top of another, and through it if it holds no box."""
    (x, top), (to, y) = start, end
    top, half = top + HEIGHT, GAP / 2
    path = f"M{x:.0f} {top} C{x:.0f} {top + half:.0f} {to:.0f} {y - half:.0f} {to:.0f} {y - head}"
    return f'<path d="{path}" marker-end="url(#head)"/>' if head else f'<path d="{path} V{y + HEIGHT}"/>'


def svg(root: Path) -> str:
    """The graph of the parts; arrows point from the importing part to the imported one."""
    graph = set(arrows(root))
    rows, drawn, size = levels(graph), direct(graph), sizes(root)
    places = _places(rows, drawn)
    above = sorted({a for a, _ in graph})
    said = "; ".join(f"{a} imports {', '.join(sorted(b for x, b in graph if x == a))}" for a in above)
    lines = [
        f'<svg viewBox="0 0 {PAGE} {len(rows) * (HEIGHT + GAP) - GAP + 4}" role="img" aria-labelledby="imports-title">',
        f'<title id="imports-title">{said}.</title>',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>',
    ]
    for slot, start in places.items():
        lines += [_line(start, places[end], head=isinstance(end, str)) for end in _below(slot, rows, drawn)]
    for name, (x, top) in places.items():
        if isinstance(name, str):
            files, count = size[name]
            lines += [
                f'<rect x="{x - WIDTH / 2:.0f}" y="{top}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
                f'<text x="{x:.0f}" y="{top + 20}" text-anchor="middle" font-weight="bold">{name}</text>',
                f'<text x="{x:.0f}" y="{top + 37}" text-anchor="middle" font-size="12">'
                f"{files} file{'s' * (files > 1)}, {count:,} lines</text>",
            ]
    return "\n".join([*lines, "</svg>"])


def table(root: Path) -> list[str]:
    """One row a part: what it imports and who imports it."""
    graph = arrows(root)
    rows = [("part", "imports", "is imported by")]
    for name in (name for row in levels(set(graph)) for name in row):
        down = ", ".join(f"``{b}``" for a, b in sorted(graph) if a == name)
        up = ", ".join(f"``{a}``" for a, b in sorted(graph) if b == name)
        rows.append((f"``{name}``", down or "–", up or "–"))
    lines = [".. list-table::", "    :header-rows: 1", "    :widths: 18 42 40", ""]
    return lines + [f"    {' ' if k else '*'} - {cell}" for row in rows for k, cell in enumerate(row)]


def write(root: Path, out: Path) -> None:
    """One reST file to include."""
    if circle := cycle(set(arrows(root))):
        (out / "imports.rst").write_text(f"These parts import each other in a circle: {', '.join(circle)}.\n")
        return
    drawing = ['    <div class="drawing">', *(f"    {line}" for line in svg(root).splitlines()), "    </div>"]
    lines = [".. raw:: html", "", *drawing, "", *table(root), ""]
    (out / "imports.rst").write_text("\n".join(lines))

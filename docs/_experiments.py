"""The table of experiments for the lineage: what each reproduces, and which results are committed."""

import json
from pathlib import Path

from minimand_papers.registry import experiments


def write(results: Path, out: Path) -> None:
    """One reST file to include."""
    out.mkdir(exist_ok=True)
    lines = [".. list-table::", "    :header-rows: 1", "    :widths: 38 30 32", ""]
    rows = [("source", "``minimand run``", "committed result")]
    rows += sorted((found.source, f"``{found.name}``", _result(results / found.name)) for found in experiments())
    for row in rows:
        lines += [f"    {'* -' if not k else '  -'} {cell}" for k, cell in enumerate(row)]
    (out / "experiments.rst").write_text("\n".join(lines) + "\n")


def _result(folder: Path) -> str:
    """Presets and seeds on record."""
    said = []
    for file in sorted(folder.glob("*/result.json")):
        record = json.loads(file.read_text())
        seeds = len(record["seeds"])
        lacking = "" if record["complete"] else ", incomplete"
        said.append(f"{record['preset']}, {seeds} seed{'s' * (seeds > 1)}{lacking}")
    return "; ".join(said) or "none yet"

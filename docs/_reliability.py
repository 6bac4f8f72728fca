"""The table of the reliability page, from the committed ``tests/fuzz/record.json``."""

import json
from pathlib import Path


def write(record: Path, out: Path) -> None:
    """One reST table: what was tried, when, how often, and how often it was wrong."""
    lines = [".. list-table::", "    :header-rows: 1", "    :widths: 12 50 14 10 14", ""]
    cells = [["date", "promise", "cases", "wrong", "processor time"]]
    for row in json.loads(record.read_text()):
        minutes = "" if row["seconds"] is None else f"{max(1, round(row['seconds'] / 60))} min"
        cells.append([row["date"], row["promise"], f"{row['cases']:,}", f"{row['wrong']}", minutes])
    for row in cells:
        lines += [f"    {'-' if place else '* -'} {cell}".replace("    -", "      -") for place, cell in enumerate(row)]
    (out / "reliability.rst").write_text("\n".join(lines) + "\n")

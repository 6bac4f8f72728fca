"""Run every benchmark module, or those named on the command line, and print their ratios.

python -m benchmarks [NAME …] [--save]      # --save: also write benchmarks/results/NAME.json
"""

import dataclasses
import importlib
import json
import pkgutil
import platform
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import benchmarks


def main(names: list[str]) -> int:
    """Print one table per benchmark; the number of ratios that miss their target is the exit status."""
    torch.set_num_threads(1)
    save, names = "--save" in names, [name for name in names if name != "--save"]
    found = [m.name for m in pkgutil.iter_modules(benchmarks.__path__) if not m.name.startswith("_")]
    unknown = sorted(set(names) - set(found))
    if unknown:
        raise SystemExit(f"no benchmark named {', '.join(unknown)}; there are {', '.join(found)}")
    missed = 0
    for name in names or found:
        table = Table("what", "ratio", "target", "", "note", title=name)
        rows = importlib.import_module(f"benchmarks.{name}").run()
        if save:
            _write(name, rows)
        for row in rows:
            word = ("met" if row.met else "MISSED") if row.target else ""
            table.add_row(row.name, f"{row.ratio:.2f}", row.target, word, row.note)
            missed += not row.met
        Console().print(table)
    return missed


def _write(name: str, rows: list[benchmarks.Row]) -> None:
    """The rows with what they were measured on."""
    record = {
        "benchmark": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path = Path(__file__).parent / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

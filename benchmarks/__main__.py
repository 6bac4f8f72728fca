"""Run every benchmark module, or those named on the command line, and print their ratios."""

import importlib
import pkgutil
import sys

import torch
from rich.console import Console
from rich.table import Table

import benchmarks


def main(names: list[str]) -> int:
    """Print one table per benchmark; the number of ratios that miss their target is the exit status."""
    torch.set_num_threads(1)
    found = [m.name for m in pkgutil.iter_modules(benchmarks.__path__) if not m.name.startswith("_")]
    unknown = sorted(set(names) - set(found))
    if unknown:
        raise SystemExit(f"no benchmark named {', '.join(unknown)}; there are {', '.join(found)}")
    missed = 0
    for name in names or found:
        table = Table("what", "ratio", "target", "", "note", title=name)
        for row in importlib.import_module(f"benchmarks.{name}").run():
            table.add_row(row.name, f"{row.ratio:.2f}", row.target, "met" if row.met else "MISSED", row.note)
            missed += not row.met
        Console().print(table)
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

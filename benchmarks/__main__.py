"""Run every benchmark module, or those named on the command line, and print their ratios.

python -m benchmarks [NAME …] [--save [--label LABEL]]

With --save, results are also written to benchmarks/results/NAME.json; with a label to NAME-LABEL.json, for example
for another processor. The documentation shows both side by side.
"""

import argparse
import dataclasses
import importlib
import json
import pkgutil
import platform
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import benchmarks

# The versions of these packages are recorded if they are installed.
_PACKAGES = (
    *("minimand", "torch", "numpy", "scipy", "scikit-learn"),
    *("torchdeq", "orthogonium", "isaac", "pytorch_optimizer", "tensorly", "celer", "skglm", "jaxopt", "cvxpylayers"),
)


def main(names: Sequence[str], save: bool = False, label: str = "") -> int:
    """Print one table per benchmark; the number of ratios that miss their target is the exit status."""
    torch.set_num_threads(1)
    found = [m.name for m in pkgutil.iter_modules(benchmarks.__path__) if not m.name.startswith("_")]
    unknown = sorted(set(names) - set(found))
    if unknown:
        raise SystemExit(f"no benchmark named {', '.join(unknown)}; there are {', '.join(found)}")
    if label and not label.isalnum():
        raise SystemExit(f"a label is letters and digits, for a file's name, got {label!r}")
    missed = 0
    console = Console()
    for name in names or found:
        begin = time.perf_counter()
        with console.status(f"{name} …"):
            rows = importlib.import_module(f"benchmarks.{name}").run()
        if save or label:
            _write(name, label, rows, time.perf_counter() - begin)
        console.print(_table(name, rows))
        missed += sum(not row.met for row in rows)
    return missed


def _table(name: str, rows: list[benchmarks.Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=name)
    table.add_column("what", max_width=70)
    for title in ("ratio", "middle half", "target"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        what = row.name if row.at is None else f"{row.name}, at {row.at:g}"
        value = "–" if row.ratio is None else f"{row.ratio:.3g}"
        spread = "" if row.spread is None else f"{row.spread[0]:.3g} – {row.spread[1]:.3g}"
        target = row.target if row.met else f"[bold red]missed[/] {row.target}"
        shown = f"{escape(what)}\n[dim]{escape(row.note)}[/]" if row.note else escape(what)
        table.add_row(shown, value, spread, target)
    return table


def _write(name: str, label: str, rows: list[benchmarks.Row], seconds: float) -> None:
    """Write the rows with the versions and the processor that they were measured on."""
    record = {
        "benchmark": name,
        "versions": dict(filter(None, map(_version, _PACKAGES))),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "seconds": round(seconds, 1),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path = Path(__file__).parent / "results" / f"{name}{f'-{label}' if label else ''}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def _processor() -> str:
    """The name of the processor, if it is known; ratios differ between processors."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(package: str) -> tuple[str, str] | None:
    try:
        return package, metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Ratios to the plain block and to peers.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="the benchmarks to run; by default all")
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/NAME.json")
    parser.add_argument("--label", default="", help="write NAME-LABEL.json, beside a run on another processor")
    sys.exit(main(**vars(parser.parse_args())))

"""Run campaigns for longer than the tests do: ``python -m tests.fuzz --help``."""

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import date
from pathlib import Path

import torch

import minimand
from tests.fuzz.campaigns import CAMPAIGNS, Outcome, run

CHUNK = 500  # cases a process tries at a time; progress and results are written after each


def _chunk(name: str, number: int, seed: int) -> Outcome:
    torch.set_num_threads(1)
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    return run(CAMPAIGNS[name], number, seed)


def _campaign(name: str, cases: int, seed: int, jobs: int) -> tuple[int, list[str], float]:
    """The totals over all chunks, printed as they grow."""
    tried, seconds, failures, began = 0, 0.0, [], time.perf_counter()
    with ProcessPoolExecutor(jobs) as pool:
        chunks = [min(CHUNK, cases - done) for done in range(0, cases, CHUNK)]
        futures = [pool.submit(_chunk, name, number, seed + k) for k, number in enumerate(chunks)]
        for future in as_completed(futures):
            outcome = future.result()
            tried, seconds = tried + outcome.tried, seconds + outcome.seconds
            failures += outcome.failures
            for failure in outcome.failures:
                print(f"\n  {failure}", flush=True)
            print(f"\r{name}: {tried:,} of {cases:,} cases, {len(failures)} failures", end="", flush=True)
    print(f", {time.perf_counter() - began:.0f} s")
    return tried, failures, seconds


def main() -> None:
    """Run the chosen campaigns and write their totals."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("campaigns", nargs="*", metavar="CAMPAIGN", help=f"default: all ({', '.join(CAMPAIGNS)})")
    parser.add_argument("--cases", type=int, help="cases per campaign; default: the number in docs/reliability.rst")
    parser.add_argument("--seed", type=int, default=0, help="first seed; other seeds try other cases (default: 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one per core)")
    parser.add_argument("--record", type=Path, help="append the totals to a JSON file, such as tests/fuzz/record.json")
    options = parser.parse_args()
    unknown = set(options.campaigns) - set(CAMPAIGNS)
    if unknown:
        parser.error(f"no campaign {', '.join(unknown)}; there are {', '.join(CAMPAIGNS)}")
    wrong = 0
    for name in options.campaigns or CAMPAIGNS:
        tried, failures, seconds = _campaign(name, options.cases or CAMPAIGNS[name].full, options.seed, options.jobs)
        wrong += len(failures)
        if options.record:
            append(options.record, CAMPAIGNS[name].promise, tried, len(failures), seconds)
    raise SystemExit(wrong > 0)


def append(record: Path, promise: str, cases: int, wrong: int, seconds: float) -> None:
    """Add one row to the record of what was tried."""
    rows = json.loads(record.read_text()) if record.exists() else []
    versions = f"minimand {minimand.__version__}, torch {torch.__version__}"
    row = {"date": date.today().isoformat(), "promise": promise, "cases": cases, "wrong": wrong}
    rows.append({**row, "seconds": round(seconds), "versions": versions})
    record.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

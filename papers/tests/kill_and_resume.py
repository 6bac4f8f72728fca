"""Kill smoke runs by SIGKILL at random moments, resume them, and compare their numbers with those of whole runs.

Half of the kills come at a random time, the other half right before a random operation on a file of the run: before a
record, a checkpoint or a result is opened, written under another name, or renamed. A run is killed up to three times in
a row, then resumed to its end. Processes are forked, so that torch is imported once and a kill takes a second or two.

    python papers/tests/kill_and_resume.py --kills 200 --seed 0

The last line says how many runs ended in other numbers, which is the exit status. Their folders are kept and named.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

from minimand_papers.registry import find
from minimand_papers.runner import RunSetting, run
from minimand_papers.setting import directory_of

FILE = str(Path(__file__).parent / "cases" / "experiment_file.py")
# Training with dropout and kept tensors, networks with solvers, cached features, ProxProp, lifted methods, unrolled
# networks, residual networks, parts without epochs, and factorisation.
EXPERIMENTS = (
    FILE,
    "dropout-digits",
    "layer-convergence",
    "solvers-dropout-rates",
    "solvers-heads",
    "proxprop-mlp",
    "lpom-mnist",
    "lifted-conv",
    "cs-phases",
    "mri-brain",
    "structure-depth",
    "jacobian-regularizer",
    "lowrank-synthetic",
    "dropout-factorization",
    "dropout-equalization",
)
# What no two runs have in common.
TIMES = ("spent", "training")  # and all names with "seconds" in them
_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.chmod")


def attempt(name: str, out: Path, jobs: int, *, after: float | None = None, before: int | None = None) -> int | None:
    """Run or resume in a process of its own; None if it was killed, else how often it touched a file of the run.

    It is killed ``after`` so many seconds, or ``before`` the file operation of this number.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        with os.fdopen(writing, "w") as pipe:
            _run(name, out, jobs, before, pipe)
        os._exit(0)
    os.close(writing)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reading) as pipe:
        touched = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return None
    if not touched:
        raise RuntimeError(f"{name} failed in {out}")
    return int(touched)


def _run(name: str, out: Path, jobs: int, before: int | None, pipe: object) -> None:
    touched = 0
    root = str(out)

    def hook(event: str, arguments: tuple) -> None:
        nonlocal touched
        if event in _EVENTS and any(isinstance(path, str | Path) and str(path).startswith(root) for path in arguments):
            touched += 1
            if touched == before:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    try:
        run(RunSetting(name, "smoke", out=out, jobs=jobs, resume=True))
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    print(touched, file=pipe, flush=True)  # type: ignore[call-overload]


def outcome(name: str, out: Path) -> dict[str, object]:
    """Every number of a run but its times, from the records and from the result, and the names of its files."""
    directory = directory_of(out, find(name), RunSetting(name, "smoke", find(name).presets["smoke"].options))
    found: dict[str, object] = {}
    for path in sorted(directory.rglob("metrics.jsonl")):
        found[str(path.relative_to(directory))] = [
            _timeless(json.loads(line)) for line in path.read_text().splitlines()
        ]
    result = json.loads((directory / "result.json").read_text())
    found["result"] = [result[key] for key in ("experiment", "options", "seeds", "complete")]
    found["records"] = {
        (part, seed): [_timeless(record) for record in records]
        for part, seeds in result["records"].items()
        for seed, records in seeds.items()
    }
    found["files"] = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    return found


def _timeless(record: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in record.items() if key not in TIMES and "seconds" not in key}


def campaign(names: tuple[str, ...], kills: int, seed: int, *, parallel: float = 0.0, keep: bool = False) -> list[str]:
    """Deliver so many kills; the runs that ended in other numbers, with the moments at which they were killed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rng, delivered, wrong = random.Random(seed), 0, list[str]()
    truth: dict[str, tuple[dict[str, object], float, int]] = {}
    turn = 0
    with tempfile.TemporaryDirectory() as folder:
        while delivered < kills:
            name, turn = names[turn % len(names)], turn + 1
            if name not in truth:
                out, begin = Path(folder) / f"whole-{turn}", time.monotonic()
                touched = attempt(name, out, 1)
                assert touched
                truth[name] = outcome(name, out), time.monotonic() - begin, touched
            expected, seconds, touched = truth[name]
            out, history = Path(folder) / f"killed-{turn}", list[str]()
            for _ in range(rng.randint(1, 3)):
                jobs = 2 if rng.random() < parallel else 1
                # Workers of their own take some seconds to start, and their files are theirs.
                if jobs == 2:
                    after, before = rng.uniform(0, seconds + 6), None
                elif rng.random() < 0.5:
                    after, before = rng.uniform(0, seconds), None
                else:
                    after, before = None, rng.randint(1, touched)
                if attempt(name, out, jobs, after=after, before=before) is not None:
                    break
                delivered += 1
                history.append(
                    f"after {after:.3f} s, {jobs} jobs" if after is not None else f"before operation {before}"
                )
            right = attempt(name, out, 1) is not None and outcome(name, out) == expected
            if not right:
                kept = shutil.copytree(out, Path(tempfile.mkdtemp(prefix="wrong-")) / "out") if keep else "not kept"
                wrong.append(f"{name}: killed {'; '.join(history)} ({kept})")
            shutil.rmtree(out)
            print(f"{delivered}/{kills} {Path(name).stem}: {len(history)} kills, {'right' if right else 'WRONG'}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=float, default=0.05, help="share of the attempts with two worker processes")
    parser.add_argument("experiments", nargs="*", default=list(EXPERIMENTS))
    given = parser.parse_args()
    wrong = campaign(tuple(given.experiments), given.kills, given.seed, parallel=given.parallel, keep=True)
    for line in wrong:
        print("WRONG", line)
    print(f"{given.kills} kills, {len(wrong)} runs ended in other numbers")
    raise SystemExit(min(len(wrong), 125))


if __name__ == "__main__":
    main()

"""Laws of the lab: an interrupted run ends in the same numbers; what a report says, the numbers support."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from minimand.errors import DataError, OptionError
from minimand_papers.clock import Stopwatch
from minimand_papers.comparing import difference
from minimand_papers.experiment import PRESETS, Results
from minimand_papers.jobs import in_parallel
from minimand_papers.progress import Display
from minimand_papers.registry import experiments, find
from minimand_papers.runner import RunSetting, read_results, run
from minimand_papers.setting import Job
from minimand_papers.store import Records, atomically, read_json, sweep, write_json

FILE = str(Path(__file__).parent / "cases" / "experiment_file.py")
UNSEEDED = str(Path(__file__).parent / "cases" / "unseeded_file.py")


def numbers(directory: Path) -> dict:
    """Every record of a run, without what differs from one machine's mood to the next."""
    found = {}
    for path in sorted(directory.glob("**/metrics.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[str(path.relative_to(directory))] = [{k: v for k, v in line.items() if k != "seconds"} for line in lines]
    return found


def command(out: Path, *more: str, launcher: tuple[str, ...] = ()) -> list[str]:
    program = [sys.executable, *launcher, "-m", "minimand_papers", "run", FILE, "--preset", "smoke", "--out", str(out)]
    return [*program, *more]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    return run(RunSetting(FILE, "smoke", out=out, jobs=1)).parent


def test_a_killed_run_resumes_to_the_same_numbers(tmp_path: Path, uninterrupted: Path) -> None:
    directory = tmp_path / "user-made" / "smoke"
    for lines, jobs in ((1, "1"), (5, "2"), (12, "1")):
        process = subprocess.Popen(command(tmp_path, "--jobs", jobs, "--resume"), stdout=subprocess.DEVNULL)
        while process.poll() is None:
            written = sum(len(path.read_bytes().splitlines()) for path in directory.glob("**/metrics.jsonl"))
            if written >= lines:
                # Somewhere in the middle of an epoch, of a record or of a checkpoint.
                time.sleep(0.013 * lines)
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.002)
        assert process.wait() == -signal.SIGKILL
    subprocess.run(command(tmp_path, "--jobs", "2", "--resume"), check=True, stdout=subprocess.DEVNULL)
    assert numbers(directory) == numbers(uninterrupted)
    assert read_json(directory / "result.json")["complete"]


def test_parallel_processes_give_the_same_numbers(tmp_path: Path, uninterrupted: Path) -> None:
    run(RunSetting(FILE, "smoke", out=tmp_path, jobs=2))
    assert numbers(tmp_path / "user-made" / "smoke") == numbers(uninterrupted)


def test_a_seed_is_finished_before_the_next_is_begun(tmp_path: Path) -> None:
    """So that a run that is stopped leaves whole seeds, also where parts wait for others."""
    small = find(FILE).presets["smoke"].options.__class__(epochs=1, limit=80)
    setting = RunSetting(FILE, "smoke", small, (0, 1), tmp_path)
    jobs = [Job(part, seed) for seed in (0, 1) for part in find(FILE).parts(small)]
    done = in_parallel(setting, tmp_path, jobs, 1, Display(quiet=True))
    assert [(job.seed, job.part.name) for job in done] == [(0, "first"), (0, "second"), (1, "first"), (1, "second")]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_part_without_randomness_runs_once_for_all_seeds(workers: int, tmp_path: Path) -> None:
    """Its records count for every seed, and its time once; a seed added later takes them as well."""
    path = run(RunSetting(UNSEEDED, "smoke", None, (3, 4), tmp_path, jobs=workers))
    control, trained = (read_json(path)["records"][part] for part in ("control", "trained"))
    assert control["3"] == control["4"]
    assert trained["3"] != trained["4"]
    assert len((path.parent / "ran.txt").read_text().split()) == 3
    run(RunSetting(UNSEEDED, "smoke", None, (5,), tmp_path, jobs=workers, resume=True))
    assert read_json(path)["records"]["control"]["5"] == control["3"]
    assert len((path.parent / "ran.txt").read_text().split()) == 4
    assert read_json(path)["complete"]


def test_two_ranks_end_in_the_numbers_of_one_process(tmp_path: Path) -> None:
    """Deterministic layers, the same global batch: torchrun with two processes against one."""
    more = ("--no-stochastic", "--seed", "0")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for name, launcher in (("one", ()), ("two", torchrun)):
        call = command(tmp_path / name, *more, launcher=launcher)
        done = subprocess.run(call, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    one, two = (numbers(tmp_path / name / "user-made" / "smoke") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for path, records in one.items():
        for ours, theirs in zip(records, two[path], strict=True):
            assert ours.keys() == theirs.keys()
            assert all(math.isclose(ours[key], theirs[key], rel_tol=1e-4, abs_tol=1e-4) for key in ours), (ours, theirs)
    assert read_json(tmp_path / "two" / "user-made" / "smoke" / "result.json")["processes"] == 2


def test_seeds_are_added_and_other_options_refused_on_resuming(tmp_path: Path) -> None:
    small = find(FILE).presets["smoke"].options.__class__(epochs=1, limit=80)
    run(RunSetting(FILE, "smoke", small, (0,), tmp_path, jobs=1))
    first = numbers(tmp_path / "user-made" / "smoke")
    path = run(RunSetting(FILE, "smoke", small, (5,), tmp_path, jobs=1, resume=True))
    assert read_json(path)["seeds"] == [0, 5]
    assert {key: value for key, value in numbers(path.parent).items() if key in first} == first
    other = find(FILE).presets["smoke"].options.__class__(epochs=2, limit=80)
    with pytest.raises(OptionError, match="epochs=1 there, 2 now"):
        run(RunSetting(FILE, "smoke", other, (0,), tmp_path, jobs=1, resume=True))


def test_finished_parts_of_a_result_file_do_not_run_again(tmp_path: Path, uninterrupted: Path) -> None:
    """Their records, times and versions are those of the file; seeds that it lacks run as ever."""
    stored = read_json(uninterrupted / "result.json")
    other = {**stored, "seeds": [0], "versions": {**stored["versions"], "minimand": "0.0.1"}}
    other["records"] = {part: {"0": seeds["0"]} for part, seeds in stored["records"].items()}
    file = tmp_path / "other.json"
    file.write_text(json.dumps(other))
    setting = RunSetting(FILE, "smoke", None, (0, 1), tmp_path, continue_from=file, jobs=1)
    found = read_json(run(setting))
    assert found["complete"]
    assert {part: seeds["0"] for part, seeds in found["records"].items()} == {
        part: seeds["0"] for part, seeds in stored["records"].items()
    }
    assert (
        numbers(uninterrupted)["seed-1/second/metrics.jsonl"]
        == numbers(tmp_path)["user-made/smoke/seed-1/second/metrics.jsonl"]
    )
    assert found["versions"]["minimand"] == f"0.0.1, {stored['versions']['minimand']}"
    assert not (tmp_path / "user-made" / "smoke" / "seed-0" / "first" / "model.safetensors").exists()


def test_a_part_whose_tensors_are_needed_runs_although_a_result_file_has_its_records(
    tmp_path: Path, uninterrupted: Path
) -> None:
    stored = read_json(uninterrupted / "result.json")
    del stored["records"]["second"]
    file = tmp_path / "other.json"
    file.write_text(json.dumps({**stored, "complete": False}))
    path = run(RunSetting(FILE, "smoke", None, (0, 1), tmp_path, continue_from=file, jobs=1))
    assert numbers(path.parent) == numbers(uninterrupted)


def test_results_of_another_kind_are_not_continued(tmp_path: Path, uninterrupted: Path) -> None:
    file = tmp_path / "other.json"
    stored = read_json(uninterrupted / "result.json")
    for change, error, says in (
        ({"experiment": "else"}, OptionError, "is a result of else, not of user-made"),
        ({"options": {**stored["options"], "epochs": 7}}, OptionError, "epochs=7 there, 4 now"),
        ({"records": {"first": {"x": []}}}, DataError, "records of another shape"),
        ({"records": []}, DataError, "a list instead of a dict"),
    ):
        file.write_text(json.dumps({**stored, **change}))
        with pytest.raises(error, match=says):
            run(RunSetting(FILE, "smoke", None, (0,), tmp_path, continue_from=file, jobs=1))
    with pytest.raises(DataError, match="cannot be read"):
        run(RunSetting(FILE, "smoke", None, (0,), tmp_path, continue_from=tmp_path / "none.json", jobs=1))


@pytest.mark.parametrize("resume", [False, True])
def test_two_runs_do_not_share_a_directory(tmp_path: Path, resume: bool) -> None:
    process = subprocess.Popen(command(tmp_path, "--jobs", "1"), stdout=subprocess.DEVNULL)
    directory = tmp_path / "user-made" / "smoke"
    while not (directory / "protocol.json").is_file():
        assert process.poll() is None
        time.sleep(0.01)
    with pytest.raises(OptionError, match="another process is running"):
        run(RunSetting(FILE, "smoke", out=tmp_path, resume=resume))
    assert [path.name for path in directory.parent.iterdir() if not path.name.startswith(".")] == ["smoke"]
    process.kill()
    process.wait()


def test_workers_go_with_their_parent(tmp_path: Path) -> None:
    process = subprocess.Popen(command(tmp_path, "--jobs", "2"), stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob("**/metrics.jsonl")):
        assert process.poll() is None
        time.sleep(0.01)
    children = [int(word) for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert children
    process.kill()
    process.wait()
    # One that is still starting notices when it has.
    for _ in range(6000):
        if not any(_runs(child) for child in children):
            return
        time.sleep(0.01)
    pytest.fail(f"of {children} some still run")


def _runs(number: int) -> bool:
    status = Path(f"/proc/{number}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_earlier_run_is_moved_aside_not_lost(tmp_path: Path) -> None:
    small = find(FILE).presets["smoke"].options.__class__(epochs=1, limit=80)
    setting = RunSetting(FILE, "smoke", small, (0,), tmp_path, jobs=1)
    path = run(setting)
    before = path.read_bytes()
    run(setting)
    assert (tmp_path / "user-made" / "smoke.old-1" / "result.json").read_bytes() == before


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interrupted_run_leaves_what_it_measured_and_nothing_else(tmp_path: Path, jobs: str) -> None:
    begun = command(tmp_path, "--jobs", jobs, "--epochs", "4000")
    # A shell's background jobs ignore the signal, and their children would.
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "preexec_fn": heed}
    process = subprocess.Popen(begun, start_new_session=True, **options)
    while not list(tmp_path.glob("**/metrics.jsonl")):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it, too
    said = process.communicate()[1].decode()
    assert process.returncode == 130
    assert "--resume" in said
    assert "Traceback" not in said
    assert not [path for path in tmp_path.glob("**/.*") if path.is_file()]


def test_a_failed_run_leaves_no_lock_and_is_not_moved_aside(tmp_path: Path) -> None:
    small = find(FILE).presets["smoke"].options.__class__(epochs=1, limit=0)
    for _ in range(2):
        with pytest.raises(ValueError):
            run(RunSetting(FILE, "smoke", small, (3,), tmp_path, jobs=1))
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.glob("**/*") if path.is_file()]
    assert files == ["user-made/smoke/protocol.json"]
    assert os.listdir(tmp_path / "user-made") == ["smoke"]


def test_what_a_killed_process_had_begun_to_write_is_swept(tmp_path: Path) -> None:
    write_json(tmp_path / "part" / "a.json", 1)
    atomically(tmp_path / "part" / "b.json").__enter__().close()  # and never ended
    assert len(list((tmp_path / "part").iterdir())) == 2
    sweep(tmp_path)
    assert os.listdir(tmp_path / "part") == ["a.json"]


def test_an_error_says_in_which_part(tmp_path: Path) -> None:
    small = find(FILE).presets["smoke"].options.__class__(epochs=1, limit=0)
    with pytest.raises(ValueError) as error:
        run(RunSetting(FILE, "smoke", small, (3,), tmp_path, jobs=1))
    assert error.value.__notes__ == ["in the part 'first', seed 3"]


def test_results_come_back_as_they_were_measured(uninterrupted: Path) -> None:
    experiment, results, stored = read_results(uninterrupted, [find(FILE)])
    assert results.options == experiment.presets["smoke"].options
    finals = {
        path: records[-1]["test"] for path, records in numbers(uninterrupted).items() if path.startswith("seed-1")
    }
    assert results.curve("second", "test")[1][-1] == pytest.approx(finals["seed-1/second/metrics.jsonl"])
    assert stored["versions"].keys() >= {"torch", "numpy", "python", "minimand"}
    assert stored["seeds"] == [0, 1]
    assert stored["seconds"] > 0


def _half(path: Path) -> None:
    with atomically(path) as file:
        file.write(b"half")
        raise RuntimeError


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"x": math.nan, "y": [math.inf, 1.5]})
    back = read_json(path)
    assert math.isnan(back["x"])
    assert back["y"] == [math.inf, 1.5]
    with pytest.raises(RuntimeError):
        _half(path)
    assert math.isnan(read_json(path)["x"])
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    path.write_text('{"x": ')
    with pytest.raises(DataError, match=r"a\.json is damaged"):
        read_json(path)


def test_a_line_cut_off_was_never_written(tmp_path: Path) -> None:
    records = Records(tmp_path / "m.jsonl")
    for number in range(3):
        records.append({"n": number})
    with records.path.open("a") as file:
        file.write('{"n": 3')
    assert [record["n"] for record in records] == [0, 1, 2]
    records.truncate(2)
    assert records.path.read_text() == '{"n": 0}\n{"n": 1}\n'


@pytest.mark.parametrize(
    ("ours", "theirs", "outcome", "says"),
    [
        ((90.0, 91.0, 92.0), (80.0, 81.5, 82.0), "better", "beats"),
        ((90.0, 91.0), (80.0, 81.0), "open", "2 seeds): open"),
        ((90.0, 95.0), (80.0, 81.0), "open", "2 seeds): open"),
        ((90.0, 92.0, 94.0), (88.0, 91.0, 90.0), "open", "3 seeds): open"),
        ((80.0, 81.5, 82.0), (90.0, 91.0, 92.0), "worse", "loses to"),
        ((80.0, 90.0, 82.0), (81.0, 81.0, 84.0), "open", "open"),
        ((90.0,), (80.0,), "open", "1 seed): open"),
        ((90.0, math.nan), (80.0, 80.0), "diverged", "diverged"),
        ((), (80.0,), "not measured", "no seed in common"),
        ((7.0, 7.0), (7.0, 7.0), "equal", "equals"),
    ],
)
def test_no_claim_beyond_the_spread(ours: tuple, theirs: tuple, outcome: str, says: str) -> None:
    records = {
        name: {seed: [{"test": value}] for seed, value in enumerate(values)}
        for name, values in (("a", ours), ("b", theirs))
    }
    found = difference(Results(None, "smoke", records), "a", "b")
    assert found.outcome == outcome
    assert says in str(found)


def test_a_tuned_method_is_the_candidate_that_validation_chose_in_each_seed() -> None:
    scores = {"weak": ((70.0, 9.0), (60.0, 8.0)), "strong": ((60.0, 10.0), (80.0, 7.0)), "other": ((50.0, 5.0),)}
    records = {
        name: {seed: [{"validation": v, "test": t}] for seed, (v, t) in enumerate(seeds)}
        for name, seeds in scores.items()
    }
    chosen = Results(None, "smoke", records).chosen(
        {"tuned": ["weak", "strong"], "alone": ["other"], "both": list(scores)}
    )
    # The second seed of "strong" is better by validation and worse by the test, which must not choose.
    assert chosen.final("tuned", "test") == [9.0, 7.0]
    assert chosen.final("alone", "test") == [5.0]
    assert chosen.final("both", "test") == [9.0]


def test_every_experiment_has_three_presets_and_parts_of_its_own() -> None:
    found = experiments()
    assert len({experiment.name for experiment in found}) == len(found) >= 7
    for experiment in found:
        assert tuple(experiment.presets) == PRESETS, experiment.name
        for name, preset in experiment.presets.items():
            parts = experiment.parts(preset.options)
            names = [part.name for part in parts]
            assert len(set(names)) == len(names), (experiment.name, name)
            assert {need for part in parts for need in part.needs} <= set(names)


def test_seconds_are_of_work_not_of_waiting_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    watch = Stopwatch()
    time.sleep(0.3)
    assert watch.seconds < 0.2
    begin = time.process_time()
    while time.process_time() - begin < 0.1:
        pass
    assert watch.seconds >= 0.1
    subprocess.run([sys.executable, "-c", "import math; [math.sin(i) for i in range(3_000_000)]"], check=True)
    assert watch.seconds >= 0.2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    watch = Stopwatch()
    time.sleep(0.3)
    assert watch.seconds >= 0.3

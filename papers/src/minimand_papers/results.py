"""The result file of an experiment: protocol, versions, and every record."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from minimand.errors import DataError, OptionError

from .experiment import Experiment, Results
from .registry import find_named
from .setting import Job, RunSetting, device_of, is_done, options_of, require_same_options
from .store import Records, read_json, versions, write_json, writing

__all__ = ["RESULT", "read_results", "take_finished", "write_result"]

RESULT = "result.json"
_KEYS = {"experiment": str, "preset": str, "options": dict, "seeds": list, "complete": bool, "records": dict}
_KEYS |= {"seconds": float, "threads": int, "device": str, "versions": dict}


def read_results(
    directory: Path, own: Sequence[Experiment[Any]] = ()
) -> tuple[Experiment[Any], Results[Any], dict[str, Any]]:
    """The experiment, its measurements and the content of its result file.

    A result file is data: it never makes this function import code. The experiments of a user's own files are given as
    ``own``; all others come with the package.
    """
    stored = read_json(directory / RESULT, _KEYS)
    experiment = _experiment(stored, own)
    options = experiment.restore(stored["preset"], stored["options"])
    records = _records(stored, directory / RESULT)
    return experiment, Results(options, stored["preset"], records), stored


def _records(stored: dict[str, Any], path: Path) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """The records of a result file by part and seed."""
    try:
        return {
            part: {int(seed): [{**record} for record in values] for seed, values in seeds.items()}
            for part, seeds in stored["records"].items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(f"{path} has records of another shape; run the experiment again") from error


def _experiment(stored: dict[str, Any], own: Sequence[Experiment[Any]]) -> Experiment[Any]:
    name = stored["experiment"]
    if not stored.get("file"):
        return find_named(name)
    for experiment in own:
        if experiment.name == name:
            return experiment
    raise OptionError(
        f"{name} is defined in a file of its author's own, {stored['file']!r}; if you have it and trust it, "
        f"name it with --experiment"
    )


def take_finished(experiment: Experiment[Any], setting: RunSetting, directory: Path, jobs: Sequence[Job]) -> None:
    """Take the finished parts of the result file ``setting.continue_from``, so that they do not run again.

    A result file holds no tensors, so a part that an unfinished one needs is left out, and runs again.
    """
    assert setting.continue_from is not None
    path = setting.continue_from
    stored = read_json(path, _KEYS)
    if stored["experiment"] != experiment.name:
        raise OptionError(f"{path} is a result of {stored['experiment']}, not of {experiment.name}")
    remedy = "give the same options, or leave out --continue-from"
    require_same_options(path, stored["options"], options_of(setting), remedy)
    found = {(part, seed): lines for part, seeds in _records(stored, path).items() for seed, lines in seeds.items()}
    waiting = [job for job in jobs if not is_done(directory, job)]
    open_jobs: list[Job] = []
    while more := [job for job in waiting if job not in open_jobs and _runs(job, found, open_jobs)]:
        open_jobs += more
    for job in waiting:
        if job not in open_jobs:
            _take(directory / job.folder, job, found[job.part.name, job.seed], stored["versions"])


def _runs(job: Job, found: Mapping[tuple[str, int], list[dict[str, Any]]], others: Sequence[Job]) -> bool:
    """Whether a job has to run: it is not among the found ones, or one of the others that run needs its tensors."""
    needed = any(other.seed == job.seed and job.part.name in other.part.needs for other in others)
    return needed or not found.get((job.part.name, job.seed))


def _take(folder: Path, job: Job, records: list[dict[str, Any]], versions: Mapping[str, str]) -> None:
    """Write the records of a part that is finished elsewhere, and that it is."""
    with writing(folder):
        shutil.rmtree(folder, ignore_errors=True)
    for record in records:
        Records(folder / "metrics.jsonl").append(record)
    seconds = records[-1].get("seconds", 0.0)
    spent = float(seconds) if job.like is None and isinstance(seconds, int | float) else 0.0
    write_json(folder / "done.json", {"seconds": spent, "records": len(records), "versions": versions})


def _all_versions(found: Sequence[Any]) -> dict[str, str]:
    """The versions of all parts, separated by commas where parts ran with several."""
    known = [versions for versions in found if isinstance(versions, dict)]
    names = dict.fromkeys(name for versions in known for name in versions)
    return {name: ", ".join(dict.fromkeys(str(v[name]) for v in known if name in v)) for name in names}


def write_result(experiment: Experiment[Any], setting: RunSetting, directory: Path, jobs: list[Job]) -> None:
    """Write the result file; it is written after every part, so that a report is possible during a run."""
    records: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    ran_with: list[Any] = []
    seconds = 0.0
    complete = True
    for job in jobs:
        done = directory / job.folder / "done.json"
        if not done.is_file():
            complete = False
            continue
        ended = read_json(done, {"seconds": float})
        seconds += ended["seconds"]
        ran_with.append(ended.get("versions", {}))
        lines = [_rounded(record) for record in Records(directory / job.folder / "metrics.jsonl")]
        if len(lines) != ended.get("records", len(lines)):
            raise DataError(
                f"{done.parent} has {len(lines)} of {ended['records']} records; delete it and continue with --resume"
            )
        records.setdefault(job.part.name, {})[str(job.seed)] = lines
    result = {
        "experiment": experiment.name,
        "file": Path(setting.name).name if setting.name.endswith(".py") else None,
        "source": experiment.source,
        "preset": setting.preset,
        "options": options_of(setting),
        "seeds": setting.seeds,
        "complete": complete,
        "seconds": round(seconds, 1),
        "threads": setting.threads,
        "device": str(device_of(setting.preset)),
        "processes": dist.get_world_size() if dist.is_initialized() else 1,
        "versions": _all_versions(ran_with) or versions(),
        "records": records,
    }
    write_json(directory / RESULT, result)


def _rounded(value: Any) -> Any:
    """Round floats to seven significant digits to keep the file small."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value

"""The result file of an experiment: protocol, versions, and every record."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from minimand.errors import DataError, OptionError

from .experiment import Experiment, Results
from .registry import find_named
from .setting import Job, RunSetting, device_of, options_of
from .store import Records, read_json, versions, write_json

__all__ = ["RESULT", "read_results", "write_result"]

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
    try:
        records = {
            part: {int(seed): [{**record} for record in values] for seed, values in seeds.items()}
            for part, seeds in stored["records"].items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(f"{directory / RESULT} has records of another shape; run the experiment again") from error
    return experiment, Results(options, stored["preset"], records), stored


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


def write_result(experiment: Experiment[Any], setting: RunSetting, directory: Path, jobs: list[Job]) -> None:
    """Write the result file; it is written after every part, so that a report is possible during a run."""
    records: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    seconds = 0.0
    complete = True
    for job in jobs:
        done = directory / job.folder / "done.json"
        if not done.is_file():
            complete = False
            continue
        ended = read_json(done, {"seconds": float})
        seconds += ended["seconds"]
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
        "versions": versions(),
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

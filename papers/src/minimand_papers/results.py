"""The result file of an experiment: protocol, versions, and every record."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .experiment import Experiment, Results
from .registry import find
from .setting import Job, RunSetting, device_of, options_of
from .store import Records, read_json, versions, write_json

__all__ = ["RESULT", "read_results", "write_result"]

RESULT = "result.json"


def read_results(directory: Path) -> tuple[Experiment[Any], Results[Any], dict[str, Any]]:
    """The experiment, its measurements and the content of its result file."""
    stored = read_json(directory / RESULT)
    experiment = find(stored.get("file") or stored["experiment"])
    options = experiment.restore(stored["preset"], stored["options"])
    records = {
        part: {int(seed): list(values) for seed, values in seeds.items()} for part, seeds in stored["records"].items()
    }
    return experiment, Results(options, stored["preset"], records), stored


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
        seconds += read_json(done)["seconds"]
        lines = [_rounded(record) for record in Records(directory / job.folder / "metrics.jsonl")]
        records.setdefault(job.part.name, {})[str(job.seed)] = lines
    result = {
        "experiment": experiment.name,
        "file": str(Path(setting.name).resolve()) if setting.name.endswith(".py") else None,
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

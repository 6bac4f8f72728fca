"""An experiment with a control in which nothing is random; every part that runs writes its name down."""

import dataclasses

import torch

from minimand_papers.experiment import Comparison, Experiment, Part, Preset


@dataclasses.dataclass(frozen=True)
class Options:
    """No options."""


def parts(options):
    return [Part("trained", needs=("control",)), Part("control", seeded=False)]


def run(options, part, lab):
    with (lab.directory.parent.parent / "ran.txt").open("a") as ran:
        ran.write(f"{part}\n")
    yield {"test": float(torch.rand(())) if part == "trained" else 0.5}


def compare(results):
    return [Comparison(part, None, results.final(part, "test")) for part in ("control", "trained")]


presets = {name: Preset(Options(), (0, 1)) for name in ("smoke", "laptop", "paper")}
experiment = Experiment("unseeded", "A control", "nowhere", "A test.", presets, parts, run, compare)

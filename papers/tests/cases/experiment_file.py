"""An experiment as a user would write one, small: a solver network with dropout on digits; run by path in the tests."""

import dataclasses

import torch
from torch import nn

from minimand.nn import SolverLinear
from minimand.solvers import ProxGD, ProxSG
from minimand_papers.data import CropFlip
from minimand_papers.experiment import Comparison, Experiment, Part, Preset
from minimand_papers.training import loaders, train


@dataclasses.dataclass(frozen=True)
class Options:
    """A small network.

    Args:
        epochs: Of training.
        stochastic: Whether there is anything random in the network.
        limit: Images used.
    """

    epochs: int = 4
    stochastic: bool = True
    limit: int = 240


def parts(options):
    return [Part("first"), Part("second", needs=("first",))]


def run(options, part, lab):
    data = loaders(lab, "digits", 40, augment=CropFlip(1, flip=False), limit=options.limit)
    solver = ProxSG(4) if options.stochastic else ProxGD(4)
    model = nn.Sequential(
        nn.Flatten(),
        SolverLinear(64, 24, solver=solver),
        nn.Dropout(0.3 if options.stochastic else 0.0),
        nn.Linear(24, 10),
    )
    if part == "second":
        model.load_state_dict(lab.kept("first", "model", model.state_dict()))
    drawn = lab.generator(1)
    for record in train(lab, model, data, epochs=options.epochs, rates=(5e-2, 5e-3), trials=2):
        # Drawn within the loop: after an interruption it has to go on where it was.
        yield {**record, "drawn": float(torch.rand((), generator=drawn))}
    lab.keep("model", model.state_dict())


def compare(results):
    return [Comparison(part, 90.0, results.final(part, "test"), "%") for part in ("first", "second")]


presets = {
    "smoke": Preset(Options(), (0, 1)),
    "laptop": Preset(Options(epochs=30)),
    "paper": Preset(Options(epochs=300)),
}
experiment = Experiment("user-made", "A user's own", "nowhere", "A test.", presets, parts, run, compare)

"""The demo: a network trained on digits is converted, keeps its accuracy, and is fine-tuned beside its controls."""

import dataclasses

import torch

from minimand.nn import suggest

from ...experiment import Experiment, Preset
from .solvers_conversion import (
    KINDS,
    SolversConversionOptions,
    compare,
    findings,
    parts,
    plots,
    run,
)

_OPTIONS = SolversConversionOptions("mnist5k", 64, limit=0, nets=("LeNet",), epochs=6, finetune=2, budget=5.0)


def preview(options: SolversConversionOptions) -> str:
    """The plan for an untrained network of this kind, on random images of the size of MNIST's."""
    kind, shape = KINDS[options.nets[0]], (1, 28, 28)
    return str(suggest(kind.make(kind.dropout, 10, shape), torch.randn(options.batch, *shape), budget=options.budget))


experiment = Experiment(
    name="conversion-digits",
    title="A trained network becomes solvers and keeps its accuracy",
    source="[Bibi2019], §3.4 and §4, at small scale",
    about=(
        "LeNet with dropout ½ is trained on 5,000 MNIST digits and converted by one line. Right after conversion its "
        "accuracy is that of the plain network, because the first iteration of every converted layer is the plain "
        "layer. Then it is fine-tuned with the strength of the solvers rising, or learned. The controls are the plain "
        "network fine-tuned for the same epochs, with its dropout and without."
    ),
    presets={
        "smoke": Preset(
            dataclasses.replace(
                _OPTIONS, dataset="digits", batch=50, limit=200, enlarge=4, epochs=2, finetune=1, budget=30
            ),
            (0, 1),
            0.2,
        ),
        "laptop": Preset(_OPTIONS, (0, 1, 2), 3),
        "paper": Preset(
            dataclasses.replace(_OPTIONS, dataset="mnist", batch=128, epochs=30, finetune=10), (0, 1, 2, 3, 4), 400
        ),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
)

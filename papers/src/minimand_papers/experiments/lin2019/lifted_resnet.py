"""A residual network with batch normalisation: LPOM's gradient in SGD against backpropagation."""

import dataclasses
from collections.abc import Iterator, Sequence

from ...comparing import Difference, difference
from ...context import Lab
from ...experiment import Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ...zoo.plain import BasicResNet
from ._lifted import CONTROL, error_dots, relative_time, tuned
from .lifted_conv import LiftedConvOptions, images

METHODS = ("LPOM-SGD", "LPOM-Adam", "SGD", "Adam", CONTROL)


@dataclasses.dataclass(frozen=True)
class LiftedResNetOptions(LiftedConvOptions):
    """ResNet-20 of a given width.

    Args:
        width: Channels of the first stage.
    """

    sgd_rates: tuple[float, ...] = (0.1, 0.03)
    adam_rates: tuple[float, ...] = (1e-2, 3e-3)
    datasets: tuple[str, ...] = ("cifar10",)
    width: int = 8


def parts(options: LiftedResNetOptions) -> list[Part]:
    """Every method on every dataset."""
    return [Part(f"{dataset} {method}") for dataset in options.datasets for method in METHODS]


def run(options: LiftedResNetOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Try a method's candidates."""
    dataset, _, method = part.partition(" ")
    data = images(options, dataset, lab)
    shape = (data.train.x.shape[1], data.train.x.shape[2], data.train.x.shape[3])
    yield from tuned(options, method, lambda: BasicResNet(data.classes, shape, width=options.width), data, lab)


def compare(results: Results[LiftedResNetOptions]) -> list[Comparison]:
    """Accuracies, and the time of an epoch."""
    found = [Comparison(part.name, None, results.final(part.name, "test"), "%") for part in parts(results.options)]
    times = [
        relative_time(results, f"{name} LPOM-SGD", f"{name} SGD", f"{name}: an epoch of LPOM-SGD in SGD's time")
        for name in results.options.datasets
    ]
    return [*found, *times]


def plots(results: Results[LiftedResNetOptions]) -> list[Plot]:
    """The errors, one row per dataset."""
    rows = {name: {method: f"{name} {method}" for method in METHODS} for name in results.options.datasets}
    return [error_dots(results, rows, title="A residual network without derivatives of activations")]


def findings(results: Results[LiftedResNetOptions]) -> Sequence[str | Difference]:
    """LPOM's gradient against backpropagation's in the same optimizer, and against random features."""
    pairs = (("LPOM-SGD", "SGD"), ("LPOM-Adam", "Adam"), ("LPOM-SGD", CONTROL))
    return [difference(results, f"{d} {a}", f"{d} {b}") for d in results.options.datasets for a, b in pairs]


experiment = Experiment(
    name="lifted-resnet",
    title="A residual network with LPOM's gradient",
    source="[Lin2019], future work",
    about=(
        "The source names arbitrary topology as future work. ResNet-20 with batch normalisation and additions is "
        "trained by SGD and by Adam, with LPOM's own gradient, which uses no derivative of the activations, and with "
        "backpropagation's. All have the same epochs, initial weights and batches, and two learning rates, of which "
        "a tenth of the training images chooses one. The control keeps every layer but the last random and fits that "
        "one by a ridge regression."
    ),
    presets={
        "smoke": Preset(
            LiftedResNetOptions(32, 200, epochs=1, datasets=("digits",), width=4, sgd_rates=(0.1,), adam_rates=(3e-3,)),
            (0,),
            0.3,
        ),
        "laptop": Preset(LiftedResNetOptions(batch=64, limit=5_000), (0, 1, 2, 3, 4), 80),
        "paper": Preset(LiftedResNetOptions(batch=128, epochs=100, width=16), (0, 1, 2), 20_000),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
)

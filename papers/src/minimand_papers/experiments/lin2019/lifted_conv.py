"""Convolutions without backpropagation: LPOM against random convolutional features, and against SGD."""

import dataclasses
from collections.abc import Iterator, Sequence

from torch import nn

from minimand.errors import OptionError

from ...comparing import Difference, difference
from ...context import Lab
from ...experiment import Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._lifted import CONTROL, LiftedOptions, RowBatches, RowSplits, error_dots, relative_time, tuned

METHODS = ("LPOM", "LPOM-SGD", "SGD", "Adam", CONTROL)


@dataclasses.dataclass(frozen=True)
class LiftedConvOptions(LiftedOptions):
    """Two convolutions with stride and ReLU, and a linear layer.

    Args:
        datasets: Names from ``minimand_papers.data.registry``.
        channels: Channels of the two convolutions, 5 × 5 and 3 × 3.
    """

    losses: tuple[str, ...] = ("cross_entropy 0.05",)
    sgd_rates: tuple[float, ...] = (0.06, 0.03, 0.015, 0.0075)
    adam_rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    ridges: tuple[float, ...] = (10.0,)
    datasets: tuple[str, ...] = ("mnist", "cifar10")
    channels: tuple[int, int] = (8, 16)


def convolutional(channels: tuple[int, int], shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """The network for images of a shape, with PyTorch's initial weights.

    >>> convolutional((8, 16), (1, 28, 28), 10)[-1]
    Linear(in_features=784, out_features=10, bias=True)
    """
    first, second = channels
    sides = [((side + 1) // 2 + 1) // 2 for side in shape[1:]]
    return nn.Sequential(
        nn.Conv2d(shape[0], first, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(first, second, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(second * sides[0] * sides[1], classes),
    )


def images(options: LiftedConvOptions, dataset: str, lab: Lab) -> RowSplits:
    """The splits as images again."""
    data = options.data(lab, dataset)
    shape = tuple(lab.load(dataset).shape)
    shape = (shape[0], *(side * options.enlarge for side in shape[1:]))

    def shaped(part: RowBatches) -> RowBatches:
        return dataclasses.replace(part, x=part.x.unflatten(1, shape))

    return RowSplits(shaped(data.train), shaped(data.validation), shaped(data.test), data.classes)


def parts(options: LiftedConvOptions) -> list[Part]:
    """Every method on every dataset."""
    if len(options.channels) != 2:
        raise OptionError(f"channels must be two numbers, got {options.channels}")
    return [Part(f"{dataset} {method}") for dataset in options.datasets for method in METHODS]


def run(options: LiftedConvOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Try a method's candidates."""
    dataset, _, method = part.partition(" ")
    data = images(options, dataset, lab)
    shape = tuple(data.train.x.shape[1:])
    yield from tuned(options, method, lambda: convolutional(options.channels, shape, data.classes), data, lab)


def accuracies(results: Results[LiftedConvOptions]) -> list[Comparison]:
    """Test accuracy of every method."""
    return [Comparison(part.name, None, results.final(part.name, "test"), "%") for part in parts(results.options)]


def compare(results: Results[LiftedConvOptions]) -> list[Comparison]:
    """Accuracies, and the time of an epoch."""
    times = [
        relative_time(results, f"{dataset} {name}", f"{dataset} SGD", f"{dataset}: an epoch of {name} in SGD's time")
        for dataset in results.options.datasets
        for name in ("LPOM-SGD", "LPOM")
    ]
    return [*accuracies(results), *times]


def plots(results: Results[LiftedConvOptions]) -> list[Plot]:
    """The errors, one row per dataset."""
    rows = {name: {method: f"{name} {method}" for method in METHODS} for name in results.options.datasets}
    return [error_dots(results, rows, title="Convolutions without backpropagation")]


def findings(results: Results[LiftedConvOptions]) -> Sequence[str | Difference]:
    """LPOM against its control, and against SGD."""
    pairs = [(ours, other) for ours in ("LPOM-SGD", "LPOM") for other in (CONTROL, "SGD", "Adam")]
    return [difference(results, f"{d} {a}", f"{d} {b}") for d in results.options.datasets for a, b in pairs]


experiment = Experiment(
    name="lifted-conv",
    title="Convolutions without backpropagation",
    source="[Lin2019], future work",
    about=(
        "Two convolutions with stride 2 and ReLU and a linear layer, trained by LPOM's ridge regressions, by SGD with "
        "LPOM's own gradient (LPOM-SGD), by SGD and by Adam; the control keeps the convolutions random and fits the "
        "linear layer by a ridge regression. All have the same epochs, initial weights and batches. SGD has four "
        "learning rates with either gradient, and Adam three; a tenth of the training images chooses one, and only "
        "that one is tested. LPOM's damping and the control's ridge were the best of three in earlier runs."
    ),
    presets={
        "smoke": Preset(LiftedConvOptions(32, 300, epochs=2, datasets=("digits",)), (0, 1), 0.2),
        "laptop": Preset(LiftedConvOptions(batch=64, limit=30_000, datasets=("cifar10",)), (0, 1, 2, 3, 4), 45),
        "paper": Preset(LiftedConvOptions(batch=64, epochs=50, channels=(32, 64)), (0, 1, 2), 5000),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
)

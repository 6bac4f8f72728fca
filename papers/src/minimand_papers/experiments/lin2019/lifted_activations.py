"""LPOM with six activations, saturating and not differentiable ones among them, beside SGD."""

import dataclasses
from collections.abc import Iterator, Sequence

from ...comparing import verdict
from ...context import Lab
from ...experiment import Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._lifted import ACTIVATIONS, CONTROL, Chains, error_dots, network, relative_time, tuned

METHODS = ("LPOM", "SGD", CONTROL)


@dataclasses.dataclass(frozen=True)
class Options(Chains):
    """One network with different activations.

    Args:
        dataset: A name of ``minimand_papers.data.registry``.
        net: Hidden widths.
        activations: Of relu, leaky_relu, elu, softplus, tanh, sigmoid.
    """

    dataset: str = "mnist"
    net: str = "300-100"
    activations: tuple[str, ...] = tuple(ACTIVATIONS)


def parts(options: Options) -> list[Part]:
    """Every method with every activation."""
    return [Part(f"{activation} {method}") for activation in options.activations for method in METHODS]


def run(options: Options, part: str, lab: Lab) -> Iterator[Metrics]:
    """Try the method's candidates with one activation."""
    activation, _, method = part.partition(" ")
    data = options.data(lab, options.dataset)
    inputs = data.train.x.shape[1]
    yield from tuned(options, method, lambda: network(options.net, inputs, data.classes, activation), data, lab)


def accuracies(results: Results[Options]) -> list[Comparison]:
    """Test accuracy of every method with every activation."""
    return [Comparison(part.name, None, results.final(part.name, "test"), "%") for part in parts(results.options)]


def compare(results: Results[Options]) -> list[Comparison]:
    """Accuracies, and the time of an epoch."""
    times = [
        relative_time(results, f"{name} LPOM", f"{name} SGD", f"{name}: an epoch of LPOM in SGD's time")
        for name in results.options.activations
    ]
    return [*accuracies(results), *times]


def plots(results: Results[Options]) -> list[Plot]:
    """The errors, a row an activation."""
    rows = {name: {method: f"{name} {method}" for method in METHODS} for name in results.options.activations}
    return [error_dots(results, rows, title="Activations")]


def findings(results: Results[Options]) -> Sequence[str]:
    """LPOM against SGD and the control, with every activation."""
    pairs = [(name, other) for name in results.options.activations for other in METHODS[1:]]
    return [verdict(results, f"{name} LPOM", f"{name} {other}") for name, other in pairs]


experiment = Experiment(
    name="lifted-activations",
    title="LPOM with monotone activations of every kind",
    source="002, Advantages of LPOM",
    about=(
        "The source claims that LPOM works with any non-decreasing Lipschitz activation without numerical difficulty, "
        "saturating (tanh, sigmoid) and not differentiable (ReLU, leaky ReLU) ones included, where SGD has to tune its "
        "learning rate. It gives no numbers. One network with six activations, by LPOM and by SGD from the same "
        "initial weights, two candidates each, chosen on a tenth of the training images; the control has random "
        "hidden layers and a ridge regression on top."
    ),
    presets={
        "smoke": Preset(
            Options(32, 200, epochs=2, dataset="digits", net="20-20", activations=("relu", "softplus", "tanh")),
            (0,),
            0.1,
        ),
        "laptop": Preset(Options(), (0, 1, 2), 12),
        "paper": Preset(Options(epochs=50), (0, 1, 2), 100),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
)

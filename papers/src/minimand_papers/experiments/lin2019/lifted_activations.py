"""LPOM and SGD with six activations, among them saturating and non-differentiable ones."""

import dataclasses
from collections.abc import Iterator, Sequence

from ...claims import ACCURACY, combine, judge_gain, scale, span
from ...comparing import Difference, difference, mean_std
from ...context import Lab
from ...data import registry
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._lifted import ACTIVATIONS, CONTROL, LiftedOptions, error_dots, network, relative_time, tuned

METHODS = ("LPOM", "LPOM-SGD", "SGD", "Adam", CONTROL)


@dataclasses.dataclass(frozen=True)
class LiftedActivationsOptions(LiftedOptions):
    """One network with different activations.

    Args:
        dataset: A name from ``minimand_papers.data.registry``.
        net: Hidden widths.
        activations: Some of relu, leaky_relu, elu, softplus, tanh, sigmoid.
    """

    dataset: str = "mnist"
    net: str = "300-100"
    activations: tuple[str, ...] = tuple(name for name in ACTIVATIONS if name != "steep")


def parts(options: LiftedActivationsOptions) -> list[Part]:
    """Every method with every activation."""
    return [Part(f"{activation} {method}") for activation in options.activations for method in METHODS]


def run(options: LiftedActivationsOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Try the method's candidates with one activation."""
    activation, _, method = part.partition(" ")
    data = options.data(lab, options.dataset)
    inputs = data.train.x.shape[1]
    yield from tuned(options, method, lambda: network(options.net, inputs, data.classes, activation), data, lab)


def accuracies(results: Results[LiftedActivationsOptions]) -> list[Comparison]:
    """Test accuracy of every method with every activation."""
    return [Comparison(part.name, None, results.final(part.name, "test"), "%") for part in parts(results.options)]


def compare(results: Results[LiftedActivationsOptions]) -> list[Comparison]:
    """Accuracies, and the time of an epoch."""
    times = [
        relative_time(results, f"{name} LPOM", f"{name} SGD", f"{name}: an epoch of LPOM in SGD's time")
        for name in results.options.activations
    ]
    return [*accuracies(results), *times]


def plots(results: Results[LiftedActivationsOptions]) -> list[Plot]:
    """The errors, one row per activation."""
    rows = {name: {method: f"{name} {method}" for method in METHODS} for name in results.options.activations}
    return [error_dots(results, rows, title="Activations")]


def findings(results: Results[LiftedActivationsOptions]) -> Sequence[str | Difference]:
    """LPOM against SGD, Adam and the control, and LPOM's gradient against SGD, with every activation."""
    pairs = [*(("LPOM", other) for other in METHODS[2:]), ("LPOM-SGD", "SGD")]
    names = results.options.activations
    return [difference(results, f"{name} {ours}", f"{name} {other}") for name in names for ours, other in pairs]


def claims(results: Results[LiftedActivationsOptions]) -> list[Claim]:
    """LPOM trains with every activation: it beats random hidden layers by far."""
    names = results.options.activations
    ours = [mean_std(values)[0] for name in names if (values := results.final(f"{name} LPOM", "test"))]
    gains = [results.paired(f"{name} LPOM", f"{name} {CONTROL}", "test") for name in names]
    lost = sum(difference(results, f"{name} LPOM", f"{name} SGD").outcome == "worse" for name in names)
    above = span([mean_std(values)[0] for values in gains if values], " points", plus=True)
    return [
        Claim(
            "Advantages of LPOM: trains with any non-decreasing Lipschitz activation",
            "–",
            f"{span(ours, ' %')}, {above} over random hidden layers; worse than SGD with {lost} of {len(names)}",
            scale(
                results,
                *results.options.words(),
                registry[results.options.dataset].title,
                f"{results.options.epochs} epochs",
            ),
            combine([judge_gain(values, single=ACCURACY) for values in gains]),
        )
    ]


experiment = Experiment(
    name="lifted-activations",
    title="LPOM with six monotone activations",
    source="[Lin2019], Advantages of LPOM",
    about=(
        "The source claims that LPOM works with any non-decreasing Lipschitz activation without numerical "
        "difficulty, including saturating (tanh, sigmoid) and non-differentiable ones (ReLU, leaky ReLU), while "
        "SGD needs a tuned learning rate. It gives no numbers. One network with six activations is trained by LPOM "
        "and by SGD and Adam from the same initial weights, and by SGD with LPOM's gradient, with as many candidates "
        "each, chosen on a tenth of the training images. The control has random hidden layers and a ridge regression "
        "on top."
    ),
    presets={
        "smoke": Preset(
            LiftedActivationsOptions(
                32, 200, epochs=2, dataset="digits", net="20-20", activations=("relu", "softplus", "tanh")
            ),
            (0,),
            0.1,
        ),
        "laptop": Preset(LiftedActivationsOptions(limit=20_000), (0, 1, 2, 3, 4), 40),
        "paper": Preset(LiftedActivationsOptions(epochs=50), (0, 1, 2), 100),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
)

"""Deep networks of saturating activations: LPOM against SGD and Adam, with rates tuned for all."""

import dataclasses
from collections.abc import Iterator, Sequence

from ...comparing import Difference, difference
from ...context import Lab
from ...experiment import Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._lifted import CONTROL, LiftedOptions, error_dots, network, tuned

METHODS = ("LPOM", "LPOM-Adam", "SGD", "Adam", CONTROL)


@dataclasses.dataclass(frozen=True)
class LiftedDeepSigmoidOptions(LiftedOptions):
    """Networks of equal layers with saturating activations.

    Args:
        dataset: A name from ``minimand_papers.data.registry``.
        width: The width of every hidden layer.
        depths: Numbers of hidden layers.
        activations: Some of sigmoid and steep (a sigmoid eight times as steep).
    """

    losses: tuple[str, ...] = ("squared 1", "squared 5", "cross_entropy 1", "cross_entropy 3")
    sgd_rates: tuple[float, ...] = (3.0, 1.0, 0.3, 0.1)
    adam_rates: tuple[float, ...] = (3e-2, 1e-2, 3e-3, 1e-3)
    ridges: tuple[float, ...] = (0.01, 0.1, 1.0, 10.0)
    dataset: str = "digits"
    width: int = 50
    depths: tuple[int, ...] = (6, 12)
    activations: tuple[str, ...] = ("sigmoid", "steep")


def rows(options: LiftedDeepSigmoidOptions) -> list[str]:
    """Every network."""
    return [f"{activation}-{depth}" for activation in options.activations for depth in options.depths]


def parts(options: LiftedDeepSigmoidOptions) -> list[Part]:
    """Every method on every network."""
    return [Part(f"{row} {method}") for row in rows(options) for method in METHODS]


def run(options: LiftedDeepSigmoidOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Try the method's candidates on one network."""
    row, _, method = part.partition(" ")
    activation, _, depth = row.partition("-")
    data = options.data(lab, options.dataset)
    hidden, inputs = "-".join([str(options.width)] * int(depth)), data.train.x.shape[1]
    yield from tuned(options, method, lambda: network(hidden, inputs, data.classes, activation), data, lab)


def compare(results: Results[LiftedDeepSigmoidOptions]) -> list[Comparison]:
    """Test accuracy of every method on every network."""
    return [Comparison(part.name, None, results.final(part.name, "test"), "%") for part in parts(results.options)]


def plots(results: Results[LiftedDeepSigmoidOptions]) -> list[Plot]:
    """The errors, one row per network."""
    table = {row: {method: f"{row} {method}" for method in METHODS} for row in rows(results.options)}
    return [error_dots(results, table, title="Deep networks of saturating activations")]


def findings(results: Results[LiftedDeepSigmoidOptions]) -> Sequence[str | Difference]:
    """LPOM against the optimizers and the control, on every network."""
    return [difference(results, f"{r} LPOM", f"{r} {m}") for r in rows(results.options) for m in METHODS[1:]]


experiment = Experiment(
    name="lifted-deep-sigmoid",
    title="Deep networks of saturating activations",
    source="[Lin2019], Advantages of LPOM",
    about=(
        "The source argues that LPOM, whose conditions do not contain the derivative of the activation, avoids "
        "vanishing gradients. Networks of many equal layers with sigmoids, or sigmoids eight times as steep, and "
        "PyTorch's initial weights are trained by LPOM's regressions, by Adam with LPOM's gradient, by SGD and by "
        "Adam. All have the same epochs, weights and batches, and four candidates (rates, or loss and damping), chosen "
        "on a tenth of the training images. The control has random hidden layers and a ridge regression on top."
    ),
    presets={
        "smoke": Preset(
            LiftedDeepSigmoidOptions(
                32, 200, epochs=2, losses=("squared 1",), sgd_rates=(0.1,), adam_rates=(1e-3,), ridges=(1.0,), width=20,
                depths=(2, 3), activations=("sigmoid",),
            ),
            (0,),
            0.1,
        ),
        "laptop": Preset(LiftedDeepSigmoidOptions(batch=64, epochs=10), (0, 1, 2, 3, 4), 20),
        "paper": Preset(LiftedDeepSigmoidOptions(batch=64, epochs=50, dataset="mnist", width=100), (0, 1, 2), 2000),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
)  # fmt: skip

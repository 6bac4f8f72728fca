"""The demo: LeNet on real digits at moderate and heavy dropout, plain and converted."""

import dataclasses
from collections.abc import Iterator, Sequence

from minimand.solvers import ProxSG

from ...claims import ACCURACY, judge_gain, scale, signed
from ...comparing import Difference, difference
from ...context import Lab
from ...drawing import bars, curves
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ...training import train
from ...zoo import LeNet
from .._solvers import ImageOptions, solved

BLOCKS = ("classifier.1", "classifier.4")
CONTROL = "no dropout"


@dataclasses.dataclass(frozen=True)
class DropoutDigitsOptions(ImageOptions):
    """LeNet on handwritten digits with dropout before both hidden fully connected layers.

    Args:
        epochs: Epochs; the learning rate drops after 1/3 and 2/3 of them.
        rates: The three learning rates.
        p: The dropout rates.
        iters: Iterations of the solvers.
        trials: Evaluations of a stochastic network that are averaged.
    """

    dataset: str = "mnist5k"
    batch: int = 64
    epochs: int = 6
    rates: tuple[float, ...] = (2e-2, 2e-2, 2e-3)
    p: tuple[float, ...] = (0.5, 0.95)
    iters: int = 10
    trials: int = 5


def parts(options: DropoutDigitsOptions) -> list[Part]:
    """Both networks at every rate, and the control."""
    return [*(Part(f"p = {p} {method}") for p in options.p for method in ("dropout", "solver")), Part(CONTROL)]


def run(options: DropoutDigitsOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train one network from scratch."""
    data = options.loaders(lab)
    p = 0.0 if part == CONTROL else float(part.split()[2])
    model = LeNet(data.classes, data.shape[0], data.shape[-1], dropout=(p, p))
    converted = part.endswith("solver")
    model_ = solved(model, dict.fromkeys(BLOCKS, ProxSG(options.iters)) if converted else {})
    trials = options.trials if converted else 1
    yield from train(lab, model_, data, epochs=options.epochs, rates=options.rates, trials=trials)


def compare(results: Results[DropoutDigitsOptions]) -> list[Comparison]:
    """Test accuracy; the paper has no such table."""
    return [
        Comparison(
            part.name, None, results.final(part.name, "test"), "%", note="control" if part.name == CONTROL else ""
        )
        for part in parts(results.options)
    ]


def plots(results: Results[DropoutDigitsOptions]) -> list[Plot]:
    """Learning curves and bars."""
    names = [part.name for part in parts(results.options)]
    return [
        curves(results, names, key="validation", title="Validation accuracy", y="accuracy, %"),
        bars(compare(results), title="Test accuracy", y="test accuracy, %"),
    ]


def findings(results: Results[DropoutDigitsOptions]) -> Sequence[str | Difference]:
    """Differences between the methods."""
    sentences = [difference(results, f"p = {p} solver", f"p = {p} dropout") for p in results.options.p]
    return [*sentences, *(difference(results, f"p = {p} solver", CONTROL) for p in results.options.p)]


def claims(results: Results[DropoutDigitsOptions]) -> list[Claim]:
    """§4, summary: high accuracy where dropout is problematic."""
    p = max(results.options.p)
    gains = results.paired(f"p = {p} solver", f"p = {p} dropout", "test")
    over = results.paired(f"p = {p} solver", CONTROL, "test")
    text = "§4, summary: solvers keep a high accuracy at dropout rates where dropout fails"
    measured = f"{signed(gains)} at p = {p:g}; {signed(over)} from the network without dropout"
    verdict = judge_gain(gains, single=ACCURACY)
    return [Claim(text, "–", measured, scale(results, "LeNet on 5,000 MNIST digits"), verdict)]


experiment = Experiment(
    name="dropout-digits",
    title="A network that works at heavy dropout",
    source="[Bibi2019], §4, at small scale",
    about=(
        "LeNet on 5,000 MNIST digits. Dropout drops a fraction p of the inputs of both hidden layers. “solver” is "
        "the same network with the same parameters, converted by one line: the two blocks dropout → linear → ReLU "
        "become iterations of Prox-SG, each of which samples a fraction 1 − p of the inputs. All have one learning "
        "rate; dropout-digits-rates gives every method several."
    ),
    presets={
        "smoke": Preset(
            DropoutDigitsOptions("digits", batch=50, limit=200, enlarge=4, epochs=2, p=(0.5,), iters=3, trials=2),
            (0, 1),
            0.1,
        ),
        "laptop": Preset(DropoutDigitsOptions(), (0, 1, 2), 3),
        "paper": Preset(DropoutDigitsOptions("mnist", batch=128, epochs=30, trials=20), (0, 1, 2, 3, 4), 400),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
)

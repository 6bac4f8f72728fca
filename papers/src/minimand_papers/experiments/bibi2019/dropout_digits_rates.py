"""The demo's claim with a sweep of learning rates: dropout and solvers at p = 0.95, each at its best rate."""

import dataclasses
from collections.abc import Iterator, Sequence

from minimand.errors import OptionError, require_positive
from minimand.solvers import ProxSG

from ...claims import ACCURACY, judge_gain, scale, signed
from ...comparing import Difference, difference
from ...context import Lab
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ...sweeps import Sweep, best_of, edges, range_plot, shares, usable
from ...training import train
from ...zoo import LeNet
from .._solvers import ImageOptions, solved
from .dropout_digits import BLOCKS, CONTROL

SOLVER, ONE = "solver", "one step"
METHODS = ("dropout", SOLVER, ONE)


@dataclasses.dataclass(frozen=True)
class DropoutDigitsRatesOptions(ImageOptions):
    """The networks of ``dropout-digits`` at several learning rates.

    Args:
        epochs: Epochs; the learning rate drops to a tenth after 2/3 of them.
        rates: The learning rates, the same for every method.
        p: The dropout rates.
        iters: Iterations of the solvers.
        trials: Evaluations of a stochastic network that are averaged.
    """

    dataset: str = "mnist5k"
    batch: int = 64
    epochs: int = 6
    rates: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
    p: tuple[float, ...] = (0.95,)
    iters: int = 10
    trials: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.p or not all(0 < p < 1 for p in self.p):
            raise OptionError(f"a dropout rate p is in (0, 1), got {', '.join(map(str, self.p)) or 'none'}")
        for rate in self.rates:
            require_positive("rates", rate)
        if not self.rates:
            raise OptionError("give at least one learning rate")


def groups(options: DropoutDigitsRatesOptions) -> dict[str, dict[float, str]]:
    """The parts of every method, by learning rate; the highest p first, so that an unfinished run has it."""
    order = sorted(options.p, reverse=True)
    methods = [*(f"p = {p} {method}" for p in order[:1] for method in METHODS), CONTROL]
    methods += [f"p = {p} {method}" for p in order[1:] for method in METHODS]
    return {method: {rate: f"{method}, rate {rate:g}" for rate in options.rates} for method in methods}


def parts(options: DropoutDigitsRatesOptions) -> list[Part]:
    """Every method at every rate."""
    return [Part(part) for parts in groups(options).values() for part in parts.values()]


def run(options: DropoutDigitsRatesOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train one network from scratch."""
    data = options.loaders(lab)
    method, _, rest = part.partition(", rate ")
    p, rate = 0.0 if method == CONTROL else float(method.split()[2]), float(rest)
    model = LeNet(data.classes, data.shape[0], data.shape[-1], dropout=(p, p))
    steps = {SOLVER: options.iters, ONE: 1}.get(method.removeprefix(f"p = {p} "))
    net = solved(model, dict.fromkeys(BLOCKS, ProxSG(steps)) if steps else {})
    trials = options.trials if steps else 1
    yield from train(lab, net, data, epochs=options.epochs, rates=(rate, rate, rate / 10), trials=trials)


def tuned(results: Results[DropoutDigitsRatesOptions]) -> Results[DropoutDigitsRatesOptions]:
    """Every method at the rate with the best validation accuracy of its seed."""
    return results.chosen({method: list(parts.values()) for method, parts in groups(results.options).items()})


def sweep(results: Results[DropoutDigitsRatesOptions], method: str) -> Sweep:
    """The test accuracies of a method at the rates that have been run."""
    found = {rate: results.final(part, "test") for rate, part in groups(results.options)[method].items()}
    return {rate: values for rate, values in found.items() if values}


def at(results: Results[DropoutDigitsRatesOptions], p: float) -> dict[str, Sweep]:
    """Dropout and solver at ``p``, and the control."""
    return {method: sweep(results, method) for method in (*(f"p = {p} {name}" for name in METHODS), CONTROL)}


def compare(results: Results[DropoutDigitsRatesOptions]) -> list[Comparison]:
    """Test accuracy at the best rate, with the range of rates that work."""
    chosen, rows = tuned(results), []
    for method in groups(results.options):
        p = method.split()[2] if method != CONTROL else str(results.options.p[0])
        found = usable(sweep(results, method), best_of(at(results, float(p)).values()))
        words = "mean over the rates {:.1f} %; {:.0%} of them within a point of the best"
        note = words.format(*found) if found and method != CONTROL else ""
        rows.append(Comparison(f"{method}, rate tuned", None, chosen.final(method, "test"), "%", note=note))
    return rows


def plots(results: Results[DropoutDigitsRatesOptions]) -> list[Plot]:
    """The range of rates that work, at every p."""
    return [range_plot(f"Range of rates that work, p = {p:g}", at(results, p)) for p in results.options.p]


def findings(results: Results[DropoutDigitsRatesOptions]) -> Sequence[str | Difference]:
    """Differences at the tuned rates, and the shares of the rates that work."""
    chosen, found = tuned(results), list[str | Difference]()
    for p in results.options.p:
        found.append(difference(chosen, f"p = {p} solver", f"p = {p} dropout"))
        found.append(difference(chosen, f"p = {p} solver", f"p = {p} {ONE}"))
        found.append(difference(chosen, f"p = {p} solver", CONTROL))
        if words := shares(at(results, p)):
            found.append(f"Learning rates within a point of the best at p = {p:g}: {words}.")
        if words := edges(at(results, p)):
            found.append(f"p = {p:g}: {words[0].lower()}{words[1:]}")
    return found


def claims(results: Results[DropoutDigitsRatesOptions]) -> list[Claim]:
    """§4, summary, with tuned rates."""
    p, chosen = max(results.options.p), tuned(results)
    gains = chosen.paired(f"p = {p} solver", f"p = {p} dropout", "test")
    over = chosen.paired(f"p = {p} solver", CONTROL, "test")
    text = "§4, summary, learning rates tuned: solvers keep a high accuracy at dropout rates where dropout fails"
    measured = f"{signed(gains)} at p = {p:g}; {signed(over)} from the network without dropout"
    words = scale(results, "LeNet on 5,000 MNIST digits", f"{len(results.options.rates)} rates")
    return [Claim(text, "–", measured, words, judge_gain(gains, single=ACCURACY))]


experiment = Experiment(
    name="dropout-digits-rates",
    title="Heavy dropout, every learning rate tuned",
    source="[Bibi2019], §4, at small scale",
    about=(
        "The networks of dropout-digits at several learning rates, the same for every method. One rate is chosen for "
        "each method and seed on validation images, and the test accuracy at that rate is reported; the share of the "
        "rates within a point of the best is a result of its own. “one step” is a control: the solver with a single "
        "iteration, which is dropout with its output rescaled by the step size."
    ),
    presets={
        "smoke": Preset(
            DropoutDigitsRatesOptions(
                *("digits", 50), limit=200, enlarge=4, epochs=2, rates=(0.01, 0.1), p=(0.5,), iters=3, trials=2
            ),
            (0, 1),
            0.1,
        ),
        "laptop": Preset(DropoutDigitsRatesOptions(), (0, 1, 2), 8),
        "paper": Preset(
            DropoutDigitsRatesOptions("mnist", batch=128, epochs=30, p=(0.5, 0.95), trials=20), (0, 1, 2, 3, 4), 3500
        ),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
)

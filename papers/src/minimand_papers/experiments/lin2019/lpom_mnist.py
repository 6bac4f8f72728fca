"""Table 2 of the slides on LPOM: five fully connected networks on MNIST, LPOM beside its relatives and SGD."""

import dataclasses
from collections.abc import Iterator, Sequence

from ...claims import ACCURACY, combine, judge_gain, judge_parity, scale, span
from ...comparing import Difference, difference, mean_std
from ...context import Lab
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._lifted import CONTROL, LiftedOptions, error_dots, network, relative_time, tuned

METHODS = ("LPOM", "LiftedReLU", "SGD", "Adam", CONTROL)
PAPER = {
    "300": {"LPOM": 97.7, "LiftedReLU": 89.8},
    "300-100": {"LPOM": 96.9, "LiftedReLU": 87.5},
    "500-150": {"LPOM": 97.1, "LiftedReLU": 86.5},
    "500-200-100": {"LPOM": 96.2, "LiftedReLU": 85.3},
    "400-200-100-50": {"LPOM": 96.1, "LiftedReLU": 77.0},
}


@dataclasses.dataclass(frozen=True)
class LPOMMNISTOptions(LiftedOptions):
    """Networks on MNIST, trained without backpropagation and with it.

    Args:
        dataset: mnist, or mnist5k and digits, which come inside Python packages.
        nets: Hidden widths, one entry per network.
    """

    dataset: str = "mnist"
    nets: tuple[str, ...] = tuple(PAPER)


def parts(options: LPOMMNISTOptions) -> list[Part]:
    """Every method on every network."""
    return [Part(f"{net} {method}") for net in options.nets for method in METHODS]


def run(options: LPOMMNISTOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Try the method's candidates on one network."""
    net, _, method = part.partition(" ")
    data = options.data(lab, options.dataset)
    yield from tuned(options, method, lambda: network(net, data.train.x.shape[1], data.classes), data, lab)


def accuracies(results: Results[LPOMMNISTOptions]) -> list[Comparison]:
    """Test accuracy beside the slides'."""
    rows = []
    for net in results.options.nets:
        for method in METHODS:
            paper = PAPER.get(net, {}).get(method) if results.options.dataset == "mnist" else None
            note = "source: the number of Askari et al., from their own training" if method == "LiftedReLU" else ""
            note = "random hidden layers; not in the source" if method == CONTROL else note
            part = f"{net} {method}"
            rows.append(Comparison(part, paper, results.final(part, "test"), "%", note=note))
    return rows


def compare(results: Results[LPOMMNISTOptions]) -> list[Comparison]:
    """Accuracies, and the time of an epoch."""
    times = [
        relative_time(results, f"{net} LPOM", f"{net} SGD", f"{net}: an epoch of LPOM in SGD's time")
        for net in results.options.nets
    ]
    return [*accuracies(results), *times]


def plots(results: Results[LPOMMNISTOptions]) -> list[Plot]:
    """The table as errors, one row per network."""
    rows = {net: {method: f"{net} {method}" for method in METHODS} for net in results.options.nets}
    sources = PAPER if results.options.dataset == "mnist" else None
    return [error_dots(results, rows, title="Table 2: networks trained without backpropagation", sources=sources)]


def findings(results: Results[LPOMMNISTOptions]) -> Sequence[str | Difference]:
    """LPOM against each of the others, on every network."""
    return [
        difference(results, f"{net} LPOM", f"{net} {other}") for net in results.options.nets for other in METHODS[1:]
    ]


def claims(results: Results[LPOMMNISTOptions]) -> list[Claim]:
    """Table 2: the accuracy of LPOM, and its distance to Lifted ReLU."""
    words = scale(results, "MNIST", f"{results.options.epochs} epochs (the source gives none)")
    ours = {net: results.final(f"{net} LPOM", "test") for net in PAPER}
    above = {net: [value - PAPER[net]["LPOM"] for value in values] for net, values in ours.items()}
    gains = {net: results.paired(f"{net} LPOM", f"{net} LiftedReLU", "test") for net in PAPER}
    sizes = {net: row["LPOM"] - row["LiftedReLU"] for net, row in PAPER.items()}
    return [
        Claim(
            "Table 2: accuracy of LPOM on five fully connected networks",
            span([row["LPOM"] for row in PAPER.values()], " %"),
            span([mean_std(values)[0] for values in ours.values() if values], " %"),
            words,
            combine([judge_parity(values) for values in above.values()]),
        ),
        Claim(
            "Table 2: LPOM beats Lifted ReLU (Askari et al.; ours is trained with LPOM's recipe)",
            span(list(sizes.values()), " points", plus=True),
            span([mean_std(values)[0] for values in gains.values() if values], " points", plus=True),
            words,
            combine([judge_gain(gains[net], sizes[net], single=ACCURACY) for net in PAPER]),
        ),
    ]


experiment = Experiment(
    name="lpom-mnist",
    title="LPOM on five networks, beside Lifted ReLU, SGD and Adam",
    source="[Lin2019], Table 2",
    about=(
        "The five fully connected ReLU networks of the table, all methods with the same epochs, initial weights and "
        "batches, and two candidates each: the losses for the lifted methods, two learning rates for SGD and Adam, two "
        "ridges for the control (random hidden layers and a ridge regression on top). A tenth of the training images "
        "chooses the candidate; only the chosen one is tested. The source gives neither its epochs nor SGD's numbers; "
        "its numbers for Askari et al. are quoted from their paper, while our Lifted ReLU is trained with LPOM's "
        "mini-batch recipe. Initial weights are PyTorch's, because LPOM did better with them than with He's in short "
        "runs on digits; SGD and Adam were not compared so."
    ),
    presets={
        "smoke": Preset(LPOMMNISTOptions(32, 400, epochs=3, dataset="digits", nets=("30-30",)), (0, 1), 0.05),
        "laptop": Preset(LPOMMNISTOptions(batch=64), (0, 1, 2), 65),
        "paper": Preset(LPOMMNISTOptions(batch=64, epochs=50), (0, 1, 2), 530),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
)

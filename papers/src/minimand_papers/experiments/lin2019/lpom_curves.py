"""Figure 1 of the slides on LPOM: training and test accuracy on MNIST and CIFAR-10, over epochs and seconds."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from ...claims import combine, judge_parity, scale, signed
from ...comparing import Difference, difference
from ...context import Lab
from ...data import registry
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._lifted import CONTROL, LiftedNetworksOptions, chosen_curve, error_curves, network, relative_time

METHODS = ("LPOM", "LPOM-SGD", "SGD", "Adam")


@dataclasses.dataclass(frozen=True)
class LPOMCurvesOptions(LiftedNetworksOptions):
    """One network per dataset."""

    losses: tuple[str, ...] = ("squared", "cross_entropy", "cross_entropy 10")
    sgd_rates: tuple[float, ...] = (0.1, 0.03, 0.01)
    adam_rates: tuple[float, ...] = (3e-3, 1e-3, 3e-4)
    ridges: tuple[float, ...] = (1.0, 10.0, 100.0)
    datasets: tuple[str, ...] = ("mnist", "cifar10")
    nets: tuple[str, ...] = ("300-100", "500-200")


def parts(options: LPOMCurvesOptions) -> list[Part]:
    """Every method on every dataset."""
    return [Part(f"{dataset} {method}") for dataset, _ in options.networks() for method in (*METHODS, CONTROL)]


def run(options: LPOMCurvesOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train by one method, and evaluate after every epoch."""
    dataset, _, method = part.partition(" ")
    data, net = options.data(lab, dataset), dict(options.networks())[dataset]
    yield from chosen_curve(options, method, lambda: network(net, data.train.x.shape[1], data.classes), data, lab)


def compare(results: Results[LPOMCurvesOptions]) -> list[Comparison]:
    """Accuracies at the end, and the time of an epoch."""
    rows = []
    for dataset in results.options.datasets:
        for method in (*METHODS, CONTROL):
            part = f"{dataset} {method}"
            for key in ("train", "test"):
                rows.append(Comparison(f"{part}, {key} accuracy", None, results.final(part, key), "%"))
        label = f"{dataset}: an epoch of LPOM in SGD's time"
        rows.append(relative_time(results, f"{dataset} LPOM", f"{dataset} SGD", label))
        rows.append(_time_to(results, dataset))
    return rows


def _time_to(results: Results[LPOMCurvesOptions], dataset: str) -> Comparison:
    """The time in which LPOM reaches SGD's final validation accuracy, over SGD's total time."""
    ours, theirs = (results.curve(f"{dataset} {method}", "validation") for method in ("LPOM", "SGD"))
    spent, whole = (results.curve(f"{dataset} {method}", "spent") for method in ("LPOM", "SGD"))
    ratios, missed = [], 0
    for seed in (seed for seed in ours if ours[seed] and theirs.get(seed)):
        reached = [second for second, value in zip(spent[seed], ours[seed], strict=True) if value >= theirs[seed][-1]]
        missed += not reached
        ratios.append(reached[0] / max(whole[seed][-1], 1e-9) if reached else math.inf)
    label = f"{dataset}: LPOM's time to SGD's last validation accuracy, in SGD's time"
    return Comparison(
        label, None, ratios, "×", note=f"never reached in {missed} of {len(ratios)} seeds" if missed else ""
    )


def plots(results: Results[LPOMCurvesOptions]) -> list[Plot]:
    """Both errors over epochs, and the test error over the seconds of training."""
    drawn = []
    for dataset in results.options.datasets:
        drawn += [error_curves(results, dataset, METHODS, key) for key in ("train", "test")]
        drawn.append(error_curves(results, dataset, METHODS, "test", over="spent", x="seconds of training"))
    return drawn


def findings(results: Results[LPOMCurvesOptions]) -> Sequence[str | Difference]:
    """LPOM against each of the others, by both accuracies; the control by the test accuracy."""
    found = []
    for dataset in results.options.datasets:
        for other in METHODS[2:]:
            for key in ("train", "test"):
                pair = f"{dataset} LPOM", f"{dataset} {other}"
                found.append(difference(results, *pair, key, quantity=f"{key} accuracy"))
        found.append(difference(results, f"{dataset} LPOM-SGD", f"{dataset} SGD", quantity="test accuracy"))
        pair = f"{dataset} LPOM", f"{dataset} {CONTROL}"
        found.append(difference(results, *pair, quantity="test accuracy"))
    return found


def claims(results: Results[LPOMCurvesOptions]) -> list[Claim]:
    """Figure 1: LPOM beside SGD. The figure has no numbers, so the claim is that LPOM is no worse."""
    datasets = results.options.datasets
    gaps = {d: results.paired(f"{d} LPOM", f"{d} SGD", "test") for d in datasets}
    return [
        Claim(
            f"Figure 1: LPOM reaches SGD's test accuracy ({', '.join(registry[d].title for d in datasets)})",
            "curves without numbers",
            ", ".join(signed(values, "") for values in gaps.values()) + " points",
            scale(results, *results.options.words(), f"{results.options.epochs} epochs"),
            combine([judge_parity(values) for values in gaps.values()]),
        )
    ]


experiment = Experiment(
    name="lpom-curves",
    title="LPOM and SGD over epochs and seconds",
    source="[Lin2019], Figure 1",
    about=(
        "Training and test accuracy after every epoch on MNIST and CIFAR-10, from the same initial weights and with "
        "the same batches. The source shows curves without numbers and does not name the networks; ours are options. "
        "LPOM-SGD is SGD with LPOM's own gradient. Each method has three candidates (loss and damping for LPOM, the "
        "learning rate for the optimizers, on the cross-entropy); the one "
        "that ends best on a tenth of the training images is shown. The seconds are those of training alone. "
        "The control has random hidden layers and a ridge regression on top."
    ),
    presets={
        "smoke": Preset(LPOMCurvesOptions(32, 600, epochs=4, datasets=("digits",), nets=("30-30",)), (0, 1), 0.05),
        "laptop": Preset(LPOMCurvesOptions(limit=30_000), (0, 1, 2, 3, 4), 70),
        "paper": Preset(LPOMCurvesOptions(epochs=100, nets=("2048-2048-2048", "4000-1000-4000")), (0, 1, 2), 20000),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
)

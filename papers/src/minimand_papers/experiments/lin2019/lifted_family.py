"""The relatives of LPOM on the same networks: the energy of a fixed batch, and accuracy over epochs and seconds."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from minimand.errors import NonFiniteError

from ...claims import ACCURACY, combine, judge_bound, judge_gain, scale, span
from ...comparing import Difference, difference, mean_std
from ...context import Lab
from ...data import registry
from ...drawing import curves
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._lifted import (
    CONTROL,
    LIFTED,
    LiftedNetworksOptions,
    RowSplits,
    chosen_curve,
    error_curves,
    error_dots,
    lifted,
    network,
    relative_time,
)

OTHERS = ("LPOM-SGD", "SGD", "Adam", CONTROL)


@dataclasses.dataclass(frozen=True)
class LiftedFamilyOptions(LiftedNetworksOptions):
    """All methods, with one network per dataset.

    Args:
        datasets: Names from ``minimand_papers.data.registry``.
        nets: Hidden widths, one entry per dataset.
        steps: Sweeps over all blocks on the fixed batch, weights included.
        fixed: Samples of the fixed batch.
    """

    datasets: tuple[str, ...] = ("mnist", "digits")
    nets: tuple[str, ...] = ("100-50", "30-30")
    steps: int = 30
    fixed: int = 500


def parts(options: LiftedFamilyOptions) -> list[Part]:
    """The lifted methods and their controls on every dataset."""
    return [Part(f"{dataset} {method}") for dataset, _ in options.networks() for method in (*LIFTED, *OTHERS)]


def run(options: LiftedFamilyOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """The energy of a fixed batch first, then mini-batches from the same initial weights."""
    dataset, _, method = part.partition(" ")
    data, net = options.data(lab, dataset), dict(options.networks())[dataset]

    def build() -> nn.Module:
        return network(net, data.train.x.shape[1], data.classes)

    if method in LIFTED:
        yield from _energies(options, method, build, data, lab)
    yield from chosen_curve(options, method, build, data, lab)


def _energies(
    options: LiftedFamilyOptions, method: str, build: Callable[[], nn.Module], data: RowSplits, lab: Lab
) -> Iterator[Metrics]:
    """Energy per sample over steps on one batch, in double precision, and how often it rose."""
    torch.manual_seed(lab.seed)
    model = build().to(lab.device, torch.float64)
    trainer = lifted(method, model, "squared")
    x, y = data.train.x[: options.fixed].double(), data.train.y[: options.fixed]
    before, rises = trainer.energy(x, y) / len(x), 0
    yield {"step": 0, "energy": before, "rises": rises}
    for step in range(1, options.steps + 1):
        try:
            energy = trainer.step(x, y) / len(x)
        except NonFiniteError as error:
            yield {"stopped": str(error)}
            return
        rises += energy > before * (1 + 1e-10)
        before = energy
        yield {"step": step, "energy": energy, "rises": rises}


def accuracies(results: Results[LiftedFamilyOptions], dataset: str) -> list[Comparison]:
    """Test accuracy of every method."""
    names = [f"{dataset} {method}" for method in (*LIFTED, *OTHERS)]
    return [Comparison(part, None, results.final(part, "test"), "%") for part in names]


def compare(results: Results[LiftedFamilyOptions]) -> list[Comparison]:
    """Accuracies, times, and the steps in which the energy rose."""
    rows, steps = [], results.options.steps
    for dataset in results.options.datasets:
        rows += accuracies(results, dataset)
        for part in (f"{dataset} {method}" for method in LIFTED):
            rows.append(relative_time(results, part, f"{dataset} SGD", f"{part}: an epoch in SGD's time"))
        for part in (f"{dataset} {method}" for method in LIFTED):
            note = "the multipliers ascend, so the energy may rise" if "SplitADMM" in part else ""
            label = f"{part}: rises of the energy in {steps} steps"
            rows.append(Comparison(label, None, results.final(part, "rises"), digits=1, note=note))
    return rows


def plots(results: Results[LiftedFamilyOptions]) -> list[Plot]:
    """Energies, errors over epochs and seconds, and the test errors."""
    drawn = []
    trained = [method for method in (*LIFTED, *OTHERS) if method != CONTROL]
    for dataset in results.options.datasets:
        family = [f"{dataset} {method}" for method in LIFTED]
        title = f"{dataset}: energy of a fixed batch"
        drawn.append(curves(results, family, key="energy", over="step", title=title, y="energy per sample", log=True))
        drawn.append(error_curves(results, dataset, trained, "validation"))
        drawn.append(error_curves(results, dataset, trained, "validation", over="spent", x="seconds of training"))
    rows = {method: {name: f"{name} {method}" for name in results.options.datasets} for method in (*LIFTED, *OTHERS)}
    return [*drawn, error_dots(results, rows, title="Test errors")]


def findings(results: Results[LiftedFamilyOptions]) -> Sequence[str | Difference]:
    """Each relative against the control and against SGD, and LPOM against each relative."""
    sentences = []
    for dataset in results.options.datasets:
        family = [f"{dataset} {method}" for method in LIFTED]
        sentences += [difference(results, part, f"{dataset} {other}") for other in (CONTROL, "SGD") for part in family]
        sentences += [difference(results, family[0], part) for part in family[1:]]
    return sentences


def claims(results: Results[LiftedFamilyOptions]) -> list[Claim]:
    """The energy of LPOM never rises, and LPOM finds better solutions than the methods before it."""
    datasets = results.options.datasets
    rises = [value for d in datasets for value in results.final(f"{d} LPOM", "rises")]
    others = [method for method in LIFTED if method != "LPOM"]
    gains = [results.paired(f"{d} LPOM", f"{d} {method}", "test") for d in datasets for method in others]
    means = [mean_std(values)[0] for values in gains if values]
    better = sum(judge_gain(values) == "reproduced" for values in gains)
    titles = " and ".join(registry[d].title for d in datasets)
    words = scale(results, *results.options.words(), titles, f"{results.options.epochs} epochs")
    return [
        Claim(
            "Solving LPOM: block coordinate descent never raises the energy",
            "0 rises",
            f"{max(rises):.0f} rises in {results.options.steps} steps" if rises else "–",
            words,
            judge_bound(rises, 0),
        ),
        Claim(
            "Advantages of LPOM: good solutions are easier to find than with MAC, penalty and ADMM methods",
            "–",
            f"accuracy {span(means, ' points', plus=True)}; better in {better} of {len(gains)}",
            words,
            combine([judge_gain(values, single=ACCURACY) for values in gains]),
        ),
    ]


experiment = Experiment(
    name="lifted-family",
    title="Methods without backpropagation side by side",
    source="[Lin2019], the methods before LPOM",
    about=(
        "LPOM, MAC, the block penalty of Zeng et al., ADMM with the splittings of Taylor et al. (“output”) and of "
        "Zhang, Chen & Saligrama (“all”), and Lifted ReLU, beside SGD, Adam and the control (random hidden layers "
        "with a ridge regression on top). First, full steps on one fixed batch show the energy. Each method has "
        "its own energy, so only the shapes of the curves are comparable. Then all methods train on mini-batches "
        "with the same recipe and two candidates each, chosen on a tenth of the training images."
    ),
    presets={
        "smoke": Preset(
            LiftedFamilyOptions(
                32, 200, epochs=2, losses=("squared",), datasets=("digits",), nets=("20-20",), steps=4, fixed=60
            ),
            (0, 1),
            0.1,
        ),
        "laptop": Preset(LiftedFamilyOptions(batch=64, limit=20_000, epochs=10), (0, 1, 2, 3, 4), 60),
        "paper": Preset(LiftedFamilyOptions(batch=64, epochs=50, steps=100), (0, 1, 2), 350),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
)

"""The relatives of LPOM on one network: the energy of a fixed batch, and accuracy over epochs and seconds."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from ...errors import NonFiniteError
from ..comparing import verdict
from ..context import Lab
from ..drawing import bars, curves
from ..experiment import Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._lifted import CONTROL, LIFTED, Chains, Data, chosen_curve, lifted, network, relative_time

OTHERS = ("SGD", "Adam", CONTROL)


@dataclasses.dataclass(frozen=True)
class Options(Chains):
    """All methods on one network.

    Args:
        dataset: A name of ``minimand.data.registry``.
        net: Hidden widths.
        steps: Sweeps over all blocks on the fixed batch, weights included.
        fixed: Samples of the fixed batch.
    """

    dataset: str = "mnist"
    net: str = "100-50"
    steps: int = 30
    fixed: int = 500


def parts(options: Options) -> list[Part]:
    """The family and what it has to stand against."""
    return [Part(method) for method in (*LIFTED, *OTHERS)]


def run(options: Options, part: str, lab: Lab) -> Iterator[Metrics]:
    """The energy of a fixed batch first, then mini-batches from the same initial weights."""
    data = options.data(lab, options.dataset)
    if part in LIFTED:
        yield from _energies(options, part, data, lab)
    yield from chosen_curve(options, part, lambda: network(options.net, data.train.x.shape[1], data.classes), data, lab)


def _energies(options: Options, method: str, data: Data, lab: Lab) -> Iterator[Metrics]:
    """Energy per sample over steps on one batch, in double precision, and how often it rose."""
    torch.manual_seed(lab.seed)
    model = network(options.net, data.train.x.shape[1], data.classes).to(lab.device, torch.float64)
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


def accuracies(results: Results[Options]) -> list[Comparison]:
    """Test accuracy of every method."""
    return [Comparison(part, None, results.final(part, "test"), "%") for part in (*LIFTED, *OTHERS)]


def compare(results: Results[Options]) -> list[Comparison]:
    """Accuracies, times, and the steps in which the energy rose."""
    rows = accuracies(results)
    rows += [relative_time(results, part, "SGD", f"{part}: an epoch in SGD's time") for part in LIFTED]
    steps = results.options.steps
    for part in LIFTED:
        note = "multipliers ascend: nothing is claimed" if part.startswith("SplitADMM") else ""
        label = f"{part}: rises of the energy in {steps} steps"
        rows.append(Comparison(label, None, results.final(part, "rises"), digits=1, note=note))
    return rows


def plots(results: Results[Options]) -> list[Plot]:
    """Energies, accuracies over epochs and seconds, and the accuracies as bars."""
    trained = [part for part in (*LIFTED, *OTHERS) if part != CONTROL]
    y = "accuracy, %"
    return [
        curves(
            results,
            list(LIFTED),
            key="energy",
            over="step",
            title="Energy of a fixed batch",
            y="energy per sample",
            log=True,
        ),
        curves(results, trained, key="validation", title="Validation accuracy", y=y, dashed=OTHERS),
        curves(
            results,
            trained,
            key="validation",
            over="spent",
            title="Validation accuracy over time",
            y=y,
            x="seconds of training",
            dashed=OTHERS,
        ),
        bars(accuracies(results), title="Test accuracy", y="test accuracy, %"),
    ]


def findings(results: Results[Options]) -> Sequence[str]:
    """Each relative against the control and against SGD, and LPOM against each relative."""
    said = [verdict(results, part, CONTROL) for part in LIFTED]
    said += [verdict(results, part, "SGD") for part in LIFTED]
    return [*said, *(verdict(results, "LPOM", part) for part in LIFTED if part != "LPOM")]


experiment = Experiment(
    name="lifted-family",
    title="Training without backpropagation: the family on one network",
    source="002, the methods before LPOM",
    about=(
        "LPOM, MAC, the block penalty of Zeng et al., ADMM with the splittings of Taylor et al. (“output”) and of "
        "Zhang, Chen & Saligrama (“all”), and Lifted ReLU, with SGD, Adam and the control (random hidden layers, ridge "
        "regression on top). First full steps on one fixed batch, for the energy; each method has an energy of its "
        "own, so the curves' shapes compare, their heights do not. Then mini-batches with momentum, in which all "
        "methods share the recipe, two candidates each, chosen on a tenth of the training images."
    ),
    presets={
        "smoke": Preset(
            Options(32, 200, epochs=2, losses=("squared",), dataset="digits", net="20-20", steps=4, fixed=60),
            (0, 1),
            0.1,
        ),
        "laptop": Preset(Options(), (0, 1, 2), 45),
        "paper": Preset(Options(epochs=50, steps=100), (0, 1, 2), 350),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
)

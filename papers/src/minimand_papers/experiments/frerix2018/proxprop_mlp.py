"""Figure 2 of "Proximal Backpropagation": exact and inexact implicit steps on a fully connected network."""

import dataclasses
from collections.abc import Iterator, Sequence

from ...comparing import verdict
from ...context import Lab
from ...drawing import bars
from ...experiment import Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._proxprop import BACKPROP, Data, figures, fitted, lower, mlp, nesterov, precondition, scaled

VARIANTS = (BACKPROP, "ProxProp (exact)", "ProxProp (cg3)", "ProxProp (cg5)", "ProxProp (cg10)")
WIDE = ", time at full width"


@dataclasses.dataclass(frozen=True)
class Options(Data):
    """The network 3072-4000-1000-4000-10 with Nesterov momentum 0.95, by explicit and implicit steps.

    Args:
        epochs: Of every method.
        width: A factor on the hidden widths.
        timed_epochs: Epochs of the same comparison at ``timed_width``, for the time axis; 0: none.
        timed_width: The factor on the hidden widths there.
        backprop_rate: The step size τ of BackProp.
        rate: The step size τ of ProxProp.
        tau_theta: The proximal step τθ of ProxProp, for a mean loss and batches of 500.
    """

    epochs: int = 10
    width: float = 0.25
    timed_epochs: int = 1
    timed_width: float = 1.0
    backprop_rate: float = 0.05
    rate: float = 1.0
    tau_theta: float = 0.05


def parts(options: Options) -> list[Part]:
    """Every method, and every method again for its time at full width."""
    wide = [Part(method + WIDE) for method in VARIANTS] if options.timed_epochs else []
    return [*(Part(method) for method in VARIANTS), *wide]


def run(options: Options, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train one network from scratch."""
    data = options.loaders(lab)
    method, wide = part.removesuffix(WIDE), part.endswith(WIDE)
    model = mlp(data, options.timed_width if wide else options.width).to(lab.device)
    optimizer = nesterov(model, options.backprop_rate if method == BACKPROP else options.rate)
    precondition(model, optimizer, method, options.tau_theta)
    yield from fitted(lab, model, optimizer, data, options.timed_epochs if wide else options.epochs)


def compare(results: Results[Options]) -> list[Comparison]:
    """Test accuracy beside the paper's, the final loss, and the time of training."""
    options = results.options
    note = scaled(results, options.epochs, options.width)
    rows = []
    for method in VARIANTS:
        paper = options.paper({"cifar10": 54.0 if method == BACKPROP else 56.0})
        rows.append(Comparison(f"{method}, test accuracy", paper, results.final(method, "test"), "%", note=note))
    for method in VARIANTS:
        rows.append(Comparison(f"{method}, full-batch loss", None, results.final(method, "loss"), digits=4))
    for method in VARIANTS if options.timed_epochs else ():
        note = f"epochs: {options.timed_epochs}, widths × {options.timed_width:g}"
        rows.append(Comparison(method + WIDE, None, results.final(method + WIDE, "training"), " s", note=note))
    return rows


def plots(results: Results[Options]) -> list[Plot]:
    """The panels of the figure, and the test accuracies as bars."""
    shown = [row for row in compare(results) if row.label.endswith("accuracy")]
    return [*figures(results, list(VARIANTS)), bars(shown, title="Test accuracy", y="accuracy, %")]


def findings(results: Results[Options]) -> Sequence[str]:
    """Loss, accuracy and time against BackProp."""
    said = []
    for method in VARIANTS[1:]:
        said += [lower(results, method, BACKPROP), f"Test accuracy: {verdict(results, method, BACKPROP)}"]
    exact, inexact = VARIANTS[1:3]
    said.append(lower(results, exact, inexact))
    for method in VARIANTS[1:] if results.options.timed_epochs else ():
        time = verdict(results, method + WIDE, BACKPROP + WIDE, "training", unit=" s", higher=False)
        said.append(f"Training time: {time}")
    return said


experiment = Experiment(
    name="proxprop-mlp",
    title="Exact and inexact implicit steps on a fully connected network",
    source="004, Figure 2",
    about=(
        "A fully connected ReLU network trained with Nesterov momentum 0.95 on batches of 500. BackProp takes τ = "
        "0.05, the best of the paper's grid search; ProxProp takes τ = 1 and τθ = 0.05, with exact solves and "
        "with 3, 5 and 10 conjugate gradient iterations. The paper claims a faster decrease per epoch, the faster "
        "the more precise the solve, at comparable time, and two points of test accuracy. The loss is that of the "
        "whole training set after each epoch; times are those of the training steps alone and depend on what else "
        "the machine does."
    ),
    presets={
        "smoke": Preset(Options("digits", batch=100, limit=300, epochs=4, width=0.01, timed_width=0.02), (0, 1), 0.05),
        "laptop": Preset(Options(), (0, 1), 40),
        "paper": Preset(Options(epochs=50, width=1.0, timed_epochs=0), (0, 1), 1800),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
)

"""Figure 3 of "Proximal Backpropagation": implicit directions as Adam's gradients, on a convolutional network."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from ...claims import ACCURACY, combine, judge_gain, scale, signed
from ...comparing import Difference, difference, mean_std
from ...context import Lab
from ...drawing import bars
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ...zoo import ProxPropConvNet
from ._proxprop import (
    BACKPROP,
    UNIT,
    ProxPropImageOptions,
    best_validation,
    equal_loss,
    figures,
    fitted,
    lower,
    precondition,
    scaled,
)

VARIANTS = (BACKPROP, "ProxProp (cg3)", "ProxProp (cg10)", "ProxProp (exact)", "ProxProp (subsampled)")


@dataclasses.dataclass(frozen=True)
class ProxPropAdamOptions(ProxPropImageOptions):
    """Three convolutions and a linear layer, trained by Adam with plain gradients and with implicit directions.

    Args:
        epochs: Epochs of every method.
        rate: Adam's step size.
        tau_theta: The proximal step τθ of ProxProp.
    """

    epochs: int = 10
    rate: float = 1e-3
    tau_theta: float = 1.0


def parts(options: ProxPropAdamOptions) -> list[Part]:
    """Every method."""
    return [Part(method + kind) for kind in options.kinds() for method in VARIANTS]


def run(options: ProxPropAdamOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train one network from scratch."""
    data = options.loaders_for(lab, part)
    model = ProxPropConvNet(data.classes, data.shape[0], data.shape[-1]).to(lab.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.rate)
    precondition(model, optimizer, part.removesuffix(UNIT), options.tau_theta)
    yield from fitted(lab, model, optimizer, data, options.epochs)


def compare(results: Results[ProxPropAdamOptions]) -> list[Comparison]:
    """Accuracies beside the paper's, the final loss, and the time of training."""
    options = results.options
    note = scaled(results, options.epochs)
    rows = []
    # The paper names one ProxProp number and not its iterations: it stands beside the rows of its figure.
    for method in VARIANTS:
        own = {BACKPROP: 69.6, "ProxProp (cg3)": 70.7, "ProxProp (cg10)": 70.7}.get(method)
        paper = None if own is None else options.paper({"cifar10": own})
        rows.append(Comparison(f"{method}, test accuracy", paper, results.final(method, "test"), "%", note=note))
    for method in VARIANTS:
        own = {BACKPROP: 71.7, "ProxProp (cg3)": 72.9, "ProxProp (cg10)": 72.9}.get(method)
        paper = None if own is None else options.paper({"cifar10": own})
        rows.append(
            Comparison(f"{method}, best validation accuracy", paper, best_validation(results, method), "%", note=note)
        )
    rows += [Comparison(f"{m}, full-batch loss", None, results.final(m, "loss"), digits=4) for m in VARIANTS]
    rows += [Comparison(f"{m}, time of training", None, results.final(m, "training"), " s") for m in VARIANTS]
    for part in (method + UNIT for method in VARIANTS if results.final(method + UNIT, "test")):
        rows.append(Comparison(f"{part}, test accuracy", None, results.final(part, "test"), "%"))
        rows.append(Comparison(f"{part}, best validation accuracy", None, best_validation(results, part), "%"))
        rows.append(Comparison(f"{part}, full-batch loss", None, results.final(part, "loss"), digits=4))
    for part in (method + kind for kind in options.kinds() for method in VARIANTS[1:]):
        if found := equal_loss(results, part, BACKPROP + (UNIT if part.endswith(UNIT) else "")):
            rows.append(Comparison(f"{part}, validation accuracy at BackProp's final loss", None, found, "%"))
    return rows


def plots(results: Results[ProxPropAdamOptions]) -> list[Plot]:
    """The panels of the figure, and the test accuracies as bars."""
    shown = [row for row in compare(results) if row.label.endswith("test accuracy")]
    return [*figures(results, list(VARIANTS)), bars(shown, title="Test accuracy", y="accuracy, %")]


def findings(results: Results[ProxPropAdamOptions]) -> Sequence[str | Difference]:
    """Loss, accuracy and time against BackProp, and what the cheap Gram matrix costs."""
    sentences = []
    for method in VARIANTS[1:]:
        sentences += [lower(results, method, BACKPROP), difference(results, method, BACKPROP, quantity="test accuracy")]
        pair = method, BACKPROP
        sentences.append(difference(results, *pair, "training", unit=" s", higher=False, quantity="training time"))
    exact, cheap = VARIANTS[3:]
    return [*sentences, lower(results, cheap, exact)]


def claims(results: Results[ProxPropAdamOptions]) -> list[Claim]:
    """Figure 3: progress per epoch, validation and test accuracy."""
    options = results.options
    words = scale(results, f"{options.limit or 45_000:,} CIFAR-10 images", f"{options.epochs} of 50 epochs")
    methods = VARIANTS[1:3]
    losses = [[-gap for gap in results.paired(method, BACKPROP, "log_loss")] for method in methods]
    tests = [results.paired(method, BACKPROP, "test") for method in methods]
    peaks = [
        [
            ours - theirs
            for ours, theirs in zip(best_validation(results, method), best_validation(results, BACKPROP), strict=True)
        ]
        for method in methods
    ]
    return [
        Claim(
            "Figure 3: ProxProp directions inside Adam lower the training loss faster per epoch (cg3, cg10)",
            "–",
            "loss lower by " + ", ".join(f"{mean_std(gaps)[0]:.2f}" for gaps in losses if gaps) + " decades",
            words,
            combine([judge_gain(gaps) for gaps in losses]),
        ),
        Claim(
            "Figure 3: best validation accuracy above BackProp's (cg3, cg10)",
            "71.7 → 72.9 %",
            ", ".join(signed(gaps, "") for gaps in peaks) + " points",
            words,
            combine([judge_gain(gaps, 1.2, single=ACCURACY) for gaps in peaks]),
        ),
        Claim(
            "Figure 3: test accuracy above BackProp's (cg3, cg10)",
            "69.6 → 70.7 %",
            ", ".join(signed(gaps, "") for gaps in tests) + " points",
            words,
            combine([judge_gain(gaps, 1.1, single=ACCURACY) for gaps in tests]),
        ),
    ]


experiment = Experiment(
    name="proxprop-adam",
    title="Implicit directions inside Adam, on a convolutional network",
    source="[Frerix2018], Figure 3",
    about=(
        "Three 5 × 5 convolutions with 16, 20 and 20 channels and one linear layer, trained by Adam with step size "
        "0.001 on batches of 500. The gradients of the convolutions are plain (BackProp) or implicit directions "
        "with τθ = 1, computed by 3 and 10 conjugate gradient iterations, exactly, and with a Gram matrix of an "
        "eighth of the images. The paper claims a faster decrease per epoch and about one point of accuracy at a "
        "higher time per epoch. On convolutions three iterations are far from the exact direction. Times are those "
        "of the training steps."
    ),
    presets={
        "smoke": Preset(ProxPropAdamOptions("digits", batch=50, limit=100, enlarge=2, epochs=2), (0,), 0.05),
        "laptop": Preset(ProxPropAdamOptions(limit=15_000), (0, 1, 2), 95),
        "paper": Preset(ProxPropAdamOptions(epochs=50), (0, 1), 900),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
)

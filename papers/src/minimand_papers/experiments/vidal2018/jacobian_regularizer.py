"""Few samples: no regulariser, weight decay, and the norm of the Jacobian."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...claims import ACCURACY, combine, judge_gain, scale, span
from ...comparing import Difference, difference, mean_std
from ...context import Lab
from ...drawing import bars
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._regularized import Candidates, DigitsOptions, accuracy_of, descent, named, perceptron

METHODS = ("none", "WD", "LM")
# [Vidal2018], "Experimental Results": (loss, layers) → accuracies for 256, 512 and 1024 samples, each none, WD, LM.
PAPER = {
    ("hinge", 2): ((88.37, 89.88, 93.83), (93.99, 94.62, 95.49), (95.79, 96.57, 97.45)),
    ("hinge", 3): ((87.22, 89.31, 93.22), (93.41, 93.97, 95.76), (95.46, 96.45, 97.60)),
    ("CCE", 2): ((88.45, 88.45, 92.77), (92.29, 93.14, 95.25), (95.38, 95.79, 96.89)),
    ("CCE", 3): ((89.05, 89.05, 93.10), (91.81, 93.02, 95.32), (95.11, 95.86, 97.14)),
}
COUNTS = (256, 512, 1024)
# Epochs between records of the loss, to keep the result file small.
EVERY = 20


@dataclasses.dataclass(frozen=True)
class JacobianRegularizerOptions(DigitsOptions):
    """Small networks on a few digits.

    Args:
        counts: Numbers of training images; they replace ``samples``.
        layers: Numbers of layers: convolutions before the linear output, or all linear layers of a perceptron.
        losses: "hinge" (multi-class margin) and "CCE" (cross-entropy).
        network: "convolutional" or "perceptron".
        width: Channels of the convolutions, or width of the hidden layers of a perceptron.
        epochs: Epochs of training.
        rate: The learning rate, with momentum 0.9; it falls to a tenth for the last third.
        decay: Candidates for the weight of WD.
        jacobian: Candidates for the weight of LM, the mean squared norm of the Jacobian.
    """

    counts: tuple[int, ...] = COUNTS
    layers: tuple[int, ...] = (2, 3)
    losses: tuple[str, ...] = ("hinge", "CCE")
    network: Literal["convolutional", "perceptron"] = "convolutional"
    width: int = 32
    epochs: int = 60
    rate: float = 1e-2
    decay: tuple[float, ...] = (5e-4, 5e-3, 5e-2)
    jacobian: tuple[float, ...] = (3e-3, 3e-2, 3e-1)

    def groups(self) -> dict[str, list[str]]:
        """The parts of every cell, one for each candidate."""
        grids: dict[str, Candidates] = {"none": (None,), "WD": self.decay, "LM": self.jacobian}
        return {name_of(*cell): [named(name_of(*cell), weight) for weight in grids[cell[3]]] for cell in cells(self)}


def name_of(loss: str, layers: int, count: int, method: str) -> str:
    """A cell of the table."""
    return f"{loss}, {layers} layers, {count} samples, {method}"


def cells(options: JacobianRegularizerOptions) -> list[tuple[str, int, int, str]]:
    """All cells."""
    return [(a, b, c, m) for a in options.losses for b in options.layers for c in options.counts for m in METHODS]


def parts(options: JacobianRegularizerOptions) -> list[Part]:
    """A network for every candidate of every cell."""
    return [Part(name) for names in options.groups().values() for name in names]


def run(options: JacobianRegularizerOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train one network."""
    cell, _, value = part.partition(" = ")
    loss, layers, count, method = next(found for found in cells(options) if name_of(*found) == cell)
    weight = float(value or 0)
    data = options.draw(lab, count)
    x, y = data.train
    model = network(options, x.shape[1], layers, data.classes).to(lab.device)
    optimizer, schedule = descent(model, options.rate, options.epochs, weight if method == "WD" else 0.0)
    criterion = F.multi_margin_loss if loss == "hinge" else F.cross_entropy
    for epoch in lab.epochs(options.epochs, model=model, optimizer=optimizer, schedule=schedule):
        total = 0.0
        for batch in torch.randperm(len(x)).split(options.batch):
            optimizer.zero_grad()
            inputs = x[batch].requires_grad_(method == "LM")
            logits = model(inputs)
            objective = criterion(logits, y[batch])
            if method == "LM":
                objective = objective + weight * jacobian_norm(logits, inputs)
            objective.backward()
            optimizer.step()
            total += float(objective.detach()) * len(batch)
        schedule.step()
        if (epoch + 1) % EVERY == 0:
            yield {"epoch": epoch + 1, "loss": total / len(x)}
    splits = {"train": (x.detach(), y), "validation": data.validation, "test": data.test}
    scores = {name: accuracy_of(model, split) for name, split in splits.items()}
    yield {"epoch": options.epochs, "weight": weight, **scores}


def network(options: JacobianRegularizerOptions, pixels: int, layers: int, classes: int) -> nn.Sequential:
    """Convolutions of 5 × 5 pixels with ReLUs, the first two of them pooled, or a perceptron."""
    if options.network == "perceptron":
        return perceptron((pixels, *[options.width] * (layers - 1), classes))
    side, channels = math.isqrt(pixels), 1
    found: list[nn.Module] = [nn.Unflatten(1, (1, side, side))]
    for place in range(layers):
        found += [nn.Conv2d(channels, options.width, 5, padding=2), nn.ReLU()]
        channels = options.width
        if place < 2:
            found.append(nn.MaxPool2d(2))
            side //= 2
    return nn.Sequential(*found, nn.Flatten(), nn.Linear(channels * side**2, classes))


def jacobian_norm(logits: Tensor, inputs: Tensor) -> Tensor:
    """An unbiased estimate of the mean squared Frobenius norm of the Jacobian, by one random projection."""
    draw = torch.randn_like(logits)
    (gradient,) = torch.autograd.grad((logits * draw).sum(), inputs, create_graph=True)
    return gradient.square().sum() / len(inputs)


def compare(results: Results[JacobianRegularizerOptions]) -> list[Comparison]:
    """Test accuracy beside the table's, of the candidates that validation chose."""
    chosen = results.chosen(results.options.groups())
    rows = []
    for loss, layers, count, method in cells(results.options):
        paper = None
        if results.options.dataset == "mnist" and count in COUNTS and (loss, layers) in PAPER:
            paper = PAPER[loss, layers][COUNTS.index(count)][METHODS.index(method)]
        name = name_of(loss, layers, count, method)
        weights = ", ".join(f"{weight:g}" for weight in chosen.final(name, "weight"))
        note = f"chosen by validation: {weights}" if weights and method != "none" else ""
        rows.append(Comparison(name, paper, chosen.final(name, "test"), "%", note=note))
    return rows


def plots(results: Results[JacobianRegularizerOptions]) -> list[Plot]:
    """The table as bars."""
    return [bars(compare(results), title="Accuracy with few samples", y="test accuracy, %")]


def findings(results: Results[JacobianRegularizerOptions]) -> Sequence[str | Difference]:
    """LM against both others, cell by cell."""
    chosen = results.chosen(results.options.groups())
    sentences: list[str | Difference] = [
        difference(chosen, name_of(*cell[:3], "LM"), name_of(*cell))
        for cell in cells(results.options)
        if cell[3] != "LM"
    ]
    weights = [
        weight
        for cell in cells(results.options)
        if cell[3] == "LM"
        for weight in chosen.final(name_of(*cell), "weight")
    ]
    edge = sum(weight == max(results.options.jacobian) for weight in weights)
    if edge:
        sentences.append(
            f"LM chooses its largest candidate in {edge} of {len(weights)} fits: a larger one may be better."
        )
    return sentences


def claims(results: Results[JacobianRegularizerOptions]) -> list[Claim]:
    """The Jacobian regulariser above weight decay and above none, cell by cell."""
    chosen = results.chosen(results.options.groups())
    options, found = results.options, []
    sizes_of = (
        ("loss", "losses", options.losses),
        ("depth", "depths", options.layers),
        ("size", "sizes", options.counts),
    )
    words = ", ".join(f"{len(cases)} {one if len(cases) == 1 else many}" for one, many, cases in sizes_of)
    for place, (method, title) in enumerate((("none", "no regulariser"), ("WD", "weight decay"))):
        gains, sizes = [], []
        for loss, layers, count, other in cells(results.options):
            if other == method and (loss, layers) in PAPER and count in COUNTS:
                ours, theirs = (name_of(loss, layers, count, kind) for kind in ("LM", method))
                row = PAPER[loss, layers][COUNTS.index(count)]
                gains.append(chosen.paired(ours, theirs, "test"))
                sizes.append(row[METHODS.index("LM")] - row[place])
        found.append(
            Claim(
                f"Few samples: the Jacobian regulariser beats {title} ({words})",
                span(sizes, " points", plus=True),
                span([mean_std(values)[0] for values in gains if values], " points", plus=True),
                scale(results, "MNIST", f"{results.options.network} networks", f"{results.options.epochs} epochs"),
                combine([judge_gain(gap, size, single=ACCURACY) for gap, size in zip(gains, sizes, strict=True)]),
            )
        )
    return found


experiment = Experiment(
    name="jacobian-regularizer",
    title="The Jacobian as a regulariser with few samples",
    source="[Vidal2018], Experimental Results (Sokolić, Giryes, Sapiro and Rodrigues 2017)",
    about=(
        "Networks of two and three layers on 256, 512 and 1024 digits with the hinge loss and cross-entropy: no "
        "regulariser, weight decay (WD), and the squared norm of the Jacobian of the logits (LM), which the slides "
        "relate to the product of the weights' norms. The slides give neither kind nor width of the networks; we "
        "assume convolutions with 32 channels of 5 × 5 pixels. Fully connected networks (--network perceptron --width "
        "400) stay 5 to 10 points below the slides' accuracies. WD and LM have three candidates for their weight; the "
        "validation images choose one for each seed and cell."
    ),
    presets={
        "smoke": Preset(
            JacobianRegularizerOptions(
                "digits", counts=(64,), layers=(2,), losses=("CCE",), width=8, epochs=3, batch=32
            ),
            (0, 1),
            0.05,
        ),
        "laptop": Preset(JacobianRegularizerOptions(), (0, 1, 2), 25),
        "paper": Preset(JacobianRegularizerOptions(epochs=200), (0, 1, 2, 3, 4), 150),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
    columns=("loss",),
)

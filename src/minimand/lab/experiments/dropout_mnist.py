"""Regularisers compared on digits: errors, learning curves, filters, compactness."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...factor.networks import product_of_norms
from ..comparing import verdict
from ..context import Lab
from ..drawing import bars, curves, figure
from ..experiment import Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._regularised import Digits, accuracy_of, perceptron

# 003, Table 9 of Srivastava et al.: test errors in percent.
PAPER: dict[str, float | None] = {
    "L2": 1.62,
    "L2 + L1": 1.60,
    "L2 + KL-sparsity": 1.55,
    "max-norm": 1.35,
    "dropout + L2": 1.25,
    "dropout + max-norm": 1.05,
    "product of norms": None,
}
SHOWN = ("L2", "dropout + max-norm")


@dataclasses.dataclass(frozen=True)
class Options(Digits):
    """Networks with two hidden layers.

    Args:
        width: Of the hidden layers.
        epochs: Of training.
        rate: The learning rate, with momentum 0.9; it falls to a tenth for the last third.
        l2: The weight decay of the methods with L2.
        l1: The weight of L1, in the last third of training.
        sparsity: The weight of the KL divergence of the units' mean activation from 0.05.
        max_norm: The largest norm of a unit's incoming weights.
        product: The weight of the product of the layers' norms.
        p: Drop rates of the input and the hidden units.
    """

    width: int = 512
    epochs: int = 10
    rate: float = 1e-2
    l2: float = 1e-4
    l1: float = 1e-5
    sparsity: float = 1e-3
    max_norm: float = 3.0
    product: float = 1e-6
    p: tuple[float, float] = (0.2, 0.5)


def parts(options: Options) -> list[Part]:
    """The rows of the table, and the product of norms."""
    return [Part(name) for name in PAPER]


def run(options: Options, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train one network."""
    (x, y), test, classes = options.draw(lab)
    dropout = options.p if "dropout" in part else (0.0, 0.0)
    model = perceptron((x.shape[1], options.width, options.width, classes), dropout).to(lab.device)
    decay = options.l2 if "L2" in part else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=options.rate, momentum=0.9, weight_decay=decay)
    cut = max(2 * options.epochs // 3, 1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, cut, 0.1)
    for epoch in lab.epochs(options.epochs, model=model, optimizer=optimizer, schedule=schedule):
        total = 0.0
        for batch in lab.track(torch.randperm(len(x)).split(options.batch)):
            optimizer.zero_grad()
            value = F.cross_entropy(model(x[batch]), y[batch])
            (value + penalty(options, part, model, x[batch], late=epoch >= cut)).backward()
            optimizer.step()
            if "max-norm" in part:
                clip(model, options.max_norm)
            total += float(value.detach()) * len(batch)
        schedule.step()
        yield {"epoch": epoch + 1, "loss": total / len(x), "error": 100 - accuracy_of(model, test)}
    yield {"epoch": options.epochs, "error": 100 - accuracy_of(model, test), **anatomy(model, test[0], part in SHOWN)}


def penalty(options: Options, part: str, model: nn.Sequential, x: Tensor, *, late: bool) -> Tensor:
    """What is added to the loss."""
    zero = x.new_zeros(())
    weights = [layer.weight for layer in model if isinstance(layer, nn.Linear)]
    if part == "L2 + L1":
        return options.l1 * torch.stack([w.abs().sum() for w in weights]).sum() if late else zero
    if part == "L2 + KL-sparsity":
        mean = torch.sigmoid(model[0](x)).mean(0).clamp(1e-6, 1 - 1e-6)
        target = 0.05
        divergence = target * (target / mean).log() + (1 - target) * ((1 - target) / (1 - mean)).log()
        return options.sparsity * divergence.sum()
    return options.product * product_of_norms(model) if part == "product of norms" else zero


@torch.no_grad()
def clip(model: nn.Sequential, largest: float) -> None:
    """Project every unit's incoming weights onto a ball."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.weight.copy_(layer.weight.renorm(2, 0, largest))


@torch.no_grad()
def anatomy(model: nn.Sequential, x: Tensor, filters: bool) -> dict[str, object]:
    """The effective rank of the first layer, the share of hidden units that are on, and some filters."""
    first = next(layer for layer in model if isinstance(layer, nn.Linear))
    values = torch.linalg.svdvals(first.weight)
    hidden = torch.relu(first(x[:1000]))
    found: dict[str, object] = {
        "effective_rank": float(values.sum().square() / values.square().sum()),
        "active": 100 * float((hidden > 0).float().mean()),
    }
    if filters:
        side = round(first.in_features**0.5)
        size = min(side, 14)
        strongest = first.weight[first.weight.norm(dim=1).argsort(descending=True)[:16]]
        small = F.adaptive_avg_pool2d(strongest.reshape(-1, 1, side, side), size)
        scaled = 99 * small / small.abs().amax((1, 2, 3), keepdim=True).clamp_min(1e-12)
        found["filters"] = scaled[:, 0].round().int().tolist()
    return found


def compare(results: Results[Options]) -> list[Comparison]:
    """Test errors beside the table's."""
    real = results.options.dataset == "mnist"
    rows = [
        Comparison(part, paper if real else None, results.final(part, "error"), "%") for part, paper in PAPER.items()
    ]
    rows += [
        Comparison(f"{part}: effective rank of the first layer", None, results.final(part, "effective_rank"), "", 1)
        for part in SHOWN
    ]
    rows += [
        Comparison(f"{part}: hidden units that are on", None, results.final(part, "active"), "%", 1) for part in SHOWN
    ]
    return rows


def plots(results: Results[Options]) -> list[Plot]:
    """Learning curves, the table, and filters with and without dropout."""
    pictures = [
        curves(results, list(PAPER), key="error", title="Learning curves", y="test error, %", log=True),
        bars(compare(results)[: len(PAPER)], title="Regularisers", y="test error, %"),
    ]
    drawn = figure(8, 4.2)
    panels = drawn.subfigures(1, len(SHOWN))
    for panel, part in zip(panels, SHOWN, strict=True):
        panel.suptitle(part)
        found = [v[-1] for v in results.curve(part, "filters").values() if v]
        for place, axes in enumerate(panel.subplots(4, 4).ravel()):
            axes.axis("off")
            if found and place < len(found[0]):
                axes.imshow(found[0][place], cmap="gray", vmin=-99, vmax=99)
    alt = f"The sixteen first-layer filters of largest norm: {SHOWN[0]} on the left, {SHOWN[1]} on the right"
    return [*pictures, Plot("First-layer filters", alt, drawn)]


def findings(results: Results[Options]) -> Sequence[str]:
    """Every method against L2."""
    others = [part for part in PAPER if part != "L2"]
    return [verdict(results, part, "L2", "error", unit=" points of error", higher=False) for part in others]


experiment = Experiment(
    name="dropout-mnist",
    title="Dropout among other regularisers",
    source="003, Dropout Training (Srivastava et al. 2014, Table 9)",
    about=(
        "Networks with two hidden layers of ReLUs on MNIST: weight decay, with L1 towards the end, with a "
        "sparsity penalty; max-norm; dropout with "
        "either; and the product of norms, which the slides connect to dropout. The slides' best networks are "
        "far wider and train far longer. "
        "Learning curves, first-layer filters and compactness are the slides' pictures."
    ),
    presets={
        "smoke": Preset(Options("digits", samples=200, width=32, epochs=2), (0,), 0.05),
        "laptop": Preset(Options(), (0, 1), 45),
        "paper": Preset(Options(width=2048, epochs=200), (0, 1, 2), 30_000),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    columns=("loss", "error"),
)

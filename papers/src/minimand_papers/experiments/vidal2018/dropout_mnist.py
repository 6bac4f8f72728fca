"""Regularisers compared on digits: errors, learning curves, filters, compactness."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimand.homogeneous import product_of_norms

from ...claims import combine, judge_gain, scale, signed
from ...comparing import Difference, difference
from ...context import Lab
from ...drawing import bars, curves
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ...pictures import encoded, montage, pictures
from ._regularized import DigitsOptions, accuracy_of, descent, named, perceptron

# [Vidal2018], Table 9 of Srivastava et al.: test errors in percent.
PAPER: dict[str, float | None] = {
    "L2": 1.62,
    "L2 + L1": 1.60,
    "L2 + KL-sparsity": 1.55,
    "max-norm": 1.35,
    "dropout + L2": 1.25,
    "dropout + max-norm": 1.05,
    "product of norms": None,
}
SHOWN = ("L2", "dropout + L2")


@dataclasses.dataclass(frozen=True)
class DropoutMNISTOptions(DigitsOptions):
    """Networks with two or more hidden layers.

    Args:
        width: Width of two hidden layers.
        widths: Widths of the hidden layers instead of two of ``width``.
        epochs: Epochs of training.
        rate: The learning rate, with momentum 0.9; it falls to a tenth for the last third.
        l2: Candidates for the weight decay of "L2" and "dropout + L2"; the other methods with L2 have the middle one.
        l1: Candidates for the weight of L1, in the last third of training.
        sparsity: Candidates for the weight of the KL divergence of the units' mean activation from 0.05.
        max_norm: Candidates for the largest norm of a unit's incoming weights.
        product: Candidates for the weight of the product of the layers' norms.
        p: Drop rates of the input and the hidden units.
    """

    width: int = 512
    widths: tuple[int, ...] = ()
    epochs: int = 10
    rate: float = 1e-2
    l2: tuple[float, ...] = (1e-5, 1e-4, 1e-3)
    l1: tuple[float, ...] = (1e-6, 1e-5, 1e-4)
    sparsity: tuple[float, ...] = (1e-4, 1e-3, 1e-2)
    max_norm: tuple[float, ...] = (1.0, 2.0, 4.0)
    product: tuple[float, ...] = (1e-6, 1e-5, 1e-4)
    p: tuple[float, float] = (0.2, 0.5)

    @property
    def hidden(self) -> tuple[int, ...]:
        """The widths of the hidden layers."""
        return self.widths or (self.width, self.width)

    def candidates(self, method: str) -> tuple[float, ...]:
        """The weights that validation chooses from."""
        fields = {"L1": self.l1, "KL": self.sparsity, "max-norm": self.max_norm, "product": self.product}
        return next((grid for name, grid in fields.items() if name in method), self.l2)

    def groups(self) -> dict[str, list[str]]:
        """The parts of every method."""
        return {method: [named(method, weight) for weight in self.candidates(method)] for method in PAPER}


def parts(options: DropoutMNISTOptions) -> list[Part]:
    """The rows of the table and the product of norms, each with its candidates."""
    return [Part(name) for names in options.groups().values() for name in names]


def run(options: DropoutMNISTOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train one network."""
    method, _, value = part.partition(" = ")
    weight = float(value)
    data = options.draw(lab)
    x, y = data.train
    dropout = options.p if "dropout" in method else (0.0, 0.0)
    model = perceptron((x.shape[1], *options.hidden, data.classes), dropout).to(lab.device)
    own = method in ("L2", "dropout + L2")
    decay = (weight if own else options.l2[len(options.l2) // 2]) if "L2" in method else 0.0
    optimizer, schedule = descent(model, options.rate, options.epochs, decay)
    for epoch in lab.epochs(options.epochs, model=model, optimizer=optimizer, schedule=schedule):
        total, late = 0.0, 3 * epoch >= 2 * options.epochs
        for batch in lab.track(torch.randperm(len(x)).split(options.batch)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[batch]), y[batch])
            (loss + penalty(method, weight, model, x[batch], late=late)).backward()
            optimizer.step()
            if "max-norm" in method:
                clip(model, weight)
            total += float(loss.detach()) * len(batch)
        schedule.step()
        scores = {"validation": accuracy_of(model, data.validation), "error": 100 - accuracy_of(model, data.test)}
        yield {"epoch": epoch + 1, "loss": total / len(x), **scores}
    yield {"weight": weight, **anatomy(model, data.test[0], filters=method in SHOWN)}


def penalty(method: str, weight: float, model: nn.Sequential, x: Tensor, *, late: bool) -> Tensor:
    """The penalty that is added to the loss."""
    if method == "L2 + L1" and late:
        return weight * torch.stack([layer.weight.abs().sum() for layer in model if isinstance(layer, nn.Linear)]).sum()
    if method == "L2 + KL-sparsity":
        mean = torch.sigmoid(model[0](x)).mean(0).clamp(1e-6, 1 - 1e-6)
        target = 0.05
        divergence = target * (target / mean).log() + (1 - target) * ((1 - target) / (1 - mean)).log()
        return weight * divergence.sum()
    return weight * product_of_norms(model) if method == "product of norms" else x.new_zeros(())


@torch.no_grad()
def clip(model: nn.Sequential, largest: float) -> None:
    """Project every unit's incoming weights onto a ball."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.weight.copy_(layer.weight.renorm(2, 0, largest))


@torch.no_grad()
def anatomy(model: nn.Sequential, x: Tensor, *, filters: bool) -> dict[str, object]:
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
        strongest = first.weight[first.weight.norm(dim=1).argsort(descending=True)[:16]]
        found["filters"] = encoded(montage(strongest.reshape(-1, side, side).cpu().numpy(), 4, signed=True))
    return found


def compare(results: Results[DropoutMNISTOptions]) -> list[Comparison]:
    """Test errors beside the table's, of the candidate that validation chose."""
    real, chosen = results.options.dataset == "mnist", results.chosen(results.options.groups())
    rows = [
        Comparison(method, paper if real else None, chosen.final(method, "error"), "%", note=_weights(chosen, method))
        for method, paper in PAPER.items()
    ]
    rows += [
        Comparison(f"{method}: effective rank of the first layer", None, chosen.final(method, "effective_rank"), "", 1)
        for method in SHOWN
    ]
    return rows + [
        Comparison(f"{method}: hidden units that are on", None, chosen.final(method, "active"), "%", 1)
        for method in SHOWN
    ]


def _weights(chosen: Results[DropoutMNISTOptions], method: str) -> str:
    weights = chosen.final(method, "weight")
    return f"chosen by validation: {', '.join(f'{weight:g}' for weight in weights)}" if weights else ""


def plots(results: Results[DropoutMNISTOptions]) -> list[Plot]:
    """Learning curves, the table, and filters with and without dropout."""
    chosen = results.chosen(results.options.groups())
    filters = {method: next((v[-1] for v in chosen.curve(method, "filters").values() if v), None) for method in SHOWN}
    ranks = [Comparison(method, None, chosen.final(method, "effective_rank"), "", 1) for method in PAPER]
    drawn = pictures([filters], "The sixteen first-layer filters of largest norm")
    return [
        curves(chosen, list(PAPER), key="error", title="Learning curves", y="test error, %", log=True),
        bars(compare(results)[: len(PAPER)], title="Regularisers", y="test error, %"),
        bars(ranks, title="Compactness of the first layer", y="effective rank, (Σσ)² / Σσ²"),
        *([drawn] if drawn else []),
    ]


def findings(results: Results[DropoutMNISTOptions]) -> Sequence[str | Difference]:
    """Every method against L2."""
    chosen = results.chosen(results.options.groups())
    others = [method for method in PAPER if method != "L2"]
    return [difference(chosen, method, "L2", "error", higher=False, quantity="test error") for method in others]


def claims(results: Results[DropoutMNISTOptions]) -> list[Claim]:
    """Table 9 of Srivastava et al.: both dropout rows below the same method without dropout."""
    chosen = results.chosen(results.options.groups())
    pairs = {"dropout + L2": "L2", "dropout + max-norm": "max-norm"}
    gaps = {ours: chosen.paired(ours, other, "error") for ours, other in pairs.items()}
    sizes = {ours: _number(PAPER[ours]) - _number(PAPER[other]) for ours, other in pairs.items()}
    return [
        Claim(
            "Dropout training: dropout lowers the test error of L2 and of max-norm",
            ", ".join(f"{size:+.2f}".replace("-", "−") for size in sizes.values()) + " points",
            ", ".join(signed(values, "") for values in gaps.values()) + " points",
            scale(results, "MNIST", f"width {max(results.options.hidden)}", f"{results.options.epochs} epochs"),
            combine([judge_gain([-gap for gap in gaps[ours]], -sizes[ours]) for ours in pairs]),
        )
    ]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


experiment = Experiment(
    name="dropout-mnist",
    title="Dropout among other regularisers",
    source="[Vidal2018], Dropout Training (Srivastava et al. 2014, Table 9)",
    about=(
        "Networks with two hidden layers of ReLUs on MNIST with these regularisers: weight decay, weight decay "
        "with L1 in the last third or with a sparsity penalty, max-norm, dropout with weight decay or max-norm, "
        "and the product of norms, which the slides connect to dropout. The slides' best networks are far wider "
        "and train far longer. Every method has three candidates for its weight; the validation images choose one "
        "for each seed. The paper preset has the network of the source's table, 784-1024-1024-2048-10; the source does "
        "not say how long it trained nor at which rate, and 200 epochs at ours are assumed. Learning curves, "
        "first-layer filters and compactness are shown as in the slides."
    ),
    presets={
        "smoke": Preset(DropoutMNISTOptions("digits", samples=200, width=32, epochs=2), (0,), 0.05),
        "laptop": Preset(DropoutMNISTOptions(), (0, 1), 50),
        "paper": Preset(DropoutMNISTOptions(widths=(1024, 1024, 2048), epochs=200), (0, 1, 2), 25_000),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
    columns=("loss", "validation", "error"),
)

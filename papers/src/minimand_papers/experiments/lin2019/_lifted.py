"""Shared code of the experiments on training without backpropagation: data as rows, networks, one training loop."""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimand.errors import NonFiniteError, OptionError
from minimand.train.lifted import LPOM, MAC, BlockPenalty, Epoch, LiftedReLU, Recipe, SplitADMM

from ...clock import Stopwatch
from ...context import Lab
from ...data import Batches
from ...drawing import curves, dots
from ...experiment import Comparison, Metrics, Plot, Results
from ...training import loaders
from ._control import ridge_control

__all__ = [
    "ACTIVATIONS",
    "CONTROL",
    "GRADIENTS",
    "LIFTED",
    "LiftedNetworksOptions",
    "LiftedOptions",
    "RowBatches",
    "RowSplits",
    "chosen_curve",
    "error_curves",
    "error_dots",
    "lifted",
    "network",
    "relative_time",
    "trained",
    "tuned",
]

CONTROL = "ridge control"
#: LPOM's own gradient in an optimizer of torch.
GRADIENTS = {"LPOM-SGD": "SGD", "LPOM-Adam": "Adam"}
LIFTED: Mapping[str, Callable[..., Any]] = {
    "LPOM": LPOM,
    "MAC": MAC,
    "BlockPenalty": BlockPenalty,
    "SplitADMM output": SplitADMM,
    "SplitADMM all": SplitADMM,
    "LiftedReLU": LiftedReLU,
}


class SteepSigmoid(nn.Module):
    """A sigmoid eight times as steep, close to a threshold; its derivative vanishes away from zero."""

    def forward(self, z: Tensor) -> Tensor:
        """The activation."""
        return torch.sigmoid(8 * z)


ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "steep": SteepSigmoid,
}


@dataclasses.dataclass(frozen=True)
class RowBatches:
    """Samples as rows with their labels; every iteration over it is an epoch of shuffled full batches."""

    x: Tensor
    y: Tensor
    batch: int = 500
    generator: torch.Generator | None = None

    def __len__(self) -> int:
        return len(self.x) // self.batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.x), generator=self.generator).to(self.x.device)
        for index in order[: len(self) * self.batch].split(self.batch):
            yield self.x[index], self.y[index]


@dataclasses.dataclass(frozen=True)
class RowSplits:
    """The three splits as rows, and the number of classes."""

    train: RowBatches
    validation: RowBatches
    test: RowBatches
    classes: int

    def restarted(self, lab: Lab) -> RowBatches:
        """The training batches from their first epoch on, so that every candidate gets the same ones."""
        return dataclasses.replace(self.train, generator=lab.generator())


@dataclasses.dataclass(frozen=True)
class LiftedOptions:
    """Fully connected networks, and two candidates for each method: the better on the validation split is tested.

    Args:
        batch: Samples in a batch.
        limit: Use only this many samples of each split; 0: all.
        enlarge: Repeat each pixel this many times in both directions.
        epochs: Epochs of every method and candidate.
        losses: Candidates of the lifted methods: squared, cross_entropy, with an optional damping ("squared 1").
        sgd_rates: Candidates of SGD with momentum 0.9 on the cross-entropy: initial learning rates.
        adam_rates: Candidates of Adam on the cross-entropy: initial learning rates.
        ridges: Candidates of the control: weights of the ridge penalty.
    """

    batch: int = 128
    limit: int = 0
    enlarge: int = 1
    epochs: int = 6
    losses: tuple[str, ...] = ("squared", "cross_entropy")
    sgd_rates: tuple[float, ...] = (0.1, 0.03)
    adam_rates: tuple[float, ...] = (1e-3, 3e-3)
    ridges: tuple[float, ...] = (1.0, 100.0)

    def data(self, lab: Lab, dataset: str) -> RowSplits:
        """The splits, standardised and flattened."""
        if lab.world > 1:
            raise OptionError("the lifted experiments train in one process; start them without torchrun")
        found = loaders(lab, dataset, self.batch, limit=self.limit or None, enlarge=self.enlarge)
        ordered = lab.batches(found.train.split, 500, train=False, normalize=found.train.normalize)
        x, y = rows(ordered)
        train = RowBatches(x, y, min(self.batch, len(x)), lab.generator())
        return RowSplits(train, RowBatches(*rows(found.validation)), RowBatches(*rows(found.test)), found.classes)

    def words(self) -> tuple[str, ...]:
        """What a claim says about the number of images."""
        return (f"at most {self.limit:,} images of each split",) if self.limit else ()

    def candidates(self, method: str) -> Sequence[str | float]:
        """The candidates of a method."""
        if method in LIFTED:
            return self.losses
        rates = {"SGD": self.sgd_rates, "Adam": self.adam_rates, CONTROL: self.ridges}
        return rates[GRADIENTS.get(method, method)]


@dataclasses.dataclass(frozen=True)
class LiftedNetworksOptions(LiftedOptions):
    """As :class:`LiftedOptions`, with one network per dataset.

    Args:
        datasets: Names from ``minimand_papers.data.registry``.
        nets: Hidden widths, one entry per dataset.
    """

    datasets: tuple[str, ...] = ("mnist",)
    nets: tuple[str, ...] = ("300-100",)

    def networks(self) -> list[tuple[str, str]]:
        """Every dataset with its network."""
        if len(self.datasets) != len(self.nets):
            raise OptionError(f"give one network for each of the datasets {self.datasets}, got nets={self.nets}")
        return list(zip(self.datasets, self.nets, strict=True))


def rows(batches: Batches) -> tuple[Tensor, Tensor]:
    """All samples of a split, flat, and their labels."""
    count, width = len(batches.split), batches.split.images[0].numel()
    x = torch.empty(count, width, device=batches.device)
    y = torch.empty(count, dtype=torch.long, device=batches.device)
    start = 0
    for images, labels in batches:
        stop = start + len(labels)
        x[start:stop], y[start:stop] = images.flatten(1), labels
        start = stop
    return x, y


def network(hidden: str, inputs: int, classes: int, activation: str = "relu") -> nn.Sequential:
    """Layers of the widths in ``hidden``, such as 300-100, with PyTorch's initial weights."""
    try:
        widths = [inputs, *(int(width) for width in hidden.split("-")), classes]
    except ValueError:
        raise OptionError(f"a network is given by its hidden widths, such as 300-100, got {hidden!r}") from None
    if activation not in ACTIVATIONS:
        raise OptionError(f"there is no activation {activation!r}; available: {', '.join(ACTIVATIONS)}")
    modules: list[nn.Module] = []
    for below, above in pairwise(widths):
        modules += [nn.Linear(below, above), ACTIVATIONS[activation]()]
    return nn.Sequential(*modules[:-1])


def lifted(method: str, model: nn.Module, loss: str, damping: float | None = None) -> Any:
    """A lifted method on a network."""
    extra = {"splitting": method.split()[1]} if method.startswith("SplitADMM") else {}
    return LIFTED[method](model, loss=loss, recipe=Recipe(damping=damping), **extra)


@torch.no_grad()
def correct(model: nn.Module, data: RowBatches) -> float:
    """The percentage of right answers."""
    right = sum(
        int((model(x).argmax(1) == y).sum()) for x, y in zip(data.x.split(2000), data.y.split(2000), strict=True)
    )
    return round(100 * right / len(data.y), 4)


def trained(method: str, candidate: str | float, model: nn.Module, data: RowBatches, epochs: int) -> Iterator[Epoch]:
    """Train the model in place; yields after every epoch."""
    if method in LIFTED:
        loss, _, damping = str(candidate).partition(" ")
        training = lifted(method, model, loss, float(damping) if damping else None).training(data, epochs)
        losses: Iterator[float] = (epoch.energy for epoch in training)
    else:
        losses = _backpropagated(method, float(candidate), model, data, epochs)
    watch = Stopwatch()
    for number, mean in enumerate(losses, 1):
        yield Epoch(number, mean, watch.seconds)
        watch = Stopwatch()


def _backpropagated(method: str, rate: float, model: nn.Module, data: RowBatches, epochs: int) -> Iterator[float]:
    """Train with SGD or Adam and the schedule of the lifted methods; yields the mean loss of every epoch.

    The gradients are those of backpropagation, or of ``LPOM.backward``.
    """
    optimizer: torch.optim.Optimizer
    lpom = LPOM(model, loss="cross_entropy", example=data.x[:2]) if method in GRADIENTS else None
    if GRADIENTS.get(method, method) == "SGD":
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = Recipe(rate=rate)
    for number in range(1, epochs + 1):
        total = 0.0
        for index, (x, y) in enumerate(data):
            optimizer.param_groups[0]["lr"] = schedule.rate_at((number - 1 + index / len(data)) / epochs)
            optimizer.zero_grad()
            total += _gradient(model, x, y) if lpom is None else lpom.backward(x, y)
            optimizer.step()
        yield total / len(data)


def _gradient(model: nn.Module, x: Tensor, y: Tensor) -> float:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return float(loss.detach())


def tuned(
    options: LiftedOptions, method: str, build: Callable[[], nn.Module], data: RowSplits, lab: Lab
) -> Iterator[Metrics]:
    """Train every candidate from the same weights on the same batches; test only the best by validation."""
    candidates = options.candidates(method)
    best: dict[str, Any] = {"validation": -1.0}
    for number, candidate in enumerate(candidates):
        torch.manual_seed(lab.seed)
        model, times = build().to(lab.device), []
        if method == CONTROL:
            model = ridge_control(model, data.train.x, data.train.y, float(candidate))
        else:
            try:
                for epoch in trained(method, candidate, model, data.restarted(lab), options.epochs):
                    times.append(epoch.seconds)
                    lab.notify(number * options.epochs + epoch.number, len(candidates) * options.epochs)
                    yield {
                        "candidate": str(candidate),
                        "epoch": epoch.number,
                        "loss": round(epoch.energy, 6),
                        "validation": correct(model, data.validation),
                    }
            except NonFiniteError as error:
                yield {"candidate": str(candidate), "diverged": str(error)}
        reached = correct(model, data.validation)
        if reached > best["validation"]:
            best = {"chosen": str(candidate), "validation": reached, "model": model, "times": times}
    model, times = best.pop("model"), best.pop("times")
    pace = {"epoch_seconds": round(statistics.median(times), 5)} if times else {}
    yield {**best, **pace, "test": correct(model, data.test)}


def chosen_curve(
    options: LiftedOptions, method: str, build: Callable[[], nn.Module], data: RowSplits, lab: Lab
) -> Iterator[Metrics]:
    """The accuracies after every epoch of the candidate with the best final validation accuracy."""
    candidates = options.candidates(method)
    curves: list[list[dict[str, Any]]] = []
    for number, candidate in enumerate(candidates):
        torch.manual_seed(lab.seed)
        model = build().to(lab.device)
        if method == CONTROL:
            model = ridge_control(model, data.train.x, data.train.y, float(candidate))
            curves.append([{"chosen": str(candidate), **accuracies(model, data)}])
            continue
        curve: list[dict[str, Any]] = [{"epoch": 0, "spent": 0.0, **accuracies(model, data)}]
        try:
            for epoch in trained(method, candidate, model, data.restarted(lab), options.epochs):
                spent = round(curve[-1]["spent"] + epoch.seconds, 5)
                pace = {"epoch": epoch.number, "spent": spent, "epoch_seconds": round(spent / epoch.number, 5)}
                curve.append({**pace, "loss": round(epoch.energy, 6), **accuracies(model, data)})
                lab.notify(number * options.epochs + epoch.number, len(candidates) * options.epochs)
        except NonFiniteError as error:
            curve[-1] = {**curve[-1], "diverged": str(error)}
        curve[-1] = {**curve[-1], "chosen": str(candidate)}
        curves.append(curve)
    yield from max(curves, key=lambda curve: float(curve[-1]["validation"]))


def accuracies(model: nn.Module, data: RowSplits) -> dict[str, float]:
    """The accuracies on the three splits."""
    splits = {"train": data.train, "validation": data.validation, "test": data.test}
    return {name: correct(model, part) for name, part in splits.items()}


def wrong(accuracy: float) -> float:
    """The error in per cent, at least 0.01 for logarithmic axes."""
    return max(100 - accuracy, 0.01)


def error_curves(
    results: Results[Any], dataset: str, methods: Sequence[str], key: str, *, over: str = "epoch", x: str | None = None
) -> Plot:
    """The error on a split over epochs or seconds, one line per method; methods with backpropagation are dashed."""
    parts = [f"{dataset} {method}" for method in methods]
    dashed = [part for part, method in zip(parts, methods, strict=True) if method not in LIFTED]
    title = f"{dataset}: {key} error" + (f" over {x}" if x else "")
    return curves(
        results, parts, key=key, over=over, title=title, y="error, %", x=x, log=True, dashed=dashed, shown=wrong
    )


def error_dots(
    results: Results[Any],
    rows: Mapping[str, Mapping[str, str]],
    *,
    title: str,
    sources: Mapping[str, Mapping[str, float]] | None = None,
) -> Plot:
    """Test errors: one row per label with a dot per series; ``sources`` holds accuracies of the paper."""
    table = {
        label: {series: [wrong(value) for value in results.final(part, "test")] for series, part in row.items()}
        for label, row in rows.items()
    }
    for label, given in (sources or {}).items():
        if label in table:
            table[label] |= {f"{series}, the source": [wrong(value)] for series, value in given.items()}
    return dots(table, title=title, x="test error, %", log=True)


def relative_time(results: Results[Any], ours: str, other: str, label: str, key: str = "epoch_seconds") -> Comparison:
    """The time of an epoch of one part over that of another, for each seed."""
    mine, theirs = results.curve(ours, key), results.curve(other, key)
    ratios = [mine[seed][-1] / max(theirs[seed][-1], 1e-9) for seed in mine if mine[seed] and theirs.get(seed)]
    median = "median epoch without evaluation; depends on other load of the machine"
    return Comparison(label, None, ratios, "×", note=median if key == "epoch_seconds" else "")

"""The uncertainty of sampling solvers beside dropout at test time and an ensemble."""

import copy
import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimand.errors import OptionError
from minimand.nn import convert, sample
from minimand.solvers import ProxSG

from ...comparing import Difference, difference
from ...context import Lab
from ...drawing import bars
from ...experiment import Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ...training import Loaders, train
from ...zoo import LeNet
from .._solvers import ImageOptions

PLAIN, DROPOUT, SOLVER, ENSEMBLE = "one pass", "dropout at test time", "sampling solvers", "ensemble"
MANY = ("dropout at test time, many passes", "sampling solvers, many passes")
TRAINED = {DROPOUT: PLAIN, SOLVER: SOLVER}
# Every member is a part, and a result file says how many there are.
_MOST = 1_000


@dataclasses.dataclass(frozen=True)
class SolversUncertaintyOptions(ImageOptions):
    """Predictive uncertainty of LeNet with dropout.

    Args:
        epochs: Epochs from scratch; the learning rate drops after half of them.
        finetune: Epochs of fine-tuning of the single networks; the members of the ensemble train as long in all.
        members: Networks in the ensemble, and passes of dropout at equal cost.
        passes: Passes of the rows with many.
        iters: Iterations of the solvers.
        other: The dataset whose images are to be detected.
    """

    epochs: int = 12
    finetune: int = 4
    members: int = 5
    passes: int = 50
    iters: int = 5
    other: str = "mnist"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.members <= _MOST:
            raise OptionError(f"members must be from 1 to {_MOST:,}, got {self.members}")


def parts(options: SolversUncertaintyOptions) -> list[Part]:
    """A network, its fine-tuned forms, and the ensemble."""
    members = tuple(f"member {number + 1}" for number in range(options.members))
    single = [Part("LeNet"), Part(PLAIN, ("LeNet",)), Part(SOLVER, ("LeNet",))]
    return [*single, *map(Part, members), Part(ENSEMBLE, members)]


def run(options: SolversUncertaintyOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train or fine-tune, then measure the predictions."""
    data = options.loaders(lab)
    make = lambda: LeNet(data.classes, data.shape[0], data.shape[-1]).to(lab.device)  # noqa: E731
    total, rates = options.epochs + options.finetune, (1e-2, 1e-3)
    model: nn.Module = make()
    if part == ENSEMBLE:
        nets = [copy.deepcopy(model) for _ in range(options.members)]
        for number, net in enumerate(nets):
            net.load_state_dict(lab.kept(f"member {number + 1}", "model", net.state_dict()))
        yield {"epoch": total, **measured(lab, options, data, [("", nets, 0)])}
        return
    if part == "LeNet" or part.startswith("member"):
        yield from train(lab, model, data, epochs=options.epochs if part == "LeNet" else total, rates=rates)
        lab.keep("model", model.state_dict())
        return
    model.load_state_dict(lab.kept("LeNet", "model", model.state_dict()))
    if part == SOLVER:
        model = convert(model, {"classifier.[14]": ProxSG(options.iters)})
    yield from _without_test(train(lab, model, data, epochs=options.finetune, rates=(1e-3, 1e-4)))
    passes = [("sampled ", [model], options.members), ("many ", [model], options.passes)]
    yield {"epoch": total, **measured(lab, options, data, [("", [model], 0), *passes])}


def _without_test(records: Iterator[Metrics]) -> Iterator[Metrics]:
    """The accuracy is measured with the probabilities."""
    return (record for record in records if "test" not in record)


def measured(
    lab: Lab, options: SolversUncertaintyOptions, data: Loaders, ways: Sequence[tuple[str, list[nn.Module], int]]
) -> Metrics:
    """Accuracy, calibration, likelihood, and the detection of another dataset's images, for each way to predict."""
    labels = torch.cat([y for _, y in data.test])
    others = _others(lab, options, data)
    record: dict[str, float] = {}
    for name, nets, passes in ways:
        inside = torch.cat([probabilities(nets, x, passes) for x, _ in data.test])
        outside = torch.cat([probabilities(nets, x, passes) for x in others.split(500)])
        record |= {
            f"{name}test": 100 * float((inside.argmax(-1) == labels).double().mean()),
            f"{name}calibration": 100 * calibration_error(inside, labels),
            f"{name}likelihood": float(F.nll_loss(inside.clamp_min(1e-12).log(), labels)),
            f"{name}detection": 100 * detection(entropy(inside), entropy(outside)),
        }
    return record


@torch.no_grad()
def probabilities(nets: Sequence[nn.Module], x: Tensor, passes: int) -> Tensor:
    """The mean probabilities over networks, or over the stochastic passes of one; 0: one pass without noise."""
    if passes:
        return sample(nets[0], x, passes).softmax(-1).mean(0)
    return torch.stack([net.eval()(x).softmax(-1) for net in nets]).mean(0)


def entropy(p: Tensor) -> Tensor:
    """The entropy of each row."""
    return torch.special.entr(p).sum(-1)


def calibration_error(p: Tensor, labels: Tensor, bins: int = 15) -> float:
    """The expected calibration error: the mean difference between confidence and accuracy over bins of confidence.

    >>> calibration_error(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
    0.5
    """
    confidence, predicted = p.max(-1)
    which = (confidence * bins).long().clamp_max(bins - 1)
    right = (predicted == labels).to(p)
    gaps = [
        float((right[which == b].mean() - confidence[which == b].mean()).abs() * (which == b).sum())
        for b in range(bins)
        if bool((which == b).any())
    ]
    return sum(gaps) / len(labels)


def detection(inside: Tensor, outside: Tensor) -> float:
    """The area under the ROC curve: how often an outside image has the larger score.

    >>> detection(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0]))
    1.0
    """
    scores = torch.cat([inside, outside]).double()
    order = scores.argsort()
    ranks = torch.empty_like(scores)
    ranks[order] = torch.arange(1.0, len(scores) + 1, dtype=torch.float64)
    # Equal scores share their ranks.
    values, index = scores.unique(return_inverse=True)
    mean = torch.zeros(len(values), dtype=torch.float64).scatter_reduce(0, index, ranks, "mean", include_self=False)
    over = mean[index][len(inside) :].sum() - len(outside) * (len(outside) + 1) / 2
    return float(over / (len(inside) * len(outside)))


def _others(lab: Lab, options: SolversUncertaintyOptions, data: Loaders) -> Tensor:
    """Test images of another dataset, with the channels, the size and the normalisation of this one."""
    images = lab.load(options.other).test.images[: options.limit or None]
    channels, height, width = data.shape
    resized = F.interpolate(images.float(), (height, width), mode="bilinear", antialias=True)
    resized = resized.expand(-1, channels, -1, -1).round().to(torch.uint8)
    return data.test.normalize(resized).to(lab.device)


QUANTITIES = {
    "test": "accuracy, %",
    "calibration": "calibration error, %",
    "likelihood": "negative log-likelihood",
    "detection": "area under the ROC curve, %",
}
WAYS = {
    f"{PLAIN}": (PLAIN, ""),
    DROPOUT: (PLAIN, "sampled "),
    SOLVER: (SOLVER, "sampled "),
    ENSEMBLE: (ENSEMBLE, ""),
    MANY[0]: (PLAIN, "many "),
    MANY[1]: (SOLVER, "many "),
}


def named(results: Results[SolversUncertaintyOptions]) -> Results[SolversUncertaintyOptions]:
    """The ways to predict as parts of their own."""
    records = {
        way: {
            seed: [{key: last[prefix + key] for key in QUANTITIES}]
            for seed, found in results.records.get(part, {}).items()
            if found and f"{prefix}detection" in (last := found[-1])
        }
        for way, (part, prefix) in WAYS.items()
    }
    return dataclasses.replace(results, records=records)


def compare(results: Results[SolversUncertaintyOptions]) -> list[Comparison]:
    """The four quantities of every way to predict."""
    found = named(results)
    return [
        Comparison(f"{way}: {title}", None, found.final(way, key), "", 3 if key == "likelihood" else 2)
        for key, title in QUANTITIES.items()
        for way in WAYS
    ]


def plots(results: Results[SolversUncertaintyOptions]) -> list[Plot]:
    """One picture per quantity."""
    found = named(results)
    return [
        bars([Comparison(way, None, found.final(way, key)) for way in WAYS], title=title.capitalize(), y=title)
        for key, title in QUANTITIES.items()
    ]


def findings(results: Results[SolversUncertaintyOptions]) -> Sequence[str | Difference]:
    """The solvers beside dropout and the ensemble."""
    found = named(results)
    signs = {"test": True, "calibration": False, "likelihood": False, "detection": True}
    pairs = [(SOLVER, DROPOUT), (SOLVER, ENSEMBLE), (MANY[1], MANY[0])]
    return [
        difference(found, ours, other, key, unit="", higher=higher, quantity=QUANTITIES[key])
        for key, higher in signs.items()
        for ours, other in pairs
    ]


experiment = Experiment(
    name="solvers-uncertainty",
    title="Uncertainty by sampling solvers",
    source="[Bibi2019], §3.3: sampling in place of dropout",
    about=(
        "LeNet with dropout ½ is trained, then fine-tuned as it is or with its two blocks as sampling solvers. "
        "Predictions are the mean probabilities of several stochastic passes, at the cost of as many passes of dropout "
        "as an ensemble has members, and of many passes. Measured are the accuracy, the expected calibration error in "
        "15 bins, the negative log-likelihood, and the area under the ROC curve when the entropy is to tell the images "
        "of another dataset. A pass of the solvers costs more than one of dropout; the time is in the step ratio of "
        "solvers-conversion."
    ),
    presets={
        "smoke": Preset(
            SolversUncertaintyOptions(
                "digits", batch=50, limit=100, enlarge=4, epochs=1, finetune=1, members=2, passes=3, other="digits"
            ),
            (0, 1),
            0.2,
        ),
        "laptop": Preset(SolversUncertaintyOptions(limit=20_000), (0, 1, 2), 20),
        "paper": Preset(SolversUncertaintyOptions(epochs=60, finetune=20), (0, 1, 2), 400),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
)

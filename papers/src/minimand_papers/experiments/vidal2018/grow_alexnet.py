"""Parallel AlexNets grown on small images with a certificate, against one network of the same objective."""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimand.factor import ParallelNetwork

from ...comparing import Difference, difference
from ...context import Lab
from ...data import Normalization
from ...drawing import curves
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._factor import certified_claim
from ._regularized import accuracy_of

ALL = GROWN, SINGLE, RANDOM = "grown", "one network", "random start, as many"
LARGE = 32  # pixels from which images are halved


@dataclasses.dataclass(frozen=True)
class GrowAlexNetOptions:
    """Images in half the resolution, a small AlexNet as the subnetwork, and the schedule of the growth.

    Args:
        dataset: A name from ``minimand_papers.data.registry``.
        samples: Training images.
        width: Channels of the first convolution; the second has twice as many, the hidden layer four times as many.
        kernel: The kernel's size in the first convolution; the second has two less.
        lam: The weight of the product of norms.
        networks: The largest number of subnetworks.
        restarts: Starts of each search for a new subnetwork.
        passes: Passes over the data of each descent and of each start of a search.
        batch: Images in a batch.
        rate: The rate of Adam at the start of a descent.
    """

    dataset: str = "cifar10"
    samples: int = 2000
    width: int = 8
    kernel: int = 5
    lam: float = 30.0
    networks: int = 6
    restarts: int = 2
    passes: int = 8
    batch: int = 50
    rate: float = 5e-3


def subnetwork(options: GrowAlexNetOptions, shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Two convolutions with max pooling, a hidden layer and the outputs; a bias in the first layer only.

    Local response normalisation and dropout of the original are left out: they are not homogeneous.
    """
    width, kernel = options.width, options.kernel
    features = nn.Sequential(
        nn.Conv2d(shape[0], width, kernel, padding=kernel // 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, kernel - 2, padding=kernel // 2 - 1, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    size = features(torch.zeros(1, *shape)).shape[1]
    head = [nn.Linear(size, 4 * width, bias=False), nn.ReLU(), nn.Linear(4 * width, classes, bias=False)]
    return nn.Sequential(*features, *head)


def parts(options: GrowAlexNetOptions) -> list[Part]:
    """The grown network and two controls."""
    return [Part(GROWN), Part(SINGLE), Part(RANDOM)]


def run(options: GrowAlexNetOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Grow, or descend from random subnetworks with as many passes over the data."""
    (train, test), classes = _splits(options, lab)
    shape = tuple(train[0].shape[1:])
    start = {GROWN: 0, SINGLE: 1, RANDOM: options.networks}[part]
    model = ParallelNetwork(
        lambda: subnetwork(options, shape, classes),
        options.lam,
        loss="cross_entropy",
        initial=start,
        max_networks=max(start, 1) if part != GROWN else options.networks,
        restarts=options.restarts,
        descent=options.passes * (1 if part == GROWN else options.networks),
        batch_size=options.batch,
        rate=options.rate,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*stopped before its certificate")
        model.fit(*train)
    for k, value in enumerate(model.history_):
        yield {"round": k, "objective": value}
    proof = model.certificate_
    assert proof is not None
    yield {
        "round": len(model.history_) - 1,
        "objective": model.history_[-1],
        "networks": len(model.subnetworks),
        "status": str(proof.status),
        "gap": 100 * proof.relative_gap,
        "polar": proof.polar_lower / options.lam,
        "bound": proof.polar_upper / options.lam,
        "train": accuracy_of(model, train),
        "test": accuracy_of(model, test),
    }


def _splits(options: GrowAlexNetOptions, lab: Lab) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """Training and test images, normalised, of 32 pixels in half the resolution; and the number of classes."""
    data = lab.load(options.dataset)
    order = torch.randperm(len(data.train), generator=lab.generator())[: options.samples]
    train = data.train.subset(order)
    normalize = Normalization.of(train)
    found = []
    for split in (train, data.test):
        images, labels = next(iter(lab.batches(split, len(split), train=False, normalize=normalize)))
        found.append((F.avg_pool2d(images, 2) if images.shape[-1] >= LARGE else images, labels))
    return found, len(data.classes)


def compare(results: Results[GrowAlexNetOptions]) -> list[Comparison]:
    """Accuracy, objective and number of subnetworks."""
    rows = [Comparison(f"{part}: test accuracy", None, results.final(part, "test"), "%") for part in ALL]
    for key, digits in (("objective", 1), ("networks", 0)):
        rows += [Comparison(f"{part}: {key}", None, results.final(part, key), "", digits) for part in ALL]
    rows += [Comparison(f"{GROWN}: steepest slope found / λ", None, results.final(GROWN, "polar"), "", 2)]
    return [*rows, Comparison(f"{GROWN}: proved bound on slopes / λ", None, results.final(GROWN, "bound"), "", 1)]


def plots(results: Results[GrowAlexNetOptions]) -> list[Plot]:
    """The objective as it grows."""
    title = "The objective as subnetworks are added"
    return [curves(results, [GROWN], key="objective", over="round", title=title, y="objective")]


def findings(results: Results[GrowAlexNetOptions]) -> Sequence[str | Difference]:
    """Objective and accuracy against the controls, and what the certificate says."""
    sentences: list[str | Difference] = []
    for other in (SINGLE, RANDOM):
        sentences += [
            difference(results, GROWN, other, "objective", unit="", higher=False, quantity="objective"),
            difference(results, GROWN, other, quantity="test accuracy"),
        ]
    gaps = results.final(GROWN, "gap")
    if gaps:
        sentences.append(
            f"The proved distance of the grown networks to the global minimum is at most {max(gaps):.1f} % of the "
            "objective: the bound on the polar of convolutional networks is a product of norms and loose."
        )
    return sentences


def claims(results: Results[GrowAlexNetOptions]) -> list[Claim]:
    """Global optimality of grown parallel networks, as far as the bound decides it."""
    text = "Theorem 2: parallel AlexNets, grown, end at the global minimum"
    return [certified_claim(results, text, (GROWN,), f"{results.options.samples:,} small images")]


experiment = Experiment(
    name="grow-alexnet",
    title="Parallel AlexNets, grown",
    source="[Vidal2018], Theorems 1 and 2, the picture of parallel AlexNets",
    about=(
        "Copies of a small AlexNet (two convolutions with max pooling, a hidden layer, ReLUs) are added one at a time "
        "under the cross-entropy and the product of the layers' norms, by Adam on mini-batches. The certificate bounds "
        "the distance to the global minimum over all numbers of copies. Controls: one copy, and as many random copies "
        "at once, each with as many passes over the data. Local response normalisation and dropout of the original are "
        "not homogeneous and left out; images of 32 pixels are averaged to 16. The slides have no numbers."
    ),
    presets={
        "smoke": Preset(
            GrowAlexNetOptions(
                "digits", samples=80, width=2, kernel=3, lam=0.5, networks=2, restarts=1, passes=10, rate=2e-2
            ),
            (0,),
            0.05,
        ),
        "laptop": Preset(GrowAlexNetOptions(), (0, 1, 2), 20),
        "paper": Preset(
            GrowAlexNetOptions(samples=45_000, width=32, networks=20, restarts=8, passes=40), (0, 1, 2), 9000
        ),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
    columns=("objective", "networks"),
)

"""Table 3 of "Deep Layers as Stochastic Solvers": a solver instead of AlexNet's first convolution."""

import dataclasses
from collections.abc import Iterator, Sequence

from minimand.solvers import ProxGD

from ...comparing import Difference, difference
from ...context import Lab
from ...drawing import bars, curves
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ...training import train
from ...zoo import AlexNet
from .._solvers import ImageOptions, Steps, fine_tuning_claim, solved

PAPER = {"start": {"cifar10": 77.30, "cifar100": 44.20}, "Prox-GD": {"cifar10": 78.51, "cifar100": 45.53}}
START, CONTROL, SOLVER = "AlexNet", "AlexNet fine-tuned", "AlexNet-Prox-GD"


@dataclasses.dataclass(frozen=True)
class SolversAlexNetOptions(ImageOptions):
    """AlexNet, and its first convolution replaced by Prox-GD and fine-tuned.

    Args:
        augment: Crop and flip at random.
        epochs: Epochs from scratch; the learning rate drops after 1/3 and 2/3 of them.
        finetune: Epochs of fine-tuning; the learning rate drops after half of them.
        width: A factor on all hidden widths.
        stride: Stride of the first convolution.
        iters: Iterations of the solver.
        steps: "ours", or "source": 1/L, renewed once an epoch, with the source's λ.
    """

    augment: bool = True
    epochs: int = 15
    finetune: int = 4
    width: float = 0.5
    stride: int = 4
    iters: int = 10
    steps: Steps = "ours"


def parts(options: SolversAlexNetOptions) -> list[Part]:
    """The network, then fine-tuned without and with the solver, for the same epochs."""
    return [Part(START), Part(CONTROL, (START,)), Part(SOLVER, (START,))]


def run(options: SolversAlexNetOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train, or fine-tune."""
    data = options.loaders(lab)
    model = AlexNet(data.classes, data.shape[0], width=options.width, stride=options.stride)
    if part == START:
        yield from train(lab, model, data, epochs=options.epochs)
        lab.keep("model", model.state_dict())
        return
    model.load_state_dict(lab.kept(START, "model", model.state_dict()))
    tuned = solved(model, {"features.0": ProxGD(options.iters)} if part == SOLVER else {}, options.steps)
    yield from train(lab, tuned, data, epochs=options.finetune, rates=(1e-3, 1e-4))


def compare(results: Results[SolversAlexNetOptions]) -> list[Comparison]:
    """Test accuracy beside the paper's."""
    numbers = {START: PAPER["start"], CONTROL: {}, SOLVER: PAPER["Prox-GD"]}
    notes = {CONTROL: "the control that the paper omits"}
    return [
        Comparison(part, results.options.paper(paper), results.final(part, "test"), "%", note=notes.get(part, ""))
        for part, paper in numbers.items()
    ]


def plots(results: Results[SolversAlexNetOptions]) -> list[Plot]:
    """Fine-tuning curves, and the table as bars."""
    title = "Validation accuracy while fine-tuning"
    return [
        curves(results, [CONTROL, SOLVER], key="validation", title=title, y="accuracy, %"),
        bars(compare(results), title="Table 3: AlexNet", y="test accuracy, %"),
    ]


def findings(results: Results[SolversAlexNetOptions]) -> Sequence[str | Difference]:
    """Differences between the methods."""
    return [
        difference(results, SOLVER, CONTROL),
        difference(results, SOLVER, START),
        difference(results, CONTROL, START),
    ]


def claims(results: Results[SolversAlexNetOptions]) -> list[Claim]:
    """Table 3: Prox-GD above the network without it, fine-tuned equally long."""
    listed = []
    for dataset, title in (("cifar10", "CIFAR-10"), ("cifar100", "CIFAR-100")):
        text = f"Table 3, {title}: Prox-GD as AlexNet's first convolution raises its accuracy"
        size = PAPER["Prox-GD"][dataset] - PAPER["start"][dataset]
        listed.append(fine_tuning_claim(results, text, (SOLVER, CONTROL), dataset, size))
    return listed


experiment = Experiment(
    name="solvers-alexnet",
    title="A solver instead of AlexNet's first convolution",
    source="[Bibi2019], Table 3",
    about=(
        "AlexNet for small images (first convolution 11 × 11 with padding 5, pools of 2, one fully connected "
        "layer) is trained. Its first convolution with ReLU is then replaced by the deterministic Prox-GD solver "
        "with the same parameters, and the network is fine-tuned. The control is the same network, fine-tuned for "
        "the same epochs without the solver. The source does not say whether its images are augmented, nor its batch; "
        "assumed are crops and mirror images, and 128 images. The paper preset has the source's step sizes."
    ),
    presets={
        "smoke": Preset(
            SolversAlexNetOptions("digits", 50, limit=100, enlarge=4, epochs=1, finetune=1, width=0.1, iters=2),
            (0,),
            0.1,
        ),
        "laptop": Preset(SolversAlexNetOptions(), (0,), 35),
        "paper": Preset(SolversAlexNetOptions(epochs=300, finetune=200, width=1.0, steps="source"), (0, 1, 2), 20_000),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
)

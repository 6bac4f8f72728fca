"""Table 4 of "Deep Layers as Stochastic Solvers": solvers instead of VGG16's fully connected blocks."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from minimand.nn import convert
from minimand.solvers import ProxGD, ProxSG, Solver

from ...comparing import Difference, difference
from ...context import Lab
from ...drawing import bars, curves
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ...training import train
from ...zoo import VGG16
from .._solvers import ImageOptions, Steps, chosen, fine_tuning_claim, trials

START, CONTROL, PLAIN = "VGG16", "VGG16 fine-tuned", "VGG16 fine-tuned without dropout"
BLOCKS = {"VGG16-Prox-SG-ND-D": (False, True), "VGG16-Prox-SG-D-D": (True, True), "VGG16-Prox-GD": (False, True)}
PAPER = {
    START: {"cifar10": 92.56, "cifar100": 70.27},
    "VGG16-Prox-SG-ND-D": {"cifar10": 92.44, "cifar100": 70.95},
    "VGG16-Prox-SG-D-D": {"cifar10": 92.57, "cifar100": 70.44},
    "VGG16-Prox-GD": {"cifar10": 92.80, "cifar100": 71.10},
}

PAPER_SPREAD = {
    "cifar10": {"VGG16-Prox-SG-ND-D": 0.028, "VGG16-Prox-SG-D-D": 0.029},
    "cifar100": {"VGG16-Prox-SG-ND-D": 0.042, "VGG16-Prox-SG-D-D": 0.077},
}


@dataclasses.dataclass(frozen=True)
class SolversVGGOptions(ImageOptions):
    """VGG16, and its fully connected blocks replaced by solvers and fine-tuned.

    Args:
        augment: Crop and flip at random.
        epochs: Epochs from scratch; the learning rate drops after 1/3 and 2/3 of them.
        finetune: Epochs of fine-tuning; the learning rate drops after half of them.
        width: A factor on all hidden widths.
        batch_norm: Whether batch normalisation follows the convolutions.
        iters: Iterations of the solvers.
        trials: Evaluations of a stochastic network that are averaged.
        steps: "ours", or "source": 1/L, renewed once an epoch, with the source's λ.
    """

    augment: bool = True
    epochs: int = 9
    finetune: int = 2
    width: float = 0.25
    batch_norm: bool = True
    iters: int = 30
    trials: int = 20
    steps: Steps = "ours"


def parts(options: SolversVGGOptions) -> list[Part]:
    """The network, then fine-tuned without and with the solvers, for the same epochs."""
    return [Part(START), *(Part(name, (START,)) for name in (CONTROL, PLAIN, *BLOCKS))]


def run(options: SolversVGGOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train, or fine-tune."""
    data = options.loaders(lab)
    dropout = (0.0, 0.0) if part == PLAIN else (0.5, 0.5)
    model = VGG16(data.classes, data.shape[0], width=options.width, dropout=dropout, batch_norm=options.batch_norm)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if part == START:
        yield from train(lab, model, data, epochs=options.epochs)
        lab.keep("model", model.state_dict())
        return
    model.load_state_dict(lab.kept(START, "model", model.state_dict()))
    stochastic = "Prox-SG" in part
    if part in BLOCKS:
        model = _converted(model, part, options)
    count = options.trials if stochastic else 1
    yield from train(lab, model, data, epochs=options.finetune, rates=(1e-3, 1e-4), trials=count)


def _converted(model: VGG16, part: str, options: SolversVGGOptions) -> VGG16:
    """The blocks as solvers; with Prox-GD the dropout layers stay, as in the paper."""
    solver: Solver = ProxSG(options.iters, tau=0.5) if "Prox-SG" in part else ProxGD(options.iters)
    names = [name for name, used in zip(("classifier.1", "classifier.4"), BLOCKS[part], strict=True) if used]
    rule = dict.fromkeys(names, chosen(solver, options.steps))
    return convert(model, rule, inplace=True)


def compare(results: Results[SolversVGGOptions]) -> list[Comparison]:
    """Test accuracy beside the paper's."""
    notes = {CONTROL: "the control that the paper omits", PLAIN: "a control: the dropout taken out"}
    notes |= {part: f"source ± {spread}" for part, spread in PAPER_SPREAD.get(results.options.dataset, {}).items()}
    return [
        Comparison(
            part,
            results.options.paper(PAPER.get(part, {})),
            results.final(part, "test"),
            "%",
            note=trials(results, part, notes.get(part, "")),
        )
        for part in (START, CONTROL, PLAIN, *BLOCKS)
    ]


def plots(results: Results[SolversVGGOptions]) -> list[Plot]:
    """Fine-tuning curves, and the table as bars."""
    title = "Validation accuracy while fine-tuning"
    return [
        curves(results, [CONTROL, PLAIN, *BLOCKS], key="validation", title=title, y="accuracy, %"),
        bars(compare(results), title="Table 4: VGG16", y="test accuracy, %"),
    ]


def findings(results: Results[SolversVGGOptions]) -> Sequence[str | Difference]:
    """Differences between the methods."""
    return [difference(results, name, other) for name in BLOCKS for other in (CONTROL, PLAIN)]


def claims(results: Results[SolversVGGOptions]) -> list[Claim]:
    """Table 4: the best solver of each dataset above the network without it, fine-tuned equally long."""
    listed = []
    for dataset, title in (("cifar10", "CIFAR-10"), ("cifar100", "CIFAR-100")):
        sizes = {part: PAPER[part][dataset] - PAPER[START][dataset] for part in BLOCKS}
        best = max(sizes, key=lambda part: sizes[part])
        text = f"Table 4, {title}: {best.removeprefix('VGG16-')} raises VGG16's accuracy"
        listed.append(fine_tuning_claim(results, text, (best, CONTROL), dataset, sizes[best]))
    return listed


experiment = Experiment(
    name="solvers-vgg",
    title="Solvers instead of VGG16's fully connected blocks",
    source="[Bibi2019], Table 4",
    about=(
        "VGG16 is trained with dropout ½ before its two hidden fully connected layers; the last (ND-D) or both (D-D) "
        "of these blocks are then replaced by Prox-SG with τ = n₁/2, or the last by Prox-GD, and the network is "
        "fine-tuned. The controls are the same network fine-tuned for the same epochs, with and without its dropout. "
        "The source does not say whether its images are augmented, nor its batch; assumed are crops and mirror images, "
        "and 128 images. The paper preset has the source's step sizes."
    ),
    presets={
        "smoke": Preset(
            SolversVGGOptions("digits", 50, limit=100, enlarge=4, epochs=1, finetune=1, width=0.05, iters=2, trials=2),
            (0,),
            0.1,
        ),
        "laptop": Preset(SolversVGGOptions(), (0,), 60),
        "paper": Preset(
            SolversVGGOptions(epochs=300, finetune=200, width=1.0, batch_norm=False, steps="source"), (0, 1, 2), 50_000
        ),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
)

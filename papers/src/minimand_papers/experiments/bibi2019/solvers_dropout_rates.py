"""Table 5 of "Deep Layers as Stochastic Solvers": dropout rates against sampling rates."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import nn

from minimand.errors import OptionError
from minimand.solvers import ProxSG

from ...claims import ACCURACY, combine, judge_bound, judge_gain, not_run, scale, signed, span
from ...comparing import Difference, difference, mean_std
from ...context import Lab
from ...data import registry
from ...drawing import COLORS, curves, figure, style
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ...training import Loaders, train
from ...zoo import VGG16, LeNet
from .._solvers import ImageOptions, Steps, solved, trials

# Baseline and Prox-SG with VGG16 on CIFAR-100.
PAPER = {0.0: (70.57, 70.87), 0.1: (70.56, 70.51), 0.5: (70.27, 70.95), 0.9: (68.34, 69.19), 0.95: (30.61, 67.42)}
METHODS = ("baseline", "Prox-SG")
CONTROL = {
    "lenet": "no dropout: the control",
    "vgg": "the control: dropout, of 0.5, only in the layer before",
}
# The last block with dropout, in both networks.
BLOCK = "classifier.4"


@dataclasses.dataclass(frozen=True)
class SolversDropoutRatesOptions(ImageOptions):
    """Dropout in the last block, at several rates; LeNet from scratch, VGG16 fine-tuned.

    Args:
        p: The dropout rates; Prox-SG samples a fraction 1 − p of the inputs.
        networks: lenet is trained from scratch; vgg is trained with dropout p first, and both the baseline and the
            solver are then fine-tuned from there, for the same epochs.
        epochs: Epochs of LeNet from scratch; the learning rate drops after 1/3 and 2/3 of them.
        start: Epochs of VGG16 from scratch, before it is fine-tuned.
        finetune: Epochs of fine-tuning; the learning rate drops after half of them.
        width: A factor on all hidden widths of VGG16.
        batch_norm: Whether VGG16 has batch normalisation.
        iters: Iterations of the solver in LeNet.
        finetune_iters: Iterations of the solver in VGG16.
        trials: Evaluations of a stochastic LeNet that are averaged.
        finetune_trials: Evaluations of a stochastic VGG16 that are averaged.
        steps: "ours", or "source": 1/L, renewed once an epoch, with the source's λ.
    """

    p: tuple[float, ...] = (0.0, 0.1, 0.5, 0.9, 0.95)
    networks: tuple[Literal["lenet", "vgg"], ...] = ("lenet", "vgg")
    epochs: int = 8
    start: int = 3
    finetune: int = 2
    width: float = 0.25
    batch_norm: bool = True
    iters: int = 10
    finetune_iters: int = 30
    trials: int = 20
    finetune_trials: int = 5
    steps: Steps = "ours"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 <= p < 1 for p in self.p):
            raise OptionError(f"a dropout rate p is in [0, 1), got {', '.join(map(str, self.p))}")


SMOKE = SolversDropoutRatesOptions(
    "digits",
    50,
    limit=100,
    enlarge=4,
    p=(0.0, 0.9),
    epochs=1,
    start=1,
    finetune=1,
    width=0.05,
    iters=2,
    finetune_iters=2,
    trials=2,
    finetune_trials=2,
    batch_norm=False,
)
PROTOCOL = SolversDropoutRatesOptions(
    "cifar100",
    augment=True,
    networks=("vgg",),
    start=300,
    finetune=200,
    width=1.0,
    batch_norm=False,
    finetune_trials=20,
    steps="source",
)


def parts(options: SolversDropoutRatesOptions) -> list[Part]:
    """Both methods at every rate; a fine-tuned network needs the one it starts from."""
    found = []
    for network in options.networks:
        for p in options.p:
            start = f"{network} p = {p} start"
            needs = (start,) if network == "vgg" else ()
            if needs:
                found.append(Part(start))
            found += [Part(f"{network} p = {p} {method}", needs) for method in METHODS]
    return found


def run(options: SolversDropoutRatesOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train from scratch, or fine-tune."""
    network, _, _, rate, method = part.split()
    data = options.loaders(lab)
    model = _model(options, network, data, float(rate))
    if method == "start":
        yield from train(lab, model, data, epochs=options.start)
        lab.keep("model", model.state_dict())
        return
    tuned = network == "vgg"
    if tuned:
        model.load_state_dict(lab.kept(f"{network} p = {rate} start", "model", model.state_dict()))
    if method == "Prox-SG":
        iters = options.finetune_iters if tuned else options.iters
        model = solved(model, {BLOCK: ProxSG(iters, tau=1 - float(rate))}, options.steps)
    rates = (1e-3, 1e-4) if tuned else (1e-2, 1e-3, 1e-4)
    count = options.finetune_trials if tuned else options.trials
    count = count if method == "Prox-SG" and float(rate) > 0 else 1
    epochs = options.finetune if tuned else options.epochs
    yield from train(lab, model, data, epochs=epochs, rates=rates, trials=count)


def _model(options: SolversDropoutRatesOptions, network: str, data: Loaders, p: float) -> nn.Module:
    channels, _, size = data.shape
    if network == "lenet":
        return LeNet(data.classes, channels, size, dropout=(0.0, p))
    net = VGG16(data.classes, channels, width=options.width, dropout=(0.5, p), batch_norm=options.batch_norm)
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def compare(results: Results[SolversDropoutRatesOptions]) -> list[Comparison]:
    """Test accuracy; the paper's numbers are of the full-width VGG16 on CIFAR-100."""
    rows = []
    for network in results.options.networks:
        for p in results.options.p:
            for place, method in enumerate(METHODS):
                paper = PAPER[p][place] if network == "vgg" and p in PAPER else None
                given = None if paper is None else results.options.paper({"cifar100": paper})
                values = results.final(f"{network} p = {p} {method}", "test")
                note = CONTROL[network] if p == 0 and method == "baseline" else ""
                if paper is not None and given is None:
                    note = "; ".join(filter(None, [note, f"source, full width on CIFAR-100: {paper}%"]))
                note = trials(results, f"{network} p = {p} {method}", note)
                rows.append(Comparison(f"{network}, p = {p}, {method}", given, values, "%", note=note))
    return rows


def plots(results: Results[SolversDropoutRatesOptions]) -> list[Plot]:
    """Accuracy over the rate for each network, and LeNet's learning curves."""
    drawn = [_over_rates(results, network) for network in results.options.networks]
    shown = [part for part in results.parts() if part.startswith("lenet") and float(part.split()[3]) >= 0.5]
    if shown:
        title = "LeNet: validation accuracy at high rates"
        drawn.append(curves(results, shown, key="validation", title=title, y="accuracy, %"))
    return drawn


def _over_rates(results: Results[SolversDropoutRatesOptions], network: str) -> Plot:
    canvas = figure()
    axes = canvas.subplots()
    sentences = []
    for color, method in zip(COLORS, METHODS, strict=False):
        values = {p: results.final(f"{network} p = {p} {method}", "test") for p in results.options.p}
        measured = {p: mean_std(found) for p, found in values.items() if found}
        if measured:
            spread = [0.0 if std != std else std for _, std in measured.values()]
            means = [mean for mean, _ in measured.values()]
            axes.errorbar(list(measured), means, spread, color=color, marker="o", capsize=3, label=method)
            sentences.append(f"{method}: " + ", ".join(f"{mean:.1f} at {p}" for p, (mean, _) in measured.items()))
    style(axes, "dropout rate p", "test accuracy, %", f"Table 5: {network}")
    if sentences:
        axes.legend(frameon=False)
    return Plot(f"Table 5: {network}", "; ".join(sentences) or "nothing measured yet", canvas)


def findings(results: Results[SolversDropoutRatesOptions]) -> Sequence[str | Difference]:
    """Prox-SG against the baseline and the control at each rate, and the number of rows with the paper's sign."""
    sentences: list[str | Difference] = []
    for network in results.options.networks:
        gaps = {p: results.paired(f"{network} p = {p} Prox-SG", f"{network} p = {p} baseline", "test") for p in PAPER}
        measured = {p: mean_std(gap)[0] for p, gap in gaps.items() if gap}
        alike = [p for p, gap in measured.items() if (gap > 0) == (PAPER[p][1] > PAPER[p][0])]
        if measured and network == "vgg":
            rest = ", ".join(f"{p:g}" for p in measured if p not in alike)
            missed = f", not for p = {rest}" if rest else ""
            sentences.append(
                f"{network}: the mean difference has the paper's sign in {len(alike)} of {len(measured)} rows{missed}."
            )
        for p in results.options.p:
            sentences.append(difference(results, f"{network} p = {p} Prox-SG", f"{network} p = {p} baseline"))
        if 0.0 in results.options.p:
            sentences += [
                difference(results, f"{network} p = {p} Prox-SG", f"{network} p = 0.0 baseline")
                for p in results.options.p
                if p
            ]
    return sentences


def claims(results: Results[SolversDropoutRatesOptions]) -> list[Claim]:
    """Table 5, for VGG16: gains at each rate, the collapse at the highest rate, and what the solver loses there."""
    at_source = results.options.dataset == "cifar100"
    data = registry[results.options.dataset].title
    epochs = f"{results.options.start} + {results.options.finetune} epochs"
    words = scale(results, data, epochs, f"width × {results.options.width:g}")
    gains = {p: results.paired(f"vgg p = {p} Prox-SG", f"vgg p = {p} baseline", "test") for p in PAPER}
    sizes = {p: solver - baseline for p, (baseline, solver) in PAPER.items()}
    claimed = [p for p, size in sizes.items() if size > 0]
    means = [mean_std(gains[p])[0] for p in claimed if gains[p]]
    loss = [-gap for gap in results.paired("vgg p = 0.95 Prox-SG", "vgg p = 0.0 Prox-SG", "test")]
    allowed = PAPER[0.0][1] - PAPER[0.95][1]
    found = [
        Claim(
            f"Table 5: Prox-SG beats dropout at the rates {', '.join(f'{p:g}' for p in claimed)}",
            span([sizes[p] for p in claimed], " points", 2, plus=True),
            span(means, " points", 2, plus=True),
            words,
            combine([judge_gain(gains[p], sizes[p], single=ACCURACY) for p in claimed]),
        ),
        Claim(
            "Table 5: at p = 0.95 dropout collapses and Prox-SG does not",
            f"{sizes[0.95]:+.2f} points",
            signed(gains[0.95]),
            words,
            judge_gain(gains[0.95], sizes[0.95], single=ACCURACY),
        ),
        Claim(
            "Table 5: Prox-SG loses little from p = 0 to p = 0.95",
            f"−{allowed:.2f} points",
            signed([-value for value in loss]),
            words,
            judge_bound(loss, 2 * allowed),
        ),
    ]
    paper = f"{PAPER[0.95][0]} → {PAPER[0.95][1]} % at p = 0.95"
    missing = not_run("Table 5 on the source's data, CIFAR-100", paper, "no CIFAR-100 data")
    return found if at_source else [*found, missing]


experiment = Experiment(
    name="solvers-dropout-rates",
    title="Dropout rate against sampling rate",
    source="[Bibi2019], Table 5",
    about=(
        "Dropout at rate p before the last hidden layer, against Prox-SG that samples a fraction 1 − p of the same "
        "inputs in each iteration. The paper fine-tunes VGG16 on CIFAR-100. Here the baseline of VGG16 is "
        "fine-tuned for the same epochs as the solver; the paper does not say whether its baseline is. LeNet, "
        "trained from scratch, is an addition of ours. The network with p = 0 is the control of every row. VGG16 "
        "keeps dropout 0.5 before its first hidden layer at every p. The source does not say whether its images are "
        "augmented, nor its batch; the paper preset assumes crops and mirror images, and 128 images, and has the "
        "source's step sizes."
    ),
    presets={
        "smoke": Preset(SMOKE, (0,), 0.2),
        "laptop": Preset(SolversDropoutRatesOptions(), (0, 1, 2), 280),
        "paper": Preset(PROTOCOL, (0, 1, 2), 60_000),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
)

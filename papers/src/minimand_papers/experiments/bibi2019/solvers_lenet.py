"""Table 2 of "Deep Layers as Stochastic Solvers": solvers instead of LeNet's fully connected blocks."""

import dataclasses
from collections.abc import Iterator, Sequence

from torch import nn

from minimand.errors import OptionError
from minimand.nn import convert
from minimand.solvers import ProxGD, ProxSG

from ...claims import ACCURACY, combine, judge_gain, scale, signed, span
from ...comparing import Difference, difference, mean_std
from ...context import Lab
from ...drawing import bars, curves
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ...training import train
from ...zoo import LeNet
from .._solvers import ImageOptions, Steps, chosen, from_zero, trials

VARIANTS = {"D-D": (1, 1), "D-ND": (1, 0), "ND-D": (0, 1)}
PAPER = {"D-D": (64.39, 72.86), "D-ND": (71.72, 75.20), "ND-D": (68.54, 76.23)}
PAPER_SPREAD = {"D-D": 0.177, "D-ND": 0.205, "ND-D": 0.206}
BLOCKS = ("classifier.1", "classifier.4")
STEPS = {"source": "the source's steps", "ours": "our steps"}
CONTROL = "no dropout"
DETERMINISTIC = "no dropout, Prox-GD"


@dataclasses.dataclass(frozen=True)
class SolversLeNetOptions(ImageOptions):
    """LeNet with dropout, and with solvers, trained from scratch.

    Args:
        epochs: Epochs; the learning rate drops after 1/3 and 2/3 of them.
        rates: The three learning rates.
        p: The dropout rate; the solvers sample a fraction 1 − p of the inputs.
        iters: Iterations of the solvers.
        trials: Evaluations of a stochastic network that are averaged.
        steps: The step sizes of Prox-SG: "ours" are safe for its samples; "source" begins with 1/L, L renewed once an
            epoch, and decays exponentially.
        both: Dropout rates at which D-D runs with both kinds of steps.
    """

    epochs: int = 12
    rates: tuple[float, ...] = (1e-2, 1e-3, 1e-4)
    p: float = 0.5
    iters: int = 10
    trials: int = 20
    steps: Steps = "ours"
    both: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 <= p < 1 for p in (self.p, *self.both)):
            raise OptionError(f"a dropout rate p is in [0, 1), got {', '.join(map(str, (self.p, *self.both)))}")


@dataclasses.dataclass(frozen=True)
class LeNetRow:
    """A part of the experiment: where dropout is, at which rate, and what replaces it."""

    variant: str
    method: str
    p: float
    steps: str

    @classmethod
    def of(cls, options: SolversLeNetOptions, part: str) -> "LeNetRow":
        """The row of a part's name."""
        main, *others = part.split("; ")
        variant, _, method = main.rpartition(" ")
        found = cls(variant, method, options.p, options.steps)
        for other in others:
            if other.startswith("p = "):
                found = dataclasses.replace(found, p=float(other[4:]))
            else:
                found = dataclasses.replace(found, steps=next(kind for kind, words in STEPS.items() if words == other))
        return found


def parts(options: SolversLeNetOptions) -> list[Part]:
    """Both columns of the table, two controls that the paper does not have, and D-D with both kinds of steps.

    The two controls come after the first row, so that a run that is not complete has a comparison.
    """
    first, *rest = [[f"{variant} {method}" for method in ("baseline", "Prox-SG")] for variant in VARIANTS]
    return [Part(name) for row in (first, controls(), *rest, others(options)) for name in row]


def others(options: SolversLeNetOptions) -> list[str]:
    """D-D at the rates ``options.both``, with both kinds of steps, as far as it is not in the table."""
    found = []
    for p in options.both:
        rate = "" if p == options.p else f"; p = {p:g}"
        found += [f"D-D baseline{rate}"] if rate else []
        found += [f"D-D Prox-SG{rate}; {words}" for steps, words in STEPS.items() if rate or steps != options.steps]
    return found


def run(options: SolversLeNetOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train one network from scratch."""
    data = options.loaders(lab)
    model = network(options, part, data.classes, data.shape)
    count = options.trials if LeNetRow.of(options, part).method == "Prox-SG" else 1
    yield from train(lab, model, data, epochs=options.epochs, rates=options.rates, trials=count)


def network(options: SolversLeNetOptions, part: str, classes: int, shape: tuple[int, ...]) -> nn.Module:
    """LeNet with the dropout of a part, or with solvers as its blocks."""
    row = LeNetRow.of(options, part)
    first, second = VARIANTS.get(row.variant, (0, 0))
    model = LeNet(classes, shape[0], shape[-1], dropout=(first * row.p, second * row.p))
    if row.method == "Prox-SG":
        sampled = ProxSG(options.iters, tau=1 - row.p)
        rule = chosen(sampled, "source" if row.steps == "source" else "ours")
    else:
        rule = from_zero(ProxGD(options.iters))
    replaced = {"Prox-SG": (first, second), "Prox-GD": (1, 1)}.get(row.method, (0, 0))
    rules = {block: rule for block, used in zip(BLOCKS, replaced, strict=True) if used}
    return convert(model, rules, inplace=True) if rules else model


def compare(results: Results[SolversLeNetOptions]) -> list[Comparison]:
    """Test accuracy beside the paper's."""
    rows = []
    for variant, numbers in PAPER.items():
        for method, number in zip(("baseline", "Prox-SG"), numbers, strict=True):
            part = f"{variant} {method}"
            paper = results.options.paper({"cifar10": number})
            spread = f"source ± {PAPER_SPREAD[variant]}" if paper is not None and method == "Prox-SG" else ""
            note = trials(results, part, spread)
            rows.append(Comparison(f"LeNet-{part}", paper, results.final(part, "test"), "%", note=note))
    note = "a control that the paper does not have"
    rows += [Comparison(f"LeNet {part}", None, results.final(part, "test"), "%", note=note) for part in controls()]
    for part in others(results.options):
        rows.append(Comparison(f"LeNet-{part}", None, results.final(part, "test"), "%", note=trials(results, part)))
    return rows


def controls() -> tuple[str, str]:
    """The parts that are not in the table."""
    return CONTROL, DETERMINISTIC


def plots(results: Results[SolversLeNetOptions]) -> list[Plot]:
    """Learning curves, and the table as bars."""
    return [
        curves(results, key="validation", title="Validation accuracy", y="accuracy, %"),
        bars(compare(results), title="Table 2: LeNet", y="test accuracy, %"),
    ]


def findings(results: Results[SolversLeNetOptions]) -> Sequence[str | Difference]:
    """Differences between the methods."""
    sentences = [difference(results, f"{variant} Prox-SG", f"{variant} baseline") for variant in VARIANTS]
    sentences += [difference(results, f"{variant} Prox-SG", CONTROL) for variant in VARIANTS]
    sentences += [difference(results, f"{variant} Prox-SG", DETERMINISTIC) for variant in VARIANTS]
    sentences.append(difference(results, DETERMINISTIC, CONTROL))
    for part in others(results.options):
        rate = part.partition("; p = ")[2].partition(";")[0]
        if "Prox-SG" in part:
            sentences.append(difference(results, part, f"D-D baseline{f'; p = {rate}' if rate else ''}"))
    return sentences


def claims(results: Results[SolversLeNetOptions]) -> list[Claim]:
    """Table 2: Prox-SG above the baseline with dropout."""
    gains = {variant: results.paired(f"{variant} Prox-SG", f"{variant} baseline", "test") for variant in VARIANTS}
    over = [mean_std(found)[0] for v in VARIANTS if (found := results.paired(f"{v} Prox-SG", CONTROL, "test"))]
    measured = ", ".join(signed(found, "") for found in gains.values()) + " points"
    measured += f"; over the network without dropout {span(over, ' points', plus=True)}" if over else ""
    sizes = {variant: solver - baseline for variant, (baseline, solver) in PAPER.items()}
    return [
        Claim(
            "Table 2: Prox-SG instead of dropout raises LeNet's accuracy (D-D, D-ND, ND-D)",
            ", ".join(f"{size:+.2f}" for size in sizes.values()) + " points",
            measured,
            scale(results, "CIFAR-10", f"{results.options.epochs} of 300 epochs"),
            combine([judge_gain(gains[variant], sizes[variant], single=ACCURACY) for variant in VARIANTS]),
        )
    ]


experiment = Experiment(
    name="solvers-lenet",
    title="Solvers instead of LeNet's fully connected blocks",
    source="[Bibi2019], Table 2",
    about=(
        "LeNet-5 with dropout before one or both of its hidden fully connected layers, trained from scratch. In "
        "“Prox-SG” the blocks dropout → linear → ReLU are replaced by iterations of τ-nice Prox-SG with τ = (1 − "
        "p)·n₁, evaluated stochastically. Two controls are ours: the network without dropout, plain and with the "
        "deterministic Prox-GD in both blocks. The source does not say which LeNet it has, nor whether its images are "
        "augmented, nor its batch; assumed are LeCun's 6 and 16 maps with 120 and 84 units, no augmentation, and 128 "
        "images. The paper preset has the source's step sizes, and D-D with ours beside them at p = 0.5 and 0.95."
    ),
    presets={
        "smoke": Preset(
            SolversLeNetOptions("digits", batch=50, limit=200, enlarge=4, epochs=2, iters=3, trials=3), (0, 1), 0.2
        ),
        "laptop": Preset(SolversLeNetOptions(), (0, 1, 2), 110),
        "paper": Preset(SolversLeNetOptions(epochs=300, steps="source", both=(0.5, 0.95)), (0, 1, 2), 1400),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
)

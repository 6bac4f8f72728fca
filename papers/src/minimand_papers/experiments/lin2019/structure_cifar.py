"""The CIFAR table of "Optimization and Deep Neural Networks": HB-Net, AGD-Net and DMRNet against their baselines."""

import dataclasses
from collections.abc import Iterator, Sequence

from ...claims import ACCURACY, combine, judge_gain, not_run, scale, span
from ...comparing import Difference, difference, mean_std
from ...context import Lab
from ...data import registry
from ...drawing import curves, dots
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._structure import StructureOptions, error_row, network, trained

#: Error in per cent on CIFAR-10, CIFAR-100, CIFAR-10 (+), CIFAR-100 (+).
PAPER = {
    "ResNet (n = 9)": (10.05, 39.65, 5.32, 26.03),
    "HB-Net (n = 9)": (10.17, 38.52, 5.46, 26.0),
    "ResNet (n = 18)": (9.17, 38.13, 5.06, 24.71),
    "HB-Net (n = 18)": (8.66, 36.4, 5.04, 23.93),
    "DenseNet (k = 12, L = 40)": (7.0, 27.55, 5.24, 24.42),
    "AGD-Net (k = 12, L = 40)": (6.44, 26.33, 5.2, 24.87),
    "DenseNet (k = 12, L = 52)": (6.05, 26.3, 5.09, 24.33),
    "AGD-Net (k = 12, L = 52)": (5.75, 24.92, 4.94, 23.84),
}
COLUMNS = {("cifar10", False): 0, ("cifar100", False): 1, ("cifar10", True): 2, ("cifar100", True): 3}
RESIDUAL, DENSE = ("ResNet", "HB-Net", "DMRNet"), ("DenseNet", "AGD-Net")
AUGMENTED = ", augmented"
PAIRS = (("HB-Net", "ResNet"), ("DMRNet", "ResNet"), ("AGD-Net", "DenseNet"))


@dataclasses.dataclass(frozen=True)
class StructureCIFAROptions(StructureOptions):
    """The table at a chosen scale.

    Args:
        augment: Run every network without and with augmentation; False: only without.
        blocks: n of the residual networks, which have 6n + 2 layers. Momentum needs two updates per stage, so n > 1.
        dense: Growth and depth of the dense networks.
        dropout: Dropout rate of the dense networks without augmentation; Huang et al. have 0.2.
    """

    augment: bool = True
    blocks: tuple[int, ...] = (2,)
    dense: tuple[tuple[int, int], ...] = ((14, 16),)
    dropout: float = 0.0

    @property
    def columns(self) -> tuple[bool, ...]:
        """Without augmentation, and with it."""
        return (False, True) if self.augment else (False,)


def _rows(options: StructureCIFAROptions) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every network by the label of its row."""
    rows: dict[str, tuple[str, tuple[int, ...]]] = {}
    for n in options.blocks:
        rows |= {f"{family} (n = {n})": (family, (n,)) for family in RESIDUAL}
    for growth, depth in options.dense:
        rows |= {f"{family} (k = {growth}, L = {depth})": (family, (growth, depth)) for family in DENSE}
    return rows


def _part(label: str, augmented: bool) -> str:
    return label + AUGMENTED if augmented else label


def parts(options: StructureCIFAROptions) -> list[Part]:
    """Every row, without and with augmentation."""
    return [Part(_part(label, augmented)) for augmented in options.columns for label in _rows(options)]


def run(options: StructureCIFAROptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train one network."""
    label, augmented = part.removesuffix(AUGMENTED), part.endswith(AUGMENTED)
    family, size = _rows(options)[label]
    data = dataclasses.replace(options, augment=augmented).loaders(lab)
    model = network(family, size, data, options.width, 0.0 if augmented else options.dropout)
    yield from trained(options, lab, data, model)


def _paper(options: StructureCIFAROptions, label: str, augmented: bool) -> float | None:
    column = COLUMNS.get((options.dataset, augmented))
    return PAPER[label][column] if label in PAPER and column is not None else None


def compare(results: Results[StructureCIFAROptions]) -> list[Comparison]:
    """Errors beside the paper's."""
    options, rows = results.options, []
    for augmented in options.columns:
        for label in _rows(options):
            part = _part(label, augmented)
            rows.append(error_row(results, part, part, _paper(options, label, augmented)))
    return rows


def plots(results: Results[StructureCIFAROptions]) -> list[Plot]:
    """Learning curves without and with augmentation, and the table as dots."""
    options, drawn = results.options, []
    table: dict[str, dict[str, Sequence[float]]] = {label: {} for label in _rows(options)}
    for augmented in options.columns:
        parts = [_part(label, augmented) for label in table]
        title = "Validation accuracy" + (AUGMENTED if augmented else "")
        drawn.append(curves(results, parts, key="validation", title=title, y="accuracy, %"))
        series = "augmented" if augmented else "not augmented"
        for label, row in table.items():
            row[series] = results.final(_part(label, augmented), "error")
            paper = _paper(options, label, augmented)
            row[f"[Lin2019], {series}"] = [] if paper is None else [paper]
    return [*drawn, dots(table, title="Errors", x="test error, %")]


def findings(results: Results[StructureCIFAROptions]) -> Sequence[str | Difference]:
    """Each algorithm against the baseline that it contains."""
    sentences = []
    for augmented in results.options.columns:
        rows = _rows(results.options)
        for label, (family, size) in rows.items():
            for ours, other in PAIRS:
                if family == ours:
                    rival = next(name for name, kind in rows.items() if kind == (other, size))
                    pair = _part(label, augmented), _part(rival, augmented)
                    sentences.append(difference(results, *pair, "error", higher=False))
    return sentences


def claims(results: Results[StructureCIFAROptions]) -> list[Claim]:
    """HB-Net below ResNet and AGD-Net below DenseNet in test error, by dataset."""
    options, found = results.options, []
    words = scale(
        results,
        f"{options.limit or 45_000:,} {registry[options.dataset].title} images",
        f"{options.epochs} epochs",
        f"width × {options.width:g}",
    )
    for ours, other in (("HB-Net", "ResNet"), ("AGD-Net", "DenseNet")):
        gains, sizes = _gains(results, ours, other), _sizes(options.dataset, ours, other)
        size = sum(sizes) / len(sizes) if sizes else None
        found.append(
            Claim(
                f"CIFAR table, {registry[options.dataset].title}: {ours} has a lower error than {other}",
                span([-size for size in sizes], " points", 2, plus=True),
                span([-mean_std(values)[0] for values in gains if values], " points", 2, plus=True),
                words,
                combine([judge_gain(values, size, single=ACCURACY) for values in gains]),
            )
        )
    if options.dataset == "cifar10":
        sizes = [-size for pair in PAIRS if pair[0] != "DMRNet" for size in _sizes("cifar100", *pair)]
        text = "CIFAR table, CIFAR-100: HB-Net and AGD-Net have lower errors than ResNet and DenseNet"
        found.append(not_run(text, span(sizes, " points", 2, plus=True), "no CIFAR-100 data"))
    return found


def _gains(results: Results[StructureCIFAROptions], ours: str, other: str) -> list[list[float]]:
    """By how much the error of one family is lower, for each network and column."""
    found, rows = [], _rows(results.options)
    for augmented in results.options.columns:
        for label, (family, size) in rows.items():
            if family == ours:
                rival = next(name for name, kind in rows.items() if kind == (other, size))
                gaps = results.paired(_part(label, augmented), _part(rival, augmented), "error")
                found.append([-gap for gap in gaps])
    return found


def _sizes(dataset: str, ours: str, other: str) -> list[float]:
    """By how much the error is lower in the source's table, cell by cell."""
    labels = [label for label in PAPER if label.startswith(ours)]
    columns = [column for (name, _), column in COLUMNS.items() if name == dataset]
    return [PAPER[label.replace(ours, other)][column] - PAPER[label][column] for label in labels for column in columns]


_SMALL = StructureCIFAROptions(
    "digits", batch=50, augment=False, limit=100, enlarge=2, width=0.25, epochs=1, dense=((4, 10),), peak=0.05
)
_LAPTOP = StructureCIFAROptions(batch=64, limit=8_000, width=0.5, epochs=5, dense=((13, 10),))
experiment = Experiment(
    name="structure-cifar",
    title="Networks of faster algorithms",
    source="[Lin2019], the CIFAR table",
    about=(
        "ResNet is the heavy ball with β₁ = 1, β₂ = 0; HB-Net learns both coefficients (eq. 16). DenseNet is "
        "Nesterov's method in all past terms with α = 1, β = 0; AGD-Net learns β (eq. 18), except for the input of "
        "a stage, which has other channels. DMRNet is the relaxed ADMM (eq. 20) at ½, narrowed to ResNet's number "
        "of parameters. HB-Net and AGD-Net start as the function of their baseline; all have the same blocks, "
        "schedule and seeds. Momentum restarts where the map is halved, so β₂ matters only with two blocks per "
        "stage: n = 2 is the smallest HB-Net. The coefficients have no weight decay. The laptop preset has half "
        "the width, 8,000 images and 5 epochs, with numbers of parameters that agree to four per cent. The paper "
        "preset has the dropout of 0.2 of Huang et al. in dense networks without augmentation. In [Lin2019] itself "
        "HB-Net loses in two of eight cells and AGD-Net in one."
    ),
    presets={
        "smoke": Preset(_SMALL, (0, 1), 0.1),
        "laptop": Preset(_LAPTOP, (0, 1, 2, 3, 4), 130),
        "paper": Preset(
            StructureCIFAROptions(
                epochs=200,
                schedule="paper",
                decay=1e-4,
                blocks=(9, 18),
                dense=((12, 40), (12, 52)),
                dropout=0.2,
            ),
            (0, 1, 2),
            600_000,
        ),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
)

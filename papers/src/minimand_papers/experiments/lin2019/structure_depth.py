"""Does a faster algorithm need fewer layers? The hypothesis of "Optimization and Deep Neural Networks"."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from ...claims import ACCURACY, combine, judge_gain, scale, span
from ...comparing import Difference, difference, mean_std
from ...context import Lab
from ...drawing import COLORS, figure, style
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._structure import StructureOptions, network, trained

FAMILIES = ("ResNet", "HB-Net", "Nesterov")


@dataclasses.dataclass(frozen=True)
class StructureDepthOptions(StructureOptions):
    """Residual networks of growing depth under three algorithms.

    Args:
        blocks: The values of n; a network has 6n + 2 layers. Momentum needs two updates per stage, so n > 1.
    """

    blocks: tuple[int, ...] = (2, 3, 5)


def _part(family: str, n: int) -> str:
    return f"{family}, {6 * n + 2} layers"


def parts(options: StructureDepthOptions) -> list[Part]:
    """Every algorithm at every depth."""
    return [Part(_part(family, n)) for n in options.blocks for family in FAMILIES]


def run(options: StructureDepthOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train one network."""
    family, n = next((family, n) for family in FAMILIES for n in options.blocks if _part(family, n) == part)
    data = options.loaders(lab)
    yield from trained(options, lab, data, network(family, (n,), data, options.width))


def compare(results: Results[StructureDepthOptions]) -> list[Comparison]:
    """Errors by depth; [Lin2019] has no such table."""
    rows = []
    for n in results.options.blocks:
        for family in FAMILIES:
            part = _part(family, n)
            sizes = results.final(part, "parameters")
            note = f"{sizes[0]:,.0f} parameters" if sizes else ""
            rows.append(Comparison(part, None, results.final(part, "error"), "%", note=note))
    return rows


def plots(results: Results[StructureDepthOptions]) -> list[Plot]:
    """Error over depth, with the spread over seeds."""
    drawn = figure()
    axes = drawn.subplots()
    sentences = []
    for family, color, marker in zip(FAMILIES, COLORS, "os^", strict=False):
        depths, means, spreads = [], [], []
        for n in results.options.blocks:
            values = results.final(_part(family, n), "error")
            if values:
                mean, spread = mean_std(values)
                depths.append(6 * n + 2)
                means.append(mean)
                spreads.append(0.0 if spread != spread else spread)
                sentences.append(f"{_part(family, n)} {mean:.2f}%")
        if depths:
            axes.errorbar(depths, means, spreads, color=color, marker=marker, capsize=3, label=family)
    axes.set_xticks([6 * n + 2 for n in results.options.blocks])
    style(axes, "layers", "test error, %", "Error over depth")
    if sentences:
        axes.legend(frameon=False)
    return [Plot("Error over depth", f"Test error over depth: {', '.join(sentences) or 'nothing measured yet'}", drawn)]


def findings(results: Results[StructureDepthOptions]) -> Sequence[str | Difference]:
    """ResNets of different depth; algorithms against ResNet at equal depth, and against a deeper and better ResNet."""
    sentences: list[str | Difference] = []
    gained: dict[int, bool] = {}
    blocks = sorted(results.options.blocks)
    for n, deeper in itertools.pairwise(blocks):
        shallow, deep = (results.final(_part("ResNet", m), "error") for m in (n, deeper))
        if shallow and deep:
            gained[n] = mean_std(deep)[0] < mean_std(shallow)[0]
        sentences.append(difference(results, _part("ResNet", deeper), _part("ResNet", n), "error", higher=False))
    if gained and not any(gained.values()):
        sentences.append(
            "No deeper ResNet has a lower mean error, so whether an algorithm saves layers cannot be seen here."
        )
    for family in FAMILIES[1:]:
        for n, following in zip(blocks, [*blocks[1:], None], strict=True):
            sentences.append(difference(results, _part(family, n), _part("ResNet", n), "error", higher=False))
            if following is not None and gained.get(n):
                sentences.append(
                    difference(results, _part(family, n), _part("ResNet", following), "error", higher=False)
                )
    return sentences


def claims(results: Results[StructureDepthOptions]) -> list[Claim]:
    """At equal depth, a faster algorithm has a lower error."""
    pairs = [(_part(family, n), _part("ResNet", n)) for family in FAMILIES[1:] for n in results.options.blocks]
    gains = [[-gap for gap in results.paired(*pair, "error")] for pair in pairs]
    return [
        Claim(
            "Hypothesis: faster algorithms compute features in fewer layers (HB-Net, Nesterov, three depths)",
            "–",
            f"error {span([-mean_std(values)[0] for values in gains if values], ' points', plus=True)} against ResNet",
            scale(results, f"{results.options.limit or 45_000:,} CIFAR-10 images", f"{results.options.epochs} epochs"),
            combine([judge_gain(values, single=ACCURACY) for values in gains]),
        )
    ]


_SMALL = StructureDepthOptions("digits", batch=50, limit=100, enlarge=2, width=0.25, epochs=1, blocks=(2, 3), peak=0.05)
experiment = Experiment(
    name="structure-depth",
    title="Error over depth under three algorithms",
    source="[Lin2019], the hypothesis of its structure design part",
    about=(
        "[Lin2019] supposes that a network of a faster algorithm computes features in fewer layers. Residual networks "
        "of 6n + 2 layers are trained as they are, as heavy-ball networks (16), and in Nesterov's two-term form, in "
        "which every block is evaluated at β₁x + β₂x₋; all three start as the same function, and the coefficients are "
        "learned without weight decay. Momentum restarts where the map is halved, and with one block a stage the "
        "heavy ball has none, so depth begins at n = 2. The claim would show as an error at n that a ResNet reaches "
        "only at a larger n. The laptop preset has half the width, 8,000 images and 5 epochs."
    ),
    presets={
        "smoke": Preset(_SMALL, (0,), 0.1),
        "laptop": Preset(StructureDepthOptions(batch=64, limit=8_000, width=0.5, epochs=5), (0, 1, 2, 3, 4), 95),
        "paper": Preset(
            StructureDepthOptions(epochs=200, schedule="paper", decay=1e-4, blocks=(2, 3, 9, 18)), (0, 1, 2), 400_000
        ),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
)

"""Dropout training equalises the terms of a factorisation."""

import dataclasses
from collections.abc import Iterator, Sequence

from minimand.factor import DropoutFactorization
from minimand.solvers.steps import Harmonic

from ...claims import combine, judge_bound, judge_gain, scale
from ...comparing import mean_std
from ...context import Lab
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results, Verdict
from ._dropout import MatrixOptions, followed, norm_plot

SAMPLED, EXPECTED, CONTROL = "dropout", "dropout's expectation", "no dropout"


@dataclasses.dataclass(frozen=True)
class DropoutEqualizationOptions(MatrixOptions):
    """A Gaussian matrix and two sizes.

    Args:
        sizes: Numbers of terms.
        p: The drop rate.
        iterations: Iterations of every method.
        horizon: The number of iterations after which the step of dropout has halved; it falls like 1/k.
    """

    rows: int = 120
    columns: int = 80
    sizes: tuple[int, ...] = (20, 80)
    p: float = 0.5
    iterations: int = 3000
    horizon: float = 30.0


def parts(options: DropoutEqualizationOptions) -> list[Part]:
    """For every size dropout, descent on its expectation, and the same descent without dropout as the control."""
    return [Part(f"{name}, r = {size}") for name in (SAMPLED, EXPECTED, CONTROL) for size in options.sizes]


def run(options: DropoutEqualizationOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """One factorisation."""
    method, _, size = part.partition(", r = ")
    model = DropoutFactorization(
        int(size),
        0.0 if method == CONTROL else options.p,
        method="dropout" if method == SAMPLED else "gradient",
        max_iter=options.iterations,
        tol=0.0,
        # The noise of a sampled step spreads the norms again: it must shrink for their equality to show.
        decay=Harmonic(options.horizon) if method == SAMPLED else None,
        random_state=lab.seed,
    )
    yield from followed(options.draw(lab), model)


def compare(results: Results[DropoutEqualizationOptions]) -> list[Comparison]:
    """The spread of the terms' norms."""
    return [
        Comparison(
            f"{part.name}: spread of the norms over their mean", None, results.final(part.name, "unequal"), "", 4
        )
        for part in parts(results.options)
    ]


def plots(results: Results[DropoutEqualizationOptions]) -> list[Plot]:
    """Norms over the iterations."""
    return [norm_plot(results, [part.name for part in parts(results.options)], "Norms of the terms")]


def findings(results: Results[DropoutEqualizationOptions]) -> Sequence[str]:
    """The spread of the norms after each method, and whether sampling noise hides the effect."""
    sentences = []
    for size in results.options.sizes:
        ours, expected, control = (
            results.final(f"{name}, r = {size}", "unequal") for name in (SAMPLED, EXPECTED, CONTROL)
        )
        if ours and expected and control:
            sentences.append(
                f"With {size} terms the norms spread by at most {100 * max(ours):.1f}% of their mean after dropout "
                f"and {100 * max(expected):.1g}% after descent on its expectation, by at least "
                f"{100 * min(control):.1f}% without."
            )
            if max(ours) >= min(control):
                sentences.append(f"With {size} terms the noise of sampling hides the effect.")
    return sentences


def claims(results: Results[DropoutEqualizationOptions]) -> list[Claim]:
    """Dropout makes the norms of all terms equal."""
    cells: list[Verdict] = []
    shown = []
    for size in results.options.sizes:
        ours, expected, control = (f"{name}, r = {size}" for name in (SAMPLED, EXPECTED, CONTROL))
        cells.append(judge_gain([-gap for gap in results.paired(ours, control, "unequal")]))
        cells.append(judge_bound(results.final(expected, "unequal"), 1e-3))
        spreads = [[100 * value for value in results.final(part, "unequal")] for part in (ours, control)]
        if all(spreads):
            shown.append(f"{mean_std(spreads[0])[0]:.1f} % against {mean_std(spreads[1])[0]:.1f} % (r = {size})")
    return [
        Claim(
            "Implicit bias: dropout equalises the norms of the terms",
            "equal norms",
            f"spread with and without dropout: {', '.join(shown)}" if shown else "–",
            scale(results, f"{results.options.iterations:,} iterations"),
            combine(cells),
        )
    ]


experiment = Experiment(
    name="dropout-equalization",
    title="Dropout equalises the terms of a factorisation",
    source="[Vidal2018], On the Implicit Bias of Dropout, Synthetic Experiments",
    about=(
        "All terms of a dropout optimum have the same norm. A 120 × 80 matrix is factorised with 20 and 80 terms "
        "by sampled dropout with a step that falls like 1/k, and by descent on its expectation; the norms of the "
        "terms are recorded. The control is the same descent without dropout from the same start. The slides show "
        "the curves without numbers."
    ),
    presets={
        "smoke": Preset(DropoutEqualizationOptions(rows=14, columns=10, sizes=(4, 8), iterations=250), (0,), 0.03),
        "laptop": Preset(DropoutEqualizationOptions(), (0, 1), 3),
        "paper": Preset(DropoutEqualizationOptions(iterations=10_000), (0, 1, 2), 12),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
    columns=("mean", "excess"),
)

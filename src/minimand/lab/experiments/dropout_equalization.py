"""Dropout training equalises the terms of a factorisation."""

import dataclasses
from collections.abc import Iterator, Sequence

from ...factor import DropoutFactorization
from ..context import Lab
from ..experiment import Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._dropout import Matrix, followed, norm_plot


@dataclasses.dataclass(frozen=True)
class Options(Matrix):
    """A Gaussian matrix and two sizes.

    Args:
        sizes: Numbers of terms.
        p: The drop rate.
        iterations: Of dropout.
    """

    rows: int = 120
    columns: int = 80
    sizes: tuple[int, ...] = (20, 80)
    p: float = 0.5
    iterations: int = 3000


def parts(options: Options) -> list[Part]:
    """Dropout for every size, and plain alternating descent without dropout as the control."""
    sampled = [Part(f"dropout, r = {size}") for size in options.sizes]
    return [*sampled, *(Part(f"no dropout, r = {size}") for size in options.sizes)]


def run(options: Options, part: str, lab: Lab) -> Iterator[Metrics]:
    """One factorisation."""
    method, _, size = part.partition(", r = ")
    dropout = method == "dropout"
    model = DropoutFactorization(
        int(size),
        options.p if dropout else 0.0,
        method="dropout" if dropout else "gradient",
        max_iter=options.iterations,
        random_state=lab.seed,
    )
    yield from followed(options.draw(lab), model)


def compare(results: Results[Options]) -> list[Comparison]:
    """The spread of the terms' norms."""
    return [
        Comparison(
            f"{part.name}: spread of the norms over their mean", None, results.final(part.name, "unequal"), "", 4
        )
        for part in parts(results.options)
    ]


def plots(results: Results[Options]) -> list[Plot]:
    """Norms over the iterations."""
    return [norm_plot(results, [part.name for part in parts(results.options)], "Norms of the terms")]


def findings(results: Results[Options]) -> Sequence[str]:
    """How equal dropout made them."""
    said = []
    for size in results.options.sizes:
        ours, control = (results.final(f"{name}, r = {size}", "unequal") for name in ("dropout", "no dropout"))
        if ours and control:
            said.append(
                f"With {size} terms the norms spread by {100 * max(ours):.1f}% of their mean after dropout, by "
                f"{100 * min(control):.1f}% without."
            )
    return said


experiment = Experiment(
    name="dropout-equalization",
    title="Dropout equalises",
    source="003, On the Implicit Bias of Dropout, Synthetic Experiments",
    about=(
        "All terms of a dropout optimum have the same norm. A 120 × 80 matrix is factorised with 20 and 80 "
        "terms; the norms of the "
        "terms are followed. The control is the same descent without dropout. The slides show the curves, "
        "without numbers."
    ),
    presets={
        "smoke": Preset(Options(rows=14, columns=10, sizes=(4, 8), iterations=250), (0,), 0.03),
        "laptop": Preset(Options(), (0, 1), 3),
        "paper": Preset(Options(iterations=10_000), (0, 1, 2), 12),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    columns=("mean", "excess"),
)

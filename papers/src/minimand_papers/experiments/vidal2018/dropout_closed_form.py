"""Dropout training approaches the closed form, for a fixed size."""

import dataclasses
from collections.abc import Iterator, Sequence

from minimand.factor import DropoutFactorization

from ...claims import judge_bound, scale
from ...context import Lab
from ...drawing import COLORS, curves, figure, style
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._dropout import MatrixOptions, followed


@dataclasses.dataclass(frozen=True)
class DropoutClosedFormOptions(MatrixOptions):
    """A Gaussian matrix and a fixed number of terms.

    Args:
        size: The number of terms.
        weights: Values of λ = p/(1 − p).
        iterations: Iterations of dropout.
    """

    rows: int = 120
    columns: int = 80
    size: int = 20
    weights: tuple[float, ...] = (1.0, 0.5)
    iterations: int = 3000


def parts(options: DropoutClosedFormOptions) -> list[Part]:
    """Sampling and the closed form for each weight."""
    return [Part(f"{method}, λ = {lam:g}") for lam in options.weights for method in ("dropout", "closed_form")]


def run(options: DropoutClosedFormOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """One factorisation."""
    method, _, lam = part.partition(", λ = ")
    p = float(lam) / (1 + float(lam))
    model = DropoutFactorization(options.size, p, method=method, max_iter=options.iterations, random_state=lab.seed)
    yield from followed(options.draw(lab), model)


def compare(results: Results[DropoutClosedFormOptions]) -> list[Comparison]:
    """Distances to the global minimum."""
    return [
        Comparison(
            f"dropout, λ = {lam:g}: objective above the closed form",
            None,
            [100 * v for v in results.final(f"dropout, λ = {lam:g}", "excess")],
            "%",
            3,
        )
        for lam in results.options.weights
    ]


def plots(results: Results[DropoutClosedFormOptions]) -> list[Plot]:
    """The approach, and the spectra at the end."""
    names = [f"dropout, λ = {lam:g}" for lam in results.options.weights]
    approach = curves(
        results, names, key="excess", over="iteration", title="Approach", y="objective / minimum − 1", log=True
    )
    drawn = figure()
    axes = drawn.subplots()
    sentences = []
    for number, part in enumerate(part.name for part in parts(results.options)):
        spectra = [v[-1] for v in results.curve(part, "values").values() if v]
        if spectra:
            kept = spectra[0][: results.options.size]
            axes.plot(
                range(1, len(kept) + 1),
                kept,
                ".-" if part.startswith("dropout") else "--",
                color=COLORS[number],
                label=part,
            )
            sentences.append(f"{part} {kept[0]:.3g}")
    style(axes, "index", "singular value", "Spectrum of the product")
    if sentences:
        axes.legend(frameon=False)
    return [
        approach,
        Plot("Spectrum", f"Largest singular values: {', '.join(sentences) or 'nothing measured yet'}", drawn),
    ]


def findings(results: Results[DropoutClosedFormOptions]) -> Sequence[str]:
    """The final distance of sampled dropout to the minimum."""
    return [
        f"{row.label}: {max(row.measured):.2f}% at worst over {len(row.measured)} seed(s)."
        for row in compare(results)
        if row.measured
    ]


def claims(results: Results[DropoutClosedFormOptions]) -> list[Claim]:
    """Dropout training reaches the closed form."""
    above = [value for row in compare(results) for value in row.measured]
    return [
        Claim(
            "Implicit bias: dropout training reaches the closed form at a fixed size (here: within 1 %)",
            "same curve",
            f"at most {max(above):.2f} % above" if above else "–",
            scale(results, f"{results.options.iterations:,} iterations"),
            judge_bound(above, 1.0),
        )
    ]


experiment = Experiment(
    name="dropout-closed-form",
    title="Dropout training reaches the closed form",
    source="[Vidal2018], On the Implicit Bias of Dropout, Synthetic Experiments",
    about=(
        "A 120 × 80 matrix is factorised with 20 terms by sampled dropout; the global minimum is singular value "
        "thresholding "
        "with a threshold in closed form. The slides show λ = 1 and λ = 0.5, without numbers."
    ),
    presets={
        "smoke": Preset(DropoutClosedFormOptions(rows=14, columns=10, size=5, iterations=200), (0,), 0.03),
        "laptop": Preset(DropoutClosedFormOptions(), (0, 1, 2), 2),
        "paper": Preset(DropoutClosedFormOptions(iterations=10_000), (0, 1, 2), 6),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
    columns=("objective", "excess"),
)

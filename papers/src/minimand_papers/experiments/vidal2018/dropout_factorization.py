"""Dropout is stochastic gradient descent on a deterministic objective: both, over the iterations."""

import dataclasses
from collections.abc import Iterator, Sequence

from minimand.factor import DropoutFactorization

from ...context import Lab
from ...drawing import curves
from ...experiment import Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._dropout import Matrix, followed


@dataclasses.dataclass(frozen=True)
class Options(Matrix):
    """One matrix, the same start, sampled and expected gradients.

    Args:
        size: The number of terms.
        rates: Drop rates.
        iterations: Of both methods.
    """

    size: int = 160
    rates: tuple[float, ...] = (0.1, 0.5)
    iterations: int = 2000


def parts(options: Options) -> list[Part]:
    """Both methods for every rate."""
    return [Part(f"{method}, p = {p:g}") for p in options.rates for method in ("dropout", "gradient")]


def run(options: Options, part: str, lab: Lab) -> Iterator[Metrics]:
    """Factorise by one method."""
    method, _, p = part.partition(", p = ")
    model = DropoutFactorization(
        options.size, float(p), method=method, max_iter=options.iterations, tol=0.0, random_state=lab.seed
    )
    yield from followed(options.draw(lab), model)


def compare(results: Results[Options]) -> list[Comparison]:
    """How far each ends above the global minimum."""
    return [
        Comparison(f"{part.name}: objective above the closed form", None, percent(results, part.name), "%", 3)
        for part in parts(results.options)
    ]


def percent(results: Results[Options], part: str) -> list[float]:
    """The excess over the global minimum in percent."""
    return [100 * value for value in results.final(part, "excess")]


def plots(results: Results[Options]) -> list[Plot]:
    """The deterministic objective along both paths."""
    names = [part.name for part in parts(results.options)]
    dashed = [name for name in names if name.startswith("gradient")]
    title = "Dropout and its deterministic equivalent"
    return [
        curves(results, names, key="objective", over="iteration", title=title, y="objective", log=True, dashed=dashed)
    ]


def findings(results: Results[Options]) -> Sequence[str]:
    """Where both methods end."""
    said = []
    for p in results.options.rates:
        sampled, exact = (percent(results, f"{m}, p = {p:g}") for m in ("dropout", "gradient"))
        if sampled and exact:
            said.append(
                f"At p = {p:g} dropout ends {max(sampled):.2f}% above the global minimum at worst, descent on the "
                f"expectation "
                f"{max(exact):.2f}%."
            )
    return said


experiment = Experiment(
    name="dropout-factorization",
    title="Dropout is SGD on a deterministic objective",
    source="003, Synthetic Experiments for Fixed Size",
    about=(
        "A Gaussian matrix is factorised with many more terms than its rank, once with sampled terms, once by "
        "descent on the "
        "expectation in closed form; the global minimum is known. The slides show both curves for 100 × 100 and "
        "160 terms over "
        "10,000 iterations, without numbers."
    ),
    presets={
        "smoke": Preset(Options(rows=10, columns=8, size=10, iterations=80), (0,), 0.03),
        "laptop": Preset(Options(), (0, 1), 2),
        "paper": Preset(Options(iterations=10_000), (0, 1, 2), 15),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    columns=("objective", "excess"),
)

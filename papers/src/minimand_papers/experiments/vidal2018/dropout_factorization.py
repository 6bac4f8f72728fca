"""Dropout is stochastic gradient descent on a deterministic objective: both, over the iterations."""

import dataclasses
from collections.abc import Iterator, Sequence

from minimand.factor import DropoutFactorization

from ...claims import combine, judge_bound, scale
from ...context import Lab
from ...drawing import curves
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._dropout import MatrixOptions, followed


@dataclasses.dataclass(frozen=True)
class DropoutFactorizationOptions(MatrixOptions):
    """One matrix, the same start, sampled and expected gradients.

    Args:
        size: The number of terms.
        rates: Drop rates.
        iterations: Iterations of both methods.
    """

    size: int = 160
    rates: tuple[float, ...] = (0.1, 0.5)
    iterations: int = 2000


def parts(options: DropoutFactorizationOptions) -> list[Part]:
    """Both methods for every rate."""
    return [Part(f"{method}, p = {p:g}") for p in options.rates for method in ("dropout", "gradient")]


def run(options: DropoutFactorizationOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Factorise by one method."""
    method, _, p = part.partition(", p = ")
    model = DropoutFactorization(
        options.size, float(p), method=method, max_iter=options.iterations, tol=0.0, random_state=lab.seed
    )
    yield from followed(options.draw(lab), model)


def compare(results: Results[DropoutFactorizationOptions]) -> list[Comparison]:
    """How far each ends above the global minimum."""
    return [
        Comparison(f"{part.name}: objective above the closed form", None, percent(results, part.name), "%", 3)
        for part in parts(results.options)
    ]


def percent(results: Results[DropoutFactorizationOptions], part: str) -> list[float]:
    """The excess over the global minimum in percent."""
    return [100 * value for value in results.final(part, "excess")]


def plots(results: Results[DropoutFactorizationOptions]) -> list[Plot]:
    """The deterministic objective along both paths."""
    names = [part.name for part in parts(results.options)]
    dashed = [name for name in names if name.startswith("gradient")]
    title = "Dropout and its deterministic equivalent"
    return [
        curves(results, names, key="objective", over="iteration", title=title, y="objective", log=True, dashed=dashed)
    ]


def findings(results: Results[DropoutFactorizationOptions]) -> Sequence[str]:
    """Where both methods end."""
    sentences = []
    for p in results.options.rates:
        sampled, exact = (percent(results, f"{m}, p = {p:g}") for m in ("dropout", "gradient"))
        if sampled and exact:
            sentences.append(
                f"At p = {p:g} dropout ends {max(sampled):.2f}% above the global minimum at worst, descent on the "
                f"expectation "
                f"{max(exact):.2f}%."
            )
    return sentences


def claims(results: Results[DropoutFactorizationOptions]) -> list[Claim]:
    """Sampled dropout and descent on its expectation reach the same minimum."""
    methods = ("dropout", "gradient")
    ends = {m: [v for p in results.options.rates for v in percent(results, f"{m}, p = {p:g}")] for m in methods}
    measured = (
        f"at most {max(ends['dropout'], default=0):.2f} %, deterministic {max(ends['gradient'], default=0):.2f} %"
    )
    return [
        Claim(
            "Dropout is SGD: stochastic and deterministic dropout reach the same minimum (here: within 1 %)",
            "same curve",
            f"above the minimum: {measured}" if ends["dropout"] else "–",
            scale(results, f"{results.options.iterations:,} of 10,000 iterations"),
            combine([judge_bound(values, 1.0) for values in ends.values()]),
        )
    ]


experiment = Experiment(
    name="dropout-factorization",
    title="Dropout is SGD on a deterministic objective",
    source="[Vidal2018], Synthetic Experiments for Fixed Size",
    about=(
        "A Gaussian matrix is factorised with many more terms than its rank, once with sampled terms, once by "
        "descent on the "
        "expectation in closed form; the global minimum is known. The slides show both curves for 100 × 100 and "
        "160 terms over "
        "10,000 iterations, without numbers."
    ),
    presets={
        "smoke": Preset(DropoutFactorizationOptions(rows=10, columns=8, size=10, iterations=80), (0,), 0.03),
        "laptop": Preset(DropoutFactorizationOptions(), (0, 1), 2),
        "paper": Preset(DropoutFactorizationOptions(iterations=10_000), (0, 1, 2), 15),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
    columns=("objective", "excess"),
)

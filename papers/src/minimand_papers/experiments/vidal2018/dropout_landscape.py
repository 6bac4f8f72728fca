"""The loss surface of a 1-2-1 linear autoencoder without, with a little, and with much dropout."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from minimand.factor import dropout_optimum
from minimand.factor.dropout import dropout_objective

from ...claims import combine, judge_bound, scale
from ...context import Lab
from ...drawing import figure
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results


@dataclasses.dataclass(frozen=True)
class DropoutLandscapeOptions:
    """The autoencoder with tied weights.

    Args:
        rates: Drop rates.
        points: Grid points in each direction; odd.
        reach: The largest weight on the grid.
    """

    rates: tuple[float, ...] = (0.0, 0.2, 0.6)
    points: int = 41
    reach: float = 1.3


def parts(options: DropoutLandscapeOptions) -> list[Part]:
    """One surface per rate."""
    return [Part(f"p = {p:g}") for p in options.rates]


def run(options: DropoutLandscapeOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """The surface, the closed form, and descent on it from random starts."""
    p = float(part.removeprefix("p = "))
    Y = torch.ones(1, 1, dtype=torch.float64)
    axis = torch.linspace(-options.reach, options.reach, options.points, dtype=torch.float64)
    surface = [[round(float(value(Y, torch.stack([a, b]), p)), 4) for a in axis] for b in axis]
    X, threshold, _ = dropout_optimum(Y, 2, p)
    minimum = float((Y - X).square().sum() + p / (1 - p) / 2 * X.square().sum())
    ends, generator = [], lab.generator()
    for _ in range(8):
        w = torch.randn(2, generator=generator, dtype=torch.float64).mul_(0.7).requires_grad_()
        optimizer = torch.optim.LBFGS([w], max_iter=100, line_search_fn="strong_wolfe")

        def closure(w: torch.Tensor = w, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = value(Y, w, p)
            loss.backward()
            return loss

        optimizer.step(closure)
        ends.append([round(v, 5) for v in w.tolist()])
    worst = max(float(value(Y, torch.tensor(end, dtype=torch.float64), p)) - minimum for end in ends)
    unequal = max(abs(abs(a) - abs(b)) for a, b in ends)
    yield {
        "surface": surface,
        "minimum": minimum,
        "threshold": threshold,
        "ends": ends,
        "worst": worst,
        "unequal": unequal,
    }


def value(Y: torch.Tensor, w: torch.Tensor, p: float) -> torch.Tensor:
    """The expected loss with tied weights."""
    return dropout_objective(Y, w[None], w[None], p)


def compare(results: Results[DropoutLandscapeOptions]) -> list[Comparison]:
    """Minima of every surface."""
    rows = []
    for part in parts(results.options):
        rows.append(Comparison(f"{part.name}: minimum", None, results.final(part.name, "minimum"), "", 4))
        rows.append(
            Comparison(
                f"{part.name}: difference of the weights at minima", None, results.final(part.name, "unequal"), "", 4
            )
        )
    return rows


def plots(results: Results[DropoutLandscapeOptions]) -> list[Plot]:
    """Contours with the points that descent found."""
    drawn = figure(11, 3.8)
    options = results.options
    panels = drawn.subplots(1, len(options.rates), squeeze=False)[0]
    axis = torch.linspace(-options.reach, options.reach, options.points).tolist()
    sentences = []
    for panel, part in zip(panels, parts(options), strict=True):
        records = [record for seed in results.records.get(part.name, {}).values() for record in seed]
        panel.set(title=part.name, xlabel="first weight", ylabel="second weight", aspect="equal")
        if not records:
            continue
        levels = torch.linspace(0, 2, 21).tolist()
        panel.contourf(axis, axis, records[0]["surface"], levels=levels, cmap="cividis", extend="max")
        panel.plot(*zip(*records[0]["ends"], strict=True), "x", color="white", markersize=8, mew=2.5)
        sentences.append(f"{part.name}: minimum {records[0]['minimum']:.3f}")
    return [Plot("Loss surfaces", f"Contours; {'; '.join(sentences) or 'nothing measured yet'}", drawn)]


def findings(results: Results[DropoutLandscapeOptions]) -> Sequence[str]:
    """The minima that descent found."""
    sentences = []
    for part in parts(results.options):
        worst, unequal = results.final(part.name, "worst"), results.final(part.name, "unequal")
        if worst:
            equal = "equal weights" if max(unequal) < 1e-3 else "weights that differ"
            sentences.append(
                f"{part.name}: eight starts end within {max(worst):.1e} of the global minimum, at {equal}."
            )
    return sentences


def claims(results: Results[DropoutLandscapeOptions]) -> list[Claim]:
    """All local minima that descent finds are global, and with dropout they are equalised."""
    names = [part.name for part in parts(results.options)]
    worst = [value for name in names for value in results.final(name, "worst")]
    unequal = [value for name in names if name != "p = 0" for value in results.final(name, "unequal")]
    measured = f"weights differ by at most {max(unequal):.0e}; objective within {max(worst):.0e}" if unequal else "–"
    return [
        Claim(
            "Landscape: with any dropout rate, descent ends at global minima with equal weights",
            "equal weights",
            measured,
            scale(results, "two hidden units, 8 starts"),
            combine([judge_bound(worst, 1e-6), judge_bound(unequal, 1e-3)]),
        )
    ]


experiment = Experiment(
    name="dropout-landscape",
    title="The landscape of a linear autoencoder with dropout",
    source="[Vidal2018], Effect of Dropout Rate on the Landscape",
    about=(
        "One input, two hidden units, one output, tied weights. Without dropout a circle of weights is optimal. "
        "With any drop rate four points are optimal, at which both weights have the same size; a larger rate moves "
        "them towards zero."
    ),
    presets={
        "smoke": Preset(DropoutLandscapeOptions(points=15), (0,), 0.02),
        "laptop": Preset(DropoutLandscapeOptions(), (0,), 0.1),
        "paper": Preset(DropoutLandscapeOptions(), (0,), 0.1),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
    columns=("minimum",),
)

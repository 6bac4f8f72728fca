"""A fixed drop rate does not limit the size of a factorisation; one that grows with the size does."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from minimand.factor import DropoutFactorization
from minimand.solvers import Exponential

from ...claims import combine, judge_bound, scale
from ...comparing import mean_std
from ...context import Lab
from ...drawing import curves
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._dropout import MatrixOptions

FIXED, VARIABLE = "fixed rate", "variable rate"
CLOSED = {FIXED: "closed form, fixed rate", VARIABLE: "closed form, variable rate"}
PARTS = (FIXED, CLOSED[FIXED], VARIABLE, CLOSED[VARIABLE])
#: The share of the largest singular value above which another one counts as rank.
SHARE = 0.01


@dataclasses.dataclass(frozen=True)
class DropoutVariableRateOptions(MatrixOptions):
    """A low-rank signal with noise, factorised with ever more terms.

    Args:
        rank: Rank of the signal.
        p: The drop rate; for a variable rate, the rate with a single term.
        sizes: Numbers of terms.
        iterations: Iterations of dropout.
        last: The step of the last iteration relative to that of the first; it falls exponentially.
    """

    rank: int = 10
    p: float = 0.01
    sizes: tuple[int, ...] = (10, 20, 40, 80, 160)
    iterations: int = 4000
    last: float = 2e-3


def parts(options: DropoutVariableRateOptions) -> list[Part]:
    """Both rates, sampled and in closed form."""
    return [Part(name) for name in PARTS]


def run(options: DropoutVariableRateOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """One curve: the nuclear norm, the rank and the error of the product for every size."""
    Y = options.draw(lab)
    for size in options.sizes:
        model = DropoutFactorization(
            size,
            options.p,
            rate="fixed" if part.endswith(FIXED) else "variable",
            method="closed_form" if part in CLOSED.values() else "dropout",
            max_iter=options.iterations,
            decay=Exponential(options.last ** (1 / options.iterations)),
            random_state=lab.seed,
        )
        X = model.fit_transform(Y) @ model.components_
        values = np.linalg.svd(X, compute_uv=False)
        yield {
            "size": size,
            "nuclear": float(values.sum()),
            "rank": int((values > SHARE * values[0]).sum()) if values[0] > 0 else 0,
            "residual": float(np.linalg.norm(Y - X) / np.linalg.norm(Y)),
            "excess": max(model.objective_ / model.optimum_ - 1, 0.0),
        }


def compare(results: Results[DropoutVariableRateOptions]) -> list[Comparison]:
    """Rank and nuclear norm of the largest factorisation, and the distance of sampling to the optimum."""
    rows = []
    for part in PARTS:
        rows.append(Comparison(f"{part}: rank at the largest size", None, results.final(part, "rank"), "", 1))
        rows.append(
            Comparison(f"{part}: nuclear norm at the largest size", None, results.final(part, "nuclear"), "", 1)
        )
    for part in CLOSED:
        above = [100 * value for value in results.final(part, "excess")]
        rows.append(Comparison(f"{part}: objective above its optimum at the largest size", None, above, "%", 2))
    return rows


def plots(results: Results[DropoutVariableRateOptions]) -> list[Plot]:
    """Nuclear norm and rank over the size."""
    dashed = tuple(CLOSED.values())
    return [
        curves(
            results,
            PARTS,
            key="nuclear",
            over="size",
            title="Nuclear norm of the product",
            y="nuclear norm",
            dashed=dashed,
        ),
        curves(
            results,
            PARTS,
            key="rank",
            over="size",
            title=f"Singular values above {SHARE:.0%} of the largest",
            y="count",
            dashed=dashed,
        ),
    ]


def findings(results: Results[DropoutVariableRateOptions]) -> Sequence[str]:
    """The change of each curve from the smallest to the largest size, and the distance of sampling to the optimum."""
    sentences = []
    for part in PARTS:
        runs = [values for values in results.curve(part, "nuclear").values() if len(values) > 1]
        ranks = results.final(part, "rank")
        if runs and ranks:
            change = 100 * (sum(v[-1] / v[0] for v in runs) / len(runs) - 1)
            sentences.append(
                f"{part}: from the smallest to the largest size the nuclear norm changes by {change:+.1f}%, and the "
                f"rank at the largest is {mean_std(ranks)[0]:.0f}."
            )
    for part in CLOSED:
        above = results.final(part, "excess")
        if above:
            sentences.append(
                f"{part}: after {results.options.iterations} sampled steps the largest factorisation lies "
                f"{100 * mean_std(above)[0]:.1f}% above its optimum."
            )
    return sentences


def claims(results: Results[DropoutVariableRateOptions]) -> list[Claim]:
    """With a fixed rate the nuclear norm grows with the size, with a variable rate it does not."""
    growth = {
        part: [100 * (values[-1] / values[0] - 1) for values in results.curve(part, "nuclear").values() if values]
        for part in (FIXED, VARIABLE)
    }
    ranks = {part: results.final(part, "rank") for part in growth}
    shown = ", ".join(
        f"{part} {mean_std(growth[part])[0]:+.1f} %, rank {mean_std(ranks[part])[0]:.0f}"
        for part in growth
        if growth[part]
    )
    return [
        Claim(
            "Variable size: a fixed rate does not limit the factorisation, a variable rate does",
            "curves without numbers",
            f"nuclear norm from the smallest to the largest size: {shown}" if shown else "–",
            scale(results, f"{results.options.iterations:,} iterations"),
            combine([judge_bound([-v for v in growth[FIXED]], -10.0), judge_bound(growth[VARIABLE], 2.0)]),
        )
    ]


experiment = Experiment(
    name="dropout-variable-rate",
    title="A drop rate that grows with the size is a nuclear norm",
    source="[Vidal2018], Synthetic Experiments for Variable Size",
    about=(
        "A matrix of rank 10 plus noise is factorised with 10 to 160 terms. With a fixed rate the penalty falls as "
        "terms are added, so the nuclear norm and the rank grow towards those of the data. With λᵣ = rλ₁ the "
        "optimum does not depend on the size. Sampled dropout is compared with the closed forms. The slides show "
        "the curves without numbers."
    ),
    presets={
        "smoke": Preset(
            DropoutVariableRateOptions(rows=14, columns=12, rank=3, sizes=(3, 6, 12), iterations=150), (0,), 0.03
        ),
        "laptop": Preset(DropoutVariableRateOptions(), (0, 1, 2, 3, 4), 4),
        "paper": Preset(DropoutVariableRateOptions(iterations=10_000), (0, 1, 2), 15),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
    columns=("size", "nuclear"),
)

"""The problem of one layer: the distance to the optimum after each iteration of every solver."""

import dataclasses
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from minimand.functions import NonNegative
from minimand.operators import Dense
from minimand.solvers import ADMM, FISTA, RCD, SVRG, HeavyBall, Problem, ProxGD, ProxSG, Solver, solve, trace

from ...claims import combine, judge_bound, scale, span
from ...comparing import mean_std
from ...context import Lab
from ...drawing import curves
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results

__all__ = ["LayerConvergenceOptions", "digits_problem", "experiment", "solvers"]

DETERMINISTIC = ("Prox-GD", "heavy ball", "FISTA", "ADMM")


@dataclasses.dataclass(frozen=True)
class LayerConvergenceOptions:
    """A 64 → width ReLU layer at He initialisation on handwritten digits.

    Args:
        iters: Iterations of every solver.
        rows: Digits in the batch.
        width: Outputs of the layer.
    """

    iters: int = 60
    rows: int = 256
    width: int = 128


def digits_problem(rows: int = 256, width: int = 128, *, seed: int = 0) -> Problem:
    """A 64 → ``width`` ReLU layer at He initialisation on scikit-learn's handwritten digits.

    >>> digits_problem(rows=8).shape
    torch.Size([8, 128])
    """
    from sklearn.datasets import load_digits

    images = torch.as_tensor(load_digits().data[:rows], dtype=torch.float32)
    images = (images - images.mean(0)) / (images.std(0) + 1e-3)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(width, 64, generator=generator) * (2 / 64) ** 0.5
    return Problem(Dense(weight), NonNegative(), images, torch.zeros(width), ridge=1e-3)


def solvers(iters: int) -> dict[str, Solver]:
    """Every solver of the library with the same number of iterations."""
    return {
        "Prox-GD": ProxGD(iters),
        "heavy ball": HeavyBall(iters),
        "FISTA": FISTA(iters),
        "ADMM": ADMM(iters),
        "Prox-SG, τ-nice": ProxSG(iters),
        "Prox-SG, Bernoulli": ProxSG(iters, sampling="bernoulli"),
        "Prox-SG, importance": ProxSG(iters, sampling="importance"),
        "SVRG (mS2GD)": SVRG(outer=max(1, iters // 10), inner=min(10, iters)),
        "coordinate descent": RCD(iters),
    }


OPTIMUM = "optimum"


def parts(options: LayerConvergenceOptions) -> list[Part]:
    """The optimum, to high accuracy, then one solver each."""
    return [Part(OPTIMUM), *(Part(name, needs=(OPTIMUM,)) for name in solvers(options.iters))]


def run(options: LayerConvergenceOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """The relative gap after every iteration, and the time of one plain solve."""
    problem = digits_problem(options.rows, options.width)
    if part == OPTIMUM:
        found = _ends(problem)
        lab.keep("objective", found)
        yield {name: float(value) for name, value in found.items()}
        return
    solver = solvers(options.iters)[part]
    ends = lab.kept(OPTIMUM, "objective", dict.fromkeys(("best", "start"), torch.zeros((), dtype=torch.float64)))
    best, start = ends["best"], ends["start"]
    measured = trace(problem, solver, generator=lab.generator())
    gaps = ((measured.objective.double() - best) / (start - best)).clamp_min(1e-8)
    begin = time.perf_counter()
    solve(problem, solver)
    solved = time.perf_counter() - begin
    for iteration, gap in enumerate(gaps.tolist(), 1):
        yield {"iteration": iteration, "gap": gap}
    yield {"residual": float(measured.optimality[-1]), "milliseconds": 1000 * solved}


def _ends(problem: Problem) -> dict[str, Tensor]:
    """The objective at the optimum and at zero, in double precision."""
    double = dataclasses.replace(
        problem,
        operator=Dense(problem.operator.weight.double()),
        y=problem.y.double(),
        bias=None if problem.bias is None else problem.bias.double(),
    )
    zero = torch.zeros(double.shape, dtype=torch.float64)
    return {"best": solve(double, FISTA(iters=5000), tol=1e-12).objective, "start": double.objective(zero)}


def compare(results: Results[LayerConvergenceOptions]) -> list[Comparison]:
    """The remaining gap after the last iteration, in per cent."""
    note = f"relative gap after {results.options.iters} iterations"
    return [
        Comparison(part, None, [100 * gap for gap in results.final(part, "gap")], "%", 3, note)
        for part in solvers(results.options.iters)
    ]


def plots(results: Results[LayerConvergenceOptions]) -> list[Plot]:
    """Relative suboptimality over iterations."""
    names = list(solvers(results.options.iters))
    return [
        curves(
            results,
            names,
            key="gap",
            over="iteration",
            title="One ReLU layer as a solver",
            y="(objective − optimum) / (start − optimum)",
            log=True,
            dashed=[name for name in names if name not in DETERMINISTIC],
        )
    ]


def findings(results: Results[LayerConvergenceOptions]) -> Sequence[str]:
    """The fastest solver, and the gap after a single iteration, which is the ordinary layer."""
    ends = {part: mean_std(gaps)[0] for part in results.parts() if (gaps := results.final(part, "gap"))}
    if not ends:
        return []
    best = min(ends, key=lambda part: ends[part])
    first = [values[0] for values in results.curve("Prox-GD", "gap").values() if values]
    sentences = [
        f"{best} has the smallest gap after {results.options.iters} iterations: {100 * ends[best]:.2g} % of the first."
    ]
    if first:
        sentences.append(f"After one Prox-GD step, the ordinary layer scaled by 1/L, it is {100 * first[0]:.0f} %.")
    return sentences


def claims(results: Results[LayerConvergenceOptions]) -> list[Claim]:
    """A layer is one step of a solver, and more steps come closer to the optimum."""
    first = [100 * values[0] for values in results.curve("Prox-GD", "gap").values() if values]
    ends = {part: [100 * gap for gap in results.final(part, "gap")] for part in solvers(results.options.iters)}
    text = "§3: more iterations than one bring a layer closer to the optimum of its problem"
    measured = (
        f"gap: {first[0]:.0f} % after one step, {span([mean_std(gaps)[0] for gaps in ends.values()], ' %')} after "
        f"{results.options.iters}"
        if first
        else "–"
    )
    verdict = combine([judge_bound(gaps, min(first)) for gaps in ends.values() if gaps])
    return [Claim(text, "–", measured, scale(results, "one layer on digits"), verdict)]


experiment = Experiment(
    name="layer-convergence",
    title="All solvers on the problem of one layer",
    source="[Bibi2019], §3",
    about=(
        "A ReLU layer minimises ½‖Aᵀx − y‖² − ⟨b, x⟩ + (λ/2)‖x‖² over x ≥ 0. An ordinary layer takes one proximal "
        "gradient step from zero. Here every solver of the library takes more steps. Dashed lines are stochastic "
        "solvers, averaged over seeds."
    ),
    presets={
        "smoke": Preset(LayerConvergenceOptions(iters=8, rows=32, width=32), (0, 1), 0.05),
        "laptop": Preset(LayerConvergenceOptions(), (0, 1, 2), 0.5),
        "paper": Preset(LayerConvergenceOptions(iters=300, rows=1024, width=512), tuple(range(20)), 10),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
    columns=("gap",),
)

"""The demo: one layer's problem, every solver, a table and a picture."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..functions import NonNegative
from ..operators import Dense
from ..solvers import ADMM, FISTA, RCD, SVRG, HeavyBall, Problem, ProxGD, ProxSG, Solver, Trace, solve, trace

__all__ = ["Row", "digits_problem", "plot", "run", "solvers"]


@dataclasses.dataclass(frozen=True)
class Row:
    """One solver's run: relative suboptimality after every iteration (mean over seeds), and its time."""

    name: str
    gap: Tensor
    optimality: float
    seconds: float


def digits_problem(rows: int = 256, width: int = 128, *, seed: int = 0) -> Problem:
    """A 64 → ``width`` ReLU layer at He initialisation that sees scikit-learn's bundled handwritten digits.

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


def _measure(problem: Problem, solver: Solver, seeds: int) -> tuple[Trace, float]:
    """The mean trace over the seeds, and the time of one plain solve."""
    runs = [
        trace(problem, solver, generator=torch.Generator().manual_seed(seed))
        for seed in range(seeds if solver.stochastic else 1)
    ]
    begin = time.perf_counter()
    solve(problem, solver)
    seconds = time.perf_counter() - begin
    return Trace(*(torch.stack(column).mean(0) for column in zip(*runs, strict=True))), seconds


def run(iters: int = 60, seeds: int = 5) -> list[Row]:
    """Measure every solver on the same problem, with a progress bar."""
    from rich.progress import track

    problem = digits_problem()
    double = dataclasses.replace(
        problem,
        operator=Dense(problem.operator.weight.double()),
        y=problem.y.double(),
        bias=None if problem.bias is None else problem.bias.double(),
    )
    best = solve(double, FISTA(iters=5000), tol=1e-9).objective
    start = double.objective(torch.zeros(double.shape, dtype=torch.float64))
    rows = []
    for name, solver in track(solvers(iters).items(), description="solving", transient=True):
        measured, seconds = _measure(problem, solver, seeds)
        gap = ((measured.objective.double() - best) / (start - best)).clamp_min(1e-8)
        rows.append(Row(name, gap, float(measured.optimality[-1]), seconds))
    return rows


def table(rows: list[Row]) -> Any:
    """The rich table of the demo."""
    from rich.table import Table

    out = Table(title="One 64 → 128 ReLU layer on 256 digits: gap left after k iterations")
    out.add_column("solver", no_wrap=True)
    marks = [k for k in (1, 10, 30, 60) if k <= len(rows[0].gap)]
    for k in marks:
        out.add_column(f"k = {k}", justify="right")
    out.add_column("residual", justify="right")
    out.add_column("time", justify="right")
    for row in rows:
        gaps = [f"{100 * row.gap[k - 1]:.3g} %" for k in marks]
        out.add_row(row.name, *gaps, f"{row.optimality:.1e}", f"{1000 * row.seconds:.0f} ms")
    return out


def plot(rows: list[Row], path: Path) -> None:
    """Draw relative suboptimality over iterations and save it; the file's suffix chooses the format."""
    from matplotlib.figure import Figure

    # Okabe–Ito: told apart with every kind of colour vision.
    colours = [
        "#000000",
        "#E69F00",
        "#0072B2",
        "#009E73",
        "#D55E00",
        "#CC79A7",
        "#56B4E9",
        "#8C6BB1",
        "#999999",
    ]
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    for row, colour in zip(rows, colours, strict=True):
        iterations = torch.arange(1, len(row.gap) + 1)
        style = "-" if row.name in ("Prox-GD", "heavy ball", "FISTA", "ADMM") else "--"
        axes.semilogy(iterations, row.gap, style, color=colour, label=row.name)
    axes.set_xlabel("iteration")
    axes.set_ylabel("(objective − optimum) / (start − optimum)")
    axes.set_title("One ReLU layer as a solver")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)

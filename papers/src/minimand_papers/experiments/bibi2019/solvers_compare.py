"""The same network with each solver in its blocks, at equal iterations and at equal time."""

import dataclasses
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from minimand.functions import NonNegative
from minimand.nn import SolverLinear
from minimand.operators import Dense
from minimand.solvers import FISTA, SVRG, HeavyBall, Problem, ProxGD, ProxSG, Solver, solve

from ...comparing import Difference, difference
from ...context import Lab
from ...drawing import bars, curves
from ...experiment import Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ...training import train
from ...zoo import LeNet
from .._solvers import ImageOptions, solved

BLOCKS = ("classifier.1", "classifier.4")
CALIBRATION, CONTROL, REFERENCE = "calibration", "no dropout", "Prox-GD"
BUDGETS = ("equal iterations", "equal time")


@dataclasses.dataclass(frozen=True)
class SolversCompareOptions(ImageOptions):
    """LeNet whose two hidden fully connected blocks are solvers, one kind at a time.

    Args:
        epochs: Epochs; the learning rate drops after 1/3 and 2/3 of them.
        iters: Iterations of every solver; at equal time, the iterations of Prox-GD that set the time.
        tau: The fraction of inputs that a stochastic solver samples in an iteration.
        trials: Evaluations of a stochastic network that are averaged.
    """

    epochs: int = 6
    iters: int = 10
    tau: float = 0.5
    trials: int = 20


def make(name: str, iters: int, tau: float) -> Solver:
    """A solver by name."""
    return {
        "Prox-GD": ProxGD(iters),
        "heavy ball": HeavyBall(iters),
        "FISTA": FISTA(iters),
        "Prox-SG": ProxSG(iters, tau=tau),
        "SVRG": SVRG(outer=1, inner=iters, tau=tau),
        "importance": ProxSG(iters, tau=tau, sampling="importance"),
    }[name]


SOLVERS = ("Prox-GD", "heavy ball", "FISTA", "Prox-SG", "SVRG", "importance")


def parts(options: SolversCompareOptions) -> list[Part]:
    """Each solver with each budget; for the reference both are the same."""
    found = [Part(CALIBRATION), Part(CONTROL), Part(REFERENCE)]
    for budget in BUDGETS:
        needs = (CALIBRATION,) if budget == "equal time" else ()
        found += [Part(f"{name}, {budget}", needs) for name in SOLVERS if name != REFERENCE]
    return found


def run(options: SolversCompareOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Time the blocks, or train one network."""
    if part == CALIBRATION:
        found = _calibrate(options, lab.device)
        lab.keep("iterations", {name: torch.tensor(count) for name, count in found.items()})
        yield {f"iterations of {name}": count for name, count in found.items()}
        return
    data = options.loaders(lab)
    model = LeNet(data.classes, data.shape[0], data.shape[-1], dropout=(0.0, 0.0))
    if part == CONTROL:
        yield from train(lab, model, data, epochs=options.epochs)
        return
    name, _, budget = part.partition(", ")
    counts = dict.fromkeys(SOLVERS, torch.tensor(0))
    iters = int(lab.kept(CALIBRATION, "iterations", counts)[name]) if budget == "equal time" else options.iters
    solver = make(name, iters, options.tau)
    trials = options.trials if solver.stochastic else 1
    net = solved(model, dict.fromkeys(BLOCKS, solver))
    for record in train(lab, net, data, epochs=options.epochs, trials=trials):
        yield {**record, "iters": iters}


def _calibrate(options: SolversCompareOptions, device: torch.device) -> dict[str, int]:
    """The iterations of each solver that take as long as the reference, in LeNet's larger block."""
    inputs = torch.randn(options.batch, 400, device=device).relu().requires_grad_()

    def seconds(name: str) -> float:
        layer = SolverLinear(400, 120, solver=make(name, options.iters, options.tau)).to(device)
        return min(_timed(layer, inputs) for _ in range(15))

    reference = seconds(REFERENCE)
    return {name: max(1, round(options.iters * reference / seconds(name))) for name in SOLVERS}


def _timed(layer: SolverLinear, inputs: Tensor) -> float:
    begin = time.perf_counter()
    layer(inputs).sum().backward()
    if inputs.device.type != "cpu":
        torch.accelerator.synchronize(inputs.device)
    return time.perf_counter() - begin


def left(iters: int, name: str, tau: float) -> float:
    """The remaining share of the initial gap in a random block of LeNet's shape.

    >>> left(10, "FISTA", 0.5) < left(10, "Prox-GD", 0.5) < 1
    True
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(120, 400, generator=generator) * (2 / 400) ** 0.5
    rows = torch.randn(64, 400, generator=generator).relu()
    problem = Problem(Dense(weight), NonNegative(), rows, torch.zeros(120), ridge=1e-3)
    best = solve(problem, FISTA(500)).objective
    start = problem.objective(torch.zeros(problem.shape))
    found = solve(problem, make(name, iters, tau), generator=generator).objective
    return float((found - best) / (start - best))


def compare(results: Results[SolversCompareOptions]) -> list[Comparison]:
    """Test accuracy; the source has no such table."""
    rows = []
    for part in (part.name for part in parts(results.options) if part.name != CALIBRATION):
        iters = results.final(part, "iters")
        note = "control" if part == CONTROL else ""
        if iters:
            note = "1 iteration" if iters[0] == 1 else f"{iters[0]:.0f} iterations"
            gap = left(int(iters[0]), part.partition(", ")[0], results.options.tau)
            note += f"; remaining gap {100 * gap:.1f} % in a random block of this shape"
        rows.append(Comparison(part, None, results.final(part, "test"), "%", note=note))
    return rows


def plots(results: Results[SolversCompareOptions]) -> list[Plot]:
    """Learning curves over epochs for each budget, and the table as bars."""
    drawn = []
    for budget in BUDGETS:
        names = [CONTROL, REFERENCE, *(part for part in results.parts() if part.endswith(budget))]
        drawn.append(curves(results, names, key="validation", title=f"Validation accuracy, {budget}", y="accuracy, %"))
    return [*drawn, bars(compare(results), title="One block, six solvers", y="test accuracy, %")]


def findings(results: Results[SolversCompareOptions]) -> Sequence[str | Difference]:
    """Each solver against the reference, and the reference against the plain network."""
    names = [part.name for part in parts(results.options)[3:]]
    return [difference(results, REFERENCE, CONTROL), *(difference(results, name, REFERENCE) for name in names)]


experiment = Experiment(
    name="solvers-compare",
    title="Different solvers in the same block",
    source="ours; set-up of [Bibi2019], §4",
    about=(
        "LeNet without dropout, with one solver after another in its two hidden fully connected blocks: at equal "
        "iterations, and at equal time. At equal time a solver gets as many iterations as fit into the forward and "
        "backward time of the reference, Prox-GD, in the larger block. The control is the plain network."
    ),
    presets={
        "smoke": Preset(
            SolversCompareOptions("digits", 50, limit=100, enlarge=4, epochs=1, iters=2, trials=2), (0,), 0.1
        ),
        "laptop": Preset(SolversCompareOptions(), (0,), 30),
        "paper": Preset(SolversCompareOptions(epochs=300), (0, 1, 2), 5000),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
)

"""Theorems 1 to 3 of "Optimization and Deep Neural Networks", and the same rates over the depth of networks."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from minimand.functions import LayerObjective, Zero
from minimand.nn import OptimizationNet
from minimand.operators import Dense
from minimand.solvers import FISTA, HeavyBall, Problem, ProxGD, Solver, trace

from ...claims import judge_bound, scale
from ...context import Lab
from ...drawing import COLORS, figure, style
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results

SOLVERS = ("gradient descent", "heavy ball, growing", "heavy ball, ½", "Nesterov")
NETWORKS = {
    "network: gd": "gd",
    "network: heavy_ball": "heavy_ball",
    "network: nesterov": "nesterov",
    "network: admm": "admm",
}
THEOREM = {"gradient descent": 1, "heavy ball, growing": 2, "Nesterov": 3, "network: gd": 1, "network: nesterov": 3}
_COLORS = dict(zip(("descent", "growing", "half", "nesterov", "admm"), zip(COLORS, "osD^v", strict=False), strict=True))
LOOKS = {
    "gradient descent": _COLORS["descent"],
    "heavy ball, growing": _COLORS["growing"],
    "heavy ball, ½": _COLORS["half"],
    "Nesterov": _COLORS["nesterov"],
    "network: gd": _COLORS["descent"],
    "network: heavy_ball": _COLORS["half"],
    "network: nesterov": _COLORS["nesterov"],
    "network: admm": _COLORS["admm"],
}


@dataclasses.dataclass(frozen=True)
class StructureRatesOptions:
    """Random convex problems, a new one for every seed.

    Args:
        dimension: Dimension of the unknown.
        iterations: Iterations of every method, and layers of every network.
        condition: Condition number of the quadratic.
        activation: Activation of the networks.
    """

    dimension: int = 100
    iterations: int = 300
    condition: float = 1e5
    activation: str = "tanh"


def parts(options: StructureRatesOptions) -> list[Part]:
    """The solvers on a quadratic, the networks on the objective of Lemma 4."""
    return [Part(name) for name in (*SOLVERS, *NETWORKS)]


def _rotation(n: int, lab: Lab) -> Tensor:
    return torch.linalg.qr(torch.randn(n, n, generator=lab.generator(), dtype=torch.float64)).Q


def _quadratic(options: StructureRatesOptions, lab: Lab) -> tuple[Problem, Tensor]:
    """An ill-conditioned quadratic with L = 1, and its minimiser; the start is zero."""
    n = options.dimension
    spectrum = torch.logspace(0, -torch.log10(torch.tensor(options.condition)).item(), n, dtype=torch.float64)
    weight = _rotation(n, lab) * spectrum.sqrt()
    best = torch.randn(1, n, generator=lab.generator(1), dtype=torch.float64)
    return Problem(Dense(weight), Zero(), best @ weight), best


def _solver(name: str, iterations: int) -> Solver:
    methods: dict[str, Solver] = {
        "gradient descent": ProxGD(iterations, 1.0),
        "heavy ball, growing": HeavyBall(iterations, 1.0, momentum="growing"),
        "heavy ball, ½": HeavyBall(iterations, 1.0, momentum=0.5),
        "Nesterov": FISTA(iterations, 1.0, restart=False),
    }
    return methods[name]


class _Layer(nn.Module):
    def __init__(self, objective: LayerObjective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, x: Tensor) -> Tensor:
        return self.objective.phi(x @ self.objective.weight)


def _depth(options: StructureRatesOptions, lab: Lab, algorithm: str) -> tuple[Tensor, Tensor]:
    """The gap of f after every layer, and the squared distance of the start; x* = 0 for odd activations."""
    n = options.dimension
    q = _rotation(n, lab)
    objective = LayerObjective(q * torch.linspace(0.05, 1 - 1e-3, n, dtype=torch.float64) @ q.mT, options.activation)
    layer = _Layer(objective)
    x = torch.randn(1, n, generator=lab.generator(1), dtype=torch.float64)
    best = objective.lift(OptimizationNet([layer] * (10 * options.iterations), "nesterov")(x))
    points = OptimizationNet([layer] * options.iterations, algorithm).iterates(x)[1:]
    values = torch.stack([objective.value(objective.lift(point)) for point in points])
    return values - objective.value(best), (objective.lift(x) - best).square().sum()


def bound(theorem: int | None, t: Tensor, distance: Tensor) -> Tensor | None:
    """The bound of a theorem after t steps, for smoothness 1."""
    formulas = {1: 2 * distance / t, 2: distance / (2 * (t + 1)), 3: 2 * distance / (t + 1) ** 2}
    return None if theorem is None else formulas[theorem]


def run(options: StructureRatesOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """One method: the gap after every step, and the theorem's bound on it."""
    with torch.no_grad():
        if part in NETWORKS:
            gap, distance = _depth(options, lab, NETWORKS[part])
        else:
            problem, best = _quadratic(options, lab)
            gap = trace(problem, _solver(part, options.iterations)).objective - problem.objective(best)
            distance = best.square().sum()
    t = torch.arange(1, options.iterations + 1, dtype=torch.float64)
    allowed = bound(THEOREM.get(part), t, distance)
    for k in sorted({round(options.iterations ** (i / 70)) - 1 for i in range(71)}):
        record: dict[str, float] = {"step": k + 1, "gap": float(gap[k] / distance)}
        if allowed is not None:
            record["bound"] = float(allowed[k] / distance)
        if k + 1 == options.iterations:
            record["final"] = record["gap"]
            if allowed is not None:
                record["share"] = float((gap / allowed).max())
        yield record


def compare(results: Results[StructureRatesOptions]) -> list[Comparison]:
    """The largest ratio of gap to bound; a theorem states at most 1."""
    return [
        Comparison(
            f"{part}, Theorem {number}", 1.0, results.final(part, "share"), digits=3, note="gap ÷ bound, at most 1"
        )
        for part, number in THEOREM.items()
    ]


def plots(results: Results[StructureRatesOptions]) -> list[Plot]:
    """Gaps with their bounds: solvers over iterations, networks over layers."""
    drawn = figure(10.0, 4.2)
    axes = drawn.subplots(1, 2)
    sentences = []
    for panel, names, x in zip(axes, (SOLVERS, tuple(NETWORKS)), ("iteration", "layer"), strict=True):
        for name in names:
            color, mark = LOOKS[name]
            for seed, values in list(results.curve(name, "gap").items())[:1]:
                if not values:
                    continue
                steps = results.curve(name, "step")[seed]
                label = name.removeprefix("network: ")
                floored = [max(value, 1e-17) for value in values]
                panel.loglog(steps, floored, color=color, marker=mark, markevery=0.2, markersize=5, label=label)
                limits = results.curve(name, "bound")[seed]
                if limits:
                    panel.loglog(steps, limits, "--", color=color, linewidth=1)
                sentences.append(f"{name} {values[-1]:.2g}")
        style(panel, x, "(f − f*) / ‖x₀ − x*‖²")
        panel.set_ylim(bottom=1e-12)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(frameon=False)
    axes[0].set_title("Solvers on a quadratic")
    axes[1].set_title("Networks on the objective of Lemma 4")
    end = ", ".join(sentences) or "nothing measured yet"
    alt = f"Gaps over steps, dashed: bounds of Theorems 1 to 3; at the end: {end}"
    return [Plot("Rates", alt, drawn)]


def findings(results: Results[StructureRatesOptions]) -> Sequence[str]:
    """Whether the bounds hold, and the order of the methods."""
    sentences = []
    for part, number in THEOREM.items():
        shares = results.final(part, "share")
        if shares:
            holds = "holds" if max(shares) <= 1 else "is violated"
            sentences.append(f"Theorem {number} {holds} for {part}: the gap is at most {max(shares):.3f} of the bound.")
    for group in (SOLVERS, tuple(NETWORKS)):
        ends = {name: results.final(name, "final") for name in group}
        ranked = sorted((sum(v) / len(v), name) for name, v in ends.items() if v)
        if ranked:
            sentences.append("Mean final gaps: " + ", ".join(f"{name} ({mean:.2g})" for mean, name in ranked) + ".")
    return sentences


def claims(results: Results[StructureRatesOptions]) -> list[Claim]:
    """The bounds hold for the solvers and for the networks that are the same algorithms."""
    found = []
    for text, names in (
        ("Theorems 1 to 3: bounds for gradient descent, heavy ball and Nesterov", SOLVERS),
        ("Lemma 4: networks obey the bounds of their algorithms", tuple(NETWORKS)),
    ):
        shares = [share for part in names for share in results.final(part, "share")]
        measured = f"at most {max(shares):.2f} of the bound" if shares else "–"
        found.append(
            Claim(text, "gap ÷ bound ≤ 1", measured, scale(results, "random problems"), judge_bound(shares, 1.0))
        )
    return found


experiment = Experiment(
    name="structure-rates",
    title="Rates of gradient descent, heavy ball and Nesterov, and of their networks",
    source="[Lin2019], Theorems 1 to 3 and Lemma 4",
    about=(
        "The solvers of the core on ill-conditioned random quadratics with L = 1, from zero, beside the bounds "
        "2β‖x₁ − x*‖²/(t − 1), ‖x₀ − x*‖²/(2α₀(t + 1)) and 2β‖x₁ − x*‖²/t². By Lemma 4 a network with a symmetric "
        "positive definite weight is the same algorithm on its objective f(z), so its layers obey the same bounds. "
        "Theorem 2 is for shrinking steps α₀/(k + 2)."
    ),
    presets={
        "smoke": Preset(StructureRatesOptions(dimension=12, iterations=25, condition=100.0), (0, 1), 0.05),
        "laptop": Preset(StructureRatesOptions(), (0, 1, 2, 3, 4), 1.0),
        "paper": Preset(StructureRatesOptions(dimension=500, iterations=2000, condition=1e6), (0, 1, 2, 3, 4), 60.0),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
    columns=("step", "gap"),
)

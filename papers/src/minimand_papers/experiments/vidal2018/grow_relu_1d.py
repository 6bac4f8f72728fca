"""A hidden layer grown to a certificate, against fixed widths from random starts."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from minimand.factor import ParallelReLU
from minimand.homogeneous.certificate import objective
from minimand.homogeneous.neurons import Neurons, descend

from ...claims import judge_certificates, scale
from ...context import Lab
from ...drawing import bars, curves, figure, style
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results

GROWN = "grown"


@dataclasses.dataclass(frozen=True)
class GrowReLU1DOptions:
    """A noisy function of one variable.

    Args:
        samples: Number of samples of the function.
        lam: The weight of the regulariser.
        widths: Fixed widths.
        starts: Random starts for each width.
        iterations: Iterations of L-BFGS for each start.
    """

    samples: int = 40
    lam: float = 0.3
    widths: tuple[int, ...] = (2, 4, 8, 16, 32)
    starts: int = 30
    iterations: int = 500

    def draw(self, lab: Lab) -> tuple[torch.Tensor, torch.Tensor]:
        """The samples of this seed, as columns."""
        generator = lab.generator()
        x = (4 * torch.rand(self.samples, 1, generator=generator, dtype=torch.float64) - 2).sort(0).values
        noise = torch.randn(self.samples, 1, generator=generator, dtype=torch.float64)
        return x, torch.sin(3 * x) + 0.5 * x + 0.1 * noise


def parts(options: GrowReLU1DOptions) -> list[Part]:
    """The grown network, and every fixed width."""
    return [Part(GROWN), *(Part(f"width {width}") for width in options.widths)]


def run(options: GrowReLU1DOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Grow, or descend from random starts."""
    x, y = options.draw(lab)
    if part == GROWN:
        model = ParallelReLU(options.lam, grow=1, random_state=lab.seed).fit(x.numpy(), y.numpy()[:, 0])
        for k, (value, width, gap) in enumerate(
            zip(model.history_, model.width_history_, model.gap_history_, strict=True)
        ):
            yield {"round": k, "objective": float(value), "width": int(width), "gap": float(gap)}
        grid = np.linspace(-2.2, 2.2, 121)
        yield {
            "round": model.n_iter_,
            "objective": float(model.objective_),
            "lower": float(model.objective_ - model.certificate_.gap),
            "certified": str(model.certificate_.status) == "CERTIFIED",
            "x": [round(v, 4) for v in x[:, 0].tolist()],
            "y": [round(v, 4) for v in y[:, 0].tolist()],
            "fit": [round(float(v), 4) for v in model.predict(grid[:, None])],
        }
        return
    width = int(part.removeprefix("width "))
    X = torch.cat([x, torch.ones_like(x)], 1)
    values = []
    for start in range(options.starts):
        generator = lab.generator(start + 1)
        weights = [torch.randn(width, size, generator=generator, dtype=torch.float64) for size in (2, 1)]
        values.append(objective(X, y, *descend(X, y, Neurons(*weights), options.lam, options.iterations), options.lam))
    yield {"objective": min(values), "worst": max(values), "median": float(np.median(values))}


def excess(results: Results[GrowReLU1DOptions], part: str, key: str) -> list[float]:
    """By how many percent an objective lies above the proved lower bound of the same seed."""
    bounds, values = results.curve(GROWN, "lower"), results.curve(part, key)
    return [100 * (values[s][-1] / bounds[s][-1] - 1) for s in values if values[s] and bounds.get(s)]


def compare(results: Results[GrowReLU1DOptions]) -> list[Comparison]:
    """Everything against the proved lower bound."""
    rows = [Comparison("grown: above the proved lower bound", None, excess(results, GROWN, "objective"), "%", 4)]
    rows.append(Comparison("grown: neurons", None, results.final(GROWN, "width"), "", 0))
    for width in results.options.widths:
        for key, name in (("objective", "best"), ("median", "median")):
            label = f"width {width}: {name} of the starts above the bound"
            rows.append(Comparison(label, None, excess(results, f"width {width}", key), "%", 4))
    return rows


def plots(results: Results[GrowReLU1DOptions]) -> list[Plot]:
    """The gap and the neurons as it grows, growth against fixed widths, and the fit."""
    gap = curves(
        results, [GROWN], key="gap", over="round", title="Relative gap as it grows", y="relative gap", log=True
    )
    neurons = curves(results, [GROWN], key="width", over="round", title="Neurons as it grows", y="neurons")
    rows = [Comparison(GROWN, None, excess(results, GROWN, "objective"), "%", 4)]
    for part in (f"width {width}" for width in results.options.widths):
        for key, name in (("objective", "best"), ("median", "median")):
            rows.append(Comparison(f"{part}, {name} start", None, excess(results, part, key), "%", 4))
    against = bars(rows, title="Growth against fixed widths", y="above the lower bound, %")
    against.figure.axes[0].set_xscale("log")
    drawn = figure()
    axes = drawn.subplots()
    ends = [records[-1] for records in results.records.get(GROWN, {}).values() if records and "fit" in records[-1]]
    if ends:
        axes.plot(ends[0]["x"], ends[0]["y"], "o", color="#999999", markersize=4, label="samples")
        axes.plot(np.linspace(-2.2, 2.2, 121), ends[0]["fit"], color="#0072B2", label="grown network")
        axes.legend(frameon=False)
    style(axes, "x", "y", "The fit")
    return [gap, neurons, against, Plot("The fit", "Samples and the grown network's piecewise linear function", drawn)]


def findings(results: Results[GrowReLU1DOptions]) -> Sequence[str]:
    """The certificate, and the objectives reached from random starts."""
    sentences = []
    grown = excess(results, GROWN, "objective")
    if grown:
        certified = results.final(GROWN, "certified")
        sentences.append(
            f"The grown network is certified in {int(sum(certified))} of {len(certified)} seeds, at most "
            f"{max(grown):.2g}% above the "
            f"minimum over all widths."
        )
    for width in results.options.widths:
        median = excess(results, f"width {width}", "median")
        if median:
            ends = f"{min(median):.2g} to {max(median):.2g}%" if len(median) > 1 else f"{median[0]:.2g}%"
            sentences.append(f"Width {width}: the median of the random starts ends {ends} above it.")
    return sentences


def claims(results: Results[GrowReLU1DOptions]) -> list[Claim]:
    """The meta-algorithm ends at the global minimum over all widths."""
    status = ["CERTIFIED" if value else "UNDECIDED" for value in results.final(GROWN, "certified")]
    above = excess(results, GROWN, "objective")
    text = "Theorems 1 and 2: growing a ReLU layer ends at the global minimum over all widths (one input)"
    measured = f"certified in {status.count('CERTIFIED')} of {len(status)}, gap at most {max(above, default=0):.2g} %"
    verdict = judge_certificates(status, above)
    return [Claim(text, "gap 0", measured if status else "–", scale(results, "1-D data"), verdict)]


experiment = Experiment(
    name="grow-relu-1d",
    title="A hidden layer grown to the global minimum",
    source="[Vidal2018], Theorems 1 and 2, the meta-algorithm",
    about=(
        "Regression of a noisy function of one variable by one hidden layer of ReLUs with the product of norms "
        "as regulariser. "
        "Growth stops at a duality gap; fixed widths start at random and have no such proof. The control is "
        "L-BFGS on the same "
        "objective. The slides have no numbers."
    ),
    presets={
        "smoke": Preset(GrowReLU1DOptions(samples=12, lam=0.5, widths=(2, 6), starts=3, iterations=60), (0,), 0.05),
        "laptop": Preset(GrowReLU1DOptions(), (0, 1, 2), 3),
        "paper": Preset(GrowReLU1DOptions(samples=100, starts=100), (0, 1, 2), 30),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
    columns=("width", "gap"),
)

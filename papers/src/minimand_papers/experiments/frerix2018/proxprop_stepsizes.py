"""Table 1 of "Proximal Backpropagation": the final loss over step sizes, and where training is stable."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...claims import combine, judge_gain, scale, span
from ...comparing import mean_std
from ...context import Lab
from ...drawing import figure
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ...sweeps import Sweep, range_plot, shares
from ._proxprop import BACKPROP, UNIT, ProxPropImageOptions, fitted, mlp, nesterov, precondition, scaled

RATES = (50.0, 10.0, 5.0, 1.0, 0.5, 0.1, 0.05, 5e-3, 5e-4)
_NONE = (math.nan,) * 5
PAPER: Mapping[str, tuple[float, ...]] = {
    BACKPROP: (*_NONE, 0.524, 0.091, 0.637, 1.531),
    "ProxProp (cg1)": (77.9, 0.079, 0.145, 0.667, 0.991, 1.481, 1.593, 1.881, 2.184),
    "ProxProp (cg3)": (94.7, 0.644, 0.031, 2e-3, 0.012, 1.029, 1.334, 1.814, 2.175),
    "ProxProp (cg5)": (66.5, 0.190, 0.027, 3e-4, 2e-3, 0.399, 1.049, 1.765, 2.175),
}
VARIANTS = (*PAPER, "ProxProp (exact)")


@dataclasses.dataclass(frozen=True)
class ProxPropStepSizesOptions(ProxPropImageOptions):
    """The network 3072-4000-1000-4000-10 with Nesterov momentum 0.95, at step sizes over five orders of magnitude.

    Args:
        epochs: Epochs of every run.
        width: A factor on the hidden widths.
        rates: The step sizes τ.
        tau_theta: The proximal step τθ of ProxProp, for a mean loss and batches of 500.
    """

    epochs: int = 10
    width: float = 0.25
    rates: tuple[float, ...] = RATES
    tau_theta: float = 1.0


def _name(method: str, rate: float) -> str:
    return f"{method}, τ = {rate:g}"


def parts(options: ProxPropStepSizesOptions) -> list[Part]:
    """The cells of the table, and a row of exact solves that it does not have."""
    return [
        Part(_name(method, rate) + kind) for kind in options.kinds() for method in VARIANTS for rate in options.rates
    ]


def run(options: ProxPropStepSizesOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train one network from scratch."""
    data = options.loaders_for(lab, part)
    method, _, rate = part.removesuffix(UNIT).partition(", τ = ")
    model = mlp(data, options.width).to(lab.device)
    optimizer = nesterov(model, float(rate))
    precondition(model, optimizer, method, options.tau_theta)
    yield from fitted(lab, model, optimizer, data, options.epochs)


def _paper(method: str, rate: float, dataset: str) -> float | None:
    """The source's number for a cell; NaN for a dash."""
    if dataset != "cifar10" or rate not in RATES or method not in PAPER:
        return None
    return PAPER[method][RATES.index(rate)]


def compare(results: Results[ProxPropStepSizesOptions]) -> list[Comparison]:
    """The final full-batch loss beside the paper's."""
    options = results.options
    rows = []
    for method in VARIANTS:
        for rate in options.rates:
            paper = _paper(method, rate, options.dataset)
            losses = results.final(_name(method, rate), "loss")
            note = scaled(results, options.epochs, options.width) if method in PAPER else "not in the paper's table"
            if 0 < sum(map(math.isnan, losses)) < len(losses):
                note = f"diverged in {sum(map(math.isnan, losses))} of {len(losses)} seeds; {note}".removesuffix("; ")
            rows.append(Comparison(_name(method, rate), paper, losses, digits=4, note=note))
    unit = [_name(method, rate) + UNIT for method in VARIANTS for rate in options.rates]
    rows += [Comparison(part, None, found, digits=4) for part in unit if (found := results.final(part, "loss"))]
    return rows


def _measured(results: Results[ProxPropStepSizesOptions]) -> dict[str, list[float | None]]:
    """The mean losses; None if nothing was measured, NaN if a seed diverged."""
    table: dict[str, list[float | None]] = {}
    for method in VARIANTS:
        losses = [results.final(_name(method, rate), "loss") for rate in results.options.rates]
        table[method] = [mean_std(values)[0] if values else None for values in losses]
    return table


def _cells(axes: Any, table: Mapping[str, Sequence[float | None]], rates: Sequence[float], title: str) -> None:
    """A table of losses as coloured cells; a dash is a run that diverged."""
    from matplotlib.colors import LogNorm

    shown = [[math.nan if loss is None else loss for loss in losses] for losses in table.values()]
    axes.set_facecolor("#DDDDDD")
    axes.imshow(shown, norm=LogNorm(1e-3, 10.0), cmap="viridis", aspect="auto")
    for row, losses in enumerate(table.values()):
        for column, loss in enumerate(losses):
            if loss is not None:
                word = "–" if math.isnan(loss) else f"{loss:.2g}"
                dark = math.isfinite(loss) and loss < 0.3
                axes.text(column, row, word, ha="center", va="center", color="white" if dark else "black", fontsize=8)
    axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axes.set_yticks(range(len(table)), list(table))
    axes.set_xlabel("step size τ")
    axes.set_title(title)


def _ranges(
    table: Mapping[str, Sequence[float | None]], rates: Sequence[float], bound: float
) -> dict[str, list[float]]:
    """The step sizes at which a method ended below ``bound``."""
    return {
        method: [rate for rate, loss in zip(rates, losses, strict=True) if loss is not None and loss < bound]
        for method, losses in table.items()
    }


def _classes(options: ProxPropStepSizesOptions) -> int:
    return 100 if options.dataset == "cifar100" else 10


def _guess(options: ProxPropStepSizesOptions) -> float:
    """The loss of equal probabilities for all classes."""
    return math.log(_classes(options))


def _sweeps(results: Results[ProxPropStepSizesOptions]) -> dict[str, Sweep]:
    """The test accuracies of every method over the step sizes; a run that diverged counts as a guess."""
    chance, found = 100 / _classes(results.options), dict[str, Sweep]()
    for method in VARIANTS:
        runs = {rate: results.final(_name(method, rate), "test") for rate in sorted(results.options.rates)}
        found[method] = {rate: [chance if x != x else x for x in values] for rate, values in runs.items() if values}
    return found


def plots(results: Results[ProxPropStepSizesOptions]) -> list[Plot]:
    """The table in colours, the paper's below it; and the test accuracy over the step sizes."""
    options = results.options
    table = _measured(results)
    with_paper = options.dataset == "cifar10"
    drawn = figure(8.0, 5.2 if with_paper else 2.8)
    panels = drawn.subplots(2 if with_paper else 1, 1, squeeze=False)
    _cells(panels[0][0], table, options.rates, f"Full-batch loss after {options.epochs} epochs, measured")
    if with_paper:
        _cells(panels[1][0], PAPER, RATES, "The paper's, after 50 epochs at full width")
    sentences = [
        f"{method} at {', '.join(f'{rate:g}' for rate in good) or 'none'}"
        for method, good in _ranges(table, options.rates, _guess(options)).items()
    ]
    alt = f"Full-batch loss by method and step size. Ended below the loss of a guess: {'; '.join(sentences)}"
    ranges = range_plot("Range of step sizes that work", _sweeps(results), x="step size τ")
    return [Plot("Stable ranges of the step size", alt, drawn), ranges]


def findings(results: Results[ProxPropStepSizesOptions]) -> Sequence[str]:
    """For every method the best step size, the width of the usable range, and the step sizes at which it diverges."""
    rates = results.options.rates
    table = _measured(results)
    sentences = []
    for method, good in _ranges(table, rates, _guess(results.options)).items():
        pairs = [(loss, rate) for loss, rate in zip(table[method], rates, strict=True) if loss is not None]
        if not pairs:
            continue
        lost = [f"{rate:g}" for loss, rate in pairs if math.isnan(loss)]
        diverged = (
            f"diverged to NaN (in at least one seed) at τ = {', '.join(lost)}" if lost else "diverged to NaN nowhere"
        )
        if not good:
            sentences.append(f"{method} ended below the loss of a guess at no step size; it {diverged}.")
            continue
        loss, best = min((loss, rate) for loss, rate in pairs if math.isfinite(loss))
        decades = math.log10(max(good) / min(good))
        sentences.append(
            f"{method} is best at τ = {best:g} with a loss of {loss:.4g}; it ended below the loss of a guess at "
            f"{len(good)} of {len(pairs)} step sizes, over {decades:.1f} decades, and {diverged}."
        )
    if words := shares(_sweeps(results)):
        sentences.append(
            f"Step sizes with a mean test accuracy within a point of the best, a run that diverged counted as a guess: "
            f"{words}."
        )
    return sentences


def claims(results: Results[ProxPropStepSizesOptions]) -> list[Claim]:
    """Table 1: the range of usable step sizes, and the lowest loss."""
    options = results.options
    words = scale(
        results,
        f"{options.limit or 45_000:,} CIFAR-10 images",
        f"{options.epochs} of 50 epochs",
        f"widths × {options.width:g}",
    )
    ours = _decades(_measured(results), options.rates, _guess(options))
    theirs = _decades(PAPER, RATES, _guess(options))
    implicit = [method for method in PAPER if method != BACKPROP]
    wider = [ours[method] - ours[BACKPROP] for method in implicit if method in ours and BACKPROP in ours]
    claimed = [theirs[method] - theirs[BACKPROP] for method in implicit]
    best = {method: _best(results, method) for method in PAPER}
    gains = [[math.log10(b / o) for o, b in zip(best[method], best[BACKPROP], strict=True)] for method in implicit]
    return [
        Claim(
            "Table 1: ProxProp trains over a wider range of step sizes (final loss below that of a guess)",
            f"BackProp {theirs[BACKPROP]:.1f}, ProxProp {span([theirs[m] for m in implicit])} decades",
            f"BackProp {ours.get(BACKPROP, 0):.1f}, ProxProp {span([ours[m] for m in implicit if m in ours])} decades",
            words,
            combine(["reproduced" if a >= b / 2 else "not" for a, b in zip(wider, claimed, strict=False)]),
        ),
        Claim(
            "Table 1: the lowest loss over step sizes is below BackProp's (cg1, cg3, cg5)",
            ", ".join(f"{min(v for v in PAPER[m] if math.isfinite(v)):g}" for m in implicit)
            + f"; BackProp {min(v for v in PAPER[BACKPROP] if math.isfinite(v)):g}",
            ", ".join(f"{mean_std(best[m])[0]:.3g}" for m in implicit if best[m])
            + (f"; BackProp {mean_std(best[BACKPROP])[0]:.3g}" if best[BACKPROP] else ""),
            words,
            combine([judge_gain(values) for values in gains]),
        ),
    ]


def _decades(table: Mapping[str, Sequence[float | None]], rates: Sequence[float], bound: float) -> dict[str, float]:
    """The width of the range of usable step sizes, in powers of ten."""
    found = _ranges(table, rates, bound)
    return {method: math.log10(max(good) / min(good)) for method, good in found.items() if good}


def _best(results: Results[ProxPropStepSizesOptions], method: str) -> list[float]:
    """For each seed the loss at the step size with the lowest mean loss."""
    means = dict(zip(results.options.rates, _measured(results)[method], strict=True))
    finite = {rate: mean for rate, mean in means.items() if mean is not None and math.isfinite(mean)}
    return results.final(_name(method, min(finite, key=lambda rate: finite[rate])), "loss") if finite else []


experiment = Experiment(
    name="proxprop-stepsizes",
    title="The range of stable step sizes of implicit and explicit steps",
    source="[Frerix2018], Table 1",
    about=(
        "The fully connected network trained with Nesterov momentum 0.95 at nine step sizes τ from 50 to 0.0005: "
        "BackProp, ProxProp with 1, 3 and 5 conjugate gradient iterations and, beyond the paper's table, exact "
        "solves, all with τθ = 1. The number is the final loss of the whole training set. A run whose loss or "
        "gradient is not finite stops and counts as diverged, a dash in the paper. The paper claims that implicit "
        "steps are stable over a far wider range."
    ),
    presets={
        "smoke": Preset(
            ProxPropStepSizesOptions("digits", batch=100, limit=200, epochs=3, width=0.01, rates=(50.0, 1.0, 0.05)),
            (0,),
            0.05,
        ),
        "laptop": Preset(ProxPropStepSizesOptions(limit=10_000), (0, 1, 2, 3, 4), 210),
        "paper": Preset(ProxPropStepSizesOptions(epochs=50, width=1.0), (0, 1), 16_000),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
)

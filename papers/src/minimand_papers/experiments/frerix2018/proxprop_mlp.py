"""Figure 2 of "Proximal Backpropagation": exact and inexact implicit steps on a fully connected network."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from ...claims import ACCURACY, combine, judge_bound, judge_gain, scale, span
from ...comparing import Difference, difference, mean_std
from ...context import Lab
from ...drawing import bars
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._proxprop import (
    BACKPROP,
    PUBLISHED,
    UNIT,
    ProxPropImageOptions,
    best_validation,
    equal_loss,
    figures,
    fitted,
    lower,
    mlp,
    nesterov,
    precondition,
    scaled,
)

VARIANTS = (BACKPROP, "ProxProp (exact)", "ProxProp (cg3)", "ProxProp (cg5)", "ProxProp (cg10)")
TRAINED = (*VARIANTS, PUBLISHED)
WIDE = ", time at full width"


@dataclasses.dataclass(frozen=True)
class ProxPropMLPOptions(ProxPropImageOptions):
    """The network 3072-4000-1000-4000-10 with Nesterov momentum 0.95, by explicit and implicit steps.

    Args:
        epochs: Epochs of every method.
        width: A factor on the hidden widths.
        timed_epochs: Epochs of the same comparison at ``timed_width``, for the time axis; 0: none.
        timed_width: The factor on the hidden widths in the timed comparison.
        backprop_rate: The step size τ of BackProp.
        rate: The step size τ of ProxProp.
        tau_theta: The proximal step τθ of ProxProp, for a mean loss and batches of 500.
    """

    epochs: int = 10
    width: float = 0.25
    timed_epochs: int = 1
    timed_width: float = 1.0
    backprop_rate: float = 0.05
    rate: float = 1.0
    tau_theta: float = 0.05


def parts(options: ProxPropMLPOptions) -> list[Part]:
    """Every method, and every method again for its time at full width."""
    wide = [Part(method + WIDE) for method in VARIANTS] if options.timed_epochs else []
    return [*(Part(method + kind) for kind in options.kinds() for method in TRAINED), *wide]


def run(options: ProxPropMLPOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train one network from scratch."""
    data = options.loaders_for(lab, part)
    method, wide = part.removesuffix(WIDE).removesuffix(UNIT), part.endswith(WIDE)
    model = mlp(data, options.timed_width if wide else options.width).to(lab.device)
    optimizer = nesterov(model, options.backprop_rate if method == BACKPROP else options.rate)
    precondition(model, optimizer, method, options.tau_theta)
    yield from fitted(lab, model, optimizer, data, options.timed_epochs if wide else options.epochs)


def compare(results: Results[ProxPropMLPOptions]) -> list[Comparison]:
    """Test accuracy beside the paper's, the final loss, and the time of training."""
    options = results.options
    note = scaled(results, options.epochs, options.width)
    rows = []
    measured = [method + kind for kind in options.kinds() for method in TRAINED if results.final(method + kind, "loss")]
    for part in measured or VARIANTS:
        paper = None if part.startswith(PUBLISHED) else 54.0 if part.startswith(BACKPROP) else 56.0
        own = None if paper is None else options.paper({"cifar10": paper})
        rows.append(Comparison(f"{part}, test accuracy", own, results.final(part, "test"), "%", note=note))
    for part in measured:
        rows.append(Comparison(f"{part}, best validation accuracy", None, best_validation(results, part), "%"))
    for part in measured:
        base = BACKPROP + (UNIT if part.endswith(UNIT) else "")
        found = equal_loss(results, part, base)
        if found and part != base:
            rows.append(Comparison(f"{part}, validation accuracy at BackProp's final loss", None, found, "%"))
    for part in measured or VARIANTS:
        rows.append(Comparison(f"{part}, full-batch loss", None, results.final(part, "loss"), digits=4))
    for method in VARIANTS if options.timed_epochs else ():
        note = f"epochs: {options.timed_epochs}, widths × {options.timed_width:g}"
        rows.append(Comparison(method + WIDE, None, results.final(method + WIDE, "training"), " s", note=note))
    return rows


def plots(results: Results[ProxPropMLPOptions]) -> list[Plot]:
    """The panels of the figure, and the test accuracies as bars."""
    shown = [row for row in compare(results) if row.label.endswith("test accuracy")]
    drawn = [method + kind for kind in results.options.kinds() for method in TRAINED]
    return [
        *figures(results, [part for part in drawn if results.final(part, "loss")] or list(VARIANTS)),
        bars(shown, title="Test accuracy", y="accuracy, %"),
    ]


def findings(results: Results[ProxPropMLPOptions]) -> Sequence[str | Difference]:
    """Loss, accuracy and time against BackProp."""
    sentences = []
    for kind in results.options.kinds():
        for method in (method + kind for method in TRAINED[1:] if kind == "" or results.final(method + kind, "loss")):
            pair = method, BACKPROP + kind
            sentences += [lower(results, *pair), difference(results, *pair, quantity="test accuracy")]
    exact, inexact = VARIANTS[1:3]
    sentences.append(lower(results, exact, inexact))
    for method in VARIANTS[1:] if results.options.timed_epochs else ():
        pair = method + WIDE, BACKPROP + WIDE
        sentences.append(difference(results, *pair, "training", unit=" s", higher=False, quantity="training time"))
    return sentences


def claims(results: Results[ProxPropMLPOptions]) -> list[Claim]:
    """Figure 2: progress per epoch, the effect of precision, run time and test accuracy."""
    options = results.options
    words = scale(results, "CIFAR-10", f"{options.epochs} of 50 epochs", f"widths × {options.width:g}")
    methods = VARIANTS[1:]
    lower_loss = {m: [-gap for gap in results.paired(m, BACKPROP, "log_loss")] for m in methods}
    precise = ("ProxProp (cg3)", "ProxProp (cg5)", "ProxProp (cg10)", "ProxProp (exact)")
    steps = [[-gap for gap in results.paired(more, less, "log_loss")] for less, more in itertools.pairwise(precise)]
    accuracy = {m: results.paired(m, BACKPROP, "test") for m in methods}
    ratios = {m: _ratios(results, m) for m in methods}
    means = [mean_std(values)[0] for values in lower_loss.values() if values]
    timed = f"{options.timed_epochs} epoch at widths × {options.timed_width:g}"
    return [
        Claim(
            "Figure 2: implicit steps lower the training loss faster per epoch, even with 3 CG iterations",
            "–",
            f"loss lower by {span(means, ' decades', 2)} (exact, cg3, cg5, cg10)",
            words,
            combine([judge_gain(values) for values in lower_loss.values()]),
        ),
        Claim(
            "Figure 2: a more precise solve lowers the loss faster (cg3, cg5, cg10, exact)",
            "–",
            "loss lower by "
            + ", ".join(f"{mean_std(gaps)[0]:.2f}" for gaps in steps if gaps)
            + " decades from one to the next",
            words,
            combine([judge_gain(gaps) for gaps in steps]),
        ),
        Claim(
            "Figure 2: run time comparable to BackProp's (here: at most 1.5 times, CPU)",
            "–",
            ", ".join(f"{m.removeprefix('ProxProp ')} {mean_std(r)[0]:.2f}×" for m, r in ratios.items() if r),
            scale(results, timed),
            combine([judge_bound(values, 1.5) for values in ratios.values()]),
        ),
        Claim(
            "Figure 2: test accuracy about 2 points above BackProp's",
            "54 → 56 %",
            span([mean_std(values)[0] for values in accuracy.values() if values], " points", 2, plus=True),
            words,
            combine([judge_gain(values, 2.0, single=ACCURACY) for values in accuracy.values()]),
        ),
    ]


def _ratios(results: Results[ProxPropMLPOptions], method: str) -> list[float]:
    """The training time of a method over BackProp's, by seed."""
    ours, theirs = (results.curve(part + WIDE, "training") for part in (method, BACKPROP))
    return [ours[seed][-1] / theirs[seed][-1] for seed in ours if ours[seed] and theirs.get(seed)]


experiment = Experiment(
    name="proxprop-mlp",
    title="Exact and inexact implicit steps on a fully connected network",
    source="[Frerix2018], Figure 2",
    about=(
        "A fully connected ReLU network trained with Nesterov momentum 0.95 on batches of 500. BackProp takes τ = "
        "0.05, the best of the paper's grid search; ProxProp takes τ = 1 and τθ = 0.05, with exact solves and with "
        "3, 5 and 10 conjugate gradient iterations. The paper claims a faster decrease per epoch with a more "
        "precise solve, comparable time, and two more points of test accuracy. Inputs are standardised or pixels/255, "
        "which the authors feed. One variant is the recurrence of the authors' public code, in which residual and "
        "search direction share their memory: it is no conjugate gradient method. The loss is that of the whole "
        "training set after each epoch. Times are those of the training steps and depend on other load of the "
        "machine."
    ),
    presets={
        "smoke": Preset(
            ProxPropMLPOptions("digits", batch=100, limit=300, epochs=4, width=0.01, timed_width=0.02), (0, 1), 0.05
        ),
        "laptop": Preset(ProxPropMLPOptions(), (0, 1, 2, 3, 4), 190),
        "paper": Preset(ProxPropMLPOptions(epochs=50, width=1.0, timed_epochs=0), (0, 1), 1800),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
)

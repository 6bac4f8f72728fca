"""Tables 4 and 5 of "Deep Layers as Stochastic Solvers" on a strong network, every learning rate tuned."""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from minimand.errors import OptionError, require_positive
from minimand.solvers import ProxGD, ProxSG, Solver

from ...claims import combine, judge_bound, judge_gain, judge_parity, not_run, scale, signed, span
from ...comparing import Difference, difference, mean_std
from ...context import Lab
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results, Verdict
from ...features import Features, HeadTraining, cache, cached, head_accuracy, train_head
from ...recipe import FastRecipe, augmentation, fast_train
from ...sweeps import Sweep, best_of, edges, range_plot, shares, usable
from ...training import Loaders, loaders
from ...zoo import FastNet
from ...zoo.fastnet import head
from .._solvers import ImageOptions, solved
from .solvers_dropout_rates import PAPER as PAPER_RATES

NET = "FastNet"
BASELINE, LONGER, ONE, SAMPLED, FULL = "dropout", "dropout, equal compute", "one step", "Prox-SG", "Prox-GD"
METHODS = (BASELINE, LONGER, ONE, SAMPLED, FULL)
BOTH = "both blocks"


@dataclasses.dataclass(frozen=True)
class SolversHeadsOptions(ImageOptions):
    """A strong network is trained once; heads with dropout or solvers are trained on its features.

    Args:
        batch: Images in a batch of the network's training.
        epochs: Epochs of the network's training.
        restart: Epochs of a second cycle of its learning rate.
        width: A factor on its channels.
        hidden: Units of the hidden layers of the network's own head, which is not kept.
        units: Units of the hidden layers of the heads that are compared.
        passes: Augmented passes over the training images whose features are kept; one pass is an epoch of a head.
        p: The dropout rates before the last hidden layer; the layer before it keeps 0.5. Prox-SG samples 1 − p.
        rates: Learning rates, the same for every method; one is chosen on validation images.
        heads: Heads with their own initial weights and batches, for each rate.
        iters: Iterations of the solvers.
        trials: Evaluations of a stochastic head that are averaged.
        bfloat16: Compute products in bfloat16 in training, of the network and of all heads, on devices with
            instructions for it; accuracies are measured in float32.
    """

    batch: int = 500
    epochs: int = 10
    restart: int = 4
    width: float = 0.75
    hidden: int = 512
    units: int = 256
    passes: int = 1
    p: tuple[float, ...] = (0.0, 0.1, 0.5, 0.9, 0.95)
    rates: tuple[float, ...] = (0.0015, 0.005, 0.015, 0.05, 0.15, 0.5, 1.5)
    heads: int = 10
    iters: int = 10
    trials: int = 1
    bfloat16: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.p or not all(0 <= p < 1 for p in self.p):
            raise OptionError(f"a dropout rate p is in [0, 1), got {', '.join(map(str, self.p)) or 'none'}")
        for rate in self.rates:
            require_positive("rates", rate)
        if self.heads < 1 or self.passes < 1 or not self.rates:
            raise OptionError("give at least one head, one pass and one rate")

    @property
    def recipe(self) -> FastRecipe:
        """How the network is trained."""
        return FastRecipe(self.epochs, self.restart, bfloat16=self.bfloat16)

    def strong(self, lab: Lab) -> Loaders:
        """Batches with the recipe's augmentation."""
        limit = self.limit or None
        augment = augmentation() if self.dataset.startswith("cifar") else None
        return loaders(lab, self.dataset, self.batch, augment=augment, limit=limit, enlarge=self.enlarge)


def name(p: float, method: str) -> str:
    """The part of a method at a rate of the last block."""
    return f"p = {p:g}, {method}"


def parts(options: SolversHeadsOptions) -> list[Part]:
    """The network; then every p with its methods, so that an unfinished run has whole rows: the highest p first, then
    the one in the middle, then the others; then both blocks at 0.5, and the controls that cost most."""
    ranked = sorted(options.p, reverse=True)
    order = list(dict.fromkeys([ranked[0], ranked[len(ranked) // 2], ranked[-1], *ranked]))
    found = [name(p, method) for p in order for method in (BASELINE, ONE, SAMPLED)]
    found += [f"{BOTH}, {method}" for method in (BASELINE, SAMPLED)]
    found += [name(p, FULL) for p in order if p in (0.0, 0.5)]
    found += [name(p, LONGER) for p in order]
    return [Part(NET), *(Part(part, (NET,)) for part in found)]


def run(options: SolversHeadsOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train the network and keep its features, or train heads at every learning rate."""
    if part == NET:
        data = options.strong(lab)
        model = FastNet(data.classes, data.shape[0], width=options.width, hidden=options.hidden)
        model.whiten(data.train.normalize(data.train.split.images[:5000]))
        yield from fast_train(lab, model, data, options.recipe)
        cache(lab, model.features, data, options.passes)
        return
    features = cached(lab, NET)
    # Heads are the outer loop, so that an unfinished run has heads with every rate.
    pairs = [(number, rate) for number in range(options.heads) for rate in options.rates]
    for index in lab.epochs(len(pairs)):
        number, rate = pairs[index]
        torch.manual_seed(7_919 * lab.seed + 104_729 * number)
        net = network(options, part, features)
        epochs = options.iters if part.endswith(LONGER) else 1
        how = HeadTraining(rate, epochs, bfloat16=options.bfloat16)
        train_head(net, features, how, torch.Generator().manual_seed(lab.seed + 31 * number))
        count = options.trials if part.endswith(SAMPLED) else 1
        yield {
            "epoch": index + 1,
            "head": number,
            "rate": rate,
            "validation": head_accuracy(net, features.validation, count),
            "test": head_accuracy(net, features.test, count),
        }


def network(options: SolversHeadsOptions, part: str, features: Features) -> nn.Module:
    """A new head with dropout, or with solvers as its last block or both."""
    both = part.startswith(BOTH)
    p = 0.5 if both else float(part.partition(",")[0].removeprefix("p = "))
    rows, labels = features.train
    model = head(rows.shape[1], int(labels.max()) + 1, hidden=options.units, dropout=(0.5, p))
    solvers: dict[str, Solver] = {
        SAMPLED: ProxSG(options.iters, tau=1 - p),
        ONE: ProxSG(1, tau=1 - p),
        FULL: ProxGD(options.iters),
    }
    method = part.partition(", ")[2]
    blocks = ("1", "4") if both else ("4",)
    return solved(model, dict.fromkeys(blocks, solvers[method]) if method in solvers else {})


def complete(results: Results[SolversHeadsOptions], part: str, seed: int) -> dict[int, dict[float, Metrics]]:
    """The records of the heads that have been trained at every rate, by head and rate."""
    found: dict[int, dict[float, Metrics]] = {}
    for record in results.records.get(part, {}).get(seed, ()):
        found.setdefault(int(record["head"]), {})[float(record["rate"])] = record
    return {number: runs for number, runs in found.items() if set(runs) >= set(results.options.rates)}


def over_rates(results: Results[SolversHeadsOptions], part: str, key: str = "test") -> dict[float, list[float]]:
    """The accuracies of all complete heads at every rate."""
    runs = [run for seed in results.records.get(part, {}) for run in complete(results, part, seed).values()]
    return {rate: [float(run[rate][key]) for run in runs] for rate in results.options.rates} if runs else {}


def tuned(results: Results[SolversHeadsOptions]) -> Results[SolversHeadsOptions]:
    """The heads at the learning rate with the best mean validation accuracy of their network; each head counts as a
    seed, so that heads with the same number are compared in pairs."""
    records: dict[str, dict[int, Sequence[Metrics]]] = {}
    for part in results.parts():
        if part == NET:
            continue
        records[part] = {}
        for seed in results.records[part]:
            heads = complete(results, part, seed)
            if heads:
                mean = {r: statistics.fmean(h[r]["validation"] for h in heads.values()) for r in results.options.rates}
                best = max(mean, key=lambda rate: mean[rate])
                records[part] |= {1000 * seed + number: [runs[best]] for number, runs in heads.items()}
    return dataclasses.replace(results, records=records)


def at(results: Results[SolversHeadsOptions], p: float) -> dict[str, Sweep]:
    """All methods at ``p``, at every learning rate."""
    return {method: over_rates(results, name(p, method)) for method in METHODS}


def compare(results: Results[SolversHeadsOptions]) -> list[Comparison]:
    """The network, then every method at its best rate, with the range of rates that work."""
    rows = [
        Comparison(NET, None, results.final(NET, "test"), "%"),
        Comparison(f"{NET}, with mirror images", None, results.final(NET, "mirrored test"), "%"),
    ]
    chosen = tuned(results)
    for part in chosen.parts():
        p = 0.5 if part.startswith(BOTH) else float(part.partition(",")[0].removeprefix("p = "))
        notes = []
        if (found := usable(over_rates(results, part), best_of(at(results, p).values()))) is not None:
            notes.append(f"mean over the rates {found[0]:.1f} %; {found[1]:.0%} of them within a point of the best")
        method = part.partition(", ")[2]
        if p in PAPER_RATES and not part.startswith(BOTH) and method in (BASELINE, SAMPLED):
            number = PAPER_RATES[p][method == SAMPLED]
            notes.append(f"source, VGG16 on CIFAR-100: {number} %")
        rows.append(Comparison(part, None, chosen.final(part, "test"), "%", note="; ".join(notes)))
    return rows


def plots(results: Results[SolversHeadsOptions]) -> list[Plot]:
    """The range of rates that work, for dropout and for the solver, at every p."""
    shown = [p for p in results.options.p if over_rates(results, name(p, BASELINE))]
    return [range_plot(f"Range of rates that work, p = {p:g}", at(results, p)) for p in shown]


def findings(results: Results[SolversHeadsOptions]) -> Sequence[str | Difference]:
    """Each method against dropout at the same p, and against no dropout."""
    chosen, found = tuned(results), list[str | Difference]()
    for p in results.options.p:
        found += [
            difference(chosen, name(p, method), name(p, BASELINE))
            for method in (SAMPLED, ONE, FULL, LONGER)
            if chosen.final(name(p, method), "test")
        ]
        if p and chosen.paired(name(p, SAMPLED), name(0.0, BASELINE), "test"):
            found.append(difference(chosen, name(p, SAMPLED), name(0.0, BASELINE)))
    if chosen.final(f"{BOTH}, {SAMPLED}", "test"):
        found.append(difference(chosen, f"{BOTH}, {SAMPLED}", f"{BOTH}, {BASELINE}"))
    for p in results.options.p:
        if words := shares(at(results, p)):
            found.append(f"Learning rates within a point of the best at p = {p:g}: {words}.")
        if words := edges(at(results, p)):
            found.append(f"p = {p:g}: {words[0].lower()}{words[1:]}")
    return found


def claims(results: Results[SolversHeadsOptions]) -> list[Claim]:
    """Table 5 with tuned rates on a network of about 90 %, and Table 4's solvers in both blocks."""
    chosen = tuned(results)
    heads = max((len(seeds) for seeds in chosen.records.values()), default=0)
    words = scale(results, "heads on features of a strong network, CIFAR-10", "rates tuned", f"{heads} heads")
    gains = {p: chosen.paired(name(p, SAMPLED), name(p, BASELINE), "test") for p in PAPER_RATES}
    sizes = {p: solver - baseline for p, (baseline, solver) in PAPER_RATES.items()}
    claimed = [p for p, size in sizes.items() if size > 0 and gains[p]]
    loss = [-gap for gap in chosen.paired(name(0.95, SAMPLED), name(0.0, SAMPLED), "test")]
    allowed = PAPER_RATES[0.0][1] - PAPER_RATES[0.95][1]
    both = chosen.paired(f"{BOTH}, {SAMPLED}", f"{BOTH}, {BASELINE}", "test")
    found = [
        Claim(
            "Table 5, strong network, rates tuned: Prox-SG beats dropout",
            span([size for size in sizes.values() if size > 0], " points", 2, plus=True),
            span([mean_std(gains[p])[0] for p in claimed], " points", 2, plus=True)
            + (f" at p = {', '.join(f'{p:g}' for p in claimed)}" if claimed else ""),
            words,
            _capped(results, combine([judge_gain(gains[p], sizes[p]) for p in claimed])),
        ),
        Claim(
            "Table 5, strong network, rates tuned: at p = 0.95 dropout collapses and Prox-SG does not",
            f"{sizes[0.95]:+.2f} points",
            signed(gains[0.95]),
            words,
            _capped(results, _collapse(gains[0.95], sizes[0.95])),
        ),
        Claim(
            "Table 5, strong network, rates tuned: Prox-SG loses little from p = 0 to p = 0.95",
            f"−{allowed:.2f} points",
            signed([-value for value in loss]),
            words,
            _capped(results, judge_bound([statistics.fmean(loss)], allowed)) if loss else "not run",
        ),
        Claim(
            "Table 4, strong network, rates tuned: Prox-SG in both blocks is level with dropout (D-D)",
            "+0.01 points",
            signed(both),
            words,
            _capped(results, judge_parity(both)),
        ),
    ]
    # A run that is not finished is judged by what it has.
    why = "no processor time for these heads"
    return [not_run(claim.text, claim.paper, why) if claim.verdict == "not run" else claim for claim in found]


def _collapse(gains: Sequence[float], size: float) -> Verdict:
    """Without half of the source's gap there is no collapse, however certain the gap is."""
    return "not" if gains and statistics.fmean(gains) < size / 2 else judge_gain(gains, size)


def _capped(results: Results[SolversHeadsOptions], verdict: Verdict) -> Verdict:
    """Heads on fewer than three networks reproduce a claim partly at best."""
    few = len(results.records.get(NET, {})) < 3
    return "partly" if few and verdict == "reproduced" else verdict


SMOKE = SolversHeadsOptions(
    *("digits", 50),
    limit=100,
    enlarge=4,
    epochs=1,
    restart=1,
    width=0.05,
    hidden=16,
    units=16,
    passes=1,
    p=(0.0, 0.95),
    rates=(0.01, 0.1),
    heads=2,
    iters=2,
    trials=2,
    bfloat16=False,
)

experiment = Experiment(
    name="solvers-heads",
    title="Solvers in the head of a strong network, every learning rate tuned",
    source="[Bibi2019], Tables 4 and 5",
    about=(
        "A convolutional network is trained to about 90 % on CIFAR-10. Its features are kept, and heads with two "
        "hidden layers are trained on them from new weights: with dropout at rate p before the last hidden layer, with "
        "Prox-SG that samples a fraction 1 − p there, and with Prox-GD. Controls are one step of Prox-SG (dropout "
        "with its output rescaled by the step size), and dropout trained for as many more epochs as the solver has "
        "iterations. Every method has the same learning rates, of which one is chosen on validation images; the "
        "share of the rates that work is a result of its own. In differences each head counts as a seed: their spread "
        "is that of heads on the same network, and a claim needs three networks to count as reproduced."
    ),
    presets={
        "smoke": Preset(SMOKE, (0,), 0.2),
        "laptop": Preset(SolversHeadsOptions(), (0, 1, 2), 180),
        "paper": Preset(
            SolversHeadsOptions(width=1.0, units=512, passes=3, heads=20, iters=30, trials=20), (0, 1, 2), 10_000
        ),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
)

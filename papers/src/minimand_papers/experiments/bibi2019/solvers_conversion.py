"""Converting trained networks: what conversion costs, and what fine-tuning with solvers gains."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from minimand.nn import SolverLayer, SolverOptions, convert, set_strength, suggest
from minimand.solvers import ProxGD, ProxSG

from ...claims import signed
from ...comparing import Difference, difference, mean_std
from ...context import Lab
from ...drawing import bars
from ...experiment import Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ...training import Loaders, accuracy, train
from ...zoo import VGG16, BasicResNet, LeNet, PatchTransformer, Perceptron
from .._solvers import ImageOptions

CONTROL, WITHOUT, RISING, LEARNED = (
    "fine-tuned",
    "fine-tuned without dropout",
    "converted",
    "converted, learned strength",
)
STRENGTHS = (0.0, 0.01, 0.03, 0.1, 1.0)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of network: how it is made for a dropout rate, classes and an image shape, and its usual rate."""

    make: Callable[[float, int, tuple[int, ...]], nn.Module]
    dropout: float
    rate: float = 1e-2


KINDS: Mapping[str, Kind] = {
    "LeNet": Kind(lambda p, classes, shape: LeNet(classes, shape[0], shape[-1], dropout=(p, p)), 0.5),
    "MLP": Kind(lambda p, classes, shape: Perceptron(classes, shape, dropout=p), 0.5),
    "VGG": Kind(lambda p, c, shape: VGG16(c, shape[0], width=0.25, dropout=(p, p), batch_norm=True), 0.5),
    "ResNet-20": Kind(lambda p, classes, shape: BasicResNet(classes, shape, width=8, dropout=p), 0.2),
    "transformer": Kind(lambda p, classes, shape: PatchTransformer(classes, shape, dropout=p), 0.1),
}


@dataclasses.dataclass(frozen=True)
class SolversConversionOptions(ImageOptions):
    """Networks trained plainly, converted within a budget of time, and fine-tuned.

    Args:
        nets: The kinds of networks.
        epochs: Epochs of plain training; the learning rate drops after half of them.
        finetune: Epochs of fine-tuning, for every variant; the learning rate drops after half of them.
        budget: The time of a converted training step relative to the plain one, which ``suggest`` keeps to.
        rise: The strength at the end of fine-tuning, relative to the default, from which it rises linearly.
    """

    nets: tuple[str, ...] = tuple(KINDS)
    limit: int = 8_000
    epochs: int = 6
    finetune: int = 2
    budget: float = 3.0
    rise: float = 15.0


def parts(options: SolversConversionOptions) -> list[Part]:
    """Each network, then its variants."""
    found = []
    for net in options.nets:
        variants = (CONTROL, WITHOUT, RISING, LEARNED)
        found += [Part(net), *(Part(f"{net}, {variant}", (net,)) for variant in variants)]
    return found


def run(options: SolversConversionOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train a network and measure its conversion, or fine-tune it."""
    data = options.loaders(lab)
    net, _, variant = part.partition(", ")
    kind = KINDS[net]
    model = kind.make(0.0 if variant == WITHOUT else kind.dropout, data.classes, data.shape).to(lab.device)
    if not variant:
        yield from train(lab, model, data, epochs=options.epochs, rates=(kind.rate, kind.rate / 10))
        yield converted_accuracy(lab, model, data, options)
        lab.keep("model", model.state_dict())
        return
    model.load_state_dict(lab.kept(net, "model", model.state_dict()))
    each = None
    if variant in (RISING, LEARNED):
        model = converted(model, lab.kept(net, "plan"), learn=variant == LEARNED)
    if variant == RISING:
        begin = default_strength(model)
        each = lambda done: set_strength(model, min(begin * (1 + (options.rise - 1) * done), 1.0))  # noqa: E731
    free = [parameter for name, parameter in model.named_parameters() if name.endswith(".strength")]
    rates = (kind.rate / 10, kind.rate / 100)
    yield from train(lab, model, data, epochs=options.finetune, rates=rates, undecayed=free, each=each)
    if variant == LEARNED:
        learned = [float(parameter.detach().clamp(0, 1)) for parameter in free]
        yield {"epoch": options.finetune, "strength": sum(learned) / max(len(learned), 1)}


def converted(model: nn.Module, plan: Mapping[str, Tensor], *, learn: bool = False) -> nn.Module:
    """The network with the layers and iterations of a plan; a negative number is that of a sampling solver."""
    rules = {}
    for path, count in plan.items():
        number = int(count)
        solver = ProxSG(-number) if number < 0 else ProxGD(number)
        rules[path] = SolverOptions(solver, learn_strength=learn)
    return convert(model, rules)


def converted_accuracy(lab: Lab, model: nn.Module, data: Loaders, options: SolversConversionOptions) -> Metrics:
    """Choose and keep a plan; the accuracy right after conversion at several strengths, and the time of a step."""
    images, labels = next(iter(data.train))
    plan = suggest(model, images, budget=options.budget)
    chosen = {path: layer.options.solver for path, layer in plan.converted.items()}
    signs = {path: -s.iterations if s.stochastic else s.iterations for path, s in chosen.items()}
    lab.keep("plan", {path: torch.tensor(number) for path, number in signs.items()})
    record: dict[str, float] = {"epoch": options.epochs, "layers": len(signs)}
    net = convert(model, plan)
    for strength in STRENGTHS:
        set_strength(net, strength)
        record[f"validation at {strength:g}"] = accuracy(lab, net, data.validation)
    net = convert(model, plan)
    record["default strength"] = default_strength(net)
    record["converted test"] = accuracy(lab, net, data.test)
    everything = convert(model, ProxGD(10))
    record["default strength, all layers"] = default_strength(everything)
    record["all layers test"] = accuracy(lab, everything, data.test)
    record["step ratio"] = seconds(net, images, labels) / seconds(model, images, labels)
    return record


def default_strength(model: nn.Module) -> float:
    """The strength of a converted network's layers, which have the same by default."""
    return next(float(torch.as_tensor(m.strength).detach()) for m in model.modules() if isinstance(m, SolverLayer))


def seconds(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The time of the fastest of five training steps, without the optimizer's part."""
    times, parameters = [], [p for p in model.parameters() if p.requires_grad]
    for _ in range(6):
        begin = time.perf_counter()
        torch.autograd.grad(nn.functional.cross_entropy(model(images), labels), parameters, allow_unused=True)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def compare(results: Results[SolversConversionOptions]) -> list[Comparison]:
    """Test accuracy before, right after conversion, and after fine-tuning."""
    rows = []
    for net in results.options.nets:
        rows.append(Comparison(net, None, results.final(net, "test"), "%"))
        ratio = results.final(net, "step ratio")
        note = f"a step takes {mean_std(ratio)[0]:.1f} × the plain one" if ratio else ""
        after, every = results.final(net, "converted test"), results.final(net, "all layers test")
        rows.append(Comparison(f"{net}, right after conversion", None, after, "%", note=note))
        note = "every layer that can be, ProxGD(10)"
        rows.append(Comparison(f"{net}, right after conversion of all layers", None, every, "%", note=note))
        for variant in (CONTROL, WITHOUT, RISING, LEARNED):
            part = f"{net}, {variant}"
            learned = results.final(part, "strength")
            note = f"mean strength {mean_std(learned)[0]:.2f}" if learned else ""
            rows.append(Comparison(part, None, results.final(part, "test"), "%", note=note))
    return rows


def plots(results: Results[SolversConversionOptions]) -> list[Plot]:
    """The table as bars."""
    return [bars(compare(results), title="Conversion and fine-tuning", y="test accuracy, %")]


def changes(results: Results[SolversConversionOptions], net: str, key: str) -> list[float]:
    """The change of the test accuracy on conversion at the default strength, for each seed."""
    before, after = results.curve(net, "test"), results.curve(net, key)
    return [after[seed][-1] - before[seed][-1] for seed in before if before[seed] and after.get(seed)]


def findings(results: Results[SolversConversionOptions]) -> Sequence[str | Difference]:
    """What conversion costs at several strengths, and the differences between the variants."""
    sentences: list[str | Difference] = []
    for net in results.options.nets:
        plain = results.final(net, "validation")
        costs = [
            f"{strength:g}: {mean_std(found)[0] - mean_std(plain)[0]:+.2f}".replace("-", "−")
            for strength in STRENGTHS
            if plain and (found := results.final(net, f"validation at {strength:g}"))
        ]
        for key, what in (("converted test", "as suggested"), ("all layers test", "of all layers, ProxGD(10)")):
            if found := changes(results, net, key):
                sentences.append(f"{net}: conversion {what} changes the test accuracy by {signed(found)}.")
        if costs:
            sentences.append(f"{net}: change of the validation accuracy on conversion by strength: {', '.join(costs)}.")
        for variant in (RISING, LEARNED):
            sentences.append(difference(results, f"{net}, {variant}", f"{net}, {CONTROL}"))
            sentences.append(difference(results, f"{net}, {variant}", f"{net}, {WITHOUT}"))
    return sentences


experiment = Experiment(
    name="solvers-conversion",
    title="Converting trained networks",
    source="[Bibi2019], §3.4 and §4, for networks as others write them",
    about=(
        "Five kinds of networks are trained plainly, then converted by the plan that suggest makes within a budget of "
        "three plain steps. The first iteration of a converted layer is the plain layer, and the others take a small "
        "share of the solver's step, the strength. Test accuracy right after conversion stands beside the plain "
        "network's; then the network is fine-tuned with the strength rising fifteenfold, or learned. The controls are "
        "the plain network fine-tuned for the same epochs, with its dropout and without."
    ),
    presets={
        "smoke": Preset(
            SolversConversionOptions(
                "digits", batch=50, limit=200, enlarge=4, nets=("LeNet", "MLP"), epochs=2, finetune=1, budget=30
            ),
            (0, 1),
            0.3,
        ),
        "laptop": Preset(SolversConversionOptions(), (0, 1, 2), 60),
        "paper": Preset(SolversConversionOptions(limit=0, epochs=60, finetune=10, augment=True), (0, 1, 2), 3000),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
)

"""Block compressive sensing of Set11 and BSD68: unrolled networks, free and constrained, beside classical controls."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from minimand.nn import RidgeNet, UnrolledNet, sparse_reconstruction
from minimand.operators import BlockDCT, BlockSensing, Frame, Wavelet
from minimand.solvers import FISTA

from ...claims import combine, judge_gain, scale, span
from ...clock import Stopwatch
from ...comparing import Difference, difference, mean_std
from ...context import Lab
from ...drawing import curves, dots
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from .._crops import gallery, picture, reference
from .._reconstruction import (
    ImageSplits,
    UnrolledOptions,
    assembled,
    build,
    crops,
    mean_scores,
    measurement,
    sizes,
    standing,
    train,
    training_images,
    training_minutes,
    tuned,
    verdicts,
)

CONSTRAINED = " constrained"
LINEAR, CLASSICAL = "linear start", "classical"
# Keys of records: processor time of a reconstruction, and RidgeNet's learned phases alone, for equal inference time.
SECONDS, PHASES = "image_seconds", "_phases"
TESTS = ("set11", "bsd68", "photographs")
NETS = (
    "RidgeNet convergent",
    "RidgeNet convex",
    "ISTA-Net plus",
    "ISTA-Net plus constrained",
    "ISTA-Net",
    "ISTA-Net constrained",
    "FISTA-Net",
    "FISTA-Net constrained",
    "ADMM-Net",
    "ADMM-Net constrained",
)
# Set11, measured here before: the public checkpoints of ISTA-Net and ISTA-Net+, at 10% and 25%.
PUBLIC = {
    ("ISTA-Net", 0.1): 26.26,
    ("ISTA-Net", 0.25): 31.84,
    ("ISTA-Net plus", 0.1): 26.48,
    ("ISTA-Net plus", 0.25): 32.42,
}


@dataclasses.dataclass(frozen=True)
class CSSet11Options(UnrolledOptions):
    """Measurement ratios, networks, and the tuning of the classical control.

    Args:
        ratios: Measurements per pixel.
        nets: The networks.
        weights: First candidates for the control's penalty, tuned on the validation images.
        iters: Iterations of the control.
        shifts: Positions of its cycle-spinning, a square number.
        tuning: Validation images that the control is tuned on.
    """

    ratios: tuple[float, ...] = (0.1, 0.25, 0.5)
    nets: tuple[str, ...] = NETS
    weights: tuple[float, ...] = (0.0015, 0.003, 0.006, 0.012)
    iters: int = 150
    shifts: int = 9
    tuning: int = 5


def name(method: str, ratio: float) -> str:
    """A part's name."""
    return f"{method}, {ratio:.0%}"


def parts(options: CSSet11Options) -> list[Part]:
    """Every method at every ratio; nothing is random about the controls."""
    return [
        Part(name(method, ratio), seeded=method not in (LINEAR, CLASSICAL))
        for method in (LINEAR, CLASSICAL, *options.nets)
        for ratio in options.ratios
    ]


def run(options: CSSet11Options, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train or tune one method at one ratio, then score it on the test sets."""
    method, _, share = part.rpartition(", ")
    ratio = float(share.rstrip("%")) / 100
    images = training_images(options, lab)
    phi, start = measurement(ratio, images, lab)
    if method == LINEAR:
        yield {"epoch": 0, **_tested(images, phi, lambda op, y: _linear(start, op, y)), **_reference(images)}
    elif method == CLASSICAL:
        label, best, scores = _tuned(options, images, phi, start)
        yield {"epoch": 0, "chosen": label, "tuning": scores, **_tested(images, phi, best)}
    else:
        net = build(method, phi, options, start)
        yield from _learned(options, images, phi, net, lab)


def _linear(start: Tensor, operator: BlockSensing, y: Tensor) -> Tensor:
    return BlockSensing(start.mT.contiguous(), (operator.input_shape[1], operator.input_shape[2])).adjoint(y)


def _learned(
    options: CSSet11Options, images: ImageSplits, phi: Tensor, net: UnrolledNet | RidgeNet, lab: Lab
) -> Iterator[Metrics]:
    def reconstruct(image: Tensor) -> Tensor:
        return assembled(lambda op, y: net(y), phi, image)

    draw = crops(images, options, phi)
    yield from train(lab, net, draw, options, lambda: mean_scores(reconstruct, images.validation).psnr)
    net.eval()
    scores = _tested(images, phi, lambda op, y: net(y))
    if isinstance(net, RidgeNet):
        alone = _tested(images, phi, lambda op, y: net.unrolled(y))
        scores |= {f"{key}{PHASES}": alone[key] for key in (*images.tests, SECONDS)}
    yield {"epoch": options.epochs, **scores, **verdicts(net, draw)}


def _tuned(
    options: CSSet11Options, images: ImageSplits, phi: Tensor, start: Tensor
) -> tuple[str, Callable[[BlockSensing, Tensor], Tensor], dict[str, float]]:
    """The best of cosines and wavelets and their weights on a few validation images, and the scores of all."""

    def control(kind: str, weight: float) -> Callable[[BlockSensing, Tensor], Tensor]:
        def reconstruct(operator: BlockSensing, y: Tensor) -> Tensor:
            size = (operator.input_shape[1], operator.input_shape[2])
            frame: Frame = BlockDCT(size, block=11, count=options.shifts)
            if kind == "wavelets":
                frame = Wavelet(size, levels=2, family="db4", count=4)
            solver = FISTA(options.iters)
            return sparse_reconstruction(y, operator, frame, weight, solver, start=_linear(start, operator, y))

        return reconstruct

    def score(kind: str, weight: float) -> float:
        reconstruct = functools.partial(assembled, control(kind, weight), phi)
        return mean_scores(reconstruct, images.validation[: options.tuning]).psnr

    scores = {
        (kind, weight): value
        for kind in ("cosines", "wavelets")
        for weight, value in tuned(functools.partial(score, kind), options.weights).items()
    }
    kind, weight = max(scores, key=lambda key: scores[key])
    sentences = {f"{some}, weight {candidate:g}": round(value, 3) for (some, candidate), value in scores.items()}
    return f"{kind}, weight {weight:g}", control(kind, weight), sentences


def _tested(
    images: ImageSplits, phi: Tensor, reconstruct: Callable[[BlockSensing, Tensor], Tensor]
) -> dict[str, object]:
    found: dict[str, object] = {"data": images.source}
    spent = []

    def timed(operator: BlockSensing, y: Tensor) -> Tensor:
        watch = Stopwatch()
        x = reconstruct(operator, y)
        spent.append(watch.seconds)
        return x

    for test, pictures in images.tests.items():
        scores = mean_scores(functools.partial(assembled, timed, phi), pictures)
        found |= {test: scores.psnr, f"{test}_ssim": scores.ssim}
    first = next(iter(images.tests.values()))[0]
    found |= {"test": found[next(iter(images.tests))], SECONDS: sum(spent) / len(spent)}
    return {**found, "crop": picture(assembled(reconstruct, phi, first))}


def _reference(images: ImageSplits) -> dict[str, str]:
    return reference(next(iter(images.tests.values()))[0])


def compare(results: Results[CSSet11Options]) -> list[Comparison]:
    """PSNR of each method on each test set, the minutes of its training, and the seconds of a reconstruction."""
    rows = []
    for ratio in results.options.ratios:
        for method in (LINEAR, CLASSICAL, *results.options.nets):
            found = {test: results.final(name(method, ratio), test) for test in TESTS}
            known = {test: values for test, values in found.items() if values}
            for test, measured in (known or {"set11": []}).items():
                public = PUBLIC.get((method, ratio)) if test == "set11" else None
                note = (
                    "source: a public checkpoint measured here, trained longer, with another Φ and network"
                    if public is not None
                    else ""
                )
                rows.append(Comparison(f"{test}: {name(method, ratio)}", public, measured, " dB", note=note))
            rows += _phases(results, name(method, ratio)) + _times(results, name(method, ratio))
    return rows


def _phases(results: Results[CSSet11Options], part: str) -> list[Comparison]:
    """The scores of the learned phases alone."""
    found = {test: results.final(part, test + PHASES) for test in TESTS}
    return [Comparison(f"{test}: {part}, phases alone", None, psnr, " dB") for test, psnr in found.items() if psnr]


def _times(results: Results[CSSet11Options], part: str) -> list[Comparison]:
    times = {
        f"training: {part}": (training_minutes(results, part), " min"),
        f"an image: {part}": (results.final(part, SECONDS), " s"),
        f"an image: {part}, phases alone": (results.final(part, SECONDS + PHASES), " s"),
    }
    note = "processor time, which depends on other load of the machine"
    return [Comparison(label, None, values, unit, note=note) for label, (values, unit) in times.items() if values]


def plots(results: Results[CSSet11Options]) -> list[Plot]:
    """For each ratio the learning curves, the table as dots, and crops with their errors."""
    pictures = []
    for ratio in results.options.ratios:
        trained = [name(net, ratio) for net in results.options.nets]
        dashed = [part for net, part in zip(results.options.nets, trained, strict=True) if net.endswith(CONSTRAINED)]
        title = f"Validation at {ratio:.0%}"
        pictures.append(curves(results, trained, key="validation", title=title, y="PSNR, dB", dashed=dashed))
        pictures.append(_dots(results, ratio))
        shown = {name(method, ratio): method for method in (LINEAR, CLASSICAL, *results.options.nets)}
        title = f"Crops at {ratio:.0%}, errors below"
        if (drawn := gallery(results, shown, name(LINEAR, ratio), title)) is not None:
            pictures.append(drawn)
    return pictures


def _dots(results: Results[CSSet11Options], ratio: float) -> Plot:
    """One row per method on the first measured test set: free, constrained, and the public checkpoints."""
    methods = (LINEAR, CLASSICAL, *results.options.nets)
    tests = [t for t in ("set11", "photographs") if any(results.final(name(m, ratio), t) for m in methods)]
    test = tests[0] if tests else "set11"
    rows: dict[str, dict[str, Sequence[float]]] = {}
    for method in methods:
        free = method.removesuffix(CONSTRAINED)
        series = "constrained" if free != method else "free" if method in results.options.nets else "control"
        rows.setdefault(free, {})[series] = results.final(name(method, ratio), test)
        if test == "set11" and (method, ratio) in PUBLIC:
            rows[free]["public checkpoint"] = [PUBLIC[method, ratio]]
    return dots(rows, title=f"{test} at {ratio:.0%}", x="PSNR, dB")


def findings(results: Results[CSSet11Options]) -> Sequence[str | Difference]:
    """Networks against the control, free against constrained, and which ones have the parameters of a solver."""
    sentences: list[str | Difference] = [f"The networks: {sizes(results.options)}."]
    for ratio in results.options.ratios:
        for net in results.options.nets:
            part = name(net, ratio)
            sentences.append(difference(results, part, name(CLASSICAL, ratio), unit=" dB"))
            free = net.removesuffix(CONSTRAINED)
            if free != net and free in results.options.nets:
                sentences.append(difference(results, part, name(free, ratio), unit=" dB"))
            if net.startswith("RidgeNet"):
                sentences += _against_free(results, net, ratio)
    parts = [name(net, ratio) for ratio in results.options.ratios for net in results.options.nets]
    return [*sentences, *standing(results, parts)]


def _against_free(results: Results[CSSet11Options], net: str, ratio: float) -> list[Difference]:
    """RidgeNet against the free networks on every test set, after about as many minutes of training."""
    others = [other for other in results.options.nets if not other.startswith("RidgeNet") and CONSTRAINED not in other]
    measured = [test for test in TESTS if results.final(name(net, ratio), test)]
    return [
        difference(results, name(net, ratio), name(other, ratio), test, unit=" dB", quantity=test)
        for other in others
        for test in measured or ["test"]
    ]


def claims(results: Results[CSSet11Options]) -> list[Claim]:
    """Unrolled networks above the tuned classical solver. The slides have no numbers; those of the public checkpoints
    of ISTA-Net and ISTA-Net+ were measured here."""
    pairs = [
        (name(net, ratio), name(CLASSICAL, ratio)) for ratio in results.options.ratios for net in results.options.nets
    ]
    gains = [results.paired(*pair, "test") for pair in pairs]
    options = results.options
    return [
        Claim(
            "Image reconstruction: ISTA-Net, FISTA-Net and ADMM-Net beat a classical solver on Set11",
            "–",
            span([mean_std(values)[0] for values in gains if values], " dB", plus=True),
            scale(results, f"{options.epochs * options.steps:,} steps", sizes(options)),
            combine([judge_gain(values, single=0.5) for values in gains]),
        )
    ]


SMOKE = CSSet11Options(
    "photographs",
    1,
    2,
    6,
    epochs=2,
    steps=2,
    batch=2,
    crop=66,
    ratios=(0.25,),
    weights=(0.01,),
    iters=5,
    shifts=4,
    tuning=1,
    ridge=(2, 8, 3),
)

experiment = Experiment(
    name="cs-set11",
    title="Compressive sensing by unrolled solvers",
    source="[Lin2019], optimisation-inspired networks for image reconstruction (ISTA-Net, FISTA-Net, ADMM-Net)",
    about=(
        "Blocks of 33 × 33 pixels are measured by a random Φ with orthonormal rows and reconstructed by the best "
        "linear map, by FISTA on cosines or wavelets with cycle-spinning (tuned on validation images), and by "
        "unrolled networks with free or constrained steps and thresholds, and by RidgeNet, whose objective is "
        "minimised to a tolerance of 1e-4 with a proof of descent. The networks work on whole images across "
        "the borders of the blocks. Training images: Train400 and T91. Validation images: the last 20 of Train400. "
        "Test images: Set11 and BSD68. Without these files, scikit-image's photographs are used."
    ),
    presets={
        "smoke": Preset(SMOKE, (0,), 0.1),
        "laptop": Preset(CSSet11Options(), (0,), 480),
        "paper": Preset(
            CSSet11Options(
                phases=9,
                channels=32,
                crop=33,
                batch=64,
                steps=1390,
                epochs=200,
                rate=1e-4,
                symmetry=0.01,
                start="xavier",
                shared=True,
            ),
            (0,),
            200000,
        ),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
)

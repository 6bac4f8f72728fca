"""Magnetic resonance imaging of brain slices from a part of their frequencies."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from minimand.nn import sparse_reconstruction
from minimand.operators import SubsampledFourier, Wavelet, radial_mask
from minimand.solvers import FISTA

from ...claims import combine, judge_gain, scale, span
from ...comparing import Difference, difference, mean_std
from ...context import Lab
from ...data import load_images, unit_interval
from ...drawing import bars, curves
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from .._crops import gallery, picture, reference
from .._reconstruction import (
    ImageSplits,
    Scores,
    UnrolledOptions,
    build,
    mean_scores,
    photographs,
    resolve,
    standing,
    train,
    training_minutes,
    tuned,
    verdicts,
)

ZERO_FILLED, CLASSICAL = "zero-filled", "classical"


@dataclasses.dataclass(frozen=True)
class MRIBrainOptions(UnrolledOptions):
    """A radial mask, networks, and the tuning of the classical control.

    Args:
        ratio: The share of frequencies that is measured.
        nets: The networks.
        weights: First candidates for the control's penalty, tuned on the validation slices.
        iters: Iterations of the control.
        noise: The standard deviation for which RidgeNet weighs its data term; the measurements are exact.
        side: Side of the bundled photographs that replace the slices.
    """

    ratio: float = 0.2
    nets: tuple[str, ...] = (
        "RidgeNet convergent",
        "ISTA-Net plus",
        "ISTA-Net plus constrained",
        "FISTA-Net constrained",
        "ADMM-Net constrained",
    )
    weights: tuple[float, ...] = (0.001, 0.002, 0.004, 0.008)
    iters: int = 150
    noise: float = 0.01
    side: int = 96


def parts(options: MRIBrainOptions) -> list[Part]:
    """Two controls and the networks."""
    return [*(Part(method, seeded=False) for method in (ZERO_FILLED, CLASSICAL)), *map(Part, options.nets)]


def slices(options: MRIBrainOptions, lab: Lab) -> ImageSplits:
    """50 slices: 35 to train on, 5 to validate, 10 to test; photographs where they are missing."""
    source = resolve(options.source, lab, ("brain",))
    if source == "photographs":
        known = photographs(("astronaut", "chelsea", "coffee", "brick", "camera", "moon"), options.side)
        train, validation, test = known[:3], known[3:4], known[4:]
    else:
        known = [unit_interval(image) for image in load_images("brain", lab.data_dir)]
        known = [image[..., : image.shape[-2] // 4 * 4, : image.shape[-1] // 4 * 4] for image in known]
        train, validation, test = known[:35], known[35:40], known[40:]
    cut = slice(options.limit or None)
    return ImageSplits(train[cut], validation[cut], {"brain" if source == "files" else source: test[cut]}, source)


def run(options: MRIBrainOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train or tune one method, then score it on the slices that were held out."""
    images = slices(options, lab)
    size = images.train[0].shape[-2:]
    scanner = SubsampledFourier(radial_mask((size[0], size[1]), options.ratio).to(lab.device))

    def reconstructed(method: Callable[[Tensor], Tensor], image: Tensor) -> Tensor:
        with torch.no_grad():
            return method(scanner.apply(image[None].to(lab.device)))[0].clamp(0, 1).cpu()

    def scores(method: Callable[[Tensor], Tensor], of: Sequence[Tensor]) -> Scores:
        return mean_scores(lambda image: reconstructed(method, image), of)

    def tested(method: Callable[[Tensor], Tensor]) -> dict[str, object]:
        test = next(iter(images.tests.values()))
        found = scores(method, test)
        kept = {"crop": picture(reconstructed(method, test[0]), 96), "data": images.source}
        return {"test": found.psnr, "test_ssim": found.ssim, **kept}

    if part == ZERO_FILLED:
        yield {"epoch": 0, **tested(scanner.adjoint), **reference(next(iter(images.tests.values()))[0], 96)}
    elif part == CLASSICAL:
        frame = Wavelet((size[0], size[1]), levels=2, family="db4", count=4)

        def control(weight: float) -> Callable[[Tensor], Tensor]:
            return lambda y: sparse_reconstruction(y, scanner, frame, weight, FISTA(options.iters))

        found = tuned(lambda weight: scores(control(weight), images.validation).psnr, options.weights)
        best = max(found, key=lambda weight: found[weight])
        tuning = {f"weight {weight:g}": round(value, 3) for weight, value in found.items()}
        yield {"epoch": 0, "chosen": best, "tuning": tuning, **tested(control(best))}
    else:
        net = build(part, scanner, options, noise=options.noise)

        def draw() -> tuple[Tensor, Tensor]:
            chosen = torch.randint(len(images.train), (options.batch,))
            x = torch.stack([images.train[int(i)] for i in chosen]).to(lab.device)
            return scanner.apply(x), x

        yield from train(lab, net, draw, options, lambda: scores(net, images.validation).psnr)
        net.eval()
        yield {"epoch": options.epochs, **tested(net), **verdicts(net, draw)}


def compare(results: Results[MRIBrainOptions]) -> list[Comparison]:
    """PSNR and SSIM on the held-out slices."""
    rows = []
    for part in (ZERO_FILLED, CLASSICAL, *results.options.nets):
        rows.append(Comparison(f"{part}, PSNR", None, results.final(part, "test"), " dB"))
        rows.append(Comparison(f"{part}, SSIM", None, results.final(part, "test_ssim"), digits=4))
        if minutes := training_minutes(results, part):
            rows.append(Comparison(f"{part}, training", None, minutes, " min", note="processor time"))
    return rows


def plots(results: Results[MRIBrainOptions]) -> list[Plot]:
    """Learning curves, bars, and crops with their errors."""
    everything = (ZERO_FILLED, CLASSICAL, *results.options.nets)
    pictures = [
        curves(results, key="validation", title="Validation", y="PSNR, dB"),
        bars([row for row in compare(results) if "PSNR" in row.label], title="Held-out slices", y="PSNR, dB"),
    ]
    drawn = gallery(results, {part: part for part in everything}, ZERO_FILLED, "A slice, errors below")
    return pictures if drawn is None else [*pictures, drawn]


def findings(results: Results[MRIBrainOptions]) -> Sequence[str | Difference]:
    """Networks against the control, and which ones have the steps and thresholds of a solver."""
    sentences: list[str | Difference] = []
    for net in results.options.nets:
        sentences.append(difference(results, net, CLASSICAL, unit=" dB"))
    nets = results.options.nets
    ridge = [net for net in nets if net.startswith("RidgeNet")]
    free = [net for net in nets if net not in ridge and "constrained" not in net]
    sentences += [difference(results, net, other, unit=" dB") for net in ridge for other in free]
    return [*sentences, *standing(results, results.options.nets)]


def claims(results: Results[MRIBrainOptions]) -> list[Claim]:
    """Unrolled networks above the tuned classical solver."""
    gains = {net: results.paired(net, CLASSICAL, "test") for net in results.options.nets}
    options = results.options
    return [
        Claim(
            "Image reconstruction: ADMM-Net and its relatives beat a classical solver in MRI",
            "–",
            span([mean_std(values)[0] for values in gains.values() if values], " dB", plus=True),
            scale(results, f"{options.epochs * options.steps:,} steps", f"{options.phases} phases"),
            combine([judge_gain(values, single=0.5) for values in gains.values()]),
        )
    ]


experiment = Experiment(
    name="mri-brain",
    title="Brain slices from a fifth of their frequencies",
    source="[Lin2019], optimisation-inspired networks for image reconstruction (ADMM-Net)",
    about=(
        "Subsampled Fourier measurements along radial lines of 50 brain slices: 35 for training, 5 for validation, "
        "10 for testing. The zero-filled image and FISTA on wavelets with cycle-spinning, tuned on the validation "
        "slices, are compared with unrolled networks. Slices of one study resemble each other, so the split "
        "favours learned methods. Without the slices, scikit-image's photographs are used."
    ),
    presets={
        "smoke": Preset(
            MRIBrainOptions(
                "photographs",
                2,
                2,
                6,
                2,
                epochs=2,
                steps=3,
                batch=2,
                weights=(0.004,),
                iters=5,
                side=32,
                ridge=(2, 8, 3),
            ),
            (0,),
            0.1,
        ),
        "laptop": Preset(MRIBrainOptions(phases=6, batch=1, epochs=10, steps=150), (0,), 35),
        "paper": Preset(
            MRIBrainOptions(
                phases=11, channels=32, batch=1, epochs=200, steps=100, symmetry=0.01, start="xavier", shared=True
            ),
            (0,),
            20000,
        ),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
)

"""Reconstruction quality over the number of phases, after each phase of a network, and over training time."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from minimand.errors import OptionError
from minimand.nn import UnrolledNet

from ...claims import combine, judge_gain, scale
from ...comparing import Difference, difference, mean_std
from ...context import Lab
from ...data import psnr
from ...drawing import COLORS, curves, figure, style
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from .._reconstruction import (
    ImageSplits,
    UnrolledOptions,
    assembled,
    build,
    crops,
    mean_scores,
    measurement,
    train,
    training_images,
    verdicts,
)


@dataclasses.dataclass(frozen=True)
class CSPhasesOptions(UnrolledOptions):
    """One kind of network in several lengths.

    Args:
        ratio: Measurements per pixel.
        net: The kind of network.
        lengths: Numbers of phases.
    """

    ratio: float = 0.25
    net: str = "ISTA-Net plus constrained"
    lengths: tuple[int, ...] = (1, 2, 4, 8)


def name(length: int) -> str:
    """A part's name."""
    return f"{length} phases" if length > 1 else "1 phase"


def parts(options: CSPhasesOptions) -> list[Part]:
    """One network per length."""
    return [Part(name(length)) for length in options.lengths]


def run(options: CSPhasesOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train one length; then the PSNR after each of its phases."""
    options = dataclasses.replace(options, phases=int(part.split()[0]))
    images = training_images(options, lab)
    phi, start = measurement(options.ratio, images, lab)
    net = build(options.net, phi, options, start)
    if not isinstance(net, UnrolledNet):
        raise OptionError(f"this experiment compares phases of one transform each, which {options.net} does not have")

    def reconstruct(image: Tensor) -> Tensor:
        return assembled(lambda op, y: net(y), phi, image)

    draw = crops(images, options, phi)
    yield from train(lab, net, draw, options, lambda: mean_scores(reconstruct, images.validation).psnr)
    net.eval()
    test, pictures = next(iter(images.tests.items()))
    scores = mean_scores(reconstruct, pictures)
    yield {
        "epoch": options.epochs,
        "data": images.source,
        test: scores.psnr,
        f"{test}_ssim": scores.ssim,
        "test": scores.psnr,
        "by_phase": _by_phase(net, phi, images),
        **verdicts(net, draw),
    }


def _by_phase(net: UnrolledNet, phi: Tensor, images: ImageSplits) -> list[float]:
    """The mean PSNR over the validation images before the first and after every phase."""
    totals = torch.zeros(net.phases + 1)
    for image in images.validation:
        found: list[Tensor] = []

        def record(operator: object, y: Tensor, found: list[Tensor] = found) -> Tensor:
            found += [net.start(net.problem(y)), *(result.x for result in net.trajectory(y))]
            return found[-1]

        assembled(record, phi, image)
        cut = [x[0, :, : image.shape[-2], : image.shape[-1]].clamp(0, 1).cpu() for x in found]
        totals += torch.tensor([float(psnr(x, image)) for x in cut])
    return [round(float(value), 3) for value in totals / len(images.validation)]


def compare(results: Results[CSPhasesOptions]) -> list[Comparison]:
    """PSNR on the test set, by length."""
    return [
        Comparison(name(length), None, results.final(name(length), "test"), " dB") for length in results.options.lengths
    ]


def plots(results: Results[CSPhasesOptions]) -> list[Plot]:
    """Over training time, and inside the networks."""
    time = curves(
        results, key="validation", over="seconds", x="seconds of training", title="Over training time", y="PSNR, dB"
    )
    drawn = figure()
    axes = drawn.subplots()
    sentences = []
    for number, length in enumerate(results.options.lengths):
        for values in results.curve(name(length), "by_phase").values():
            if values:
                axes.plot(range(length + 1), values[-1], "o-", color=COLORS[number], label=name(length))
                sentences.append(f"{name(length)} ends at {values[-1][-1]:.2f}")
    style(axes, "phase", "PSNR on validation images, dB", "Inside the networks")
    if sentences:
        axes.legend(frameon=False)
    return [
        time,
        Plot("Inside the networks", f"PSNR after each phase: {', '.join(sentences) or 'nothing measured yet'}", drawn),
    ]


def findings(results: Results[CSPhasesOptions]) -> Sequence[str | Difference]:
    """Whether more phases are better, and whether each phase of a network helps."""
    lengths = results.options.lengths
    sentences: list[str | Difference] = [
        difference(results, name(longer), name(shorter), unit=" dB") for shorter, longer in itertools.pairwise(lengths)
    ]
    for values in results.curve(name(lengths[-1]), "by_phase").values():
        if values:
            rises = sum(after > before for before, after in itertools.pairwise(values[-1]))
            sentences.append(
                f"In the longest network {rises} of {lengths[-1]} phases raise the PSNR; the loss sees only the last."
            )
    return sentences


def claims(results: Results[CSPhasesOptions]) -> list[Claim]:
    """Every phase is an iteration, so more phases reconstruct better."""
    pairs = list(itertools.pairwise(results.options.lengths))
    gains = [results.paired(name(longer), name(shorter), "test") for shorter, longer in pairs]
    return [
        Claim(
            "Image reconstruction: more phases (iterations) reconstruct better",
            "–",
            ", ".join(f"{mean_std(values)[0]:+.2f}" for values in gains if values) + " dB for each doubling",
            scale(results, f"{results.options.epochs * results.options.steps:,} steps"),
            combine([judge_gain(values, single=0.5) for values in gains]),
        )
    ]


experiment = Experiment(
    name="cs-phases",
    title="Reconstruction quality over the number of phases",
    source="[Lin2019], optimisation-inspired networks for image reconstruction",
    about=(
        "One kind of unrolled network with 1, 2, 4, … phases at 25% of the measurements: test PSNR over the number of "
        "phases, validation PSNR over training time, and the PSNR after every phase inside a trained network."
    ),
    presets={
        "smoke": Preset(
            CSPhasesOptions("photographs", 2, 2, 6, epochs=2, steps=4, batch=2, crop=66, lengths=(1, 2)), (0,), 0.1
        ),
        "laptop": Preset(CSPhasesOptions(epochs=6), (0,), 20),
        "paper": Preset(CSPhasesOptions(channels=32, epochs=200, lengths=(1, 3, 5, 7, 9, 11)), (0,), 100000),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
)

"""Restoration of photographs by RidgeNet, a free network and a classical control: deblurring, super-resolution."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from minimand.nn import RidgeNet, UnrolledNet, smooth_tv_reconstruction
from minimand.operators import LinearOperator

from ..comparing import Difference, difference
from ..context import Lab
from ..data import random_crops
from ..drawing import bars, curves
from ..experiment import Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._crops import gallery, picture, reference
from ._reconstruction import (
    ImageSplits,
    Scores,
    UnrolledOptions,
    build,
    mean_scores,
    standing,
    train,
    training_images,
    training_minutes,
    tuned,
    verdicts,
)

__all__ = ["RestorationOptions", "Task", "restoration"]

LINEAR, CLASSICAL = "linear start", "classical"


@dataclasses.dataclass(frozen=True)
class RestorationOptions(UnrolledOptions):
    """Noise, networks, and the tuning of the classical control.

    Args:
        noise: The standard deviation of the measurements' Gaussian noise.
        nets: The networks.
        weights: First candidates for the weight of the control's total variation, tuned on validation images.
        tuning: Validation images that the control is tuned on.
    """

    noise: float = 0.01
    nets: tuple[str, ...] = ("RidgeNet convergent", "RidgeNet convex", "ISTA-Net plus")
    weights: tuple[float, ...] = (0.0005, 0.001, 0.002, 0.004)
    tuning: int = 5


@dataclasses.dataclass(frozen=True)
class Task:
    """A measurement of images of any size, all sides of which are multiples of one number."""

    operator: Callable[[tuple[int, int]], LinearOperator]
    multiple: int = 1

    def fitted(self, image: Tensor) -> Tensor:
        """The largest part of an image (1, H, W) that can be measured."""
        height, width = (side // self.multiple * self.multiple for side in image.shape[-2:])
        return image[..., :height, :width]

    def measured(self, image: Tensor, noise: float) -> tuple[LinearOperator, Tensor]:
        """The operator and noisy measurements, whose noise is the same for every method."""
        phi = self.operator((image.shape[-2], image.shape[-1]))
        y = phi.apply(image[None])
        generator = torch.Generator().manual_seed(y.numel())
        return phi, y + noise * torch.randn(y.shape, generator=generator)


Method = Callable[[LinearOperator, Tensor], Tensor]


def learned(net: UnrolledNet | RidgeNet, kind: str, options: RestorationOptions) -> Method:
    """A trained network for images of any size, made again for each of them with the same parameters."""

    def reconstruct(phi: LinearOperator, y: Tensor) -> Tensor:
        other: Any = net
        if isinstance(net, RidgeNet):
            other = net.using(phi, noise=options.noise)
        else:
            other = build(kind, phi, options)
            other.load_state_dict(net.state_dict())
        answer: Tensor = other.eval()(y)
        return answer

    return reconstruct


def linear(phi: LinearOperator, y: Tensor) -> Tensor:
    """The linear start of RidgeNet."""
    net = RidgeNet(phi, 1, 8, 3, noise=1.0)
    return net._sensor.start(phi, y)


def scores(task: Task, method: Method, images: Sequence[Tensor], noise: float) -> Scores:
    """PSNR and SSIM of a method over images."""

    @torch.no_grad()
    def restored(image: Tensor) -> Tensor:
        return method(*task.measured(image, noise))[0].clamp(0, 1)

    return mean_scores(restored, [task.fitted(image) for image in images])


def classical(task: Task, options: RestorationOptions, images: ImageSplits) -> tuple[float, dict[float, float]]:
    """The weight of total variation that is best on validation images, an interior one, and the scores of all."""

    def score(weight: float) -> float:
        chosen = images.validation[: options.tuning]
        return scores(task, total_variation(weight), chosen, options.noise).psnr

    found = tuned(score, options.weights)
    return max(found, key=lambda weight: found[weight]), found


def total_variation(weight: float) -> Method:
    """The classical control, from the linear start."""
    return lambda phi, y: smooth_tv_reconstruction(y, phi, weight, start=linear(phi, y), tol=1e-4, iterations=300)


def drawing(task: Task, images: ImageSplits, options: RestorationOptions) -> Callable[[], tuple[Tensor, Tensor]]:
    """Random crops of the training images, measured with noise."""
    phi = task.operator((options.crop, options.crop))

    def draw() -> tuple[Tensor, Tensor]:
        x = random_crops(images.train, options.batch, options.crop)
        y = phi.apply(x)
        return y + options.noise * torch.randn_like(y), x

    return draw


def _run(task: Task, options: RestorationOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    images = training_images(options, lab)

    def tested(method: Method) -> dict[str, Any]:
        found: dict[str, Any] = {"data": images.source}
        for test, pictures in images.tests.items():
            result = scores(task, method, pictures, options.noise)
            found |= {test: result.psnr, f"{test}_ssim": result.ssim}
        first = task.fitted(next(iter(images.tests.values()))[0])
        with torch.no_grad():
            shown = method(*task.measured(first, options.noise))[0].clamp(0, 1)
        return {**found, "test": found[next(iter(images.tests))], "crop": picture(shown)}

    if part == LINEAR:
        first = task.fitted(next(iter(images.tests.values()))[0])
        yield {"epoch": 0, **tested(linear), **reference(first)}
    elif part == CLASSICAL:
        best, found = classical(task, options, images)
        tuning = {f"weight {weight:g}": round(value, 3) for weight, value in found.items()}
        yield {"epoch": 0, "chosen": best, "tuning": tuning, **tested(total_variation(best))}
    else:
        net = build(part, task.operator((options.crop, options.crop)), options, noise=options.noise)
        method, draw = learned(net, part, options), drawing(task, images, options)
        few = images.validation[: options.tuning]
        yield from train(lab, net, draw, options, lambda: scores(task, method, few, options.noise).psnr)
        net.eval()
        yield {"epoch": options.epochs, **tested(method), **verdicts(net, draw)}


def _compare(results: Results[RestorationOptions]) -> list[Comparison]:
    rows = []
    for part in (LINEAR, CLASSICAL, *results.options.nets):
        for test in ("set11", "bsd68", "photographs"):
            if measured := results.final(part, test):
                rows.append(Comparison(f"{test}: {part}", None, measured, " dB"))
        if minutes := training_minutes(results, part):
            rows.append(Comparison(f"training: {part}", None, minutes, " min", note="processor time"))
    return rows or [Comparison(f"set11: {LINEAR}", None, [], " dB")]


def _plots(results: Results[RestorationOptions]) -> list[Plot]:
    everything = (LINEAR, CLASSICAL, *results.options.nets)
    pictures = [
        curves(results, key="validation", title="Validation", y="PSNR, dB"),
        bars([row for row in _compare(results) if row.unit == " dB"], title="Test images", y="PSNR, dB"),
    ]
    drawn = gallery(results, {part: part for part in everything}, LINEAR, "A test image, errors below")
    return pictures if drawn is None else [*pictures, drawn]


def _findings(results: Results[RestorationOptions]) -> Sequence[str | Difference]:
    nets = results.options.nets
    sentences: list[str | Difference] = [difference(results, net, CLASSICAL, unit=" dB") for net in nets]
    free = [net for net in nets if not net.startswith("RidgeNet")]
    ridge = [net for net in nets if net.startswith("RidgeNet")]
    sentences += [difference(results, net, other, unit=" dB") for net in ridge for other in free]
    return [*sentences, *standing(results, nets)]


def restoration(name: str, title: str, about: str, task: Task) -> Experiment[RestorationOptions]:
    """The experiment of a task."""
    options = RestorationOptions()
    smoke = RestorationOptions(
        "photographs", 1, 2, 6, epochs=2, steps=2, batch=2, crop=36, weights=(0.002,), tuning=1, ridge=(2, 8, 3)
    )
    return Experiment(
        name=name,
        title=title,
        source="[Lin2019], optimisation-inspired networks for image reconstruction; the task is ours",
        about=(
            f"{about} Gaussian noise of standard deviation {options.noise:g} is added. RidgeNet, whose objective is "
            "minimised with a proof, is compared with a free ISTA-Net+ of about as long a training and with smoothed "
            "total variation, whose weight is tuned on validation images to an interior point. Training images: "
            "Train400 and T91. Validation images: the last 20 of Train400. Test images: Set11 and BSD68. Without these "
            "files, scikit-image's photographs are used."
        ),
        presets={
            "smoke": Preset(smoke, (0,), 0.1),
            "laptop": Preset(options, (0, 1, 2), 150),
            "paper": Preset(dataclasses.replace(options, epochs=60, steps=1000), (0, 1, 2), 9000),
        },
        parts=lambda options: [
            *(Part(method, seeded=False) for method in (LINEAR, CLASSICAL)),
            *map(Part, options.nets),
        ],
        run=lambda options, part, lab: _run(task, options, part, lab),
        compare=_compare,
        plots=_plots,
        findings=_findings,
        claims=lambda results: [],
    )

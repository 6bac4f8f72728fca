"""A prior that was trained as a denoiser, used with other measurements without training."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from minimand.nn import RidgeNet
from minimand.operators import BlockSensing, Inpainting, LinearOperator, SubsampledFourier, gaussian_blur, radial_mask
from minimand.operators import orthonormal_gaussian as gaussian_rows

from ...comparing import Difference, difference
from ...context import Lab
from ...drawing import bars
from ...experiment import Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from .._reconstruction import BLOCK, ImageSplits, build, train, training_images, tuned
from .._restoration import (
    CLASSICAL,
    Method,
    RestorationOptions,
    Task,
    classical,
    drawing,
    learned,
    scores,
    total_variation,
)

RETRAINED = "retrained"
NET = "RidgeNet convergent"


def _sensing(size: tuple[int, int]) -> LinearOperator:
    phi = gaussian_rows(round(0.25 * BLOCK**2), BLOCK**2, generator=torch.Generator().manual_seed(0))
    return BlockSensing(phi, size)


def _identity(size: tuple[int, int]) -> LinearOperator:
    return Inpainting(torch.ones(size))


#: What is measured, and the number of which all sides of an image are multiples.
TASKS = {
    "sensing": Task(_sensing, BLOCK),
    "deblurring": Task(lambda size: gaussian_blur(size, 1.6, padding_mode="reflect")),
    "MRI": Task(lambda size: SubsampledFourier(radial_mask(size, 0.2))),
}


@dataclasses.dataclass(frozen=True)
class PriorTransferOptions(RestorationOptions):
    """Denoisers and tasks.

    Args:
        sigmas: The noise of the denoisers that are trained.
        tasks: The tasks that their priors are used for.
        assumed: First candidates for the noise that the network assumes in a task, tuned on validation images.
    """

    sigmas: tuple[float, ...] = (0.02, 0.05, 0.1)
    tasks: tuple[str, ...] = tuple(TASKS)
    assumed: tuple[float, ...] = (0.005, 0.01, 0.02, 0.04)


def _prior(sigma: float) -> str:
    return f"denoiser, σ = {sigma:g}"


def parts(options: PriorTransferOptions) -> list[Part]:
    """The control for all tasks, one network a task, and the denoisers."""
    retrained = [f"{RETRAINED}, {task}" for task in options.tasks]
    return [Part(CLASSICAL, seeded=False), *map(Part, (*retrained, *map(_prior, options.sigmas)))]


def run(options: PriorTransferOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Tune the control, train for a task, or train a denoiser and use its prior for all tasks."""
    images = training_images(options, lab)
    tests = next(iter(images.tests.values()))

    def tested(name: str, method: Method) -> float:
        return scores(TASKS[name], method, tests, options.noise).psnr

    if part == CLASSICAL:
        found = {
            name: tested(name, total_variation(classical(TASKS[name], options, images)[0])) for name in options.tasks
        }
        yield {"epoch": 0, **found, "test": sum(found.values()) / len(found), "data": images.source}
        return
    kind, _, rest = part.partition(", ")
    task = TASKS[rest] if kind == RETRAINED else Task(_identity)
    sigma = options.noise if kind == RETRAINED else float(rest.removeprefix("σ = "))
    own = dataclasses.replace(options, noise=sigma)
    net = build(NET, task.operator((options.crop, options.crop)), options, noise=sigma)
    assert isinstance(net, RidgeNet)
    few = images.validation[: options.tuning]
    yield from train(
        lab,
        net,
        drawing(task, images, own),
        options,
        lambda: scores(task, learned(net, NET, own), few, sigma).psnr,
    )
    net.eval()
    if kind == RETRAINED:
        score = tested(rest, learned(net, NET, own))
        yield {"epoch": options.epochs, rest: score, "test": score, "data": images.source}
        return
    transferred = {name: _transferred(net, name, options, images) for name in options.tasks}
    found = {name: tested(name, learned(net, NET, assumed)) for name, assumed in transferred.items()}
    chosen = {f"{name}, assumed noise": assumed.noise for name, assumed in transferred.items()}
    mean = sum(found.values()) / len(found)
    yield {"epoch": options.epochs, **found, **chosen, "test": mean, "data": images.source}


def _transferred(net: RidgeNet, name: str, options: PriorTransferOptions, images: ImageSplits) -> PriorTransferOptions:
    """The options with the assumed noise that is best on validation images."""

    def score(noise: float) -> float:
        method = learned(net, NET, dataclasses.replace(options, noise=noise))
        return scores(TASKS[name], method, images.validation[: options.tuning], options.noise).psnr

    found = tuned(score, options.assumed, most=8)
    return dataclasses.replace(options, noise=max(found, key=lambda noise: found[noise]))


def compare(results: Results[PriorTransferOptions]) -> list[Comparison]:
    """Every task by every method."""
    rows = []
    for task in results.options.tasks:
        for part in (CLASSICAL, f"{RETRAINED}, {task}", *map(_prior, results.options.sigmas)):
            label = RETRAINED if part.startswith(RETRAINED) else part
            rows.append(Comparison(f"{task}: {label}", None, results.final(part, task), " dB"))
    return rows


def plots(results: Results[PriorTransferOptions]) -> list[Plot]:
    """Bars of every task."""
    return [bars(compare(results), title="Test images", y="PSNR, dB")]


def findings(results: Results[PriorTransferOptions]) -> Sequence[str | Difference]:
    """The prior of each denoiser against the control, over all tasks."""
    return [difference(results, _prior(sigma), CLASSICAL, unit=" dB") for sigma in results.options.sigmas]


SMOKE = PriorTransferOptions(
    "photographs",
    1,
    epochs=1,
    steps=2,
    batch=2,
    crop=33,
    weights=(0.002,),
    tuning=1,
    ridge=(2, 8, 3),
    sigmas=(0.05,),
    tasks=("sensing", "deblurring"),
    assumed=(0.02,),
)

experiment = Experiment(
    name="prior-transfer",
    title="A denoiser's prior with other measurements",
    source="[Lin2019], optimisation-inspired networks for image reconstruction; the task is ours",
    about=(
        "RidgeNet is trained as a denoiser at several noise levels. Its learned objective is then used for compressive "
        "sensing of blocks, deblurring and subsampled Fourier measurements, with noise of standard deviation 0.01 and "
        "without further training; only the noise that it assumes is tuned on validation images. Networks that were "
        "trained for each task, and smoothed total variation with a tuned weight, are the controls. Training images: "
        "Train400 and T91. Test images: Set11, cut to whole blocks. Without these files, scikit-image's photographs "
        "are used."
    ),
    presets={
        "smoke": Preset(SMOKE, (0,), 0.1),
        "laptop": Preset(PriorTransferOptions(epochs=6, ridge_share=1.0), (0, 1, 2), 240),
        "paper": Preset(PriorTransferOptions(epochs=60, steps=1000, ridge_share=1.0), (0, 1, 2), 9000),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=lambda results: [],
)

"""Shared code of the reconstruction experiments: images, measurements, training, scores and pictures."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from minimand.errors import MissingExtra, OptionError
from minimand.nn import (
    ADMMNet,
    Architecture,
    FISTANet,
    ISTANet,
    RidgeNet,
    RidgeTrainer,
    UnrolledNet,
    diagnose,
    least_squares_start,
)
from minimand.operators import BlockSensing, LinearOperator, orthonormal_gaussian, pad_to_blocks, to_blocks

from ..context import Lab
from ..data import data_directory, load_images, psnr, random_crops, ssim, unit_interval
from ..experiment import Metrics, Results

__all__ = [
    "ImageSplits",
    "Scores",
    "UnrolledOptions",
    "assembled",
    "build",
    "mean_scores",
    "measurement",
    "photographs",
    "sizes",
    "standing",
    "train",
    "training_images",
    "training_minutes",
    "tuned",
    "verdicts",
]

_PHOTOGRAPHS = ("astronaut", "brick", "chelsea", "clock", "coffee", "coins", "grass", "gravel", "page", "rocket")
_UNSEEN = ("camera", "moon", "text")
BLOCK = 33
# Batches of a diagnosis.
_BATCHES = 3


@dataclasses.dataclass(frozen=True)
class UnrolledOptions:
    """How a network is built and trained.

    Args:
        source: "files": the folders train400, t91 and the test images under images/ of the data directory;
            "photographs": those of scikit-image; "auto": files if they exist, else photographs.
        limit: Use only this many images of each set; 0: all.
        phases: Iterations of every network.
        channels: Features of the transforms.
        shuffle: Side of the pixel squares that become channels; above 1 the network is cheaper and less accurate.
        epochs: Rounds of training, with one validation each.
        steps: Optimizer steps in an epoch.
        batch: Crops in a step.
        crop: Side of a crop.
        rate: The peak learning rate of AdamW: linear warm-up, then a cosine.
        symmetry: Weight of the symmetry loss.
        start: Initialisation of the transforms: "solver", or "xavier" as in the papers' code.
        shared: Whether FISTA-Net has the transform of its paper: twice as deep, and the same in all phases.
        ridge: Phases, filters and their size of RidgeNet.
        ridge_share: Optimizer steps of RidgeNet, as a share of those of the other networks, for equal minutes: its
            step takes 1.5 to 2 times as long as that of ISTA-Net+, the more the busier the machine.
        tests: The folders of the test images; set11 alone takes a seventh of the time of both.
    """

    source: str = "auto"
    limit: int = 0
    phases: int = 8
    channels: int = 16
    shuffle: int = 1
    epochs: int = 12
    steps: int = 300
    batch: int = 4
    crop: int = 66
    rate: float = 2e-3
    symmetry: float = 0.0
    start: Literal["solver", "xavier"] = "solver"
    shared: bool = False
    ridge: tuple[int, int, int] = (10, 48, 7)
    ridge_share: float = 0.5
    tests: tuple[str, ...] = ("set11", "bsd68")

    def architecture(self) -> Architecture:
        """The transform."""
        return Architecture(self.channels, shuffle=self.shuffle, start=self.start)


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSplits:
    """Images in [0, 1] with one channel, and their origin."""

    train: list[Tensor]
    validation: list[Tensor]
    tests: dict[str, list[Tensor]]
    source: str


@dataclasses.dataclass(frozen=True)
class Scores:
    """Mean PSNR and SSIM over a set of images."""

    psnr: float
    ssim: float


def photographs(names: Sequence[str], side: int = 198) -> list[Tensor]:
    """Grey photographs of scikit-image, their upper left square shrunk to ``side``."""
    try:
        from skimage import data
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "the bundled photographs are in the package scikit-image, which is not installed: "
            'pip install "minimand-papers[demo]"'
        ) from error
    images = []
    for name in names:
        pixels = torch.as_tensor(getattr(data, name)().copy()).float() / 255
        if pixels.dim() == 3:
            pixels = pixels[..., :3] @ torch.tensor([0.299, 0.587, 0.114])
        shorter = min(pixels.shape)
        square = pixels[None, None, :shorter, :shorter]
        images.append(F.interpolate(square, (side, side), mode="bilinear", antialias=True)[0].clamp(0, 1))
    return images


def has_files(lab: Lab, folders: Sequence[str]) -> bool:
    """Whether the data directory holds these folders of images."""
    root = data_directory(lab.data_dir) / "images"
    return all((root / folder).is_dir() for folder in folders)


def resolve(source: str, lab: Lab, folders: Sequence[str]) -> str:
    """Resolve "auto" to files or photographs."""
    if source not in ("auto", "files", "photographs"):
        raise OptionError(f'source is "auto", "files" or "photographs", got {source!r}')
    if source == "auto":
        return "files" if has_files(lab, folders) else "photographs"
    return source


def training_images(options: UnrolledOptions, lab: Lab) -> ImageSplits:
    """Train400 and T91 for training, the last 20 images of Train400 for validation, Set11 and BSD68 for testing."""
    source = resolve(options.source, lab, ("train400", "set11"))
    cut = slice(options.limit or None)
    if source == "photographs":
        side = 198 if options.crop > 66 else 66
        names = _PHOTOGRAPHS[:-2][cut], _PHOTOGRAPHS[-2:][cut], _UNSEEN[cut]
        train, validation, test = (photographs(some, side) for some in names)
        return ImageSplits(train, validation, {"photographs": test}, source)

    def folder(name: str) -> list[Tensor]:
        return [unit_interval(image) for image in load_images(name, lab.data_dir)]

    known = folder("train400")
    extra = folder("t91") if has_files(lab, ("t91",)) else []
    tests = {name: folder(name)[cut] for name in options.tests if has_files(lab, (name,))}
    return ImageSplits((known[:-20] + extra)[cut], known[-20:][cut], tests, source)


def measurement(ratio: float, images: ImageSplits, lab: Lab) -> tuple[Tensor, Tensor]:
    """The measurement matrix Φ of a ratio, the same for every seed, and the least-squares start, borders included."""
    rows = round(ratio * BLOCK**2)
    phi = orthonormal_gaussian(rows, BLOCK**2, generator=torch.Generator().manual_seed(0))
    large = [image for image in images.train if min(image.shape[-2:]) >= BLOCK]
    inner = [to_blocks(_inside(image, shift), BLOCK) for image in large for shift in (0, BLOCK // 2)]
    # Whole images end in blocks that zeros fill up.
    blocks = torch.cat([*inner, *(to_blocks(pad_to_blocks(image, BLOCK), BLOCK) for image in large)])
    return phi.to(lab.device), least_squares_start(phi, blocks, ridge=1e-5).to(lab.device)


def _inside(image: Tensor, shift: int) -> Tensor:
    """The largest part made of whole blocks that begins at ``shift``, or at the corner if there is none."""
    height, width = (side - shift for side in image.shape[-2:])
    if min(height, width) < BLOCK:
        return _inside(image, 0)
    return image[..., shift : shift + height // BLOCK * BLOCK, shift : shift + width // BLOCK * BLOCK]


def build(
    kind: str,
    phi: Tensor | LinearOperator,
    options: UnrolledOptions,
    initial: Tensor | None = None,
    noise: float | None = None,
) -> UnrolledNet | RidgeNet:
    """A network by name: ISTA-Net, ISTA-Net plus, FISTA-Net or ADMM-Net, optionally followed by "constrained"; or
    RidgeNet, followed by its guarantee."""
    if kind.startswith("RidgeNet "):
        guarantee: Any = kind.removeprefix("RidgeNet ")
        return RidgeNet(phi, *options.ridge, guarantee, initial=initial, noise=noise)
    name = kind.removesuffix(" constrained")
    constrained = name != kind
    shape = options.architecture()
    if name == "FISTA-Net":
        shape = dataclasses.replace(shape, depth=4) if options.shared else shape
        return FISTANet(
            phi,
            options.phases,
            architecture=shape,
            constrained=constrained,
            shared=options.shared,
            momentum="learned",
            initial=initial,
        )
    if name == "ADMM-Net":
        return ADMMNet(phi, options.phases, architecture=shape, constrained=constrained, initial=initial)
    if name not in ("ISTA-Net", "ISTA-Net plus"):
        raise OptionError(
            f"there is no network {name!r}; available: RidgeNet convex, RidgeNet convergent, ISTA-Net, "
            f"ISTA-Net plus, FISTA-Net, ADMM-Net"
        )
    plus = name.endswith("plus")
    return ISTANet(phi, options.phases, plus, architecture=shape, constrained=constrained, initial=initial)


def train(
    lab: Lab,
    net: UnrolledNet | RidgeNet,
    draw: Callable[[], tuple[Tensor, Tensor]],
    options: UnrolledOptions,
    validate: Callable[[], float],
) -> Iterator[Metrics]:
    """Train with AdamW, warm-up, cosine decay and clipped gradients; yields the validation PSNR after each epoch, and
    the seconds of its training alone."""
    net.to(lab.device)
    if isinstance(net, RidgeNet):
        steps = max(1, round(options.ridge_share * options.steps))
        trainer = RidgeTrainer(net, options.epochs * steps)
        for epoch in lab.epochs(options.epochs, model=net, optimizer=trainer.optimizer, schedule=trainer.schedule):
            net.train()
            begin = lab.seconds
            losses = [trainer.step(*draw()) for _ in lab.track(range(steps))]
            spent = {"train_seconds": lab.seconds - begin}
            net.eval()
            yield {"epoch": epoch + 1, "loss": sum(losses) / len(losses), "validation": validate(), **spent}
        return
    matrices = [p for p in net.parameters() if p.dim() > 1]
    numbers = [p for p in net.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 1e-4}, {"params": numbers, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.rate, fused=True)
    total = options.epochs * options.steps
    warm = max(1, min(200, total // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min(1.0, (k + 1) / warm) * 0.5 * (1 + math.cos(math.pi * min(1.0, k / total)))
    )
    for epoch in lab.epochs(options.epochs, model=net, optimizer=optimizer, schedule=schedule):
        net.train()
        begin, mean = lab.seconds, 0.0
        for _ in lab.track(range(options.steps)):
            y, x = draw()
            loss = net.loss(y, x, symmetry=options.symmetry)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            mean += loss.item() / options.steps
        spent = {"train_seconds": lab.seconds - begin}
        net.eval()
        yield {"epoch": epoch + 1, "loss": mean, "validation": validate(), **spent}


def training_minutes(results: Results[Any], part: str) -> list[float]:
    """Processor minutes of a part's training, without validation and tests, for every seed."""
    return [sum(values) / 60 for values in results.curve(part, "train_seconds").values() if values]


@torch.no_grad()
def assembled(reconstruct: Callable[[BlockSensing, Tensor], Tensor], phi: Tensor, image: Tensor) -> Tensor:
    """Measure an image by blocks, reconstruct it, remove the padding and clip to [0, 1]."""
    padded = pad_to_blocks(image[None].to(phi.device), BLOCK)
    operator = BlockSensing(phi, (padded.shape[-2], padded.shape[-1]))
    x = reconstruct(operator, operator.apply(padded))
    return x[0, :, : image.shape[-2], : image.shape[-1]].clamp(0, 1).cpu()


def mean_scores(reconstruct: Callable[[Tensor], Tensor], images: Sequence[Tensor]) -> Scores:
    """Mean PSNR and SSIM over images, by scikit-image's definitions."""
    pairs = [(reconstruct(image), image) for image in images]
    count = max(1, len(pairs))
    return Scores(
        sum(float(psnr(x, image)) for x, image in pairs) / count,
        sum(float(ssim(x, image)) for x, image in pairs) / count,
    )


def tuned(score: Callable[[float], float], weights: Sequence[float], most: int = 30) -> dict[float, float]:
    """The scores of some weights. While the best weight is at an end of the grid, its half or double is tried as well,
    up to ``most`` more weights, until the best is an interior one or a further weight gains less than 0.002: with exact
    measurements all small weights are alike.

    >>> tuned(lambda w: -abs(w - 0.5), (2.0, 4.0))
    {2.0: -1.5, 4.0: -3.5, 1.0: -0.5, 0.5: -0.0, 0.25: -0.25}
    """
    found = {weight: score(weight) for weight in weights}
    for _ in range(most if len(found) > 1 else 0):
        best = max(found, key=lambda weight: found[weight])
        if best not in (min(found), max(found)):
            break
        further = best / 2 if best == min(found) else 2 * best
        found[further] = score(further)
        if abs(found[further] - found[best]) < 0.002:
            break
    return found


@torch.no_grad()
def verdicts(net: UnrolledNet | RidgeNet, draw: Callable[[], tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """The diagnosis of a network as plain numbers: the largest gains on a few batches, the rest on the first one."""
    batches = [draw()[0] for _ in range(_BATCHES)]
    if isinstance(net, RidgeNet):
        proofs = [diagnose(net, y) for y in batches]
        return {
            "proved": proofs[0].guarantee,
            "exponents": [round(end, 4) for end in proofs[0].exponents],
            "certified_iterations": max(proof.iterations for proof in proofs),
            "rises": sum(proof.rises for proof in proofs),
            "step_gain": round(max(proof.probe.gain for proof in proofs), 4),
            "step_gain_bound": round(proofs[0].gain_bound, 4),
        }
    reports = [diagnose(net, y) for y in batches]
    report, phases = reports[0], zip(*(each.phases for each in reports), strict=True)
    return {
        "in_range": float(report.in_range),
        "steps": [round(phase.step, 4) for phase in report.phases],
        "thresholds": [round(phase.threshold, 5) for phase in report.phases],
        "residuals": [round(phase.residual, 5) for phase in report.phases],
        "gains": [round(max(each.gain for each in phase), 3) for phase in phases],
    }


def standing(results: Results[Any], parts: Sequence[str]) -> list[str]:
    """Sentences on which networks have the steps and thresholds of a convergent solver, and on their learned proxes."""
    # Older records call it "convergent".
    found_in_range = {part: results.final(part, "in_range") or results.final(part, "convergent") for part in parts}
    diagnosed = {part: min(values) > 0 for part, values in found_in_range.items() if values}
    gains = [max(values[-1]) for part in diagnosed for values in results.curve(part, "gains").values() if values]
    found = []
    texts = {True: "Steps and thresholds of a convergent solver", False: "Steps or thresholds outside its range"}
    for in_range, text in texts.items():
        names = [part for part, holds in diagnosed.items() if holds is in_range]
        if names:
            found.append(f"{text}: {'; '.join(names)}.")
    for part in parts:
        for values in [texts for texts in results.curve(part, "proved").values() if texts][:1]:
            found.append(f"Proved of {part}: {values[-1]}.")
        if measured := results.final(part, "step_gain"):
            found.append(
                f"One certified step of {part} increased distances at most {max(measured):.4g}-fold, on some "
                f"batches and scales; proved: at most {max(results.final(part, 'step_gain_bound')):.4g}-fold."
            )
    if gains:
        found.append(
            f"The learned proxes increase distances up to {min(gains):.2f} to {max(gains):.2f}-fold, depending "
            "on the network; a prox of a convex function never increases them."
        )
    return found


def crops(images: ImageSplits, options: UnrolledOptions, phi: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """Random crops of the training images, some with image borders, measured by blocks."""
    operator = BlockSensing(phi, (options.crop, options.crop))

    def draw() -> tuple[Tensor, Tensor]:
        x = bordered(random_crops(images.train, options.batch, options.crop)).to(phi.device)
        return operator.apply(x), x

    return draw


def bordered(x: Tensor, share: float = 0.25) -> Tensor:
    """The crops; a ``share`` of them gets zeros in the last block, like padded images."""
    for dim in (-2, -1):
        cut = torch.randint(BLOCK, (len(x),)) * (torch.rand(len(x)) < share)
        kept = torch.arange(x.shape[dim]) < x.shape[dim] - cut[:, None]
        x = x * (kept[:, None, :, None] if dim == -2 else kept[:, None, None, :])
    return x


def sizes(options: UnrolledOptions) -> str:
    """The architecture in words."""
    kind = "" if options.shuffle == 1 else f", pixel squares of {options.shuffle} as channels"
    return f"{options.phases} phases, {options.channels} channels{kind}"

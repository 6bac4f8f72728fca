"""The ImageNet table of "Optimization and Deep Neural Networks": HB-Net-34 and AGD-Net-121 against their baselines."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from minimand.errors import DataError

from ...claims import ACCURACY, combine, judge_gain, scale, signed
from ...comparing import Difference, difference
from ...context import Lab
from ...data import Batches, Normalization
from ...data.folders import FORMATS
from ...drawing import bars, curves
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ...training import Loaders
from ...untrusted import content, opened_image
from ...zoo import AGDNet121, DenseNet121, HBNet34, ResNet34
from ._structure import StructureOptions, error_row, trained

#: Top-1 and top-5 error in per cent.
PAPER = {
    "ResNet-34": (26.73, 8.74),
    "HB-Net-34": (26.33, 8.56),
    "DenseNet-121": (25.02, 7.71),
    "AGD-Net-121": (24.62, 7.39),
}
PAIRS = (("HB-Net-34", "ResNet-34"), ("AGD-Net-121", "DenseNet-121"))
_ENDINGS = (".jpeg", ".jpg", ".png")
_IMAGENET = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclasses.dataclass(frozen=True)
class StructureImageNetOptions(StructureOptions):
    """The four networks at a chosen width.

    Args:
        folder: A folder of images, ``train/CLASS/…`` and ``val/CLASS/…``; empty: ``dataset``, in memory.
        side: Side of the crops; the shorter side of an image is resized to 8/7 of it.
        growth: Growth of the dense networks.
    """

    folder: str = ""
    side: int = 224
    growth: int = 32

    def loaders(self, lab: Lab) -> Loaders:
        """Batches of the folder, or of the dataset."""
        return folder_loaders(self, lab) if self.folder else super().loaders(lab)


# A folder of images --------------------------------------------------------------------------------------------------


def _files(folder: Path) -> tuple[list[Path], list[str]]:
    """All images below a folder of classes, and the classes."""
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    found = [file for name in classes for file in sorted((folder / name).iterdir()) if file.suffix.lower() in _ENDINGS]
    if not found:
        raise DataError(
            f"{folder} holds no folders of images: put one for each class there, or leave the option folder empty"
        )
    return found, classes


@dataclasses.dataclass
class ImageFileBatches:
    """Batches of image files, read on demand: random crops and flips with a generator, centre crops without.

    Every process takes its share of a batch. The generator belongs to the run, so a resumed run continues with it.
    """

    files: list[Path]
    labels: Tensor
    size: int
    side: int
    lab: Lab
    generator: torch.Generator | None = None

    def __len__(self) -> int:
        return len(self.files) // self.size if self.generator is not None else -(-len(self.files) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count, rank, world = len(self.files), self.lab.rank, self.lab.world
        order, draw = torch.arange(count), None
        if self.generator is not None:
            order = torch.randperm(count, generator=self.generator)
            draw = torch.rand(count, 3, generator=self.generator)
        for batch in order[: len(self) * self.size].split(self.size):
            rows = batch[rank::world]
            images = [
                _crop(self.files[k], self.side, None if draw is None else draw[k].tolist()) for k in rows.tolist()
            ]
            stacked = torch.stack(images) if images else torch.zeros(0, 3, self.side, self.side, dtype=torch.uint8)
            yield _IMAGENET(stacked.to(self.lab.device)), self.labels[rows].to(self.lab.device)

    def state_dict(self) -> dict[str, Any]:
        """Nothing; the run saves its generators."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do."""


def _crop(file: Path, side: int, draw: list[float] | None) -> Tensor:
    """A square crop, random or central, of an image whose shorter side was resized to 8/7 of the crop's side."""
    from PIL import Image

    try:
        with opened_image(content(file), FORMATS) as opened:
            image = opened.convert("RGB")
    except Exception as error:
        raise DataError(f"{file} is not an image, or is damaged ({error}): replace or remove it") from error
    scale = side * 8 / 7 / min(image.size)
    width, height = (max(side, round(scale * length)) for length in image.size)
    across, down, mirror = (0.5, 0.5, 0.0) if draw is None else draw
    left, top = round(across * (width - side)), round(down * (height - side))
    pixels = np.array(
        image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + side, top + side))
    )
    square = torch.from_numpy(pixels).permute(2, 0, 1)
    return square.flip(-1) if mirror >= 0.5 else square


def folder_loaders(options: StructureImageNetOptions, lab: Lab) -> Loaders:
    """Batches of a folder of images; a hundredth of the training images is held out, the same for all seeds."""
    folder = Path(options.folder).expanduser()
    files, classes = _files(folder / "train")
    tests, others = _files(folder / "val")
    if classes != others:
        raise DataError(
            f"{folder}: train has {len(classes)} classes and val {len(others)}, or different ones; they must be equal"
        )
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    held = max(1, len(files) // 100)

    def batches(chosen: list[Path], size: int, generator: torch.Generator | None = None) -> Batches:
        chosen = chosen[: options.limit or None]
        labels = torch.tensor([classes.index(file.parent.name) for file in chosen])
        # All that training asks of batches: to be counted, run through, and resumed.
        return cast(Batches, ImageFileBatches(chosen, labels, min(size, len(chosen)), options.side, lab, generator))

    train, validation = ([files[k] for k in part] for part in (order[held:], order[:held]))
    return Loaders(
        batches(train, options.batch, lab.generator()),
        batches(validation, 100),
        batches(tests, 100),
        len(classes),
        (3, options.side, options.side),
    )


# The experiment ------------------------------------------------------------------------------------------------------


def network(options: StructureImageNetOptions, part: str, data: Loaders) -> nn.Module:
    """A network by its name."""
    classes, channels = data.classes, data.shape[0]
    match part:
        case "ResNet-34":
            return ResNet34(classes, channels, width=options.width)
        case "HB-Net-34":
            return HBNet34(classes, channels, width=options.width)
        case "DenseNet-121":
            return DenseNet121(classes, channels, growth=options.growth)
    return AGDNet121(classes, channels, growth=options.growth)


def parts(options: StructureImageNetOptions) -> list[Part]:
    """The rows of the table."""
    return [Part(name) for name in PAPER]


@torch.no_grad()
def top5(lab: Lab, model: nn.Module, batches: Batches) -> float:
    """The percentage of images whose class is not among the five best answers."""
    model.eval()
    counts = torch.zeros(2, device=lab.device, dtype=torch.float64)
    for images, labels in batches:
        if len(labels):
            logits = model(images)
            best = logits.topk(min(5, logits.shape[1])).indices
            wrong = (best != labels[:, None]).all(1).sum()
            counts += torch.stack([wrong, wrong.new_tensor(len(labels))]).double()
    wrong, count = lab.total(counts).tolist()
    return 100 * wrong / count


def run(options: StructureImageNetOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train one network."""
    data = options.loaders(lab)
    model = network(options, part, data)
    for record in trained(options, lab, data, model):
        yield {**record, "top5": top5(lab, model, data.test)} if "error" in record else record


def compare(results: Results[StructureImageNetOptions]) -> list[Comparison]:
    """Errors beside the paper's errors on ImageNet."""
    rows = []
    for key, name, column in (("error", "top-1", 0), ("top5", "top-5", 1)):
        for part, numbers in PAPER.items():
            paper = numbers[column] if results.options.folder else None
            rows.append(error_row(results, part, f"{part}, {name}", paper, key))
    return rows


def plots(results: Results[StructureImageNetOptions]) -> list[Plot]:
    """Learning curves and the table."""
    return [
        curves(results, key="validation", title="Validation accuracy", y="accuracy, %"),
        bars(compare(results), title="Errors", y="test error, %"),
    ]


def findings(results: Results[StructureImageNetOptions]) -> Sequence[str | Difference]:
    """Each algorithm against its baseline."""
    columns = (("error", "Top-1"), ("top5", "Top-5"))
    return [
        difference(results, *pair, key, higher=False, quantity=f"{name} error")
        for pair in PAIRS
        for key, name in columns
    ]


def claims(results: Results[StructureImageNetOptions]) -> list[Claim]:
    """Top-1 errors below those of the baselines."""
    gains = {pair: [-gap for gap in results.paired(*pair, "error")] for pair in PAIRS}
    sizes = {pair: PAPER[pair[1]][0] - PAPER[pair[0]][0] for pair in PAIRS}
    return [
        Claim(
            "ImageNet table: HB-Net-34 and AGD-Net-121 have lower top-1 errors than their baselines",
            ", ".join(f"−{size:.2f}" for size in sizes.values()) + " points",
            ", ".join(signed([-gap for gap in values]) for values in gains.values()),
            scale(results, results.options.folder or results.options.dataset),
            combine([judge_gain(gains[pair], sizes[pair], single=ACCURACY) for pair in PAIRS]),
        )
    ]


_SMALL = StructureImageNetOptions("digits", batch=50, limit=100, enlarge=4, width=0.1, growth=4, epochs=1, peak=0.05)
_LAPTOP = StructureImageNetOptions(batch=64, augment=True, limit=5_000, enlarge=2, width=0.25, growth=8, epochs=5)
_PAPER = StructureImageNetOptions(
    batch=256, augment=True, width=1.0, epochs=90, schedule="paper", decay=1e-4, folder="imagenet", growth=32
)
experiment = Experiment(
    name="structure-imagenet",
    title="Networks of faster algorithms on ImageNet",
    source="[Lin2019], the ImageNet table",
    about=(
        "HB-Net-34 is ResNet-34 with learned β₁ and β₂ (eq. 16), AGD-Net-121 is DenseNet-121 with learned weights "
        "on the past iterates of a stage (eq. 18). Both start as the function of their baseline. The paper preset "
        "reads a folder of images (the option folder, with train/CLASS and val/CLASS), resizes the shorter side to "
        "256, and crops 224 × 224 and flips at random. It omits the scale and colour jitter of He et al., and its "
        "learning rate drops after 1/2 and 3/4 of the epochs. The laptop preset runs without ImageNet: the same "
        "four depths at a quarter of the width on 5,000 images of CIFAR-10 enlarged to 64 × 64, so the paper's "
        "numbers do not apply."
    ),
    presets={
        "smoke": Preset(_SMALL, (0,), 0.2),
        "laptop": Preset(_LAPTOP, (0, 1, 2, 3, 4), 75),
        "paper": Preset(_PAPER, (0,), 2_000_000),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
    needs_data="ImageNet",
)

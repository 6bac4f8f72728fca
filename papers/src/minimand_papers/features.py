"""Cached features: a network's trunk runs over the images once, then many heads are trained on what it computed."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .context import Lab
from .recipe import bfloat16_products
from .training import Loaders

__all__ = ["Features", "HeadTraining", "cache", "cached", "head_accuracy", "train_head"]


@dataclasses.dataclass(frozen=True)
class Features:
    """Features and labels of the three splits; the training features of several augmented passes follow each other."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


@torch.no_grad()
def cache(lab: Lab, trunk: nn.Module, data: Loaders, passes: int) -> None:
    """Compute the features of ``passes`` augmented passes over the training images, and of the other splits; keep
    them."""
    trunk.eval()
    kept: dict[str, Tensor] = {}
    for name, times in (("train", passes), ("validation", 1), ("test", 1)):
        batches = getattr(data, name)
        pairs = [(trunk(images).float(), labels) for _ in range(times) for images, labels in batches]
        kept[name] = torch.cat([features for features, _ in pairs]).half()
        kept[f"{name} labels"] = torch.cat([labels for _, labels in pairs])
    lab.keep("features", kept)


def cached(lab: Lab, part: str) -> Features:
    """The features that :func:`cache` kept in another part."""
    found = lab.kept(part, "features")
    return Features(*((found[name].float(), found[f"{name} labels"]) for name in ("train", "validation", "test")))


@dataclasses.dataclass(frozen=True)
class HeadTraining:
    """How a head is trained: SGD with momentum, a rate that rises for a tenth of the steps and falls linearly to 0.

    Args:
        rate: The largest learning rate.
        epochs: Passes over all kept features.
        batch: Rows in a batch.
        momentum: Nesterov's momentum.
        weight_decay: Weight decay.
        smoothing: Label smoothing.
        bfloat16: Compute products in bfloat16, on devices with instructions for it.
    """

    rate: float
    epochs: int = 1
    batch: int = 250
    momentum: float = 0.9
    weight_decay: float = 5e-4
    smoothing: float = 0.1
    bfloat16: bool = False


def train_head(net: nn.Module, data: Features, how: HeadTraining, generator: torch.Generator) -> None:
    """Train a head in place."""
    features, labels = data.train
    optimizer = torch.optim.SGD(
        net.parameters(), lr=how.rate, momentum=how.momentum, weight_decay=how.weight_decay, nesterov=True
    )
    batch = min(how.batch, len(features))
    steps = how.epochs * (len(features) // batch)
    rising = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rising, (steps - step) / max(1, steps - rising))
    )
    bfloat16 = how.bfloat16 and bfloat16_products(features.device)
    net.train()
    for index in _batches(len(features), batch, steps, generator):
        optimizer.zero_grad()
        with torch.autocast(features.device.type, torch.bfloat16, enabled=bfloat16):
            logits = net(features[index])
        loss = nn.functional.cross_entropy(logits.float(), labels[index], label_smoothing=how.smoothing)
        loss.backward()
        optimizer.step()
        schedule.step()


def _batches(rows: int, batch: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    full = rows // batch
    for step in range(steps):
        if step % full == 0:
            order = torch.randperm(rows, generator=generator)
        yield order[step % full * batch :][:batch]


@torch.no_grad()
def head_accuracy(net: nn.Module, split: tuple[Tensor, Tensor], trials: int = 1) -> float:
    """The accuracy of a head in per cent, in evaluation mode, averaged over trials."""
    net.eval()
    features, labels = split
    found = [(net(features).argmax(-1) == labels).double().mean() for _ in range(trials)]
    return 100 * float(torch.stack(found).mean())

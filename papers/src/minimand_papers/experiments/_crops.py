"""Crops of reconstructions in records, and their gallery."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..data import psnr
from ..drawing import figure
from ..experiment import Plot, Results
from ..pictures import decoded, encoded

__all__ = ["gallery", "picture", "reference"]


def picture(image: Tensor, window: int = 64) -> str:
    """The middle of an image, for a record."""
    top, left, side = _middle(image.shape[-2], image.shape[-1], window)
    return encoded(image[0, top : top + side, left : left + side].cpu().numpy(), lossless=True)


def reference(image: Tensor, window: int = 64) -> dict[str, str]:
    """The ground truth for a gallery: the middle of the image and the whole image."""
    return {"reference": picture(image, window), "whole": encoded(image[0].cpu().numpy())}


def _middle(height: int, width: int, window: int) -> tuple[int, int, int]:
    """Top, left and side of the square in the middle."""
    side = min(window, height, width)
    return (height - side) // 2, (width - side) // 2, side


def gallery(results: Results[Any], parts: Mapping[str, str], truth: str, title: str) -> Plot | None:
    """Crops of one test image beside the ground truth, with errors below; None if no crop was recorded."""
    found = {label: results.curve(part, "crop") for part, label in parts.items()}
    shown = {label: texts[-1] for label, seeds in found.items() for texts in list(seeds.values())[:1] if texts}
    references = [texts[-1] for texts in results.curve(truth, "reference").values() if texts]
    if not shown or not references:
        return None
    crop = torch.from_numpy(decoded(references[0]))
    drawn = figure(2.1 * (len(shown) + 1), 4.4)
    axes = drawn.subplots(2, len(shown) + 1, squeeze=False)
    axes[0, 0].imshow(crop.numpy(), cmap="gray", vmin=0, vmax=1)
    axes[0, 0].set_title("the image", fontsize=9)
    sentences = []
    for column, (label, text) in enumerate(shown.items(), 1):
        image = torch.from_numpy(decoded(text))
        score = float(psnr(image, crop)) if not torch.equal(image, crop) else math.inf
        axes[0, column].imshow(image.numpy(), cmap="gray", vmin=0, vmax=1)
        axes[0, column].set_title(f"{label}\n{score:.2f} dB here", fontsize=9)
        axes[1, column].imshow((image - crop).numpy(), cmap="PuOr", vmin=-0.2, vmax=0.2)
        sentences.append(f"{label} {score:.2f} dB")
    for texts in list(results.curve(truth, "whole").values())[:1]:
        _locate(axes[1, 0], decoded(texts[-1]), len(crop))
    axes[1, 0].set_title("errors: −0.2 … 0.2", fontsize=9)
    for axis in axes.flat:
        axis.set_axis_off()
    return Plot(title, f"{title}: {', '.join(sentences)}", drawn)


def _locate(axes: Any, whole: Any, window: int) -> None:
    """The whole image, with a frame around its middle."""
    top, left, side = _middle(whole.shape[0], whole.shape[1], window)
    axes.imshow(whole, cmap="gray", vmin=0, vmax=1)
    right, bottom = left + side, top + side
    axes.plot([left, right, right, left, left], [top, top, bottom, bottom, top], color="#D55E00")

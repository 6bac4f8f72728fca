"""Small images in records, encoded as text, and their drawing side by side."""

import base64
import io
from collections.abc import Mapping, Sequence

import numpy as np

from .drawing import figure
from .experiment import Plot
from .untrusted import opened_image

__all__ = ["decoded", "encoded", "montage", "pictures"]


def encoded(image: np.ndarray, *, low: float = 0.0, high: float = 1.0, lossless: bool = False) -> str:
    """A grey image as base64 text: JPEG, or PNG if ``lossless``.

    >>> round(float(decoded(encoded(np.full((2, 2), 0.2), lossless=True)).max()), 6)
    0.2
    """
    from PIL import Image

    unit = np.clip((image - low) / (high - low), 0, 1)
    file = io.BytesIO()
    kind = {"format": "PNG"} if lossless else {"format": "JPEG", "quality": 85}
    Image.fromarray((255 * unit).round().astype(np.uint8)).save(file, **kind)
    return base64.b64encode(file.getvalue()).decode()


def decoded(text: str) -> np.ndarray:
    """The image that :func:`encoded` wrote, in 0 … 1."""
    return (
        np.asarray(opened_image(base64.b64decode(text), ("PNG", "JPEG"), 1 << 22).convert("L"), dtype=np.float32) / 255
    )


def montage(images: np.ndarray, columns: int = 8, *, signed: bool = False) -> np.ndarray:
    """Small images side by side, each scaled to its own range; if ``signed``, zero is mid-grey."""
    count, height, width = images.shape
    columns = max(1, min(columns, count))
    rows = max(1, -(-count // columns))
    sheet = np.ones((rows * (height + 1) - 1, columns * (width + 1) - 1), dtype=np.float32)
    for number, image in enumerate(images):
        size = max(float(np.abs(image).max()), 1e-12)
        unit = 0.5 + 0.5 * image / size if signed else 1 - image / size
        top, left = (number // columns) * (height + 1), (number % columns) * (width + 1)
        sheet[top : top + height, left : left + width] = unit
    return sheet


def pictures(grid: Sequence[Mapping[str, str | None]], title: str) -> Plot | None:
    """Rows of encoded images with their titles; None if nothing was recorded."""
    rows = [{label: text for label, text in row.items() if text} for row in grid]
    rows = [row for row in rows if row]
    if not rows:
        return None
    columns = max(len(row) for row in rows)
    shapes = [decoded(text).shape for row in rows for text in row.values()]
    ratio = sum(height / width for height, width in shapes) / len(shapes)
    wide = min(3.4, 10 / columns)
    drawn = figure(max(wide * columns, 3.0), (wide * ratio + 0.45) * len(rows))
    axes = drawn.subplots(len(rows), columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for line, row in zip(axes, rows, strict=True):
        for axis, (label, text) in zip(line, row.items(), strict=False):
            axis.imshow(decoded(text), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axis.set_title(label, fontsize=9)
    labels = ", ".join(label.replace("\n", " ") for row in rows for label in row)
    return Plot(title, f"{title}; images: {labels}", drawn)

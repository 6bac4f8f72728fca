"""Folders of images without labels, for reconstruction."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from minimand.errors import DataError, OptionError

from ..untrusted import content, opened_image
from .loading import data_directory

__all__ = ["FORMATS", "Images", "load_images"]

_ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""The formats of images, by Pillow's names; a file of another one is refused whatever its ending."""

# The most bytes of the pixels of a folder; a file of 8 kB can hold 64 MB of one colour.
_LARGEST = 1 << 32

_BYTE_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "YCbCr", "CMYK", "HSV", "LAB")


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """Images of any sizes (each C × H × W, uint8), sorted by file name."""

    name: str
    files: tuple[str, ...]
    images: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index]

    def __repr__(self) -> str:
        return f"Images({self.name}: {len(self)} images)"


def load_images(
    folder: str | os.PathLike[str],
    data_dir: str | os.PathLike[str] | None = None,
    *,
    mode: Literal["L", "RGB"] = "L",
) -> Images:
    """All images of ``images/FOLDER`` under the data directory; an absolute path, or one from ``.``, is used as given.

    ``mode="L"`` is grey: colours become 0.299 R + 0.587 G + 0.114 B over the full range 0 … 255 (MATLAB's rgb2ycbcr
    squeezes the same luma into 16 … 235). Images with more than 8 bits per channel are rejected, not clipped.
    Subfolders are not read.
    """
    if mode not in ("L", "RGB"):
        raise OptionError(f'mode must be "L" (grey) or "RGB", got {mode!r}')
    path = _resolve(folder, data_dir)
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in _ENDINGS) if path.is_dir() else []
    if not files:
        found = "holds no image files" if path.is_dir() else "does not exist"
        raise DataError(
            f"{path} {found}: put images ({', '.join(ending[1:] for ending in _ENDINGS)}) there, or name another "
            f"data directory by data_dir= or MINIMAND_DATA"
        )
    images: list[Tensor] = []
    left = _LARGEST
    for file in files:
        images.append(_read(file, mode))
        left -= images[-1].nbytes
        if left < 0:
            raise DataError(f"{path} holds images of more than {_LARGEST:,} bytes: divide it into several folders")
    return Images(path.name, tuple(file.name for file in files), tuple(images))


def _resolve(folder: str | os.PathLike[str], data_dir: str | os.PathLike[str] | None) -> Path:
    path = Path(folder).expanduser()
    if path.is_absolute() or os.fspath(folder).startswith("."):
        return path.absolute()
    return data_directory(data_dir) / "images" / path


def _read(file: Path, mode: str) -> Tensor:
    """One image, C × H × W."""
    try:
        with opened_image(content(file), FORMATS) as image:
            if image.mode not in _BYTE_MODES:
                raise DataError(
                    f"{file} has more than 8 bits in a channel (Pillow's mode {image.mode}), which would be clipped: "
                    f"save it with 8 bits, scaled as you want it"
                )
            pixels = np.array(image.convert(mode))
    # Pillow's decoders meet damaged bytes with OSError, SyntaxError, ValueError, struct.error …
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{file} is not an image, or is damaged ({error}): replace or remove it") from error
    tensor = torch.from_numpy(pixels)
    return tensor.unsqueeze(0) if mode == "L" else tensor.permute(2, 0, 1).contiguous()

"""Datasets: a name becomes tensors, downloads are checked, batches are resumable.

>>> import torch
>>> from minimand_papers.data import Normalisation, batches, load
>>> data = load("digits")
>>> train, validation = data.train.split(0.1, seed=0)
>>> normalise = Normalisation.of(train)
>>> loader = batches(train, 64, generator=torch.Generator().manual_seed(0), normalise=normalise)
>>> sum(len(labels) for _, labels in loader)
1294
"""

from .batching import Batches, batches
from .crops import random_crops, unit_interval
from .dataset import Dataset, Split
from .folders import Images, load_images
from .loading import data_directory, load
from .metrics import psnr, ssim
from .registry import Bundled, Files, Record, Remote, registry
from .transforms import Augmentation, CropFlip, Normalisation

__all__ = [
    "Augmentation",
    "Batches",
    "Bundled",
    "CropFlip",
    "Dataset",
    "Files",
    "Images",
    "Normalisation",
    "Record",
    "Remote",
    "Split",
    "batches",
    "data_directory",
    "load",
    "load_images",
    "psnr",
    "random_crops",
    "registry",
    "ssim",
    "unit_interval",
]

"""Datasets: a name becomes tensors, downloads are checked, batches are resumable.

>>> import torch
>>> from minimand_papers.data import Normalization, batches, load
>>> data = load("digits")
>>> train, validation = data.train.split(0.1, seed=0)
>>> normalize = Normalization.of(train)
>>> loader = batches(train, 64, generator=torch.Generator().manual_seed(0), normalize=normalize)
>>> sum(len(labels) for _, labels in loader)
1294
"""

from .batching import Batches, batches
from .crops import random_crops, unit_interval
from .dataset import Dataset, DataSplit
from .folders import Images, load_images
from .loading import data_directory, load
from .metrics import psnr, ssim
from .registry import Bundled, DatasetRecord, Files, Remote, registry
from .transforms import Augmentation, CropFlip, Normalization

__all__ = [
    "Augmentation",
    "Batches",
    "Bundled",
    "CropFlip",
    "DataSplit",
    "Dataset",
    "DatasetRecord",
    "Files",
    "Images",
    "Normalization",
    "Remote",
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

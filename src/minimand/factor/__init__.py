"""Factorisations that choose their own size and prove how good they are: estimators, certificates, dropout."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..homogeneous import DropoutPenalty, ParallelNetwork, ParallelReLU
    from .certificate import Certificate, Status
    from .completion import MatrixCompletion
    from .cp import certify_tensor
    from .dictionary import SparseDictionary
    from .dropout import DropoutFactorization, dropout_optimum, equalize, nuclear_squared
    from .engine import factorize
    from .gap import certify
    from .losses import Huber, Loss, Squared
    from .lowrank import LowRank
    from .nmf import NMF
    from .regularisers import L2, NonNegativeL2, Regulariser, SparseL2
    from .robust import RobustPCA
    from .smooth import Entrywise, Logistic
    from .tensor import CPTensor

# scikit-learn takes longer to import than the rest of the library: each name is imported when it is asked for.
_HOMES = {
    "Certificate": "certificate",
    "Status": "certificate",
    "certify": "gap",
    "certify_tensor": "cp",
    "factorize": "engine",
    "LowRank": "lowrank",
    "NMF": "nmf",
    "SparseDictionary": "dictionary",
    "RobustPCA": "robust",
    "MatrixCompletion": "completion",
    "CPTensor": "tensor",
    "Loss": "losses",
    "Squared": "losses",
    "Huber": "losses",
    "Entrywise": "smooth",
    "Logistic": "smooth",
    "Regulariser": "regularisers",
    "L2": "regularisers",
    "NonNegativeL2": "regularisers",
    "SparseL2": "regularisers",
    "dropout_optimum": "dropout",
    "equalize": "dropout",
    "DropoutFactorization": "dropout",
    "DropoutPenalty": "..homogeneous",
    "nuclear_squared": "dropout",
    "ParallelReLU": "..homogeneous",
    "ParallelNetwork": "..homogeneous",
}

__all__ = [
    "L2",
    "NMF",
    "CPTensor",
    "Certificate",
    "DropoutFactorization",
    "DropoutPenalty",
    "Entrywise",
    "Huber",
    "Logistic",
    "Loss",
    "LowRank",
    "MatrixCompletion",
    "NonNegativeL2",
    "ParallelNetwork",
    "ParallelReLU",
    "Regulariser",
    "RobustPCA",
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
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    value = getattr(importlib.import_module(home if home.startswith(".") else f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""Parallel networks grown to a certified global optimum, norms as regularisers, and the explicit penalty of dropout.

``ParallelReLU`` loads when it is used, because only it needs scikit-learn. Without scikit-learn it raises
:class:`~minimand.errors.MissingExtra`.
"""

from typing import TYPE_CHECKING, Any

from .certificate import certify_relu
from .degree import homogeneity_degree
from .parallel import ParallelNetwork
from .penalty import DropoutPenalty
from .regularizers import factor_norms, path_norm, product_of_norms, smooth_surrogate, weight_decay

if TYPE_CHECKING:
    from .relu import ParallelReLU

__all__ = [
    "DropoutPenalty",
    "ParallelNetwork",
    "ParallelReLU",
    "certify_relu",
    "factor_norms",
    "homogeneity_degree",
    "path_norm",
    "product_of_norms",
    "smooth_surrogate",
    "weight_decay",
]


def __getattr__(name: str) -> Any:
    if name != "ParallelReLU":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ..factor import ParallelReLU  # raises MissingExtra without scikit-learn

    return ParallelReLU

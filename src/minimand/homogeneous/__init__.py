"""Parallel networks grown to a certified global optimum, norms as regularisers, and the explicit penalty of dropout."""

from .certificate import certify_relu
from .degree import homogeneity_degree
from .parallel import ParallelNetwork
from .penalty import DropoutPenalty
from .regularizers import factor_norms, path_norm, product_of_norms, smooth_surrogate, weight_decay
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

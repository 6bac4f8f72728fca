"""Positively homogeneous networks in parallel: regularisers of the right degree, growth, and certificates."""

from .certificate import certify_relu
from .homogeneous import homogeneity_degree, require_homogeneous
from .parallel import ParallelNetwork
from .regularisers import factor_norms, path_norm, product_of_norms, smooth_surrogate, weight_decay
from .relu import ParallelReLU

__all__ = [
    "ParallelNetwork",
    "ParallelReLU",
    "certify_relu",
    "factor_norms",
    "homogeneity_degree",
    "path_norm",
    "product_of_norms",
    "require_homogeneous",
    "smooth_surrogate",
    "weight_decay",
]

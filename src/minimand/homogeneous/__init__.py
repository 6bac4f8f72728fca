"""Neural networks with certificates: parallel networks grown to a global optimum, and the penalty that dropout is."""

from .certificate import certify_relu
from .degree import homogeneity_degree, require_homogeneous
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
    "require_homogeneous",
    "smooth_surrogate",
    "weight_decay",
]

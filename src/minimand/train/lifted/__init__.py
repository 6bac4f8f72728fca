"""Training without backpropagation: activations become variables, and energies are minimised block by block."""

from .admm import SplitADMM
from .control import ridge_control
from .lpom import LPOM
from .mac import MAC
from .options import Epoch, Recipe
from .parallel import LayerParallel
from .penalty import BlockPenalty
from .relu import LiftedReLU

__all__ = [
    "LPOM",
    "MAC",
    "BlockPenalty",
    "Epoch",
    "LayerParallel",
    "LiftedReLU",
    "Recipe",
    "SplitADMM",
    "ridge_control",
]

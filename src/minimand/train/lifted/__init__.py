"""Lifted training: activations become variables, and an energy is minimised by block-coordinate descent.

No backpropagation takes place. The sweeps over blocks are not solves in the grammar of :mod:`minimand.solvers`. Each
block is updated by a closed form, a prox, a linear solve or a short call of a solver.
"""

from .admm import SplitADMM
from .lpom import LPOM
from .mac import MAC
from .options import Epoch, Recipe
from .parallel import LayerParallel
from .penalty import BlockPenalty
from .relu import LiftedReLU
from .stages import LayerStages, layer_stages

__all__ = [
    "LPOM",
    "MAC",
    "BlockPenalty",
    "Epoch",
    "LayerParallel",
    "LayerStages",
    "LiftedReLU",
    "Recipe",
    "SplitADMM",
    "layer_stages",
]

"""Proximal backpropagation: implicit gradient steps on the weights of linear layers.

A step is one linear solve per layer, by a Cholesky factor or conjugate gradients. It is not a
:func:`~minimand.solvers.solve` in the grammar.
"""

from .options import CachedGram, ExactGram, SubsampledGram, paper_tau_theta
from .proxprop import ProxProp

__all__ = ["CachedGram", "ExactGram", "ProxProp", "SubsampledGram", "paper_tau_theta"]

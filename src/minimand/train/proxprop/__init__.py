"""Proximal backpropagation: implicit gradient steps on the weights of linear layers, one linear solve per layer."""

from .options import CachedGram, ExactGram, Relative, SubsampledGram, paper_tau_theta
from .proxprop import ProxProp

__all__ = ["CachedGram", "ExactGram", "ProxProp", "Relative", "SubsampledGram", "paper_tau_theta"]

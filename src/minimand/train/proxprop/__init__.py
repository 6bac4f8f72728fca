"""Proximal backpropagation: implicit gradient steps on the weights of linear layers, one linear solve per layer."""

from .options import CachedGram, ExactGram, SubsampledGram, paper_tau_theta
from .proxprop import ProxProp

__all__ = ["CachedGram", "ExactGram", "ProxProp", "SubsampledGram", "paper_tau_theta"]

"""Proximal backpropagation: implicit steps on the weights of linear layers."""

from .options import AutocorrelationGram, CachedGram, ExactGram, SubsampledGram, paper_tau_theta
from .proxprop import ProxProp

__all__ = ["AutocorrelationGram", "CachedGram", "ExactGram", "ProxProp", "SubsampledGram", "paper_tau_theta"]

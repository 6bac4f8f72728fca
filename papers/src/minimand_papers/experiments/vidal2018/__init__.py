"""Experiments of Vidal, *Mathematics of Deep Learning*, 2018."""

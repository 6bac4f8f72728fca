"""Experiments of Bibi, Ghanem, Koltun and Ranftl, *Deep Layers as Stochastic Solvers*, ICLR 2019."""

"""Experiments of Lin, *Optimization and Deep Neural Networks*, 2019."""

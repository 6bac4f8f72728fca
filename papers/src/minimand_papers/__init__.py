"""Evidence for minimand: the experiments of four sources, their data and networks, and the command ``minimand``."""

__version__ = "0.2.0"

"""Reading a network: what it calls, on which tensors, in which modules, and what follows for its structure."""

from .network import Network
from .reading import read
from .roles import role
from .sequence import sequence

__all__ = ["Network", "read", "role", "sequence"]

"""Reading a network: what it calls, on which tensors, in which modules, and what follows for its structure."""

from .network import Network
from .reading import read
from .record import Call, ModuleFrame, Opaque, Value
from .roles import role

__all__ = ["Call", "ModuleFrame", "Network", "Opaque", "Value", "read", "role"]

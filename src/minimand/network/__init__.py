"""Reading a network: what it calls, on which tensors, in which modules, and what follows for its structure."""

from .network import Network
from .reading import read
from .record import Call, ModuleFrame, Opaque, Value
from .roles import role
from .sequence import SequencePart, sequence

__all__ = ["Call", "ModuleFrame", "Network", "Opaque", "SequencePart", "Value", "read", "role", "sequence"]

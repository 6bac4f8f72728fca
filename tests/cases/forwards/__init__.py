"""Small networks with forwards of many kinds, as other people write them."""

from . import architectures, habits, limits
from .listing import FORWARDS, ForwardCase

__all__ = ["FORWARDS", "ForwardCase", "architectures", "habits", "limits"]

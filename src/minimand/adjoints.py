"""How to differentiate through a solve; the code is in :mod:`minimand.solvers.adjoints`."""

from .solvers.adjoints import Adjoint, Checkpoint, Implicit, JacobianFree, Unroll

__all__ = ["Adjoint", "Checkpoint", "Implicit", "JacobianFree", "Unroll"]

"""The choice of a solver where none is given."""

import dataclasses

from .base import Solver
from .gradient import FISTA
from .problem import Problem
from .spectral import Spectral
from .splitting import ADMM
from .working import WorkingSet

__all__ = ["Choice", "choose"]

_WIDE = 512  # outputs from which on one sparse problem is worth a working set


@dataclasses.dataclass(frozen=True)
class Choice:
    """A solver that was chosen for a problem, and why."""

    solver: Solver
    reason: str

    def __str__(self) -> str:
        return f"{self.solver}: {self.reason}"


def choose(problem: Problem, *, differentiated: bool = False) -> Choice:
    """The fastest solver for a problem by the kind of its operator and function.

    >>> import torch
    >>> from minimand.functions import L1
    >>> from minimand.operators import Dense
    >>> choose(Problem(Dense(torch.ones(1000, 10)), L1(1.0), torch.ones(1, 10))).solver
    WorkingSet(iters=50)
    """
    if differentiated and not problem.is_smooth:
        return Choice(ADMM(2000, "auto"), "its iterations can be differentiated and need no bound on the curvature")
    if differentiated:
        return Choice(FISTA(2000), "its iterations can be differentiated; adjoint=Implicit() allows faster methods")
    if problem.operator.matrix is None:
        return Choice(Spectral(2000), "the operator has no matrix, and spectral steps need no bound on its norm")
    if not problem.function.separable:
        # A bound for all data at once, such as max y/β² of Poisson's loss, is far above the curvature of most.
        one = not problem.is_quadratic and isinstance(problem.datafit.curvature(problem.y), float)
        if one and problem.is_smooth:
            return Choice(FISTA(5000), "the function couples the entries, and the curvature has one bound for all data")
        return Choice(Spectral(2000), "the function couples the entries, and spectral steps need no bound on the norm")
    if problem.rows == 1 and problem.operator.outputs >= _WIDE and problem.is_smooth and WorkingSet.takes(problem):
        return Choice(WorkingSet(), "one problem with a sparse solution and many outputs")
    return Choice(Spectral(2000, polish=8), "the operator has a matrix and the function is separable")

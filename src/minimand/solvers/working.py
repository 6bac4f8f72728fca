r"""Working sets for one problem with a sparse solution: small problems on the outputs that may be active."""

import dataclasses
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import CapabilityError
from ..functions.base import Function
from ..operators.base import LinearOperator
from .base import Solver, require_count
from .gap import GapBound
from .iterate import iterate
from .newton import prox_slope
from .problem import Problem
from .spectral import Spectral, SpectralState

__all__ = ["WorkingSet"]

_FIRST = 100  # outputs of the first working set
_INNER = Spectral(60, polish=6)
_ENOUGH = 0.01  # the gap of a working set's problem, as a share of that of the whole


class WorkingState(NamedTuple):
    """The point, the negative gradient, the gap, and the number of outputs in the working set."""

    x: Tensor
    descent: Tensor
    gap: float
    size: int


@dataclasses.dataclass(frozen=True)
class WorkingSet(Solver):
    r"""Problems on working sets of outputs, for one problem whose solution has few entries that are not zero.

    An iteration takes the outputs whose entry is not zero and those whose gradient is nearest to making it so, solves
    the problem on them by :class:`Spectral` steps with Newton steps on the active set, and computes the whole gradient.
    The working set doubles until no output outside of it violates the optimality condition. A product with all of A is
    made twice in an iteration, and in no inner step.

    Args:
        iters: Working sets at most.

    Source: Massias, Gramfort & Salmon, *Celer: a fast solver for the Lasso with dual extrapolation*, 2018.

    >>> from minimand.functions import L1
    >>> from minimand.operators import Dense
    >>> from minimand.solvers import solve
    >>> A, y = torch.eye(3, dtype=torch.float64), torch.tensor([[3.0, 0.5, -2.0]], dtype=torch.float64)
    >>> solve(Problem(Dense(A), L1(1.0), y), WorkingSet(5)).x
    tensor([[ 2.,  0., -1.]], dtype=torch.float64)
    """

    iters: int = 50

    needs_separable: ClassVar[bool] = True
    checked_every: ClassVar[int] = 1

    def __post_init__(self) -> None:
        require_count("iters", self.iters)

    @property
    def iterations(self) -> int:
        """The largest number of working sets."""
        return self.iters

    @property
    def unrolls(self) -> bool:
        """The inner steps are not differentiated."""
        return False

    @staticmethod
    def takes(problem: Problem) -> bool:
        """Whether zero is a fixed point of the prox in an interval, which makes solutions sparse."""
        zero = problem.y.new_zeros(problem.shape)
        return problem.function.separable and bool((prox_slope(problem, zero, 1.0) == 0).all())

    def check(self, operator: LinearOperator, function: Function) -> None:
        """Also check that the operator has a matrix."""
        super().check(operator, function)
        if operator.matrix is None or operator.matrix.dim() != 2:
            raise CapabilityError(f"WorkingSet needs an operator with one matrix, such as Dense, got {operator!r}")

    def prepare(self, problem: Problem) -> Problem:
        """No bound is computed."""
        return problem

    def init(self, problem: Problem, x0: Tensor | None) -> WorkingState:
        """The whole gradient at the start."""
        if problem.rows != 1 or problem.preactivated:
            raise CapabilityError(
                f"WorkingSet solves one problem at a time, got {problem.rows}; use Spectral(polish=10)"
            )
        x = problem.y.new_zeros(problem.shape) if x0 is None else x0
        gap = float(GapBound(problem)(x)[1].sum())
        return WorkingState(x, problem.descent(x0, problem.linear()), gap, _FIRST)

    def advance(self, problem: Problem, state: WorkingState, k: int, generator: torch.Generator | None) -> WorkingState:
        """The problem on a working set."""
        x, descent, gap, size = state
        with torch.no_grad():
            support = int((x != 0).sum())
            size = min(max(size, 2 * support), problem.operator.outputs)
            # How far each entry would move; those at zero are ordered by their gradient.
            score = descent.abs().where(x == 0, torch.inf).flatten()
            index = score.topk(size).indices
        part = dataclasses.replace(
            problem,
            operator=problem.operator.restrict_outputs(index),
            function=problem.function.of_outputs(index, problem.operator.outputs),
            bias=None if problem.bias is None else problem.full_bias().expand(problem.shape)[..., index],
            affine=None,
        )
        inner = _INNER.prepare(part)
        begin = _INNER.init(inner, x[..., index])
        bound, enough = GapBound(part), _ENOUGH * gap

        def close(state: SpectralState, done: int) -> bool:
            assert state.x is not None
            return done % 6 == 0 and float(bound(state.x)[1].sum()) <= enough

        last = iterate(lambda s, j: _INNER.advance(inner, s, j, None), begin, _INNER.iterations, until=close)[0]
        assert last.x is not None
        x = torch.zeros_like(x).index_copy(-1, index, last.x)
        return WorkingState(x, problem.descent(x, descent), float(GapBound(problem)(x)[1].sum()), 2 * size)

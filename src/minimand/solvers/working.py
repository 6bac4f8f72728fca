r"""Working sets for one problem with a sparse solution: small problems on the outputs that may be active."""

import dataclasses
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import CapabilityError
from ..functions.base import Function
from ..functions.intervals import L1
from ..operators.base import LinearOperator
from .base import Solver, require_count
from .gap import GapBound
from .iterate import iterate
from .newton import prox_slope
from .problem import Problem
from .signs import sign_search
from .spectral import Spectral, SpectralState

__all__ = ["WorkingSet"]

_FIRST = 100  # outputs of the first working set
_INNER = Spectral(60, polish=6)
_DENSE = 4096  # outputs of a working set whose Gram matrix is formed
_ENOUGH = 0.01  # the gap of a working set's problem, as a share of that of the whole


class WorkingState(NamedTuple):
    """The point, the negative gradient and its value at zero, the gap, and the number of outputs in the working set."""

    x: Tensor
    descent: Tensor
    linear: Tensor
    gap: float
    size: int


@dataclasses.dataclass(frozen=True)
class WorkingSet(Solver):
    r"""Problems on working sets of outputs, for one problem whose solution has few entries that are not zero.

    An iteration takes the outputs whose entry is not zero and those whose gradient is nearest to making it so, solves
    the problem on them, and computes the whole gradient. A Lasso is solved exactly on its working set, by a search for
    the signs of the solution; other problems by :class:`Spectral` steps with Newton steps on the active set. The
    working set doubles, after an exact solution only where the gap fell by less than a tenth. A product with all of A
    is made twice in an iteration, and in no inner step.

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

    def __post_init__(self) -> None:
        require_count("iters", self.iters)

    @property
    def iterations(self) -> int:
        """The largest number of working sets."""
        return self.iters

    @property
    def checked_every(self) -> int:
        """After every working set."""
        return 1

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
        linear = problem.linear()
        return WorkingState(x, problem.descent(x0, linear), linear, gap, _FIRST)

    def advance(self, problem: Problem, state: WorkingState, k: int, generator: torch.Generator | None) -> WorkingState:
        """The problem on a working set."""
        x, descent, linear, gap, size = state
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
        found = _by_signs(part, x[..., index])
        inside = _by_steps(part, x[..., index], _ENOUGH * gap) if found is None else found
        x = torch.zeros_like(x).index_copy(-1, index, inside)
        new = float(GapBound(problem)(x)[1].sum())
        # An exact solution on a set calls for another one, which is larger only where this one did not help.
        grown = size if found is not None and new <= 0.9 * gap else 2 * size
        return WorkingState(x, problem.descent(x, linear), linear, new, grown)


def _by_signs(part: Problem, x: Tensor) -> Tensor | None:
    """The exact solution of a Lasso on a working set; None for other problems, or where it is not found."""
    matrix, outputs = part.operator.matrix, part.operator.outputs
    if not isinstance(part.function, L1) or not part.is_quadratic or matrix is None or outputs > _DENSE:
        return None
    wide = matrix.detach() if matrix.device.type == "mps" else matrix.detach().double()
    gram = wide @ wide.mT
    gram.diagonal().add_(part.ridge)
    weight = torch.as_tensor(part.function.weight, dtype=wide.dtype, device=wide.device).detach()
    linear = wide @ part.y.detach().reshape(-1).to(wide.dtype)
    if part.bias is not None:
        linear = linear + part.bias.detach().reshape(-1).to(wide.dtype)
    found = sign_search(gram, linear, weight.broadcast_to(x.shape).reshape(-1), x.detach().reshape(-1).to(wide.dtype))
    return None if found is None else found.reshape(x.shape).to(x.dtype)


def _by_steps(part: Problem, x: Tensor, enough: float) -> Tensor:
    """Spectral steps on a working set until its gap is small enough."""
    inner = _INNER.prepare(part)
    bound = GapBound(part)

    def close(state: SpectralState, done: int) -> bool:
        assert state.x is not None
        return done % 6 == 0 and float(bound(state.x)[1].sum()) <= enough

    begin = _INNER.init(inner, x)
    last = iterate(lambda s, j: _INNER.advance(inner, s, j, None), begin, _INNER.iterations, until=close)[0]
    assert last.x is not None
    return last.x

r"""Working sets for one problem with a sparse solution: small problems on the outputs that may be active."""

import dataclasses
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import CapabilityError
from ..functions.base import Function
from ..functions.intervals import L1
from ..linalg import gram
from ..operators.base import LinearOperator
from .base import Solver, require_count
from .gap import GapBound, PointCertificate
from .iterate import iterate
from .newton import prox_slope
from .problem import Problem
from .signs import Lasso, sign_search
from .spectral import Spectral, SpectralState

__all__ = ["WorkingSet"]

_FIRST = 100  # outputs of the first working set
_INNER = Spectral(60, polish=6)
_DENSE = 4096  # outputs of a working set whose Gram matrix is formed
_WORTH = 0.7  # the share of outputs that may be active below which they are copied
_ENOUGH = 0.1  # the gap of a working set's problem, as a share of that of the whole; of a Lasso
_TIGHT = 0.01  # the same of other problems
_NEAR = 0.95  # the share of its weight from which on the gradient of an entry at zero is near to it


class WorkingState(NamedTuple):
    """The point, what is known of it on the outputs that may be active, the norms of their rows of A, the number of
    outputs in the next working set, and the outputs that may be active (None: all) with the bound of the problem on
    them."""

    x: Tensor
    certificate: PointCertificate
    norms: Tensor
    size: int
    bound: GapBound
    alive: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class WorkingSet(Solver):
    r"""Problems on working sets of outputs, for one problem whose solution has few entries that are not zero.

    An iteration takes the outputs whose entry is not zero and those whose gradient is nearest to making it so, solves
    the problem on them, and computes the whole gradient. On a working set a Lasso is solved by :class:`Spectral` steps
    until the entries that are not zero settle, and then exactly by a search for their signs; other problems by
    :class:`Spectral` steps with Newton steps on the active set. Working sets are left as soon as their gap is small
    beside that of the whole problem. They double, for a Lasso only where the whole gap fell by less than half. A
    product with A and one with its transpose are made in an iteration; inner steps take rows of the working set.

    Outputs are screened by the duality gap. With the dual point :math:`\hat u` of the gap and its slopes
    :math:`s = b - A\hat u`, the slopes at the solution lie within :math:`\|a_j\|\sqrt{2\kappa\,\mathrm{gap}}` of s,
    because the dual is :math:`1/\kappa`-strongly concave. Where this interval lies in :math:`\partial g_j(0)` the entry
    of every solution is zero, and the output leaves the problem.

    Args:
        iters: Working sets at most.

    Source: Massias, Gramfort & Salmon, *Celer: a fast solver for the Lasso with dual extrapolation*, 2018; Ndiaye,
    Fercoq, Gramfort & Salmon, *Gap safe screening rules for sparsity enforcing penalties*, 2017, Theorem 6.

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
        assert problem.operator.matrix is not None
        norms = torch.linalg.vector_norm(problem.operator.matrix.detach(), dim=-1).double()
        bound = GapBound(problem)
        return WorkingState(x, bound.certificate(x), norms, _FIRST, bound)

    @torch.no_grad()
    def advance(self, problem: Problem, state: WorkingState, k: int, generator: torch.Generator | None) -> WorkingState:
        """The problem on a working set."""
        state = _screened(state)
        whole = state.bound.problem
        x = state.x if state.alive is None else state.x[..., state.alive]
        gap, outputs = float(state.certificate.gap.sum()), whole.operator.outputs
        size = min(max(state.size, 2 * int((x != 0).sum())), outputs)
        # Entries at zero are ordered by how far their gradient exceeds its weight.
        weight = whole.function.weight if isinstance(whole.function, L1) else 0.0
        score = (state.certificate.descent.abs() - weight).where(x == 0, torch.inf).flatten()
        index = score.topk(size).indices
        part = _on_outputs(whole, index)
        lasso, known = isinstance(whole.function, L1) and whole.is_quadratic, gap < torch.inf
        solved, share = (_by_signs, _ENOUGH) if lasso else (_by_steps, _TIGHT)
        inside = solved(part, x[..., index], share * gap if known else 0.0)
        x = torch.zeros_like(x).index_copy(-1, index, inside)
        new = state.bound.certificate(x)
        # A Lasso is solved quickly for another set, which is larger only where this one did not help.
        grown = size if lasso and known and float(new.gap.sum()) <= 0.5 * gap else 2 * size
        if state.alive is not None:
            x = torch.zeros_like(state.x).index_copy(-1, state.alive, x)
        return state._replace(x=x, certificate=new, size=grown)


def _on_outputs(problem: Problem, index: Tensor) -> Problem:
    """The problem on some outputs."""
    return dataclasses.replace(
        problem,
        operator=problem.operator.restrict_outputs(index),
        function=problem.function.of_outputs(index, problem.operator.outputs),
        bias=None if problem.bias is None else problem.full_bias().expand(problem.shape)[..., index],
        affine=None,
    )


def _screened(state: WorkingState) -> WorkingState:
    """The state without the outputs that the gap proves to be zero, where these are worth a copy of the others."""
    slope, gap = state.certificate.slope, state.certificate.gap
    part = state.bound.problem
    if slope is None or not bool(gap.isfinite().all()):
        return state
    # With room for the rounding of the norms.
    reach = (1 + 1e-5) * state.norms * (2 * part.curved(gap.sum())).sqrt()
    zero = (part.function.prox(slope + reach) == 0) & (part.function.prox(slope - reach) == 0)
    keep = (~zero.flatten()).nonzero().squeeze(-1)
    if len(keep) > _WORTH * part.operator.outputs or not len(keep):
        return state
    alive = keep if state.alive is None else state.alive[keep]
    x = torch.zeros_like(state.x).index_copy(-1, alive, state.x[..., alive])
    known = state.certificate._replace(descent=state.certificate.descent[..., keep], slope=slope[..., keep])
    return WorkingState(x, known, state.norms[keep], state.size, GapBound(_on_outputs(part, keep)), alive)


def _by_signs(part: Problem, x: Tensor, enough: float) -> Tensor:
    """A Lasso on a working set: spectral steps, and a search for the signs of the entries that are not zero or nearly
    not, where the gap is not small enough before."""
    assert isinstance(part.function, L1)
    assert part.operator.matrix is not None
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    matrix = part.operator.matrix.detach().to(wide)
    weight = torch.as_tensor(part.function.weight, dtype=wide, device=x.device).detach().broadcast_to(x.shape)
    linear = matrix @ part.y.detach().reshape(-1).to(wide)
    if part.bias is not None:
        linear = linear + part.bias.detach().reshape(-1).to(wide)
    lasso, bound = Lasso(matrix, part.ridge, linear, weight.reshape(-1)), GapBound(part)
    at = lambda point: point.reshape(x.shape).to(x.dtype)  # noqa: E731
    close = lambda point: enough > 0 and float(bound(at(point))[1].sum()) <= enough  # noqa: E731
    point, descent, done = lasso.near(x.detach().reshape(-1).to(wide), close)
    keep = ((point != 0) | (descent.abs() >= _NEAR * lasso.weight)).nonzero().squeeze(-1)
    if done or not 0 < len(keep) <= _DENSE:
        return at(point)
    product = gram(matrix[keep])
    product.diagonal().add_(part.ridge)
    found = sign_search(product, linear[keep], lasso.weight[keep], point[keep])
    return at(point if found is None else torch.zeros_like(point).index_copy(0, keep, found))


def _by_steps(part: Problem, x: Tensor, enough: float) -> Tensor:
    """Spectral steps on a working set until its gap is small enough."""
    inner = _INNER.prepare(part)
    bound = GapBound(part)

    def close(state: SpectralState, done: int) -> bool:
        assert state.x is not None
        return done % 6 == 0 and enough > 0 and float(bound(state.x)[1].sum()) <= enough

    begin = _INNER.init(inner, x)
    last = iterate(lambda s, j: _INNER.advance(inner, s, j, None), begin, _INNER.iterations, until=close)[0]
    assert last.x is not None
    return last.x

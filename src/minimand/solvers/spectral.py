r"""Proximal gradient steps of Barzilai and Borwein's length, with a line search for each sample and Newton steps on the
active set."""

import dataclasses
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import CapabilityError
from ..tracing import holds
from .base import Solver, require_count
from .newton import active_step
from .problem import Problem

__all__ = ["Spectral"]

_SEARCHES = 8
_BEYOND = 1.8  # times the minimiser of a line search, where the objective is below that at the start
_GROWTH = 100.0  # of a step in one iteration, at most
_EARLY = 60  # iterations in which only cheap Newton steps are taken


class SpectralState(NamedTuple):
    """The point, its image ``Aᵀx`` (None for squares and at the origin), the negative gradient, g of each sample, the
    step of each sample, and the Gram matrix where it is cheaper."""

    x: Tensor | None
    image: Tensor | None
    descent: Tensor
    value: Tensor
    step: Tensor
    gram: Tensor | None

    def selected(self, keep: Tensor) -> "SpectralState":
        """The state of some samples."""
        image = None if self.image is None else self.image[keep]
        x = None if self.x is None else self.x[keep]
        return SpectralState(x, image, self.descent[keep], self.value[keep], self.step[keep], self.gram)


@dataclasses.dataclass(frozen=True)
class Spectral(Solver):
    r"""Proximal gradient steps with the length of Barzilai and Borwein and a line search, for each sample by itself:

    .. math::

        d = \operatorname{prox}_{sg}(x - s\nabla f(x)) - x, \qquad x \leftarrow x + \alpha d, \qquad
        s \leftarrow \frac{\|d\|^2}{\langle d, Hd\rangle} .

    :math:`f(x + \alpha d) + (1-\alpha)g(x) + \alpha g(x + d)` bounds the objective from above. :math:`\alpha \le 1` is
    1.8 times its minimiser where that lowers it, too, so that the objective never increases; the minimiser itself would
    be the step of steepest descent, which converges slowly. For squares the minimiser is closed and :math:`Hd` is the
    one product of the iteration; for other datafits it is found on the images :math:`A^\top x`, :math:`A^\top d`, and
    :math:`Hd` is the change of the gradient. No bound on the norm of A is needed. Gradients are
    those of the minimiser: the adjoint is ``Implicit()``.

    Args:
        iters: Iterations.
        polish: Every so many iterations a semismooth Newton step on the active set is taken in place of d, where the
            operator has a matrix, g is separable and the active sets are small; None: never.

    Source: Barzilai & Borwein, 1988; Wright, Nowak & Figueiredo, *Sparse reconstruction by separable approximation*,
    2009; Li, Sun & Toh, *A highly efficient semismooth Newton augmented Lagrangian method for solving Lasso problems*,
    2018.

    >>> from minimand.functions import NonNegative
    >>> from minimand.operators import Dense
    >>> from minimand.solvers import solve
    >>> A, y = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[4.0, -3.0]])
    >>> solve(Problem(Dense(A), NonNegative(), y), Spectral(iters=30)).x
    tensor([[2., 0.]])
    """

    needs_curvature: ClassVar[bool] = False

    iters: int = 10
    polish: int | None = None

    def __post_init__(self) -> None:
        require_count("iters", self.iters)
        if self.polish is not None:
            require_count("polish", self.polish)

    @property
    def iterations(self) -> int:
        """The fixed number of iterations."""
        return self.iters

    @property
    def checked_every(self) -> int:
        """After every Newton step, which is where samples converge."""
        return 5 if self.polish is None else self.polish

    @property
    def unrolls(self) -> bool:
        """Steps that depend on the iterates may be longer than those with which derivatives converge."""
        return False

    def prepare(self, problem: Problem) -> Problem:
        """No bound is computed."""
        return problem.repeated() if problem.is_quadratic and self.iters > 1 else problem

    def init(self, problem: Problem, x0: Tensor | None) -> SpectralState:
        """The gradient, and the step of steepest descent."""
        if problem.preactivated:
            raise CapabilityError("Spectral ends between two proxes and has no pre-activation; use FISTA() or ADMM()")
        operator = problem.operator
        gram = operator.gram_if_cheaper(problem.rows, self.iters) if problem.is_quadratic else None
        image = None if problem.is_quadratic or x0 is None else operator.adjoint(x0)
        descent = problem.descent(x0, problem.linear())
        point = torch.zeros_like(descent) if x0 is None else x0
        with torch.no_grad():
            unit = descent / spread(problem, _largest(problem, descent))
            square = _inner(problem, unit, unit)
            step = _length(problem, unit, _curved(problem, image, unit, gram), square, torch.ones_like(square))
        return SpectralState(x0, image, descent, problem.function.sums(point, problem.output_dims), step, gram)

    def advance(
        self, problem: Problem, state: SpectralState, k: int, generator: torch.Generator | None
    ) -> SpectralState:
        """A proximal gradient step, a line search, and the next length."""
        step = spread(problem, state.step)
        aim = problem.function.prox(_moved(state.x, state.descent, step), step)
        if self.polish is not None and k % self.polish == self.polish - 1:
            aim = active_step(problem, state, aim, cheap=k < _EARLY)
            return _towards(problem, state, aim, sure=False)
        return _towards(problem, state, aim)


def _towards(problem: Problem, state: SpectralState, aim: Tensor, *, sure: bool = True) -> SpectralState:
    """A point between x and ``aim``, by the bound of the objective; ``sure`` for a proximal gradient step, along
    which the bound decreases by at least ‖d‖²/s at first, whatever rounding says. Functions may sum in float64."""
    x, image, descent, value, step, gram = state
    dims = problem.output_dims
    d = aim if x is None else aim - x
    after = problem.function.sums(aim, dims)
    slope, square = _inner(problem, descent, d) + value - after, _inner(problem, d, d)
    if sure:
        slope = torch.maximum(slope, square / step)
    if problem.is_quadratic:
        product = _curved(problem, None, d, gram)
        alpha = _closed(slope.detach(), _inner(problem, d, product).detach()).to(d.dtype)
        share = spread(problem, alpha)
        moved, descent = _moved(x, d, share), descent.addcmul(share, product, value=-1)
    else:
        shadow = problem.operator.adjoint(d)
        image = torch.zeros_like(problem.y) if image is None else image
        alpha = _searched(problem, d, _Line(image, shadow, slope)).to(d.dtype)
        share = spread(problem, alpha)
        moved, image = _moved(x, d, share), image.addcmul(_spread_inputs(problem, alpha), shadow)
        residual = problem.datafit.residual(image, problem.y)
        new = problem.less_ridge(problem.operator.affine(residual, problem.bias), moved)
        product = (descent - new) / torch.where(share > 0, share, 1.0)
        descent = new
    with torch.no_grad():
        # A step from which no point of the line is better was too long.
        kept = torch.where(alpha > 0, step, 0.01 * step) if sure else step
        step = torch.minimum(_length(problem, d, product, square, kept), _GROWTH * step)
    value = torch.where(alpha == 1, after, torch.where(alpha == 0, value, problem.function.sums(moved, dims)))
    return SpectralState(moved, image, descent, value, step, gram)


def spread(problem: Problem, values: Tensor) -> Tensor:
    """One number per sample, shaped to broadcast against x."""
    return values.reshape(*values.shape, *(1,) * problem.output_dims)


def _spread_inputs(problem: Problem, values: Tensor) -> Tensor:
    return values.reshape(*values.shape, *(1,) * problem.input_dims)


def _moved(x: Tensor | None, d: Tensor, share: Tensor) -> Tensor:
    return share * d if x is None else x.addcmul(share, d)


def _curved(problem: Problem, image: Tensor | None, d: Tensor, gram: Tensor | None) -> Tensor:
    """H d."""
    operator = problem.operator
    if problem.is_quadratic:
        product = operator.normal(d) if gram is None else d @ gram
    else:
        bend = problem.datafit.second(torch.zeros_like(problem.y) if image is None else image, problem.y)
        product = operator.apply(bend * operator.adjoint(d))
    return product + problem.ridge * d if problem.ridge else product


def _inner(problem: Problem, u: Tensor, v: Tensor) -> Tensor:
    """One inner product per sample."""
    return (u * v).flatten(-problem.output_dims).sum(-1)


def _largest(problem: Problem, v: Tensor) -> Tensor:
    """The largest absolute entry of each sample; one where all are zero."""
    size = v.abs().flatten(-problem.output_dims).amax(-1)
    return torch.where(size > 0, size, 1.0)


def _length(problem: Problem, d: Tensor, product: Tensor, square: Tensor, before: Tensor) -> Tensor:
    """‖d‖²/⟨d, Hd⟩ of each sample; a sample that has arrived keeps its step. Where ‖d‖² is near the ends of the range,
    both vectors are divided by the largest entry of d before they are multiplied."""
    ends = torch.finfo(square.dtype)
    if not holds((square > ends.tiny**0.7) & (square < ends.max**0.7)):
        size = spread(problem, _largest(problem, d))
        d, product = d / size, product / size
        square = _inner(problem, d, d)
    curved = _inner(problem, d, product)
    length = square / torch.where(curved > 0, curved, 1.0)
    return torch.where((curved > 0) & (length > 0) & length.isfinite(), length, before)


def _closed(slope: Tensor, curvature: Tensor) -> Tensor:
    """1.8 times the minimiser of −slope·α + ½curvature·α², within [0, 1]; a full step from outside of the domain."""
    some = curvature > 0
    share = _BEYOND * slope / torch.where(some, curvature, 1.0)
    return torch.where(some, share, torch.ones_like(share)).nan_to_num(nan=1.0, posinf=1.0, neginf=0.0).clamp(0, 1)


class _Line(NamedTuple):
    """The image of the start, of the direction, and the slope of the bound of the objective at the start, negated."""

    image: Tensor
    shadow: Tensor
    slope: Tensor


def _searched(problem: Problem, d: Tensor, line: _Line) -> Tensor:
    """A share in [0, 1] that lowers the bound of the objective along d: 1.8 times the minimiser, which is found by
    Newton's method between two ends, or the minimiser."""
    datafit, y, dims = problem.datafit, problem.y, -problem.input_dims
    total = lambda values: values.flatten(dims).sum(-1)  # noqa: E731
    with torch.no_grad():
        square = _inner(problem, d, problem.ridge * d)
        # The terms other than the datafit have this slope at the start.
        rest = -line.slope - total(datafit.gradient(line.image, y) * line.shadow)
        low, high = torch.zeros_like(square), torch.ones_like(square)
        alpha = high
        for _ in range(_SEARCHES):
            t = line.image + _spread_inputs(problem, alpha) * line.shadow
            slope = total(datafit.gradient(t, y) * line.shadow) + alpha * square + rest
            bend = total(datafit.second(t, y) * line.shadow.square()) + square
            uphill = slope > 0
            low, high = torch.where(uphill, low, alpha), torch.where(uphill, alpha, high)
            new = alpha - slope / torch.where(bend > 0, bend, 1.0)
            alpha = torch.where((new > low) & (new < high), new, 0.5 * (low + high))
            if holds((high - low <= 1e-3 * high) | (slope.abs() <= 1e-2 * line.slope)):
                break
        before = datafit.values(line.image, y)

        def change(alpha: Tensor) -> tuple[Tensor, Tensor]:
            """The change of the bound, and its rounding error."""
            after = datafit.values(line.image + _spread_inputs(problem, alpha) * line.shadow, y)
            room = torch.finfo(after.dtype).eps * total(after.abs() + before.abs())
            return total(after - before) + alpha * (0.5 * alpha * square + rest), room

        # The left end decreases the bound in any case; a full step from outside of the domain. Near the solution the
        # change is smaller than its rounding error, and the slopes decide.
        fall, room = change(alpha)
        inside = fall < torch.inf
        alpha = torch.where((fall <= room) & inside, alpha, low)
        further = (_BEYOND * alpha).clamp_max(1.0)
        alpha = torch.where((change(further)[0] <= 0.1 * fall) & inside, further, alpha)
        return torch.where(line.slope == torch.inf, torch.ones_like(alpha), alpha)

"""Problems without a minimum, because the objective falls forever along a direction."""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from ..errors import CapabilityError, OptionError
from ..functions.separable import Zero
from ..operators.dense import Dense
from ..tracing import holds, is_traced
from .gap import GapBound
from .problem import Problem

__all__ = ["require_minimum", "require_range"]

_FAR = 1e13  # steps of the first iteration's length
_REACHED = 1e-6  # the share of that length at which a direction is one
_TINY = 1e-16  # a step of a prox that projects only
_BEYOND = 1e30  # times as far, where no bounded domain reaches
_ROUNDS = 100  # projections in turn
_NULL = 1e-10  # singular values below this share of the largest are zero


def require_range(problem: Problem) -> None:
    """Raise for g = 0 without a ridge and a bias outside of the range of A, along which the objective falls forever."""
    matrix, bias = _matrices(problem), problem.bias
    if problem.ridge > 0 or bias is None or matrix is None or not isinstance(problem.function, Zero):
        return
    A, b = matrix.detach().double(), problem.full_bias().detach().double()
    if is_traced(A) or is_traced(b):
        return
    b = b.expand(*b.shape[:-1], A.shape[-2])
    outside = _off_range(A)(b).norm(dim=-1) - 1e-6 * b.norm(dim=-1)
    if bool((outside > 0).any()):
        raise OptionError(
            f"the problem is unbounded: g = 0, there is no ridge, and the bias has a part of norm "
            f"{float(outside.max()):.3g} outside of the range of the operator; add a ridge or a function"
        )


@torch.no_grad()
def require_minimum(bound: GapBound, x: Tensor) -> None:
    """Raise where the objective falls at a constant rate from x along a direction in which x has grown, or in which a
    long proximal gradient step leads, up to a length at which every bounded objective of finite precision has risen."""
    problem, dims = bound.problem, bound.problem.output_dims
    if problem.ridge > 0 or is_traced(x) or not x.numel():
        return
    with suppress(CapabilityError):
        # Without a bias squares are bounded from below, and so is g where g*(0) is finite.
        if (
            problem.is_quadratic
            and problem.bias is None
            and holds(problem.function.conjugate().value(0 * x) < torch.inf)
        ):
            return
    scale = problem.scale(x.detach().to(problem.y.dtype)).double()
    x, begin = x.detach().double(), problem.linear().detach().double()
    if not problem.is_smooth:
        begin = bound.certificate(x).descent  # at zero the loss may be infinite
        if not holds(begin.isfinite()):
            return
    norm = lambda v: v.flatten(-dims).norm(dim=-1).reshape(*v.shape[:-dims], *(1,) * dims)  # noqa: E731
    steep = norm(begin)
    sloping = (steep > 0).reshape(steep.shape[: steep.dim() - dims])
    if not bool(sloping.any()):
        return  # the smooth part is least at zero
    steep = torch.where(steep > 0, steep, 1.0)
    # Steps that grow without end pass the numbers whose squares exist; the direction is what counts.
    largest = x.abs().flatten(-dims).amax(-1).reshape(steep.shape)
    if bool((largest > _BEYOND * steep / scale).any()):
        x = problem.function.prox(x * (_BEYOND * steep / scale / largest).clamp_max(1.0), _TINY)
    far = torch.maximum(_FAR * steep / scale, 10 * norm(x))
    start, descent = bound.objectives(x), bound.certificate(x).descent
    long = 1e6 * far / steep
    for way in (x, problem.function.prox(x + long * descent, long) - x):
        way = _receding(problem, way / norm(way), far)
        ends = [problem.function.prox(x + length * way, _TINY) for length in (1e-3 * far, far)]
        lengths = [norm(end - x).reshape(start.shape) for end in ends]
        near, rate = ((bound.objectives(end) - start) / length for end, length in zip(ends, lengths, strict=True))
        # Where g or the square leaves no direction, the ends are near and may still be better than x.
        falls = (lengths[1] > _REACHED * far.reshape(start.shape)) & sloping.reshape(start.shape)
        falls &= (rate < -1e-6 * steep.reshape(start.shape)) & (rate < 0.5 * near)
        # The length above follows from the smooth part; a bounded domain may be larger.
        beyond = _BEYOND * far
        falls &= ~(norm(problem.function.prox(x + beyond * way, _TINY) - x) <= _REACHED * beyond).reshape(start.shape)
        if bool(falls.any()):
            raise OptionError(
                f"the problem is unbounded: the objective falls by {-float(rate[falls].min()):.3g} per unit of length "
                f"along a direction, still at a length of {float(far.max()):.0e}; add a ridge, or a function that "
                f"grows faster than the bias"
            )


def _receding(problem: Problem, way: Tensor, far: Tensor) -> Tensor:
    """The direction, by alternating projections on the directions along which the square does not grow, where they can
    be computed, and on those along which g is finite."""
    matrix = _matrices(problem)
    if not problem.is_quadratic or matrix is None:
        return way
    A = matrix.detach().double()
    project = _off_range(A)
    for _ in range(_ROUNDS):
        way = problem.function.prox(far * project(way), _TINY) / far
    return way


def _matrices(problem: Problem) -> Tensor | None:
    """The matrix of the operator, or those of all samples."""
    operator = problem.operator
    return operator.weight if isinstance(operator, Dense) else operator.matrix


def _off_range(A: Tensor) -> Callable[[Tensor], Tensor]:
    """The projection on the complement of the range of A."""
    inverse = torch.linalg.pinv(A, rtol=_NULL)
    return lambda v: v - (A @ (inverse @ v.unsqueeze(-1))).squeeze(-1)

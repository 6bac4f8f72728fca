r"""Bounds on the distance of a point to the minimum, by duality and by strong convexity."""

import dataclasses
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import CapabilityError
from ..functions.base import Function
from ..operators.base import Selected
from ..tracing import holds, is_traced, unwrapped
from .problem import Problem

__all__ = ["GapBound", "PointCertificate"]

_HALVINGS = 40
# Up to this many outputs the smallest eigenvalue of A Aᵀ is worth its price.
_SMALL = 1024


class PointCertificate(NamedTuple):
    r"""What is known of a point: the objective and the bound of each sample, the negative gradient of the smooth part,
    and :math:`b - A\hat u` at the dual point :math:`\hat u` of the bound; None where it comes from no dual point."""

    objective: Tensor
    gap: Tensor
    descent: Tensor
    slope: Tensor | None


@dataclasses.dataclass(frozen=True)
class GapBound:
    r"""Bounds on :math:`F(x) - \min F` for each sample, in double precision.

    With :math:`G = g + \tfrac\lambda2\|\cdot\|^2` every u gives the lower bound

    .. math:: \min F \ge -f^*(u; y) - G^*(b - Au) .

    At :math:`u = f'(A^\top x; y)`, which is the dual solution where x is the primal one, :math:`f^*(u) = ut - f(t)`.
    With a ridge, :math:`G^*(s) = \langle s, p\rangle - G(p)` at :math:`p = \operatorname{prox}_{g/\lambda}(s/\lambda)`.
    Without one :math:`G^* = g^*` may be infinite; u is then multiplied by the largest number up to one for which it is
    finite, which exists for norms. For squares and an A with independent rows, F is :math:`\mu`-strongly convex with
    :math:`\mu = \lambda_{\min}(AA^\top) + \lambda`, and with
    :math:`p = \operatorname{prox}_{g/\mu}(x - \nabla f(x)/\mu)`

    .. math:: \min F \ge f(x) + \langle\nabla f(x), p - x\rangle + \tfrac\mu2\|p - x\|^2 + g(p) .

    The better of the bounds that exist is taken; it is infinite where none does.
    """

    problem: Problem

    @functools.cached_property
    def known(self) -> bool:
        """Whether there is a finite bound near the solution."""
        return self._dual is not None or self.problem.ridge > 0 or self._convexity > 0

    @functools.cached_property
    def _wide(self) -> Problem:
        problem = self.problem
        if problem.y.dtype == torch.float64 or problem.y.device.type == "mps":
            return problem
        operator = problem.operator
        weighted = operator.has_weight
        operator = (
            operator.with_weight(operator.weight.double()) if weighted else Selected(operator, dtype=operator.dtype)
        )
        bias = None if problem.bias is None else problem.bias.double()
        return dataclasses.replace(problem, operator=operator, y=problem.y.double(), bias=bias, affine=None)

    @functools.cached_property
    def _dual(self) -> tuple[Function, Tensor | None] | None:
        r"""g* where its domain contains the multiples of its points: the functions are norms, or finite everywhere.
        With a datafit of unbounded curvature also where :math:`b - A\mathbf 1` lies in its interior, and this point."""
        try:
            conjugate = self.problem.function.conjugate()
        except CapabilityError:
            return None
        # A cone's polar contains no multiple of a point outside of it.
        zeros = self._wide.y.new_zeros(self.problem.shape)
        # Above the tolerance of indicators, within which a point outside of the polar would count as inside.
        near = torch.full_like(zeros, 32 * torch.finfo(zeros.dtype).eps)
        finite = all(holds(torch.isfinite(conjugate.value(near * sign))) for sign in (1, -1))
        if finite or self.problem.is_smooth:
            return (conjugate, None) if finite else None
        dims, ones = self.problem.output_dims, torch.ones_like(self._wide.y)
        inside = self._slope(self._wide.operator.apply(ones)).expand_as(zeros)
        return (conjugate, inside) if holds(_charge(conjugate, inside, inside, dims).isfinite()) else None

    @functools.cached_property
    def _convexity(self) -> float:
        """μ, less its rounding error; the ridge where nothing more is known."""
        problem = self.problem
        matrix = problem.operator.matrix
        if not problem.is_quadratic or matrix is None or not matrix.shape[-2] <= min(matrix.shape[-1], _SMALL):
            return float(problem.ridge)
        A = unwrapped(matrix.detach()).double()
        if is_traced(A):
            return float(problem.ridge)
        values = torch.linalg.eigvalsh(A @ A.mT)
        margin = 4 * A.shape[-2] * torch.finfo(torch.float64).eps * float(values[..., -1].max())
        return max(float(values[..., 0].min()) - margin, 0.0) + problem.ridge

    def of_samples(self, keep: Tensor) -> "GapBound":
        """The bound of some samples, with what is known already."""
        from .rows import some_samples

        other = GapBound(some_samples(self.problem, keep))
        for name in ("known", "_convexity"):
            if name in vars(self):
                vars(other)[name] = vars(self)[name]
        if "_wide" in vars(self):
            vars(other)["_wide"] = other.problem if self._wide is self.problem else some_samples(self._wide, keep)
        return other

    @torch.no_grad()
    def objectives(self, x: Tensor) -> Tensor:
        """The objective of each sample."""
        problem, x = self._wide, self._inside(x.detach())
        total = self._samples(problem.datafit.values(self._image(x), problem.y))
        total = total + self._outputs(0.5 * problem.ridge * x * x)
        if problem.bias is not None:
            total = total - self._outputs(problem.full_bias() * x)
        return total + problem.function.sums(x, problem.output_dims)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The objective and the bound, for each sample."""
        return self.certificate(x)[:2]

    @torch.no_grad()
    def certificate(self, x: Tensor) -> PointCertificate:
        """What is known of x, by one product with A and one with its transpose."""
        problem, dims = self._wide, self.problem.output_dims
        x = self._inside(x.detach())
        t = self._image(x)
        u = problem.datafit.gradient(t, problem.y)
        data = problem.datafit.values(t, problem.y)
        pull = problem.operator.apply(u)
        smooth = self._samples(data) + self._outputs(0.5 * problem.ridge * x * x)
        if problem.bias is not None:
            smooth = smooth - self._outputs(problem.full_bias() * x)
        objective = smooth + problem.function.sums(x, dims)
        gap = objective.new_full(objective.shape, torch.inf)
        slope = None
        if problem.ridge > 0:
            slope = self._slope(pull)
            gap = self._rounded(objective, self._samples(data - t * u) - self._ridged(slope))
        elif self._dual is not None:
            dual, share = self._scaled(t, u, data, pull, *self._dual)
            slope = self._slope(self._spread(share, pull) * pull) if self._dual[1] is None else None
            gap = self._rounded(objective, dual)
        if problem.ridge == 0 and not holds(gap.isfinite()) and self._convexity > 0:
            gap, slope = torch.minimum(gap, self._strong(x, pull, smooth, objective)), None
        descent = problem.less_ridge(self._slope(pull), x)
        return PointCertificate(objective, torch.where(gap.isnan(), torch.inf, gap), descent, slope)

    def _inside(self, x: Tensor) -> Tensor:
        """x in double precision; the nearest point of the domain of g where rounding to its own type moved x out."""
        function, dims, wide = self._wide.function, self.problem.output_dims, x.to(self._wide.y.dtype)
        if wide.dtype == x.dtype or holds(function.sums(wide, dims) < torch.inf):
            return wide
        near = function.prox(wide, torch.finfo(wide.dtype).eps)
        size = self._outputs(wide.abs(), largest=True).clamp_min(1.0)
        moved = self._outputs((near - wide).abs(), largest=True)
        rounded = moved <= 16 * torch.finfo(x.dtype).eps * size
        return torch.where(self._spread(rounded, wide), near, wide)

    def _image(self, x: Tensor) -> Tensor:
        """Aᵀx; at zero it takes no product."""
        return torch.zeros_like(self._wide.y) if holds(x == 0) else self._wide.operator.adjoint(x)

    def _slope(self, pull: Tensor) -> Tensor:
        """b − Au."""
        return -pull if self._wide.bias is None else self._wide.full_bias() - pull

    def _ridged(self, s: Tensor) -> Tensor:
        """G*(s)."""
        problem = self._wide
        p = problem.function.prox(s / problem.ridge, 1 / problem.ridge)
        return self._outputs(p * (s - 0.5 * problem.ridge * p)) - problem.function.sums(p, problem.output_dims)

    def _scaled(
        self, t: Tensor, u: Tensor, data: Tensor, pull: Tensor, conjugate: Function, inside: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        r"""The dual value at the largest multiple of u that is feasible, and the multiple; with ``inside``, at the
        point nearest to u on the way to :math:`\mathbf 1`."""
        problem, dims = self._wide, self.problem.output_dims

        def charge(c: Tensor) -> Tensor:
            c = self._spread(c, pull)
            if inside is None:
                return conjugate.sums(self._slope(c * pull), dims)
            return _charge(conjugate, (1 - c) * inside + c * self._slope(pull), inside, dims)

        one = torch.ones_like(self._samples(u))
        # The reach has no tolerance, which would be too large for small weights.
        reach = conjugate.reach(-pull, dims) if problem.bias is None and inside is None else None
        whole = charge(one) if reach is None else torch.where(reach >= 1, charge(one), torch.inf)
        if holds(whole.isfinite()):
            return self._samples(data - t * u) - whole, one
        if reach is not None:
            low = torch.minimum(one, reach)
        else:
            low, high = torch.zeros_like(one), one
            for _ in range(_HALVINGS):
                middle = 0.5 * (low + high)
                fits = charge(middle).isfinite()
                low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
        c = torch.where(whole.isfinite(), one, low)
        if problem.is_quadratic and problem.bias is None:
            # The best multiple is not the largest where x is far from the solution.
            c = torch.minimum(c, (-self._samples(u * problem.y) / self._samples(u * u).clamp_min(1e-300)).clamp_min(0))
        try:
            share, centre = self._spread(c, u, inputs=True), 0.0 if inside is None else 1.0
            scaled = problem.datafit.conjugate(centre + share * (u - centre), problem.y)
        except CapabilityError:
            return torch.where(whole.isfinite(), self._samples(data - t * u) - whole, -torch.inf), one
        return -self._samples(scaled) - charge(c), c

    def _strong(self, x: Tensor, pull: Tensor, smooth: Tensor, objective: Tensor) -> Tensor:
        """The bound by strong convexity."""
        problem, mu = self._wide, self._convexity
        gradient = -self._slope(pull) + problem.ridge * x
        p = problem.function.prox(x - gradient / mu, 1 / mu)
        away = p - x
        model = self._outputs(away * (gradient + 0.5 * mu * away)) + problem.function.sums(p, problem.output_dims)
        return self._rounded(objective, smooth + model)

    def _rounded(self, objective: Tensor, dual: Tensor) -> Tensor:
        """The difference, never below zero, with room for its rounding error."""
        eps = torch.finfo(objective.dtype).eps
        return (objective - dual).clamp_min(0) + 8 * eps * (objective.abs() + dual.abs())

    def _samples(self, values: Tensor) -> Tensor:
        return values.flatten(-self.problem.input_dims).sum(-1)

    def _outputs(self, values: Tensor, *, largest: bool = False) -> Tensor:
        values = values.expand(self.problem.shape).flatten(-self.problem.output_dims)
        return values.amax(-1) if largest else values.sum(-1)

    def _spread(self, c: Tensor, like: Tensor, inputs: bool = False) -> Tensor:
        dims = self.problem.input_dims if inputs else self.problem.output_dims
        return c.reshape(*c.shape, *(1,) * dims)


def _charge(conjugate: Function, slope: Tensor, inside: Tensor, dims: int) -> Tensor:
    """g*, from above, without the tolerance of indicators: by convexity it is the larger of the values beside."""
    near = 8 * torch.finfo(slope.dtype).eps * (inside != 0)
    return torch.maximum(*(conjugate.sums(slope + side, dims) for side in (near, -near)))

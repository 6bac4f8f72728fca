"""The alternating direction method of multipliers (ADMM)."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import OptionError, require_positive
from ..linalg import accumulate
from ..operators.base import LinearOperator
from ..tracing import constant, holds, is_compiled
from .base import Solver, check_relaxation, require_count
from .implicit import Equation, Parts, attached, full_precision
from .linear import RidgeFactor, measured_conjugate_gradient, ridge_factor
from .problem import Problem, as_number

__all__ = ["ADMM"]

_ORTHOGONAL = 5  # iterations from which conjugate gradients lose digits of their derivatives in single precision
_FIRST_CHANGE = 5  # iterations before the penalty changes first
_CONDITION = 1e3  # condition number from which those iterations compute their products in double precision
_CONVERGED = 200  # iterations at most for a system of the backward pass


class SplitState(NamedTuple):
    """The point after the prox, the point after the linear solve, the scaled multiplier, ``A y + b``, the factor, and
    the prediction of a datafit other than the square."""

    x: Tensor | None
    smooth: Tensor | None
    multiplier: Tensor | None
    linear: Tensor
    factor: RidgeFactor | None
    predicted: "Prediction | None" = None
    rho: float | Tensor | None = None


class Prediction(NamedTuple):
    """A copy t of ``Aᵀz``, its scaled multiplier w and its penalty σ."""

    t: Tensor
    multiplier: Tensor
    penalty: float | Tensor

    @classmethod
    def of(cls, problem: Problem, x0: Tensor | None) -> "Prediction | None":
        """At the start; None for the square, whose part of the objective the linear solve minimises."""
        if problem.is_quadratic:
            return None
        t = torch.zeros_like(problem.y) if x0 is None else problem.operator.adjoint(x0)
        curvature = problem.datafit._constant_curvature(problem.y)
        if not problem.is_smooth:
            # Without a bound, the curvature along the prediction at the start.
            square = t.detach().square()
            curvature = (square * problem.datafit.second(t.detach(), problem.y.detach())).sum() / square.sum()
        penalty = torch.where(curvature > 0, curvature, 1.0) if isinstance(curvature, Tensor) else curvature or 1.0
        # The multiplier σw is the derivative of f, so that the first system has the plain layer on its right-hand side.
        return cls(t, problem.datafit.gradient(t, problem.y) / penalty, penalty)

    def advance(self, problem: Problem, image: Tensor, relaxation: float | Tensor) -> "Prediction":
        """The prox of the datafit, and the multiplier."""
        pushed = relaxation * image + (1 - relaxation) * self.t + self.multiplier
        t = problem.datafit.prox(pushed, 1 / self.penalty, problem.y)
        return self._replace(t=t, multiplier=pushed - t)


@dataclasses.dataclass(frozen=True)
class _RidgeSystem(Equation):
    r"""The system :math:`r - (AA^\top + sI)z = 0` of an operator without a matrix, by conjugate gradients. Its parts
    are A, s and r."""

    parts: Parts
    iterations: int

    def residual(self, x: Tensor, *params: Tensor) -> Tensor:
        return self._at(params)[2] - self.product(x, False, x, *params)

    def product(self, u: Tensor, transposed: bool, x: Tensor, *params: Tensor) -> Tensor:
        operator, shift, _ = self._at(params)
        return operator.onto(None, shift, self.parts.wide(u)[0], 1.0)

    def inverse(self, b: Tensor, transposed: bool, x: Tensor, *params: Tensor) -> Tensor:
        # To convergence, which may take more iterations than the solution, which had a start. A compiler cannot stop.
        count = 2 * self.iterations if is_compiled(b) else max(_CONVERGED, self.iterations)
        return self._iterated(params, b, None, count, 1e-12 if b.dtype == torch.float64 else 1e-6)[0]

    def from_start(self, start: Tensor | None) -> Tensor:
        """The result of conjugate gradients. A system that is solved has the derivatives of its solution; those of the
        iterations would be wrong, or not finite. Iterations that have not converged are differentiated themselves."""
        target, count = self.parts.whole[2], self.iterations
        if count > _ORTHOGONAL and self._is_ill_conditioned():
            # Its solution stays in double precision, because the next system starts from it.
            whole = self.parts.build([each.double() for each in self.parts.tensors])
            return _RidgeSystem(Parts.of(whole), count).from_start(None if start is None else start.double())
        with full_precision(target):
            rounding = torch.finfo(self.parts.wide(target)[0].dtype).eps
            z, solved = self._iterated(self.parts.tensors, target, start, count, rounding, count > _ORTHOGONAL)
            z = z.to(target.dtype)
            if is_compiled(z) and (torch.compiler.is_exporting() or not torch.is_grad_enabled()):
                return z
            with constant():
                fixed = z.detach()
            exact = attached(self, fixed, self.parts)
            return exact if exact is fixed or holds(solved) else torch.where(solved, exact, z)

    def _is_ill_conditioned(self) -> bool:
        """Whether products in single precision lose more digits than the derivatives of iterations can spare, as far as
        the product with the target tells, and products in double precision can be had."""
        target = self.parts.wide(self.parts.whole[2])[0].detach()
        single = all(each.is_floating_point() for each in self.parts.tensors) and target.dtype == torch.float32
        if not single or target.device.type == "mps" or self.parts.opaque:
            return False
        with torch.no_grad(), full_precision(target):
            operator, shift, _ = self._at([each.detach() for each in self.parts.tensors])
            image = operator.onto(None, shift, target, 1.0)
            return holds((image.norm() > _CONDITION * shift * target.norm()).any())

    def _at(self, params: Sequence[Tensor]) -> tuple[LinearOperator, float | Tensor, Tensor]:
        operator, shift, target = self.parts.build(self.parts.wide(*params))
        return operator, shift, target

    def _iterated(
        self, params: Sequence[Tensor], b: Tensor, start: Tensor | None, count: int, tol: float, stable: bool = False
    ) -> tuple[Tensor, Tensor]:
        operator, shift, _ = self._at(params)
        (b,), dims = self.parts.wide(b), len(operator.output_shape)
        apply = lambda v: operator.onto(None, shift, v, 1.0)  # noqa: E731
        return measured_conjugate_gradient(apply, b, count, start, dims, tol, stable=stable)


@dataclasses.dataclass(frozen=True)
class ADMM(Solver):
    r"""The alternating direction method of multipliers on :math:`f(z) + g(x)`, :math:`z = x`:

    .. math::

        z \leftarrow (AA^\top + (\lambda+\rho) I)^{-1}(Ay + b + \rho\,(x - u)), \qquad
        x \leftarrow \operatorname{prox}_{g/\rho}(z + u), \qquad u \leftarrow u + z - x .

    For another datafit f than the square the prediction :math:`A^\top z` is split off, too, as t with the multiplier w:
    with :math:`\sigma = \kappa`,

    .. math::

        z \leftarrow (\sigma AA^\top + (\lambda+\rho) I)^{-1}(b + \rho\,(x - u) + \sigma A(t - w)), \qquad
        t \leftarrow \operatorname{prox}_{f/\sigma}(A^\top z + w), \qquad w \leftarrow w + A^\top z - t .

    It needs no bound on the norm of A and converges for every :math:`\rho > 0`. For dense operators the system is
    factored once, on the smaller side; for others it is solved by at most ``cg_iters`` conjugate gradient iterations
    from the last solution, in single or double precision. Systems that are solved have the derivatives of their
    solution; iterations that have not converged are differentiated themselves.

    Args:
        iters: Iterations.
        rho: The penalty :math:`\rho`. ``"auto"`` is :math:`\kappa` times the mean squared norm of the rows of A, the
            mean curvature of f, with which the iterations do not depend on the scale of A.
        cg_iters: Conjugate gradient iterations at most, where the system is not factored.
        relaxation: :math:`\alpha \in (0, 2)`: :math:`\alpha z + (1 - \alpha) x` takes the place of z in the last two
            updates, which moves :math:`z + u` by the share :math:`\alpha` (§3.4.3 there).
        adapt: How often :math:`\rho` may change, after 5, 10, 20, 40, … iterations: it is multiplied by the root of
            :math:`\frac{\|z - x\|}{\max(\|x\|, \|z\|)} \big/ \frac{\|x - x_-\|}{\|u\|}`, the relative primal residual
            over the dual one, within 0.1 and 10. After the last change the penalty is constant, so that convergence is
            proved as without changes. Each change factors the system anew. All samples share it, so that they depend on
            each other. The backward pass treats it as a constant.

    Source: Boyd et al., 2011, §4.2, §3.4.1; Wohlberg, *ADMM penalty parameter selection by residual balancing*, 2017.

    >>> from minimand.functions import NonNegative
    >>> from minimand.operators import Dense
    >>> from minimand.solvers import solve
    >>> A, y = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[4.0, -3.0]])
    >>> solve(Problem(Dense(A), NonNegative(), y), ADMM(iters=60)).x
    tensor([[2., 0.]])
    """

    needs_curvature: ClassVar[bool] = False

    iters: int = 10
    rho: float | Tensor | Literal["auto"] = 1.0
    cg_iters: int = dataclasses.field(default=10, kw_only=True)
    relaxation: float | Tensor = dataclasses.field(default=1.0, kw_only=True)
    adapt: int = dataclasses.field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        require_count("iters", self.iters)
        require_count("cg_iters", self.cg_iters)
        # A tensor is a learned parameter; the network that owns it keeps it positive.
        if isinstance(self.rho, str) and self.rho != "auto":
            raise OptionError(f'rho is "auto" or a number > 0, got {self.rho!r}')
        if not isinstance(self.rho, Tensor | str):
            require_positive("rho", self.rho)
        check_relaxation(self.relaxation, 1.95)
        if self.adapt:
            require_count("adapt", self.adapt)

    @property
    def iterations(self) -> int:
        """The fixed number of iterations."""
        return self.iters

    def prepare(self, problem: Problem) -> Problem:
        """No bound is computed."""
        return problem if self.iters == 1 else problem.repeated()

    def init(self, problem: Problem, x0: Tensor | None) -> SplitState:
        """``A y + b`` and the factor, once."""
        matrix, predicted = problem.operator.matrix, Prediction.of(problem, x0)
        rho = self._penalty(problem, predicted)
        factor = None if matrix is None else ridge_factor(matrix, _shift(problem, rho, predicted))
        return SplitState(x0, x0, None, problem.linear(), factor, predicted, rho)

    def _penalty(self, problem: Problem, predicted: Prediction | None) -> float | Tensor:
        if not isinstance(self.rho, str):
            return self.rho
        mean = problem.operator.output_norms_sq().mean().double() * (1.0 if predicted is None else predicted.penalty)
        return as_number(torch.where(mean > 0, mean, 1.0))

    def start(self, problem: Problem, preactivation: Tensor) -> SplitState:
        """The multiplier is the subgradient of g that belongs to the pre-activation."""
        x = problem.function.prox(preactivation)
        state = self.init(problem, x)
        return state._replace(multiplier=(preactivation - x) / self._penalty(problem, state.predicted))

    def weakened(self, strength: float | Tensor) -> "ADMM":
        """The same method with ``strength`` times its relaxation."""
        return dataclasses.replace(self, relaxation=self.relaxation * strength)

    def advance(self, problem: Problem, state: SplitState, k: int, generator: torch.Generator | None) -> SplitState:
        """Linear solve, prox, multiplier."""
        x, smooth, multiplier, target, factor, predicted, given = state
        rho = self._penalty(problem, predicted) if given is None else given
        if predicted is not None:
            pull = predicted.penalty * (predicted.t - predicted.multiplier)
            target = problem.operator.affine(pull, problem.bias)
        if x is not None:
            target = target + rho * (x if multiplier is None else x - multiplier)
        if predicted is not None:
            target = target / predicted.penalty
        if factor is not None:
            smooth = factor.solve(target)
        else:
            parts = Parts.of((problem.operator.with_bounds(None), _shift(problem, rho, predicted), target))
            smooth = _RidgeSystem(parts, self.cg_iters).from_start(smooth)
        relaxed = smooth.to(target.dtype)
        if isinstance(self.relaxation, Tensor) or self.relaxation != 1:
            relaxed = accumulate(None if x is None else (1 - self.relaxation) * x, self.relaxation, relaxed)
        pushed = relaxed if multiplier is None else relaxed + multiplier
        new = problem.prox(pushed, 1 / rho)
        if predicted is not None:
            predicted = predicted.advance(problem, problem.operator.adjoint(smooth.to(target.dtype)), self.relaxation)
        after = state._replace(x=new, smooth=smooth, multiplier=pushed - new, predicted=predicted)
        due = k + 1 in [_FIRST_CHANGE << j for j in range(self.adapt)] and k + 1 < self.iters
        return after if not due or x is None else self._balanced(problem, after, x, rho)

    def _balanced(self, problem: Problem, state: SplitState, before: Tensor, rho: float | Tensor) -> SplitState:
        """The state with the penalty that balances the residuals, for all samples together."""
        x, smooth, multiplier = state.x, state.smooth, state.multiplier
        assert x is not None
        assert smooth is not None
        assert multiplier is not None
        with torch.no_grad():
            primal = (smooth - x).norm() * multiplier.norm()
            dual = (x - before).norm() * torch.maximum(x.norm(), smooth.norm())
            # Both are zero at a solution, where nothing is to be balanced.
            factor = (primal / dual).sqrt().clamp(0.1, 10.0).nan_to_num(nan=1.0)
            factor = torch.where((factor > 0.5) & (factor < 2), 1.0, factor)
        if holds(factor == 1):
            return state
        rho = as_number(factor.double() * rho) if not isinstance(rho, Tensor) else factor * rho
        matrix = problem.operator.matrix
        made = None if matrix is None else ridge_factor(matrix, _shift(problem, rho, state.predicted))
        return state._replace(rho=rho, multiplier=multiplier / factor, factor=made)


def _shift(problem: Problem, rho: float | Tensor, predicted: Prediction | None) -> float | Tensor:
    """The shift of the system, divided by the penalty of the predictions."""
    shift = problem.ridge + rho
    return shift if predicted is None else shift / predicted.penalty

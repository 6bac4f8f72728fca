"""The convex problem of a layer, and its gradient steps."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import (
    CapabilityError,
    NonFiniteError,
    ShapeError,
    require_dtype,
    require_finite,
    require_positive,
    require_real,
)
from ..functions.base import Function, broadcasts_to, widened
from ..linalg import accumulate
from ..norms.kernel import Bounds
from ..operators.base import LinearOperator, Selected
from ..operators.dense import Dense
from ..tracing import constant, is_traced
from .datafits import Datafit, Quadratic
from .sampling import Sample

__all__ = ["DescentMap", "GradientMap", "Problem", "as_number", "reciprocal", "require_steps"]


_SQUARE = Quadratic()


def _square() -> Datafit:
    """The default datafit; torch.compile can read a global object, but takes none as a default argument."""
    return _SQUARE


@dataclasses.dataclass(frozen=True)
class Problem:
    r"""The problem of a layer with weight :math:`A`, bias :math:`b` and input :math:`y`, one per sample:

    .. math::

        \min_x\; \textstyle\sum_i f((A^\top x)_i; y_i) - \langle b, x\rangle + \tfrac{\lambda}{2}\|x\|^2 + g(x) .

    The datafit of a layer is the square, :math:`\tfrac12\|A^\top x - y\|^2`. One proximal gradient step from zero with
    unit step and :math:`\lambda = 0` is then the plain layer :math:`\operatorname{prox}_g(Ay + b)`: a linear map
    followed by an activation. For other datafits it is the plain layer applied to :math:`-f'(0; y)`.

    Wherever a point is expected, ``None`` stands for zero, which takes no product with the operator.

    Args:
        operator: :math:`A`, any linear operator.
        function: :math:`g`, the activation's function.
        y: The layer's input, a batch of samples of the operator's input shape.
        bias: Broadcastable to x, or one number per output channel; it may depend on the input, as the skip
            of a residual block does.
        ridge: :math:`\lambda \ge 0`; above zero the problem is strongly convex.
        datafit: :math:`f`, by default the square.
        preactivated: Whether steps end in the function's ``preactivation`` instead of its prox.
        affine: ``A y + b``, where it is known.

    Source: [Bibi2019], eq. (5); eq. (1) has general convex :math:`f_i`.

    >>> from minimand.functions import NonNegative
    >>> from minimand.operators import Dense
    >>> A, y = torch.eye(2), torch.tensor([[3.0, -1.0]])
    >>> problem = Problem(Dense(A), NonNegative(), y)
    >>> problem.objective(torch.tensor([[3.0, 0.0]])).item()
    0.5
    """

    operator: LinearOperator
    function: Function
    y: Tensor
    bias: Tensor | None = None
    ridge: float = 0.0
    datafit: Datafit = dataclasses.field(default_factory=_square)
    preactivated: bool = dataclasses.field(default=False, kw_only=True)
    affine: Tensor | None = dataclasses.field(default=None, kw_only=True)

    @property
    def shape(self) -> torch.Size:
        """The shape of x."""
        lead = self.y.shape[: self.y.dim() - len(self.operator.input_shape)]
        return torch.Size((*lead, *self.operator.output_shape))

    @property
    def rows(self) -> int:
        """The number of samples, which are solved independently."""
        return math.prod(self.shape[: len(self.shape) - len(self.operator.output_shape)])

    @property
    def output_dims(self) -> int:
        """The number of last dimensions of x that belong to one problem: those of a sample, and those along which the
        function couples samples, such as a function of matrices does with vectors."""
        return max(len(self.operator.output_shape), self.function.coupled)

    @property
    def input_dims(self) -> int:
        """The number of last dimensions of y that belong to one problem."""
        return len(self.operator.input_shape) + self.output_dims - len(self.operator.output_shape)

    @property
    def is_quadratic(self) -> bool:
        """Whether the datafit is the square, whose gradient is affine."""
        return isinstance(self.datafit, Quadratic)

    @property
    def is_smooth(self) -> bool:
        """Whether the curvature of the datafit has a bound."""
        return self.is_quadratic or self.datafit._has_bound(self.y)

    def linear(self) -> Tensor:
        """``A y + b``, the plain layer before its activation, in the type of y also where autocast multiplies; with
        −f′(0; y) in place of y for other datafits."""
        if self.affine is not None:
            return _alike(self.affine, self.y)
        return _alike(self.operator.affine(self.datafit.residual(None, self.y), self.bias), self.y)

    def smoothness(self, x: Tensor | None = None) -> Tensor:
        r""":math:`\kappa L + \lambda`, with L never below :math:`\|A\|^2` and the curvature :math:`\kappa` of f."""
        bound = self.operator.norm_sq()
        # In double precision, so that rounding does not make the step longer than the bound allows.
        return self.curved(bound if bound.device.type == "mps" else bound.double(), x) + self.ridge

    def scale(self, x: Tensor | None = None) -> Tensor:
        """:meth:`smoothness` where a bound on the norm is at hand or costs little, and a looser one otherwise."""
        operator = self.operator
        if not isinstance(operator, Dense) or operator._bounds is not None or is_traced(operator.weight):
            return self.smoothness(x)
        loose = torch.linalg.vector_norm(operator.weight.detach(), dim=(-2, -1)).amax().double().square()
        return self.curved(1.001 * loose, x) + self.ridge

    def curved(self, bound: Tensor, x: Tensor | None = None) -> Tensor:
        r""":math:`\kappa` times a bound on a squared norm of A: a bound on the curvature along the same directions. The
        largest curvature at x where f has no bound :math:`\kappa`."""
        if x is None or self.is_smooth:
            return bound if self.is_quadratic else bound * self.datafit._constant_curvature(self.y)
        with constant():
            largest = self.datafit.second(self.operator.adjoint(x), self.y).amax()
        return bound * torch.where((largest > 0) & (largest < math.inf), largest, 1.0)

    def descent(self, x: Tensor | None, linear: Tensor) -> Tensor:
        r"""The negative gradient of the smooth part, :math:`b - Af'(A^\top x; y) - \lambda x`, given :meth:`linear`."""
        if x is None:
            return linear
        if self.is_quadratic:
            return self.less_ridge(linear - self.operator.normal(x), x)
        residual = self.datafit.residual(self.operator.adjoint(x), self.y)
        return self.less_ridge(_alike(self.operator.affine(residual, self.bias), self.y), x)

    def sampled_descent(self, x: Tensor | None, sample: Sample) -> Tensor:
        r"""An unbiased estimate of :meth:`descent` from a sample of the inputs.

        .. math:: -A\,(w \odot f'(A^\top x; y)) + b - \lambda x, \qquad \mathbb{E}\, w = 1 .
        """
        operator, y = self._sampled(sample)
        residual = self.datafit.residual(None if x is None else operator.adjoint(x), y)
        direction = operator.affine(_weighted(operator, sample, residual), self.bias)
        return self.less_ridge(_alike(direction, self.y), x)

    def sampled_change(self, x: Tensor, reference: Tensor | None, sample: Sample) -> Tensor:
        r"""An unbiased estimate of the change of the gradient from ``reference`` to ``x``; for squares the Hessian's
        :math:`A\,(w \odot A^\top(x - \tilde x)) + \lambda(x - \tilde x)`."""
        away = x if reference is None else x - reference
        operator, y = self._sampled(sample)
        if self.is_quadratic:
            change = operator.adjoint(away)
        else:
            before = None if reference is None else operator.adjoint(reference)
            change = self.datafit.residual(before, y) - self.datafit.residual(operator.adjoint(x), y)
        product = operator.apply(_weighted(operator, sample, change))
        return product if self.ridge == 0 else product + self.ridge * away

    def _sampled(self, sample: Sample) -> tuple[LinearOperator, Tensor]:
        """The operator and the data of the sampled inputs."""
        if sample.index is None:
            return self.operator, self.y
        return self.operator.restrict(sample.index), self.operator.select(self.y, sample.index)

    def contraction(self, x: Tensor, step: float | Tensor) -> Callable[[Tensor], Tensor]:
        r"""The map :math:`u \mapsto (I - \eta H)u` with the Hessian
        :math:`H = A\operatorname{diag}(f''(A^\top x; y))A^\top + \lambda I` at ``x``."""
        operator, keep = self.operator, 1 - step * self.ridge if self.ridge else 1.0
        if self.is_quadratic:
            return lambda u: operator.onto(None, keep, u, -step)
        bend = step * self.datafit.second(operator.adjoint(x), self.y)
        return lambda u: keep * u - operator.apply(bend * operator.adjoint(u))

    def less_ridge(self, direction: Tensor, x: Tensor | None) -> Tensor:
        r""":math:`d - \lambda x`."""
        return direction if x is None or self.ridge == 0 else direction - self.ridge * x

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        """The prox of g at ``v``, with the step that the gradient took; the point before it where so wanted."""
        return self.function.preactivation(v, step) if self.preactivated else self.function.prox(v, step)

    def solution(self, x: Tensor) -> Tensor:
        """The point that steps end in, given what they return."""
        return self.function.prox(x) if self.preactivated else x

    def objective(self, x: Tensor) -> Tensor:
        """The objective at ``x``, summed over the batch."""
        problem, wide = self.working(), widened(x)
        value = self.datafit.values(problem.operator.adjoint(wide), problem.y).sum() + self.function.value(x)
        if problem.bias is not None:
            value = value - (problem.full_bias() * wide).sum()
        return value + 0.5 * self.ridge * wide.square().sum()

    def optimality(self, x: Tensor) -> Tensor:
        r"""A measure of optimality: the largest norm of the gradient mapping over the samples,

        .. math::

            \max_{\text{samples}} \bigl\| \ell\,(x - \operatorname{prox}_{g/\ell}(x - \nabla f(x)/\ell)) \bigr\|_2,
            \qquad \ell = \kappa L + \lambda ,

        which is zero at the minimiser and nowhere else. L is the bound that the solver used, or a looser one.
        """
        norms = self.gradient_mapping(x).flatten(self.operator.output_dim).norm(dim=-1)
        return norms.amax() if self.rows else norms.sum()

    def gradient_mapping(self, x: Tensor) -> Tensor:
        r""":math:`\ell\,(x - \operatorname{prox}_{g/\ell}(x - \nabla f(x)/\ell))`, zero at the minimiser only."""
        problem, x = self.working(), widened(x)
        step = as_number(reciprocal(problem.scale(x)))
        mapping = (x - problem.prox(x + step * problem.descent(x, problem.linear()), step)) / step
        # Outside of the domain of f nothing is optimal.
        return mapping if problem.is_smooth else torch.where(mapping.isnan(), math.inf, mapping)

    def as_given(self, x: Tensor) -> Tensor:
        """``x`` in the memory format that torch would give it: channels last only where the input or the weight is. A
        repeated convolution always returns channels last."""
        if x.dim() != 4 or is_traced(x):
            return x
        tensors = (self.y, self.operator.weight) if self.operator.has_weight else (self.y,)
        last = any(t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
        return x if last else x.contiguous()

    def working(self) -> "Problem":
        """The problem in the precision of the computation: itself, or in float32 where it is in half precision."""
        operator, y = self.operator, widened(self.y)
        bias = None if self.bias is None else widened(self.bias)
        if not operator.has_weight:
            operator = operator if y is self.y else Selected(operator, dtype=self.y.dtype)
        elif (weight := widened(operator.weight)) is not operator.weight:
            operator = operator.with_weight(weight)
        if y is self.y and bias is self.bias and operator is self.operator:
            return self
        return dataclasses.replace(self, operator=operator, y=y, bias=bias)

    def bounded(self, *, inputs: bool = False, outputs: bool = False) -> "Problem":
        """The same problem with its operator's bounds computed now."""
        operator = self.operator
        bounds = Bounds(
            operator.norm_sq(),
            operator.input_norms_sq() if inputs else None,
            operator.output_norms_sq() if outputs else None,
        )
        return dataclasses.replace(self, operator=operator.with_bounds(bounds))

    def gathered(self) -> "Problem":
        """The same problem with its operator prepared for a restriction in every iteration."""
        return dataclasses.replace(self, operator=self.operator.gathered())

    def repeated(self) -> "Problem":
        """The same problem with its operator prepared for a product ``A Aᵀ x`` in every iteration."""
        return dataclasses.replace(self, operator=self.operator.repeated(self.rows))

    def check(self) -> None:
        """Raise for operands of a wrong kind, for sizes that do not fit and for values that are not finite."""
        if not isinstance(self.operator, LinearOperator) or not isinstance(self.function, Function):
            raise CapabilityError(
                f"a Problem takes an operator such as Dense(weight) and a function such as NonNegative(), "
                f"got {type(self.operator).__name__} and {type(self.function).__name__}"
            )
        if not isinstance(self.datafit, Datafit):
            raise CapabilityError(
                f"Problem(datafit=…) takes a datafit such as Quadratic() or Logistic(), got {self.datafit!r:.60}"
            )
        require_positive("ridge", self.ridge, zero=True)
        require_real("y", self.y)
        self.operator.check_input(self.y)
        self.check_dtype("y", self.y)
        self.function.check_shape(self.shape)
        if self.bias is not None:
            require_real("bias", self.bias)
            self._check_bias(self.bias)
            self.check_dtype("bias", self.bias)
            require_finite("bias", self.bias)
        if self.operator.has_weight:
            require_finite("weight", self.operator.weight)
        require_finite("y", self.y)
        self.datafit.check(self.y)

    def check_dtype(self, name: str, tensor: Tensor) -> None:
        """Raise for a tensor of another type than the weight's, unless autocast converts it."""
        if self.operator.has_weight:
            require_dtype(name, tensor, self.operator.weight)

    def full_bias(self) -> Tensor:
        """The bias, shaped to broadcast against x."""
        assert self.bias is not None
        # A bias with one dimension has one number per channel; it is never a bias along the width.
        return self.operator.per_feature(self.bias) if self.bias.dim() == 1 else self.bias

    def _check_bias(self, bias: Tensor) -> None:
        if not broadcasts_to(self.full_bias().shape, self.shape):
            raise ShapeError(
                f"bias of shape {tuple(bias.shape)} does not broadcast to x of shape {tuple(self.shape)}; "
                f"give one number per output, {self.operator.outputs} of them, or one per entry of x"
            )


def _alike(x: Tensor, like: Tensor) -> Tensor:
    """``x`` in the type of ``like``; the comparison takes a tenth of the time of a ``to`` without effect."""
    return x if x.dtype is like.dtype else x.to(like.dtype)


def _weighted(operator: LinearOperator, sample: Sample, residual: Tensor) -> Tensor:
    return residual if sample.weight is None else operator.per_input(sample.weight) * residual


class GradientMap(NamedTuple):
    r"""The affine map :math:`x \mapsto x - \eta\nabla f(x) = Mx + \eta(Ay + b)`,
    :math:`M = (1-\eta\lambda)I - \eta AA^\top`.

    Where it is cheaper, M is formed once and a step is one product that accumulates onto the offset. Otherwise the
    operator and its adjoint are applied. Under autocast only :math:`AA^\top x` is computed in half precision, by the
    Gram matrix where that is cheaper; the terms are added in the type of x. None stands for the origin.
    """

    offset: Tensor
    matrix: Tensor | None
    operator: LinearOperator
    step: float | Tensor
    ridge: float
    gram: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem, step: float | Tensor, applications: int) -> "GradientMap | DescentMap":
        """The map of a problem at one step size."""
        if not problem.is_quadratic:
            return DescentMap(step * problem.linear(), problem, step)
        gram, matrix = problem.operator.gram_if_cheaper(problem.rows, applications), None
        if gram is not None and gram.dtype == problem.y.dtype:
            kept = torch.diag(gram.new_ones(gram.shape[-1]) * (1 - step * problem.ridge))
            matrix = accumulate(kept, -step, gram)
        return cls(step * problem.linear(), matrix, problem.operator, step, problem.ridge, gram)

    def __call__(self, x: Tensor | None) -> Tensor:
        """One gradient step from ``x``."""
        if x is None:
            return self.offset
        if self.matrix is not None:
            # M is symmetric: rows need no transpose.
            return torch.addmm(self.offset, x, self.matrix) if x.dim() == 2 else self.offset + x @ self.matrix
        keep = 1 - self.step * self.ridge if self.ridge else 1.0
        if self.gram is not None:
            return accumulate(accumulate(self.offset, keep, x), -self.step, x @ self.gram)
        return self.operator.onto(self.offset, keep, x, -self.step)


class DescentMap(NamedTuple):
    r"""The map :math:`x \mapsto x - \eta\nabla f(x)` of a datafit other than the square. None is the origin."""

    offset: Tensor
    problem: Problem
    step: float | Tensor

    def __call__(self, x: Tensor | None) -> Tensor:
        """One gradient step from ``x``."""
        return self.offset if x is None else accumulate(x, self.step, self.problem.descent(x, self.offset))


def reciprocal(smoothness: Tensor) -> Tensor:
    """The step 1/ℓ of an ℓ-smooth function; 1 where ℓ is zero, and not a number where ℓ is none."""
    step = 1 / smoothness
    return torch.where(torch.isinf(step), torch.ones_like(step), step)


def as_number(step: Tensor) -> float | Tensor:
    """A single step as a Python number, with which proxes are faster, where reading it needs no synchronisation."""
    if step.dim() or step.device.type != "cpu" or is_traced(step):
        return step
    require_steps(step)
    return float(step)


def require_steps(steps: Tensor) -> None:
    """Raise :class:`~minimand.errors.NonFiniteError` for steps that are zero or NaN because a bound overflowed."""
    if not is_traced(steps) and not bool((steps > 0).all()):
        raise NonFiniteError(
            "the bound on the operator's squared norm overflows its type, so the step would be zero; scale the weight "
            "down or use float64 (the usual cause is a training run that diverged)"
        )

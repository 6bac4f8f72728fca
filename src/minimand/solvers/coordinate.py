"""Randomised coordinate descent, whose first step is dropout on the outputs."""

import dataclasses
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..functions.base import Function
from ..linalg import accumulate
from ..operators.base import LinearOperator
from .base import Solver, check_relaxation, require_count, require_flag
from .gradient import ProxGD
from .problem import Problem, require_steps
from .sampling import Nice, Request, check_tau, sample_size
from .steps import Scaled, StepSize, check_step_size, gradient_step, resolve_step

__all__ = ["RCD"]


class CoordinateState(NamedTuple):
    """The point, its image ``Aᵀx`` and the step (per output for single coordinates)."""

    x: Tensor | None
    image: Tensor | None
    step: float | Tensor


@dataclasses.dataclass(frozen=True)
class RCD(Solver):
    r"""Randomised block coordinate descent (NSync) over the outputs: for a random set S of τ outputs,

    .. math::

        x_S \leftarrow \operatorname{prox}_{g/v}\bigl(x_S - \nabla_S f(x)/v\bigr), \qquad x_{\bar S} \text{ unchanged.}

    The prox is applied to the sampled entries only. Applied to all entries, as eq. (32) of [Bibi2019] is written, the
    iteration stops far from the optimum. For activations with act(0) = 0, one step from zero with v = 1 is
    act(dropout(Ay + b)): dropout *after* the linear map, unscaled ([Bibi2019], Proposition 6).

    Args:
        iters: Iterations.
        tau: The number of outputs (channels) that a step updates; a float is a fraction, an int a count. None: half.
        step: 1/v; automatic: :math:`1/(L+\lambda)` for blocks, which is safe for any τ, and
            :math:`1/(\|\mathrm{row}_i\|^2+\lambda)` for a single output at a time.
        shared_sample: One draw for the whole batch; a step gathers τ rows of the operator and costs τ/n2 of a full one.
        relaxation: The share α of an update :math:`x_S + \alpha\,(x_S^+ - x_S)`, of pre-activations in a layer that
            starts from the plain one.

    Source: Richtárik & Takáč, 2016; [Bibi2019], appendix I.

    >>> from minimand.functions import L1
    >>> from minimand.operators import Dense
    >>> from minimand.solvers import solve
    >>> A, y = torch.eye(3), torch.tensor([[3.0, 0.5, -2.0]])
    >>> solve(Problem(Dense(A), L1(1.0), y), RCD(iters=200)).x.round(decimals=4)
    tensor([[ 2.,  0., -1.]])
    """

    stochastic: ClassVar[bool] = True
    needs_separable: ClassVar[bool] = True
    updates_some: ClassVar[bool] = True

    iters: int = 10
    tau: float | int | None = None
    step: StepSize = "auto"
    shared_sample: bool = dataclasses.field(default=False, kw_only=True)
    relaxation: float | Tensor = dataclasses.field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        require_count("iters", self.iters)
        check_step_size(self.step)
        check_tau(self.tau)
        require_flag("shared_sample", self.shared_sample)
        check_relaxation(self.relaxation, 1.0)

    @property
    def iterations(self) -> int:
        """The fixed number of iterations."""
        return self.iters

    def check(self, operator: LinearOperator, function: Function) -> None:
        """Also check that the sample fits the operator's outputs."""
        super().check(operator, function)
        sample_size(self.tau, operator.outputs)

    def prepare(self, problem: Problem) -> Problem:
        """Bounds per output, where single outputs are updated."""
        return problem.bounded(outputs=sample_size(self.tau, problem.operator.outputs) == 1)

    def first_step(self, problem: Problem) -> float | Tensor:
        """1/v; one per output where single outputs are updated."""
        operator = problem.operator
        if sample_size(self.tau, operator.outputs) > 1:
            return gradient_step(self.step, problem)
        step = resolve_step(self.step, problem, lambda: problem.curved(operator.output_norms_sq()) + problem.ridge)
        if not isinstance(step, Tensor):
            return step
        require_steps(step)
        return operator.per_feature(step) if step.dim() else step

    def noiseless(self) -> ProxGD:
        """Proximal gradient descent, which updates all outputs at once; a relaxation shortens its step."""
        return ProxGD(self.iters, Scaled(self.step, self.relaxation) if self._is_relaxed else self.step)

    def weakened(self, strength: float | Tensor) -> "RCD":
        """The same method with ``strength`` times its updates."""
        return dataclasses.replace(self, relaxation=self.relaxation * strength)

    def plain(self, problem: Problem, generator: torch.Generator | None) -> Tensor:
        """``A y + b`` on the sampled outputs, zero on the others."""
        state, unit = CoordinateState(None, None, 1.0), dataclasses.replace(self, relaxation=1.0)
        z = unit.advance(dataclasses.replace(problem, preactivated=True), state, 0, generator).x
        assert z is not None
        return z

    def start(self, problem: Problem, preactivation: Tensor) -> CoordinateState:
        """The state holds the pre-activation, in which all updates are made."""
        return self.init(problem, problem.function.prox(preactivation))._replace(x=preactivation)

    @property
    def _is_relaxed(self) -> bool:
        return isinstance(self.relaxation, Tensor) or self.relaxation != 1

    def init(self, problem: Problem, x0: Tensor | None) -> CoordinateState:
        """The image and the step, once."""
        image = None if x0 is None else problem.operator.adjoint(x0)
        return CoordinateState(x0, image, self.first_step(problem))

    def advance(
        self, problem: Problem, state: CoordinateState, k: int, generator: torch.Generator | None
    ) -> CoordinateState:
        """Update τ outputs, and the image with them."""
        operator, residual = problem.operator, problem.datafit.residual(state.image, problem.y)
        rows, size = None if self.shared_sample else problem.rows, sample_size(self.tau, operator.outputs)
        sample = Nice().draw(Request(size, operator.outputs, rows, problem.y, generator))
        given = problem.y.new_zeros(problem.shape) if state.x is None else state.x
        x = problem.solution(given)
        if (index := sample.index) is None:
            assert sample.weight is not None
            kept = operator.per_feature(sample.weight.reshape(*x.shape[: operator.output_dim], operator.outputs)) > 0
            updated = self._updated(problem, x, residual, problem.bias, state.step)
            updated = torch.where(kept, self._relaxed(given, updated), given)
            image = accumulate(state.image, 1.0, operator.adjoint(problem.solution(updated) - x))
            return state._replace(x=updated, image=image)
        part = dataclasses.replace(problem, operator=operator.restrict_outputs(index))
        bias = None if problem.bias is None else self._part(problem, problem.full_bias(), index)
        step = self._part(problem, state.step, index) if isinstance(state.step, Tensor) else state.step
        block = operator.select_outputs(x, index)
        updated = self._updated(part, block, residual, bias, step)
        updated = self._relaxed(operator.select_outputs(given, index), updated)
        image = accumulate(state.image, 1.0, part.operator.adjoint(problem.solution(updated) - block))
        return state._replace(x=given.index_copy(operator.output_dim, index, updated), image=image)

    def _relaxed(self, given: Tensor, updated: Tensor) -> Tensor:
        return given + self.relaxation * (updated - given) if self._is_relaxed else updated

    @staticmethod
    def _updated(problem: Problem, x: Tensor, residual: Tensor, bias: Tensor | None, step: float | Tensor) -> Tensor:
        direction = problem.less_ridge(problem.operator.affine(residual, bias), x)
        return problem.prox(x + step * direction, step)

    @staticmethod
    def _part(problem: Problem, tensor: Tensor, index: Tensor) -> Tensor:
        """The sampled outputs of a tensor that broadcasts against x."""
        operator = problem.operator
        narrow = tensor.dim() < -operator.output_dim or tensor.shape[operator.output_dim] == 1
        return tensor if narrow else operator.select_outputs(tensor, index)

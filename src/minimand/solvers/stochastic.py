r"""Stochastic first-order methods that sample the inputs: Prox-SG and SVRG / mS2GD."""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ..functions.base import Function
from ..linalg import accumulate
from ..operators.base import LinearOperator
from .base import Solver, require_count, require_flag
from .problem import Problem
from .sampling import Full, Request, Sample, Sampling, check_tau, resolve_sampling, sample_size
from .steps import Schedule, StepSize, check_step_size, resolve_decay, resolve_step

__all__ = ["SVRG", "ProxSG"]


class InputSampler(Solver):
    """The base of solvers that sample the inputs. Subclasses declare the fields in the order of their arguments."""

    stochastic: ClassVar[bool] = True

    tau: float | int | None
    step: StepSize
    sampling: str | Sampling
    shared_sample: bool

    def _check_options(self) -> None:
        check_step_size(self.step)
        check_tau(self.tau)
        resolve_sampling(self.sampling)
        require_flag("shared_sample", self.shared_sample)

    def check(self, operator: LinearOperator, function: Function) -> None:
        """Also check that the sample fits the operator's inputs."""
        super().check(operator, function)
        sample_size(self.tau, operator.inputs)

    def prepare(self, problem: Problem) -> Problem:
        """Bounds per input, and fast restrictions for shared samples."""
        problem = problem.bounded(inputs=True)
        return problem.gathered() if self.shared_sample else problem

    def noiseless(self) -> Self:
        """The same steps along full gradients."""
        changes: dict[str, Any] = {"sampling": Full(resolve_sampling(self.sampling)), "shared_sample": False}
        return dataclasses.replace(self, **changes)

    def plain(self, problem: Problem, generator: torch.Generator | None) -> Tensor:
        """``A (w ⊙ y) + b``, where the sample w is the dropout."""
        sample = self.draw(problem, None, generator)
        full = sample.index is None and sample.weight is None
        return problem.linear() if full else problem.sampled_descent(None, sample)

    def _size(self, problem: Problem) -> int:
        return sample_size(self.tau, problem.operator.inputs)

    def _smoothness(self, problem: Problem) -> Tensor:
        expected = resolve_sampling(self.sampling).smoothness(problem.operator, self._size(problem))
        return problem.curved(expected) + problem.ridge

    def draw(self, problem: Problem, x: Tensor | None, generator: torch.Generator | None) -> Sample:
        """Draw inputs for each row of the problem, or once for all rows."""
        operator, sampling, shared = problem.operator, resolve_sampling(self.sampling), self.shared_sample
        with torch.no_grad():
            residual = None
            if sampling.uses_residual:
                residual = problem.datafit.residual(None if x is None else operator.adjoint(x), problem.y)
            scores = sampling.scores(operator, residual)
            if shared and residual is not None and scores is not None:
                scores = scores.square().mean(0).sqrt()
            rows = None if shared else problem.rows
            sample = sampling.draw(Request(self._size(problem), operator.inputs, rows, problem.y, generator, scores))
            if sample.index is None and sample.weight is not None and not shared:
                lead = problem.y.shape[: operator.feature_dim]
                sample = Sample(None, sample.weight.reshape(*lead, operator.inputs))
        return sample


class SampledState(NamedTuple):
    """The point and the initial step."""

    x: Tensor | None
    step: float | Tensor


@dataclasses.dataclass(frozen=True)
class ProxSG(InputSampler):
    r"""Proximal stochastic gradient over the inputs,

    .. math::

        x \leftarrow \operatorname{prox}_{\eta_k g}\bigl(x + \eta_k\,[A\,(w\odot(y - A^\top x)) + b - \lambda x]\bigr),
        \qquad \mathbb{E}\,w = 1 ,

    with :math:`-f'(A^\top x; y)` in place of :math:`y - A^\top x` for other datafits than the square. One iteration
    from zero with unit step is dropout → linear → activation with the mask ``w`` ([Bibi2019], Proposition 1); ``w``
    contains dropout's factor 1/(1−p).

    Args:
        iters: Iterations.
        tau: The number of inputs (channels, for a convolution) in a step: a float is a fraction, an int a count.
            None: half of them.
        step: The first step; automatic: one over the *expected smoothness* of the sampling. ``"1/L"``, the paper's
            rule, diverges for small samples.
        decay: A factor per iteration, or a :class:`~minimand.solvers.steps.Schedule`.
        sampling: ``"nice"``, ``"bernoulli"``, ``"importance"`` or a :class:`~minimand.solvers.sampling.Sampling`.
        shared_sample: One draw for the whole batch; a step gathers τ inputs of the operator and costs τ/n of a
            full one.

    >>> from minimand.functions import NonNegative
    >>> from minimand.operators import Dense
    >>> from minimand.solvers import solve
    >>> A, y = torch.eye(4), torch.arange(4.0)[None]
    >>> sample = solve(Problem(Dense(A), NonNegative(), y), ProxSG(iters=1, tau=0.5, step=1.0)).x
    >>> sorted(set((sample / y)[0, 1:].tolist())) in ([0.0, 2.0], [0.0], [2.0])
    True
    """

    iters: int = 10
    tau: float | int | None = None
    step: StepSize = "auto"
    decay: float | Schedule = 0.95
    sampling: str | Sampling = "nice"
    shared_sample: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        require_count("iters", self.iters)
        resolve_decay(self.decay)
        self._check_options()

    @property
    def iterations(self) -> int:
        """The fixed number of iterations."""
        return self.iters

    def first_step(self, problem: Problem) -> float | Tensor:
        """One over the expected smoothness of the sampling and the ridge."""
        return resolve_step(self.step, problem, lambda: self._smoothness(problem))

    def init(self, problem: Problem, x0: Tensor | None) -> SampledState:
        """The first step."""
        return SampledState(x0, self.first_step(problem))

    def advance(self, problem: Problem, state: SampledState, k: int, generator: torch.Generator | None) -> SampledState:
        """A proximal step along the sampled gradient."""
        x = state.x
        step = state.step * resolve_decay(self.decay).factor(k)
        direction = problem.sampled_descent(x, self.draw(problem, x, generator))
        return state._replace(x=problem.prox(accumulate(x, step, direction), step))


class ReferenceState(NamedTuple):
    """The point, the reference point, the full negative gradient there, and the step."""

    x: Tensor | None
    reference: Tensor | None
    anchor: Tensor
    linear: Tensor
    step: float | Tensor


@dataclasses.dataclass(frozen=True)
class SVRG(InputSampler):
    r"""Variance-reduced proximal stochastic gradient with mini-batches: mS2GD, and S2GD for ``tau=1``.

    Around a reference point :math:`\tilde x` with its full gradient, the inner step is

    .. math::

        x \leftarrow \operatorname{prox}_{\eta g}\bigl(x - \eta\,[\nabla f(\tilde x)
            + A\,(w\odot A^\top(x - \tilde x)) + \lambda(x - \tilde x)]\bigr),

    and after ``inner`` of them the reference moves to x. From zero the first inner step is the plain block
    without noise; the additive dropout noise starts at the second ([Bibi2019], Proposition 2 and eq. 31).

    Args:
        outer: Reference points.
        inner: Inner steps around each.
        tau: As in :class:`ProxSG`.
        step: Automatic: :math:`1/(2(\mathcal{L} + 2\rho))` with the expected smoothness :math:`\mathcal{L}` of
            τ-nice sampling and its residual :math:`\rho = \frac{n-\tau}{\tau(n-1)}L_{\max}` (Sebbouh et al.,
            2019): half of 1/L where every input is sampled.
        shared_sample: As in :class:`ProxSG`.

    Source: Konečný, Liu, Richtárik & Takáč, 2016; [Bibi2019], appendix H.

    >>> from minimand.functions import NonNegative
    >>> from minimand.operators import Dense
    >>> from minimand.solvers import solve
    >>> A, y = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 1.0]])
    >>> solve(Problem(Dense(A), NonNegative(), y), SVRG(inner=1, step=1.0)).x  # the plain block
    tensor([[1.]])
    """

    outer: int = 1
    inner: int = 10
    tau: float | int | None = None
    step: StepSize = "auto"
    sampling: str | Sampling = dataclasses.field(default="nice", kw_only=True)
    shared_sample: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        require_count("outer", self.outer)
        require_count("inner", self.inner)
        self._check_options()

    @property
    def iterations(self) -> int:
        """Inner steps altogether."""
        return self.outer * self.inner

    def init(self, problem: Problem, x0: Tensor | None) -> ReferenceState:
        """``A y + b`` and the step, once."""
        linear = problem.linear()
        return ReferenceState(x0, x0, linear, linear, self.first_step(problem))

    def first_step(self, problem: Problem) -> float | Tensor:
        """A step that is shorter than 1/L, because the remaining noise requires it."""
        return resolve_step(self.step, problem, lambda: self._reduced(problem))

    def _reduced(self, problem: Problem) -> Tensor:
        n, size = problem.operator.inputs, self._size(problem)
        residual = (n - size) / (size * max(n - 1, 1)) * n * problem.operator.input_norms_sq().amax(-1)
        return 2 * (self._smoothness(problem) + 2 * problem.curved(residual))

    def advance(
        self, problem: Problem, state: ReferenceState, k: int, generator: torch.Generator | None
    ) -> ReferenceState:
        """A variance-reduced step; every ``inner``-th starts from a fresh reference and has no noise."""
        x, step = state.x, state.step
        if k % self.inner == 0:
            anchor = problem.descent(x, state.linear)
            state = state._replace(reference=x, anchor=anchor)
            direction = anchor
        else:
            assert x is not None
            change = problem.sampled_change(x, state.reference, self.draw(problem, x, generator))
            direction = state.anchor - change
        return state._replace(x=problem.prox(accumulate(x, step, direction), step))

"""Solver layers.

The block dropout → linear → activation is one step of a solver on the layer's problem
(:class:`~minimand.solvers.Problem`). A solver layer takes several steps with the same parameters.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from ..arguments import checked
from ..errors import (
    CapabilityError,
    MinimandError,
    Sealed,
    located,
    require_dtype,
    require_real,
)
from ..functions import Function, Separable, from_activation
from ..functions.base import widened
from ..functions.scalar import mean_preactivation
from ..linalg import mixed_precision
from ..norms.lipschitz import Bounded, majorant
from ..operators import Dense, LinearOperator, LipschitzTracker
from ..solvers import Problem, ProxGD, Solver
from ..solvers.adjoints import Adjoint, Run, Unroll
from .exporting import require_exportable
from .options import EvalMode, Returns, SolverOptions

__all__ = ["SolverLayer", "SolverLinear"]


class _Option:
    """An attribute of a layer that reads and writes a field of its options; new values are checked."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: "SolverLayer", owner: type) -> Any:
        return self if layer is None else getattr(layer.options, self.name)

    def __set__(self, layer: "SolverLayer", value: Any) -> None:
        vars(layer)["options"] = dataclasses.replace(layer.options, **{self.name: value})
        layer._track()


class SolverLayer(Sealed, nn.Module, abc.ABC):
    """The base class of solver layers, whose forward pass runs a solver.

    ``weight`` and ``bias`` are the only entries of the ``state_dict``. The step is recomputed when the weight changes.
    The options can be read and set as attributes: ``layer.eval_mode = "mean"``. Set ``generator`` to a
    :class:`torch.Generator` to seed the samples of this layer alone.

    A layer in half precision computes in float32. Under bfloat16 autocast only its products are in bfloat16; under
    float16 autocast, whose range Gram matrices leave, it computes in float32. The output has the type of a plain
    layer's. NaN and Inf in an input pass through, as in torch's layers, so that a ``GradScaler`` sees them in the
    gradients; an output beyond the range of its type is Inf. :func:`~minimand.solvers.solve` raises an error instead.
    """

    #: The attributes that a layer shares with its plain form.
    _sizes: ClassVar[tuple[str, ...]]
    _settable = ("generator", "path", "returns")
    #: "preactivation": a point whose activation is the solution, for a network that applies the activation itself.
    returns: Returns = "solution"

    weight: nn.Parameter
    bias: nn.Parameter | None

    solver = _Option()
    adjoint = _Option()
    ridge = _Option()
    eval_mode = _Option()
    shared_sample = _Option()
    mean_passes = _Option()

    def __init__(self, activation: str | nn.Module | Function, options: SolverOptions) -> None:
        super().__init__()
        self.function = activation if isinstance(activation, Function) else from_activation(activation)
        self.options = options
        self.generator: torch.Generator | None = None
        #: The path of the layer in the converted network.
        self.path = ""

    @classmethod
    def from_plain(
        cls,
        plain: nn.Module,
        activation: str | nn.Module | Function,
        options: SolverOptions,
        returns: Returns = "solution",
    ) -> Self:
        """The solver form of a plain layer; the Parameters are shared, not copied."""
        self = cls.__new__(cls)
        SolverLayer.__init__(self, activation, options)
        self.returns = returns
        self._take(plain)
        self._seal()
        return self.train(plain.training)

    def _take(self, plain: nn.Module) -> None:
        """Take the sizes of a plain layer, and its Parameters, the same objects, so that optimizers keep working."""
        for name in self._sizes:
            setattr(self, name, getattr(plain, name))
        self.register_parameter("weight", cast(nn.Parameter, plain.weight))
        self.register_parameter("bias", cast(nn.Parameter | None, plain.bias))
        self._track()

    @abc.abstractmethod
    def operator(self, y: Tensor | None = None) -> LinearOperator:
        """The layer's linear map, for inputs of the size of ``y``."""

    @property
    def tracker(self) -> LipschitzTracker:
        """The tracker of the layer's norm, for the weight that the layer has now."""
        self._tracker.operator = self._working_operator
        return self._tracker

    def _working_operator(self) -> LinearOperator:
        """The layer's linear map, in float32 for half precision."""
        operator = self.operator()
        return operator.with_weight(widened(operator.weight))

    def problem(self, y: Tensor, skip: Tensor | None = None) -> Problem:
        """The layer's problem for the input ``y``, in float32 for half precision; ``skip`` is added to the bias."""
        operator = self.operator(y)
        operator.check_input(y)
        # The operator's own weight: another thread may replace the layer's at any time.
        operator = self._bounded(operator, operator.weight)
        bias: Tensor | None = self.bias
        if skip is not None:
            bias = skip if bias is None else skip + operator.per_feature(bias)
        return Problem(operator, self.function, y, bias, self.options.ridge).working()

    def forward(self, y: Tensor, skip: Tensor | None = None) -> Tensor:
        """Run the solver; ``eval_mode`` decides how in evaluation."""
        return self.solved(y, lambda: self.problem(y, skip))

    def solved(self, y: Tensor, problem_of_input: Callable[[], Problem]) -> Tensor:
        """What the layer returns for the problem of an input."""
        solver, passes = self.options.resolved(self.training)
        try:
            require_exportable(self.options, self.training)
            # Clear errors for inputs that torch's own layer would reject.
            require_real("the input", y)
            require_dtype("the input", y, self.weight)
            context, dtype = mixed_precision(y)
            with context:
                problem = solver.prepare(problem_of_input())
                ending = dataclasses.replace(problem, preactivated=True) if self.returns == "preactivation" else None
                run = Run(problem, solver, generator=self.generator, ending=ending)
                answers = [problem.as_given(self.options.adjoint(run)[0]) for _ in range(passes)]
        except MinimandError as error:
            raise located(error, self.path or type(self).__name__) from None
        x = answers[0]
        if passes > 1:
            samples = torch.stack(answers)
            x = samples.mean(0) if ending is None else mean_preactivation(cast(Separable, self.function), samples)
        return x if x.dtype is dtype else x.to(dtype)

    def _bounded(self, operator: LinearOperator, weight: Tensor) -> LinearOperator:
        """The operator with a weight, in float32 for half precision, and that weight's bounds."""
        weight = widened(weight)
        operator = operator if weight is operator.weight else operator.with_weight(weight)
        return operator.with_bounds(self._tracker.bounds(weight))

    def _track(self) -> None:
        operator, solver = self.operator(), self.options.solver
        solver.check(operator, self.function)
        partial = self.returns == "preactivation" and solver.updates_some
        if partial and float(self.function.prox(torch.zeros(1))) != 0:
            raise CapabilityError(
                f"{type(solver).__name__} leaves outputs at 0, which {self.function} never returns, so the activation "
                f"cannot stay in the network; use ProxSG, or a SolverLinear or SolverConv2d in its place"
            )
        # Stochastic solvers also need the norms of the columns or rows.
        self._tracker = LipschitzTracker(operator, inputs=solver.stochastic, outputs=solver.stochastic)
        self._tracker.train(self.training)

    def extra_repr(self) -> str:
        """The description that ``print`` shows."""
        options, defaults = self.options, SolverOptions()
        parts = [str(getattr(self, name)) for name in self._sizes[:2]]
        parts += [f"{name}={getattr(self, name)}" for name in self._sizes[2:]]
        parts += [f"bias={self.bias is not None}", f"activation={self.function}", f"solver={options.solver}"]
        parts += [
            f"{field.name}={getattr(options, field.name)!r}"
            for field in dataclasses.fields(options)
            if field.name != "solver" and getattr(options, field.name) != getattr(defaults, field.name)
        ]
        return ", ".join(parts)

    def __getstate__(self) -> dict[str, Any]:
        # A generator cannot be pickled.
        return self.__dict__ | {"generator": None}


@majorant.register
def _(target: SolverLayer, input_size: int | tuple[int, ...] | None) -> tuple[Bounded, float]:
    return majorant(target.operator(), input_size)


@checked
class SolverLinear(SolverLayer):
    r"""A fully connected layer with activation that approximately solves its problem

    .. math:: y \mapsto \arg\min_x\; \tfrac12\|A^\top x - y\|^2 - \langle b,x\rangle + \tfrac\lambda2\|x\|^2 + g(x)

    by a fixed number of iterations from zero. It replaces ``Dropout → Linear → activation`` and has the same
    parameters. With one iteration, unit step and no ridge it equals that block to the bit. Inputs may have any leading
    dimensions.

    Args:
        in_features: Size of the inputs.
        out_features: Size of the outputs.
        bias: Whether the layer has a bias.
        activation: A name, a module or a :class:`~minimand.functions.Function`.
        solver: The method and its number of iterations. Sampling by a stochastic solver replaces dropout.
        adjoint: How gradients are computed through the solver.
        ridge: λ.
        eval_mode: See :class:`SolverOptions`.
        shared_sample: See :class:`SolverOptions`.
        mean_passes: See :class:`SolverOptions`.

    Source: [Bibi2019], §3.2 and §4.

    >>> layer = SolverLinear(8, 3, solver=ProxGD(iters=1, step=1.0))
    >>> y = torch.randn(5, 8)
    >>> plain = torch.relu(torch.nn.functional.linear(y, layer.weight, layer.bias))
    >>> torch.equal(layer(y), plain)
    True
    """

    _sizes = ("in_features", "out_features")

    in_features: int
    out_features: int

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str | nn.Module | Function = "relu",
        solver: Solver = ProxGD(),  # noqa: B008 -- frozen
        adjoint: Adjoint = Unroll(),  # noqa: B008 -- frozen
        ridge: float = 1e-3,
        eval_mode: EvalMode = "stochastic",
        shared_sample: bool = False,
        mean_passes: int = 16,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options = SolverOptions(solver, adjoint, ridge, eval_mode, shared_sample, mean_passes)
        super().__init__(activation, options)
        self._take(nn.Linear(in_features, out_features, bias, device=device, dtype=dtype))

    def operator(self, y: Tensor | None = None) -> Dense:
        """The weight as an operator."""
        return Dense(self.weight)

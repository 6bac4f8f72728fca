"""Solver layers.

The block dropout → linear → activation is one step of a solver on the layer's problem
(:class:`~minimand.solvers.Problem`). A solver layer takes several steps with the same parameters.
"""

import abc
import contextlib
import dataclasses
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from ..arguments import checked
from ..errors import CapabilityError, MinimandError, Sealed, ShapeError, located, require_dtype, require_real
from ..functions import Function, Separable, from_activation
from ..functions.base import widened
from ..functions.scalar import mean_preactivation
from ..linalg import is_zero, mixed_precision
from ..network.state import preserved
from ..norms.lipschitz import Bounded, majorant
from ..operators import Dense, LinearOperator, LipschitzTracker
from ..solvers import Problem, ProxGD, Solver
from ..solvers.adjoints import Adjoint, Run, Unroll
from ..solvers.implicit import Parts
from ..solvers.rows import solve_rows
from ..tracing import in_transform, is_traced
from .activation import present, register
from .exporting import Unscripted, require_exportable
from .options import EvalMode, Option, Returns, SolverOptions, check_strength

__all__ = ["COMPUTED", "SolverLayer", "SolverLinear"]

#: The tensors of a layer that a parametrisation or a hook may compute.
COMPUTED = ("weight", "bias")
_COPYING = ("__getstate__", "__deepcopy__")

# A learned strength in training is not below this, so that it has a gradient at zero, too.
_LEAST_STRENGTH = 1e-6


class SolverLayer(Sealed, Unscripted, nn.Module, abc.ABC):
    """The base class of solver layers, whose forward pass runs a solver.

    ``weight`` and ``bias`` are the only entries of the ``state_dict``, besides the Parameters that the activation is
    made of, as in ``L1(nn.Parameter(torch.tensor(0.1)))``. The step is recomputed when the weight changes.
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
    #: Whether the step is to be renewed in the next forward pass, where that happens once an epoch.
    _due: bool = False
    #: The last pre-activation, if the next run starts from it (:func:`~minimand.nn.warm_start`).
    _memory: list[Tensor] | None = None

    solver = Option()
    adjoint = Option()
    ridge = Option()
    eval_mode = Option()
    shared_sample = Option()
    mean_passes = Option()
    start = Option()
    refresh = Option()
    tol = Option()

    def __init__(self, activation: str | nn.Module | Function, options: SolverOptions) -> None:
        super().__init__()
        self._function = activation if isinstance(activation, Function) else from_activation(activation)
        self.options = options.filled("zero", "stochastic")
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
        if (given := plain._parameters.get("weight")) is not None and 0 in given.shape:
            raise ShapeError(f"a solver layer needs inputs and outputs, but its weight has shape {tuple(given.shape)}")
        for name, parameter in plain._parameters.items():
            self.register_parameter(name, parameter)
        if self.returns == "solution":
            # The layer applies its activation, so the parameters of one that learns are the layer's own.
            register(self, self._function)
        if self.options.learn_strength:
            # Not by register_parameter, which the property of this name forbids.
            like = next(plain.parameters())
            self._parameters["strength"] = nn.Parameter(like.new_tensor(self.options.strength))
        if "parametrizations" in plain._modules:
            # As torch does: computed tensors are properties of a class of the module's own.
            self._modules["parametrizations"] = plain._modules["parametrizations"]
            special = {name: value for name, value in vars(type(plain)).items() if name in (*COMPUTED, *_COPYING)}
            self.__class__ = type(type(self).__name__, (type(self),), special)
        # Weights that hooks compute, such as those of pruning, are attributes; the hooks come with the others.
        vars(self).update({name: vars(plain)[name] for name in COMPUTED if name in vars(plain)})
        # Reading a spectrally normalised weight in training changes its state.
        with preserved(plain) if "parametrizations" in plain._modules else contextlib.nullcontext():
            self._track()

    def _seal(self) -> None:
        super()._seal()
        vars(self)["_sealed"] -= set(vars(self)).intersection(COMPUTED)

    @abc.abstractmethod
    def operator(self, y: Tensor | None = None) -> LinearOperator:
        """The layer's linear map, for inputs of the size of ``y``."""

    @property
    def function(self) -> Function:
        """The function whose prox is the activation, with the parameters that the layer has now."""
        return present(self, self._function)

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
        return Problem(operator, self.function.current(y.dim()), y, bias, self.options.ridge).working()

    @property
    def strength(self) -> float | nn.Parameter:
        """The factor of the steps, in [0, 1]; a Parameter if it is learned. It can be set to a number at any time."""
        learned = self._parameters.get("strength")
        return cast(float, self.options.strength) if learned is None else learned

    @strength.setter
    def strength(self, strength: float) -> None:
        self._set_strength(strength)

    def _set_strength(self, strength: float) -> None:
        check_strength(strength)
        learned = self._parameters.get("strength")
        if learned is None:
            vars(self)["options"] = self.options.with_strength(strength)
        else:
            learned.data.fill_(strength)

    def __setattr__(self, name: str, value: Any) -> None:
        # A module refuses numbers for the name of a Parameter. Those of a replica for data parallelism are tensors.
        if name == "strength" and getattr(self, "_is_replica", False):
            vars(self)["_copied"] = value
        elif name == "strength" and not (isinstance(value, nn.Parameter) and "strength" in self._parameters):
            self._set_strength(value)
        else:
            super().__setattr__(name, value)

    def plain(self, y: Tensor, skip: Tensor | None = None) -> Tensor:
        """The plain layer before its activation."""
        operator = self.operator(y)
        operator.check_input(y)
        out = operator.affine(y, self.bias)
        return out if skip is None else out + skip

    def forward(self, y: Tensor, skip: Tensor | None = None) -> Tensor:
        """Run the solver; ``eval_mode`` decides how in evaluation."""
        return self.solved(y, skip)

    def solved(self, y: Tensor, *others: Tensor | None) -> Tensor:
        """What the layer returns for an input and what else its problem is made of."""
        (solver, passes), strength = self.options.resolved(self.training), self._factor()
        # Every draw of a plain start counts as a sample.
        steady = self.options.start == "plain" and not self.options.samples(self.training)
        try:
            require_exportable(self.options, self.training)
            # Clear errors for inputs that torch's own layer would reject.
            require_real("the input", y)
            # A computed weight is read once, in the problem.
            computed = "parametrizations" in self._modules
            require_dtype("the input", y, next(self.parameters(), y) if computed else self.weight)
            if steady and (is_zero(strength) or solver.iterations == 1):
                plain = self.plain(y, *others)
                return plain if self.returns == "preactivation" else self.function.current(y.dim()).prox(plain)
            context, dtype = mixed_precision(y)
            with context:
                problem = self.problem(y, *others)
                answers = [self._answer(problem, solver, strength) for _ in range(passes)]
        except MinimandError as error:
            raise located(error, self.path or type(self).__name__) from None
        x = answers[0]
        if passes > 1:
            samples, function = torch.stack(answers), cast(Separable, problem.function)
            x = samples.mean(0) if self.returns == "solution" else mean_preactivation(function, samples)
        return x if x.dtype is dtype else x.to(dtype)

    def _factor(self) -> float | Tensor:
        """The factor of the steps. A learned one is clamped, and above zero, so that it has a gradient there."""
        learned = self._parameters.get("strength", vars(self).get("_copied"))
        if learned is None:
            return cast(float, self.options.strength)
        if not is_traced(learned):
            if self.training and isinstance(learned, nn.Parameter) and not in_transform():
                learned.data.clamp_(0, 1)
            elif not self.training and self.options.start == "plain" and float(learned.detach()) <= 0:
                return 0.0
        return (1 - _LEAST_STRENGTH) * widened(learned).clamp(0, 1) + _LEAST_STRENGTH

    def _answer(self, given: Problem, solver: Solver, strength: float | Tensor) -> Tensor:
        """A pass of the solver: its solution, or the pre-activation of that."""
        preactivated, start, memory = self.returns == "preactivation", None, self._memory
        plain = self.options.start == "plain"
        if plain:
            start = solver.plain(given, self.generator)
            if is_zero(strength) or solver.iterations == 1:
                return start if preactivated else given.function.prox(start)
            if not self.options.samples(self.training):
                given = dataclasses.replace(given, affine=start)
        begin = start
        if memory and memory[0].shape == given.shape and memory[0].dtype == given.y.dtype:
            # What the iterations added to the plain layer; or their result, where they start from zero.
            start = memory[0] if begin is None else begin + memory[0]
        problem = solver.prepare(given)
        # Methods that update some entries only keep pre-activations, and need the one that they start from.
        through = preactivated or memory is not None or (start is not None and solver.updates_some)
        ending = dataclasses.replace(problem, preactivated=True) if through else None
        solver = self.options.paced(solver)
        solver = solver if isinstance(strength, float) and strength == 1 else solver.weakened(strength)
        run = Run(problem, solver, generator=self.generator, ending=ending, start=start, made=int(plain))
        x = solve_rows(run, cast(float, self.tol)) if self._stops_early(given) else self.options.adjoint(run)[0]
        if memory is not None:
            memory[:] = [x.detach() if begin is None else (x - begin).detach()]
        return problem.as_given(x if preactivated else run.solution(x))

    def _stops_early(self, problem: Problem) -> bool:
        if self.tol is None or self.training or is_traced(problem.y):
            return False
        tensors = (*Parts.of(problem).tensors, *self.parameters())
        needed = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        return not needed and problem.y.dim() > problem.input_dims

    def _bounded(self, operator: LinearOperator, weight: Tensor) -> LinearOperator:
        """The operator with a weight, in float32 for half precision, and that weight's bounds."""
        weight = widened(weight)
        operator = operator if weight is operator.weight else operator.with_weight(weight)
        if self._due:
            self._tracker.refresh(weight)
            self._due = False
        return operator.with_bounds(self._tracker.bounds(weight))

    def _track(self) -> None:
        operator, solver = self.operator(), self.options.solver
        solver.check(operator, self.function)
        partial = self.returns == "preactivation" and solver.updates_some
        if partial and float(self.function.prox(torch.zeros(1)).detach()) != 0:
            raise CapabilityError(
                f"{type(solver).__name__} leaves outputs at 0, which {self.function} never returns, so the activation "
                f"cannot stay in the network; use ProxSG, or a SolverLinear or SolverConv2d in its place"
            )
        if operator.weight.grad_fn is not None:  # computed tensors with a gradient cannot be copied
            operator = operator.with_weight(operator.weight.detach())
        # Stochastic solvers also need the norms of the columns or rows.
        policy = "quick" if self.options.start == "plain" else "drift"
        policy = policy if self.options.refresh == "drift" else "manual"
        parts = {"inputs": solver.stochastic, "outputs": solver.stochastic}
        self._tracker = LipschitzTracker(operator, refresh=policy, **parts)
        self._tracker.train(self.training)
        self._due = policy == "manual"

    def train(self, mode: bool = True) -> Self:
        """Set the mode; a step that is renewed once an epoch is renewed in the next forward pass."""
        self._due = self.options.refresh == "epoch"
        return super().train(mode)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self._due = self.options.refresh == "epoch"
        if (learned := self._parameters.get("strength")) is not None and f"{prefix}strength" not in state_dict:
            # A checkpoint of before the conversion has no strength.
            state_dict = {**state_dict, f"{prefix}strength": learned.detach().clone()}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        """The description that ``print`` shows."""
        options, defaults = self.options, SolverOptions().filled("zero", "stochastic")
        parts = [str(getattr(self, name)) for name in self._sizes[:2]]
        parts += [f"{name}={getattr(self, name)}" for name in self._sizes[2:]]
        parts += [f"bias={self.bias is not None}", f"activation={self.function}", f"solver={options.solver}"]
        parts += [
            f"{field.name}={getattr(options, field.name)!r}"
            for field in dataclasses.fields(options)
            if field.name not in ("solver", "strength")
            and getattr(options, field.name) != getattr(defaults, field.name)
        ]
        strength = torch.as_tensor(self.strength).detach()
        if not is_traced(next(self.parameters(), strength)) and float(strength) != 1:
            parts.append(f"strength={float(strength):.3g}")
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
        super().__init__(activation, SolverOptions(solver, adjoint, ridge, eval_mode, shared_sample, mean_passes))
        self._take(nn.Linear(in_features, out_features, bias, device=device, dtype=dtype))

    def operator(self, y: Tensor | None = None) -> Dense:
        """The weight as an operator."""
        return Dense(self.weight)

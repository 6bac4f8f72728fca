r"""Layers that are solvers.

A block dropout → linear → activation is one step of a solver on the layer's problem
(:class:`~minimand.solvers.Problem`). These layers take several steps, with the same parameters.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self, cast, get_args

import torch
from torch import Tensor, nn

from ..errors import CapabilityError, MinimandError, OptionError, located, require_dtype, require_positive, require_real
from ..functions import Function, from_activation
from ..norms.lipschitz import Bounded, majorant
from ..operators import Conv1d, Conv2d, Dense, LinearOperator, LipschitzTracker
from ..solvers import Problem, ProxGD, Solver
from ..solvers.adjoints import Adjoint, Run, Unroll
from ..solvers.base import require_count

__all__ = ["EvalMode", "SolverConv1d", "SolverConv2d", "SolverLayer", "SolverLinear", "SolverOptions"]

EvalMode = Literal["stochastic", "mean", "deterministic"]


@dataclasses.dataclass(frozen=True)
class SolverOptions:
    """Everything about a solver layer but its sizes: what a conversion rule may say.

    Args:
        solver: The method and its number of iterations.
        adjoint: How gradients pass through it.
        ridge: The strongly convex term λ.
        eval_mode: What happens in ``eval()``: ``"stochastic"`` samples as in training, ``"mean"`` averages
            ``mean_passes`` samples of the output, ``"deterministic"`` takes the same steps along full gradients.
        shared_sample: One sample for the whole batch, and a step costs only the share of the inputs it sees; otherwise
            every row draws its own.
        mean_passes: How many passes ``"mean"`` averages.
    """

    solver: Solver = ProxGD()  # noqa: RUF009 -- frozen
    adjoint: Adjoint = Unroll()  # noqa: RUF009 -- frozen
    ridge: float = 1e-3
    eval_mode: EvalMode = "stochastic"
    shared_sample: bool = False
    mean_passes: int = 16

    def __post_init__(self) -> None:
        if not isinstance(self.solver, Solver):
            raise OptionError(f"solver must be a minimand solver such as ProxGD(iters=10), got {self.solver!r}")
        if not isinstance(self.adjoint, Adjoint):
            raise OptionError(f"adjoint must be one of minimand.adjoints, got {self.adjoint!r}")
        require_positive("ridge", self.ridge, zero=True)
        require_count("mean_passes", self.mean_passes)
        if self.eval_mode not in get_args(EvalMode):
            raise OptionError(f"eval_mode is one of {', '.join(get_args(EvalMode))}, got {self.eval_mode!r}")
        self.adjoint.check(self.solver)

    def resolved(self, training: bool) -> tuple[Solver, int]:
        """The solver that runs in this mode, and how many of its answers are averaged."""
        solver = self.solver
        if not solver.stochastic:
            return solver, 1
        if not training and self.eval_mode == "deterministic":
            return solver.noiseless(), 1
        if self.shared_sample:
            solver = dataclasses.replace(solver, shared_sample=True)  # type: ignore[call-arg]
        return solver, 1 if training or self.eval_mode != "mean" else self.mean_passes


class _Option:
    """An attribute of a layer that is a field of its options: read there, and checked when it is set."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: "SolverLayer", owner: type) -> Any:
        return self if layer is None else getattr(layer.options, self.name)

    def __set__(self, layer: "SolverLayer", value: Any) -> None:
        layer.options = dataclasses.replace(layer.options, **{self.name: value})
        layer._track()


class SolverLayer(nn.Module, abc.ABC):
    """What solver layers share: the forward pass is a solve.

    ``weight`` and ``bias`` are the only entries of the ``state_dict``; the step follows the weight wherever it goes.
    The options can be read and set as attributes: ``layer.eval_mode = "mean"``. ``generator`` may be set to a
    :class:`torch.Generator` to seed this layer's samples alone.
    """

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
        #: The path of the layer in the network that it was converted in.
        self.path = ""

    @abc.abstractmethod
    def operator(self, y: Tensor | None = None) -> LinearOperator:
        """The layer's linear map, for inputs of the size of ``y``."""

    def problem(self, y: Tensor, skip: Tensor | None = None) -> Problem:
        """The problem that the layer solves for the input ``y``; ``skip`` is added to the bias."""
        operator = self.operator(y)
        operator.check_input(y)
        operator = operator.with_bounds(self.tracker.bounds(self.weight))
        bias: Tensor | None = self.bias
        if skip is not None:
            bias = skip if bias is None else skip + operator.per_feature(bias)
        return Problem(operator, self.function, y, bias, self.options.ridge)

    def forward(self, y: Tensor, skip: Tensor | None = None) -> Tensor:
        """Solve; in evaluation as ``eval_mode`` says."""
        solver, passes = self.options.resolved(self.training)
        try:
            self._check(y)
            problem = solver.prepare(self.problem(y, skip))
        except MinimandError as error:
            raise located(error, self.path or type(self).__name__) from None
        run = Run(problem, solver, generator=self.generator)
        answers = [problem.as_given(self.options.adjoint(run)[0]) for _ in range(passes)]
        return answers[0] if passes == 1 else torch.stack(answers).mean(0)

    def _check(self, y: Tensor) -> None:
        """Refuse what torch's own layer would refuse, in a sentence."""
        require_real("the input", y)
        require_dtype("the input", y, self.weight)

    def _adopt(self, plain: nn.Module) -> None:
        """Take the parameters of a plain layer over as they are, so that whoever holds them still does."""
        self.register_parameter("weight", cast(nn.Parameter, plain.weight))
        self.register_parameter("bias", cast(nn.Parameter | None, plain.bias))
        self._track()

    def _track(self) -> None:
        operator, solver = self.operator(), self.options.solver
        solver.check(operator, self.function)
        # A stochastic solver asks for the norms of the columns or rows, too.
        self.tracker = LipschitzTracker(operator, inputs=solver.stochastic, outputs=solver.stochastic)
        self.tracker.train(self.training)

    def _describe(self) -> str:
        options = self.options
        parts = [f"activation={self.function}", f"solver={options.solver}"]
        defaults = SolverOptions()
        parts += [
            f"{field.name}={getattr(options, field.name)!r}"
            for field in dataclasses.fields(options)
            if field.name != "solver" and getattr(options, field.name) != getattr(defaults, field.name)
        ]
        return ", ".join(parts)

    def __getstate__(self) -> dict[str, Any]:
        # A generator is a resource of the process, not a part of the model.
        return self.__dict__ | {"generator": None}


@majorant.register
def _(target: SolverLayer, input_size: int | tuple[int, ...] | None) -> tuple[Bounded, float]:
    return majorant(target.operator(), input_size)


class SolverLinear(SolverLayer):
    r"""A fully connected layer with activation that solves its problem instead of taking one step of it:

    .. math:: y \mapsto \arg\min_x\; \tfrac12\|A^\top x - y\|^2 - \langle b,x\rangle + \tfrac\lambda2\|x\|^2 + g(x)

    approximately, by a fixed number of iterations from zero. It takes the place of
    ``Dropout → Linear → activation``, with the same parameters; at one iteration, unit step and no ridge it *is* that
    block. Inputs may have any leading dimensions.

    Args:
        in_features: n1.
        out_features: n2.
        bias: Whether there is a bias.
        activation: A name, a module or a :class:`~minimand.functions.Function`.
        solver: The method and its iterations; a stochastic one plays the role of dropout.
        adjoint: How gradients pass through it.
        ridge: λ.
        eval_mode: See :class:`SolverOptions`.
        shared_sample: See :class:`SolverOptions`.
        mean_passes: See :class:`SolverOptions`.

    Source: 000, §3.2 and §4.

    >>> layer = SolverLinear(8, 3, solver=ProxGD(iters=1, step=1.0))
    >>> y = torch.randn(5, 8)
    >>> plain = torch.relu(torch.nn.functional.linear(y, layer.weight, layer.bias))
    >>> torch.equal(layer(y), plain)
    True
    """

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
        self.in_features, self.out_features = in_features, out_features
        plain = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self._adopt(plain)

    @classmethod
    def from_plain(cls, plain: nn.Linear, activation: str | nn.Module | Function, options: SolverOptions) -> Self:
        """The solver form of a plain layer; the Parameters are shared, not copied."""
        self = cls.__new__(cls)
        SolverLayer.__init__(self, activation, options)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self._adopt(plain)
        return self.train(plain.training)

    def operator(self, y: Tensor | None = None) -> Dense:
        """The weight as an operator."""
        return Dense(self.weight)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self._describe()}"


class _SolverConv(SolverLayer):
    """What convolutional solver layers of one and two dimensions share."""

    _plain: ClassVar[type[nn.Conv1d] | type[nn.Conv2d]]
    _operator: ClassVar[type[Conv1d] | type[Conv2d]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] | str = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
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
        make: Callable[..., Any] = self._plain
        sizes = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
        self._take(make(*sizes, device=device, dtype=dtype))

    @classmethod
    def from_plain(
        cls, plain: nn.Conv1d | nn.Conv2d, activation: str | nn.Module | Function, options: SolverOptions
    ) -> Self:
        """The solver form of a plain layer; the Parameters are shared, not copied."""
        if plain.padding_mode != "zeros":
            raise CapabilityError(
                f"padding_mode={plain.padding_mode!r} is not the adjoint of a transposed convolution; "
                f"only zero padding can be solved for"
            )
        self = cls.__new__(cls)
        SolverLayer.__init__(self, activation, options)
        self._take(plain)
        return self.train(plain.training)

    def _take(self, plain: nn.Conv1d | nn.Conv2d) -> None:
        self.in_channels, self.out_channels = plain.in_channels, plain.out_channels
        self.kernel_size, self.stride, self.padding = plain.kernel_size, plain.stride, plain.padding
        self.dilation, self.groups = plain.dilation, plain.groups
        self._adopt(plain)

    def operator(self, y: Tensor | None = None) -> Conv1d | Conv2d:
        """The weight as an operator on maps of the size of ``y``, or of any size."""
        size = None if y is None else tuple(y.shape[2 - self.weight.dim() :])
        return self._operator(self.weight, size, self.stride, self.padding, self.dilation, self.groups)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        sizes = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        rest = f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}"
        return f"{sizes}, {rest}, bias={self.bias is not None}, {self._describe()}"


class SolverConv2d(_SolverConv):
    """The convolutional :class:`SolverLinear`: takes the place of ``Dropout2d → Conv2d → activation``.

    Sizes are those of :class:`torch.nn.Conv2d`, options those of :class:`SolverLinear`; samples are of whole
    channels. The step holds for every map size.

    >>> layer = SolverConv2d(3, 4, 3, padding=1, solver=ProxGD(iters=1, step=1.0))
    >>> y = torch.randn(2, 3, 8, 8)
    >>> plain = torch.nn.functional.conv2d(y, layer.weight, layer.bias, padding=1)
    >>> torch.equal(layer(y), torch.relu(plain))
    True
    """

    _plain = nn.Conv2d
    _operator = Conv2d


class SolverConv1d(_SolverConv):
    """As :class:`SolverConv2d`, in one dimension.

    >>> SolverConv1d(3, 4, 5, stride=2)(torch.randn(2, 3, 11)).shape
    torch.Size([2, 4, 4])
    """

    _plain = nn.Conv1d
    _operator = Conv1d

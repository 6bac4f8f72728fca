"""The options of solver layers."""

import dataclasses
from typing import Any, Literal, Self, get_args

from ..errors import CapabilityError, OptionError, require_positive
from ..solvers import ProxGD, Solver
from ..solvers.adjoints import Adjoint, Unroll
from ..solvers.base import require_count, require_flag

__all__ = ["EvalMode", "Option", "Refresh", "Returns", "SolverOptions", "Start", "check_strength"]

EvalMode = Literal["stochastic", "mean", "deterministic"]
Start = Literal["plain", "zero"]
Refresh = Literal["drift", "epoch"]
#: What a layer returns: the solution, or a point whose activation is the solution.
Returns = Literal["solution", "preactivation"]

# The sum of the default strengths over all further iterations of a converted network, and the largest of them. With
# these, conversion cost validation networks of five kinds at most half a point of accuracy.
_TOTAL_STRENGTH = 0.3
_LARGEST_STRENGTH = 0.1


@dataclasses.dataclass(frozen=True)
class SolverOptions:
    """The options of a solver layer: everything but its sizes and activation. A conversion rule may set them.

    Args:
        solver: The method and its number of iterations.
        adjoint: How gradients are computed through the solver.
        ridge: The weight λ of the term (λ/2)‖x‖².
        eval_mode: The behaviour in ``eval()``: ``"stochastic"`` samples as in training, ``"mean"`` averages
            ``mean_passes`` samples of the output, ``"deterministic"`` takes the same steps along full gradients. None:
            deterministic in a converted network, stochastic in a layer that is made as such.
        shared_sample: Draw one sample for the whole batch; a step then costs only the sampled share of the inputs.
            Otherwise every row draws its own sample.
        mean_passes: The number of passes that ``"mean"`` averages.
        start: ``"plain"``: the first iteration is the plain layer, with the solver's sample as its dropout, and the
            others go on from there at ``strength`` times the solver's step. ``"zero"``: all iterations are the
            solver's, from zero. None: plain in a converted network, unless the adjoint is that of the minimiser, and
            zero in a layer that is made as such.
        strength: A number in [0, 1] by which steps are multiplied. At 0 a layer that starts from the plain one *is* the
            plain one. Methods without a step move pre-activations by this share of the way instead (ADMM: by its
            relaxation). None: 1 from zero. From the plain start 0.3, divided by the number of iterations beyond the
            first of all layers that are converted together (momentum counts more, and a layer through which a sample
            passes several times counts as often), and at most 0.1: 0.017 for two layers of ten iterations. At this
            default automatic steps are at most 1, the step of the plain layer, so that layers with small weights, such
            as those before a normalisation that starts at zero, keep their scale.
        learn_strength: Make the strength a Parameter of the layer, clamped to [0, 1].
        refresh: ``"drift"``: the step follows the weight. ``"epoch"``: it is computed when training begins and at every
            call of ``train()``, as in [Bibi2019]; **unsafe**, since the weight moves meanwhile.
        tol: In ``eval()`` and without gradients, a sample makes no further iterations once its optimality measure is at
            most this share of the one at the start. Compiled and exported layers make all iterations.
    """

    solver: Solver = ProxGD()  # noqa: RUF009 -- frozen
    adjoint: Adjoint = Unroll()  # noqa: RUF009 -- frozen
    ridge: float = 1e-3
    eval_mode: EvalMode | None = None
    shared_sample: bool = False
    mean_passes: int = 16
    start: Start | None = None
    strength: float | None = None
    learn_strength: bool = False
    refresh: Refresh = "drift"
    tol: float | None = None
    #: Whether the strength is the default.
    usual: bool = dataclasses.field(default=False, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.solver, Solver):
            raise OptionError(f"solver must be a minimand solver such as ProxGD(iters=10), got {self.solver!r}")
        if not isinstance(self.adjoint, Adjoint):
            raise OptionError(f"adjoint must be one of minimand.adjoints, got {self.adjoint!r}")
        require_positive("ridge", self.ridge, zero=True)
        require_count("mean_passes", self.mean_passes)
        if self.tol is not None:
            require_positive("tol", self.tol)
        _require_one_of("eval_mode", self.eval_mode, EvalMode)
        _require_one_of("start", self.start, Start)
        _require_one_of("refresh", self.refresh, Refresh, none=False)
        if self.strength is not None:
            check_strength(self.strength)
        for name in ("shared_sample", "learn_strength", "usual"):
            require_flag(name, getattr(self, name))
        self.adjoint.check(self.solver)
        if not self.solver.unrolls and not self.adjoint.of_minimizer:
            raise CapabilityError(
                f"{type(self.solver).__name__} chooses its steps by its iterates, so that derivatives of iterations "
                f"need not converge; use adjoint=Implicit(), or FISTA() or ADMM() in the layer"
            )
        self._check_start()

    def _check_start(self) -> None:
        """Raise where gradients of the minimiser would be given for a point that is not near it."""
        if self.start == "plain" and self.adjoint.of_minimizer:
            raise OptionError(
                f"{type(self.adjoint).__name__} differentiates the minimiser, which a layer does not reach from "
                f'start="plain"; use start="zero" with enough iterations, or Unroll() or Checkpoint()'
            )
        if self.start == "zero" and self.strength == 0:
            raise OptionError('strength 0 takes no step from start="zero"; use start="plain", or a strength above 0')
        if (self.strength not in (None, 1.0) or self.learn_strength) and self.adjoint.of_minimizer:
            raise OptionError(
                f"{type(self.adjoint).__name__} differentiates the minimiser, on which the strength has no influence; "
                f"use Unroll() or Checkpoint() with a strength"
            )

    @classmethod
    def paper(cls, solver: Solver) -> Self:
        """The protocol of [Bibi2019], §4: iterations from zero, a first step of 1/L with L renewed once an epoch (at
        every call of ``train()``), exponential decay of the step, λ = 10⁻³ and samples also in evaluation.

        >>> from minimand.solvers import ProxSG
        >>> options = SolverOptions.paper(ProxSG(iters=30))
        >>> options.start, options.solver.step, options.refresh, options.eval_mode
        ('zero', '1/L', 'epoch', 'stochastic')
        """
        changes: dict[str, Any] = {"step": "1/L"} if hasattr(solver, "step") else {}
        chosen: dict[str, Any] = {"eval_mode": "stochastic", "start": "zero", "refresh": "epoch"}
        return cls(dataclasses.replace(solver, **changes), ridge=1e-3, **chosen)

    def filled(self, start: Start, eval_mode: EvalMode, reach: float | None = None) -> "SolverOptions":
        """The same options with values in the place of None, for a layer of a network whose layers have this
        :attr:`~minimand.solvers.base.Solver.reach` in all; None: this layer's."""
        start, strength = self.begins(start), self.strength
        if strength is None:
            count = self.solver.reach if reach is None else reach
            strength = min(_LARGEST_STRENGTH, _TOTAL_STRENGTH / max(count, 1.0)) if start == "plain" else 1.0
        usual, mode = self.strength is None or self.usual, self.eval_mode or eval_mode
        return dataclasses.replace(self, start=start, strength=strength, eval_mode=mode, usual=usual)

    def with_strength(self, strength: float) -> "SolverOptions":
        """The same options with another strength."""
        return dataclasses.replace(self, strength=strength, usual=False)

    def changed(self, name: str, value: Any) -> "SolverOptions":
        """The same options, all of which are known, with another value of one of them. A default strength follows the
        start, and the reach of the solver."""
        if value is None and name != "tol":
            raise OptionError(f"{name} cannot be None")
        other = dataclasses.replace(self, **{name: value})
        if name == "start" and value != self.start:
            return dataclasses.replace(other, strength=None).filled(other.start or "zero", other.eval_mode or "mean")
        if name == "solver" and self.usual and self.start == "plain" and self.strength is not None:
            share = self.solver.reach / max(other.solver.reach, 1.0)
            return dataclasses.replace(other, strength=min(_LARGEST_STRENGTH, self.strength * share))
        return other

    def begins(self, start: Start) -> Start:
        """The start, where ``start`` is the default."""
        return self.start or ("zero" if self.adjoint.of_minimizer else start)

    def paced(self, solver: Solver) -> Solver:
        """The solver whose steps the strength scales: at the default strength none is longer than the plain layer's.

        With n further iterations at steps of at most s, an output grows by at most a factor of about exp(ns), however
        small its weights are, and the default bounds the sum of these exponents.
        """
        return solver.shortened(1.0) if self.usual and self.start == "plain" else solver

    def samples(self, training: bool) -> bool:
        """Whether a pass in this mode draws samples."""
        return self.solver.stochastic and (training or self.eval_mode != "deterministic")

    def resolved(self, training: bool) -> tuple[Solver, int]:
        """The solver for this mode, and the number of its outputs to average."""
        solver = self.solver
        if not solver.stochastic:
            return solver, 1
        if not self.samples(training):
            return solver.noiseless(), 1
        if self.shared_sample:
            solver = dataclasses.replace(solver, shared_sample=True)  # type: ignore[call-arg]
        return solver, 1 if training or self.eval_mode != "mean" else self.mean_passes


class Option:
    """An attribute of a layer that reads and writes a field of its options; new values are checked."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type) -> Any:
        return self if layer is None else getattr(layer.options, self.name)

    def __set__(self, layer: Any, value: Any) -> None:
        vars(layer)["options"] = layer.options.changed(self.name, value)
        layer._track()


def check_strength(strength: float) -> None:
    """Raise :class:`~minimand.errors.OptionError` unless the strength is a number in [0, 1]."""
    number = isinstance(strength, int | float) and not isinstance(strength, bool)
    if not number or not 0 <= strength <= 1:
        raise OptionError(f"strength is a number between 0 (the plain layer) and 1 (the solver), got {strength!r}")


def _require_one_of(name: str, value: object, kind: Any, none: bool = True) -> None:
    if value not in get_args(kind) and not (none and value is None):
        raise OptionError(f"{name} is one of {', '.join(get_args(kind))}, got {value!r}")

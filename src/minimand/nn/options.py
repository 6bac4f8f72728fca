"""The options of solver layers."""

import dataclasses
from typing import Literal, get_args

from ..errors import OptionError, require_positive
from ..solvers import ProxGD, Solver
from ..solvers.adjoints import Adjoint, Unroll
from ..solvers.base import require_count

__all__ = ["EvalMode", "Returns", "SolverOptions"]

EvalMode = Literal["stochastic", "mean", "deterministic"]
#: What a layer returns: the solution, or a point whose activation is the solution.
Returns = Literal["solution", "preactivation"]


@dataclasses.dataclass(frozen=True)
class SolverOptions:
    """The options of a solver layer: everything but its sizes and activation. A conversion rule may set them.

    Args:
        solver: The method and its number of iterations.
        adjoint: How gradients are computed through the solver.
        ridge: The weight λ of the term (λ/2)‖x‖².
        eval_mode: The behaviour in ``eval()``: ``"stochastic"`` samples as in training, ``"mean"`` averages
            ``mean_passes`` samples of the output, ``"deterministic"`` takes the same steps along full gradients.
        shared_sample: Draw one sample for the whole batch; a step then costs only the sampled share of the inputs.
            Otherwise every row draws its own sample.
        mean_passes: The number of passes that ``"mean"`` averages.
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
        if not isinstance(self.shared_sample, bool):
            raise OptionError(f"shared_sample must be True or False, got {self.shared_sample!r}")
        if self.eval_mode not in get_args(EvalMode):
            raise OptionError(f"eval_mode is one of {', '.join(get_args(EvalMode))}, got {self.eval_mode!r}")
        self.adjoint.check(self.solver)

    def resolved(self, training: bool) -> tuple[Solver, int]:
        """The solver for this mode, and the number of its outputs to average."""
        solver = self.solver
        if not solver.stochastic:
            return solver, 1
        if not training and self.eval_mode == "deterministic":
            return solver.noiseless(), 1
        if self.shared_sample:
            solver = dataclasses.replace(solver, shared_sample=True)  # type: ignore[call-arg]
        return solver, 1 if training or self.eval_mode != "mean" else self.mean_passes

"""Measures of a run while it goes on: objective, gap, optimality; tolerance, callback and progress line."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..tracing import holds, is_compiled
from .base import State
from .gap import GapBound, PointCertificate
from .problem import Problem

__all__ = ["Progress", "Watch"]


class Progress(NamedTuple):
    """The state of a run: iterations so far, objective and gap summed over the batch, and samples still computed."""

    iterations: int
    objective: float
    gap: float
    samples: int

    def __str__(self) -> str:
        return (
            f"iteration {self.iterations:5d}  objective {self.objective:.6e}  gap {self.gap:.2e}  "
            f"samples {self.samples}"
        )


@dataclasses.dataclass
class Watch:
    """What is measured during a solve, and when it stops."""

    bound: GapBound
    x0: Tensor | None
    tol: float | None
    callback: Callable[[Progress], bool | None] | None
    verbose: bool
    all_stopped: bool = False  # each sample by itself
    _seen: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def drops(self) -> bool:
        """Whether samples can stop one by one: there is a tolerance, and one dimension of samples."""
        problem = self.bound.problem
        return self.tol is not None and problem.y.dim() == 1 + problem.input_dims and problem.rows > 1

    @functools.cached_property
    def first(self) -> Tensor:
        """The objective of each sample at the start, or at its prox where the start is outside of the domain."""
        problem = self.bound.problem
        x = problem.y.new_zeros(problem.shape) if self.x0 is None else self.x0.detach()
        objective = self.bound.objectives(x)
        inside = bool(objective.isfinite().all())
        return objective if inside else self.bound.objectives(problem.function.prox(x))

    @functools.cached_property
    def scale(self) -> float:
        """The optimality at the start."""
        problem = self.bound.problem
        x = problem.y.new_zeros(problem.shape) if self.x0 is None else self.x0.detach()
        return float(problem.optimality(x))

    def limits(self) -> Tensor:
        """The gap that each sample may have, so that all together reach the tolerance."""
        first = self.first.abs()
        return 0.5 * (self.tol or 0.0) * (first + first.mean())

    def reached(self, gap: Tensor, optimality: Tensor) -> bool:
        """Whether the tolerance is reached; the optimality decides where no finite bound is found."""
        if self.bound.known and holds(gap.isfinite()):
            return bool(gap <= (self.tol or 0.0) * self.first.abs().sum())
        return self.all_stopped or bool(optimality <= (self.tol or 0.0) * self.scale)

    def measured(self, problem: Problem, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Objective, optimality and gap at the solution. A graph has no gap, because its bound depends on values."""
        if is_compiled(x):
            objective = problem.objective(x)
            return objective, problem.optimality(x), torch.full_like(objective, torch.inf)
        objective, gap = self.at(x)
        # In the type of the computation: x may be in half precision, in which a sum overflows.
        return _rounded_down(objective.sum(), problem.y.dtype), problem.optimality(x), gap.sum()

    def at(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Objective and gap of each sample at x, or their sums; not measured again where x was the last point."""
        seen = self._seen
        return seen[1:] if seen is not None and x.dtype == seen[0].dtype and torch.equal(x, seen[0]) else self.bound(x)

    def saw(self, x: Tensor, objective: Tensor, gap: Tensor) -> None:
        """Remember a measurement."""
        self._seen = x, objective, gap

    def report(self, done: int, objective: float, gap: float, samples: int) -> bool:
        """Tell the user; whether to stop."""
        progress = Progress(done, objective, gap, samples)
        if self.verbose:
            print(progress)
        return self.callback is not None and self.callback(progress) is True

    def until(self, every: int) -> Callable[[State, int], bool] | None:
        """The stopping rule of a run whose samples go on together."""
        if self.tol is None and self.callback is None and not self.verbose:
            return None
        checked = 0

        def stop(state: State, done: int) -> bool:
            nonlocal checked
            if done - checked < every:
                return False
            checked = done
            assert state.x is not None
            with torch.no_grad():
                x = state.x.detach()
                known_now: PointCertificate | None = getattr(state, "certificate", None)
                self.saw(x, *(self.bound(x) if known_now is None else known_now[:2]))
                objective, gap = (values.sum() for values in self.at(x))
                known = self.tol is None or (self.bound.known and holds(gap.isfinite()))
                measure = gap if known else self.bound.problem.optimality(x)
                done_now = self.tol is not None and self.reached(gap, measure)
                return self.report(done, float(objective), float(gap), self.bound.problem.rows) or done_now

        return stop


def _rounded_down(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in another type, never above: a gap that bounds it bounds what is returned, too."""
    near = value.to(dtype)
    if value.dtype == dtype:
        return near
    return torch.where(near > value, torch.nextafter(near, torch.full_like(near, -torch.inf)), near)

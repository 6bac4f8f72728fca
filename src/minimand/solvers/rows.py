"""Runs in which samples stop as soon as they have converged."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..functions.base import of_samples
from .adjoints import Run
from .iterate import iterate
from .problem import DescentMap, GradientMap, Problem
from .watching import Watch

__all__ = ["solve_rows", "some_samples", "stop_rows"]


@torch.no_grad()
def solve_rows(run: Run, tol: float) -> Tensor:
    """The value of a run, without gradients, in which each sample makes iterations until its optimality measure is at
    most ``tol`` times that of the start, or all of them. Samples lie along the first dimension; those that have
    converged are no longer computed."""
    state, value = run.init(), run.problem.y.new_zeros(run.problem.shape)
    limit = tol * _measured(run, _point(run, state))
    rows, done = torch.arange(len(limit), device=limit.device), 0
    while len(rows) and done + 1 < run.iterations:
        # The last iteration of every sample is the one that ends in what the run returns.
        state, done = iterate(run.advance, state, min(run.solver.checked_every, run.iterations - 1 - done), start=done)
        stop = _measured(run, _point(run, state)) <= limit[rows]
        if bool(stop.any()):
            value[rows[stop]] = _ended(_selected(run, stop), _rows_of(state, run, stop))
            keep = ~stop
            state, run, rows = _rows_of(state, run, keep), _selected(run, keep), rows[keep]
    if len(rows):
        value[rows] = _ended(run, state)
    return value


def stop_rows(watch: Watch) -> Callable[[Run], tuple[Tensor, int]]:
    """A loop in which each sample stops once its gap is small enough. Samples lie along the first dimension."""

    def loop(run: Run) -> tuple[Tensor, int]:
        value, limits = run.problem.y.new_zeros(run.problem.shape), watch.limits()
        state, bound = run.init(), watch.bound
        rows, done = torch.arange(len(limits), device=limits.device), 0
        finished = {"objective": 0.0, "gap": 0.0}
        while len(rows) and done < run.iterations:
            state, done = iterate(run.advance, state, min(run.solver.checked_every, run.iterations - done), start=done)
            objective, gap = bound(state.x)
            stop = gap <= limits[rows]
            if not bool(gap.isfinite().all()):
                stop = torch.where(gap.isfinite(), stop, _measured(run, state.x) <= (watch.tol or 0.0) * watch.scale)
            watch.all_stopped = bool(stop.all())
            last = done >= run.iterations
            shown = finished["objective"] + float(objective.sum()), finished["gap"] + float(gap.sum())
            last = watch.report(done, *shown, len(rows)) or last
            stop = torch.ones_like(stop) if last else stop
            if bool(stop.any()):
                value[rows[stop]] = state.x[stop]
                finished["objective"] += float(objective[stop].sum())
                finished["gap"] += float(gap[stop].sum())
                keep = ~stop
                state, run, rows = _rows_of(state, run, keep), _selected(run, keep), rows[keep]
                bound = bound.of_samples(keep)
        watch.saw(value, *(limits.new_tensor(total) for total in finished.values()))
        return value, done

    return loop


def _point(run: Run, state: Any) -> Tensor:
    """The solution at which a state is."""
    if state.x is None:
        return run.problem.y.new_zeros(run.problem.shape)
    x: Tensor = state.x
    return run.solution(x) if run.solver.updates_some else x


def _measured(run: Run, x: Tensor) -> Tensor:
    """The optimality of each sample along the first dimension."""
    norms = run.problem.gradient_mapping(x).flatten(1)
    return norms.norm(dim=-1)


def _ended(run: Run, state: Any) -> Tensor:
    """The value after the last iteration."""
    x: Tensor = run.advance(state, run.iterations - 1).x
    return x


def _selected(run: Run, keep: Tensor) -> Run:
    problem = some_samples(run.problem, keep)
    ending = None if run.ending is None else dataclasses.replace(problem, preactivated=True)
    return dataclasses.replace(run, problem=problem, ending=ending)


def some_samples(problem: Problem, keep: Tensor) -> Problem:
    """The problem of some samples."""
    bias, affine = problem.bias, problem.affine
    if bias is not None and bias.dim() == len(problem.shape) and len(bias) == len(problem.y):
        bias = bias[keep]
    return dataclasses.replace(
        problem,
        operator=problem.operator.of_samples(keep),
        function=problem.function.of_samples(keep, problem.shape),
        y=problem.y[keep],
        bias=bias,
        datafit=of_samples(problem.datafit, keep, problem.y.shape),
        affine=None if affine is None else affine[keep],
    )


def _rows_of(state: Any, run: Run, keep: Tensor) -> Any:
    """The state of some samples: its tensors with one entry per sample, in the fields of named tuples."""
    if hasattr(state, "selected"):
        return state.selected(keep)
    if isinstance(state, DescentMap):
        return state._replace(offset=state.offset[keep], problem=some_samples(state.problem, keep))
    if isinstance(state, GradientMap):
        return state._replace(offset=state.offset[keep], operator=state.operator.of_samples(keep))
    if isinstance(state, Tensor):
        dims = {len(run.problem.shape), run.problem.y.dim()}
        return state[keep] if state.dim() in dims and len(state) == len(keep) else state
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(_rows_of(part, run, keep) for part in state))
    return state

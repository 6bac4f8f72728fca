"""Runs in which samples stop as soon as they have converged."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .adjoints import Run
from .iterate import iterate
from .problem import DescentMap, GradientMap, Problem

__all__ = ["solve_rows"]

# Iterations between two checks: measuring optimality costs as much as an iteration.
_CHECK_EVERY = 5


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
        state, done = iterate(run.advance, state, min(_CHECK_EVERY, run.iterations - 1 - done), start=done)
        stop = _measured(run, _point(run, state)) <= limit[rows]
        if bool(stop.any()):
            value[rows[stop]] = _ended(_selected(run, stop), _rows_of(state, run, stop))
            keep = ~stop
            state, run, rows = _rows_of(state, run, keep), _selected(run, keep), rows[keep]
    if len(rows):
        value[rows] = _ended(run, state)
    return value


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
    problem = _some(run.problem, keep)
    ending = None if run.ending is None else dataclasses.replace(problem, preactivated=True)
    return dataclasses.replace(run, problem=problem, ending=ending)


def _some(problem: Problem, keep: Tensor) -> Problem:
    """The problem of some samples."""
    bias, affine = problem.bias, problem.affine
    if bias is not None and bias.dim() == len(problem.shape) and len(bias) == len(problem.y):
        bias = bias[keep]
    return dataclasses.replace(problem, y=problem.y[keep], bias=bias, affine=None if affine is None else affine[keep])


def _rows_of(state: Any, run: Run, keep: Tensor) -> Any:
    """The state of some samples: its tensors with one entry per sample, in the fields of named tuples."""
    if isinstance(state, DescentMap):
        return state._replace(offset=state.offset[keep], problem=_some(state.problem, keep))
    if isinstance(state, GradientMap):
        return state._replace(offset=state.offset[keep])
    if isinstance(state, Tensor):
        dims = {len(run.problem.shape), run.problem.y.dim()}
        return state[keep] if state.dim() in dims and len(state) == len(keep) else state
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(_rows_of(part, run, keep) for part in state))
    return state

"""Independent answers: cvxpy for optima, dense linear algebra for operators."""

import cvxpy as cp
import numpy as np
import torch

from minimand.functions import L1, Box, Function, GroupL2, NonNegative, Simplex, SquaredHinge, Zero
from minimand.solvers import Problem

from .cases.operators import dense_matrix


def _penalty(function: Function, x: cp.Variable) -> tuple[cp.Expression, list[cp.Constraint]]:
    match function:
        case Zero():
            return cp.Constant(0), []
        case NonNegative():
            return cp.Constant(0), [x >= 0]
        case SquaredHinge():
            return function.gamma / 2 * cp.sum_squares(cp.pos(-x - function.shift)), []
        case L1():
            return function.weight * cp.norm1(x), []
        case Box():
            return cp.Constant(0), [x >= function.low, x <= function.high]
        case GroupL2():
            return function.weight * cp.norm2(x), []
        case Simplex():
            return cp.Constant(0), [x >= 0, cp.sum(x) == 1]
    raise NotImplementedError(function)


def cvxpy_optimum(problem: Problem) -> tuple[torch.Tensor, float]:
    """The minimiser and the minimum, by an interior point method, one sample at a time."""
    A = dense_matrix(problem.operator).numpy()
    rows = problem.y.reshape(problem.rows, -1).numpy()
    bias = 0 if problem.bias is None else problem.full_bias().expand(problem.shape).reshape(problem.rows, -1).numpy()
    points, total = [], 0.0
    for i, y in enumerate(rows):
        x = cp.Variable(A.shape[0])
        penalty, constraints = _penalty(problem.function, x)
        smooth = 0.5 * cp.sum_squares(A.T @ x - y) + 0.5 * problem.ridge * cp.sum_squares(x)
        if problem.bias is not None:
            smooth -= bias[i] @ x
        program = cp.Problem(cp.Minimize(smooth + penalty), constraints)
        program.solve(solver=cp.CLARABEL, tol_gap_abs=1e-9, tol_gap_rel=1e-9, tol_feas=1e-9)
        points.append(np.asarray(x.value))
        total += float(program.value)
    return torch.from_numpy(np.stack(points)).reshape(problem.shape), total

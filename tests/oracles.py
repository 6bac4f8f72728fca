"""Independent answers: cvxpy for optima, dense linear algebra for operators."""

import copy

import cvxpy as cp
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


@torch.no_grad()
def ridge_control(net: nn.Sequential, x: Tensor, y: Tensor, ridge: float) -> nn.Sequential:
    """A copy of the network with its random hidden layers and a ridge regression of the labels as last layer."""
    net = copy.deepcopy(net)
    hidden = F.pad(net[:-1](x), (0, 1), value=1.0)
    normal = hidden.mT @ hidden + ridge * torch.eye(hidden.shape[1])
    solution = torch.linalg.solve(normal, hidden.mT @ F.one_hot(y).to(x))
    net[-1].weight.copy_(solution[:-1].mT)
    net[-1].bias.copy_(solution[-1])
    return net

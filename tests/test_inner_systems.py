"""Laws: the linear systems inside a solver have right derivatives at every scale of the weight, in every precision."""

import pytest
import torch
from torch import Tensor

from minimand.functions import from_activation
from minimand.nn import SolverConv1d
from minimand.operators import Conv1d, Dense
from minimand.solvers import ADMM, Problem, conjugate_gradient, solve

SCALES = [1e-6, 1e-3, 1e-2, 0.1, 1.0, 10.0, 1e2, 1e3, 1e6]

# An ordinary instance: at some, the tenth iteration of conjugate gradients nearly divides by zero.
_generator = torch.Generator().manual_seed(1)
WEIGHT, Y, BIAS, COTANGENT = (
    torch.randn(shape, generator=_generator, dtype=torch.float64) for shape in ((6, 4, 3), (2, 4, 8), (6,), (2, 6, 6))
)


def _leaves(scale: float, dtype: torch.dtype, y: Tensor = Y, bias: Tensor = BIAS) -> list[Tensor]:
    return [each.to(dtype).requires_grad_() for each in (scale * WEIGHT, bias, y)]


def _loss(leaves: list[Tensor], solver: ADMM, *, dense: bool = False, ridge: float = 1e-3, act: str = "tanh") -> Tensor:
    weight, bias, y = leaves
    op, function = Conv1d(weight, y.shape[-1]), from_activation(act)
    if dense:
        n = y[0].numel()
        matrix = op.apply(torch.eye(n, dtype=y.dtype).reshape(n, *y.shape[1:])).reshape(n, -1).mT
        problem = Problem(Dense(matrix), function, y.flatten(1), bias.repeat_interleave(6), ridge)
    else:
        problem = Problem(op, function, y, bias, ridge)
    return (COTANGENT.to(y.dtype) * solve(problem, solver).x.reshape(2, 6, 6)).sum()


def _error(got: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(got, exact, strict=True))


def test_the_layer_with_small_weights():
    """Conjugate gradients converge in two iterations; the derivatives of the others are 0/0."""
    torch.manual_seed(0)
    layer, y = SolverConv1d(4, 6, 3, solver=ADMM(iters=10)), torch.randn(5, 4, 12, requires_grad=True)
    with torch.no_grad():
        layer.weight.copy_(0.01 * torch.randn(6, 4, 3))
    gradients = torch.autograd.grad(layer(y).square().sum(), [layer.weight, layer.bias, y])
    double = layer.double()
    wide = y.detach().double().requires_grad_()
    exact = torch.autograd.grad(double(wide).square().sum(), [double.weight, double.bias, wide])
    assert _error(gradients, exact) < 1e-5


@pytest.mark.parametrize("cg_iters", [3, 10, 40])
@pytest.mark.parametrize("scale", SCALES)
def test_gradients_are_those_of_what_is_computed(scale, cg_iters):
    """By finite differences, whether the systems are solved or not."""
    leaves, solver = _leaves(scale, torch.float64), ADMM(5, cg_iters=cg_iters)
    gradient = torch.autograd.grad(_loss(leaves, solver), leaves)
    directions = [torch.randn(each.shape, dtype=torch.float64) * each.detach().abs().mean() for each in leaves]

    def value(width: float) -> Tensor:
        with torch.no_grad():
            return _loss([each + width * along for each, along in zip(leaves, directions, strict=True)], solver)

    slopes = [(value(h) - value(-h)) / (2 * h) for h in (3e-6, 1e-6)]
    got = sum((g * d).sum() for g, d in zip(gradient, directions, strict=True))
    # At 1e6 the condition number is 1e13.
    tolerance = 1e-4 if scale < 1e6 or cg_iters == 3 else 0.05
    assert min(abs(got - slope) for slope in slopes) <= tolerance * abs(got) + 1e-9 * sum(
        (g.abs() * d.abs()).sum() for g, d in zip(gradient, directions, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", SCALES)
def test_solved_systems_have_the_derivatives_of_dense_algebra(scale, dtype):
    """With a penalty of the size of the weight's square, every scale is the same problem."""
    if dtype == torch.float16 and not 1e-2 <= scale <= 10:
        return  # products of the layer leave the type's range
    solver, ridge = ADMM(5, rho=scale**2, cg_iters=50), 1e-3 * scale**2
    given = [each.detach().to(dtype) for each in _leaves(scale, torch.float64, scale * Y, scale**2 * BIAS)]
    leaves = [each.clone().requires_grad_() for each in given]
    exact = [each.double().requires_grad_() for each in given]
    gradient = torch.autograd.grad(_loss(leaves, solver, ridge=ridge, act="relu"), leaves)
    expected = torch.autograd.grad(_loss(exact, solver, dense=True, ridge=ridge, act="relu"), exact)
    rounding = torch.finfo(dtype).eps
    assert _error(gradient, expected) < max(30 * rounding, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_zero_inputs(scale, dtype):
    """The solution is zero, its derivatives are not."""
    zero = [torch.zeros_like(Y), torch.zeros_like(BIAS)]
    solver = ADMM(5, rho=scale**2)
    leaves, exact = _leaves(scale, dtype, *zero), _leaves(scale, torch.float64, *zero)
    gradient = torch.autograd.grad(_loss(leaves, solver), leaves)
    expected = torch.autograd.grad(_loss(exact, solver, dense=True), exact)
    assert float(gradient[0].abs().max()) == 0
    assert _error(gradient[1:], expected[1:]) < (1e-9 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("cg_iters", [8, 10, 40])
@pytest.mark.parametrize("scale", SCALES)
def test_gradients_in_single_precision_are_finite_and_do_not_explode(scale, cg_iters):
    solver, leaves, exact = ADMM(10, cg_iters=cg_iters), _leaves(scale, torch.float32), _leaves(scale, torch.float64)
    gradient = torch.autograd.grad(_loss(leaves, solver), leaves)
    expected = torch.autograd.grad(_loss(exact, solver), exact)
    assert all(bool(each.isfinite().all()) for each in gradient)
    if scale <= 100:  # above, the condition number exceeds 1/ε
        assert _error(gradient, expected) < 0.05


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_conjugate_gradients_at_every_size_of_the_target(size, dtype):
    g = torch.Generator().manual_seed(0)
    root = torch.randn(6, 6, generator=g, dtype=torch.float64)
    matrix, target = root @ root.mT + torch.eye(6, dtype=torch.float64), torch.randn(3, 6, generator=g).double()
    for start in (None, torch.ones(3, 6, dtype=torch.float64)):
        x0 = None if start is None else (size * start).to(dtype)
        x = conjugate_gradient(lambda v: v @ matrix.to(v), (size * target).to(dtype), 12, x0=x0)
        exact = torch.linalg.solve(matrix, size * target, left=False)
        assert x.dtype == dtype
        assert float((x.double() - exact).norm() / exact.norm()) < 40 * torch.finfo(dtype).eps

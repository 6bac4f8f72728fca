"""Laws: every derivative of a solve, by every transform of torch, agrees with finite differences in float64."""

import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from minimand.adjoints import JacobianFree, Unroll
from minimand.functions import (
    L1,
    Ball,
    Box,
    GroupL2,
    LogBarrier,
    Maximum,
    Monotone,
    NonNegative,
    Simplex,
    SquaredHinge,
    from_activation,
)
from minimand.norms.kernel import Bounds
from minimand.operators import Conv2d, Dense
from minimand.solvers import Problem, ProxGD, solve

WIDTH = 1e-5

FUNCTIONS = {
    "relu": lambda p: NonNegative(),
    "leaky": lambda p: SquaredHinge(1.0 + p[0] ** 2),
    "l1": lambda p: L1(0.1 + p[0] ** 2),
    "box": lambda p: Box(-0.4, 0.6),
    "tanh": lambda p: from_activation("tanh"),
    "softplus": lambda p: from_activation("softplus"),
    "elu": lambda p: from_activation("elu"),
    "simplex": lambda p: Simplex(),
    "group": lambda p: GroupL2(0.1),
    "ball": lambda p: Ball(0.8),
    "maximum": lambda p: Maximum(),
    "barrier": lambda p: LogBarrier(0.38),
    "own": lambda p: Monotone(lambda z: z / (1 + z * z).sqrt()),
}


class Objective:
    """A scalar function of a solution, of all that the problem depends on: weight, bias, skip, input and a parameter of
    the function, in one vector."""

    def __init__(self, kind: str, name: str, solver=ProxGD(iters=40), adjoint=Unroll()) -> None:  # noqa: B008
        g = torch.Generator().manual_seed(0)
        shapes = [(3, 4), (3,), (2, 3), (2, 4)] if kind == "dense" else [(2, 2, 3, 3), (2,), (2, 2, 3, 3), (2, 2, 3, 3)]
        parts = [0.3 * torch.randn(shape, generator=g, dtype=torch.float64) for shape in [*shapes, (1,)]]
        self.function, self.solver, self.adjoint = FUNCTIONS[name], solver, adjoint
        self.shapes, self.point = [part.shape for part in parts], torch.cat([part.flatten() for part in parts])
        self.along = torch.randn(self.point.shape, generator=g, dtype=torch.float64)
        self.weights = torch.randn(shapes[2], generator=g, dtype=torch.float64)
        self.bounds = None
        operator = self.problem(self.point).operator
        self.bounds = Bounds(operator.norm_sq(), operator.input_norms_sq(), operator.output_norms_sq())

    def problem(self, vector: Tensor) -> Problem:
        weight, bias, skip, y, parameter = (
            part.reshape(shape) for part, shape in zip(vector.split([s.numel() for s in self.shapes]), self.shapes)
        )
        operator = Dense(weight) if weight.dim() == 2 else Conv2d(weight, (3, 3), padding=1)
        # The step is a constant of every derivative.
        operator = operator.with_bounds(self.bounds)
        return Problem(operator, self.function(parameter), y, skip + operator.per_feature(bias), 2.0)

    def loss(self, x: Tensor) -> Tensor:
        return (self.weights * torch.sin(x + 0.3)).sum()

    def __call__(self, vector: Tensor) -> Tensor:
        return self.loss(solve(self.problem(vector), self.solver, adjoint=self.adjoint).x)

    def exact(self, vector: Tensor) -> Tensor:
        """What the derivatives are those of."""
        if not isinstance(self.adjoint, JacobianFree):
            return self.loss(solve(self.problem(vector), self.solver).x)
        x = solve(self.problem(self.point), self.solver).x.detach()
        problem, step = self.problem(vector), 1 / (float(self.bounds.total) + 2)
        return self.loss(problem.prox(x + step * problem.descent(x, problem.linear()), step))


def _gradient(f, vector: Tensor) -> Tensor:
    leaf = vector.clone().requires_grad_()
    return torch.autograd.grad(f(leaf), leaf)[0]


def _dual(f, point: Tensor, along: Tensor) -> Tensor:
    with forward_mode.dual_level():
        return forward_mode.unpack_dual(f(forward_mode.make_dual(point, along))).tangent


def _batched(f, point: Tensor, along: Tensor) -> Tensor:
    """Two gradients at once."""
    leaf = point.clone().requires_grad_()
    value = f(leaf)
    both = torch.autograd.grad(value, leaf, torch.tensor([1.0, 2.0], dtype=value.dtype), is_grads_batched=True)[0]
    torch.testing.assert_close(both[1], 2 * both[0])
    return both[0] @ along


def _dual_of_gradient(f, point: Tensor, along: Tensor) -> Tensor:
    with forward_mode.dual_level():
        leaf = forward_mode.make_dual(point.clone().requires_grad_(), along)
        return forward_mode.unpack_dual(torch.autograd.grad(f(leaf), leaf)[0]).tangent @ along


def _gradient_of_dual(f, point: Tensor, along: Tensor) -> Tensor:
    leaf = point.clone().requires_grad_()
    return torch.autograd.grad(_dual(f, leaf, along), leaf)[0] @ along


def _vmapped(f, point: Tensor, along: Tensor) -> Tensor:
    points = torch.stack([point, point + 0.1 * along])
    values, slopes = vmap(lambda p: jvp(f, (p,), (along,)))(points)
    torch.testing.assert_close(values, torch.stack([f(p) for p in points]))
    gradients = vmap(grad(f))(points)
    torch.testing.assert_close(gradients @ along, slopes)
    return slopes[0]


FIRST = {
    "backward": lambda f, x, d: _gradient(f, x) @ d,
    "is_grads_batched": _batched,
    "dual": _dual,
    "jvp": lambda f, x, d: jvp(f, (x,), (d,))[1],
    "jacrev": lambda f, x, d: jacrev(f)(x) @ d,
    "jacfwd": lambda f, x, d: jacfwd(f)(x) @ d,
    "vmap": _vmapped,
}

functional = torch.autograd.functional

SECOND = {
    "hvp": lambda f, x, d: functional.hvp(f, x, d)[1] @ d,
    "functional.hessian": lambda f, x, d: d @ functional.hessian(f, x) @ d,
    "vectorized": lambda f, x, d: d @ functional.hessian(f, x, vectorize=True) @ d,
    "forward over reverse": lambda f, x, d: (
        d @ functional.hessian(f, x, vectorize=True, outer_jacobian_strategy="forward-mode") @ d
    ),
    "dual of gradient": _dual_of_gradient,
    "gradient of dual": _gradient_of_dual,
    "func.hessian": lambda f, x, d: d @ hessian(f)(x) @ d,
    "jvp of grad": lambda f, x, d: jvp(grad(f), (x,), (d,))[1] @ d,
    "jacrev of grad": lambda f, x, d: d @ jacrev(grad(f))(x) @ d,
    "jvp of jvp": lambda f, x, d: jvp(lambda p: jvp(f, (p,), (d,))[1], (x,), (d,))[1],
    "grad of jvp": lambda f, x, d: grad(lambda p: jvp(f, (p,), (d,))[1])(x) @ d,
}

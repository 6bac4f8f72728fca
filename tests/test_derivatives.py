"""Laws: every derivative of a solve, by every transform of torch, agrees with finite differences in float64."""

from collections.abc import Callable

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor
from torch.autograd.functional import hessian as eager_hessian
from torch.autograd.functional import hvp
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from minimand import functions as mf
from minimand.adjoints import Checkpoint, Implicit, JacobianFree, Unroll
from minimand.errors import CapabilityError, MinimandError
from minimand.nn import SolverConv2d, SolverLinear
from minimand.norms.kernel import Bounds
from minimand.operators import Conv2d, Dense, as_operator, operator
from minimand.solvers import ADMM, FISTA, Problem, ProxGD, ProxSG, solve

from .cases import solvers

WIDTH, RIDGE = 1e-5, 2.0

#: Functions of a parameter, which is differentiated, too.
FUNCTIONS: dict[str, Callable[[Tensor], mf.Function]] = {
    "relu": lambda p: mf.NonNegative(),
    "leaky": lambda p: mf.SquaredHinge(1.0 + p[0] ** 2),
    "l1": lambda p: mf.L1(0.1 + p[0] ** 2),
    "box": lambda p: mf.Box(-0.4, 0.6),
    "tanh": lambda p: mf.from_activation("tanh"),
    "softplus": lambda p: mf.from_activation("softplus"),
    "elu": lambda p: mf.from_activation("elu"),
    "hardsigmoid": lambda p: mf.from_activation("hardsigmoid"),
    "barrier": lambda p: mf.LogBarrier(0.38),
    "own": lambda p: mf.Monotone(lambda z: z / (1 + z * z).sqrt()),
    "simplex": lambda p: mf.Simplex(),
    "maximum": lambda p: mf.Maximum(),
    "group": lambda p: mf.GroupL2(0.1),
    "ball": lambda p: mf.Ball(0.8),
    "learned radius": lambda p: mf.Ball(0.6 + p[0] ** 2),
    "learned scale": lambda p: mf.Charbonnier(0.4 + p[0] ** 2, 0.3),
    "learned exponent": lambda p: mf.Charbonnier(0.5, 0.2 + p[0] ** 2),
}
#: An activation that captures its parameter, in which there are gradients, and by Unroll all derivatives.
LEARNED = {"learned activation": lambda p: mf.Monotone(lambda z: torch.tanh((0.7 + p[0] ** 2) * z))}


class Objective:
    """A scalar function of a solution, of one vector that holds all that the problem depends on: weight, bias, skip,
    input and a parameter of the function."""

    def __init__(self, kind: str, name: str, solver=ProxGD(iters=30), adjoint=Unroll()) -> None:  # noqa: B008
        g = torch.Generator().manual_seed(0)
        shapes = [(3, 4), (3,), (2, 3), (2, 4)] if kind == "dense" else [(2, 2, 3, 3), (2,), (1, 2, 3, 3), (1, 2, 3, 3)]
        parts = [0.3 * torch.randn(shape, generator=g, dtype=torch.float64) for shape in [*shapes, (1,)]]
        self.function, self.solver, self.adjoint = (FUNCTIONS | LEARNED)[name], solver, adjoint
        self.shapes, self.point = [part.shape for part in parts], torch.cat([part.flatten() for part in parts])
        self.along = torch.randn(self.point.shape, generator=g, dtype=torch.float64)
        self.weights = torch.randn(shapes[2], generator=g, dtype=torch.float64)
        self.bounds = None
        first = self.problem(self.point).operator
        # Steps are constants of every derivative.
        self.bounds = Bounds(first.norm_sq(), first.input_norms_sq(), first.output_norms_sq())
        self.x = self.solved(self.point, Unroll()).detach()
        self.moved = self.step(self.point)

    def problem(self, vector: Tensor) -> Problem:
        parts = zip(vector.split([shape.numel() for shape in self.shapes]), self.shapes, strict=True)
        weight, bias, skip, y, parameter = (part.reshape(shape) for part, shape in parts)
        operator = Dense(weight) if weight.dim() == 2 else Conv2d(weight, (3, 3), padding=1)
        operator = operator.with_bounds(self.bounds)
        return Problem(operator, self.function(parameter), y, skip + operator.per_feature(bias), RIDGE)

    def solved(self, vector: Tensor, adjoint) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return solve(self.problem(vector), self.solver, adjoint=adjoint, generator=generator).x

    def step(self, vector: Tensor) -> Tensor:
        """One proximal gradient step from the solution at the point."""
        problem, step = self.problem(vector), 1 / (float(self.bounds.total) + RIDGE)
        return problem.prox(self.x + step * problem.descent(self.x, problem.linear()), step)

    def loss(self, x: Tensor) -> Tensor:
        return (self.weights * torch.sin(x + 0.3)).sum()

    def __call__(self, vector: Tensor) -> Tensor:
        return self.loss(self.solved(vector, self.adjoint))

    def exact(self, vector: Tensor) -> Tensor:
        """The function whose derivatives the adjoint has."""
        if isinstance(self.adjoint, JacobianFree):
            return self.loss(self.x + self.step(vector) - self.moved)
        return self.loss(self.solved(vector, Unroll()))

    def first(self) -> Tensor:
        """The derivative along a direction by differences of values."""
        return (self.exact(self.point + WIDTH * self.along) - self.exact(self.point - WIDTH * self.along)) / (2 * WIDTH)

    def second(self) -> Tensor:
        """The second derivative along it by differences of gradients, which :meth:`first` has checked."""
        f = self.exact if isinstance(self.adjoint, JacobianFree) else self
        ends = [_gradient(f, self.point + sign * WIDTH * self.along) for sign in (1, -1)]
        return (ends[0] - ends[1]) @ self.along / (2 * WIDTH)


def _gradient(f, point: Tensor) -> Tensor:
    leaf = point.clone().requires_grad_()
    return torch.autograd.grad(f(leaf), leaf)[0]


def _batched(f, point: Tensor, along: Tensor) -> Tensor:
    leaf = point.clone().requires_grad_()
    value = f(leaf)
    both = torch.autograd.grad(value, leaf, torch.tensor([1.0, 2.0], dtype=value.dtype), is_grads_batched=True)[0]
    torch.testing.assert_close(both[1], 2 * both[0])
    return both[0] @ along


def _dual(f, point: Tensor, along: Tensor) -> Tensor:
    with forward_mode.dual_level():
        return forward_mode.unpack_dual(f(forward_mode.make_dual(point, along))).tangent


def _vmapped(f, point: Tensor, along: Tensor) -> Tensor:
    points = torch.stack([point, point + 0.1 * along])
    values, slopes = vmap(lambda p: jvp(f, (p,), (along,)))(points)
    torch.testing.assert_close(values, torch.stack([f(p) for p in points]))
    torch.testing.assert_close(vmap(grad(f))(points) @ along, slopes)
    return slopes[0]


def _dual_of_gradient(f, point: Tensor, along: Tensor) -> Tensor:
    with forward_mode.dual_level():
        leaf = forward_mode.make_dual(point.clone().requires_grad_(), along)
        return forward_mode.unpack_dual(torch.autograd.grad(f(leaf), leaf)[0]).tangent @ along


def _after_vjp(f, point: Tensor) -> Tensor:
    """The gradient, taken when the transform has ended."""
    return vjp(f, point)[1](torch.ones((), dtype=point.dtype))[0]


def _gradient_of_vjp(f, point: Tensor, along: Tensor) -> Tensor:
    leaf = point.clone().requires_grad_()
    return torch.autograd.grad(_after_vjp(f, leaf) @ along, leaf)[0] @ along


def _gradient_of_dual(f, point: Tensor, along: Tensor) -> Tensor:
    leaf = point.clone().requires_grad_()
    return torch.autograd.grad(_dual(f, leaf, along), leaf)[0] @ along


FIRST = {
    "backward": lambda f, x, d: _gradient(f, x) @ d,
    "is_grads_batched": _batched,
    "dual": _dual,
    "jvp": lambda f, x, d: jvp(f, (x,), (d,))[1],
    "jacrev": lambda f, x, d: jacrev(f)(x) @ d,
    "vjp": lambda f, x, d: (_after_vjp(f, x) @ d).detach(),
    "jacfwd": lambda f, x, d: jacfwd(f)(x) @ d,
    "vmap": _vmapped,
}

SECOND = {
    "hvp": lambda f, x, d: hvp(f, x, d)[1] @ d,
    "dual of gradient": _dual_of_gradient,
    "gradient of dual": _gradient_of_dual,
    "gradient of vjp": _gradient_of_vjp,
    "func.hessian": lambda f, x, d: d @ hessian(f)(x) @ d,
    "jacrev of grad": lambda f, x, d: d @ jacrev(grad(f))(x) @ d,
    "jvp of jvp": lambda f, x, d: jvp(lambda p: jvp(f, (p,), (d,))[1], (x,), (d,))[1],
    "grad of jvp": lambda f, x, d: grad(lambda p: jvp(f, (p,), (d,))[1])(x) @ d,
}

#: As the others, but column by column or with a fixed number of iterations, which takes long.
SLOW = {
    "functional.hessian": lambda f, x, d: d @ eager_hessian(f, x) @ d,
    "vectorized": lambda f, x, d: d @ eager_hessian(f, x, vectorize=True) @ d,
    "forward over reverse": lambda f, x, d: (
        d @ eager_hessian(f, x, vectorize=True, outer_jacobian_strategy="forward-mode") @ d
    ),
}


def _check(f: Objective, *, first: dict = FIRST, second: dict = SECOND) -> None:
    for table, expected in ((first, f.first()), (second, f.second() if second else None)):
        for name, transform in table.items():
            got = transform(f, f.point, f.along)
            torch.testing.assert_close(
                got, expected, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
            )


ADJOINTS = [Unroll(), Checkpoint(), Implicit(), Implicit(method="neumann"), JacobianFree()]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("adjoint", [Implicit(), JacobianFree()], ids=lambda a: type(a).__name__)
def test_every_function(adjoint, name):
    _check(Objective("dense", name, adjoint=adjoint))


def test_learned_activations():
    _check(Objective("dense", *LEARNED))
    for adjoint in (Checkpoint(), Implicit(), JacobianFree()):
        gradients = {name: FIRST[name] for name in ("backward", "is_grads_batched")}
        _check(Objective("dense", *LEARNED, adjoint=adjoint), first=gradients, second={})


@pytest.mark.parametrize("kind", ["dense", "conv"])
@pytest.mark.parametrize("adjoint", ADJOINTS, ids=str)
def test_every_adjoint(adjoint, kind):
    _check(Objective(kind, "tanh", adjoint=adjoint))


@pytest.mark.parametrize("adjoint", [Implicit(iters=40), JacobianFree()], ids=lambda a: type(a).__name__)
def test_hessians_of_torch(adjoint):
    _check(Objective("dense", "leaky", adjoint=adjoint), first={}, second=SLOW)


FEW = {name: SECOND[name] for name in ("hvp", "dual of gradient", "jacrev of grad", "jvp of jvp")}


@pytest.mark.parametrize("case", solvers.ALL, ids=solvers.ids(solvers.ALL))
@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_every_solver(case, kind):
    """Stochastic solvers with their samples fixed, one per row and one for all."""
    if "gradients" in case.id:
        return  # probabilities that depend on the point are constants of every derivative
    first, second = ({n: t for n, t in table.items() if n[:3] not in ("vma", "jac")} for table in (FIRST, FEW))
    for solver in (case.brief, *([solvers.shared(case.brief)] if case.solver.stochastic else [])):
        _check(Objective(kind, "tanh", solver), first=first, second=second)
        _check(Objective(kind, "tanh", solver, JacobianFree()), first={}, second={"hvp": SECOND["hvp"]})


@pytest.mark.parametrize("cg_iters", [2, 8, 20])
@pytest.mark.parametrize("adjoint", [Unroll(), Implicit()], ids=lambda a: type(a).__name__)
def test_admm_on_convolutions(adjoint, cg_iters):
    """Inner systems that are not solved, partly solved, and solved; Implicit needs them solved."""
    if isinstance(adjoint, Unroll):
        _check(Objective("conv", "tanh", ADMM(3, cg_iters=cg_iters), adjoint))
    elif cg_iters == 20:
        _check(Objective("conv", "tanh", ADMM(24, cg_iters=cg_iters), adjoint))


def test_functions_of_matrices_are_right_or_refused():
    """Their proxes have no second derivative; torch's once_differentiable would have returned zeros."""
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    for function in (mf.NuclearNorm(0.3), mf.SpectralBall(0.5)):
        op = operator(lambda y: y, lambda x: x, (4, 3), (4, 3), 1.0, dtype=torch.float64)
        for adjoint in ADJOINTS:
            f = lambda y: solve(Problem(op, function, y, ridge=1.0), ProxGD(60), adjoint=adjoint).x.sum()  # noqa: B023, E731
            along = torch.randn_like(x)
            if not isinstance(adjoint, JacobianFree):
                slope = (f(x + WIDTH * along) - f(x - WIDTH * along)) / (2 * WIDTH)
                torch.testing.assert_close((_gradient(f, x) * along).sum(), slope, rtol=1e-5, atol=1e-8)
            for transform in (hvp, lambda f, x, d: jvp(f, (x,), (d,)), _dual):
                with pytest.raises((MinimandError, RuntimeError)):
                    transform(f, x, along)


def test_gaps_and_tolerances_inside_of_transforms():
    """vmap has the gaps of the loop, and refuses what needs values; derivatives take a tolerance."""
    weight, y = torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 2, 4, dtype=torch.float64)
    for function, ridge in ((mf.L1(0.3), 0.0), (mf.L1(0.3), 1.0), (mf.NonNegative(), 1.0), (mf.Simplex(), 0.0)):
        problem = lambda y: Problem(Dense(weight), function, y, ridge=ridge)  # noqa: B023, E731
        gap = lambda y: solve(problem(y), FISTA(20)).gap  # noqa: B023, E731
        torch.testing.assert_close(vmap(gap)(y), torch.stack([gap(each) for each in y]), rtol=1e-6, atol=1e-12)
    for options in ({}, {"solver": FISTA(20), "tol": 1e-3}, {"solver": FISTA(20), "callback": lambda progress: None}):
        value = lambda y: solve(problem(y), **options).x.sin().sum()  # noqa: B023, E731
        for transform in (vmap(value), vmap(grad(value))):
            with pytest.raises(CapabilityError, match="vmap hides the values"):
                transform(y)
    close = lambda y: solve(problem(y), FISTA(2000), tol=1e-14, adjoint=Implicit()).x.sin().sum()  # noqa: E731
    expected = _gradient(lambda y: solve(problem(y), FISTA(2000), adjoint=Implicit()).x.sin().sum(), y[0])
    for transform in (grad, jacrev, jacfwd):
        torch.testing.assert_close(transform(close)(y[0]), expected, rtol=1e-6, atol=1e-6)


# Tensors that callables capture


def _captured(weight: Tensor, y: Tensor, solver, adjoint) -> Tensor:
    op = operator(lambda v: v @ weight.mT, lambda v: v @ weight, (4,), (3,), 2.0, dtype=torch.float64)
    return solve(Problem(op, mf.from_activation("tanh"), y, ridge=1.0), solver, adjoint=adjoint).x.sin().sum()


@pytest.mark.parametrize(
    ("solver", "adjoint"), [(ProxGD(60), Implicit()), (ADMM(40), Unroll()), (ADMM(40), Implicit())]
)
def test_captured_tensors_have_gradients_and_no_other_derivatives(solver, adjoint):
    weight, y = 0.3 * torch.randn(3, 4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    along = torch.randn_like(weight)
    f = lambda w: _captured(w, y, solver, adjoint)  # noqa: E731
    slope = (f(weight + WIDTH * along) - f(weight - WIDTH * along)) / (2 * WIDTH)
    torch.testing.assert_close((_gradient(f, weight) * along).sum(), slope, rtol=1e-6, atol=1e-8)
    second = [hvp, lambda f, x, d: jvp(f, (x,), (d,)), _dual, lambda f, x, d: grad(f)(x), lambda f, x, d: hessian(f)(x)]
    for transform in [*second, lambda f, x, d: vmap(grad(f))(torch.stack([x, x + d]))]:
        with pytest.raises(CapabilityError, match=r"callable of this problem captures; use .* Unroll") as caught:
            transform(f, weight, along)
        assert "\n" not in str(caught.value)
    # Tensors that the problem knows have every derivative.
    of_y = lambda y: _captured(weight, y, solver, adjoint)  # noqa: E731
    exact = lambda y: _captured(weight, y, FISTA(60), Unroll())  # noqa: E731
    torch.testing.assert_close(hessian(of_y)(y), hessian(exact)(y), rtol=1e-6, atol=1e-8)
    # Without a derivative nothing is refused.
    both = torch.stack([weight, weight + along])
    torch.testing.assert_close(vmap(f)(both), torch.stack([f(w) for w in both]))


@pytest.mark.parametrize("transform", {**FIRST, **FEW})
def test_operators_of_scipy(transform):
    """NumPy computes their products; the derivatives are those of the dense matrix."""
    matrix = 0.3 * np.random.default_rng(0).normal(size=(3, 4))
    y, along = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)

    def f(op):
        problem = lambda y: Problem(op, mf.from_activation("tanh"), y.reshape(2, 4), ridge=1.0)  # noqa: E731
        return lambda y: solve(problem(y), ProxGD(20)).x.sin().sum()

    expected = {**FIRST, **FEW}[transform](f(Dense(torch.tensor(matrix))), y, along)
    bound = Bounds(Dense(torch.tensor(matrix)).norm_sq(), None, None)
    for source in (scipy.sparse.csr_array(matrix), scipy.sparse.linalg.aslinearoperator(matrix)):
        of = f(as_operator(source).with_bounds(bound))
        if transform == "is_grads_batched" and not scipy.sparse.issparse(source):
            with pytest.raises(CapabilityError, match="is_grads_batched cannot"):
                _batched(of, y, along)
        else:
            torch.testing.assert_close({**FIRST, **FEW}[transform](of, y, along), expected)


@pytest.mark.parametrize("adjoint", [Implicit(), JacobianFree()], ids=lambda a: type(a).__name__)
def test_parameters_of_an_activation_of_the_users_own(adjoint):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

        def forward(self, z):
            return torch.tanh(self.scale.to(z) * z)

    module, y = Scaled(), torch.randn(2, 4, dtype=torch.float64)
    problem = Problem(Dense(0.3 * torch.randn(3, 4, dtype=torch.float64)), mf.Monotone(module), y, ridge=1.0)
    x = solve(problem, ProxGD(60), adjoint=adjoint).x
    (gradient,) = torch.autograd.grad(x.sin().sum(), module.scale)
    (unrolled,) = torch.autograd.grad(solve(problem, ProxGD(60)).x.sin().sum(), module.scale)
    assert gradient.abs() > 0
    if isinstance(adjoint, Implicit):
        torch.testing.assert_close(gradient, unrolled)
        x = solve(problem, ProxGD(60), adjoint=adjoint).x
        with pytest.raises(CapabilityError, match="captures"):
            torch.autograd.grad(x.sin().sum(), module.scale, create_graph=True)


# Layers


@pytest.mark.parametrize("conv", [False, True], ids=["dense", "conv"])
@pytest.mark.parametrize("adjoint", ADJOINTS, ids=str)
def test_transforms_of_a_fresh_layer_agree_with_its_backward_pass(adjoint, conv):
    def fresh():
        torch.manual_seed(0)
        return (
            SolverConv2d(2, 3, 3, padding=1, solver=ProxGD(5), adjoint=adjoint).double()
            if conv
            else SolverLinear(8, 6, solver=ProxGD(5), adjoint=adjoint).double()
        )

    y = torch.randn(3, 2, 4, 4, dtype=torch.float64) if conv else torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(vmap(fresh())(y[:, None]).squeeze(1), fresh()(y))
    layer = fresh()
    loss = lambda parameters, y: functional_call(layer, parameters, (y[None],)).sin().sum()  # noqa: E731
    rows = vmap(grad(loss), (None, 0))(dict(layer.named_parameters()), y)
    fresh_one = fresh()
    fresh_one(y).sin().sum().backward()
    for name, parameter in fresh_one.named_parameters():
        torch.testing.assert_close(rows[name].sum(0), parameter.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("conv", [False, True], ids=["dense", "conv"])
@pytest.mark.parametrize("adjoint", ADJOINTS, ids=str)
def test_backward_outside_of_autocast_and_in_half_precision(adjoint, conv, dtype):
    torch.manual_seed(0)
    for solver in (ProxGD(8), ADMM(8)):
        options = {"activation": "softplus", "solver": solver, "adjoint": adjoint, "ridge": 0.5}
        layer = SolverConv2d(2, 4, 3, padding=1, **options) if conv else SolverLinear(8, 6, **options)
        y = torch.randn(2, 2, 5, 5) if conv else torch.randn(3, 8)
        expected = torch.autograd.grad(layer(y).sin().sum(), [layer.weight, layer.bias])
        with torch.autocast("cpu", dtype=dtype):
            loss = layer(y).float().sin().sum()
        mixed = torch.autograd.grad(loss, [layer.weight, layer.bias])
        half = layer.to(dtype)
        pure = torch.autograd.grad(half(y.to(dtype)).float().sin().sum(), [half.weight, half.bias])
        for gradients in (mixed, pure):
            for got, exact in zip(gradients, expected, strict=True):
                assert (got.float() - exact).norm() <= 8 * torch.finfo(dtype).eps * exact.norm()


def test_a_checkpoint_refuses_to_draw_its_samples_for_a_batch_of_gradients():
    layer = SolverLinear(4, 3, solver=ProxSG(4), adjoint=Checkpoint(), dtype=torch.float64)
    y = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    rows = torch.eye(6, dtype=torch.float64).reshape(6, 2, 3)
    with pytest.raises(CapabilityError, match="use Unroll"):
        torch.autograd.grad(layer(y), [y], rows, is_grads_batched=True)
    layer.solver = ProxGD(4)
    (found,) = torch.autograd.grad(layer(y), [y], rows, is_grads_batched=True)
    expected = [torch.autograd.grad(layer(y), [y], row)[0] for row in rows]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("name", ["learned scale", "learned exponent", "learned radius", "l1"])
def test_a_hessian_in_one_number(name):
    """The gradient of a sum is one number in shared memory, which torch.func does not take as it is."""
    g = torch.Generator().manual_seed(0)
    A, y = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((4, 6), (2, 6)))

    def f(p: Tensor) -> Tensor:
        return solve(Problem(Dense(A), FUNCTIONS[name](p[None]), y), FISTA(600), adjoint=Implicit()).x.sum()

    at = torch.tensor(0.5, dtype=torch.float64)
    slope = (grad(f)(at + WIDTH) - grad(f)(at - WIDTH)) / (2 * WIDTH)
    torch.testing.assert_close(hessian(f)(at), slope, rtol=1e-5, atol=1e-7)

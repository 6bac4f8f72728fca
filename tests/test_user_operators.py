"""Laws of a user's operator: it is solved as the dense one is, differentiates, and is checked before it is used."""

import pytest
import torch
from torch import Tensor

from minimand.adjoints import Checkpoint, Implicit, JacobianFree, Unroll
from minimand.errors import CapabilityError, OperatorError, OptionError, ShapeError
from minimand.functions import NonNegative, Simplex, from_activation
from minimand.norms.kernel import Bounds
from minimand.operators import Conv2d, Dense, LinearOperator, Transposed, check_operator, lipschitz, operator
from minimand.solvers import FISTA, LipschitzTracker, Problem, ProxGD, solve

from .cases import operators, problems, solvers

deterministic = pytest.mark.parametrize("case", solvers.DETERMINISTIC, ids=solvers.ids(solvers.DETERMINISTIC))
stochastic = pytest.mark.parametrize("case", solvers.STOCHASTIC, ids=solvers.ids(solvers.STOCHASTIC))
every_operator = pytest.mark.parametrize("case", operators.ALL, ids=lambda case: case.name)


def _callables(weight: Tensor, **options: object) -> LinearOperator:
    return operator(lambda y: y @ weight.mT, lambda x: x @ weight, (weight.shape[1],), (weight.shape[0],), **options)


class Matrix(LinearOperator):
    """The ten lines."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__((weight.shape[1],), (weight.shape[0],))
        self.entries = weight

    def apply(self, y: Tensor) -> Tensor:
        return y @ self.entries.mT

    def adjoint(self, x: Tensor) -> Tensor:
        return x @ self.entries


@pytest.mark.parametrize("make", [_callables, Matrix], ids=["callables", "subclass"])
@deterministic
def test_solved_as_the_dense_operator(case, make):
    problem = problems.dense(NonNegative())
    own = Problem(make(problem.operator.weight), problem.function, problem.y, problem.bias, problem.ridge)
    assert solve(own, case.long, tol=1e-14).converged
    # A gap cannot certify more digits; all iterations reach them.
    mine, reference = solve(own, case.long), solve(problem, case.long)
    torch.testing.assert_close(mine.x, reference.x, atol=1e-9, rtol=0)


@pytest.mark.parametrize("shared", [False, True], ids=["per-row", "shared"])
@stochastic
def test_sampled_as_the_dense_operator_given_the_norms_of_its_parts(case, shared):
    problem = problems.dense(NonNegative())
    dense, weight = problem.operator, problem.operator.weight
    norms = {"norm_sq": dense.norm_sq(), "input_norms_sq": dense.input_norms_sq()}
    own = Problem(
        _callables(weight, **norms, output_norms_sq=dense.output_norms_sq()), problem.function, problem.y, ridge=0.1
    )
    problem = Problem(dense, problem.function, problem.y, ridge=0.1)
    solver = solvers.shared(case.solver) if shared else case.solver
    mine, reference = (solve(p, solver, generator=torch.Generator().manual_seed(0)).x for p in (own, problem))
    torch.testing.assert_close(mine, reference)


@stochastic
def test_without_sampling_stochastic_solvers_are_refused_before_any_work(case):
    calls: list[str] = []
    own = operator(lambda y: calls.append("apply") or y, lambda x: calls.append("adjoint") or x, (4,), (4,))
    with pytest.raises(
        CapabilityError, match=rf"{type(case.solver).__name__}.*CallableOperator.*input_norms_sq"
    ) as caught:
        solve(Problem(own, NonNegative(), torch.ones(1, 4)), case.solver)
    assert not calls
    assert "\n" not in str(caught.value)


@deterministic
def test_images_to_vectors(case):
    """The solution is a vector and the data an image, and the other way round; rows are independent."""
    wide = next(case for case in operators.USERS if case.name == "projections").operator()
    for op in (wide, Transposed(wide)):
        y = torch.randn(2, 3, *op.input_shape, dtype=torch.float64)
        problem = Problem(op, NonNegative(), y, torch.randn(op.outputs, dtype=torch.float64), 2.0)
        matrix = Dense(operators.dense_matrix(op))
        bias = op.per_feature(problem.bias).expand(op.output_shape).reshape(-1)
        flat = Problem(matrix, NonNegative(), y.flatten(2), bias, 2.0)
        mine, reference = solve(problem, case.long, tol=1e-14), solve(flat, case.long)
        assert mine.converged
        torch.testing.assert_close(mine.x.flatten(2), reference.x.flatten(2), atol=1e-6, rtol=0)
        assert mine.x.shape == (2, 3, *op.output_shape)


@pytest.mark.parametrize(
    "adjoint", [Unroll(), Checkpoint(), Implicit(), JacobianFree()], ids=lambda a: type(a).__name__
)
@pytest.mark.parametrize("make", [_callables, Matrix], ids=["callables", "subclass"])
@deterministic
def test_gradients_reach_the_captured_tensors(case, make, adjoint):
    problem = problems.dense(from_activation("softplus"), ridge=0.5)
    bound = problem.operator.norm_sq()
    gradients = []
    for build in (make, Dense):
        weight = problem.operator.weight.clone().requires_grad_()
        op = build(weight)
        # Equal steps, so that equal iterations are compared.
        op = op.with_bounds(Bounds(bound))
        x = solve(Problem(op, problem.function, problem.y, ridge=0.5), case.solver, adjoint=adjoint).x
        gradients.append(torch.autograd.grad(x.sin().sum(), weight)[0])
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().sum() > 0


def test_the_bound_follows_a_captured_tensor_that_changes():
    weight = torch.randn(5, 5, dtype=torch.float64)
    op = _callables(weight)
    before = op.norm_sq()
    weight.mul_(10)
    torch.testing.assert_close(op.norm_sq(), 100 * before, rtol=1e-6, atol=0)
    called = _callables(weight, norm_sq=lambda: weight.square().sum())
    weight.mul_(2)
    assert called.norm_sq() == weight.square().sum()


def test_float32_callables_with_float32_data():
    weight = torch.randn(150, 200)
    op = _callables(weight)
    assert torch.linalg.matrix_norm(weight.double(), 2) ** 2 <= op.norm_sq()
    assert op.norm_sq() == pytest.approx(float(lipschitz(op)), rel=1e-6)
    solution = solve(Problem(op, NonNegative(), torch.randn(3, 200), ridge=1.0), FISTA(500), tol=1e-2)
    assert solution.converged
    assert solution.x.dtype == torch.float32


@every_operator
def test_every_operator_passes_its_check(case):
    check_operator(case.operator())
    check_operator(case.operator(torch.float32))


WRONG = {
    "another map": (lambda y: 2 * y, lambda x: 3 * x),
    "a shift the same way": (lambda y: y.roll(1, -1), lambda x: x.roll(1, -1)),
    "an offset": (lambda y: y + 1, lambda x: x),
    "not linear": (lambda y: y.abs(), lambda x: x),
    "nearly right": (lambda y: y, lambda x: x * (1 + 1e-3)),
    "not finite": (lambda y: y * float("nan"), lambda x: x),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_adjoint_is_refused_with_the_size_of_the_mismatch(name):
    with pytest.raises(OperatorError, match=r"relative mismatch of [0-9.naif]+"):
        check_operator(operator(*WRONG[name], (8,), (8,), 100.0))


def test_the_mismatch_is_the_relative_one():
    wrong = operator(lambda y: y, lambda x: 1.5 * x, (8,), (8,), 100.0)
    with pytest.raises(OperatorError) as caught:
        check_operator(wrong)
    text = str(caught.value)
    left, right = (float(text.split(f"{side} = ")[1].split()[0].strip(",")) for side in ("⟨Ay, x⟩", "⟨y, Aᵀx⟩"))
    assert right == pytest.approx(1.5 * left, rel=1e-4)
    check_operator(wrong, tol=1.0)


def test_a_bound_below_the_truth_is_refused():
    with pytest.raises(OperatorError, match=r"norm_sq\(\).*is 3.*at least 4"):
        check_operator(operator(lambda y: 2 * y, lambda x: 2 * x, (8,), (8,), 3.0))
    check_operator(operator(lambda y: 2 * y, lambda x: 2 * x, (8,), (8,), 4.0))


def test_shapes_are_checked():
    with pytest.raises(ShapeError, match=r"apply.*\(2, 8\).*\(2, 7\)"):
        check_operator(operator(lambda y: y, lambda x: x, (8,), (7,)))
    op = operator(lambda y: y, lambda x: x, (8,), (8,))
    with pytest.raises(ShapeError, match=r"8.*\(2, 7\)"):
        op.apply(torch.ones(2, 7))
    with pytest.raises(ShapeError, match=r"Forgetful.*super\(\)"):
        _ = type("Forgetful", (Matrix,), {"__init__": lambda self: None})().input_shape
    with pytest.raises(ShapeError, match="input_shape"):
        operator(lambda y: y, lambda x: x, (), (8,))
    with pytest.raises(ShapeError, match=r"input_norms_sq.*8.*\(3,\)"):
        operator(lambda y: y, lambda x: x, (8,), (8,), 1.0, input_norms_sq=torch.ones(3)).input_norms_sq()


def test_bad_operators_are_refused():
    with pytest.raises(CapabilityError, match=r"callables.*Tensor"):
        operator(torch.eye(3), torch.eye(3), (3,), (3,))
    with pytest.raises(OptionError, match="norm_sq"):
        operator(lambda y: y, lambda x: x, (3,), (3,), -1.0)
    op = operator(lambda y: y, lambda x: x, (3,), (3,))
    for call in (lambda: op.weight, lambda: op.with_weight(torch.eye(3)), lambda: LipschitzTracker(op)):
        with pytest.raises(CapabilityError, match="CallableOperator"):
            call()
    with pytest.raises(CapabilityError, match="Simplex"):
        solve(Problem(_callables(torch.eye(3), input_norms_sq=1.0), Simplex(), torch.ones(1, 3)), solvers.RCD())


@pytest.mark.parametrize("case", [*operators.OPERATORS, *operators.MEASUREMENTS], ids=lambda case: case.name)
def test_compiled_bounds_are_those_of_eager_mode(case):
    torch._dynamo.reset()
    op = case.operator(torch.float32)
    compiled = torch.compile(lambda: (op.norm_sq(), op.input_norms_sq()), fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(), (op.norm_sq(), op.input_norms_sq())))


def test_compiled_products_of_operators_have_their_own_bound():
    """Once the bound of such a product was that of its inner weight alone."""
    torch._dynamo.reset()
    op = next(case for case in operators.MEASUREMENTS if case.name == "sparse synthesis").operator()
    compiled = torch.compile(lambda: op.norm_sq(), fullgraph=True, backend="aot_eager")
    assert compiled() >= operators.norm_sq(operators.dense_matrix(op))


def test_one_step_is_the_map_and_its_activation():
    weight, y = torch.randn(4, 6), torch.randn(3, 6)
    x = solve(Problem(_callables(weight), NonNegative(), y), ProxGD(1, step=1.0)).x
    assert torch.equal(x, torch.relu(y @ weight.mT))


def test_a_convolution_with_reflected_borders():
    """The library has no such operator; its adjoint is a vector–Jacobian product of torch."""
    kernel = torch.rand(1, 1, 3, 3, dtype=torch.float64)

    def blur(y: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(torch.nn.functional.pad(y, (1, 1, 1, 1), mode="reflect"), kernel)

    def adjoint(x: Tensor) -> Tensor:
        return torch.func.vjp(blur, torch.zeros_like(x))[1](x)[0]

    op = operator(blur, adjoint, (1, 14, 14), (1, 14, 14), dtype=torch.float64)
    check_operator(op)
    truth = operators.norm_sq(operators.dense_matrix(op))
    assert truth <= op.norm_sq() <= 1.101 * truth
    zero_padded = Conv2d(kernel, (14, 14), padding=1)
    assert op.input_shape == zero_padded.input_shape

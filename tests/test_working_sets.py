"""Laws of working sets: the signs of a small Lasso are found exactly, and the sets are chosen by the true gradient."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Lasso
from torch import Tensor

from minimand.functions import L1, ElasticNet
from minimand.functions.base import Function
from minimand.operators import Dense
from minimand.solvers import Datafit, Huber, Logistic, Problem, Quadratic, Spectral, WorkingSet, solve
from minimand.solvers.signs import sign_search


def _correlated(inputs: int, outputs: int, correlation: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)
    for row in range(1, outputs):
        matrix[row] = correlation * matrix[row - 1] + (1 - correlation**2) ** 0.5 * matrix[row]
    return matrix, torch.randn(inputs, generator=generator, dtype=torch.float64)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31 - 1),
    correlation=st.sampled_from([0.0, 0.9, 0.99]),
    share=st.sampled_from([0.001, 0.1, 0.9, 1.1]),
    start=st.sampled_from([0.0, 1.0, 100.0]),
)
def test_signs_are_found_from_any_start(seed: int, correlation: float, share: float, start: float) -> None:
    matrix, y = _correlated(30, 12, correlation, seed)
    generator = torch.Generator().manual_seed(seed)
    gram, linear = matrix @ matrix.mT, matrix @ y
    weight = share * float(linear.abs().max()) * (0.5 + torch.rand(12, generator=generator, dtype=torch.float64))
    weight[0] = 0.0  # an entry without a penalty
    begin = start * torch.randn(12, generator=generator, dtype=torch.float64)
    x = sign_search(gram, linear, weight, begin)
    assert x is not None
    descent, room = linear - gram @ x, 1e-9 * linear.abs().max()
    assert bool((descent.abs() <= weight + room).all())
    assert bool(((descent - weight * x.sign())[x != 0].abs() <= room).all())


@pytest.mark.parametrize("seed", range(5))
def test_signs_are_found_from_more_entries_than_the_rank(seed: int) -> None:
    matrix, y = _correlated(20, 60, 0.3, seed)
    gram, linear = matrix @ matrix.mT, matrix @ y
    weight = torch.full_like(linear, 0.05 * float(linear.abs().max()))
    x = sign_search(gram, linear, weight, torch.linspace(-1, 1, 60, dtype=torch.float64))
    assert x is not None
    descent, room = linear - gram @ x, 1e-7 * linear.abs().max()
    assert int((x != 0).sum()) <= 20
    assert bool((descent.abs() <= weight + room).all())
    assert bool(((descent - weight * x.sign())[x != 0].abs() <= room).all())


@pytest.mark.parametrize("share", [0.1, 0.02])
@pytest.mark.parametrize("correlation", [0.0, 0.95])
def test_sets_grow_where_no_gap_is_known(correlation: float, share: float) -> None:
    """An intercept is an entry without a penalty."""
    matrix, y = _correlated(100, 900, correlation, seed=5)
    matrix, y = matrix + 1, y + 5
    weight = share * float((matrix @ (y - y.mean())).abs().max())
    theirs = Lasso(weight / 100, tol=1e-10, max_iter=100_000).fit(matrix.mT.numpy(), y.numpy())
    function = L1(torch.cat([torch.zeros(1), torch.full((900,), weight)]).double())
    problem = Problem(Dense(torch.cat([torch.ones(1, 100), matrix])), function, y.unsqueeze(0))
    found = solve(problem, WorkingSet(), tol=1e-10)
    assert found.converged
    np.testing.assert_allclose(found.x[0, 1:].numpy(), theirs.coef_, atol=1e-5)
    np.testing.assert_allclose(float(found.x[0, 0]), theirs.intercept_, atol=1e-4)


@pytest.mark.parametrize("share", [1.0, 20.0])
def test_a_weight_above_the_gradient_gives_zero(share: float) -> None:
    matrix, y = _correlated(40, 700, 0.5)
    problem = Problem(Dense(matrix), L1(share * float((matrix @ y).abs().max()) * (1 + 1e-12)), y.unsqueeze(0))
    found = solve(problem)
    assert found.converged
    assert not bool(found.x.any())


def test_equal_columns_are_left_to_other_steps() -> None:
    """The search returns the solution or nothing, and the working sets converge either way."""
    matrix, y = _correlated(20, 40, 0.5)
    twice = torch.cat([matrix, matrix])
    problem = Problem(Dense(twice), L1(0.01 * float((matrix @ y).abs().max())), y.unsqueeze(0))
    found = solve(problem, WorkingSet(), tol=1e-9)
    single = solve(Problem(Dense(matrix), problem.function, problem.y), tol=1e-12)
    assert found.converged
    torch.testing.assert_close(found.x[:, :40] + found.x[:, 40:], single.x, atol=1e-3, rtol=0)
    assert float(found.objective - single.objective) <= 1e-8 * float(single.objective)


def test_the_sets_are_chosen_by_the_gradient() -> None:
    matrix, y = _correlated(60, 500, 0.9)
    problem = Problem(Dense(matrix), L1(0.02 * float((matrix @ y).abs().max())), y.unsqueeze(0), ridge=0.01)
    solver = WorkingSet()
    state = solver.init(problem, None)
    for k in range(3):
        state = solver.advance(problem, state, k, None)
        whole = problem.descent(state.x, problem.linear())
        torch.testing.assert_close(state.certificate.descent, whole if state.alive is None else whole[..., state.alive])


@pytest.mark.parametrize(
    "function", [L1(1.0), ElasticNet(1.0, 0.5), L1(torch.linspace(0.5, 2, 300).double())], ids=repr
)
@pytest.mark.parametrize("datafit", [Quadratic(), Logistic(), Huber(0.5)], ids=repr)
@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_screened_outputs_are_zero_in_the_solution(function: Function, datafit: Datafit, ridge: float) -> None:
    """Against a solution by spectral steps on all outputs; something must be screened before the end."""
    matrix, y = _correlated(40, 300, 0.5, seed=3)
    matrix = 0.3 * matrix
    data = (y.sign() if isinstance(datafit, Logistic) else 3 * y).unsqueeze(0)
    problem = Problem(Dense(matrix), function, data, ridge=ridge, datafit=datafit)
    exact = solve(problem, Spectral(4000, polish=10), tol=1e-11).x
    solver = WorkingSet()
    state = solver.init(problem, None)
    for k in range(6):
        state = solver.advance(problem, state, k, None)
        if state.alive is not None:
            gone = torch.ones(300, dtype=torch.bool).index_fill(0, state.alive, False)
            assert float(exact[:, gone].abs().max()) <= 1e-7
    assert state.alive is not None
    torch.testing.assert_close(state.x, exact, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("share", [0.1, 0.02])
def test_scikit_learn_agrees_on_correlated_columns(share: float, dtype: torch.dtype) -> None:
    matrix, y = _correlated(80, 500, 0.95)
    weight = share * float((matrix @ y).abs().max())
    theirs = Lasso(weight / 80, fit_intercept=False, tol=1e-14, max_iter=100_000).fit(matrix.mT.numpy(), y.numpy())
    exact = dtype is torch.float64
    problem = Problem(Dense(matrix.to(dtype)), L1(weight), y.unsqueeze(0).to(dtype))
    found = solve(problem, WorkingSet(), tol=1e-12 if exact else 1e-6)
    assert found.converged
    assert found.iterations < 12
    np.testing.assert_allclose(found.x[0].double().numpy(), theirs.coef_, atol=1e-6 if exact else 1e-3)

"""Laws: the ridge solver equals dense algebra; conjugate gradients are the textbook's, iterate by iterate."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimand.errors import OptionError
from minimand.linalg import gram
from minimand.solvers.linear import conjugate_gradient, gram_factor, ridge_factor


@given(m=st.integers(1, 8), n=st.integers(1, 8), shift=st.floats(1e-3, 10), seed=st.integers(0, 1000))
def test_ridge_factor_solves_by_either_side(m, n, shift, seed):
    g = torch.Generator().manual_seed(seed)
    A = torch.randn(m, n, generator=g, dtype=torch.float64)
    rows = torch.randn(3, m, generator=g, dtype=torch.float64)
    exact = torch.linalg.solve(A @ A.T + shift * torch.eye(m, dtype=torch.float64), rows.T).T
    torch.testing.assert_close(ridge_factor(A, shift).solve(rows), exact, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (2, 4, 6), (3, 2, 6, 4)])
def test_inverses_are_those_of_dense_algebra(shape):
    A = torch.randn(*shape, dtype=torch.float64)
    exact = torch.linalg.inv(A @ A.mT + 0.5 * torch.eye(shape[-2], dtype=torch.float64))
    torch.testing.assert_close(ridge_factor(A, 0.5).inverse(), exact, atol=1e-10, rtol=1e-10)


def test_ridge_factor_is_differentiable():
    A = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda A, r: ridge_factor(A, 0.5).solve(r), (A, rows))
    assert torch.autograd.gradcheck(lambda A, r: ridge_factor(A.T, 0.5).solve(r[:, :3]), (A, rows))


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (2, 3, 5)])
def test_every_derivative_of_a_factored_system(shape):
    """Second derivatives, batches of gradients, a learned shift, and forward mode over reverse mode."""
    g = torch.Generator().manual_seed(0)
    A = torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(*shape[:-2], 4, shape[-2], generator=g, dtype=torch.float64, requires_grad=True)
    shift = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    f = lambda A, rows, shift: ridge_factor(A, shift).solve(rows)  # noqa: E731
    inputs = (A, rows, shift)
    assert torch.autograd.gradcheck(f, inputs, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(f, inputs, check_fwd_over_rev=True)
    exact = torch.linalg.solve(A @ A.mT + shift * torch.eye(shape[-2]), rows.mT).mT
    torch.testing.assert_close(f(*inputs), exact)
    torch.testing.assert_close(ridge_factor(A, 0.5).inverse(), torch.linalg.inv(A @ A.mT + 0.5 * torch.eye(shape[-2])))


@pytest.mark.parametrize("rows", [3, 255, 256, 301])
def test_the_gram_by_blocks_is_the_gram_with_its_gradient(rows):
    matrix = torch.randn(rows, 20, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(rows, rows, dtype=torch.float64)
    ways = (gram(matrix), matrix @ matrix.mT)
    torch.testing.assert_close(*ways)
    torch.testing.assert_close(*(torch.autograd.grad((weight * way).sum(), matrix) for way in ways))
    torch.testing.assert_close(gram(matrix.detach(), half=True).tril(), ways[1].tril())


@pytest.mark.parametrize("n", [767, 768, 800, 1024])
def test_the_factor_by_panels_is_lapacks_and_reads_the_lower_triangle_only(n):
    root = torch.randn(n, n, dtype=torch.float64) / n**0.5
    product = root @ root.mT
    factored = gram_factor(product.tril() + torch.full_like(product, 7.0).triu(1), 0.1)
    exact = torch.linalg.cholesky(product + 0.1 * torch.eye(n, dtype=torch.float64))
    torch.testing.assert_close(factored.factor, exact, rtol=1e-11, atol=1e-12)
    rows = torch.randn(3, n, dtype=torch.float64)
    torch.testing.assert_close(factored.solve(rows), torch.cholesky_solve(rows.mT, exact).mT, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", ["few columns", "smooth kernel"])
def test_the_factor_by_panels_succeeds_where_lapack_does(kind):
    """Ill-conditioned in float32: products with inverses of corners would fail here."""
    n, g = 800, torch.Generator().manual_seed(0)
    if kind == "few columns":
        rows = torch.randn(n, 20, generator=g)
        product = rows @ rows.mT / 20
    else:
        points = torch.linspace(0, 1, n)
        product = torch.exp(-10 * (points[:, None] - points) ** 2)
    shift = 1e-5 if kind == "few columns" else 3e-5
    shifted = product + shift * torch.eye(n)
    exact, failed = torch.linalg.cholesky_ex(shifted)
    assert not failed
    factored = gram_factor(product, shift)
    assert factored.damping == 0
    worst = [float((f @ f.mT - shifted).norm() / shifted.norm()) for f in (factored.factor, exact)]
    assert worst[0] <= 3 * worst[1]


@pytest.mark.parametrize("n", [5, 900])
def test_a_matrix_that_rounding_left_indefinite_is_damped_and_a_truly_indefinite_one_refused(n):
    product = torch.ones(n, n, dtype=torch.float64)
    product[-1, -1] -= 1e-14 * n
    factored = gram_factor(product, 0.0)
    assert 0 < factored.damping < 1e-9
    shifted = product + factored.damping * torch.eye(n, dtype=torch.float64)
    torch.testing.assert_close(factored.factor @ factored.factor.mT, shifted, rtol=1e-12, atol=1e-12)
    with pytest.raises(OptionError, match="not positive definite; raise the shift"):
        gram_factor(-torch.eye(n, dtype=torch.float64), 0.0)


def _textbook(M, b, k):
    """Hestenes & Stiefel, 1952, as every textbook prints it."""
    x, r = np.zeros_like(b), b.copy()
    p = r.copy()
    for _ in range(k):
        Mp = M @ p
        alpha = (r @ r) / (p @ Mp)
        x = x + alpha * p
        new = r - alpha * Mp
        p = new + (new @ new) / (r @ r) * p
        r = new
    return x


@given(k=st.integers(1, 6), seed=st.integers(0, 1000))
def test_conjugate_gradient_is_the_textbook_method(k, seed):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(7, 7))
    M, rhs = root @ root.T + np.eye(7), rng.normal(size=(4, 7))
    expected = np.stack([_textbook(M, b, k) for b in rhs])
    got = conjugate_gradient(lambda v: v @ torch.from_numpy(M), torch.from_numpy(rhs), k)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-8, atol=1e-10)


def test_conjugate_gradient_rows_do_not_mix_and_a_solved_one_stays():
    M = torch.diag(torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))
    rhs = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    x = conjugate_gradient(lambda v: v @ M, rhs, 20)
    torch.testing.assert_close(x, rhs / M.diagonal())


@pytest.mark.parametrize("tol", [1e-3, 1e-10])
def test_conjugate_gradient_stops_at_its_relative_tolerance(tol):
    root = torch.randn(30, 30, dtype=torch.float64)
    M, rhs = root @ root.T + torch.eye(30, dtype=torch.float64), torch.randn(2, 30, dtype=torch.float64)
    calls = []

    def apply(v):
        calls.append(1)
        return v @ M

    x = conjugate_gradient(apply, 1e-8 * rhs, 1000, tol=tol)
    assert ((x @ M - 1e-8 * rhs).norm(dim=-1) <= 2 * tol * 1e-8 * rhs.norm(dim=-1)).all()
    assert len(calls) < 200

"""Law: the factorised problems reach the minimum of their convex counterparts and certify it."""

import cvxpy as cp
import numpy as np
import pytest
import torch

from minimand.factor import (
    NMF,
    CPTensor,
    LowRank,
    MatrixCompletion,
    NonNegativeL2,
    RobustPCA,
    SparseDictionary,
    SparseL2,
    Status,
    certify,
)
from minimand.factor.descent import Components, SquaredDescent, balanced, merged, pruned
from minimand.factor.losses import HuberLoss, Squared
from minimand.factor.lowrank import shrunk
from minimand.factor.matrices import RowSharding
from minimand.factor.observed import rotated
from minimand.factor.regularizers import L2
from minimand.functions import NuclearNorm

from .test_certificate import SOLVER, doubly_nonnegative_minimum, nuclear_minimum

HERE = RowSharding()


def test_without_a_certificate_the_factors_are_the_same_and_nothing_is_claimed():
    Y = np.abs(low_rank(30, 20, 4))
    proved = NMF(0.5, n_components=4, effort=0, random_state=0).fit(Y)
    bare = NMF(0.5, n_components=4, effort=None, random_state=0).fit(Y)
    np.testing.assert_array_equal(bare.components_, proved.components_)
    assert bare.objective_ == proved.objective_
    assert (bare.certificate_.status, bare.certificate_.gap) == (Status.UNDECIDED, np.inf)
    with pytest.raises(ValueError, match="n_components"):
        NMF(0.5, effort=None).fit(Y)


def low_rank(n, m, k, noise=0.1, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, k)) @ rng.normal(size=(k, m)) + noise * rng.normal(size=(n, m))


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (200, 150), (150, 400)])
def test_lowrank_is_the_closed_form(shape):
    Y = low_rank(*shape, 6)
    model = LowRank(lam=5.0, random_state=0)
    U = model.fit_transform(Y)
    best = NuclearNorm(5.0).prox(torch.from_numpy(Y)).numpy()
    np.testing.assert_allclose(model.inverse_transform(U), best, atol=1e-5 * np.abs(best).max())
    assert model.objective_ == pytest.approx(nuclear_minimum(torch.from_numpy(Y), 5.0), rel=1e-9)
    assert model.certificate_.relative_gap < 1e-6
    assert model.n_components_ == np.sum(np.linalg.svd(Y, compute_uv=False) > 5.0)
    np.testing.assert_allclose(np.linalg.norm(U, axis=0), np.linalg.norm(model.components_, axis=1), rtol=1e-6)


def test_lowrank_finds_singular_values_next_to_the_threshold():
    """A randomised SVD can miss singular values at the edge of the noise. The certificate detects it."""
    Y = torch.from_numpy(low_rank(200, 150, 3, noise=1.0))
    s = torch.linalg.svdvals(Y)
    lam = float(s[3] + s[4]) / 2
    model = LowRank(lam, random_state=0).fit(Y)
    assert model.n_components_ == 4
    assert model.objective_ == pytest.approx(nuclear_minimum(Y, lam), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_adaptive_svd_is_the_prox(dtype, generator):
    Y = torch.from_numpy(low_rank(120, 160, 30, 0.01)).to(dtype)
    found = shrunk(Y, 2.0, rows=HERE, generator=generator)
    U, V = found.factors()
    torch.testing.assert_close(
        U @ V.mT, NuclearNorm(2.0).prox(Y), atol=2e-3 if dtype == torch.float32 else 1e-6, rtol=0
    )


def completion_problem(n=9, m=7):
    Y = low_rank(n, m, 2)
    seen = np.random.default_rng(1).random((n, m)) < 0.7
    seen[:, 0] = seen[0] = True
    return Y, seen, np.where(seen, Y, np.nan)


def test_completion_reaches_the_convex_minimum():
    Y, seen, hidden = completion_problem()
    X = cp.Variable(Y.shape)
    best = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(cp.multiply(seen, X - Y)) + 0.5 * cp.normNuc(X))).solve(**SOLVER)
    model = MatrixCompletion(0.5, tol=1e-5, random_state=0)
    U = model.fit_transform(hidden)
    assert model.certificate_.status is Status.CERTIFIED
    assert model.objective_ - best <= 1e-5 * best
    assert model.objective_ >= best - 1e-7
    np.testing.assert_allclose(model.inverse_transform(U), X.value, atol=0.02)
    assert certify(hidden, U, model.components_.T, lam=0.5, mask=seen, tol=1e-4).status is Status.CERTIFIED


def test_completion_takes_sparse_matrices_as_what_is_observed():
    import scipy.sparse as sp

    Y, seen, hidden = completion_problem()
    Y = np.where(np.arange(Y.size).reshape(Y.shape) % 11 == 0, 0.0, Y)  # observed zeros
    hidden = np.where(seen, Y, np.nan)
    entries = sp.coo_array((Y[seen], np.nonzero(seen)), Y.shape)
    dense = MatrixCompletion(0.5, random_state=0).fit_transform(hidden)
    for kind in (entries, entries.tocsr(), entries.tocsc()):
        model = MatrixCompletion(0.5, random_state=0)
        np.testing.assert_allclose(model.fit_transform(kind), dense, atol=1e-8)
        np.testing.assert_allclose(model.transform(kind), model.transform(hidden))
    tensor = torch.sparse_coo_tensor(np.array(np.nonzero(seen)), Y[seen], Y.shape, check_invariants=True)
    found = MatrixCompletion(0.5, random_state=0).fit_transform(tensor)
    assert isinstance(found, torch.Tensor)
    np.testing.assert_allclose(found.numpy(), dense, atol=1e-8)


@pytest.mark.parametrize("gamma", [None, 1.0, 10.0])
def test_robust_pca_reaches_the_convex_minimum(gamma):
    rng = np.random.default_rng(0)
    Y = low_rank(9, 8, 2) + np.where(rng.random((9, 8)) < 0.1, 8.0, 0.0)
    lam = 2.5
    X, E = cp.Variable(Y.shape), cp.Variable(Y.shape)
    if gamma is None:
        program = cp.Problem(cp.Minimize(lam * cp.normNuc(X) + cp.sum(cp.abs(Y - X))))
    else:
        fit = gamma / 2 * cp.sum_squares(Y - X - E)
        program = cp.Problem(cp.Minimize(lam * cp.normNuc(X) + cp.sum(cp.abs(E)) + fit))
    best = program.solve(**SOLVER)
    model = RobustPCA(lam, gamma, tol=1e-4, random_state=0)
    U = model.fit_transform(Y)
    assert model.certificate_.status is Status.CERTIFIED
    assert -1e-7 * best <= model.objective_ - best <= 1e-4 * best
    assert model.certificate_.gap >= model.objective_ - best - 1e-7
    np.testing.assert_allclose(model.low_rank_, U @ model.components_, atol=1e-12)
    loss = np.abs(model.sparse_).sum()
    if gamma is None:
        np.testing.assert_allclose(model.low_rank_ + model.sparse_, Y)
    else:
        loss += gamma / 2 * np.square(Y - model.low_rank_ - model.sparse_).sum()
    nuclear = np.linalg.svd(model.low_rank_, compute_uv=False).sum()
    assert loss + lam * nuclear == pytest.approx(model.objective_, rel=1e-6)


def test_the_prox_of_the_loss(generator):
    s = torch.randn(5, generator=generator, dtype=torch.float64) * 3
    grid = torch.linspace(-12, 12, 24001, dtype=torch.float64)
    for gamma in (None, 0.7):
        loss = HuberLoss(s.unsqueeze(0), gamma)
        best = loss.prox_residual(s, 0.4)
        for i in range(5):
            values = torch.stack([0.4 * loss.of(d) for d in grid[::8]]) + 0.5 * (grid[::8] - s[i]).square()
            assert float(best[i]) == pytest.approx(float(grid[::8][values.argmin()]), abs=8e-3)


def test_theorem_1_a_local_minimum_with_a_zero_pair_and_polar_at_most_lam_is_global():
    """[Vidal2018]: it is certified, and its value is that of the convex problem (exact for 2 × 2: equal cones)."""
    rng = np.random.default_rng(0)
    for _ in range(4):
        Y = torch.from_numpy(rng.random((2, 2)))
        lam = 0.2 * float(torch.linalg.matrix_norm(Y, 2))
        model = NMF(lam, tol=1e-5, random_state=0)
        U = model.fit_transform(Y)
        padded = torch.cat([U, 0 * U[:, :1]], 1), torch.cat([model.components_.mT, 0 * model.components_.mT[:, :1]], 1)
        found = certify(Y, *padded, lam=lam, regularizer="nonnegative", tol=1e-4)
        assert found.status is Status.CERTIFIED
        assert model.objective_ == pytest.approx(doubly_nonnegative_minimum(Y, lam), rel=2e-4)


@pytest.mark.filterwarnings("ignore:.*stopped before its certificate")
def test_nmf_grows_to_the_planted_parts_and_proves_it():
    rng = np.random.default_rng(0)
    parts = rng.random((4, 12)) * (rng.random((4, 12)) < 0.5)
    Y = rng.random((18, 4)) @ parts
    lam = 0.05 * np.linalg.norm(Y, 2)
    model = NMF(lam, random_state=0)
    U = model.fit_transform(Y)
    assert model.certificate_.status is Status.CERTIFIED
    assert model.certificate_.relative_gap <= 1e-3
    best = doubly_nonnegative_minimum(torch.from_numpy(Y), lam)
    assert 0 <= model.objective_ - best + 1e-6 <= model.certificate_.gap + 1e-5
    assert U.min() >= 0
    assert model.components_.min() >= 0
    # Too few components cannot be the minimum over all sizes.
    small = NMF(lam, n_components=1, random_state=0).fit(Y)
    assert small.n_components_ == 1
    assert small.certificate_.status is Status.IMPROVABLE
    assert small.objective_ > model.objective_
    assert NMF(lam, r_max=2, random_state=0).fit(Y).n_components_ <= 2


@pytest.mark.parametrize("theta", [L2(), NonNegativeL2(), SparseL2(0.3)], ids=str)
def test_descent_never_rises_and_growth_promises_less_than_it_brings(theta, generator):
    Y = torch.rand(20, 15, generator=generator, dtype=torch.float64)
    descent = SquaredDescent(Squared(Y), theta, 0.3)
    pair = Components(*(torch.rand(3, n, generator=generator, dtype=torch.float64) for n in (20, 15)))
    before = float("inf")
    for _ in range(8):
        pair, objective, _ = descent.run(pair, 3, 1e-9)
        assert objective <= before * (1 + 1e-12)
        before = objective
    pair, objective, _ = descent.run(pair, 500, 1e-9)
    direct = 0.5 * (Y - pair.U.mT @ pair.V).square().sum() + 0.3 * theta.values(pair.U, pair.V, HERE).sum()
    assert objective == pytest.approx(float(direct))
    found = theta.directions(descent_residual(Y, pair), 1, generator).above(0.3)
    assert len(found.values) == 1
    squares = float(found.left.square().sum() * found.right.square().sum())
    size = ((float(found.values[0]) - 0.3) / squares) ** 0.5
    grown = pair.joined(Components(size * found.left, size * found.right))
    after = 0.5 * (Y - grown.U.mT @ grown.V).square().sum() + 0.3 * theta.values(grown.U, grown.V, HERE).sum()
    # math: (p − λ)²/(2‖u‖²‖v‖²)
    assert float(direct - after) == pytest.approx((float(found.values[0]) - 0.3) ** 2 / (2 * squares), rel=1e-9)


def descent_residual(Y, pair):
    from minimand.factor.residual import DenseDual

    return DenseDual(Y, pair.U.mT, pair.V.mT)


@pytest.mark.parametrize("theta", [L2(), NonNegativeL2(), SparseL2(0.5)], ids=str)
def test_the_induced_penalty_is_convex_on_segments(theta, generator):
    """[Vidal2018], Proposition: the factors of X and X′, scaled by √t and √(1−t) and joined, have the mean penalty."""
    for _ in range(10):
        pairs = [Components(*(torch.rand(k, n, generator=generator).double() for n in (6, 5))) for k in (2, 3)]
        t = float(torch.rand((), generator=generator))
        joined = Components(*(torch.cat([t**0.5 * a, (1 - t) ** 0.5 * b]) for a, b in zip(*pairs, strict=True)))
        products = [p.U.mT @ p.V for p in (*pairs, joined)]
        torch.testing.assert_close(products[2], t * products[0] + (1 - t) * products[1])
        charges = [float(theta.values(p.U, p.V, HERE).sum()) for p in (*pairs, joined)]
        assert charges[2] == pytest.approx(t * charges[0] + (1 - t) * charges[1])
        if isinstance(theta, L2):  # here the infimum is known: the nuclear norm, attained by rotation
            norms = [float(rotated(p, HERE)[1].sum()) for p in (*pairs, joined)]
            exact = [float(torch.linalg.svdvals(X).sum()) for X in products]
            assert norms == pytest.approx(exact)
            assert norms[2] <= t * norms[0] + (1 - t) * norms[1] + 1e-9


@pytest.mark.filterwarnings("ignore:.*stopped before its certificate")
def test_sizes_stay_below_the_bound_of_the_theory():
    """[Vidal2018], Theorem 2: the size needed is at most the number of entries of the output; r_max is larger."""
    for seed in range(2):
        Y = np.random.default_rng(seed).random((3, 2))
        for model in (NMF(1e-3, effort=0.01), SparseDictionary(1e-2, 0.5), CPTensor(1e-3)):
            data = Y if not isinstance(model, CPTensor) else Y.reshape(3, 2, 1)
            assert model.set_params(random_state=0, max_iter=60, r_max=20).fit(data).n_components_ <= 6


def test_sparse_dictionary_closed_form_on_a_diagonal():
    """Codes of one entry cost (1 + γ): the singular values of a diagonal are thresholded at λ(1 + γ)."""
    Y = np.diag([5.0, 3.0, 2.0, 0.3])
    model = SparseDictionary(0.5, 1.0, random_state=0)
    U = model.fit_transform(Y)
    assert model.n_components_ == 3
    np.testing.assert_allclose(U @ model.components_, np.diag([4.0, 2.0, 1.0, 0.0]), atol=1e-5)
    assert model.objective_ == pytest.approx(0.5 * 3 + 0.5 * 0.09 + 1.0 * 7, rel=1e-6)
    assert model.certificate_.status is Status.CERTIFIED
    assert (U != 0).sum() == 3


def test_sparse_dictionary_with_no_sparsity_is_the_nuclear_norm():
    Y = low_rank(15, 12, 3)
    model = SparseDictionary(1.0, 0.0, random_state=0).fit(Y)
    assert model.objective_ == pytest.approx(nuclear_minimum(torch.from_numpy(Y), 1.0), rel=1e-4)
    assert model.certificate_.status is Status.CERTIFIED


def test_cp_tensor_closed_form_on_orthogonal_components():
    generator = torch.Generator().manual_seed(0)
    A, B, C = (torch.linalg.qr(torch.randn(n, 3, generator=generator, dtype=torch.float64)).Q for n in (6, 5, 4))
    sizes = torch.tensor([5.0, 3.0, 0.5], dtype=torch.float64)
    Y = torch.einsum("r,ir,jr,kr->ijk", sizes, A, B, C)
    model = CPTensor(1.0, random_state=0)
    U = model.fit_transform(Y)
    assert model.n_components_ == 2
    assert model.objective_ == pytest.approx(0.5 * (1 + 1 + 0.25) + 6, rel=1e-6)
    assert model.certificate_.status is Status.CERTIFIED
    assert "loose" in model.certificate_.method
    shrunk_ = torch.einsum("r,ir,jr,kr->ijk", (sizes - 1).clamp_min(0), A, B, C)
    torch.testing.assert_close(model.inverse_transform(U), shrunk_, atol=1e-4, rtol=0)
    a, b, c = model.factors_
    torch.testing.assert_close(torch.einsum("ir,jr,kr->ijk", a, b, c), shrunk_, atol=1e-4, rtol=0)
    torch.testing.assert_close(a, U)


@pytest.mark.filterwarnings("ignore:.*stopped before its certificate")
@pytest.mark.parametrize("shape", [(5, 4, 3), (4, 3, 3, 2)], ids=str)
def test_cp_gap_is_never_understated(shape):
    rng = np.random.default_rng(0)
    Y = rng.normal(size=shape)
    best = min(CPTensor(0.8, random_state=seed).fit(Y).objective_ for seed in range(2))
    for k in (1, 2):
        model = CPTensor(0.8, n_components=k, random_state=0, max_iter=5).fit(Y)
        assert model.certificate_.gap >= model.objective_ - best
    assert CPTensor(0.8, n_components=2, random_state=0).fit(Y).n_components_ <= 2


def test_pruning_merging_and_balancing_keep_the_product_and_the_penalty(generator):
    pair = Components(*(torch.rand(3, n, generator=generator, dtype=torch.float64) for n in (6, 5)))
    doubled = Components(
        torch.cat([pair.U, 3 * pair.U[:1], 0 * pair.U[:1]]), torch.cat([pair.V, pair.V[:1], pair.V[:1]])
    )
    for theta in (L2(), NonNegativeL2(), SparseL2(0.4)):
        tidy = merged(pruned(doubled, HERE), HERE)
        assert tidy.rank == 3
        torch.testing.assert_close(tidy.U.mT @ tidy.V, doubled.U.mT @ doubled.V)
        charges = [theta.values(p.U, p.V, HERE).sum() for p in (doubled, tidy, balanced(doubled, HERE))]
        torch.testing.assert_close(charges[1], charges[0])
        torch.testing.assert_close(charges[2], charges[0])
    even = balanced(doubled, HERE)
    torch.testing.assert_close(even.U.norm(dim=1), even.V.norm(dim=1))


def test_starts_of_other_libraries_and_warm_starts():
    from sklearn.decomposition import NMF as Other

    rng = np.random.default_rng(0)
    Y = rng.random((20, 3)) @ rng.random((3, 15))
    other = Other(3, init="nndsvda", max_iter=200, tol=1e-2)
    W = other.fit_transform(Y)
    model = NMF(0.1, random_state=0).fit(Y, start=(W, other.components_.T))
    assert model.history_[0] <= 0.5 * np.square(Y - W @ other.components_).sum() + 0.1 * np.sum(
        np.linalg.norm(W, axis=0) * np.linalg.norm(other.components_, axis=1)
    )
    again = NMF(0.1, random_state=0)
    again.fit(Y, start=(model.transform(Y), model.components_.T))
    assert again.n_iter_ <= model.n_iter_
    with pytest.raises(ValueError, match=r"start has U of \(3, 2\)"):
        NMF(0.1).fit(Y, start=(np.ones((3, 2)), np.ones((15, 2))))
    with pytest.raises(ValueError, match="Negative values in start"):
        NMF(0.1).fit(Y, start=(-W, other.components_.T))

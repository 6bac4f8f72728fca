"""Law: a certificate never understates the gap, at any point."""

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimand.errors import OptionError, ShapeError
from minimand.factor import L2, NonNegativeL2, SparseL2, Status, certify
from minimand.factor.bounds import cholesky_bound, lanczos_bound, sparse_bound, split_matrix
from minimand.factor.cp import unfolding_bound
from minimand.factor.matrices import RowSharding
from minimand.factor.nonnegative import perron_bound
from minimand.factor.problem import judge
from minimand.factor.regularizers import BoundOptions, Euclidean, Gauge, Regularizer
from minimand.factor.residual import DenseDual

SOLVER = {"solver": cp.CLARABEL, "tol_gap_abs": 1e-10, "tol_gap_rel": 1e-10, "tol_feas": 1e-10}


def objective(Y, U, V, lam, theta, seen=None):
    residual = (Y - U @ V.mT) if seen is None else (Y - U @ V.mT) * seen
    return float(0.5 * residual.square().sum() + lam * theta.values(U.mT, V.mT, RowSharding()).sum())


def nuclear_minimum(Y, lam):
    """Σ of the Huber function of the singular values: the closed form, by another library."""
    s = np.linalg.svd(Y.numpy(), compute_uv=False)
    return float(np.where(s > lam, lam * s - lam**2 / 2, s**2 / 2).sum())


def optimum(Y, lam):
    u, s, vt = torch.linalg.svd(Y, full_matrices=False)
    root = (s - lam).clamp_min(0).sqrt()
    return u * root, vt.mT * root


def adversaries(Y, U, V, generator):
    """Points near and far from factors: truncated, perturbed, zero, repeated, unbalanced, overfitted, random."""
    r = U.shape[1]
    yield U, V
    yield U[:, : r // 2], V[:, : r // 2]
    yield U[:, :0], V[:, :0]
    yield torch.cat([U, 0 * U], 1), torch.cat([V, 0 * V], 1)
    yield torch.cat([U, U], 1) / 2**0.5, torch.cat([V, V], 1) / 2**0.5
    yield U * 1e3, V / 1e3
    for size in (1e-12, 1e-8, 1e-4, 1e-2, 1.0):
        noise = torch.randn(U.shape, generator=generator, dtype=U.dtype)
        yield U + size * noise, V
        yield (1 + size) * U, V
        yield (1 - min(size, 0.9)) * U, V
    yield torch.randn(U.shape, generator=generator, dtype=U.dtype), V
    u, s, vt = torch.linalg.svd(Y, full_matrices=False)
    yield u * s, vt.mT  # no residual at all


SPECTRA = {
    "random": lambda k: torch.linspace(3, 0.1, k),
    "near ties": lambda k: 1 + 1e-9 * torch.arange(k),
    "ties": lambda k: torch.ones(k),
    "deficient": lambda k: torch.cat([torch.full((k - k // 2,), 2.0), torch.zeros(k // 2)]),
    "wide": lambda k: torch.logspace(-8, 4, k),
}


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", [(7, 5), (4, 9), (40, 30)])
def test_the_gap_is_never_understated_for_the_nuclear_norm(spectrum, shape, generator):
    k = min(shape)
    left, right = (torch.linalg.qr(torch.randn(n, k, generator=generator, dtype=torch.float64)).Q for n in shape)
    s = SPECTRA[spectrum](k).to(torch.float64)
    Y = left * s @ right.mT
    # At the singular values themselves, between them, and far outside.
    for lam in (float(s.quantile(0.6)), 1.0, float(s.max()) * (1 - 1e-9), float(s.max()) * 2, 1e-3):
        best = nuclear_minimum(Y, lam)
        for U, V in adversaries(Y, *optimum(Y, lam), generator):
            found = certify(Y, U, V, lam=lam)
            true = objective(Y, U, V, lam, L2()) - best
            assert found.gap >= true - 1e-13 * best
            assert found.polar_lower <= found.polar_upper
            sigma = float(torch.linalg.matrix_norm(Y - U @ V.mT, 2))
            assert found.polar_upper >= sigma * (1 - 1e-14)
            if found.status is Status.CERTIFIED:
                assert true <= 1e-3 * objective(Y, U, V, lam, L2()) * (1 + 1e-9)
        assert certify(Y, *optimum(Y, lam), lam=lam, tol=1e-6).status is Status.CERTIFIED


def test_the_gap_is_never_understated_for_masked_data(generator):
    for _ in range(4):
        Y = torch.randn(6, 5, generator=generator, dtype=torch.float64)
        seen = torch.rand(6, 5, generator=generator) < 0.6
        X = cp.Variable((6, 5))
        mask = seen.double().numpy()
        program = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(cp.multiply(mask, X - Y)) + 0.5 * cp.normNuc(X)))
        best = program.solve(**SOLVER)
        u, s, vt = np.linalg.svd(X.value)
        U, V = (torch.from_numpy(x * np.sqrt(s[:5])) for x in (u[:, :5], vt.T))
        hidden = torch.where(seen, Y, torch.nan)
        assert certify(hidden, U, V, lam=0.5, mask=seen).status is Status.CERTIFIED
        for left, right in adversaries(Y, U, V, generator):
            found = certify(hidden, left, right, lam=0.5, mask=seen)
            assert found.gap >= objective(Y, left, right, 0.5, L2(), seen) - best - 1e-7


def doubly_nonnegative_minimum(Y, lam):
    """A lower bound on the minimum over all sizes; exact for rows + columns ≤ 4, because the cones coincide."""
    n, m = Y.shape
    W = cp.Variable((n + m, n + m), PSD=True)
    fit = 0.5 * cp.sum_squares(Y.numpy() - W[:n, n:])
    return cp.Problem(cp.Minimize(fit + lam / 2 * cp.trace(W)), [W >= 0]).solve(**SOLVER)


def test_the_gap_is_never_understated_for_nonnegative_factors(generator):
    for shape, lam in (((2, 2), 0.2), ((5, 4), 0.05), ((3, 6), 0.5)):
        Y = torch.rand(shape, generator=generator, dtype=torch.float64)
        best = doubly_nonnegative_minimum(Y, lam)
        U, V = (torch.rand(n, 3, generator=generator, dtype=torch.float64) for n in shape)
        for left, right in adversaries(Y, U, V, generator):
            left, right = left.clamp_min(0), right.clamp_min(0)
            found = certify(Y, left, right, lam=lam, regularizer="nonnegative", effort=2e-5)
            assert found.gap >= objective(Y, left, right, lam, NonNegativeL2()) - best - 1e-7


def polar_by_search(Z, theta, generator):
    return theta.directions(DenseDual(Z), 8, generator, sweeps=25).best


@pytest.mark.parametrize("theta", [L2(), NonNegativeL2(), SparseL2(0.3), SparseL2(2.0)], ids=str)
def test_no_direction_exceeds_the_upper_bound(theta, generator):
    """From many starts, on matrices of every kind: noise, low rank, sparse, of one sign, tiny, a row, a column."""
    for trial in range(20):
        shape = [(6, 5), (1, 9), (9, 1), (12, 3)][trial % 4]
        Z = torch.randn(shape, generator=generator, dtype=torch.float64)
        kind = trial % 5
        Z = [Z, Z.abs(), Z * (Z > 1), torch.ones_like(Z), -Z.abs()][kind] * 10.0 ** (trial % 7 - 3)
        bound = theta.upper(DenseDual(Z), float(Z.abs().max()), BoundOptions(effort=0.02)).value
        assert bound >= polar_by_search(Z, theta, generator) * (1 - 1e-12)
    assert theta.upper(DenseDual(torch.zeros(3, 2)), 1.0).value <= 1e-12


def test_the_sparse_bound_holds_between_its_grid_points():
    """A row of ones: the code is one number, its polar 3/(1 + γ). A column: the dense code attains 3/(1 + 3γ)."""
    row, column = torch.ones(1, 9), torch.ones(9, 1)
    assert 2.0 <= sparse_bound(DenseDual(row), 2.0, 0.5).value <= 2.01
    assert sparse_bound(DenseDual(column), 1.2, 0.5).value >= 1.2
    for gamma in (0.1, 0.5, 3.0):
        for k in range(1, 10):  # the best of k equal entries
            assert sparse_bound(DenseDual(column), 1.0, gamma).value >= k / k**0.5 / (1 + gamma * k**0.5) - 1e-12


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 30), columns=st.integers(1, 30), scale=st.integers(-8, 8))
def test_norm_bounds_are_above_the_norm_and_near_it(seed, rows, columns, scale):
    generator = torch.Generator().manual_seed(seed)
    Z = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 10.0**scale
    if seed % 3 == 0:
        Z = torch.linalg.qr(Z).Q * 10.0**scale  # all singular values tie
    sigma = float(torch.linalg.matrix_norm(Z, 2))
    for level in (sigma, 0.5 * sigma, 2 * sigma):
        assert sigma <= cholesky_bound(DenseDual(Z), level).value <= 1.001 * sigma
    assert sigma * (1 - 1e-14) <= lanczos_bound(DenseDual(Z), generator=generator).value <= 1.001 * sigma


def test_the_unfolding_bound_is_above_every_rank_one_direction(generator):
    for _ in range(20):
        Z = torch.randn(4, 5, 3, generator=generator, dtype=torch.float64)
        units = [
            torch.nn.functional.normalize(torch.randn(200, n, generator=generator).double(), dim=1) for n in Z.shape
        ]
        attained = torch.einsum("ijk,ri,rj,rk->r", Z, *units).max()
        assert unfolding_bound(Z, 1.0).value >= attained
        one = torch.einsum("i,j,k->ijk", *(3 * u[0] for u in units))  # a single term: its size, from above and near
        assert 27 <= unfolding_bound(one, 20.0).value <= 27.001


def test_the_statuses():
    given_ = {"objective": 2.0, "lam": 1.0, "tol": 1e-3, "method": "test"}
    assert judge(gap=2e-3, polar_lower=9.0, polar_upper=9.0, **given_).status is Status.CERTIFIED
    assert judge(gap=3e-3, polar_lower=1.1, polar_upper=9.0, **given_).status is Status.IMPROVABLE
    assert judge(gap=3e-3, polar_lower=1.0, polar_upper=9.0, **given_).status is Status.UNDECIDED
    assert judge(gap=-1e-18, polar_lower=0.0, polar_upper=0.0, **given_).gap == 0
    zero = certify(np.zeros((3, 2)), np.zeros((3, 0)), np.zeros((2, 0)), lam=1.0)
    assert (zero.status, zero.gap) == (Status.CERTIFIED, 0)


def test_a_zero_column_pair_proves_nothing():
    """[Vidal2018], Theorem 1 needs a local minimum. At U = V = 0 the gradient vanishes, but the polar exceeds λ."""
    found = certify(np.diag([3.0, 2.0]), np.zeros((2, 1)), np.zeros((2, 1)), lam=1.0)
    assert found.status is Status.IMPROVABLE
    assert found.polar_lower == pytest.approx(3)


def test_factors_of_other_libraries_are_certified():
    from sklearn.decomposition import NMF, PCA

    rng = np.random.default_rng(0)
    Y = rng.random((12, 2)) @ rng.random((2, 9))
    lam = 0.05
    options = {"alpha_W": lam / 9, "alpha_H": lam / 12, "l1_ratio": 0.0, "max_iter": 20000, "tol": 1e-10}
    model = NMF(3, init="nndsvda", **options)
    W = model.fit_transform(Y)
    assert certify(Y, W, model.components_.T, lam=lam, regularizer="nonnegative").relative_gap < 0.01
    assert certify(torch.from_numpy(Y), torch.from_numpy(W), model.components_.T, lam=lam).gap >= 0
    # Principal components are not penalised, so they are not optimal for this objective.
    pca = PCA(2).fit(Y)
    found = certify(Y, pca.transform(Y), pca.components_.T, lam=lam)
    assert found.status is not Status.CERTIFIED


class Doubled(Gauge):
    """2‖·‖₂, written as a user would."""

    floor = 2.0

    def values(self, vectors, rows=RowSharding()):  # noqa: B008
        return 2 * vectors.norm(dim=1)

    def prox(self, vectors, step, rows=RowSharding()):  # noqa: B008
        return Euclidean().prox(vectors, 2 * step, rows)


class Own(Regularizer):
    left, right = Doubled(), Euclidean()


def test_a_regularizer_of_ones_own(generator):
    """θ = 2‖u‖‖v‖ at λ is the nuclear norm at 2λ."""
    Y = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    U, V = optimum(Y, 2.0)
    mine, known = certify(Y, U, V, lam=1.0, regularizer=Own()), certify(Y, U, V, lam=2.0)
    assert mine.status is Status.CERTIFIED
    assert mine.polar_upper == pytest.approx(known.polar_upper / 2, rel=1e-6)
    assert mine.polar_lower == pytest.approx(known.polar_lower / 2, rel=1e-3)
    assert certify(Y, 0 * U, 0 * V, lam=1.0, regularizer=Own()).status is Status.IMPROVABLE


@pytest.mark.parametrize("gauge", [Euclidean(), Euclidean(0.3), Euclidean(0.3, True), Euclidean(0.0, True)], ids=str)
def test_gauges(gauge, generator):
    """The prox is a minimiser, in place as well, and the polar is where it reaches zero."""
    a = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    steps = torch.rand(6, generator=generator, dtype=torch.float64) + 0.1
    best = gauge.prox(a, steps)

    def charge(z):
        return steps * gauge.values(z) + 0.5 * (z - a).square().sum(-1)

    for size in (1e-3, 0.1, 1.0):
        other = gauge.project(best + size * torch.randn(a.shape, generator=generator, dtype=a.dtype))
        assert bool((charge(best) <= charge(other) + 1e-12).all())
    for i in range(6):
        torch.testing.assert_close(gauge.prox_(a[i].clone(), float(steps[i])), best[i])
    values, units = gauge.polar(a)
    generic, _ = Gauge.polar(gauge, a)
    torch.testing.assert_close(generic, values, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(gauge.values(units)[values > 0], torch.ones_like(values)[values > 0])
    draws = gauge.project(torch.randn(500, 5, generator=generator, dtype=a.dtype))
    draws = draws[gauge.values(draws) > 0]
    assert bool(((a @ draws.mT) / gauge.values(draws) <= values.unsqueeze(1) + 1e-9).all())


BAD = [
    ({"lam": 0.0}, OptionError, "lam"),
    ({"lam": 1.0, "tol": 0.0}, OptionError, "tol"),
    ({"lam": 1.0, "regularizer": "l1"}, OptionError, "regularizer must be"),
    ({"lam": 1.0, "regularizer": "sparse"}, OptionError, "gamma"),
    ({"lam": 1.0, "gamma": 1.0}, OptionError, "gamma belongs"),
    ({"lam": 1.0, "mask": np.ones((2, 2))}, ShapeError, "mask"),
    ({"lam": 1.0, "regularizer": "nonnegative"}, OptionError, "negative entries"),
]


@pytest.mark.parametrize(("options", "kind", "message"), BAD, ids=range(len(BAD)))
def test_bad_input(options, kind, message):
    with pytest.raises(kind, match=message) as caught:
        certify(np.ones((3, 2)), -np.ones((3, 1)), np.ones((2, 1)), **options)
    assert "\n" not in str(caught.value)


def test_bad_shapes_and_values():
    with pytest.raises(ShapeError, match=r"\(3, 2\).*\(3, 1\).*\(3, 1\)"):
        certify(np.ones((3, 2)), np.ones((3, 1)), np.ones((3, 1)), lam=1.0)
    with pytest.raises(ValueError, match="Y holds 1 NaN"):
        certify(np.array([[1.0, np.nan]]), np.ones((1, 1)), np.ones((2, 1)), lam=1.0)
    with pytest.raises(ShapeError, match="real matrix"):
        certify(np.ones(3), np.ones((3, 1)), np.ones((3, 1)), lam=1.0)


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 5), columns=st.integers(1, 5), gamma=st.floats(0.05, 3.0))
def test_bounds_by_splittings_are_never_below_the_polar(seed, rows, columns, gamma):
    """Against brute force: for u, v ≥ 0 the maximum over all supports, for sparse codes the best of many ascents."""
    generator = torch.Generator().manual_seed(seed)
    Z = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    options = BoundOptions(effort=1e-3)
    best = 0.0
    for left in range(1, 2**rows):
        for right in range(1, 2**columns):
            some = Z[[i for i in range(rows) if left >> i & 1]][:, [j for j in range(columns) if right >> j & 1]]
            u, s, vt = torch.linalg.svd(some)
            if bool((u[:, 0] * u[0, 0].sign() >= 0).all()) and bool((vt[0] * u[0, 0].sign() >= 0).all()):
                best = max(best, float(s[0]))
    for level in (0.5 * best + 1e-3, best + 1e-3, 2 * best + 1e-3):
        found = split_matrix(DenseDual(Z), level, options, torch.maximum)
        assert found is not None
        assert bool((found[0] >= Z).all())
        assert found[1] >= float(torch.linalg.matrix_norm(found[0], 2)) * (1 - 1e-14) >= best * (1 - 1e-12)
        assert sparse_bound(DenseDual(Z), level, gamma, options).value >= polar_by_search(
            Z, SparseL2(gamma), generator
        ) * (1 - 1e-12)


def test_the_rectangular_bound_decides_where_the_norm_does_not(generator):
    """Blocks of two signs: the norm is twice the polar, and the bound exceeds it by at most 1e-3."""
    Z = torch.kron(
        torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64), torch.ones(30, 20, dtype=torch.float64)
    )
    polar = 600**0.5
    found = NonNegativeL2().upper(DenseDual(Z), polar, BoundOptions(effort=0.01, generator=generator))
    assert polar * (1 - 1e-12) <= found.value <= polar * (1 + 1e-3)
    assert float(torch.linalg.matrix_norm(Z, 2)) > 1.9 * polar


@pytest.mark.parametrize("shape", [(30, 20), (20, 30)])
def test_the_perron_bound_is_the_norm_of_the_positive_part(shape, generator):
    Z = torch.randn(shape, generator=generator, dtype=torch.float64)
    sigma = float(torch.linalg.matrix_norm(Z.relu(), 2))
    assert sigma <= perron_bound(DenseDual(Z)).value <= 1.05 * sigma
    assert perron_bound(DenseDual(-Z.abs())).value == 0

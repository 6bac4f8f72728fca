"""Law: certificates and factorisations are the same at every scale of the data, or are refused in a sentence.

The objective of each estimator fixes how its options scale: (Y, λ) and (cY, cλ) have one solution up to √c for squares,
(Y, γ) and (cY, γ/c) for robust components. A multiplication by a power of four is exact, so its results are, too.
"""

import dataclasses
import math
import warnings
from functools import partial

import cvxpy as cp
import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import nn

from minimand.errors import MinimandError, NonFiniteError, OptionError, ShapeError
from minimand.factor import (
    NMF,
    CPTensor,
    DropoutFactorization,
    Entrywise,
    HuberLoss,
    LowRank,
    MatrixCompletion,
    ParallelNetwork,
    ParallelReLU,
    RobustPCA,
    SparseDictionary,
    Status,
    certify,
    certify_tensor,
    dropout_optimum,
    equalize,
    factorize,
    nuclear_squared,
)
from minimand.factor.inputs import Units, leveled, middle, raised
from minimand.homogeneous import certify_relu
from minimand.solvers import Datafit, Logistic

from .cases.certificates import KINDS, check, random_case

pytestmark = pytest.mark.filterwarnings("ignore:.*outside of float64's range")

RNG = np.random.default_rng(0)
A = RNG.random((12, 3)) @ RNG.random((3, 9)) + 0.1 * RNG.random((12, 9))
B = RNG.standard_normal((14, 3)) @ RNG.standard_normal((3, 10)) + 0.3 * RNG.standard_normal((14, 10))
HOLES = np.where(RNG.random(B.shape) < 0.3, np.nan, B)
T = np.einsum("ia,ja,ka->ijk", *(RNG.standard_normal((n, 2)) for n in (6, 5, 4)))
EXACT = [4.0**-8, 2.0**-60, 2.0**-1000, 4.0**8, 2.0**900]
ROUNDED = [1e-300, 1e-200, 1e-30, 1e30, 1e200, 1e300]
# The options of an estimator at scale c, and its data at scale one. CPTensor takes cube roots, which are not exact.
MODELS = {
    "LowRank": (lambda c: LowRank(2.0 * c, random_state=0), B),
    "NMF": (lambda c: NMF(0.5 * c, random_state=0), A),
    "NMF of a size": (lambda c: NMF(0.3 * c, n_components=4, random_state=0), A),
    "NMF of more terms than columns": (lambda c: NMF(0.3 * c, n_components=11, random_state=0), A),
    "SparseDictionary": (lambda c: SparseDictionary(2.0 * c, 0.2, random_state=0), B[:7, :5].copy()),
    "RobustPCA": (lambda c: RobustPCA(3.0, random_state=0), B),
    "RobustPCA, smooth": (lambda c: RobustPCA(3.0, 2.0 / c, random_state=0), B),
    "MatrixCompletion": (lambda c: MatrixCompletion(1.5 * c, random_state=0), HOLES),
    "CPTensor": (lambda c: CPTensor(0.5 * c, random_state=0), T),
}


def degree(name):
    return 1 if name.startswith("RobustPCA") else 2


@pytest.mark.parametrize("name", MODELS)
def test_estimators_at_every_scale(name):
    make, Y = MODELS[name]
    d, model = degree(name), make(1.0)
    U, found = model.fit_transform(Y), model.certificate_
    codes, top = model.transform(Y), model.lambda_max(Y)
    for c in (*EXACT, *ROUNDED):
        other = make(c)
        # Rounding leads growth to another of several dictionaries that are almost as good.
        loose = partial(np.testing.assert_allclose, rtol=1e-6, atol=5e-3 if name == "SparseDictionary" else 1e-7)
        same = np.testing.assert_array_equal if c in EXACT and name != "CPTensor" else loose
        left, certificate = other.fit_transform(c * Y), other.certificate_
        assert certificate.status is found.status
        if c in EXACT or name != "SparseDictionary":
            assert other.n_components_ == model.n_components_
        rel = 1e-12 if c in EXACT and name != "CPTensor" else 1e-2
        assert certificate.relative_gap == pytest.approx(found.relative_gap, rel=rel, abs=rel * 1e-9)
        root, polar = math.sqrt(c), c if d == 2 else 1.0
        assert certificate.polar_upper / polar == pytest.approx(found.polar_upper, rel=rel)
        same(other.lambda_max(c * Y) / polar, top)
        same((left @ other.components_) / c, U @ model.components_)
        if c in EXACT and name != "CPTensor":  # the signs of components follow rounding
            same(left / root, U)
            same(other.transform(c * Y) / root, codes)
        if 1e-140 < c < 1e140:
            same(other.objective_ / c**d, model.objective_)
            same(np.divide(other.history_, c**d), model.history_)


@pytest.mark.parametrize("c", [1e-300, 1e300])
def test_paths_at_every_scale(c):
    lams = np.array([2.0, 0.5, 1.0])
    path, scaled = NMF(1.0, random_state=0).path(A, lams), NMF(1.0, random_state=0).path(c * A, c * lams)
    np.testing.assert_array_equal(scaled.ranks, path.ranks)
    np.testing.assert_allclose(scaled.gaps, path.gaps, rtol=1e-3, atol=1e-9)
    grid = LowRank(1.0).path(c * A, n_lams=3).lams
    np.testing.assert_allclose(grid / c, LowRank(1.0).path(A, n_lams=3).lams)


POINT = RNG.random((12, 3)), RNG.random((9, 3))


@pytest.mark.parametrize("c", [*EXACT, *ROUNDED])
@pytest.mark.parametrize(
    "options",
    [{}, {"regularizer": "nonnegative"}, {"regularizer": "sparse", "gamma": 0.3}, {"mask": A > 0.5}],
    ids=["l2", "nonnegative", "sparse", "masked"],
)
def test_certificates_at_every_scale(c, options):
    """Whatever the scale of the data, and however it is distributed over the factors."""
    U, V = POINT
    found = certify(A, U, V, lam=0.5, **options)
    assert found.status is Status.IMPROVABLE
    moved = 2.0 ** RNG.integers(-300, 301, 3)
    for left, right in ((U, V), (U * moved, V / moved)):
        other = certify(c * A, c**0.5 * left, c**0.5 * right, lam=0.5 * c, **options)
        assert other.status is Status.IMPROVABLE
        assert other.relative_gap == pytest.approx(found.relative_gap, rel=1e-9)
        assert other.polar_lower / c == pytest.approx(found.polar_lower, rel=1e-9)
        assert other.polar_upper / c == pytest.approx(found.polar_upper, rel=1e-9)
        assert other.gap == raised(found.gap, round(2 * math.log2(c))) or c in ROUNDED


@pytest.mark.parametrize("c", [1e-200, 2.0**900])
def test_robust_tensor_and_network_certificates_at_every_scale(c):
    def same(one, other, power):
        assert one.status is other.status
        assert one.relative_gap == pytest.approx(other.relative_gap, rel=1e-9)
        assert one.polar_upper == pytest.approx(other.polar_upper * power, rel=1e-9)

    U, V = POINT
    for gamma in (2.0, None):
        loss = [partial(HuberLoss, gamma=gamma and gamma / s) for s in (1.0, c)]
        same(certify(c * A, c**0.5 * U, c**0.5 * V, lam=0.5, loss=loss[1]), certify(A, U, V, lam=0.5, loss=loss[0]), 1)
    modes = [RNG.standard_normal((n, 2)) for n in T.shape]
    found = certify_tensor(T, modes, lam=0.5)
    same(certify_tensor(c * T, [c ** (1 / 3) * x for x in modes], lam=0.5 * c), found, c)
    same(certify_tensor(c * T, ([c, c], [modes[0] * 1e-100, modes[1], modes[2] * 1e100]), lam=0.5 * c), found, c)
    x, y, W, b = (RNG.standard_normal(s) for s in ((9, 1), (9, 2), (4, 2), (4, 2)))
    found = certify_relu(x, y, W, b, lam=0.3)
    same(certify_relu(x, c * y, 1e99 * W, 1e-99 * c * b, lam=0.3 * c), found, c)


def test_underflow_does_not_certify():
    """A point 85 % above the minimum, with squares that are zero in float64."""
    Y = RNG.standard_normal((6, 5))
    U, V = RNG.standard_normal((6, 2)), RNG.standard_normal((5, 2))
    found = certify(1e-200 * Y, 1e-100 * U, 1e-100 * V, lam=1e-201)
    assert found.status is certify(Y, U, V, lam=0.1).status is Status.IMPROVABLE
    assert found.gap > 0


def test_a_descent_that_stops_early_goes_on_where_no_neuron_is_to_be_added():
    """At every second power of two it stopped 11 % above the minimum, with fifty-eight rounds to go."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(10, 1))
    y = np.maximum(X[:, 0], 0) - 0.5 * np.maximum(0.3 - X[:, 0], 0)
    for c in (1.0, 2.0, 4.0, 2.0**-331):
        assert ParallelReLU(0.05 * c, random_state=0).fit(X, c * y).certificate_.status is Status.CERTIFIED


@pytest.mark.parametrize("c", [1e-300, 1e-30, 1e30, 1e300])
def test_grown_networks_at_every_scale(c):
    x = np.linspace(-2, 2, 15)[:, None]
    y = np.c_[np.sin(2 * x), x**2]
    one, other = ParallelReLU(0.3, random_state=0).fit(x, y), ParallelReLU(0.3 * c, random_state=0).fit(x, c * y)
    assert other.certificate_.status is one.certificate_.status is Status.CERTIFIED
    np.testing.assert_allclose(other.predict(x) / c, one.predict(x), atol=1e-3)
    if c > 1:  # the bias is nothing beside such inputs; without it λ scales with them
        flat = ParallelReLU(0.3 * c, random_state=0).fit(c * x, y)
        assert flat.certificate_.status is Status.CERTIFIED
        assert np.isfinite(flat.predict(c * x)).all()


@pytest.mark.parametrize(("c", "dtype"), [(2.0**-600, "float64"), (2.0**600, "float64"), (2.0**60, "float32")])
def test_parallel_networks_at_every_scale(c, dtype):
    kind = getattr(torch, dtype)
    x, y = (torch.tensor(v, dtype=kind) for v in (np.eye(4), RNG.standard_normal((4, 3))))

    def fitted(scale):
        torch.manual_seed(0)
        make = lambda: nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 3, bias=False))  # noqa: E731
        return ParallelNetwork(make, 0.5 * scale, restarts=3).fit(x, scale * y)

    one, other = fitted(1.0), fitted(c)
    assert other.lam == 0.5 * c
    assert other.certificate_.status is one.certificate_.status is Status.CERTIFIED
    assert torch.allclose(other.predict(x) / c, one.predict(x), atol=1e-3)
    if dtype == "float32":
        assert float(other.objective(x, c * y).detach()) == pytest.approx(other.history_[-1], rel=1e-4)
    with pytest.raises(OptionError, match="near one"):
        one.fit(torch.full((3, 4), 1e38 if dtype == "float32" else 1e300, dtype=kind), y[:3])


@pytest.mark.parametrize("c", [*EXACT, *ROUNDED])
def test_dropout_at_every_scale(c):
    close = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-11)
    X, threshold, rank = dropout_optimum(B, 6, 0.3)
    other = dropout_optimum(c * B, 6, 0.3)
    close(other[0] / c, X)
    assert (other[1] / c, other[2]) == (pytest.approx(threshold), rank)
    U, V = B[:, :3], RNG.standard_normal((8, 3))
    for left, right in ((c**0.5 * U, c**0.5 * V), (c * U, V)):
        first, second = equalize(left, right)
        close((first / c**0.5) @ (second / c**0.5).T, U @ V.T)
        assert np.ptp(np.linalg.norm(first / c**0.5, axis=0)) < 1e-9
    for method in ("closed_form", "alternating", "gradient", "dropout"):
        options = {"method": method, "max_iter": 20, "tol": 0.0, "random_state": 0}
        one, two = DropoutFactorization(6, 0.3, **options), DropoutFactorization(6, 0.3, **options)
        close(two.fit_transform(c * B) / c**0.5, one.fit_transform(B))
        close(two.transform(c * B) / c**0.5, one.transform(B))
        assert (two.threshold_ / c, two.n_iter_) == (pytest.approx(one.threshold_), one.n_iter_)
    fixed = DropoutFactorization(4, 0.3, method="gradient", step=1e-3, tol=0.0, max_iter=5, random_state=0).fit(B)
    again = DropoutFactorization(4, 0.3, method="gradient", step=1e-3 / c, tol=0.0, max_iter=5, random_state=0)
    close(again.fit(c * B).components_ / c**0.5, fixed.components_)


def test_the_squared_nuclear_norm_is_refused_above_the_range():
    assert nuclear_squared(1e100 * np.eye(2)) == pytest.approx(4e200)
    with pytest.raises(NonFiniteError, match="divide X by c"):
        nuclear_squared(1e200 * np.eye(2))


WHOLE = np.arange(12).reshape(4, 3)


@pytest.mark.parametrize(
    "Y",
    [WHOLE, WHOLE > 4, WHOLE.astype(np.uint8), WHOLE.astype(np.float16), WHOLE.astype(np.longdouble),
     np.full((4, 3), 2**63, np.uint64), 3e37 * WHOLE.astype(np.float32) / 1.2, 1e-44 * WHOLE.astype(np.float32),
     1.7e308 * np.ones((4, 3)), 5e-323 * WHOLE, np.zeros((4, 3)), np.diag([1e200, 1.0, 1e-200]),
     torch.tensor(WHOLE), torch.tensor(WHOLE > 4), torch.tensor(WHOLE).bfloat16()],
    ids=lambda y: f"{y.dtype}-{float(y.max()):.0e}",
)  # fmt: skip
def test_kinds_of_numbers_and_their_ends(Y):
    """Every kind of data is certified at its minimum, which LowRank has in closed form."""
    top = float(np.abs(np.asarray(torch.as_tensor(Y, dtype=torch.float64) if torch.is_tensor(Y) else Y, float)).max())
    lam = 0.3 * top or 1.0
    dense = torch.as_tensor(np.asarray(Y, dtype=np.float64) if not torch.is_tensor(Y) else Y).double().numpy()
    for model in (LowRank(lam), NMF(lam, random_state=0), MatrixCompletion(lam, random_state=0)):
        U = model.fit_transform(Y)
        assert model.certificate_.status is Status.CERTIFIED
        left, s, right = np.linalg.svd(dense / (top or 1.0), full_matrices=False)
        X = (left * np.maximum(s - 0.3, 0)) @ right
        root = math.sqrt(top or 1.0)
        found = (np.asarray(U, dtype=float) / root) @ (np.asarray(model.components_, dtype=float) / root)
        np.testing.assert_allclose(found, X, atol=2e-3)
    found = factorize(Y, lam=lam, random_state=0)
    assert certify(Y, found.U, found.V, lam=lam).status is found.certificate.status is Status.CERTIFIED
    assert not np.isnan(DropoutFactorization(2, 0.3).fit(Y).components_).any()
    x = np.arange(len(Y))[:, None]
    assert ParallelReLU(lam, random_state=0).fit(x, Y).certificate_.status is Status.CERTIFIED


def test_an_objective_outside_the_range_is_announced():
    with pytest.warns(RuntimeWarning, match="outside of float64's range"):
        model = LowRank(1e200).fit(1e200 * B)
    assert (model.objective_, model.certificate_.status) == (math.inf, Status.CERTIFIED)
    with pytest.warns(RuntimeWarning, match="outside of float64's range"):
        assert 0 < DropoutFactorization(3, 0.5).fit(1e-200 * B).objective_ < 1e-300


EMPTY = np.zeros((0, 3))


@dataclasses.dataclass(frozen=True)
class Quartic(Datafit):
    def values(self, t, y):
        return (t - y) ** 4

    def gradient(self, t, y):
        return 4 * (t - y) ** 3

    def curvature(self, y):
        return 1.0

    def conjugate(self, u, y):
        return u * y + 0.75 * (u / 4) ** (4 / 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LowRank(1e-300).fit(1e300 * B), "too far apart"),
        (lambda: NMF(1e300).fit(1e-300 * A), "too far apart"),
        (lambda: certify(A, *POINT, lam=1e-300), "too far apart"),
        (lambda: certify_relu([[1.0]], [1.0], [[1.0, 0.0]], [[1.0]], lam=1e290), "too far apart"),
        (lambda: RobustPCA(1.0, 1e200).fit(1e200 * B), "gamma=1e[+]200 and the data"),
        (lambda: certify(A, *POINT, lam=1.0, loss=lambda Y: Entrywise(1e100 * Y, Quartic())), "no degree"),
        (
            lambda: certify(np.sign(A - 0.5), 1e200 * POINT[0], 1e200 * POINT[1], lam=1.0, loss=Logistic()),
            "squares overflow",
        ),
        (lambda: NMF(1.0).fit(A, start=(1e30 * POINT[0], POINT[1])), "start is larger"),
        (lambda: CPTensor(1.0).fit(T, start=[np.full((n, 1), 1e9) for n in T.shape]), "start is larger"),
        (lambda: certify(EMPTY, EMPTY[:, :1], np.zeros((3, 1)), lam=1.0), "no entries"),
        (lambda: certify_relu(np.zeros((0, 1)), np.zeros(0), [[1.0, 0.0]], [[1.0]], lam=1.0), "at least one"),
        (lambda: certify(EMPTY.astype(complex), EMPTY, EMPTY, lam=1.0), "real numbers"),
        (lambda: LowRank(1.0).fit([[10**400, 1], [1, 1]]), "whole numbers"),
        (lambda: ParallelReLU(1.0).fit([[10**400], [1]], [1, 2]), "whole numbers"),
        (lambda: dropout_optimum(np.eye(2).astype(complex), 1, 0.5), "real numbers"),
        (lambda: nuclear_squared(np.array([["a", 1]], dtype=object)), "real numbers"),
        (lambda: ParallelReLU(1e-300).fit([[1e300], [2e300]], [1.0, 2.0]), "too far apart"),
    ],
)
def test_what_floats_cannot_hold_is_refused_in_a_sentence(call, message):
    with pytest.raises(MinimandError, match=message) as error:
        call()
    assert isinstance(error.value, OptionError | ShapeError | NonFiniteError)
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore:LowRank has no component", "ignore:.*stopped before its certificate")
def test_weights_far_from_the_data_never_overclaim():
    """λ from 1e-200 to 1e200 times the data: a certificate of the closed form's point is true, if not always given."""
    s = np.linalg.svd(B, compute_uv=False)
    for power in range(-200, 201, 25):
        lam = 10.0**power
        model = LowRank(lam).fit(B)
        minimum = math.fsum(np.where(s > lam, lam * s - lam * (lam / 2), s**2 / 2))
        excess = model.objective_ - minimum
        assert excess <= model.certificate_.gap + 1e-9 * minimum
        assert model.certificate_.status is Status.CERTIFIED or power < -10


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_completion_and_robust_components_against_a_convex_solver(scale):
    X, seen = cp.Variable(B.shape), ~np.isnan(HOLES)
    misfit = cp.multiply(seen, np.nan_to_num(HOLES) - X)
    best = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(misfit) + 1.5 * cp.normNuc(X))).solve(solver=cp.CLARABEL)
    robust = cp.Problem(cp.Minimize(3.0 * cp.normNuc(X) + cp.sum(cp.abs(B - X)))).solve(solver=cp.CLARABEL)
    model = MatrixCompletion(1.5 * scale, random_state=0).fit(scale * HOLES)
    U, V = model.transform(scale * HOLES) / scale**0.5, model.components_.T / scale**0.5
    value = (
        0.5 * np.nansum((HOLES - U @ V.T) ** 2) + 1.5 * (np.linalg.norm(U, axis=0) * np.linalg.norm(V, axis=0)).sum()
    )
    assert model.certificate_.status is Status.CERTIFIED
    assert best * (1 - 1e-6) <= value <= best * (1 + 1e-3)
    pursuit = RobustPCA(3.0, random_state=0).fit(scale * B)
    assert pursuit.certificate_.status is Status.CERTIFIED
    assert robust * (1 - 1e-6) <= pursuit.objective_ / scale <= robust * (1 + 1e-3)


def test_units_are_powers_of_two():
    x = torch.tensor([[3.0, 1e-300], [1.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([[1e-300, 1e300]], dtype=torch.float64)
    left, right = leveled(x, y)
    assert torch.equal(left * right, x * y)
    assert float(left.abs().amax(0).log2().sub(right.abs().amax(0).log2()).abs().max()) <= 64
    assert leveled(x, x)[0] is x
    assert (middle(1.0), middle(1e20) % 4, middle(0.0)) == (0, 0, 0)
    units = Units(polar=400, objective=800)
    assert torch.equal(units.lowered(units.factor(x)), x)
    assert (raised(1.0, -2000), raised(1.0, 2000), raised(0.0, 9), raised(3.0, 1)) == (5e-324, math.inf, 0.0, 6.0)


def test_a_fit_that_runs_out_of_iterations_says_so():
    for model in (NMF(0.1, n_components=5, max_iter=2, random_state=0), LowRank(0.1, max_iter=1, random_state=0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(A)
        said = [str(w.message) for w in caught if issubclass(w.category, ConvergenceWarning)]
        assert said or model.certificate_.status is Status.CERTIFIED
    with pytest.warns(ConvergenceWarning, match="max_iter=2"):
        NMF(0.1, n_components=5, max_iter=2, random_state=0).fit(A)
    with pytest.warns(ConvergenceWarning, match="max_iter=3"):
        DropoutFactorization(4, 0.3, method="alternating", max_iter=3, random_state=0).fit(B)
    with pytest.warns(ConvergenceWarning, match="max_rounds=1"):
        ParallelReLU(0.01, max_rounds=1, grow=1, random_state=0).fit(B[:, :1], B[:, 1])
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(10, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))  # noqa: E731
    with pytest.warns(UserWarning, match="stopped before its certificate .* raise max_networks"):
        ParallelNetwork(make, 0.01, max_networks=1, restarts=2, descent=30).fit(
            torch.tensor(B), torch.tensor(B[:, :1] ** 2)
        )


def test_a_neuron_in_short_rows_is_not_missed():
    """A row of length one with a large target, beside rows that are 1e13 times as long."""
    x, y = np.array([[1e13], [0.0], [2e13]]), np.array([1e-14, 1.0, 0.0])
    exact = certify_relu(x, y, np.zeros((0, 2)), np.zeros((0, 1)), lam=1e-3)
    angles = np.linspace(0, 2 * np.pi, 100001)
    W = np.c_[np.cos(angles), np.sin(angles)]
    truth = np.abs(np.maximum(W @ np.c_[x, np.ones(3)].T, 0) @ y).max()
    assert exact.polar_upper >= truth * (1 - 1e-12)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_random_certificates_are_true(kind):
    place = sorted(KINDS).index(kind)
    for k in range(25):
        check(random_case(k * len(KINDS) + place))

"""Laws: NMF with the Kullback–Leibler divergence descends, agrees with scikit-learn, and its certificate is true."""

import warnings

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from scipy.optimize import minimize
from scipy.special import xlogy
from sklearn.decomposition import non_negative_factorization
from sklearn.utils.estimator_checks import check_estimator

from minimand.factor import NMF, Status
from minimand.factor.divergence import LIFT, KullbackLeiblerLoss

KL = "kullback-leibler"
RNG = np.random.default_rng(0)
Y = RNG.poisson(3 * RNG.random((20, 3)) @ RNG.random((3, 12)) + 0.1).astype(float)
Y[4] = 0

pytestmark = pytest.mark.filterwarnings("ignore:.*stopped before its certificate", "ignore:.*codes converged")


def divergence(Y, X):
    return float((xlogy(Y, np.where(Y > 0, Y, 1) / np.where(X > 0, X, 1)) - Y + X).sum())


def objective(Y, U, V, lam):
    return divergence(Y, U @ V.T) + lam * float((np.linalg.norm(U, axis=0) * np.linalg.norm(V, axis=0)).sum())


@pytest.mark.parametrize("sweeps", [1, 7, 60])
def test_without_a_penalty_the_sweeps_are_those_of_scikit_learn(sweeps):
    data = Y + 0.1
    U, V = RNG.random((20, 3)) + 0.1, RNG.random((12, 3)) + 0.1
    model = NMF(1e-13, n_components=3, loss=KL, max_iter=sweeps, tol=1e-9, effort=None).fit(data, start=(U, V))
    level = (data.mean() / 3) ** 0.5
    W, H = U + LIFT * max(U.mean(), level), V + LIFT * max(V.mean(), level)
    options = {"init": "custom", "solver": "mu", "beta_loss": KL, "tol": 0.0, "max_iter": sweeps}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        W, H, _ = non_negative_factorization(data, W, H.T.copy(), n_components=3, **options)
    assert model.history_[sweeps - 1] == pytest.approx(divergence(data, W @ H), rel=1e-7)


@pytest.mark.parametrize("lam", [1e-6, 0.3, 5.0, 50.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_sweep_raises_the_objective(lam, dtype):
    model = NMF(lam, n_components=4, loss=KL, random_state=0, max_iter=150)
    U = model.fit_transform(Y.astype(dtype))
    V = model.components_.T
    assert U.dtype == V.dtype == dtype
    assert min(U.min(), V.min()) >= 0
    assert not U[4].any()
    rounding = 1e-12 if dtype == np.float64 else 1e-5
    assert np.diff(model.history_).max() <= rounding * model.history_[0]
    assert model.objective_ == pytest.approx(objective(Y, *map(np.float64, (U, V)), lam), rel=100 * rounding)


@pytest.mark.parametrize(("y", "lam"), [(3.0, 0.5), (0.2, 4.0)])
def test_a_single_entry_has_a_closed_form(y, lam):
    """min y log(y/x) − y + x + λx is attained at x = y/(1 + λ) and is y log(1 + λ)."""
    model = NMF(lam, n_components=1, loss=KL, random_state=0, tol=1e-6)
    U = model.fit_transform(np.array([[y]]))
    assert (U @ model.components_).item() == pytest.approx(y / (1 + lam), rel=1e-4)
    assert model.objective_ == pytest.approx(y * np.log1p(lam), rel=1e-6)
    assert model.certificate_.status is Status.CERTIFIED


@pytest.mark.parametrize("lam", [0.5, 3.0, 8.0, 20.0])
def test_no_factors_lie_below_the_bound_of_a_certificate(lam):
    """Of any size and any start."""
    bounds, found = [], []
    for size in (1, 3, 8):
        for seed in range(3):
            model = NMF(lam, n_components=size, loss=KL, random_state=seed, max_iter=1000, effort=20).fit(Y)
            assert model.certificate_.status is not Status.IMPROVABLE
            bounds.append(model.objective_ - model.certificate_.gap)
            found.append(model.objective_)
    assert max(bounds) <= min(found) * (1 + 1e-12)
    if lam == 20.0:
        assert min(found) - max(bounds) <= 1e-5 * min(found)


def test_the_bound_is_the_dual_for_any_factors():
    """Σ Y log(1 + cZ) with Z = Y/X − 1 and cp ≤ λ, where the norm of the positive part of Z bounds the polar p."""
    rng = np.random.default_rng(1)
    best = NMF(2.0, n_components=8, loss=KL, random_state=0, max_iter=1000, effort=None).fit(Y).objective_
    for _ in range(20):
        U, V = rng.random((20, 2)) + 0.05, rng.random((12, 2)) + 0.05
        loss = KullbackLeiblerLoss(torch.from_numpy(Y))
        Z = loss.dual(torch.from_numpy(U), torch.from_numpy(V))
        np.testing.assert_allclose(Z.dense().numpy(), np.where(Y > 0, Y / (U @ V.T), 0) - 1, rtol=1e-12)
        polar = np.linalg.norm(np.maximum(Z.dense().numpy(), 0), 2)
        assert loss.lower(Z, 2.0 / polar).value <= best
        assert loss.value(torch.from_numpy(U), torch.from_numpy(V)) == pytest.approx(divergence(Y, U @ V.T))


def test_codes_minimise_the_divergence_of_each_row():
    model = NMF(0.5, n_components=3, loss=KL, random_state=0, max_iter=300).fit(Y)
    V, codes = model.components_.T, model.transform(Y)
    U = model.fit_transform(Y)
    np.testing.assert_allclose(U, codes, atol=5e-3 * codes.max())
    np.testing.assert_allclose(np.linalg.norm(U, axis=0), np.linalg.norm(V, axis=0), rtol=1e-3)

    def loss(u, y):
        x = u @ V.T
        return divergence(y, x) + 0.25 * u @ u, (1 - y / x) @ V + 0.5 * u

    for y, u in zip(Y[:4], codes[:4], strict=True):
        start = np.full(3, 0.5)
        best = minimize(loss, start, (y,), jac=True, method="L-BFGS-B", bounds=[(1e-12, None)] * 3, tol=1e-12).fun
        assert loss(u, y)[0] == pytest.approx(best, rel=1e-5)
    assert model.certify(Y).gap >= 0
    assert model.score(Y) <= 1


@pytest.mark.parametrize("scale", [2.0**-200, 2.0**80, 2.0**300])
def test_the_objective_scales_with_the_data(scale):
    one, other = (NMF(1.0, n_components=3, loss=KL, random_state=0, max_iter=30).fit(c * Y) for c in (1.0, scale))
    assert other.objective_ == pytest.approx(scale * one.objective_, rel=1e-9)
    assert other.certificate_.relative_gap == pytest.approx(one.certificate_.relative_gap, rel=1e-6)


def test_zero_data_and_a_warm_path():
    model = NMF(1.0, n_components=2, loss=KL, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert model.fit(np.zeros((3, 4))).objective_ == 0
    path = model.path(Y, lams=[8.0, 2.0])
    assert path.objectives[1] < path.objectives[0]


@pytest.mark.parametrize(
    ("options", "data", "message"),
    [
        ({"loss": "poisson"}, Y, "loss must be one of squared, kullback-leibler"),
        ({"n_components": None}, Y, "does not grow: pass n_components"),
        ({"lam": "5%"}, Y, "lambda_max of loss='kullback-leibler' is infinite"),
        ({}, sp.csr_array(Y), "no sparse matrix"),
        ({}, np.where(Y > 5, np.nan, Y), "no missing entries"),
        ({}, -Y, "Negative values"),
    ],
)
def test_bad_input_is_one_sentence(options, data, message):
    model = NMF(**{"lam": 1.0, "n_components": 2, "loss": KL, **options})
    with pytest.raises(ValueError, match=message) as error:
        model.fit(data)
    assert "\n" not in str(error.value)


def test_what_the_divergence_does_not_offer():
    model = NMF(1.0, n_components=2, loss=KL)
    assert not hasattr(model, "partial_fit")
    assert hasattr(NMF(1.0), "partial_fit")
    with pytest.raises(ValueError, match="is infinite"):
        model.lambda_max(Y)


def test_scikit_learn_conventions():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_estimator(NMF(1.0, n_components=3, loss=KL, max_iter=100))

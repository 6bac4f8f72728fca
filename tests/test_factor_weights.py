"""Law: a row of weight w counts as w equal rows, in the fit, the objective and the certificate."""

import warnings

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from scipy.special import kl_div
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler

from minimand.factor import NMF, LowRank, MatrixCompletion, Status

rng = np.random.default_rng(0)
Y = rng.random((16, 3)) @ rng.random((3, 9)) + 0.05 * rng.random((16, 9))
HOLES = np.where(rng.random(Y.shape) < 0.2, np.nan, Y)
WEIGHTS = np.array([0, 3, 1, 2] * 4)

KL = NMF(0.5, n_components=3, loss="kullback-leibler", max_iter=3000, tol=1e-7, random_state=0)
FIXED = NMF(0.3, n_components=3, max_iter=3000, tol=1e-7, random_state=0)
CASES = [
    (FIXED, Y),
    (FIXED, HOLES),
    (FIXED, sp.csr_array(Y)),
    (FIXED, sp.csc_array(Y)),
    (NMF("30%", random_state=0), Y),
    (KL, Y),
    (LowRank(0.3), Y),
    (LowRank("20%"), sp.csr_array(Y)),
    (MatrixCompletion(0.3, tol=1e-7, random_state=0), HOLES),
]


def objective(model, data, U, weights):
    """The weighted objective of the codes U of all rows and the model's components, by hand."""
    V, data = model.components_.T, data.toarray() if sp.issparse(data) else data
    X = U @ V.T
    loss = kl_div(data, X) if getattr(model, "loss", "") == "kullback-leibler" else 0.5 * np.square(data - X)
    penalty = np.sqrt((weights[:, None] * U**2).sum(0)) * np.linalg.norm(V, axis=0)
    return float(np.nansum(weights[:, None] * loss) + model.lam_ * penalty.sum())


@pytest.mark.parametrize(("model", "data"), CASES, ids=str)
def test_weights_are_repeated_rows(model, data):
    one, other = clone(model), clone(model)
    U = one.fit_transform(data, sample_weight=WEIGHTS)
    other.fit(data[np.arange(16).repeat(WEIGHTS)])
    assert one.lam_ == pytest.approx(other.lam_, rel=1e-6)
    assert one.objective_ == pytest.approx(other.objective_, rel=1e-6)
    assert one.certificate_.polar_upper == pytest.approx(other.certificate_.polar_upper, rel=1e-3)
    np.testing.assert_allclose(one.components_, other.components_, atol=1e-4)
    assert objective(one, data, U, WEIGHTS) == pytest.approx(one.objective_, rel=1e-9)
    np.testing.assert_allclose(U, one.transform(data), atol=2e-3)
    norms = np.sqrt((WEIGHTS[:, None] * U**2).sum(0))
    np.testing.assert_allclose(norms, np.linalg.norm(one.components_, axis=1), rtol=1e-4)


@pytest.mark.parametrize("seed", [1, 4])
def test_a_fit_that_grows_takes_the_steps_of_repeated_rows(seed):
    rng = np.random.default_rng(100 + seed)
    data = rng.random((400, 8)) @ rng.random((8, 60)) + 0.1 * rng.random((400, 60))
    counts = rng.integers(0, 4, 400)
    one = NMF("3%", random_state=0).fit(data, sample_weight=counts)
    other = NMF("3%", random_state=0).fit(data[np.arange(400).repeat(counts)])
    assert one.n_iter_ == other.n_iter_
    assert one.objective_ == pytest.approx(other.objective_, rel=1e-10)
    np.testing.assert_allclose(one.components_, other.components_, atol=1e-6)


@pytest.mark.parametrize("make", [FIXED, KL, LowRank(0.3), MatrixCompletion(0.3, random_state=0)], ids=str)
def test_the_gap_is_never_understated(make):
    """No factors of any size, start or number of sweeps lie below the objective minus the gap."""
    weights = rng.random(16) * 10.0 ** rng.integers(-3, 3, 16)
    bounds, found = [], []
    for sweeps in (1, 5, 2000):
        for size in (1, 3, 6) if hasattr(make, "n_components") else (None,):
            model = clone(make).set_params(max_iter=sweeps)
            if size:
                model.set_params(n_components=size)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                U = model.fit_transform(Y, sample_weight=weights)
            bounds.append(model.objective_ - model.certificate_.gap)
            found.append(objective(model, Y, U, weights))
            assert found[-1] == pytest.approx(model.objective_, rel=1e-9)
    assert max(bounds) <= min(found) * (1 + 1e-12)


def test_factors_of_weighted_rows_are_float64_because_the_certificate_is():
    tensor = torch.from_numpy(Y).float()
    for data in (tensor, tensor.numpy()):
        model = clone(FIXED)
        U = model.fit_transform(data, sample_weight=torch.from_numpy(WEIGHTS) + 0.5)
        assert isinstance(U, type(data))
        assert str(U.dtype).endswith("float64")
        assert str(model.components_.dtype).endswith("float64")
    again = clone(FIXED).fit(Y, sample_weight=np.ones(16))
    assert again.objective_ == pytest.approx(clone(FIXED).fit(Y).objective_, rel=1e-9)


def test_a_start_of_codes_is_that_of_the_rows():
    once = clone(FIXED).fit(Y, sample_weight=WEIGHTS)
    start = once.transform(Y), once.components_.T
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = clone(FIXED).set_params(max_iter=1).fit(Y, sample_weight=WEIGHTS, start=start)
    assert again.objective_ <= once.objective_ * (1 + 1e-6)


def test_pipelines_and_grids_pass_weights_on():
    grid = GridSearchCV(NMF(1.0, random_state=0), {"lam": ["50%", "20%"]}, cv=2, error_score="raise")
    assert grid.fit(Y, sample_weight=WEIGHTS).best_params_ == {"lam": "20%"}
    pipe = make_pipeline(MaxAbsScaler(), LowRank("20%"))
    assert pipe.fit(Y, lowrank__sample_weight=WEIGHTS)[-1].certificate_.status is Status.CERTIFIED


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(3), "one weight a row"),
        (np.ones((16, 1)), "one weight a row"),
        (2.0, "one weight a row"),
        (-WEIGHTS, "must be ≥ 0"),
        (0 * WEIGHTS, "above zero for one row"),
        (np.where(WEIGHTS > 2, np.nan, 1.0), "sample_weight"),
        (["a"] * 16, "real numbers"),
    ],
)
def test_bad_weights_are_one_sentence(weights, message):
    for model in (FIXED, LowRank(0.3), MatrixCompletion(0.3)):
        with pytest.raises(ValueError, match=message) as error:
            clone(model).fit(Y, sample_weight=weights)
        assert "\n" not in str(error.value)

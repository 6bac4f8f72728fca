"""Law: NMF of data with missing entries minimises over the observed ones, and its certificate is for them."""

import numpy as np
import pytest
import torch

from minimand.factor import NMF, NMFCV, Status, certify

pytestmark = pytest.mark.filterwarnings("ignore:.*stopped before its certificate")

RNG = np.random.default_rng(0)
TRUTH = RNG.random((40, 2)) @ RNG.random((2, 25))
SEEN = RNG.random(TRUTH.shape) < 0.7
HOLES = np.where(SEEN, TRUTH, np.nan)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, lambda y: np.ma.masked_array(TRUTH, ~SEEN)])
def test_missing_entries_are_predicted(kind):
    given = kind(HOLES)
    model = NMF(0.05, n_components=2, random_state=0, tol=1e-4)
    U = np.asarray(model.fit_transform(given))
    V = np.asarray(model.components_).T
    penalty = (np.linalg.norm(U, axis=0) * np.linalg.norm(V, axis=0)).sum()
    assert model.objective_ == pytest.approx(0.5 * np.square((TRUTH - U @ V.T)[SEEN]).sum() + 0.05 * penalty, rel=1e-9)
    assert min(U.min(), V.min()) >= 0
    assert np.abs((U @ V.T - TRUTH)[~SEEN]).max() < 0.1
    np.testing.assert_allclose(np.asarray(model.transform(given)), U, atol=0.02 * U.max())
    assert model.score(given) > 0.99
    found = certify(np.where(SEEN, TRUTH, 0.0), U, V, lam=0.05, regularizer="nonnegative", mask=SEEN)
    assert found.gap == pytest.approx(model.certificate_.gap, rel=0.5) or model.certificate_.status is Status.IMPROVABLE


def test_codes_of_rows_with_missing_entries_are_optimal():
    """Against the dense problem of each row alone: the gradient vanishes where u > 0 and is not negative elsewhere."""
    model = NMF(0.05, n_components=2, random_state=0).fit(HOLES)
    U, V = model.transform(HOLES), model.components_.T
    gradient = np.where(SEEN, U @ V.T - TRUTH, 0.0) @ V + model.lam_ * U
    assert np.abs(gradient[U > 0]).max() < 1e-5
    assert gradient.min() > -1e-5


def test_missing_entries_where_they_cannot_be_used():
    with pytest.raises(ValueError, match="partial_fit of NMF takes no missing entries"):
        NMF(0.1, n_components=2, random_state=0).partial_fit(HOLES)
    with pytest.raises(ValueError, match=r"NaN.*MatrixCompletionCV"):
        NMFCV().fit(HOLES)
    with pytest.raises(ValueError, match="infinity"):
        NMF(0.1).fit(np.where(SEEN, TRUTH, np.inf))

"""Law: a certificate that is computed on first access is the certificate of the fit, however it is reached."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone

from minimand.factor import NMF, MatrixCompletion, SparseDictionary, certify
from minimand.factor import certificate as certificates

Y = np.random.default_rng(0).random((14, 4)) @ np.random.default_rng(1).random((4, 11)) + 0.01
HALF = np.where(np.random.default_rng(2).random(Y.shape) < 0.3, np.nan, Y)
MODELS = [
    (NMF(0.3, n_components=3, random_state=0), Y),
    (NMF(0.3, n_components=3, random_state=0), HALF),
    (SparseDictionary(0.3, 0.1, n_components=3, random_state=0), Y),
    (MatrixCompletion(0.3, n_components=3, random_state=0), HALF),
    (NMF(0.3e-80, n_components=3, random_state=0), 1e-80 * Y),
    (NMF(0.3, n_components=3, random_state=0), Y.astype(np.float32)),
    (SparseDictionary(0.3, 0.1, n_components=3, random_state=0), Y.astype(np.float32)),
    (MatrixCompletion(0.3, n_components=3, random_state=0), HALF.astype(np.float32)),
]
cases = pytest.mark.parametrize(("model", "data"), MODELS, ids=lambda x: type(x).__name__)


def pending(model: object) -> bool:
    return callable(vars(model)["certificate_"])


@cases
def test_every_way_to_the_certificate_gives_the_same(model, data) -> None:
    fitted = clone(model).fit(data)
    assert pending(fitted)
    copies = [copy.deepcopy(fitted), copy.copy(fitted), pickle.loads(pickle.dumps(fitted))]
    assert not pending(fitted)  # to copy is to compute
    other = clone(model).fit(data.copy())
    other.transform(data)
    assert pending(other)
    known = other.certificate_
    assert all(found.certificate_ == known for found in [fitted, *copies])
    assert other.certificate_ is known
    assert 0 <= known.gap < math.inf
    assert known.relative_gap * other.objective_ == pytest.approx(known.gap, rel=1e-9)


def test_it_is_that_of_the_factors() -> None:
    """The bound of ``certify``, which has a larger budget, is no larger; both hold for the returned factors."""
    model = NMF(0.3, n_components=3, random_state=0)
    U = model.fit_transform(Y)
    assert pending(model)
    full = certify(Y, U, model.components_.T, lam=0.3, regularizer="nonnegative")
    grown = NMF(0.3, random_state=0).fit(Y)
    assert full.gap <= model.certificate_.gap * (1 + 1e-6) + 1e-9
    assert model.objective_ - grown.objective_ <= model.certificate_.gap + 1e-9


@pytest.mark.parametrize("change", [lambda x: x.sort(axis=0), lambda x: x.__imul__(1.001), lambda x: x.fill(1.0)])
def test_data_that_have_changed_are_not_certified(change) -> None:
    data = Y.copy()
    model = NMF(0.3, n_components=3, random_state=0).fit(data)
    change(data)
    assert model.certificate_.status == "UNDECIDED"
    assert model.certificate_.gap == math.inf
    assert "changed since the fit" in model.certificate_.method


def test_an_interruption_leaves_it_to_the_next_access(monkeypatch) -> None:
    model = NMF(0.3, n_components=3, random_state=0).fit(Y)
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "conclude", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            _ = model.certificate_
    assert pending(model)
    assert model.certificate_ == NMF(0.3, n_components=3, random_state=0).fit(Y).certificate_


def test_it_is_computed_at_once_where_the_fit_needs_it() -> None:
    """Growth, a warning about the zero solution, and a fit that used all its iterations."""
    assert not pending(NMF(0.3, random_state=0).fit(Y))
    with pytest.warns(UserWarning, match="no component"):
        assert not pending(NMF(1e3, n_components=2).fit(Y))
    with pytest.warns(UserWarning, match="max_iter=1"):
        assert not pending(NMF(0.3, n_components=3, max_iter=1).fit(Y))
    assert not pending(NMF(0.3, n_components=3, effort=None).fit(Y))


def test_before_the_fit_there_is_none() -> None:
    assert not hasattr(NMF(0.3, n_components=3), "certificate_")
    assert not hasattr(clone(NMF(0.3, n_components=3).fit(Y)), "certificate_")
    assert NMF(0.3, n_components=3).fit(torch.from_numpy(Y)).get_params()["n_components"] == 3
    tried = NMF(0.3, n_components=3, random_state=0)
    tried.partial_fit(Y)  # a mini-batch replaces what the first fit postponed
    assert "mini-batches" in tried.certificate_.method

"""Law: λ is chosen by data that no fit has seen, as a share of λmax, and with scikit-learn's own tools."""

import warnings

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from sklearn.base import clone
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

from minimand.factor import (
    NMF,
    NMFCV,
    CPTensor,
    LowRank,
    LowRankCV,
    MatrixCompletion,
    MatrixCompletionCV,
    RobustPCA,
    Share,
    SparseDictionary,
)
from minimand.factor.descent import LocalDescent

pytestmark = pytest.mark.filterwarnings("ignore:.*stopped before its certificate")


def planted(rank=3, noise=0.1, seed=0, shape=(50, 40)):
    rng = np.random.default_rng(seed)
    return rng.random((shape[0], rank)) @ rng.random((rank, shape[1])) + noise * rng.random(shape)


Y = planted()
MODELS = [
    LowRank(0.1, random_state=0),
    NMF(0.1, n_components=2, random_state=0, max_iter=20),
    SparseDictionary(0.1, 0.1, n_components=2, random_state=0, max_iter=20),
    RobustPCA(0.1, 2.0, random_state=0, max_iter=50),
    MatrixCompletion(0.1, n_components=2, random_state=0, max_iter=20),
]


@pytest.mark.parametrize("model", [*MODELS, CPTensor(0.1, n_components=2, random_state=0, max_iter=20)], ids=str)
def test_a_share_is_that_part_of_lambda_max(model):
    data = Y.reshape(50, 5, 8) if isinstance(model, CPTensor) else Y
    top = model.lambda_max(data)
    for lam in (Share(0.3), "30%", " 30 %"):
        found = clone(model).set_params(lam=lam).fit(data)
        assert found.lam_ == pytest.approx(0.3 * top, rel=1e-6)
        plain = clone(model).set_params(lam=found.lam_).fit(data)
        assert found.objective_ == pytest.approx(plain.objective_, rel=1e-12)
        np.testing.assert_allclose(found.transform(data), plain.transform(data))


def test_shares_outside_of_zero_to_one():
    for bad in (0.0, -0.1, 1.5, float("nan"), "x"):
        with pytest.raises(ValueError, match="share of lambda_max must"):
            Share(bad)
    for bad in ("much", "150%", "-1%"):
        with pytest.raises(ValueError, match=r"lam must be|share of lambda_max must"):
            NMF(bad).fit(Y)
    with pytest.raises(ValueError, match=r"lambda_max\(Y\) is zero"):
        NMF(Share(0.5)).fit(np.zeros((4, 3)))


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_the_score_is_the_variance_explained(model):
    model.fit(Y)
    X = model.inverse_transform(model.transform(Y))
    mean = Y.mean() if isinstance(model, MatrixCompletion) else Y.mean(0)
    assert model.score(Y) == pytest.approx(1 - np.square(Y - X).sum() / np.square(Y - mean).sum(), abs=1e-4)
    assert model.score(torch.from_numpy(Y)) == pytest.approx(model.score(Y))


def test_scores_of_sparse_and_of_constant_data():
    sparse = sp.random_array((40, 30), density=0.2, random_state=0, format="csr")
    model = NMF(0.1, n_components=2, random_state=0).fit(sparse)
    assert model.score(sparse) == pytest.approx(model.score(sparse.toarray()))
    flat = np.ones((4, 3))
    assert LowRank(0.1).fit(flat).score(flat) == 0.0


def test_completion_scores_entries_that_were_held_out():
    rng = np.random.default_rng(0)
    seen = rng.random(Y.shape) < 0.7
    model = MatrixCompletion("2%", random_state=0).fit(np.where(seen, Y, np.nan))
    X = model.inverse_transform(model.codes_)
    held = Y[~seen]
    expected = 1 - np.square(held - X[~seen]).sum() / np.square(held - held.mean()).sum()
    assert model.score(np.where(seen, np.nan, Y)) == pytest.approx(expected, rel=1e-6)


def test_grid_search_over_a_pipeline_of_texts():
    texts = [
        f"{a} {b} {a} {c}" for a in ("cat", "dog", "fish") for b in ("eats", "sleeps") for c in ("now", "then")
    ] * 2
    pipe = make_pipeline(TfidfVectorizer(), NMF(0.5, n_components=2, random_state=0, max_iter=20))
    search = GridSearchCV(pipe, {"nmf__lam": [Share(0.5), Share(0.05)]}, cv=2, error_score="raise").fit(texts)
    assert search.best_params_["nmf__lam"] == Share(0.05)
    assert search.best_estimator_.transform(texts).shape == (24, 2)


@pytest.mark.parametrize("kind", ["array", "tensor", "sparse"])
@pytest.mark.parametrize("make", [NMFCV, LowRankCV], ids=lambda m: m.__name__)
def test_the_choice_follows_the_one_standard_error_rule(make, kind):
    data = planted(noise=0.3, shape=(70, 60))
    given = {"array": data, "tensor": torch.from_numpy(data), "sparse": sp.csr_array(data)}[kind]
    model = make(cv=4, n_lams=6, random_state=0, max_iter=20, **({"r_max": 6} if make is NMFCV else {}))
    U = model.fit_transform(given)
    found = model.cv_results_
    assert found["errors"].shape == (4, 6)
    best = found["mean_error"].argmin()
    assert found["lams"][best] == pytest.approx(model.lam_min_)
    within = found["mean_error"] <= found["mean_error"][best] + found["standard_error"][best]
    assert model.lam_ == pytest.approx(found["lams"][within].max())
    assert model.n_components_ >= 1
    assert U.shape == model.transform(given).shape == (70, model.n_components_)
    assert model.certificate_ is model.model_.certificate_
    assert model.score(given) > 0.5


def test_the_choice_of_completion_predicts_better_than_both_ends_of_the_grid():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(60, 2)) @ rng.normal(size=(2, 50))
    noisy = np.where(rng.random(truth.shape) < 0.5, truth + 0.3 * rng.normal(size=truth.shape), np.nan)
    model = MatrixCompletionCV(cv=3, n_lams=8, random_state=0).fit(noisy)
    error = model.cv_results_["mean_error"]
    assert error.min() < min(error[0], error[-1])
    full = np.square(truth - model.inverse_transform(model.model_.codes_)).mean()
    for lam in (model.cv_results_["lams"][0], model.cv_results_["lams"][-1]):
        other = MatrixCompletion(lam, random_state=0).fit(noisy)
        assert full < np.square(truth - other.inverse_transform(other.codes_)).mean()
    assert MatrixCompletionCV([1.0, 5.0], cv=2, random_state=0).fit(noisy).lam_ in (1.0, pytest.approx(5.0))


def test_grids_take_numbers_and_shares():
    top = LowRank(1.0).lambda_max(Y)
    lams = [Share(0.5), "10%", 0.02 * top]
    path = LowRank(1.0, random_state=0).path(Y, lams)
    assert [model.lam for model in path] == pytest.approx([0.5 * top, 0.1 * top, 0.02 * top])
    for make in (LowRankCV, MatrixCompletionCV, NMFCV):
        model = make(lams, cv=2, random_state=0, **({"r_max": 4} if make is NMFCV else {})).fit(np.abs(Y))
        assert model.cv_results_["shares"] == pytest.approx([0.5, 0.1, 0.02], rel=0.1)


@pytest.mark.filterwarnings("error")
def test_blocks_of_one_entry_are_folds():
    for make in (LowRankCV, MatrixCompletionCV):
        data = planted(noise=0.3, shape=(12, 6)) if make is LowRankCV else np.where(np.eye(8) > 0, Y[:8, :8], np.nan)
        found = make(cv=100, n_lams=3, random_state=0, max_iter=20).fit(data).cv_results_
        assert np.isfinite(found["errors"]).all()
        assert found["errors"].max() < 100


@pytest.mark.filterwarnings("ignore:.*the objective lies outside")
@pytest.mark.parametrize("make", [NMFCV, LowRankCV, MatrixCompletionCV], ids=lambda m: m.__name__)
def test_the_choice_and_the_score_do_not_depend_on_the_scale(make):
    data = planted(shape=(14, 12))
    data[0, 0] = np.nan if make is MatrixCompletionCV else 1.0
    model = make(cv=2, n_lams=3, random_state=0, max_iter=10).fit(data)
    for scale in (2.0**-900, 2.0**900):
        other = make(cv=2, n_lams=3, random_state=0, max_iter=10).fit(data * scale)
        assert other.lam_ / scale == pytest.approx(model.lam_)
        assert other.cv_results_["errors"] == pytest.approx(model.cv_results_["errors"])
        assert other.score(data * scale) == pytest.approx(model.score(data))


def test_folds_of_one_entry_and_constant_data():
    """Neither has a variance of its own, to which an error could be relative."""
    few = np.where(np.eye(5, dtype=bool), planted(shape=(5, 5)), np.nan)
    model = MatrixCompletionCV(cv=5, n_lams=2, random_state=0, max_iter=10).fit(few)
    assert np.isfinite(model.cv_results_["errors"]).all()
    for flat in (np.ones((4, 3)), sp.csr_array(np.ones((4, 3)))):
        assert LowRankCV(cv=3, n_lams=2, random_state=0).fit(flat).n_components_ == 1


def test_plots_and_progress(capsys):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    pytest.importorskip("rich")
    axes = LowRankCV(cv=2, n_lams=3, random_state=0, verbose=True).fit(Y).plot()
    assert "LowRankCV" in capsys.readouterr().out
    assert axes.get_xlabel() == "λ"
    assert len(axes.get_lines()) >= 2


def test_zero_solutions_and_sizes_above_both_sides_are_sentences():
    with pytest.warns(UserWarning, match="lambda_max.Y., which is at most") as caught:
        NMF(1e3, random_state=0).fit(Y)
    stated = float(str(caught[0].message).split("at most ")[1].split(";")[0])
    assert stated == pytest.approx(NMF(1.0).lambda_max(Y), rel=1e-3)
    with pytest.raises(ValueError, match="n_components=51 exceeds both sides"):
        NMF(0.5, n_components=51).fit(Y)
    for whole in ((Y > 1).astype(bool), (10 * Y).astype(int)):
        assert NMF(0.5, n_components=2, random_state=0).fit(whole).components_.dtype == np.float64
    holes = Y.copy()
    holes[3], holes[:, 4] = 0, 0
    model = NMF(0.5, n_components=2, random_state=0)
    assert np.abs(model.fit_transform(holes)[3]).max() == 0
    assert np.abs(model.components_[:, 4]).max() == 0


def test_no_certificate_is_computed_without_effort():
    for make, data in ((NMF, Y), (MatrixCompletion, Y), (SparseDictionary, Y), (CPTensor, Y.reshape(50, 5, 8))):
        model = make("20%", n_components=2, random_state=0, effort=None, max_iter=20).fit(data)
        assert model.certificate_.method == "no certificate was requested"
        with pytest.raises(ValueError, match="effort=None computes no certificate"):
            make("20%", effort=None).fit(data)


BAD = [
    (LowRankCV(cv=1), Y, "cv must be a whole number ≥ 2"),
    (LowRankCV(cv=2.5), Y, "cv must be a whole number"),
    (LowRankCV([0.0]), Y, "lams must be"),
    (LowRankCV([]), Y, "lams must be"),
    (LowRankCV("5%"), Y, "lams must be"),
    (LowRankCV(), np.zeros((4, 4)), "every entry of Y is zero"),
    (LowRankCV(), Y[:1], "n_samples=1"),
    (NMFCV(), -Y, "Negative values"),
]


@pytest.mark.parametrize(("model", "bad", "message"), BAD, ids=range(len(BAD)))
def test_bad_input_of_the_choice_is_a_value_error(model, bad, message):
    with pytest.raises(ValueError, match=message):
        model.fit(bad)


CHECKED = [
    NMFCV(cv=2, n_lams=1, r_max=2, max_iter=3),
    LowRankCV(cv=2, n_lams=2),
    MatrixCompletionCV(cv=2, n_lams=1, r_max=2, max_iter=3),
]


@pytest.mark.parametrize("model", CHECKED, ids=lambda m: type(m).__name__)
def test_check_estimator(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # check_estimator warns about skipped checks
        check_estimator(model)


def test_an_interrupted_choice_says_what_it_holds(monkeypatch):
    """Nothing before λ is chosen; then the fit at it to all data, as far as it went."""
    model, sweep = NMFCV(["10%", "2%"], cv=2, random_state=0), LocalDescent._sweep

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalDescent, "_sweep", interrupted)
        with pytest.raises(KeyboardInterrupt, match="NMFCV was interrupted before it chose lam"):
            model.fit(Y)
    assert not hasattr(model, "model_")
    choose = NMFCV._choose
    with monkeypatch.context() as patch:
        patch.setattr(NMFCV, "_choose", lambda *a: (choose(*a), patch.setattr(LocalDescent, "_sweep", interrupted))[0])
        with pytest.raises(KeyboardInterrupt, match="interrupted_ is True"):
            model.fit(Y)
    assert model.interrupted_
    assert model.transform(Y).shape == (len(Y), model.n_components_)
    assert LocalDescent._sweep is sweep
    assert not model.fit(Y).interrupted_

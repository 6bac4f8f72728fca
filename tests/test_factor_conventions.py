"""Law: the estimators keep scikit-learn's conventions and reject bad input with clear messages."""

import pickle
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from scipy.optimize import nnls
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

from minimand.factor import (
    NMF,
    CPTensor,
    DropoutFactorization,
    LowRank,
    MatrixCompletion,
    RobustPCA,
    SparseDictionary,
    Status,
)

# The bound on a tensor's polar is loose, so few fits are certified.
pytestmark = pytest.mark.filterwarnings("ignore:CPTensor stopped before its certificate")

Y = np.random.default_rng(0).random((14, 4)) @ np.random.default_rng(1).random((4, 9)) + 0.01

MATRIX = [
    LowRank(0.5, random_state=0),
    NMF(0.5, random_state=0, effort=0.02),
    SparseDictionary(0.3, 0.1, n_components=3, random_state=0),
    RobustPCA(1.0, 2.0, tol=1e-5, random_state=0),
    RobustPCA(1.0, tol=1e-4, random_state=0),
    MatrixCompletion(0.5, random_state=0),
]
ALL = [*MATRIX, CPTensor(0.5, random_state=0)]


def name(model):
    return type(model).__name__ + ("" if getattr(model, "gamma", 0) is not None else "-nonsmooth")


def data(model):
    return Y.reshape(14, 3, 3) if isinstance(model, CPTensor) else Y


CHECKED = [
    LowRank(0.1),
    NMF(0.1, effort=0, max_iter=8, n_components=2),
    NMF("5%", n_components=3),  # to its own end: the descent of weighted rows stops where that of repeated ones does
    SparseDictionary(0.3, 0.1, max_iter=8, r_max=2),
    RobustPCA(0.5, 1.0),
    MatrixCompletion(0.1, max_iter=50),
]


@pytest.mark.parametrize("model", CHECKED, ids=name)
def test_check_estimator(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # check_estimator warns about skipped checks
        check_estimator(model)


@pytest.mark.parametrize("model", ALL, ids=name)
def test_codes_of_the_training_data_are_the_fitted_ones(model):
    model = clone(model)
    U = model.fit_transform(data(model))
    np.testing.assert_allclose(model.transform(data(model)), U, atol=0.02 * np.abs(U).max())
    assert U.shape == (14, model.n_components_)
    assert model.components_.shape == (model.n_components_, 9)
    assert model.history_[-1] == model.objective_
    assert model.inverse_transform(U).shape == data(model).shape
    np.testing.assert_allclose(np.linalg.norm(U, axis=0), np.linalg.norm(model.components_, axis=1), rtol=1e-3)
    assert model.certificate_.gap >= 0
    assert list(model.get_feature_names_out()) == [f"{type(model).__name__.lower()}{i}" for i in range(U.shape[1])]


@pytest.mark.parametrize("model", ALL, ids=name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kind_that_comes_in_comes_out(model, dtype):
    tensor = torch.from_numpy(data(model)).to(dtype)
    first, second = clone(model), clone(model)
    U, W = first.fit_transform(tensor), second.fit_transform(tensor.numpy())
    assert isinstance(U, torch.Tensor)
    assert isinstance(W, np.ndarray)
    assert isinstance(first.components_, torch.Tensor)
    assert isinstance(second.components_, np.ndarray)
    assert U.dtype == dtype
    assert W.dtype == tensor.numpy().dtype
    np.testing.assert_array_equal(U.numpy(), W)
    assert isinstance(first.transform(tensor.numpy()), np.ndarray)
    assert isinstance(second.transform(tensor), torch.Tensor)
    assert isinstance(first.inverse_transform(U), torch.Tensor)
    assert isinstance(second.inverse_transform(W), np.ndarray)


@pytest.mark.parametrize("model", ALL, ids=name)
def test_pickling_cloning_and_seeds(model):
    fitted = clone(model).fit(data(model))
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.transform(data(model)), fitted.transform(data(model)))
    np.testing.assert_array_equal(clone(model).fit(data(model)).components_, fitted.components_)
    assert again.certificate_ == fitted.certificate_


def test_pipelines_and_set_output():
    pipe = make_pipeline(FunctionTransformer(np.abs, feature_names_out="one-to-one"), NMF(0.5, random_state=0))
    assert pipe.fit_transform(Y).shape[0] == 14
    assert pipe[-1].n_components_ == len(pipe.get_feature_names_out([f"x{i}" for i in range(9)]))
    pytest.importorskip("pandas")
    framed = NMF(0.5, random_state=0).set_output(transform="pandas").fit_transform(Y)
    assert framed.columns[0] == "nmf0"


@pytest.mark.parametrize("model", ALL, ids=name)
def test_lambda_max_is_where_zero_becomes_the_answer(model):
    top = model.lambda_max(data(model))
    model = clone(model).set_params(**{"n_components": None} if hasattr(model, "n_components") else {})
    with pytest.warns(UserWarning, match="use a smaller lam"):
        above = clone(model).set_params(lam=1.001 * top).fit(data(model))
    assert above.n_components_ == 0
    assert above.certificate_.status is Status.CERTIFIED or isinstance(model, CPTensor | SparseDictionary)
    if above.certificate_.polar_upper <= above.lam:
        assert "zero" in above.certificate_.method
    assert above.transform(data(model)).shape == (14, 0)
    assert np.abs(above.inverse_transform(np.zeros((14, 0)))).max() == 0
    if not (isinstance(model, RobustPCA) and model.gamma is None):  # other subgradients may be better
        assert clone(model).set_params(lam=0.98 * top).fit(data(model)).n_components_ > 0


@pytest.mark.parametrize("model", [m for m in ALL if not isinstance(m, SparseDictionary)], ids=name)
def test_paths_start_warm_and_keep_the_order(model):
    top = model.lambda_max(data(model))
    path = model.path(data(model), [0.1 * top, 0.8 * top, 0.3 * top])
    np.testing.assert_allclose(path.lams, [0.1 * top, 0.8 * top, 0.3 * top])
    assert path.objectives[0] <= path.objectives[2] <= path.objectives[1]
    for fitted in path:
        alone = clone(model).set_params(lam=fitted.lam).fit(data(model))
        # Both are certified, so they differ by at most their gaps.
        slack = fitted.certificate_.gap + alone.certificate_.gap
        assert abs(alone.objective_ - fitted.objective_) <= slack + 1e-9
    assert len(path.ranks) == len(path.gaps) == 3
    assert len(model.path(data(model), n_lams=2)) == 2


def nan(position=(0, 0)):
    bad = Y.copy()
    bad[position] = np.nan
    return bad


BAD = [
    (NMF(0.5), np.full((4, 3), np.nan), "every entry is NaN"),
    (LowRank(0.5), torch.from_numpy(nan()), "Y contains NaN, 1 of"),
    (LowRank(0.5), np.where(Y > 1, np.inf, Y), "infinity"),
    (NMF(0.5), -Y, "Negative values"),
    (NMF(0.5), torch.from_numpy(-Y), "Negative values"),
    (LowRank(0.0), Y, "lam must be a finite number > 0, got 0"),
    (LowRank(-1.0), Y, "lam must be a finite number > 0"),
    (LowRank("much"), Y, "lam must be a finite number > 0"),
    (RobustPCA(1.0, -1.0), Y, "gamma must be"),
    (SparseDictionary(1.0, -1.0), Y, "gamma must be"),
    (NMF(1.0, n_components=0), Y, "n_components must be"),
    (NMF(1.0, n_components=2.5), Y, "n_components must be"),
    (NMF(1.0, r_max=0), Y, "r_max must be"),
    (NMF(1.0, max_iter=0), Y, "max_iter must be"),
    (LowRank(1.0, tol=0.0), Y, "tol must be"),
    (LowRank(1.0), Y[0], "Expected 2D array"),
    (LowRank(1.0), torch.from_numpy(Y[0]), "Expected 2D"),
    (LowRank(1.0), np.empty((0, 3)), "minimum of 1"),
    (LowRank(1.0), torch.empty(0, 3), "minimum of 1"),
    (LowRank(1.0), [["a", "b"]], "could not convert|dtype"),
    (LowRank(1.0), torch.ones(2, 2, dtype=torch.complex64), "Complex"),
    (
        MatrixCompletion(1.0),
        np.where(np.arange(14)[:, None] == 3, np.nan, Y),
        r"1 row\(s\) of Y have no observed entry.* 3",
    ),
    (MatrixCompletion(1.0), np.where(np.arange(9) == 2, np.nan, Y), r"1 column\(s\).* 2"),
    (MatrixCompletion(1.0), np.where(Y > 1, np.inf, Y), "infinity"),
    (MatrixCompletion(1.0), sp.csr_array((3, 4)), "no observed entry at all"),
    (CPTensor(1.0), Y, "three dimensions"),
    (CPTensor(1.0), np.full((2, 2, 2), np.nan), "NaN"),
]


@pytest.mark.parametrize(("model", "bad", "message"), BAD, ids=range(len(BAD)))
def test_bad_input_is_a_value_error_with_a_remedy(model, bad, message):
    with pytest.raises(ValueError, match=message):
        model.fit(bad)


def test_transform_checks_its_input():
    model = NMF(0.5, random_state=0).fit(Y)
    with pytest.raises(ValueError, match="features"):
        model.transform(Y[:, :5])
    with pytest.raises(ValueError, match="codes have shape"):
        model.inverse_transform(np.ones((3, 50)))
    with pytest.raises(ValueError, match="features"):
        model.transform(torch.from_numpy(Y[:, :5]))


def test_rows_that_a_sparse_matrix_does_not_mention_have_zero_codes():
    entries = sp.lil_array(Y)
    entries[3] = 0
    model = MatrixCompletion(0.1, random_state=0)
    U = model.fit_transform(entries.tocsr())
    assert np.abs(U[3]).max() == 0
    assert model.certificate_.status is Status.CERTIFIED


def test_progress(capsys):
    pytest.importorskip("rich")
    NMF(0.5, random_state=0, verbose=True).fit(Y)
    assert "components" in capsys.readouterr().out


@pytest.mark.parametrize(("dtype", "error"), [(np.float32, 2e-4), (np.float64, 1e-6)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_codes_are_those_of_nonnegative_least_squares(dtype, error, scale):
    """At every scale of the data; codes that stopped at an absolute gap were wrong by up to 18 %."""
    rng = np.random.default_rng(0)
    large = scale * (rng.random((300, 15)) ** 2 @ rng.random((15, 100)) ** 2 + 0.05 * rng.random((300, 100)))
    model = NMF("0.2%", n_components=15, effort=None, max_iter=5, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(large.astype(dtype))
    V = model.components_.T.astype(np.float64)
    stacked = np.vstack([V, model.lam_**0.5 * np.eye(15)])
    expected = np.array([nnls(stacked, np.append(row, np.zeros(15)))[0] for row in large[:20]])
    found = model.transform(large.astype(dtype))[:20]
    assert np.linalg.norm(found - expected) <= error * np.linalg.norm(expected)


@pytest.mark.parametrize("model", [NMF(2.0), LowRank(0.5), RobustPCA(0.5), DropoutFactorization(3)], ids=str)
def test_views_with_negative_strides_are_taken(model):
    Y = np.abs(np.random.default_rng(0).normal(size=(12, 8)))
    if hasattr(model, "random_state"):
        model.set_params(random_state=0)
    for view in (Y[::-1], Y[:, ::-1]):
        whole, found = (clone(model).fit(data).components_ for data in (view.copy(), view))
        np.testing.assert_array_equal(found, whole)

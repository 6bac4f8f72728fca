"""Law: a sparse matrix gives the factors and certificates of its dense copy, and is never made dense."""

import subprocess
import sys

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from sklearn.base import clone

from minimand.factor import (
    NMF,
    DropoutFactorization,
    LowRank,
    RobustPCA,
    SparseDictionary,
    certify,
    dropout,
    matrices,
    robust,
)
from minimand.factor.residual import DenseDual
from minimand.factor.sparse import SparseData

pytestmark = pytest.mark.filterwarnings("ignore:.*stopped before its certificate")

Y = sp.random_array((60, 40), density=0.15, random_state=0, format="csr")
MODELS = [
    NMF(0.7, random_state=0, r_max=4, max_iter=60, tol=1e-2),
    NMF(0.5, n_components=4, random_state=0),
    LowRank(1.0, random_state=0),
    SparseDictionary(1.0, 0.1, n_components=3, random_state=0),
    RobustPCA(2.5, 2.0, random_state=0),
    RobustPCA(4.0, random_state=0, max_iter=100),
]


@pytest.mark.parametrize("form", ["csr", "csc", "tensor"])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_sparse_data_are_their_dense_copy(model, form):
    given = torch.from_numpy(Y.toarray()).to_sparse() if form == "tensor" else Y.asformat(form)
    U = model.fit_transform(given)
    found = (model.objective_, model.certificate_, model.transform(given), model.lambda_max(given))
    W = model.fit_transform(Y.toarray())
    if getattr(model, "n_components", 0) is None:  # growth magnifies rounding errors
        assert found[0] == pytest.approx(model.objective_, rel=1e-2)
    else:
        assert found[1].status == model.certificate_.status
        np.testing.assert_allclose(U, W, atol=1e-9)
        np.testing.assert_allclose(found[2], model.transform(Y.toarray()), atol=1e-9)
        assert found[0] == pytest.approx(model.objective_, rel=1e-12)
        assert found[1].relative_gap == pytest.approx(model.certificate_.relative_gap, rel=1e-6, abs=1e-8)
    assert found[3] == pytest.approx(model.lambda_max(Y.toarray()), rel=1e-6)


@pytest.mark.parametrize("form", ["csr", "csc", "tensor"])
@pytest.mark.parametrize("method", ["closed_form", "alternating", "gradient", "dropout"])
def test_dropout_on_sparse_data_is_that_on_their_dense_copy(monkeypatch, method, form):
    """Also where only the leading singular triples are computed; their signs are free, the products are not."""
    given = torch.from_numpy(Y.toarray()).to_sparse() if form == "tensor" else Y.asformat(form)
    model = DropoutFactorization(5, 0.5, method=method, max_iter=60, tol=0.0, random_state=0)
    dense, whole = Y.toarray(), model.fit_transform(Y.toarray()) @ model.components_
    expected = (model.objective_, model.optimum_, model.threshold_)
    codes = model.inverse_transform(model.transform(dense))
    monkeypatch.setattr(dropout, "SMALL", 0)
    monkeypatch.setattr(SparseData, "__getitem__", lambda *_: pytest.fail("a dense block was formed"))
    product = model.fit_transform(given) @ model.components_
    np.testing.assert_allclose(product, whole, atol=1e-11)
    np.testing.assert_allclose(model.inverse_transform(model.transform(given)), codes, atol=1e-11)
    np.testing.assert_allclose((model.objective_, model.optimum_, model.threshold_), expected, rtol=1e-12)


@pytest.mark.parametrize("terms", [3, 14, 60])
def test_dropout_on_sparse_data_of_low_rank_without_a_penalty(monkeypatch, terms):
    """p = 0 keeps every singular value above rounding: Lanczos iteration finds the rank of repeated values, too."""
    monkeypatch.setattr(dropout, "SMALL", 0)
    low = sp.kron(sp.eye_array(5), np.ones((9, 9)), format="csr")
    model = DropoutFactorization(terms, 0.0)
    product = model.fit_transform(low) @ model.components_
    assert model.objective_ == pytest.approx(81.0 * max(5 - terms, 0), abs=1e-9)
    assert np.linalg.matrix_rank(product, tol=1e-6) == min(terms, 5)
    assert not DropoutFactorization(terms).fit_transform(0 * low).any()


def test_robust_pca_refuses_a_sparse_matrix_beyond_the_memory(monkeypatch):
    monkeypatch.setattr(robust, "physical_memory", lambda: 80 * Y.shape[0] * Y.shape[1] - 1)
    with pytest.raises(ValueError, match=r"shape \(60, 40\) dense and needs at least .*: use fewer rows, or LowRank"):
        RobustPCA(1.0).fit(Y)
    monkeypatch.undo()
    assert 2**28 < robust.physical_memory() < 2**50 or robust.physical_memory() == float("inf")


@pytest.mark.parametrize("name", ["l2", "nonnegative"])
@pytest.mark.parametrize("compact", [False, True])
def test_certificates_of_sparse_data_are_those_of_their_dense_copy(monkeypatch, name, compact):
    """Also where no dense block of the data's size may be formed; the rounding errors of thin products are charged."""
    U, V = LowRank(1.0).fit_transform(Y.toarray()), LowRank(1.0).fit(Y.toarray()).components_.T
    U, V = (np.abs(U), np.abs(V)) if name == "nonnegative" else (U, V)
    dense = certify(Y.toarray(), U, V, lam=1.0, regularizer=name)
    if compact:
        monkeypatch.setattr(matrices, "BLOCK", 500)
        monkeypatch.setattr(DenseDual, "dense", lambda self: pytest.fail("the whole matrix was formed"))
    sparse = certify(Y, U, V, lam=1.0, regularizer=name)
    assert sparse.status is dense.status
    if not compact:
        assert sparse.gap == pytest.approx(dense.gap, rel=1e-6, abs=1e-9)
    with pytest.raises(ValueError, match="zeros of a sparse Y are data"):
        certify(Y, U, V, lam=1.0, mask=np.ones(Y.shape, dtype=bool))


def test_thin_products_are_the_moments_of_the_dense_residual():
    rng = np.random.default_rng(0)
    U, V = torch.from_numpy(rng.random((60, 3))), torch.from_numpy(rng.random((40, 3)))
    found = DenseDual(SparseData(Y), U, V).moments()
    dense = DenseDual(torch.from_numpy(Y.toarray()), U, V).moments()
    for one, other in zip(found[:3], dense[:3], strict=True):
        assert abs(one - other) <= max(found.slack, 1e-13 * abs(other))


def test_sparse_input_that_cannot_be_used():
    with pytest.raises(ValueError, match="Negative values"):
        NMF(0.5).fit(-Y)
    bad = Y.copy()
    bad.data[0] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        LowRank(0.5).fit(bad)
    zeros = sp.csr_array((np.append(Y.data, 0.0), (*(np.append(i, 0) for i in Y.tocoo().coords),)), shape=Y.shape)
    assert LowRank(1.0).fit(zeros).objective_ == pytest.approx(LowRank(1.0).fit(Y).objective_)


@pytest.mark.parametrize("model", [*MODELS, DropoutFactorization(5, 0.5)], ids=str)
@pytest.mark.parametrize("kind", [sp.csr_array, sp.csc_array])
def test_an_entry_that_is_stored_in_parts_is_their_sum(model, kind):
    """Squares of the parts are not the square of the entry: objectives and certificates would be wrong."""
    if isinstance(model, NMF | SparseDictionary) and model.n_components is None:
        model = clone(model).set_params(n_components=3)
    whole = kind(Y)
    parts = kind(
        (np.repeat(whole.data, 2) * np.tile([1.5, -0.5], whole.nnz), np.repeat(whole.indices, 2), 2 * whole.indptr)
    )
    kept = parts.copy()
    np.testing.assert_allclose(parts.toarray(), Y.toarray())
    U = model.fit_transform(parts)
    found = model.objective_, model.score(parts), U @ model.components_
    W = model.fit_transform(whole)
    assert found[:2] == pytest.approx((model.objective_, model.score(whole)), rel=1e-9)
    np.testing.assert_allclose(found[2], W @ model.components_, atol=1e-9)
    assert parts.nnz == 2 * Y.nnz
    assert (parts.data == kept.data).all()
    assert certify(parts, U, model.components_.T, lam=1.0).gap == pytest.approx(
        certify(whole, U, model.components_.T, lam=1.0).gap, rel=1e-9
    )


def test_memory_is_that_of_the_entries_and_the_factors():
    """A matrix of 10⁴ × 10⁴ with 10⁶ entries, like TF-IDF: at most three times its memory, and the factors."""
    code = """if True:
        import numpy as np, scipy.sparse as sp, torch
        from minimand.factor import NMF
        torch.set_num_threads(1)
        rng = np.random.default_rng(0); n, e = 10000, 1000000
        row, column = rng.integers(n, size=e), (n * rng.random(e) ** 3).astype(int)
        Y = sp.coo_array((rng.random(e), (row, column)), (n, n)).tocsr()
        del row, column
        model = NMF(2.0, n_components=5, max_iter=3)
        model.fit(Y[:300, :300])
        peak = lambda: next(int(x.split()[1]) for x in open('/proc/self/status') if x.startswith('VmHWM'))
        with open('/proc/self/clear_refs', 'w') as file: file.write('5')
        before = peak()
        model.fit(Y)
        size = Y.data.nbytes + Y.indices.nbytes + Y.indptr.nbytes
        print((peak() - before) * 1024 / (3 * size + 20 * 8 * 2 * n * 5))"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True)
    assert float(done.stdout) <= 1.0

"""Law: for every kind of input, missing entries are not used, and the returned factors are the certified ones."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from minimand.factor import NMF, CPTensor, LowRank, MatrixCompletion, RobustPCA, SparseDictionary, certify, factorize

from .test_certificate import nuclear_minimum

RNG = np.random.default_rng(0)
Y = RNG.random((12, 2)) @ RNG.random((2, 8)) + 0.05 * RNG.random((12, 8))
HIDDEN = np.zeros(Y.shape, dtype=bool)
HIDDEN[[0, 3, 5, 8], [1, 2, 7, 0]] = True
MASKED = np.ma.MaskedArray(np.where(HIDDEN, 1e6, Y), HIDDEN)  # using a masked entry would change the result
ESTIMATORS = [LowRank(0.5), NMF(0.5), SparseDictionary(0.5), RobustPCA(1.0), CPTensor(0.5)]


def test_completion_takes_what_a_masked_array_masks_for_missing():
    plain, masked = MatrixCompletion(0.1, random_state=0), MatrixCompletion(0.1, random_state=0)
    U = plain.fit_transform(np.where(HIDDEN, np.nan, Y))
    np.testing.assert_array_equal(masked.fit_transform(MASKED), U)
    np.testing.assert_array_equal(masked.transform(MASKED), plain.transform(np.where(HIDDEN, np.nan, Y)))
    assert masked.lambda_max(MASKED) == plain.lambda_max(np.where(HIDDEN, np.nan, Y))
    whole = np.ma.MaskedArray(np.arange(12).reshape(4, 3), np.eye(4, 3))  # integers cannot be NaN
    assert MatrixCompletion(0.1, random_state=0).fit(whole).n_components_ > 0
    found = certify(MASKED, U, plain.components_.T, lam=0.1)
    assert found == certify(Y, U, plain.components_.T, lam=0.1, mask=~HIDDEN)
    some = RNG.random(Y.shape) < 0.8
    both = certify(MASKED, U, plain.components_.T, lam=0.1, mask=some)
    assert both == certify(Y, U, plain.components_.T, lam=0.1, mask=some & ~HIDDEN)


@pytest.mark.parametrize("model", [m for m in ESTIMATORS if not isinstance(m, NMF)], ids=lambda m: type(m).__name__)
def test_who_needs_every_entry_refuses_masked_arrays(model):
    data = MASKED.reshape(12, 4, 2) if isinstance(model, CPTensor) else MASKED
    with pytest.raises(ValueError, match=r"masked array with 4 masked entries; .* fill"):
        model.fit(data)
    with pytest.raises(ValueError, match="MatrixCompletion"):
        factorize(MASKED, lam=0.5)
    with pytest.raises(ValueError, match=r"U is a masked array.*filled"):
        certify(Y, np.ma.MaskedArray(np.ones((12, 1)), HIDDEN[:, :1]), np.ones((8, 1)), lam=0.5)
    nothing = np.ma.MaskedArray(Y, np.zeros_like(HIDDEN))  # an empty mask is accepted
    assert LowRank(0.5).fit(nothing).n_components_ == LowRank(0.5).fit(Y).n_components_


@pytest.mark.filterwarnings("ignore:.*stopped before its certificate")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_comes_back_as_float32_with_a_gap_that_holds(dtype):
    """The returned factors are the certified ones, without further rounding."""
    data = torch.from_numpy(Y).to(dtype)
    exact = data.double()
    model = LowRank(0.3, random_state=0)
    U = model.fit_transform(data)
    assert U.dtype == model.components_.dtype == model.transform(data).dtype == torch.float32
    wide, right = U.double(), model.components_.double().mT
    value = 0.5 * (exact - wide @ right.mT).square().sum() + 0.3 * (wide.norm(dim=0) * right.norm(dim=0)).sum()
    best = nuclear_minimum(exact, 0.3)
    assert float(value) == pytest.approx(model.objective_, rel=1e-12)
    assert model.certificate_.gap >= float(value) - best - 1e-13 * best
    found = factorize(data, lam=0.3, random_state=0)
    assert found.U.dtype == torch.float32
    again = certify(exact, found.U, found.V, lam=0.3)
    assert found.certificate.gap == pytest.approx(again.gap, rel=1e-6, abs=1e-9)
    for model in (NMF(0.3, effort=0), SparseDictionary(0.3, max_iter=20), RobustPCA(1.0, 1.0), MatrixCompletion(0.3)):
        assert model.set_params(random_state=0).fit_transform(data).dtype == torch.float32
    tensor = CPTensor(0.3, random_state=0).fit(data.reshape(12, 4, 2))
    assert {x.dtype for x in tensor.factors_} == {torch.float32}


def test_duplicates_of_a_sparse_matrix_are_summed_and_the_callers_matrix_is_left_alone():
    row, column = np.nonzero(~HIDDEN)
    halves = np.concatenate([0.25 * Y[row, column], 0.75 * Y[row, column]])
    twice = sp.coo_array((halves, (np.tile(row, 2), np.tile(column, 2))), Y.shape)
    once = sp.coo_array((Y[row, column], (row, column)), Y.shape)
    one, two = MatrixCompletion(0.1, random_state=0), MatrixCompletion(0.1, random_state=0)
    np.testing.assert_allclose(two.fit_transform(twice), one.fit_transform(once), atol=1e-12)
    assert two.objective_ == pytest.approx(one.objective_, rel=1e-12)
    assert twice.nnz == 2 * once.nnz
    np.testing.assert_array_equal(twice.data, halves)


def test_rows_of_which_nothing_was_observed_have_the_code_zero():
    model = MatrixCompletion(0.1, random_state=0).fit(Y)
    new = Y[:3].copy()
    new[1] = np.nan
    codes = model.transform(new)
    assert np.abs(codes[1]).max() == 0
    np.testing.assert_allclose(codes[[0, 2]], model.transform(Y[[0, 2]]))


def test_frames_and_sparse_matrices_are_taken_by_certify():
    pandas = pytest.importorskip("pandas")
    U, V = np.ones((12, 1)), np.ones((8, 1))
    assert certify(pandas.DataFrame(Y), pandas.DataFrame(U), V, lam=1.0) == certify(Y, U, V, lam=1.0)
    for sparse in (sp.csr_array(Y), torch.from_numpy(Y).to_sparse_coo()):
        assert certify(sparse, U, V, lam=1.0).gap == pytest.approx(certify(Y, U, V, lam=1.0).gap)
        with pytest.raises(ValueError, match=r"U is sparse: pass U.toarray\(\)") as caught:
            certify(Y, sparse, V, lam=1.0)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="U must hold real numbers, got object"):
        certify(Y, np.full((12, 1), None), V, lam=1.0)


def test_options_are_checked():
    for effort in (-1, "x", float("nan"), True):
        with pytest.raises(ValueError, match="effort must be a finite number ≥ 0"):
            NMF(0.5, effort=effort).fit(Y)
    assert factorize(Y, lam=1.0, random_state=np.random.RandomState(0)).U.shape[0] == 12
    for state in ("x", 1.5, -1):
        with pytest.raises(ValueError, match="random_state must be None, a whole number"):
            factorize(Y, lam=1.0, random_state=state)
        with pytest.raises(ValueError, match="random_state must be None, a whole number"):
            LowRank(1.0, random_state=state).fit(Y)

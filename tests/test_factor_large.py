"""Law: data larger than memory are read in blocks, and bounds without a Gram matrix are as sharp."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from minimand.factor import NMF, LowRank, MatrixCompletion, RobustPCA, SparseDictionary, Status, bounds, matrices
from minimand.factor.bounds import lanczos_bound, lanczos_slack, largest_singular, small_gram, spectral_bound
from minimand.factor.matrices import RowSharding
from minimand.factor.observed import SparseDual
from minimand.factor.residual import DenseDual


def noisy(n, m, k=3, seed=0):
    rng = np.random.default_rng(seed)
    return np.abs(rng.normal(size=(n, k)) @ rng.normal(size=(k, m)) + 0.1 * rng.normal(size=(n, m)))


MODELS = [
    LowRank(3.0),
    NMF(3.0, n_components=3, effort=0, max_iter=30),
    SparseDictionary(3.0, 0.1, n_components=3, max_iter=30),
]


@pytest.mark.filterwarnings("ignore:.*stopped before its certificate")
@pytest.mark.parametrize("shape", [(30, 10), (10, 30)])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_memory_mapped_file_is_read_in_blocks(tmp_path, monkeypatch, model, shape):
    """The estimators read the file itself, and no bound forms the whole matrix in float64, for either shape."""
    Y = noisy(*shape).astype(np.float32)
    model = model.set_params(random_state=0)
    X = model.inverse_transform(model.fit_transform(Y))
    expected, top = (model.objective_, model.certificate_.status), model.lambda_max(Y)
    np.save(tmp_path / "Y.npy", Y)
    monkeypatch.setattr(matrices, "BLOCK", 100)
    monkeypatch.setattr(DenseDual, "dense", lambda self: pytest.fail("the whole matrix was formed"))
    mapped = np.load(tmp_path / "Y.npy", mmap_mode="r")
    # In single precision the product converges, but not the factors along flat directions of the objective.
    np.testing.assert_allclose(model.inverse_transform(model.fit_transform(mapped)), X, rtol=1e-4, atol=1e-4)
    assert (model.objective_, model.certificate_.status) == (pytest.approx(expected[0], rel=1e-6), expected[1])
    assert model.lambda_max(mapped) == pytest.approx(top, rel=1e-9)


def test_a_file_is_not_copied_to_memory(tmp_path):
    """A fit and its certificate get by with a third of the file's size, above what a small fit needs."""
    code = """if True:
        import resource, sys, warnings
        import numpy as np, torch
        from minimand.factor import NMF, LowRank
        warnings.simplefilter("ignore"); torch.set_num_threads(1)
        rng = np.random.default_rng(0)
        Y = np.lib.format.open_memmap(sys.argv[1], "w+", np.float32, (24000, 1000))
        for part in np.array_split(Y, 24):
            part[:] = rng.random((1000, 3)) @ np.eye(3, 1000) + 0.1 * rng.random((1000, 1000), dtype=np.float32)
        Y.flush()
        models = NMF(5.0, n_components=3, max_iter=3, effort=0.05), LowRank(60.0)
        for model in models:
            model.fit(Y[:500] + 0).certificate_
        Y = np.load(sys.argv[1], mmap_mode="r")
        held = next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (held * 1024 + Y.nbytes // 3,) * 2)
        for model in models:
            model.fit(Y).certificate_"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "Y.npy")], check=True, capture_output=True, text=True)


def test_lambda_max_is_the_norm_from_above():
    for shape in ((40, 7), (7, 40)):
        Y = noisy(*shape)
        norm = np.linalg.norm(Y, 2)
        for model in (LowRank(1.0), NMF(1.0)):
            assert norm * (1 - 1e-15) <= model.lambda_max(Y) <= norm * (1 + 1e-9)
        signs = np.linalg.norm(np.clip(2 * Y, -1, 1), 2)
        assert RobustPCA(1.0, 2.0).lambda_max(Y) == pytest.approx(signs, rel=1e-9)
        assert MatrixCompletion(1.0, random_state=0).lambda_max(Y) == pytest.approx(norm, rel=1e-9)


@pytest.mark.parametrize("shape", [(300, 40), (40, 300)])
def test_products_by_blocks_are_the_products(monkeypatch, generator, shape):
    Y, U, V = (torch.randn(s, generator=generator, dtype=torch.float64) for s in (shape, (shape[0], 2), (shape[1], 2)))
    Z = Y - U @ V.mT
    monkeypatch.setattr(matrices, "BLOCK", 500)
    matrix = DenseDual(Y, U, V)
    torch.testing.assert_close(matrix.gram(), Z.mT @ Z)
    torch.testing.assert_close(matrix.outer(), Z @ Z.mT)
    torch.testing.assert_close(matrix.outer(torch.relu), Z.relu() @ Z.relu().mT)
    sigma = float(torch.linalg.matrix_norm(Z, 2))
    assert sigma * (1 - 1e-15) <= largest_singular(matrix) <= sigma * (1 + 1e-9)
    monkeypatch.setattr(bounds, "LARGEST_GRAM", 10)
    assert largest_singular(matrix, generator) == pytest.approx(sigma, rel=1e-9)
    assert sigma <= spectral_bound(matrix, sigma, 1e-5, generator).value <= sigma * (1 + 1e-5)


def test_lanczos_is_as_accurate_as_asked_as_far_as_its_basis_fits(monkeypatch, generator):
    """The spectrum is dense at its top, so Lanczos does not converge early."""
    n = 2000
    values = torch.linspace(0, 1, n, dtype=torch.float64).sqrt()
    needed = {}

    class Diagonal(DenseDual):
        def times(self, x):
            return values * x

        def adjoint(self, y):
            needed["steps"] = needed.get("steps", 0) + 1
            return values * y

    for shape in ((n, n), (n, n + 1)):
        matrix = Diagonal(torch.zeros(shape, dtype=torch.float64))
        for accuracy in (1e-2, 1e-3):
            needed.clear()
            bound = lanczos_bound(matrix, accuracy=accuracy, generator=generator)
            assert 1 <= bound.value <= 1 + accuracy
            assert 1 - (1 + accuracy) ** -2 >= lanczos_slack(n, needed["steps"], 1e-9)
        monkeypatch.setattr(bounds, "BASIS", 100 * n)
        needed.clear()
        bound = lanczos_bound(matrix, accuracy=1e-3, generator=generator)
        assert needed["steps"] == 100
        assert 1 <= bound.value <= (1 - lanczos_slack(n, 100, 1e-9)) ** -0.5
        monkeypatch.undo()
    monkeypatch.setattr(bounds, "BASIS", 2 * n)
    assert lanczos_bound(matrix, generator=generator).value == np.inf


def test_completion_certifies_what_is_asked():
    rng = np.random.default_rng(0)
    Y = noisy(60, 25)
    Y[rng.random(Y.shape) < 0.3] = np.nan
    model = MatrixCompletion(2.0, tol=1e-5, random_state=0).fit(Y)
    assert model.certificate_.status is Status.CERTIFIED
    assert model.certificate_.relative_gap <= 1e-5
    again = MatrixCompletion(2.0, tol=1e-5, random_state=0).fit(Y)
    assert again.certificate_ == model.certificate_


@pytest.mark.parametrize("shape", [(700, 500), (500, 700)])
def test_a_gram_matrix_is_formed_only_where_a_krylov_basis_would_be_as_large(shape, generator):
    entries = torch.rand(shape, generator=generator) < 0.02
    index = tuple(torch.nonzero(entries).unbind(1))
    values = torch.randn(len(index[0]), dtype=torch.float64, generator=generator)
    matrix = SparseDual(values, index, shape, RowSharding())
    dense = torch.zeros(shape, dtype=torch.float64)
    dense[index] = values
    norm = float(torch.linalg.matrix_norm(dense, 2))
    assert torch.allclose(small_gram(matrix), dense.mT @ dense if shape[0] > shape[1] else dense @ dense.mT)
    for accuracy, method in ((1e-2, "Lanczos"), (1e-6, "Cholesky")):
        bound = spectral_bound(matrix, norm, accuracy, generator)
        assert bound.method.startswith(method)
        assert norm <= bound.value <= norm * (1 + 1.01 * accuracy)

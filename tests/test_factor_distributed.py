"""Law: a fit with rows sharded over two processes equals the fit in one process, with the same certificate."""

import numpy as np
import pytest
import torch.distributed as dist

from minimand.factor import NMF, LowRank, MatrixCompletion, RobustPCA, SparseDictionary

from .cases.ranks import on_ranks

MODELS = {
    "lowrank": lambda: LowRank(2.0, random_state=0),
    "nmf": lambda: NMF(0.8, random_state=0, effort=0.01, tol=1e-2, max_iter=12),
    "nmf-fixed": lambda: NMF(0.8, n_components=3, random_state=0, effort=0, max_iter=6),
    "dictionary": lambda: SparseDictionary(0.8, 0.05, n_components=3, random_state=0, max_iter=6),
    "robust": lambda: RobustPCA(3.0, 2.0, random_state=0),
    "completion": lambda: MatrixCompletion(1.0, random_state=0),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*stopped before its certificate")
SPLIT = 17  # an uneven share


def _data(name):
    rng = np.random.default_rng(0)
    Y = rng.random((30, 3)) @ rng.random((3, 12)) + 0.05 * rng.random((30, 12))
    if name == "completion":
        Y = np.where(rng.random(Y.shape) < 0.8, Y, np.nan)
    if name == "robust":
        Y = Y + np.where(rng.random(Y.shape) < 0.05, 4.0, 0.0)
    return Y


def _worker(rank):
    results = {}
    for name, make in MODELS.items():
        Y = _data(name)
        model = make()
        U = model.fit_transform(Y[:SPLIT] if rank == 0 else Y[SPLIT:], process_group=dist.group.WORLD)
        results[name] = (U, model.components_, model.objective_, str(model.certificate_.status))
    return results


@pytest.fixture(scope="module")
def together():
    return on_ranks(_worker)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_equal_one_process(together, name):
    alone = MODELS[name]()
    U = alone.fit_transform(_data(name))
    first, second = (results[name] for results in together)
    np.testing.assert_allclose(first[1], second[1], rtol=0, atol=1e-12)  # V is the same everywhere
    assert first[2] == second[2] == pytest.approx(alone.objective_, rel=1e-6)
    assert first[3] == second[3] == str(alone.certificate_.status)
    X = np.concatenate([first[0], second[0]]) @ first[1]
    np.testing.assert_allclose(X, U @ alone.components_, atol=0.02 * np.abs(X).max())

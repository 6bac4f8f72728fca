"""Law: mini-batches approach the fit of all rows, and an interrupted fit leaves the factors of its last sweep."""

import importlib
import warnings
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import nn

from minimand.errors import OptionError
from minimand.factor import (
    NMF,
    DropoutFactorization,
    LowRank,
    MatrixCompletion,
    ParallelNetwork,
    ParallelReLU,
    RobustPCA,
    Status,
    descent,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*stopped before its certificate")


def rows(n=400, m=30, k=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.random((n, k)) @ rng.random((k, m)) + 0.05 * rng.random((n, m))


def objective(model, Y):
    """Of the components with the codes of all rows."""
    U = model.transform(Y)
    penalty = np.linalg.norm(U, axis=0) * np.linalg.norm(model.components_, axis=1)
    error = np.nansum(np.square(Y - model.inverse_transform(U)))
    return 0.5 * error + model.lam_ * penalty.sum()


@pytest.mark.parametrize("form", [np.asarray, sp.csr_array], ids=["dense", "sparse"])
def test_mini_batches_of_rows_approach_the_fit(form):
    Y = rows()
    whole = NMF(2.0, n_components=3, random_state=0).fit(Y)
    stream = NMF(2.0, n_components=3, random_state=0)
    for part in np.split(Y, 8):
        stream.partial_fit(form(part))
    assert stream.n_samples_seen_ == 400
    assert stream.components_.min() >= 0
    assert objective(stream, Y) <= 1.05 * objective(whole, Y)
    assert stream.certificate_.status is Status.UNDECIDED
    assert "certify" in stream.certificate_.method
    found = stream.certify(form(Y))
    assert found.gap >= objective(stream, Y) - whole.objective_ - 1e-6
    assert found.relative_gap < 1
    assert not hasattr(stream.fit(Y), "sums_")


def test_one_batch_is_the_fit():
    Y = rows(60)
    whole, stream = NMF(0.5, n_components=2, random_state=0).fit(Y), NMF(0.5, n_components=2, random_state=0)
    assert stream.partial_fit(Y).objective_ <= whole.objective_ * (1 + 1e-9)
    hidden = np.where(np.random.default_rng(0).random(Y.shape) < 0.3, np.nan, Y)
    whole = MatrixCompletion(0.5, n_components=2, random_state=0).fit(hidden)
    stream = MatrixCompletion(0.5, n_components=2, random_state=0).partial_fit(hidden)
    assert stream.objective_ == pytest.approx(whole.objective_, rel=1e-3)


def test_mini_batches_of_observed_entries_approach_the_fit():
    Y = rows()
    hidden = np.where(np.random.default_rng(1).random(Y.shape) < 0.3, np.nan, Y)
    whole, stream = (MatrixCompletion(2.0, n_components=3, random_state=0) for _ in range(2))
    whole.fit(hidden)
    for part in np.split(hidden, 8):
        stream.partial_fit(part)
    errors = [np.square(Y - m.inverse_transform(m.transform(hidden))).sum() for m in (whole, stream)]
    assert errors[1] <= 1.1 * errors[0]
    assert stream.certify(hidden).relative_gap < 1


@pytest.mark.parametrize("model", [NMF(0.5, n_components=3), NMF(0.5), MatrixCompletion(0.5)], ids=str)
def test_an_interrupted_fit_leaves_the_factors_of_its_last_sweep(model, monkeypatch):
    sweep, calls = descent.LocalDescent._sweep, []

    def interrupted(self, state, tol):
        calls.append(state.objective)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return sweep(self, state, tol)

    monkeypatch.setattr(descent.LocalDescent, "_sweep", interrupted)
    Y = rows(60)
    with pytest.raises(KeyboardInterrupt, match="interrupted_"):
        model.fit(Y)
    assert model.interrupted_
    assert model.certificate_.status is Status.UNDECIDED
    assert "interrupted" in model.certificate_.method
    assert model.objective_ <= calls[-1] * (1 + 1e-6)
    assert model.transform(Y).shape == (60, model.n_components_)
    monkeypatch.undo()
    assert not model.fit(Y).interrupted_
    assert not LowRank(0.5).fit(Y).interrupted_


@pytest.mark.parametrize("kind", [NMF, MatrixCompletion])
@pytest.mark.parametrize("c", [2.0**-1000, 1e300, 2.0**-900])
def test_mini_batches_at_every_scale(kind, c):
    Y = rows(60)
    one, other = (kind(0.5 * scale, n_components=2, random_state=0) for scale in (1.0, c))
    for part in np.split(Y, 3):
        one.partial_fit(part)
        other.partial_fit(c * part)
    np.testing.assert_allclose(other.transform(c * Y) @ other.components_ / c, one.transform(Y) @ one.components_)
    found, expected = other.certify(c * Y), one.certify(Y)
    assert found.status is expected.status
    assert found.relative_gap == pytest.approx(expected.relative_gap, rel=1e-6)
    with pytest.raises(OptionError, match="too far from those of the first"):
        one.partial_fit(1e200 * Y)


def test_options_belong_to_the_first_mini_batch():
    Y = rows(40)
    for option in ({"lam": 2.0}, {"n_components": 3}):
        stream = NMF(0.5, n_components=2, random_state=0).partial_fit(Y[:20])
        with pytest.raises(OptionError, match="since the first mini-batch"):
            stream.set_params(**option).partial_fit(Y[20:])
        assert stream.fit(Y).lam_ == option.get("lam", 0.5)


@pytest.mark.parametrize(
    ("model", "patched"),
    [
        (NMF(0.5, n_components=3, loss="kullback-leibler"), "minimand.factor.divergence._improved"),
        (NMF(0.5, n_components=3, loss="kullback-leibler", max_iter=2), "minimand.factor.divergence.certify_factors"),
        (RobustPCA(3.0, 2.0, tol=1e-9), "minimand.factor.robust.shrunk"),
        (RobustPCA(3.0, None, tol=1e-9), "minimand.factor.robust.certify_factors"),
        (DropoutFactorization(3, method="dropout"), "minimand.factor.dropout_factorization._slope"),
        (ParallelReLU(0.01, max_rounds=3, random_state=0), "minimand.homogeneous.relu.judge_relu"),
    ],
    ids=str,
)
def test_other_fits_keep_the_result_of_their_last_iteration(model, patched, monkeypatch):
    """Wherever the interruption comes, and nothing is claimed for it that was not computed."""
    module, name = patched.rsplit(".", 1)
    original, calls = getattr(importlib.import_module(module), name), []

    def interrupted(*args, **kwargs):
        calls.append(0)
        if len(calls) == (7 if name in ("_improved", "shrunk", "_slope") else 2 if name == "judge_relu" else 1):
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(patched, interrupted)
    data = (np.linspace(-1, 1, 20)[:, None], np.sin(5 * np.linspace(-1, 1, 20)))
    data = data if isinstance(model, ParallelReLU) else (rows(40),)
    with pytest.raises(KeyboardInterrupt, match="interrupted_"):
        model.fit(*data)
    monkeypatch.undo()
    assert model.interrupted_
    assert np.isfinite(model.objective_)
    assert model.objective_ == model.history_[-1]
    if isinstance(model, ParallelReLU):
        assert model.score(*data) <= 1
    else:
        assert model.transform(*data).shape == (40, model.n_components_)
    if isinstance(model, NMF | RobustPCA):
        assert model.certificate_.status is Status.UNDECIDED
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not model.fit(*data).interrupted_


def test_an_interrupted_network_has_no_certificate(monkeypatch):
    """Not even that of an earlier fit."""
    x, y = torch.eye(2), torch.tensor([[1.0], [0.0]])
    make = partial(nn.Linear, 2, 1, bias=False)
    net = ParallelNetwork(make, lam=0.1).fit(x, y)
    assert net.certificate_.status is Status.CERTIFIED
    interruption = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("minimand.homogeneous.parallel.judge_residual", interruption)
    with pytest.raises(KeyboardInterrupt, match="without a certificate"):
        net.fit(x, 100 * y)
    assert net.certificate_.status is Status.UNDECIDED
    assert "interrupted" in net.certificate_.method

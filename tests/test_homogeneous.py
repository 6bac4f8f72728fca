"""Positively homogeneous networks grow to the convex optimum, and no gap is ever understated."""

import dataclasses
import math
import warnings

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning, SkipTestWarning
from sklearn.utils.estimator_checks import check_estimator

from minimand.errors import CapabilityError, OptionError, ShapeError
from minimand.factor import ParallelReLU, Status
from minimand.homogeneous import (
    certify_relu,
)
from minimand.homogeneous.certificate import judge_relu
from minimand.homogeneous.neurons import Neurons, merge_neurons
from minimand.homogeneous.polar import ascend, exact_polar, slopes, upper_bound


def _patterns(X: np.ndarray) -> list[np.ndarray]:
    """The activation patterns for two columns, evaluated at the middle of each arc."""
    angle = np.arctan2(X[:, 1], X[:, 0])
    starts = np.unique(np.concatenate([angle - np.pi / 2, angle + np.pi / 2]) % (2 * np.pi))
    middles = (starts + np.r_[starts[1:], starts[0] + 2 * np.pi]) / 2
    found = {tuple(X @ [math.cos(m), math.sin(m)] > 0) for m in middles}
    return [np.array(p, dtype=float) for p in found if any(p)]


def _convex_optimum(x: np.ndarray, y: np.ndarray, lam: float) -> float:
    """The convex program of Pilanci and Ergen, with all patterns enumerated."""
    X = np.c_[x, np.ones(len(x))]
    output, penalty, constraints = 0, 0, []
    for pattern in _patterns(X):
        u, v = cp.Variable(2), cp.Variable(2)
        cone = (2 * pattern - 1)[:, None] * X
        constraints += [cone @ u >= 0, cone @ v >= 0]
        output = output + (pattern[:, None] * X) @ (u - v)
        penalty = penalty + cp.norm(u) + cp.norm(v)
    program = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(y - output) + lam * penalty), constraints)
    program.solve(solver=cp.CLARABEL, tol_gap_abs=1e-10, tol_gap_rel=1e-10, tol_feas=1e-10)
    return float(program.value)


def _wave(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.uniform(-2, 2, n)
    return x, np.sin(3 * x) + 0.1 * random.normal(size=n)


@pytest.mark.parametrize(("n", "lam", "seed"), [(12, 0.1, 0), (12, 1.0, 1), (20, 0.5, 2), (16, 0.02, 3), (1, 0.1, 4)])
def test_one_input_column_reaches_the_convex_optimum_certified(n: int, lam: float, seed: int) -> None:
    x, y = _wave(n, seed)
    model = ParallelReLU(lam).fit(x[:, None], y)
    best = _convex_optimum(x, y, lam)
    assert model.certificate_.status is Status.CERTIFIED
    assert model.objective_ == pytest.approx(best, rel=1e-4)
    assert model.certificate_.gap >= model.objective_ - best - 1e-8
    norms = np.linalg.norm(model.weights_, axis=1) * np.linalg.norm(model.outputs_, axis=1)
    value = 0.5 * ((y - model.predict(x[:, None])) ** 2).sum() + lam * norms.sum()
    assert value == pytest.approx(model.objective_, rel=1e-12)
    assert np.allclose(np.linalg.norm(model.weights_, axis=1), np.linalg.norm(model.outputs_, axis=1))
    assert np.all(np.diff(model.history_) <= 0)


def test_the_gap_is_never_understated_at_any_point() -> None:
    x, y = _wave(14, 0)
    lam, best = 0.3, _convex_optimum(x, y, 0.3)
    model = ParallelReLU(lam).fit(x[:, None], y)
    random = np.random.default_rng(0)
    X = np.c_[x, np.ones(len(x))]
    for size in (0.0, 1e-6, 1e-3, 0.1, 1.0):
        for _ in range(8):
            W = model.weights_ + size * random.normal(size=model.weights_.shape)
            V = model.outputs_ + size * random.normal(size=model.outputs_.shape)
            products = np.linalg.norm(W, axis=1) * np.linalg.norm(V, axis=1)
            value = 0.5 * ((y - (np.maximum(X @ W.T, 0) @ V)[:, 0]) ** 2).sum() + lam * products.sum()
            for method in ("exact", "ascent"):
                proof = certify_relu(x[:, None], y, W, V, lam=lam, polar=method)
                assert proof.gap >= value - best - 1e-8
                assert proof.polar_lower <= proof.polar_upper
                if proof.status is Status.CERTIFIED:
                    assert value - best <= 1e-3 * value + 1e-8


@given(st.integers(1, 12), st.integers(1, 3), st.sampled_from([2, 3]), st.integers(0, 10**6), st.booleans())
def test_the_exact_polar_is_above_every_direction(rows: int, outputs: int, columns: int, seed: int, ties: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    X[:, -1] = 1
    if ties:
        X = X.round()
    Z = torch.randn(rows, outputs, generator=generator, dtype=torch.float64)
    polar = exact_polar(X, Z)
    trials = torch.randn(3000, columns, generator=generator, dtype=torch.float64)
    trials = trials / trials.norm(dim=1, keepdim=True)
    _, climbed = ascend(X, Z, trials[:40])
    assert max(float(slopes(X, Z, trials).max()), float(climbed[0])) <= polar.upper
    assert polar.lower <= polar.upper <= polar.lower * (1 + 1e-9) + 1e-12
    assert float(climbed[0]) >= 0.98 * polar.lower or columns == 3
    if len(polar.directions):
        assert float(slopes(X, Z, polar.directions[:1])) == pytest.approx(polar.lower)
    assert upper_bound(X, Z) >= polar.lower * (1 - 1e-12)


def test_two_input_columns_are_certified_too() -> None:
    random = np.random.default_rng(0)
    X = random.normal(size=(30, 2))
    model = ParallelReLU(1.0, tol=1e-3).fit(X, np.sin(X[:, 0]) + np.abs(X[:, 1]))
    assert model.certificate_.status is Status.CERTIFIED
    assert "3 columns" in model.certificate_.method


def test_several_outputs() -> None:
    x, y = _wave(15, 0)
    target = np.c_[y, np.cos(x)]
    model = ParallelReLU(0.5, tol=1e-3).fit(x[:, None], target)
    assert model.certificate_.status is Status.CERTIFIED
    assert model.predict(x[:, None]).shape == target.shape


def test_five_input_columns_are_undecided() -> None:
    random = np.random.default_rng(0)
    X = random.normal(size=(30, 5))
    model = ParallelReLU(1.0, tol=1e-3, random_state=0).fit(X, np.sin(X[:, 0]) + np.abs(X[:, 1]))
    assert model.certificate_.status is Status.UNDECIDED
    assert model.certificate_.polar_upper > model.certificate_.polar_lower
    assert model.objective_ < 0.5 * model.history_[0]


def test_a_true_bound_certifies_in_any_dimension() -> None:
    random = np.random.default_rng(0)
    X, y = random.normal(size=(20, 5)), random.normal(size=20)
    bound = upper_bound(torch.tensor(np.c_[X, np.ones(20)]), torch.tensor(y)[:, None])
    model = ParallelReLU(bound * 1.01, random_state=0).fit(X, y)
    assert model.certificate_.status is Status.CERTIFIED
    assert model.n_neurons_ == 0
    assert not model.predict(X).any()


@given(st.integers(1, 9), st.integers(0, 10**6))
def test_merging_changes_no_output_and_raises_no_norm(count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    W = torch.randint(-2, 3, (count, 2), generator=generator).double()
    V = torch.randint(-1, 2, (count, 2), generator=generator).double()
    kept = (W.norm(dim=1) > 0) & (V.norm(dim=1) > 0)
    before = Neurons(W[kept], V[kept])
    after = merge_neurons(X, before)
    assert torch.allclose(torch.relu(X @ before.W.mT) @ before.V, torch.relu(X @ after.W.mT) @ after.V, atol=1e-10)
    assert len(after.W) <= len(before.W)

    def size(n: Neurons) -> float:
        return float((n.W.norm(dim=1) * n.V.norm(dim=1)).sum())

    assert size(after) <= size(before) + 1e-10


@pytest.mark.filterwarnings("ignore:.*stopped before its certificate")
def test_scikit_learn_conventions() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkipTestWarning)
        check_estimator(ParallelReLU(0.01, max_rounds=1, grow=8, descent=30, random_state=0))


def test_limits_and_refusals() -> None:
    x, y = _wave(20, 0)
    with pytest.warns(ConvergenceWarning, match="stopped before its certificate .* raise max_neurons"):
        model = ParallelReLU(0.05, max_neurons=2).fit(x[:, None], y)
    assert model.n_neurons_ <= 2
    assert model.certificate_.status is Status.IMPROVABLE
    with pytest.raises(OptionError, match="lam"):
        ParallelReLU(0.0).fit(x[:, None], y)
    with pytest.raises(OptionError, match="polar"):
        ParallelReLU(1.0, polar="power").fit(x[:, None], y)
    with pytest.raises(CapabilityError, match="two or three columns"):
        exact_polar(torch.ones(3, 4), torch.ones(3, 1))
    with pytest.raises(ShapeError, match="bias last"):
        certify_relu(x[:, None], y, np.ones((2, 1)), np.ones((2, 1)), lam=1.0)


def test_a_cell_whose_edges_are_all_inactive_is_found() -> None:
    """At the pole only the first row is active, and crossing any edge of its cell lowers the value."""
    angle = torch.arange(3, dtype=torch.float64) * (2 * math.pi / 3)
    around = torch.stack([angle.cos(), angle.sin(), torch.full_like(angle, -0.1)], 1)
    X = torch.cat([torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64), around])
    polar = exact_polar(X, torch.tensor([[1.0], [-0.3], [-0.3], [-0.3]], dtype=torch.float64))
    assert polar.lower == pytest.approx(1.0, abs=1e-12)


def test_the_gap_rests_on_the_upper_bound_alone() -> None:
    """A poor ascent must not make the gap smaller."""
    x, y = (torch.tensor(v)[:, None] for v in _wave(14, 0))
    X = torch.cat([x, torch.ones_like(x)], 1)
    W, V = torch.ones(1, 2, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    polar = exact_polar(X, y - torch.relu(X @ W.mT) @ V)
    lucky = judge_relu(X, y, W, V, 0.3, polar, 1e-3)
    unlucky = judge_relu(X, y, W, V, 0.3, dataclasses.replace(polar, lower=0.1 * polar.lower), 1e-3)
    assert unlucky.gap == lucky.gap > 0
    loose = judge_relu(X, y, W, V, 0.3, dataclasses.replace(polar, upper=10 * polar.upper), 1e-3)
    assert loose.gap > lucky.gap

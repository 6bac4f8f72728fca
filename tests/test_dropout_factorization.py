"""Dropout on a factorisation is a squared nuclear norm: closed form, equalisation, and every way of minimising it."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.exceptions import SkipTestWarning
from sklearn.utils.estimator_checks import check_estimator

from minimand.errors import CapabilityError, OptionError, ShapeError
from minimand.factor import DropoutFactorization, dropout_optimum, equalize, nuclear_squared
from minimand.factor.dropout import (
    _hadamard,
    _rotations,
    dropout_objective,
    dropout_sample,
    dropout_weight,
    equalizing_rotation,
    sample_smoothness,
    variable_rate,
)
from minimand.functions import NuclearNorm

SHAPES = [(8, 5, 2), (6, 9, 3), (7, 7, 5), (12, 10, 10), (10, 6, 17), (9, 12, 40)]


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _minimum(Y: torch.Tensor, rank: int, p: float) -> float:
    X, _, _ = dropout_optimum(Y, rank, p)
    return float((Y - X).square().sum() + dropout_weight(p) / rank * nuclear_squared(X))


@pytest.mark.parametrize("p", [0.2, 0.5, 0.8])
@pytest.mark.parametrize(("m", "n", "rank"), SHAPES)
def test_the_closed_form_is_the_best_of_many_starts(m: int, n: int, rank: int, p: float) -> None:
    Y = _random(m, n, seed=rank)
    model = DropoutFactorization(rank, p, method="alternating", max_iter=2000, tol=1e-7)
    found = [model.set_params(random_state=seed).fit(Y.numpy()).objective_ for seed in range(8)]
    closed = _minimum(Y, rank, p)
    assert min(found) == pytest.approx(closed, rel=1e-5)
    assert min(found) >= closed * (1 - 1e-10)


@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 9), st.floats(0, 0.95), st.integers(0, 10**6))
def test_no_factors_lie_below_the_closed_form(rank: int, m: int, n: int, p: float, seed: int) -> None:
    Y, U, V = _random(m, n, seed=seed), _random(m, rank, seed=seed + 1), _random(n, rank, seed=seed + 2)
    closed = _minimum(Y, rank, p)
    assert float(dropout_objective(Y, U, V, p)) >= closed - 1e-9
    X, threshold, kept = dropout_optimum(Y, rank, p)
    assert torch.linalg.matrix_rank(X) == kept <= rank
    # Equalised factors of the optimum attain it, and nearby ones do not improve it.
    left, values, right = torch.linalg.svd(X, full_matrices=False)
    root = torch.zeros(len(values), rank, dtype=Y.dtype)
    size = min(rank, len(values))
    root[:size, :size] = values[:size].sqrt().diag()
    best = equalize(left @ root, right.mT @ root)
    assert float(dropout_objective(Y, *best, p)) == pytest.approx(closed, rel=1e-9, abs=1e-12)
    for factor in (0.99, 1.01):
        assert float(dropout_objective(Y, best[0] * factor, best[1], p)) >= closed - 1e-12
    assert threshold >= 0


def test_without_dropout_the_closed_form_is_the_truncated_svd() -> None:
    Y = _random(7, 5)
    X, threshold, rank = dropout_optimum(Y, 3, 0.0)
    U, s, Vh = torch.linalg.svd(Y, full_matrices=False)
    assert (threshold, rank) == (0.0, 3)
    assert torch.allclose(X, (U[:, :3] * s[:3]) @ Vh[:3], atol=1e-12)
    low = _random(7, 2) @ _random(2, 5, seed=1)
    assert dropout_optimum(low, 4, 0.0)[2] == 2


def test_the_closed_form_thresholds_the_singular_values() -> None:
    Y = _random(9, 6)
    X, threshold, rank = dropout_optimum(Y, 6, 0.4)
    assert rank > 0
    assert torch.allclose(X, NuclearNorm(threshold).prox(Y), atol=1e-10)


@given(st.integers(1, 24), st.integers(1, 12), st.integers(1, 12), st.integers(0, 10**6))
def test_equalised_factors_have_the_product_and_equal_norms(rank: int, m: int, n: int, seed: int) -> None:
    U, V = _random(m, rank, seed=seed), _random(n, rank, seed=seed + 1)
    left, right = equalize(U, V)
    X = U @ V.mT
    assert (left.shape, right.shape) == (U.shape, V.shape)
    assert float((left @ right.mT - X).abs().max()) <= 1e-10
    norms = left.norm(dim=0) * right.norm(dim=0)
    mean = float(torch.linalg.svdvals(X).sum()) / rank
    assert float((norms - mean).abs().max()) <= 1e-10
    assert float((left.norm(dim=0) - right.norm(dim=0)).abs().max()) <= 1e-10
    assert float((left.square().sum(0) * right.square().sum(0)).sum()) == pytest.approx(
        float(nuclear_squared(X)) / rank, rel=1e-9
    )


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5, 6, 8, 12, 63, 64])
def test_hadamard_and_givens_equalise_alike(rank: int) -> None:
    values = _random(min(rank, 5), seed=3).abs()
    rotations = [equalizing_rotation(values, rank)]
    if rank > 1:
        rotations.append(_rotations(rank, values))
    if rank & (rank - 1) == 0:
        rotations.append(_hadamard(rank, len(values), values))
    assert torch.equal(rotations[0], rotations[-1])
    for rotation in rotations:
        assert torch.allclose(rotation @ rotation.mT, torch.eye(len(values), dtype=values.dtype), atol=1e-12)
        diagonal = (rotation.mT @ values.diag() @ rotation).diagonal()
        assert torch.allclose(diagonal, values.sum() / rank * torch.ones_like(diagonal), atol=1e-12)


def test_equalising_zero_factors_and_large_ones() -> None:
    left, right = equalize(torch.zeros(3, 5), torch.ones(4, 5))
    assert not left.any()
    assert not right.any()
    U, V = _random(90, 130), _random(80, 130, seed=1)
    left, right = equalize(U, V)
    assert float((left @ right.mT - U @ V.mT).abs().max()) <= 1e-10
    assert float((left.norm(dim=0) * right.norm(dim=0)).diff().abs().max()) <= 1e-10


@pytest.mark.parametrize("p", [0.0, 0.3, 0.7])
def test_the_deterministic_equivalent_is_the_expectation_by_enumeration(p: float) -> None:
    Y, U, V = _random(4, 3), _random(4, 5, seed=1), _random(3, 5, seed=2)
    total = 0.0
    for bits in itertools.product((0.0, 1.0), repeat=5):
        probability = np.prod([1 - p if bit else p for bit in bits])
        total += probability * float(dropout_sample(Y, U, V, p, torch.tensor(bits)))
    assert total == pytest.approx(float(dropout_objective(Y, U, V, p)), rel=1e-12)


@given(st.integers(1, 6), st.floats(0.01, 0.6), st.integers(0, 10**6))
def test_a_variable_rate_is_the_squared_nuclear_norm(copies: int, p: float, seed: int) -> None:
    X = _random(6, 2, seed=seed) @ _random(2, 5, seed=seed + 1)
    rank = 2 * copies
    U, s, Vh = torch.linalg.svd(X, full_matrices=False)
    pad = torch.zeros(2, rank - 2, dtype=X.dtype)
    root = torch.cat([s[:2].sqrt().diag(), pad], 1)
    left, right = equalize(U[:, :2] @ root, Vh[:2].mT @ root)
    weight = dropout_weight(variable_rate(p, rank))
    penalty = weight * float((left.square().sum(0) * right.square().sum(0)).sum())
    assert penalty == pytest.approx(dropout_weight(p) * float(nuclear_squared(X)), rel=1e-9)


def test_doubling_the_size_halves_a_fixed_rates_penalty_and_no_variable_ones() -> None:
    U, V = _random(5, 3), _random(4, 3, seed=1)
    twice = torch.cat([U, U], 1) / 2**0.5, torch.cat([V, V], 1) / 2**0.5
    Y = U @ V.mT

    def penalty(factors: tuple[torch.Tensor, torch.Tensor], p: float) -> float:
        return float(dropout_objective(Y, *factors, p))

    assert penalty(twice, 0.3) == pytest.approx(penalty((U, V), 0.3) / 2)
    assert penalty(twice, variable_rate(0.3, 6)) == pytest.approx(penalty((U, V), variable_rate(0.3, 3)))


def test_with_a_variable_rate_the_optimum_does_not_depend_on_the_size() -> None:
    Y = _random(9, 8)
    found = [DropoutFactorization(r, 0.1, rate="variable").fit(Y.numpy()) for r in (8, 11, 30)]
    products = [model.inverse_transform(model.transform(Y.numpy())) for model in found]
    assert np.allclose(products[0], products[1], atol=1e-10)
    assert np.allclose(products[0], products[2], atol=1e-10)
    fixed = [DropoutFactorization(r, 0.1).fit(Y.numpy()).objective_ for r in (8, 30)]
    assert fixed[1] < fixed[0] * 0.9


@pytest.mark.parametrize("method", ["alternating", "gradient"])
def test_deterministic_methods_never_raise_the_objective(method: str) -> None:
    model = DropoutFactorization(6, 0.4, method=method, max_iter=400, tol=0.0, random_state=0)
    model.fit(_random(10, 8).numpy())
    assert np.all(np.diff(model.history_) <= 1e-10 * model.history_[0])
    assert model.gap_ <= 1e-3 * model.optimum_


def test_dropout_approaches_the_optimum_and_equalises() -> None:
    Y = _random(20, 15).numpy()
    model = DropoutFactorization(6, 0.5, method="dropout", max_iter=1000, random_state=0)
    U = model.fit_transform(Y)
    assert model.gap_ <= 0.03 * model.optimum_
    norms = np.linalg.norm(U, axis=0) * np.linalg.norm(model.components_, axis=1)
    assert norms.std() <= 0.1 * norms.mean()


def _low_rank(seed: int = 0) -> np.ndarray:
    return (_random(100, 10, seed=seed) @ _random(10, 100, seed=seed + 1)).numpy()


@pytest.mark.parametrize(
    ("p", "rate", "within"),
    [(0.5, "fixed", 0.03), (0.95, "fixed", 0.08), (0.1, "variable", 0.03), (0.32, "variable", 0.08)],
)
def test_sampled_dropout_ends_near_the_closed_form(p: float, rate: str, within: float) -> None:
    """At effective rates up to 0.95 after 1,500 iterations; zero factors lie 25 % to 420 % above the minimum."""
    Y = _low_rank()
    model = DropoutFactorization(40, p, method="dropout", rate=rate, max_iter=1500, random_state=0).fit(Y)
    assert 0.5 <= model.p_ <= 0.951
    assert model.history_.max() <= 1.1 * model.history_[0]
    assert model.gap_ <= within * model.optimum_


@pytest.mark.parametrize(("shape", "terms", "p"), [((30, 20), 12, 0.95), ((8, 60), 3, 0.95), ((50, 8), 5, 0.9)])
def test_sampled_dropout_of_other_shapes(shape: tuple[int, int], terms: int, p: float) -> None:
    Y = (_random(shape[0], 2) @ _random(2, shape[1], seed=1) + 0.3 * _random(*shape, seed=2)).numpy()
    model = DropoutFactorization(terms, p, method="dropout", max_iter=3000, random_state=0).fit(Y)
    assert model.gap_ <= 0.02 * model.optimum_


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.floats(0, 0.99), st.integers(0, 10**6))
def test_a_step_never_raises_its_sample(rank: int, m: int, n: int, p: float, seed: int) -> None:
    Y, U, V = _random(m, n, seed=seed), _random(m, rank, seed=seed + 1), _random(n, rank, seed=seed + 2)
    kept = torch.rand(rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) < 1 - p
    mask = kept.double() / (1 - p)
    bound = sample_smoothness(V, mask)
    truth = 2 * float(torch.linalg.matrix_norm(V * mask, ord=2)) ** 2
    assert truth <= bound <= 1.002 * rank**0.125 * truth + 1e-300
    if truth > 0:
        moved = U - 2 / bound * ((U * mask) @ V.mT - Y) @ (V * mask)
        after, before = (float(dropout_sample(Y, X, V, p, kept.double())) for X in (moved, U))
        assert after <= before * (1 + 1e-12)


@pytest.mark.parametrize("method", ["gradient", "dropout"])
def test_divergence_is_an_error(method: str) -> None:
    with pytest.raises(OptionError, match=r"diverged: iteration .* smaller step than 1\.0") as error:
        DropoutFactorization(40, 0.5, method=method, step=1.0, random_state=0).fit(_low_rank())
    assert "\n" not in str(error.value)


def test_transform_is_the_stationary_left_factor() -> None:
    Y = _random(9, 7).numpy()
    model = DropoutFactorization(4, 0.3)
    U = model.fit_transform(Y)
    assert np.allclose(U, model.transform(Y), atol=1e-10)
    V = torch.tensor(model.components_.T)
    point = torch.tensor(U, requires_grad=True)
    dropout_objective(torch.tensor(Y), point, V, 0.3).backward()
    assert float(point.grad.abs().max()) <= 1e-10


def test_kind_and_precision_follow_the_input() -> None:
    Y = np.eye(3, dtype=np.float32)
    X, _, _ = dropout_optimum(Y, 2, 0.2)
    assert isinstance(X, np.ndarray)
    assert X.dtype == np.float32
    U, V = equalize(torch.eye(3), torch.eye(3))
    assert U.dtype == V.dtype == torch.float32
    assert DropoutFactorization(2).fit_transform(Y).dtype == np.float32


def test_scikit_learn_conventions() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkipTestWarning)
        check_estimator(DropoutFactorization(3))


def test_bad_input_is_one_sentence() -> None:
    with pytest.raises(OptionError, match=r"\[0, 1\)"):
        dropout_optimum(torch.eye(2), 1, 1.0)
    with pytest.raises(OptionError, match="whole number"):
        dropout_optimum(torch.eye(2), 0, 0.5)
    with pytest.raises(ShapeError, match="as many columns"):
        equalize(torch.ones(3, 2), torch.ones(3, 3))
    with pytest.raises(ValueError, match="NaN"):
        dropout_optimum(torch.full((2, 2), float("nan")), 1, 0.5)
    with pytest.raises(OptionError, match="method"):
        DropoutFactorization(method="adam").fit(np.eye(3))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"step": "foo"}, "step is"),
        ({"step": -1}, "step must be"),
        ({"step": float("nan")}, "step must be"),
        ({"step": None}, "step is"),
        ({"decay": "x"}, "decay must be None or a Schedule"),
        ({"decay": 0.9}, "decay must be None or a Schedule"),
    ],
)
def test_a_bad_step_is_one_sentence(option: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        DropoutFactorization(2, method="gradient", **option).fit(np.eye(3))


def test_factors_of_other_kinds_are_one_sentence() -> None:
    Y, U, V = torch.eye(2), torch.eye(2), torch.eye(2)
    for kept in (torch.ones(1), torch.ones(3), torch.ones(2, 2), torch.tensor(1.0), np.ones(2)):
        with pytest.raises(ShapeError, match="each of the 2 terms"):
            dropout_sample(Y, U, V, 0.5, kept)
    with pytest.raises(CapabilityError, match="Y must be a tensor of real floating-point numbers, got a ndarray"):
        dropout_objective(Y.numpy(), U.numpy(), V.numpy(), 0.5)
    with pytest.raises(CapabilityError, match="V must be a tensor"):
        dropout_sample(Y, U, V.long(), 0.5, torch.ones(2))
    for convert in (lambda t: t, lambda t: t.numpy()):
        with pytest.raises(CapabilityError, match=r"U is torch.float32 .* V is torch.float64 .* share precision"):
            equalize(convert(U), convert(V.double()))
    with pytest.raises(CapabilityError, match="share precision"):
        dropout_objective(Y.double(), U, V, 0.5)

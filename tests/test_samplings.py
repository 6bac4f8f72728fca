"""Laws: weights average to one, the gradient estimate is unbiased, expected smoothness bounds the second moment."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimand.functions import Zero
from minimand.operators import Dense
from minimand.solvers import Bernoulli, Importance, Nice, ProxSG
from minimand.solvers.sampling import Request, Sample

from .cases import problems, solvers

UNIFORM_OR_BY_COLUMNS = [sampling for sampling in solvers.SAMPLINGS if not sampling.uses_residual]


@pytest.mark.parametrize("shared", [False, True], ids=["per-row", "shared"])
@pytest.mark.parametrize("make", [problems.dense, problems.conv], ids=["dense", "conv"])
@pytest.mark.parametrize("sampling", solvers.SAMPLINGS, ids=str)
def test_the_gradient_estimate_is_unbiased(sampling, make, shared, generator):
    problem = make(Zero()).bounded(inputs=True)
    x = torch.randn(problem.shape, dtype=torch.float64)
    truth = problem.descent(x, problem.linear())
    solver = ProxSG(tau=1, sampling=sampling, shared_sample=shared)
    draws = []
    for _ in range(2000):
        sample = solver.draw(problem, x, generator)
        draws.append(problem.sampled_descent(x, sample))
    estimates = torch.stack(draws)
    error = (estimates.mean(0) - truth).abs()
    assert (error <= 5 * estimates.std(0) / len(draws) ** 0.5 + 1e-12).all()
    assert (estimates.std(0) > 0).any()


@given(n=st.integers(1, 20), data=st.data())
def test_nice_keeps_exactly_tau_in_every_row(n, data):
    tau = data.draw(st.integers(1, n))
    sample = Nice().draw(Request(tau, n, 6, torch.zeros(1)))
    assert (sample.weight.count_nonzero(-1) == tau).all()
    assert torch.allclose(sample.weight.sum(-1), torch.tensor(float(n)))
    together = Nice().draw(Request(tau, n, None, torch.zeros(1)))
    assert len(set(together.index.tolist())) == tau


def test_importance_draws_in_proportion(generator):
    scores = torch.tensor([1.0, 0.0, 3.0])
    sample = Importance().draw(Request(20_000, 3, None, torch.zeros(1), generator, scores))
    counts = torch.bincount(sample.index, minlength=3) / 20_000
    torch.testing.assert_close(counts, torch.tensor([0.25, 0.0, 0.75]), atol=0.02, rtol=0)


def test_importance_survives_rows_without_any_residual(generator):
    sample = Importance().draw(Request(2, 4, 3, torch.zeros(1), generator, torch.zeros(3, 4)))
    assert torch.isfinite(sample.weight).all()


def _second_moment(A, weights, chances):
    """E[(A W Aᵀ)²] by enumeration."""
    return sum(p * torch.linalg.matrix_power((A * w) @ A.T, 2) for w, p in zip(weights, chances, strict=True))


def _enumerate(sampling, size, n, A):
    if isinstance(sampling, Nice):
        subsets = list(itertools.combinations(range(n), size))
        weights = [torch.zeros(n).double().index_fill(0, torch.tensor(s), n / size) for s in subsets]
        return weights, [1 / len(subsets)] * len(subsets)
    if isinstance(sampling, Bernoulli):
        q = size / n
        flips = list(itertools.product([0.0, 1.0], repeat=n))
        return [torch.tensor(f).double() / q for f in flips], [q ** sum(f) * (1 - q) ** (n - sum(f)) for f in flips]
    p = A.square().sum(0) / A.square().sum()
    weights, chances = [], []
    for draws in itertools.product(range(n), repeat=size):
        w = torch.zeros(n).double()
        for i in draws:
            w[i] += 1 / (size * p[i])
        weights.append(w)
        chances.append(float(torch.stack([p[i] for i in draws]).prod()))
    return weights, chances


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("sampling", UNIFORM_OR_BY_COLUMNS, ids=str)
@given(seed=st.integers(0, 10_000))
def test_expected_smoothness_bounds_the_second_moment(sampling, size, seed):
    """E‖A(w⊙Aᵀd)‖² ≤ 𝓛‖Aᵀd‖² for all d, that is 𝓛·AAᵀ − E[(AWAᵀ)²] ⪰ 0 (Gower et al., 2018)."""
    n = 5
    A = torch.randn(4, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    bound = sampling.smoothness(Dense(A), size)
    moment = _second_moment(A, *_enumerate(sampling, size, n, A))
    lowest = torch.linalg.eigvalsh(bound * A @ A.T - moment)[0]
    assert lowest >= -1e-9 * bound**2
    assert bound >= torch.linalg.matrix_norm(A, 2) ** 2 * (1 - 1e-12)


def test_a_sample_of_everything_is_the_full_gradient():
    problem = problems.dense(Zero())
    x = torch.randn(problem.shape, dtype=torch.float64)
    everything = Sample(torch.arange(8), torch.ones(8, dtype=torch.float64))
    torch.testing.assert_close(
        problem.sampled_descent(x, everything), problem.descent(x, problem.linear()), atol=1e-12, rtol=0
    )

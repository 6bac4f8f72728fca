"""Laws: one step of a stochastic solver from zero is a block with dropout ([Bibi2019], Propositions 1, 2 and 6)."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from minimand.functions import L1, NonNegative, Zero, from_activation
from minimand.operators import Conv2d, Dense
from minimand.solvers import RCD, SVRG, Nice, Problem, ProxGD, ProxSG, solve
from minimand.solvers.sampling import Request

DTYPES = [torch.float32, torch.float64]


def _layer(dtype, rows=5, inputs=16, outputs=7):
    linear = torch.nn.Linear(inputs, outputs, dtype=dtype)
    return linear, torch.randn(rows, inputs, dtype=dtype)


def _mask(size, features, rows, like, seed):
    generator = torch.Generator().manual_seed(seed)
    return Nice().draw(Request(size, features, rows, like, generator))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", [torch.relu, torch.tanh, F.softplus, torch.sigmoid, F.leaky_relu])
def test_one_unit_step_is_the_plain_block_to_the_bit(act, dtype):
    linear, y = _layer(dtype)
    problem = Problem(Dense(linear.weight), from_activation(act), y, linear.bias)
    assert torch.equal(solve(problem, ProxGD(iters=1, step=1.0)).x, act(linear(y)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_unit_step_is_the_convolutional_block_to_the_bit(dtype):
    conv = torch.nn.Conv2d(3, 4, 3, stride=2, padding=1, dtype=dtype)
    y = torch.randn(2, 3, 8, 7, dtype=dtype)
    operator = Conv2d(conv.weight, (8, 7), stride=2, padding=1)
    for bias in (conv.bias, conv.bias[:, None, None]):
        problem = Problem(operator, NonNegative(), y, bias)
        assert torch.equal(solve(problem, ProxGD(iters=1, step=1.0)).x, torch.relu(conv(y)))


@pytest.mark.parametrize("dtype", DTYPES)
@given(tau=st.integers(1, 16), seed=st.integers(0, 1000))
def test_one_nice_step_is_dropout_linear_activation_to_the_bit(dtype, tau, seed):
    linear, y = _layer(dtype)
    mask = _mask(tau, 16, 5, y, seed).weight
    assert (mask.count_nonzero(dim=-1) == tau).all()
    problem = Problem(Dense(linear.weight), NonNegative(), y, linear.bias)
    x = solve(problem, ProxSG(iters=1, tau=tau, step=1.0), generator=torch.Generator().manual_seed(seed)).x
    assert torch.equal(x, torch.relu(linear(y * mask)))


def test_one_nice_step_drops_whole_channels():
    conv = torch.nn.Conv2d(6, 4, 3, padding=1)
    y = torch.randn(2, 6, 5, 5)
    mask = _mask(3, 6, 2, y, 7).weight[..., None, None]
    problem = Problem(Conv2d(conv.weight, (5, 5), padding=1), NonNegative(), y, conv.bias)
    x = solve(problem, ProxSG(iters=1, tau=0.5, step=1.0), generator=torch.Generator().manual_seed(7)).x
    assert torch.equal(x, torch.relu(conv(y * mask)))


@pytest.mark.parametrize("sampling", ["nice", "bernoulli", "importance"])
def test_a_shared_sample_is_the_same_mask_for_every_row(sampling):
    linear, y = _layer(torch.float64)
    y = y[:1].expand(4, -1)
    problem = Problem(Dense(linear.weight), Zero(), y, linear.bias)
    solver = ProxSG(iters=3, sampling=sampling, shared_sample=True)
    x = solve(problem, solver, generator=torch.Generator().manual_seed(0)).x
    torch.testing.assert_close(x, x[:1].expand(4, -1))


def test_svrg_first_inner_step_is_the_plain_block_without_noise():
    linear, y = _layer(torch.float64)
    problem = Problem(Dense(linear.weight), NonNegative(), y, linear.bias)
    assert torch.equal(solve(problem, SVRG(inner=1, step=1.0)).x, torch.relu(linear(y)))


def test_svrg_second_inner_step_is_additive_dropout():
    """In the input space, at unit step: act(A(y − w ⊙ Aᵀx) + b + x) ([Bibi2019], eq. 31)."""
    linear, y = _layer(torch.float64)
    problem = Problem(Dense(linear.weight), NonNegative(), y, linear.bias)
    weight = _mask(8, 16, 5, y, 3).weight
    first = torch.relu(linear(y))
    expected = torch.relu(linear(y - weight * (first @ linear.weight)) + first)
    x = solve(problem, SVRG(inner=2, step=1.0), generator=torch.Generator().manual_seed(3)).x
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("shared", [False, True])
def test_rcd_first_step_is_dropout_on_the_outputs_unscaled(shared):
    linear, y = _layer(torch.float64)
    problem = Problem(Dense(linear.weight), L1(0.1), y, linear.bias)
    sample = _mask(4, 7, None if shared else 5, y, 11)
    keep = (
        sample.weight > 0
        if sample.index is None
        else torch.zeros(7, dtype=torch.bool).index_fill(0, sample.index, True)
    )
    expected = F.softshrink(linear(y) * keep, 0.1)
    solver = RCD(iters=1, tau=4, step=1.0, shared_sample=shared)
    x = solve(problem, solver, generator=torch.Generator().manual_seed(11)).x
    torch.testing.assert_close(x, expected)


def test_rcd_moves_only_the_sampled_outputs():
    linear, y = _layer(torch.float64)
    problem = Problem(Dense(linear.weight), L1(0.1), y, linear.bias)
    x0 = torch.randn(5, 7, dtype=torch.float64)
    x = solve(problem, RCD(iters=1, tau=2), x0=x0).x
    assert ((x != x0).sum(-1) <= 2).all()
